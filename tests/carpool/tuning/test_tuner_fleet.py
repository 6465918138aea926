"""One tuner over several replicas, seldom observed, as an operator has it; and parameters that others put in force."""

from __future__ import annotations

from random import Random

import pytest

from carpool.batching.counters import ModelStats
from carpool.exchange.decision import Observation, Reason, State
from carpool.learning.arrivals import Poisson, until
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import (
    SLO,
    BatchingPolicy,
    Bounds,
    IntRange,
    Latency,
    Objective,
    PassThrough,
    PassThroughMode,
    Tuning,
    TuningMode,
)
from carpool.simulation.simulator import Device, linear
from carpool.tuning.guards import TIGHTER
from carpool.tuning.tuner import Tuner
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.twin import flips, tuned

GPU = Device(times=linear(0.005, 0.0005))
POLICY = BatchingPolicy(objective=Objective.EFFICIENCY, slo=SLO(latency=Latency(p99=Duration(0.05)))).validate()
SELDOM = [(1, 2.0), (1, 10.0), (4, 2.0), (8, 5.0)]
"""Replicas, and seconds between two observations."""


def poisson(rate, seconds, seed=1, start=0.0):
    return [start + time for time in until(Poisson(rate), seconds, Random(seed))]


@pytest.mark.parametrize(("replicas", "interval"), SELDOM)
def test_a_fleet_that_is_seldom_observed_is_tuned_like_one_that_is_always(replicas, interval):
    outcome, decisions = tuned(poisson(600 * replicas, 60), GPU, POLICY, replicas=replicas, interval=interval)
    last = decisions[-1]
    assert last.rate == pytest.approx(600, rel=0.05), "of one replica"
    assert last.parameters.max_wait == 0.025
    assert outcome.summary(30.0).miss_fraction < 0.005
    assert outcome.summary(30.0).device_time == pytest.approx(0.00082, rel=0.03)
    assert [decision.change for decision in decisions].count(True) <= 2
    assert flips(decisions) == 0


@pytest.mark.parametrize(("replicas", "interval"), SELDOM)
def test_a_doubled_load_is_believed_as_soon_as_an_interval_is_all_of_it(replicas, interval):
    times = poisson(400 * replicas, 60) + poisson(800 * replicas, 40, seed=2, start=60.0)
    outcome, decisions = tuned(times, GPU, POLICY, replicas=replicas, interval=interval)
    when = next(decision.at for decision in decisions if decision.rate > 700)
    assert when <= 60.0 + 2 * interval
    assert outcome.summary(60.0 + 3 * interval).miss_fraction < 0.01
    steady = {decision.rate for decision in decisions if 35.0 < decision.at <= 60.0}
    assert len(steady) == 1, "a steady load is left alone"


@pytest.mark.parametrize(("replicas", "interval"), SELDOM)
def test_no_traffic_is_reported_after_half_a_minute_of_the_clock(replicas, interval):
    tuner = Tuner(POLICY)
    silent = ModelStats(windows=round(interval * replicas / 0.1))
    decisions = [
        tuner.step(Observation(now=(step + 1) * interval, seconds=interval * replicas, stats=silent, replicas=replicas))
        for step in range(round(60 / interval))
    ]
    told = next(decision.at for decision in decisions if decision.reason is Reason.NO_TRAFFIC)
    assert 30.0 < told <= 30.0 + 2 * interval


@pytest.mark.parametrize(("replicas", "interval"), SELDOM)
def test_a_device_grown_slow_is_noticed_within_four_observations(replicas, interval):
    device = Device(times=linear(0.005, 0.0005), drift=((40.0, 2.0),))
    outcome, decisions = tuned(poisson(300 * replicas, 120), device, POLICY, replicas=replicas, interval=interval)
    believed = next(decision.at for decision in decisions if decision.estimate and decision.estimate.times[8] > 0.016)
    assert believed <= 40.0 + 4 * interval
    assert outcome.summary(90.0).miss_fraction < 0.01


def test_misses_that_no_forecast_explains_are_noticed_in_two_seldom_observations():
    # The batch latency does not contain what the late 4 % waited for.
    late = ModelStats(
        arrivals=4000, arrivals_squared=45_000, windows=400, rows=4000, hits=3840, misses={"late": 160},
        cells=[(0, 8, 1, 0, 500, 4.5, 0.0405)],
    )  # fmt: skip
    tuner = Tuner(POLICY, parameters=Parameters(max_batch=16, max_wait=Duration(0.02)))
    decisions = [
        tuner.step(Observation(now=10.0 * (step + 1), seconds=40.0, stats=late, replicas=4)) for step in range(4)
    ]
    assert decisions[-1].state is State.ROLLED_BACK
    assert len(tuner._guards.margin._before) == 1, "one step"
    assert tuner._guards.margin.factor < TIGHTER


