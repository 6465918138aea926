"""The objective: latency is spent only where device time is scarce."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
from msgspec.structs import replace

from carpool.batching.batcher import Batcher
from carpool.batching.counters import ModelStats, Stats
from carpool.exchange.decision import Reason, State
from carpool.forecasting.forecaster import Forecaster, Situation
from carpool.learning.arrivals import Poisson, until
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.plain import PolicyError, from_plain
from carpool.policy.spec import BatchingPolicy, Objective, PassThrough, PassThroughMode, Tuning, TuningMode
from carpool.simulation.outcome import End
from carpool.simulation.simulator import Device, Simulation, linear
from carpool.tuning.objective import Aim, choose, passing
from carpool.tuning.tuner import INTERVAL, Tuner
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.twin import Pilot, flips, tuned

GPU = Device(linear(0.001, 0.0004))
SETTLED = 20.0


def poisson(rate, seconds=60.0, seed=2):
    return list(until(Poisson(rate), seconds, Random(seed)))


def first(policy):
    """Return a Batcher as a sidecar begins with it: nobody has decided on parameters."""
    limits = policy.limits()
    return Batcher(limits.clamp(policy.baseline), admission=policy.admission, undecided=limits.max_in_flight)


@cache
def run(rate, objective=Objective.BALANCED, slo=0.05, seconds=60.0, device=GPU, **changes):
    """Tune a load; return what it settled on, how it was served then, and the decisions."""
    policy = replace(for_p99(slo, objective), **changes).validate()
    outcome, decisions = tuned(
        poisson(rate, seconds), device, policy, seconds=seconds, dispatcher=lambda: first(policy)
    )
    return decisions[-1], outcome.summary(SETTLED, seconds), decisions


def utilization(summary, seconds=60.0):
    return summary.device_busy / (seconds - SETTLED)


def test_at_low_load_requests_pass_through_and_are_as_fast_as_direct():
    last, summary, _ = run(20)
    assert last.parameters.pass_through
    assert summary.p50 == pytest.approx(0.0014, rel=0.02)
    assert last.predicted.utilization == pytest.approx(20 * 0.0014, rel=0.15)


def test_efficiency_waits_where_balanced_does_not():
    _, balanced, _ = run(100)
    last, efficient, _ = run(100, Objective.EFFICIENCY)
    assert last.parameters.max_wait > 0
    assert efficient.p50 > 5 * balanced.p50
    assert efficient.device_time < 0.8 * balanced.device_time


def test_while_the_target_is_kept_nothing_is_held():
    last, summary, _ = run(400)
    assert last.parameters.max_wait == 0 or last.parameters.pass_through
    assert utilization(summary) < 0.6


@pytest.mark.parametrize("rate", [700, 1000, 1300])
def test_beyond_it_waits_keep_the_target(rate):
    last, summary, decisions = run(rate)
    assert last.parameters.max_wait > 0
    assert utilization(summary) <= 0.63
    assert flips(decisions) == 0
    assert summary.miss_fraction < 0.005


def more_in_flight(decisions):
    """Return the explorations of more batches in flight."""
    explored = [each for each in decisions if each.change and each.reason is Reason.EXPLORES]
    return [each.parameters.max_in_flight for each in explored if each.parameters.max_in_flight > 1]


def test_no_request_is_held_where_the_server_computes_several_at_once():
    # 1.9 requests are computed at a time. At server concurrency 1 the device would be full.
    device = Device(linear(0.020, 0.002), executors=4)
    last, _, decisions = run(87, slo=0.2, seconds=90.0, device=device)
    assert {each.parameters.max_wait for each in decisions if each.at > 1.0} == {0}
    assert last.parameters.max_in_flight >= 4


@pytest.mark.parametrize(("rate", "device"), [(700, GPU), (800, GPU), (800, Device(linear(0.005, 0.0005)))])
def test_where_one_batch_at_a_time_is_computed_no_more_are_tried(rate, device):
    last, summary, decisions = run(rate, device=device)
    assert len(more_in_flight(decisions)) <= 1
    assert last.state is State.STEADY
    assert last.parameters.max_in_flight == 1
    assert utilization(summary) <= 0.63


@pytest.mark.parametrize(("rate", "slo", "executors"), [(867, 0.2, 8), (867, 0.15, 8), (180, 0.15, 2), (400, 0.2, 4)])
def test_how_many_are_computed_at_once_is_known_from_the_first_calls(rate, slo, executors):
    last, summary, decisions = run(
        rate, slo=slo, seconds=90.0, device=Device(linear(0.020, 0.002), executors=executors)
    )
    assert last.estimate.executors - last.estimate.assumed == executors
    assert not more_in_flight(each for each in decisions if each.at > 5.0)
    assert summary.p50 < 0.05


@pytest.mark.parametrize(
    ("executors", "seen", "most", "flights"),
    [(1, 1, 16, 4), (4, 4, 16, 8), (4, 8, 16, 4), (8, 8, 16, 16), (8, 16, 16, 8), (8, 8, 12, 12), (1, 1, 2, 2)],
)
def test_twice_as_many_pass_until_it_is_known_how_many_are_computed(executors, seen, most, flights):
    service = replace(ServiceTime.measured({1: 0.01}), executors=executors, largest_in_flight=seen)
    limits = replace(for_p99(0.05).limits(), max_in_flight=most)
    assert passing(Parameters(), service, limits).max_in_flight == flights


def test_who_only_recommends_looks_for_nothing_to_explore():
    tuner = Tuner(replace(for_p99(0.05), tuning=Tuning(mode=TuningMode.RECOMMEND)))
    pilot = Pilot(tuner)
    Simulation(poisson(700, 10), GPU, slo=0.05, parameters=tuner.parameters).every(INTERVAL, pilot.observe).run()
    assert tuner.plan.choice.target.parameters.max_wait > 0
    assert tuner._exploration.candidate is None


def test_the_wait_rises_with_the_load():
    means = [run(rate)[1].p50 for rate in (20, 400, 700, 1000, 1300)]
    assert means == sorted(means)


def test_where_nothing_keeps_the_target_device_time_decides():
    balanced, _, _ = run(1700)
    efficient, _, _ = run(1700, Objective.EFFICIENCY)
    assert balanced.parameters.max_batch == efficient.parameters.max_batch
    assert balanced.predicted.utilization > 0.6


def test_objective_latency_never_waits_while_the_slo_is_met():
    last, summary, _ = run(700, Objective.LATENCY)
    _, balanced, _ = run(700)
    assert last.parameters.max_wait == 0
    assert summary.p99 < balanced.p99


def test_a_higher_target_waits_less():
    _, strict, _ = run(700)
    _, lax, _ = run(700, target_utilization_percent=80)
    assert lax.p50 < strict.p50
    assert 0.6 < utilization(lax) <= 0.83


def test_others_who_use_the_device_count():
    alone, _, _ = run(400)
    shared, _, _ = run(400, device_share_percent=50)
    assert alone.parameters.max_wait == 0
    assert shared.parameters.max_wait > 0
    assert shared.predicted.utilization == pytest.approx(0.6, abs=0.02)


def test_pass_through_can_be_forbidden():
    last, summary, _ = run(20, pass_through=PassThrough(mode=PassThroughMode.NEVER))
    assert not last.parameters.pass_through
    assert last.parameters.max_wait == 0
    assert summary.p50 == pytest.approx(0.0014, rel=0.02)


def test_after_a_rush_it_comes_back_to_pass_through():
    arrivals = poisson(1300, 40) + [40 + time for time in poisson(20, 60, seed=3)]
    _, decisions = tuned(arrivals, GPU, for_p99(0.05), seconds=100)
    assert decisions[-1].parameters.pass_through
    assert any(each.parameters.max_wait > 0 for each in decisions)


def test_decisions_say_utilization_target_and_what_another_objective_would_do():
    last, _, decisions = run(1000)
    assert last.target_utilization == 0.6
    assert last.predicted.utilization == pytest.approx(0.6, abs=0.03)
    assert last.predicted.p50 < last.predicted.mean * 1.5
    assert last.alternative.startswith("without a wait p50 would be ")
    assert "; Efficiency would free " in last.alternative
    changed = next(each for each in decisions if each.change and each.parameters.max_wait > 0)
    assert "target 60%" in changed.message
    efficient, _, _ = run(400, Objective.EFFICIENCY)
    assert efficient.alternative.startswith("without a wait p50 would be ")
    assert efficient.target_utilization == 0


def test_what_others_behind_the_same_sidecar_use_is_their_share_of_device_time():
    cell = (0, 8, 1, 0, 10)
    stats = Stats(10.0, 3.0, {"a": ModelStats(cells=[(*cell, 2.0, 0.4)]), "b": ModelStats(cells=[(*cell, 4.0, 1.6)])})
    assert stats.others("a") == pytest.approx((4.0, 2.0))
    assert stats.others("b") == pytest.approx((2.0, 1.0))
    assert stats.others("unknown") == pytest.approx((6.0, 3.0))
    assert Stats(10.0).others("a") == (0, 0)


def test_times_counted_for_a_supposed_concurrency_are_no_work():
    cells = [(0, 8, 2, 0, 10, 2.0, 0.4), (0, 8, 2, 1, 10, 1.0, 0.1)]
    stats = Stats(10.0, 3.0, {"a": ModelStats(cells=cells), "b": ModelStats(cells=[(0, 8, 1, 0, 10, 2.0, 0.4)])})
    assert stats.others("b") == pytest.approx((2.0, 1.5))


def test_utilization_counts_others_and_never_exceeds_the_whole():
    policy = replace(for_p99(0.05), device_share_percent=50)
    last, _, _ = run(1700)
    assert last.predicted.utilization <= 1
    assert Aim.of(policy).share == 0.5


# Two rows take 36 ms of an SLO of 43.5 ms, so that no request can wait for one batch and be in the next.
TIGHT = Device(linear(0.030, 0.003), executors=4)


def test_where_the_slo_leaves_no_time_for_a_backlog_a_short_wait_fills_batches():
    curve = ServiceTime.measured({rows: 0.030 + 0.003 * rows for rows in (1, 2, 3, 4)}, executors=4)
    limits = for_p99(0.0435).limits()
    forecaster = Forecaster(Situation(process=Poisson(70.0), service=curve, target=0.0435, budget=0.005, limits=limits))
    chosen = choose(forecaster, Aim(), Parameters(1, max_in_flight=4), PassThroughMode.NEVER).efficient
    unheld = forecaster.assess(replace(chosen.parameters, max_wait=Duration(0.0)))
    assert chosen.parameters.max_wait > 0
    assert chosen.glance.miss_fraction < unheld.glance.miss_fraction / 2


def test_it_is_found_though_the_line_says_that_two_rows_would_be_late():
    # Only size 1 is measured at first. By that, two take up to 50 ms: all that would share a batch are refused.
    outcome, decisions = tuned(until(Poisson(70.0), 60.0, Random(1)), TIGHT, for_p99(0.0435))
    summary = outcome.summary(30.0)
    assert summary.ends[End.HIT] > 0.98 * sum(summary.ends.values())
    assert decisions[-1].parameters.max_batch > 1
    assert decisions[-1].parameters.max_wait > 0


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("objective", "balanced", "objective"),
        ("targetUtilizationPercent", 0, "targetUtilizationPercent"),
        ("targetUtilizationPercent", 101, "targetUtilizationPercent"),
        ("deviceSharePercent", 0, "deviceSharePercent"),
    ],
)
def test_wrong_fields_are_named(field, value, says):
    with pytest.raises(PolicyError, match=says):
        from_plain({"slo": {"latency": {"p99": "50ms"}}, field: value}, BatchingPolicy, what="policy").validate()
