from __future__ import annotations

import pytest

from carpool.batching.counters import DURATION_BOUNDS, ModelStats
from carpool.exchange.decision import Observation
from carpool.tuning.guards import FORGIVEN_AFTER, TIGHT, TIGHTER, TIGHTEST, Guards, SafetyMargin, late_of

GOOD = ModelStats(arrivals=200, hits=200)
BAD = ModelStats(arrivals=200, hits=150, misses={"late": 50})


# -- the margin


def test_each_step_of_the_margin_is_a_tenth_down_to_half():
    margin = SafetyMargin()
    seen = []
    for _ in range(20):
        margin.more(0.0)
        seen.append(margin.factor)
    assert seen[:2] == [TIGHTER, pytest.approx(TIGHTER**2)]
    assert seen[-1] == TIGHT


def test_a_step_asks_for_less_than_what_was_forecast_and_not_kept():
    margin = SafetyMargin()
    margin.more(0.0, 0.6)
    assert margin.factor == pytest.approx(TIGHTER * 0.6)
    for _ in range(6):
        margin.more(0.0, 0.4, 0.1)
    assert margin.factor == TIGHTEST
    assert not margin.more(0.0, 0.4, 0.1)
    assert not margin.more(0.0)
    assert margin.factor == TIGHTEST, "nothing is taken back where there is less to gain"
    for now in range(5):
        margin.less(600.0 + now)
    assert margin.factor == pytest.approx(TIGHTER * 0.6), "one step at a time, however long it was"
    margin.less(1200.0)
    assert margin.factor == 1.0
    assert not margin.is_over(1e9)


def test_no_more_is_asked_for_than_is_kept_without_a_wait():
    margin = SafetyMargin()
    assert margin.more(0.0, 0.4, 0.45)
    assert margin.factor == 0.45
    assert not margin.more(0.0, 0.4, 0.45)


def test_after_five_calm_minutes_a_step_is_taken_back():
    margin = SafetyMargin()
    margin.more(100.0)
    assert not margin.is_over(100.0 + FORGIVEN_AFTER - 1)
    assert margin.is_over(100.0 + FORGIVEN_AFTER)
    margin.less(400.0)
    assert margin.factor == 1.0
    assert not margin.is_over(1e9), "there is none left"


def test_a_step_taken_back_too_soon_doubles_the_time():
    margin = SafetyMargin()
    margin.more(0.0)
    margin.less(FORGIVEN_AFTER)
    margin.more(FORGIVEN_AFTER + 10)
    assert not margin.is_over(2 * FORGIVEN_AFTER + 20)
    assert margin.is_over(3 * FORGIVEN_AFTER + 10)
    margin = SafetyMargin()
    margin.more(0.0)
    assert margin.factor == TIGHTER
    assert margin.is_over(FORGIVEN_AFTER)


# -- misses


def test_failures_and_cancellations_are_not_late():
    misses = {"late": 1, "expired": 2, "queue-full": 4, "predicted-late": 8, "failed": 16, "cancelled": 32}
    assert late_of(ModelStats(misses=misses)) == 1 + 2 + 4 + 8


def test_clear_misses_are_noticed():
    guards = Guards(0.99)
    assert not any(guards.observe_misses(GOOD, 8) for _ in range(20))
    assert next(number for number in range(40) if guards.observe_misses(BAD, 8)) < 10


def test_as_many_misses_as_the_slo_allows_are_none():
    guards = Guards(0.99)
    allowed = ModelStats(arrivals=200, hits=198, misses={"late": 2})
    assert not any(guards.observe_misses(allowed, 8) for _ in range(200))


# -- the forecast


def checked(guards, start, count, durations, **more):
    changes = []
    for index in range(count):
        stats = ModelStats(arrivals=200, hits=200, durations=durations)
        observation = Observation(now=start + (index + 1) / 2, seconds=0.5, stats=stats)
        options = {"model_moved": False, "disturbed": False} | more
        changes.append(guards.check_forecast(observation, expected_p99=lambda: 0.02, **options))
    return changes


def slow():
    """Half a second of 200 answers that took many times as long."""
    durations = [0] * (len(DURATION_BOUNDS) + 1)
    durations[-2] = 200
    return durations


def test_answers_slower_than_forecast_are_an_alarm_until_the_model_moves():
    guards = Guards(0.99)
    assert not guards.check.alarm
    assert sum(checked(guards, 0.0, 30, slow())) == 1
    assert guards.check.alarm
    checked(guards, 15.0, 1, slow(), model_moved=True)
    assert not guards.check.alarm


def test_while_what_is_in_force_changes_nothing_is_compared():
    guards = Guards(0.99)
    assert not any(checked(guards, 0.0, 60, slow(), disturbed=True))
    assert not guards.check.alarm


def test_another_slo_ends_an_alarm():
    guards = Guards(0.99)
    checked(guards, 0.0, 30, slow())
    guards.follow(0.95, 15.0)
    assert not guards.check.alarm
