from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from bursts import Schedule
from examples import parameters, parameters_at
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.batching.batcher import Batcher
from carpool.batching.counters import CANCELLED, COLD, FAILED, LATE
from carpool.batching.requests import Estimate, Priority, Refused
from carpool.forecasting.forecast import Load, forecast
from carpool.learning.arrivals import Gamma, Poisson, until
from carpool.learning.latency_model import ServiceTime
from carpool.policy.spec import Admission
from carpool.simulation.outcome import ENDS, End, Setting
from carpool.simulation.simulator import Arrival, Device, Noise, Simulation, linear, table

GPU = Device(linear(0.005, 0.0005))
"""Batch latency 5 + 0.5 b ms."""
SLO = 0.05


def poisson(rate, seconds, seed=1):
    return until(Poisson(rate), seconds, Random(seed))


def simulate(arrivals, device=GPU, *, slo=SLO, **options):
    options.setdefault("estimate", device.estimate())
    return Simulation(arrivals, device, slo=slo, **options).run()


def ends_of(outcome):
    return [ENDS[code] for code in outcome.ends]


# --------------------------------------------------------------------------------------------- against closed forms


@pytest.mark.parametrize(("cv", "utilization"), [(0.0, 0.5), (0.0, 0.7), (0.5, 0.5), (1.0, 0.5)])
def test_one_server_waits_as_pollaczek_and_khinchine_say(cv, utilization):
    # M/G/1: W = rho t (1 + cv^2) / (2 (1 - rho)), with the rate that the seed really gave.
    times = poisson(utilization / 0.005, 800)
    outcome = simulate(times, Device(linear(0.005, 0.0), cv=cv), parameters=parameters(1), slo=9.0)
    rho = len(times) / 800 * 0.005
    wait = sum(outcome.latencies) / len(times) - sum(outcome.batch_busy) / len(times)
    assert wait == pytest.approx(rho * 0.005 * (1 + cv**2) / (2 * (1 - rho)), rel=0.03)


def test_several_servers_wait_as_erlang_says():
    # M/M/3: gamma noise of CV 1 is exponential. Wait = C(3, a) t / (3 - a).
    device = Device(linear(0.01, 0.0), executors=3, cv=1.0)
    times = poisson(210, 400)
    outcome = simulate(times, device, parameters=parameters(1, flights=3), slo=9.0)
    load = len(times) / 400 * 0.01
    tail = load**3 / 6 * 3 / (3 - load)
    waits = tail / (1 + load + load**2 / 2 + tail)
    counted = outcome.final[0].models[""]
    assert counted.queue_seconds / counted.dispatched == pytest.approx(waits * 0.01 / (3 - load), rel=0.05)


def test_lognormal_noise_has_the_mean_and_spread_asked_for():
    device = Device(linear(0.01, 0.0), cv=0.4, noise=Noise.LOGNORMAL)
    outcome = simulate([float(second) for second in range(20_000)], device, parameters=parameters(1))
    mean = sum(outcome.latencies) / 20_000
    variance = sum((latency - mean) ** 2 for latency in outcome.latencies) / 20_000
    assert mean == pytest.approx(0.01, rel=0.01)
    assert math.sqrt(variance) / mean == pytest.approx(0.4, rel=0.03)


def test_littles_law_holds_for_what_a_hook_sees():
    # Number in the system, sampled from outside, against rate times latency.
    times, inside = poisson(900, 60), []

    def look(now, stats):
        counted = stats[0].models[""]
        inside.append(counted.arrivals - counted.served)

    outcome = Simulation(times, GPU, slo=SLO, parameters=parameters(32)).every(0.0137, look).run()
    assert set(ends_of(outcome)) <= {End.HIT, End.LATE}
    assert sum(inside) / len(inside) == pytest.approx(len(times) / 60 * sum(outcome.latencies) / len(times), rel=0.03)