def test_replicas_forget_by_the_clock_and_not_by_their_seconds():
    one, four = Tuner(POLICY), Tuner(POLICY)
    for step in range(120):
        arrivals = 100 if step < 60 else 104
        for tuner, replicas in ((one, 1), (four, 4)):
            stats = ModelStats(
                arrivals=arrivals * replicas, arrivals_squared=2_100 * replicas, windows=5 * replicas,
                rows=arrivals * replicas, hits=arrivals * replicas, cells=[(0, 2, 1, 0, 40, 0.24, 0.00144)],
            )  # fmt: skip
            tuner.step(Observation(now=(step + 1) / 2, seconds=0.5 * replicas, stats=stats, replicas=replicas))
    # Four replicas show more exactly than one that the rate is 208 now.
    assert abs(four.belief.load.rate - 208) < abs(one.belief.load.rate - 208) < 0.03 * 208
    assert len(four.belief.load._intervals) == len(one.belief.load._intervals)
    assert sum(each.lasted for each in four.belief.load._intervals) == pytest.approx(30.0)


# -- parameters that others put in force


def measured(rate=600, seconds=0.5):
    arrivals = round(rate * seconds)
    windows = round(seconds / 0.1)
    each = arrivals / windows
    return ModelStats(
        arrivals=arrivals, arrivals_squared=round(windows * (each * each + each)), windows=windows, rows=arrivals,
        hits=arrivals, cells=[(0, rows, 1, 0, 12, 12 * t, 12 * t * t) for rows, t in ((4, 0.007), (8, 0.009))],
    )  # fmt: skip


def observe(tuner, steps, start=0):
    return [tuner.step(Observation(now=(start + step + 1) / 2, seconds=0.5, stats=measured())) for step in range(steps)]


def test_what_was_taken_back_is_not_tried_again_at_this_load_and_forecasts_become_careful():
    never = PassThrough(mode=PassThroughMode.NEVER)
    tuner = Tuner(
        BatchingPolicy(objective=Objective.EFFICIENCY, slo=SLO(latency=Latency(p99=Duration(0.05))), pass_through=never)
    )
    before = tuner.parameters
    observe(tuner, 60)
    rejected = tuner.parameters
    assert rejected != before
    tuner.rejected(rejected, before)
    assert tuner.parameters == before
    decisions = observe(tuner, 120, start=60)
    assert rejected not in {decision.parameters for decision in decisions}
    changes = [decision for decision in decisions if decision.change]
    assert changes[0].at > 30.0
    # It goes where it is kept with a tenth to spare.
    assert changes[-1].predicted.p99 <= 0.05 * TIGHTER


def test_rejecting_the_same_parameters_repeatedly_tightens_the_margin_once():
    tuner = Tuner(POLICY)
    observe(tuner, 40)
    bad = Parameters(max_batch=64, max_wait=Duration(0.024))
    for _ in range(3):
        tuner.rejected(bad, POLICY.baseline)
    assert bad in tuner._left
    assert len(tuner._guards.margin._before) == 1, "one step"
    assert tuner._guards.margin.factor < TIGHTER


def test_an_exploration_that_failed_says_nothing_against_forecasts_that_saw_it_coming():
    tuner = Tuner(POLICY)
    observe(tuner, 40)
    too_small = Parameters(max_batch=1)
    assert not tuner.plan.assess(too_small).holds_now
    tuner.rejected(too_small, POLICY.baseline)
    assert too_small in tuner._left
    assert tuner._guards.margin.factor == 1


def test_what_is_held_follows_what_is_in_force():
    tuner = Tuner(
        BatchingPolicy(objective=Objective.EFFICIENCY, slo=POLICY.slo, tuning=Tuning(mode=TuningMode.HOLD)),
        parameters=Parameters(max_batch=8),
    )
    first = observe(tuner, 10)[-1]
    tuner.adopt(Parameters(max_batch=16, max_wait=Duration(0.01)))
    second = observe(tuner, 2, start=10)[-1]
    assert (first.parameters.max_batch, second.parameters.max_batch) == (8, 16)
    assert second.predicted.p99 > first.predicted.p99
    assert second.estimate is not None, "t(b) stays known"


