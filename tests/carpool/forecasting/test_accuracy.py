"""Answers that differ from the forecast raise an alarm; chance, pauses and changes don't."""

from __future__ import annotations

from bisect import bisect_left
from random import Random

import pytest
from msgspec.structs import replace

from carpool.batching.counters import DURATION_BOUNDS, ModelStats
from carpool.exchange.decision import Reason
from carpool.forecasting.accuracy import HOLDS, LASTING, SETTLED_AFTER, ForecastCheck
from carpool.forecasting.refinement import Refinement
from carpool.learning.arrivals import Poisson, until
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import SLO, BatchingPolicy, Latency, Objective
from carpool.simulation.simulator import Device, Simulation, linear
from carpool.tuning.tuner import Tuner
from carpool_cli.planning.twin import Pilot

INTERVAL = 0.5
BOTH = Device(linear(0.004, 0.0005))


def latencies(rate, seconds, seed, wait=0.02):
    """Of a queue that is busy now and then: neighbours take about as long."""
    arrivals = until(Poisson(rate), seconds, Random(seed))
    point = Parameters(max_batch=8, max_wait=Duration(wait), max_in_flight=1)
    return Simulation(arrivals, BOTH, slo=0.1, parameters=point, estimate=BOTH.estimate(8)).run().latencies


def forecast():
    played = Refinement()
    for seed in range(8):
        found = latencies(400.0, 10.0, 100 + seed)
        played.add(found, 0.0, len(found))
    assert played.expected_p99
    return played.expected_p99


EXPECTED = forecast()


def counts(values):
    durations = [0] * (len(DURATION_BOUNDS) + 1)
    for value in values:
        durations[bisect_left(DURATION_BOUNDS, value)] += 1
    return durations


def watched(intervals, *, check=None, start=0.0, step=INTERVAL):
    """Show a check one interval's answers after the other; return it, and when what it says changed."""
    check = check or ForecastCheck()
    changes = []
    for index, values in enumerate(intervals):
        now = start + (index + 1) * step
        if check.observe(now, step, counts(values), lambda: EXPECTED):
            changes.append(now)
    return check, changes


def cut(values, size=200):
    """Half seconds of 400 requests/s."""
    return [values[first : first + size] for first in range(0, len(values), size)]


def test_what_was_forecast_raises_no_alarm():
    for seed in range(6):
        check, changes = watched(cut(latencies(400.0, 200.0, seed)))
        assert (check.alarm, changes) == ("", [])


@pytest.mark.parametrize("factor", [0.7, 1.1])
def test_a_tenth_more_or_a_third_less_is_none(factor):
    assert watched(cut([factor * each for each in latencies(400.0, 100.0, 1)]))[0].alarm == ""


@pytest.mark.parametrize("factor", [1.35, 2.0, 10.0])
def test_slower_answers_are_an_alarm_after_ten_seconds(factor):
    check, changes = watched(cut([factor * each for each in latencies(400.0, 20.0, 1)]))
    assert check.alarm
    assert "observed for" in check.alarm
    assert "forecast" in check.alarm
    assert LASTING <= changes[0] <= LASTING + SETTLED_AFTER + INTERVAL


def test_a_slow_tail_alone_is_one_too():
    rng = Random(2)
    values = [4 * each if rng.random() < 0.03 else each for each in latencies(400.0, 40.0, 1)]
    check, _ = watched(cut(values))
    assert check.alarm
    assert check.alarm.startswith("p99")


def test_what_the_sidecar_takes_itself_is_none():
    assert watched(cut([each + 0.0015 for each in latencies(400.0, 60.0, 1)]))[0].alarm == ""


def test_one_slow_second_is_none():
    intervals = cut(latencies(400.0, 60.0, 1))
    for at in range(10, len(intervals), 20):
        intervals[at] = [each + 0.5 for each in intervals[at]]
    assert watched(intervals)[0].alarm == ""


def test_a_change_begins_anew():
    check = ForecastCheck()
    slow = cut([3 * each for each in latencies(400.0, 100.0, 1)])
    for index, values in enumerate(slow):
        now = (index + 1) * INTERVAL
        if index % 15 == 0:
            check.changed(now)
        check.observe(now, INTERVAL, counts(values), lambda: EXPECTED)
    assert check.alarm == "", "never 10 s with the same parameters and load"


