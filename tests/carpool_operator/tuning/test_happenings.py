from __future__ import annotations

import pytest
from fleets import spec

from carpool.exchange.decision import Decision, Reason
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_operator.tuning.happenings import RECOMMEND_AGAIN, Happenings
from carpool_operator.tuning.learning import Learned

FIRST, OTHER = (Parameters(max_batch=size, max_wait=Duration(0.01), max_in_flight=1) for size in (8, 16))


@pytest.fixture
def recommended():
    """Recommend parameters for a model at a time, in seconds; returns whether that is an event."""
    happenings = Happenings()
    learned = Learned(0.0, spec().policy(), None, Parameters(), met=None)

    def recommended(now, parameters, model="m"):
        decision = Decision(parameters, False, Reason.RECOMMEND_ONLY, "would be better")
        happenings.begin()
        happenings.recommend(now, model, learned, decision)
        noted = happenings.published(7, 7)
        assert [each.parameters for each in noted] == [parameters] * len(noted)
        return bool(noted)

    recommended.forget = happenings.forget
    return recommended


def test_a_recommendation_is_an_event_once_for_as_long_as_it_stands(recommended):
    assert [recommended(2.0 * number, FIRST) for number in range(100)] == [True] + [False] * 99


def test_another_recommendation_is_an_event_a_minute_after_the_last(recommended):
    assert recommended(0.0, FIRST)
    assert not recommended(RECOMMEND_AGAIN - 1, OTHER)
    assert recommended(RECOMMEND_AGAIN, OTHER)


def test_a_recommendation_that_returns_after_a_minute_is_an_event_again(recommended):
    assert recommended(0.0, FIRST)
    assert not recommended(RECOMMEND_AGAIN - 1, FIRST), "it was gone for less"
    assert recommended(2 * RECOMMEND_AGAIN - 1, FIRST)


def test_while_two_recommendations_alternate_neither_is_repeated(recommended):
    assert recommended(0.0, FIRST)
    assert not any(recommended(2.0 * number, (FIRST, OTHER)[number % 2]) for number in range(1, 30))


def test_a_model_that_was_forgotten_gets_its_event_again(recommended):
    assert recommended(0.0, FIRST)
    assert recommended(1.0, FIRST, "n")
    recommended.forget({"n"})
    assert recommended(2.0, FIRST)
    assert not recommended(2.0, FIRST, "n")
