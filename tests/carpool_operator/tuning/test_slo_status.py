from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from carpool_operator.tuning.slo_status import SloStatus


def observe(slo_status, intervals, missing, seed=1, size=200, start=0.0):
    rng = Random(seed)
    said = []
    for interval in range(intervals):
        misses = sum(rng.random() < missing for _ in range(size))
        slo_status.observe(start + 2.0 * interval, size - misses, misses)
        said.append(slo_status.met)
    return said


def test_a_few_requests_do_not_decide_whether_the_slo_is_met():
    slo_status = SloStatus(0.99)
    slo_status.observe(2.0, 20, 0)
    assert slo_status.met is None


def test_an_slo_is_met_or_missed():
    assert observe(SloStatus(0.99), 20, 0.001)[-1] is True
    assert observe(SloStatus(0.99), 20, 0.03)[-1] is False


def test_it_changes_its_mind_on_strong_evidence_only():
    slo_status = SloStatus(0.99, met=True)
    slo_status.observe(2.0, 195, 5)  # one bad second
    assert slo_status.met is True
    assert observe(slo_status, 20, 0.05, start=4.0)[-1] is False
    slo_status.observe(50.0, 100, 0)
    assert slo_status.met is False, "one good one"
    assert observe(slo_status, 20, 0.0, start=52.0)[-1] is False, "so soon"
    assert observe(slo_status, 150, 0.0, start=92.0)[-1] is True


def test_a_fleet_at_the_very_limit_does_not_flap():
    said = observe(SloStatus(0.99, met=True), 2000, 0.01)
    assert sum(one != other for one, other in pairwise(said)) < 8  # in 67 minutes


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.999])
def test_any_quantile(quantile):
    assert observe(SloStatus(quantile), 200, 0.0)[-1] is True
    assert observe(SloStatus(quantile), 200, min(4 * (1 - quantile), 0.9))[-1] is False