def test_few_answers_are_waited_for():
    slow = [[3 * each] for each in latencies(400.0, 1.0, 1)[:60]]
    assert watched(slow)[0].alarm == ""
    slow = [[3 * each] for each in latencies(400.0, 1.0, 1)[:150]]
    assert watched(slow)[0].alarm


def test_without_a_forecast_nothing_is_compared():
    check = ForecastCheck()
    for index in range(60):
        assert not check.observe(index * INTERVAL, INTERVAL, counts([1.0] * 50), lambda: None)
    assert check.alarm == ""


def test_an_alarm_lasts_a_minute_and_longer_if_it_comes_back():
    right = latencies(400.0, 10.0, 1)
    check, at, lasted = ForecastCheck(), 0.0, []
    for _ in range(3):
        check, changes = watched(cut([2 * each for each in right] * 3), check=check, start=at)
        began = changes[0]
        check, changes = watched(cut(right * 40), check=check, start=at + 30)
        assert check.alarm == ""
        lasted.append(changes[0] - began)
        at += 430
    assert HOLDS <= lasted[0] <= HOLDS + 2 * LASTING
    assert 2 * HOLDS <= lasted[1] <= 2 * HOLDS + 2 * LASTING
    assert 4 * HOLDS <= lasted[2] <= 4 * HOLDS + 2 * LASTING


def test_another_model_ends_it():
    check, _ = watched(cut([2 * each for each in latencies(400.0, 20.0, 1)]))
    check.forget(100.0)
    assert check.alarm == ""


# -- the tuner


class Distorted(Pilot):
    """Answers take longer than the upstream does: ``slower`` parts of the histogram, a factor of 1.19 each."""

    slower = 0

    def observe(self, now, stats):
        seen = [
            replace(each, models={name: self._later(model) for name, model in each.models.items()}) for each in stats
        ]
        return super().observe(now, seen)

    def _later(self, model: ModelStats):
        # Differences of two of these are right but for the first one after a change.
        moved = [0] * self.slower + model.durations
        kept = moved[: len(model.durations)]
        kept[-1] += sum(moved[len(model.durations) :])
        return replace(model, durations=kept)


def tuned(slower, seconds=90.0, slo=0.3, mode=None):
    policy = BatchingPolicy(objective=Objective.EFFICIENCY, slo=SLO(latency=Latency(p99=Duration(slo))))
    if mode is not None:
        policy = replace(policy, tuning=replace(policy.tuning, mode=mode))
    pilot = Distorted(Tuner(policy))
    pilot.slower = slower
    arrivals = until(Poisson(400.0), seconds, Random(4))
    Simulation(arrivals, BOTH, slo=slo, parameters=pilot.tuner.parameters).every(INTERVAL, pilot.observe).run()
    return pilot.decisions


def test_the_tuner_holds_nothing_and_explores_nothing_while_the_forecast_is_off():
    right = tuned(0)
    assert not any(each.alarm for each in right)
    assert right[-1].parameters.max_wait > 0
    decisions = tuned(3)
    (first, *_) = alarmed = [each for each in decisions if each.alarm]
    assert first.at < 60
    assert first.change
    assert first.reason is Reason.FORECAST_OFF
    assert {each.parameters.max_wait for each in alarmed} == {0.0}
    assert {each.reason for each in alarmed} == {Reason.FORECAST_OFF}
    assert not any(each.change for each in alarmed[1:])
    assert "forecast" in alarmed[-1].message


@pytest.mark.parametrize("says", [True, False])
def test_a_host_that_pauses_raises_no_alarm_where_it_says_so(says):
    # 100 ms in every half second: a fifth of its answers are later by up to as much.
    check, rng = ForecastCheck(), Random(3)
    for index, values in enumerate(cut(latencies(400.0, 60.0, 1))):
        now = (index + 1) * INTERVAL
        late = [each + rng.uniform(0.0, 0.1) if rng.random() < 0.2 else each for each in values]
        if says:
            check.paused(now)
        check.observe(now, INTERVAL, counts(late), lambda: EXPECTED)
    assert (check.alarm == "") is says


def test_pauses_are_left_out_and_what_is_between_them_counts():
    check = ForecastCheck()
    for index, values in enumerate(cut([2 * each for each in latencies(400.0, 60.0, 1)])):
        now = (index + 1) * INTERVAL
        if index % 8 == 0:
            check.paused(now)
        check.observe(now, INTERVAL, counts(values), lambda: EXPECTED)
    assert check.alarm