def test_a_constant_load_is_served_as_arithmetic_says():
    # One every 10 ms, each alone for 5.5 ms: latency and device time are t(1), utilization 0.55.
    outcome = simulate([index * 0.01 for index in range(1, 1001)], parameters=parameters(8))
    assert list(outcome.latencies) == pytest.approx([0.0055] * 1000)
    assert outcome.summary().device_time == pytest.approx(0.0055)
    assert outcome.final[0].device_busy == pytest.approx(5.5)


def test_a_hold_fills_the_batch():
    # 8 rows 1 ms apart, a wait of 20 ms: the 8th comes 7 ms after the first and the batch leaves full.
    outcome = simulate([1 + index * 0.001 for index in range(8)], parameters=parameters(8, 0.02))
    assert list(outcome.batch_rows) == [8]
    assert outcome.latencies[0] == pytest.approx(0.007 + 0.009)
    assert outcome.latencies[7] == pytest.approx(0.009)


def test_a_hold_ends_with_its_wait():
    outcome = simulate([1.0, 1.001], parameters=parameters(8, 0.02))
    assert list(outcome.latencies) == pytest.approx([0.026, 0.025])


@pytest.mark.parametrize("executors", [1, 4])
@pytest.mark.parametrize("rate", [100, 400, 900])
@pytest.mark.parametrize("process", [Poisson(1.0), Gamma(1.0, 2.0)])
def test_the_batch_recursion_forecasts_what_the_batcher_does(process, rate, executors):
    device = Device(GPU.times, executors=executors)
    service = ServiceTime.measured({rows: device.times(rows, 0) for rows in range(1, 65)}, executors=executors)
    times = until(replace(process, rate=float(rate * executors)), 10 / executors, Random(3))
    for chosen in (parameters(32), parameters(32, 0.01), parameters(64, 0.012, executors), parameters(64, 0.0, 4)):
        if rate * executors > 1000 and chosen.max_in_flight == 1:
            continue  # overloaded: the queue's bound decides, which a forecast does not know
        expected = forecast(Load(times), service, chosen, SLO)
        found = simulate(times, device, parameters=chosen).summary()
        assert found.p99 == pytest.approx(expected.p99, rel=0.02)
        assert found.device_time == pytest.approx(expected.device_time, rel=0.01)
        assert found.mean_batch == pytest.approx(expected.mean_batch, rel=0.01)
        assert found.miss_fraction == pytest.approx(expected.miss_fraction, abs=0.002)


@pytest.mark.parametrize("chosen", [parameters(8), parameters(32, 0.01), parameters(32, 0.02, 4)])
def test_the_batch_recursion_forecasts_what_shedding_leaves(chosen):
    service = ServiceTime.measured({rows: GPU.times(rows, 0) for rows in range(1, 65)})
    times = poisson(2500, 10)
    found = simulate(times, parameters=chosen, shed_slo=True).summary()
    assert found.goodput == pytest.approx(forecast(Load(times), service, chosen, SLO, shed=True).goodput, rel=0.03)


# ------------------------------------------------------------------------------------------------ facts of the design


def test_at_twice_the_capacity_shedding_by_the_slo_preserves_the_goodput():
    # Capacity at 64 rows: 64 / 37 ms = 1,730/s. Shedding at the 10 s timeout alone leaves next to nothing.
    times = poisson(3460, 20)
    shed = simulate(times, parameters=parameters(64), shed_slo=True)
    late = simulate(times, parameters=parameters(64))
    assert shed.summary(2).goodput > 1550
    assert late.summary(2).goodput < 100
    assert End.SHED in shed.summary().misses


def test_at_mid_load_a_wait_of_20_ms_nearly_halves_the_device_time():
    times = poisson(300, 60)
    greedy = simulate(times, parameters=parameters(32)).summary()
    patient = simulate(times, parameters=parameters(32, 0.02)).summary()
    assert patient.device_time < 0.55 * greedy.device_time
    assert patient.miss_fraction <= 0.01
    assert patient.p99 < SLO


def test_slots_beyond_the_server_concurrency_only_queue_at_the_device():
    # Alone or behind one another, 1-row batches wait the same time: in the Batcher or at the device.
    times = poisson(120, 60)
    narrow = simulate(times, parameters=parameters(1))
    wide = simulate(times, parameters=parameters(1, flights=4))
    assert list(wide.latencies) == pytest.approx(list(narrow.latencies))