def test_a_step_that_was_not_taken_leaves_the_choice_as_it_is_and_one_that_failed_does_not():
    one_at_a_time = Bounds(max_in_flight=IntRange(max=1))  # so that there is nothing to explore
    tuner = Tuner(BatchingPolicy(slo=SLO(latency=Latency(p99=Duration(0.05))), bounds=one_at_a_time))
    before = tuner.parameters
    (decision,) = observe(tuner, 1)
    assert decision.reason is Reason.LOWERS_UTILIZATION
    chosen = tuner.plan.choice

    tuner.adopt(before)
    assert tuner.plan.choice is chosen
    tuner.adopt(decision.parameters)
    tuner.rejected(decision.parameters, before)
    assert tuner.plan.choice is None


@pytest.mark.parametrize("target", [{"p50": 0.02}, {"p90": 0.03}, {"p95": 0.04}, {"p999": 0.08}])
def test_any_percentile_may_be_the_only_one_of_the_slo(target):
    latency = Latency(**{name: Duration(value) for name, value in target.items()})
    latency_policy = BatchingPolicy(objective=Objective.EFFICIENCY, slo=SLO(latency=latency))
    outcome, decisions = tuned(poisson(500, 40), GPU, latency_policy)
    assert Reason.MISSES_CONFIRMED not in {decision.reason for decision in decisions}
    quantile, _ = latency_policy.slo.percentiles[-1]
    assert outcome.summary(20.0).miss_fraction <= 1 - quantile


def test_what_exploration_may_cost_is_what_one_replica_might_have_missed_in_five_minutes():
    spared = []
    for replicas in (1, 4):
        tuner = Tuner(POLICY)
        for second in range(1, 400):
            n = 100 * replicas
            stats = ModelStats(
                arrivals=n, arrivals_squared=11 * n, windows=10 * replicas, rows=n,
                hits=n - (2 * replicas if second == 100 else 0), misses={"late": 2 * replicas if second == 100 else 0},
                cells=[(0, 1, 1, 0, n, n * 0.0055, n * 0.0055**2)],
            )  # fmt: skip
            more = {"replicas": replicas, "explorers": replicas}
            tuner.step(Observation(now=float(second), seconds=float(replicas), stats=stats, **more))
            if second == 200:
                spared.append(tuner._exploration.spare)
        spared.append(tuner._exploration.spare)
    assert spared == pytest.approx([198.0, 300.0] * 2, rel=0.02)


def test_an_exploration_that_somebody_else_ended_is_over():
    # Up to nine rows cost more and more. To leave a size while it is explored is no flip. Taken back, it is over.
    tuner = Tuner(for_p99(0.12, Objective.EFFICIENCY))
    known = (0.0063, 0.0063, 0.0072, 0.0091, 0.0111, 0.0134, 0.0157, 0.018, 0.0233)
    cells = [(0, rows, 1, 0, 8, 8 * seconds, 8 * seconds**2) for rows, seconds in enumerate(known, 1)]
    for step in range(60):
        before = tuner.parameters
        stats = ModelStats(arrivals=150, arrivals_squared=4_650, windows=5, rows=150, hits=150, cells=cells)
        decision = tuner.step(Observation(now=(step + 1) / 2, seconds=0.5, stats=stats))
        if decision.change and decision.reason is Reason.EXPLORES:
            break
    assert decision.reason is Reason.EXPLORES
    assert tuner._exploration.is_under_way
    tuner.adopt(before)
    assert not tuner._exploration.is_under_way


def test_an_exploration_that_is_taken_back_again_and_again_is_looked_for_more_and_more_seldom():
    # Filled by 33 of 64 rows, a batch never shows what 64 take: that is no reason to have it on canaries for ever.
    tuner = Tuner(for_p99(0.12, Objective.EFFICIENCY))
    known = (0.0063, 0.0063, 0.0072, 0.0091, 0.0111, 0.0134, 0.0157, 0.018, 0.0233)
    cells = [(0, rows, 1, 0, 8, 8 * seconds, 8 * seconds**2) for rows, seconds in enumerate(known, 1)]
    explored = []
    for step in range(240):
        before = tuner.parameters
        stats = ModelStats(arrivals=150, arrivals_squared=4_650, windows=5, rows=150, hits=150, cells=cells)
        decision = tuner.step(Observation(now=(step + 1) / 2, seconds=0.5, stats=stats))
        if decision.change and decision.reason is Reason.EXPLORES:
            explored.append((decision.parameters.max_batch, decision.parameters.max_in_flight))
            tuner.adopt(before)
    assert explored
    # In two minutes at 20, 40 and 80 s, and not each time that there is an observation.
    assert max(map(explored.count, explored)) <= 4
