from __future__ import annotations

import pytest
from fleets import spec

from carpool_operator.tuning.evidence import Gathered
from carpool_operator.tuning.models import Models

POLICY = spec().policy()
PODS = ["a", "b", "c"]


def replaced(*pods):
    """Readings of three pods, of which these report that their model was replaced."""
    return Gathered([], {}, 3, True, [(pod, "resnet") for pod in pods], [])


@pytest.mark.parametrize("learn_anew", [lambda models: models.learn_replaced(replaced("b"), PODS), Models.learn_anew])
def test_reports_of_a_replaced_model_count_until_it_is_learned_anew(learn_anew):
    models = Models()
    learned = models.meet(0.0, POLICY, "resnet", None)
    models.learn_replaced(replaced("a"), PODS)
    first = learned.tuner
    learn_anew(models)
    second = learned.tuner
    assert second is not first
    models.learn_replaced(replaced("c"), PODS)
    assert learned.tuner is second


def test_reports_of_pods_that_are_gone_do_not_count():
    models = Models()
    learned = models.meet(0.0, POLICY, "resnet", None)
    tuner = learned.tuner
    models.learn_replaced(replaced("a"), PODS)
    models.learn_replaced(replaced("b"), ["b", "c"])
    assert learned.tuner is tuner