def test_device_time_is_shared_by_the_batches_in_flight_together():
    # Four slots on a serial device at 120 % of what it can: it never rests, and its time is counted once.
    times = poisson(400, 10)
    outcome = simulate(times, parameters=parameters(2, flights=4), slo=9.0)
    finished = max(time + latency for time, latency in zip(times, outcome.latencies, strict=True))
    assert outcome.summary().device_busy == pytest.approx(finished - times[0], rel=1e-3)
    assert outcome.summary().device_busy == pytest.approx(outcome.final[0].device_busy, rel=1e-9)


# ---------------------------------------------------------------------------------------------------- the device


def test_the_drift_of_a_device_doubles_the_batch_latency_at_the_given_time():
    device = Device(linear(0.005, 0.0005), drift=((5.0, 2.0), (8.0, 1.0)))
    outcome = simulate([float(second) + 0.5 for second in range(10)], device)
    assert list(outcome.latencies) == pytest.approx([0.0055] * 5 + [0.011] * 3 + [0.0055] * 2)


def test_t_is_what_it_is_when_the_batch_starts_not_when_it_is_sent():
    device = Device(linear(0.01, 0.0), drift=((1.005, 2.0),))
    outcome = simulate([1.0, 1.0], device, parameters=parameters(1, flights=2))
    assert list(outcome.latencies) == pytest.approx([0.01, 0.03])


def test_the_first_batch_of_a_size_is_cold():
    outcome = simulate([1.0, 2.0, 3.0, 3.001, 3.001, 4.0], Device(linear(0.005, 0.0005), cold=3.0))
    assert outcome.latencies[0] == pytest.approx(0.0165)
    assert outcome.latencies[1] == pytest.approx(0.0055)
    assert outcome.latencies[4] == pytest.approx(0.0045 + 0.018)
    assert outcome.latencies[5] == pytest.approx(0.0055)


def test_a_table_goes_on_along_its_last_step():
    times = table((0.0, 0.001, 0.003))
    assert [times(rows, 0) for rows in (1, 2, 4)] == pytest.approx([0.001, 0.003, 0.007])


def test_length_buckets_have_their_own_latency_and_are_batched_separately():
    device = Device(lambda rows, bucket: rows * bucket / 1000)
    arrivals = [Arrival(1.0, length=9), Arrival(1.0, length=9), Arrival(1.0, length=30), Arrival(1.0, length=10)]
    outcome = simulate(arrivals, device, bucket=lambda length: 10 if length <= 10 else 40, slo=9.0, estimate=None)
    # The first leaves at once (10 ms); the two short ones are batched together (20 ms), the long one alone (40 ms).
    assert sorted(outcome.batch_rows) == [1, 1, 2]
    assert outcome.latencies[1] == outcome.latencies[3]
    assert outcome.final[0].models[""].cells == []
    assert outcome.final[0].models[""].cold == 3


def test_a_large_request_is_split_and_ends_once():
    outcome = simulate([Arrival(1.0, rows=20)], parameters=parameters(8))
    assert list(outcome.batch_rows) == [8, 8, 4]
    assert outcome.latencies[0] == pytest.approx(0.009 + 0.009 + 0.007)


def test_a_batch_above_the_memory_limit_is_halved_and_the_ceiling_lowered():
    device = Device(linear(0.005, 0.0005), largest=4)
    outcome = simulate(poisson(450, 5), device, parameters=parameters(32), slo=9.0)
    assert outcome.summary().misses == {}
    # Once the ceiling is learned, more is tried but seldom.
    assert 0 < Counter(rows > 4 for rows in outcome.batch_rows)[True] < 0.05 * len(outcome.batch_rows)


