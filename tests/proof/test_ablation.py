"""Every rule that `make ablation` leaves out is one that there is."""

from __future__ import annotations

import ablation
import pytest


@pytest.mark.parametrize("name", [*ablation.RULES])
def test_what_replaces_a_rule_replaces_something(name):
    rule = ablation.RULES[name]
    assert bool(rule.without) is (name != ablation.AS_IT_IS)
    for (owner, attribute), value in rule.without.items():
        assert getattr(owner, attribute) != value