def test_who_is_poisoned_fails_alone():
    arrivals = [Arrival(1.0 + index * 0.01, poisoned=index == 100) for index in range(200)]
    crowd = [arrival._replace(time=1.0 + index // 8 * 0.012) for index, arrival in enumerate(arrivals)]
    outcome = simulate(crowd, parameters=parameters(8), slo=9.0)
    assert [index for index, end in enumerate(ends_of(outcome)) if end is End.FAILED] == [100]
    assert set(ends_of(outcome)) == {End.HIT, End.FAILED}
    assert outcome.final[0].models[""].bisections > 0


def test_a_short_answer_costs_nobody_an_answer():
    arrivals = [Arrival(1.0 + index // 8 * 0.012, short=index == 100) for index in range(200)]
    outcome = simulate(arrivals, parameters=parameters(8), slo=9.0)
    assert set(ends_of(outcome)) == {End.HIT}
    assert set(outcome.batch_rows[-20:]) == {1}, "the model is not batched any more"


def test_a_model_that_never_answers_delays_no_other():
    healthy = [Arrival(0.1 + index / 200) for index in range(2000)]
    hung = [Arrival(0.05 + index, hangs=True, model="other") for index in range(10)]
    before = simulate(healthy, parameters=parameters(8), slo=1.0)
    outcome = simulate(sorted(healthy + hung), parameters=parameters(8), slo=1.0)
    kept = [latency for latency, one in zip(outcome.latencies, sorted(healthy + hung), strict=True) if not one.hangs]
    assert kept == list(before.latencies)


def test_a_stalled_host_sees_everything_afterwards_while_the_device_computes_on():
    device = Device(linear(0.01, 0.0), stalls=((1.005, 0.5),))
    outcome = simulate([0.5, 1.0, 1.1, 2.0], device, parameters=parameters(8))
    # Dispatched before, answered at its end; arrived meanwhile, sent at its end; before and after, as ever.
    assert list(outcome.latencies) == pytest.approx([0.01, 0.505, 0.415, 0.01])
    assert ends_of(outcome) == [End.HIT, End.LATE, End.LATE, End.HIT]
    assert outcome.final[0].models[""].stalled == 1


# ---------------------------------------------------------------------------------------------------- callers


def test_a_caller_who_leaves_the_queue_is_served_no_more():
    arrivals = [Arrival(1.0), Arrival(1.001, patience=0.002), Arrival(1.001)]
    outcome = simulate(arrivals, parameters=parameters(8))
    assert ends_of(outcome) == [End.HIT, End.CANCELLED, End.HIT]
    assert list(outcome.batch_rows) == [1, 1]
    assert outcome.summary().miss_fraction == 0.0


def test_an_abandoned_batch_is_computed_to_its_end():
    arrivals = [Arrival(1.0, patience=0.001), Arrival(1.002)]
    outcome = simulate(arrivals, parameters=parameters(1))
    assert ends_of(outcome) == [End.CANCELLED, End.HIT]
    assert outcome.latencies[1] == pytest.approx(0.0055 - 0.002 + 0.0055)
    assert sum(outcome.batch_busy) == pytest.approx(0.011)


def test_a_deadline_expires():
    arrivals = [Arrival(1.0), Arrival(1.001, deadline=0.003), Arrival(1.001)]
    outcome = simulate(arrivals, parameters=parameters(8), estimate=None)
    assert ends_of(outcome) == [End.HIT, End.EXPIRED, End.HIT]


def test_a_full_queue_refuses_low_priority_first():
    arrivals = [Arrival(1.0)] * 9 + [Arrival(1.0, priority=Priority.LOW)] + [Arrival(1.0)] * 3
    outcome = simulate(arrivals, parameters=parameters(1), slo=9.0, admission=Admission(max_queued_rows=10))
    assert [index for index, end in enumerate(ends_of(outcome)) if end is End.QUEUE_FULL] == [9, 12]


# ---------------------------------------------------------------------------------------------------- the run


def test_equal_seeds_give_equal_runs():
    device = Device(linear(0.005, 0.0005), executors=2, cv=0.3)
    options = {"parameters": parameters(8, 0.005, 3), "replicas": 2}
    first, again, other = (simulate(poisson(500, 10), device, seed=seed, **options) for seed in (7, 7, 8))
    assert first.latencies == again.latencies
    assert first.ends == again.ends
    assert first.latencies != other.latencies


def test_the_kth_batch_has_the_same_noise_whatever_the_parameters():
    device = Device(linear(0.005, 0.0005), cv=0.3)

    def noise(chosen):
        outcome = simulate(poisson(400, 5), device, parameters=chosen, slo=9.0)
        pairs = zip(outcome.batch_busy, outcome.batch_rows, strict=True)
        return [busy / (0.005 + 0.0005 * rows) for busy, rows in pairs][:200]

    assert noise(parameters(32)) == pytest.approx(noise(parameters(8, 0.01)))


def test_replicas_serve_as_many_times_the_load():
    alone = simulate(poisson(1000, 20), parameters=parameters(32)).summary(1)
    three = simulate(poisson(3000, 20), parameters=parameters(32), replicas=3).summary(1)
    assert three.goodput == pytest.approx(3 * alone.goodput, rel=0.03)
    assert three.device_time == pytest.approx(alone.device_time, rel=0.1)


def test_a_hook_turns_the_parameters_while_it_runs():
    seen = []

    def turn(now, stats):
        seen.append((now, stats[0].models[""].arrivals if stats[0].models else 0))
        return [Setting(parameters(1 if now < 3 else 16), GPU.estimate())] if now != 2.0 else None

    times = poisson(300, 5)
    outcome = Simulation(times, GPU, slo=SLO, parameters=parameters(8)).every(1.0, turn).run()
    assert [now for now, _ in seen] == [1.0, 2.0, 3.0, 4.0]
    assert seen[0][1] == sum(time < 1.0 for time in times)
    assert [parameters_at(outcome, when).max_batch for when in (0.5, 1.5, 2.5, 3.5)] == [8, 1, 1, 16]
    within = [rows for at, rows in zip(outcome.batch_dispatched, outcome.batch_rows, strict=True) if 1 < at < 3]
    assert max(within) == 1
    assert max(outcome.batch_rows) > 8


def test_a_hook_may_turn_one_replica_alone():
    outcome = (
        Simulation(poisson(600, 4), GPU, slo=SLO, parameters=parameters(8), replicas=2)
        .every(1.5, lambda now, stats: [Setting(parameters(4)), Setting(parameters(16))])
        .run()
    )
    assert [parameters_at(outcome, 2.0, replica).max_batch for replica in (0, 1)] == [4, 16]


def test_a_shorter_wait_set_meanwhile_frees_who_is_held():
    outcome = (
        Simulation([1.0], GPU, slo=SLO, parameters=parameters(8, 0.03), estimate=GPU.estimate(), seconds=2.0)
        .every(1.01, lambda now, stats: [Setting(parameters(8), GPU.estimate())])
        .run()
    )
    assert outcome.latencies[0] == pytest.approx(0.0155)


def test_who_leaves_at_the_last_moment_is_in_time():
    # A wait of 100 ms is cut short where t(rows) is left of the SLO, whatever the last bit of the sum says.
    rng = Random(4)
    arrivals = [Arrival(index / 10 + rng.random() / 100, rows=1 + index % 40) for index in range(500)]
    outcome = simulate(arrivals, parameters=parameters(64, 0.1))
    assert list(outcome.latencies) == pytest.approx([SLO] * 500)
    assert outcome.summary().misses == {}
    crowd = simulate(poisson(1000, 20), parameters=parameters(64, 0.1))
    assert crowd.final[0].models[""].hits == crowd.summary().hits


def test_a_shorter_wait_moves_the_moment_of_who_is_held():
    outcome = (
        Simulation([1.0], GPU, slo=SLO, parameters=parameters(8, 0.03), estimate=GPU.estimate(), seconds=2.0)
        .every(1.01, lambda now, stats: [Setting(parameters(8, 0.02), GPU.estimate())])
        .run()
    )
    assert outcome.latencies[0] == pytest.approx(0.0255)


def test_the_balancer_knows_who_is_done():
    # One replica has 37 ms of work, so the other gets all that comes meanwhile.
    arrivals = [Arrival(1.0, rows=64), *(Arrival(1.001 + index * 0.006) for index in range(6))]
    outcome = simulate(arrivals, parameters=parameters(64), replicas=2)
    assert list(outcome.latencies) == pytest.approx([0.037] + [0.0055] * 6)


class OneByOne(Batcher):
    """A rule of its own: each request is a batch, whatever the parameters."""

    def configure(self, parameters, now, *, model=None):
        return super().configure(replace(parameters, max_batch=1), now, model=model)


@pytest.mark.pure
def test_another_rule_may_stand_in_for_the_batcher():
    made = []

    def dispatcher():
        made.append(OneByOne(parameters(1)))
        return made[-1]

    simulation = Simulation(poisson(150, 4), GPU, slo=SLO, parameters=parameters(32), dispatcher=dispatcher, replicas=2)
    outcome = simulation.every(1.0, lambda now, stats: [Setting(parameters(32))]).run()
    assert len(made) == 2
    assert set(outcome.batch_rows) == {1}
    assert sum(stats.models[""].served for stats in outcome.final) == len(outcome.times)


def test_a_replica_may_have_a_device_of_its_own():
    # One each at once: 5.5 ms where the device is as usual, 11 ms at the other one.
    slow = replace(GPU, times=linear(0.01, 0.001))
    outcome = Simulation([1.0, 1.0], [GPU, slow], slo=SLO, replicas=2).run()
    assert sorted(outcome.latencies) == pytest.approx([0.0055, 0.011])


def test_a_slow_pod_gets_fewer_requests_where_the_balancer_looks():
    slow = replace(GPU, times=linear(0.02, 0.002))
    outcome = Simulation(poisson(400, 10), [GPU, slow], slo=SLO, replicas=2).run()
    fast, lame = (stats.models[""].served for stats in outcome.final)
    assert fast > 1.5 * lame


def test_what_is_unknown_holds_nobody():
    outcome = simulate([1.0], parameters=parameters(8, 0.03), estimate=None)
    assert outcome.latencies[0] == pytest.approx(0.0055)


def test_windows_sum_to_the_whole():
    times = until(Schedule(((2.0, 300.0), (2.0, 1500.0))), 10.0, Random(3))
    outcome = simulate(times, parameters=parameters(16), shed_slo=True, seconds=10.0)
    whole, parts = outcome.summary(), [outcome.summary(at, at + 1.0) for at in range(10)]
    assert len(parts) == 10
    assert sum((Counter(part.ends) for part in parts), Counter()) == Counter(whole.ends)
    assert sum(part.batches for part in parts) == whole.batches
    assert sum(part.device_busy for part in parts) == pytest.approx(whole.device_busy)
    assert whole.p99 == sorted(outcome.latencies)[math.ceil(0.99 * whole.answers) - 1]
    assert parts[2].arrivals > 3 * parts[0].arrivals


def test_nothing_comes_of_nothing():
    summary = simulate([]).summary()
    assert (summary.arrivals, summary.miss_fraction, summary.goodput, summary.mean_batch, summary.p99) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert summary.device_time == math.inf


REASONS = {
    Refused.LATE: End.SHED,
    Refused.QUEUE_FULL: End.QUEUE_FULL,
    Refused.EXPIRED: End.EXPIRED,
    CANCELLED: End.CANCELLED,
    FAILED: End.FAILED,
}
seldom = st.integers(0, 9).map(lambda digit: digit == 0)
some = st.floats(0.001, 0.2)
arrival_lists = st.lists(
    st.builds(
        Arrival,
        time=st.floats(0.0, 0.5),
        rows=st.integers(1, 6),
        length=st.integers(0, 2),
        priority=st.sampled_from(list(Priority)),
        deadline=some | st.just(math.inf),
        patience=some | st.just(math.inf),
        poisoned=seldom,
        short=seldom,
        hangs=seldom,
        model=st.sampled_from(["", "other"]),
    ),
    max_size=60,
).map(lambda arrivals: sorted(arrivals, key=lambda arrival: arrival.time))
devices = st.builds(
    Device,
    times=st.just(linear(0.005, 0.001)),
    executors=st.integers(1, 3),
    cv=st.sampled_from([0.0, 0.5]),
    drift=st.sampled_from([(), ((0.2, 2.0),)]),
    cold=st.sampled_from([1.0, 5.0]),
    largest=st.none() | st.integers(1, 4),
    stalls=st.sampled_from([(), ((0.1, 0.05), (0.3, 0.1))]),
)


@pytest.mark.pure  # Hypothesis makes arrivals by their annotations; mypyc drops some
@settings(max_examples=150, deadline=None)
@given(
    arrivals=arrival_lists,
    device=devices,
    chosen=st.builds(parameters, st.integers(1, 8), st.sampled_from([0.0, 0.01, 0.04]), st.integers(1, 4)),
    replicas=st.integers(1, 3),
    knows=st.booleans(),
    shed_slo=st.booleans(),
)
def test_every_request_ends_once_and_the_counters_agree(arrivals, device, chosen, replicas, knows, shed_slo):
    outcome = Simulation(
        arrivals, device, slo=SLO, parameters=chosen, replicas=replicas, shed_slo=shed_slo,
        estimate=device.estimate() if knows else None, admission=Admission(max_queued_rows=40),
    ).run()  # fmt: skip
    ends = Counter(ends_of(outcome))
    assert End.PENDING not in ends
    counted = [each for stats in outcome.final for each in stats.models.values()]
    assert sum(each.arrivals for each in counted) == len(arrivals)
    assert sum(each.served for each in counted) == ends[End.HIT] + ends[End.LATE]
    misses = sum((Counter(each.misses) for each in counted), Counter())
    # Behind a cold batch the late and those refused for it are counted as one.
    cold = misses.pop(COLD, 0)
    assert device.cold > 1 or not cold
    assert misses[Refused.LATE] + misses[LATE] + cold == ends[End.SHED] + ends[End.LATE] or device.stalls
    for reason, end in REASONS.items():
        assert misses[reason] == ends[end] or (cold and reason == Refused.LATE)
    for latency, end, arrival in zip(outcome.latencies, ends_of(outcome), arrivals, strict=True):
        assert (latency < math.inf) == (end in {End.HIT, End.LATE})
        assert device.cv or latency > 0.005999
        if end in {End.HIT, End.LATE} and not device.stalls:
            assert latency <= min(arrival.patience, arrival.deadline) + 1e-9
    for end, arrival in zip(ends_of(outcome), arrivals, strict=True):
        alone = device.largest is not None and arrival.rows > device.largest
        assert end is not End.FAILED or arrival.poisoned or alone, "an innocent request failed"
    if not any(x.short for x in arrivals):  # a model that is not batched any more: requests are served whole
        assert all(0 < rows <= chosen.max_batch for rows in outcome.batch_rows)
    if not device.stalls:  # what the host slept through is late for the caller alone
        assert ends[End.LATE] - cold <= misses[LATE] <= ends[End.LATE]


def test_an_estimate_is_the_device_itself():
    estimate = Device(linear(0.005, 0.001), executors=4, cv=0.25).estimate(3)
    assert isinstance(estimate, Estimate)
    assert estimate.times[1:] == pytest.approx((0.006, 0.007, 0.008))
    assert estimate.upper[1] == pytest.approx(0.009)
    assert estimate.executors == 4


def test_in_overload_a_noisy_device_gives_the_seats_to_who_will_surely_be_in_time():
    # 1,524 rows/s in batches of 32, twice that asked for. By the mean alone half of a batch's first waiters are late:
    # 0.83 of the capacity is answered in time then, 0.92 with a standard deviation to spare, 0.94 with two.
    noisy = Device(times=linear(0.005, 0.0005), cv=0.4)
    outcome = Simulation(
        poisson(3_000, 20),
        noisy,
        slo=0.05,
        parameters=parameters(32),
        estimate=noisy.estimate(32),
        shed_slo=True,
    ).run()
    summary = outcome.summary(1)
    assert summary.goodput > 0.93 * 32 / 0.021
    assert summary.mean_batch > 30, "nobody is left behind who would have filled a batch"
