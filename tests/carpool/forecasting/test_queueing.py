from __future__ import annotations

import heapq
import math
from itertools import accumulate, pairwise
from random import Random

import pytest
from examples import parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.batching.requests import Estimate
from carpool.forecasting.queueing import (
    QUANTILES,
    Doubt,
    doubts,
    forecast,
    glance,
    near_saturation,
    stability,
    too_few_arrivals,
)
from carpool.learning.arrivals import Gamma, Poisson, first
from carpool.learning.concurrency import Sample as Measured
from carpool.learning.latency_model import ServiceTime, fit
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Admission
from carpool.simulation.simulator import Device, Simulation, table


def affine(rows):
    return 0.005 + 0.0005 * rows


SERVICE = ServiceTime.measured({rows: affine(rows) for rows in range(1, 65)})
SUPERLINEAR = ServiceTime.measured({rows: 0.002 * rows**1.3 for rows in range(1, 65)}, noise=0.1)
SLO = 0.05


def brute_force(arrivals, rows, service, p, slo, *, executors, shed=False, deadline=math.inf):
    """Serve requests event by event, as slowly and as plainly as can be; finish times, ``None`` where refused."""
    cap, events = p.max_batch, []
    for index, time in enumerate(arrivals):
        events.append((time, 1, index))
    heapq.heapify(events)
    queue, running, passing = [], [], p.pass_through  # queue: [index, rows left, limit]
    finish, busy_spans, sizes = {}, [], []
    parts_left = dict(enumerate(rows))

    def t(size):
        return service.time(size)

    def predicted_start(now):
        # Executors work through what is in flight in order.
        free = sorted(end for end, _ in running)
        return now if len(free) < executors else max(now, free[len(free) - executors])

    def settle(now):
        while True:
            if not queue or len(running) >= p.max_in_flight:
                return
            waiting = sum(left for _, left, _, _ in queue)
            if p.max_wait > 0 and not passing and waiting < cap:
                head = queue[0][0]
                leave = min(arrivals[head] + p.max_wait, arrivals[head] + min(slo, deadline) - service.slow(waiting))
                if now < leave:
                    heapq.heappush(events, (leave, 2, -1))
                    return
            start = predicted_start(now)
            batch = []
            while queue and sum(size for _, size in batch) < cap:
                entry = queue[0]
                index, left, limit, due = entry
                lasting = t(min(left if passing else waiting, cap))
                # Where others fill the batch, the seat is for who will surely be in time.
                others = sum(size for _, size in batch) + sum(rest for _, rest, _, _ in queue) - left
                slack = 1 + 2 * service.noise if others >= cap and not passing else 1.0
                if left == rows[index] and (start + lasting > limit or start + slack * lasting > due):
                    finish[index] = None
                    queue.pop(0)
                    continue
                room = cap - sum(size for _, size in batch)
                if rows[index] > cap:
                    left = min(left, room)
                elif left > room:
                    break
                batch.append((index, left))
                entry[1] -= left
                if entry[1] == 0:
                    queue.pop(0)
                if passing:
                    break
            if batch:
                size = sum(part for _, part in batch)
                end = start + t(size)
                running.append((end, batch))
                busy_spans.append((now, end))
                sizes.append(size)
                heapq.heappush(events, (end, 0, -1))

    while events:
        now, kind, index = heapq.heappop(events)
        if kind == 0:
            for done in [entry for entry in running if entry[0] <= now]:
                running.remove(done)
                for rider, part in done[1]:
                    parts_left[rider] -= part
                    if parts_left[rider] == 0:
                        finish[rider] = done[0]
        if kind == 1:
            limit, due, expected = math.inf, math.inf, 0.0
            if running:
                size = rows[index]
                alone = t(size) if size <= cap else math.ceil(size / (cap * executors)) * t(cap)
                limit = now + deadline
                if shed and alone <= slo:
                    limit = now + min(slo, deadline)
                    due = now + slo
                waiting = sum(left for _, left, _, _ in queue)
                if len(running) < p.max_in_flight:
                    company = size if passing else waiting + size
                    expected = t(min(company, cap))
                    if passing or size > cap:
                        expected = max(expected, alone)
                elif passing:
                    expected = alone
                    if queue:
                        expected += len(queue) * t(math.ceil(waiting / len(queue))) / executors
                else:
                    own = max(t(min(waiting % cap + size, cap)), alone if size > cap else 0.0)
                    if due < math.inf and waiting >= cap:
                        own *= 1 + 2 * service.noise
                    expected = (waiting // cap) * t(cap) / executors + own
            if limit < math.inf and predicted_start(now) + expected > limit:
                finish[index] = None
            else:
                queue.append([index, rows[index], limit, due])
                if passing and len(running) >= p.max_in_flight and len(queue) > p.max_in_flight:
                    passing = False
        settle(now)
    busy, until = 0.0, -math.inf
    for begin, end in busy_spans:
        busy += max(end - max(begin, until), 0.0)
        until = max(until, end)
    ends = [finish[index] for index in range(len(arrivals))]
    return [end if end and end - arrivals[i] <= deadline else None for i, end in enumerate(ends)], busy, sizes


def assert_same(arrivals, rows, service, p, slo, **options):
    got = forecast(arrivals, service, p, slo, rows=rows if set(rows) != {1} else None, **options)
    executors = min(options.pop("executors", None) or service.executors, p.max_in_flight)
    finishes, busy, sizes = brute_force(arrivals, rows, service, p, slo, executors=executors, **options)
    latencies = sorted(end - a for end, a in zip(finishes, arrivals, strict=True) if end is not None)
    assert got.shed_fraction == pytest.approx(1 - len(latencies) / len(arrivals))
    for quantile, value in zip(QUANTILES, (got.p50, got.p90, got.p95, got.p99, got.p999), strict=True):
        exact = latencies[max(math.ceil(quantile * len(latencies)) - 1, 0)] if latencies else math.inf
        assert value == pytest.approx(exact)
    hits = sum(x <= slo + 1e-12 for x in latencies)
    near = sum(abs(x - slo) < 1e-9 for x in latencies)
    assert abs(got.miss_fraction - (1 - hits / len(arrivals))) <= near / len(arrivals) + 1e-12
    assert got.mean_batch == pytest.approx(sum(sizes) / len(sizes) if sizes else 0.0)
    if latencies:
        assert got.device_time == pytest.approx(busy / len(latencies))


# -- the recursion


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_recursion_equals_an_event_simulation(data):
    rng = Random(data.draw(st.integers(0, 2**32)))
    rate = data.draw(st.floats(20, 4000))
    cv = data.draw(st.sampled_from([0.3, 1.0, 3.0]))
    arrivals = first(Gamma(rate, cv), data.draw(st.integers(1, 300)), rng)
    cap = data.draw(st.integers(1, 40))
    p = parameters(
        cap,
        data.draw(st.sampled_from([0.0, 0.0, 0.001, 0.005, 0.02, 0.045, 0.2])),
        data.draw(st.integers(1, 6)),
        passing=data.draw(st.sampled_from([False, False, True])),
    )
    sizes = data.draw(st.sampled_from([(1,), (1,), (1, 2, 3), (1, 5, 100)]))
    rows = [rng.choice(sizes) for _ in arrivals]
    service = {"affine": SERVICE, "superlinear": SUPERLINEAR}[data.draw(st.sampled_from(["affine", "superlinear"]))]
    service = replace(service, noise=data.draw(st.sampled_from([0.0, 0.3])))
    assert_same(
        arrivals,
        rows,
        service,
        p,
        data.draw(st.sampled_from([0.02, 0.05, 0.2])),
        executors=data.draw(st.integers(1, 6)),
        shed=data.draw(st.booleans()),
        deadline=data.draw(st.sampled_from([math.inf, math.inf, 0.03, 0.3])),
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_recursion_foretells_what_the_batcher_does(data):
    rng = Random(data.draw(st.integers(0, 2**32)))
    count = data.draw(st.integers(1, 300))
    # Gaps of a microsecond at least: who comes at the same instant is a matter of the driver's order.
    gaps = pairwise([0.0, *first(Gamma(data.draw(st.floats(20, 4000)), rng.choice([0.3, 1.0, 2.0])), count, rng)])
    arrivals = list(accumulate(max(b - a, 1e-6) for a, b in gaps))
    p = parameters(
        data.draw(st.integers(1, 40)),
        data.draw(st.sampled_from([0.0, 0.001, 0.005, 0.02, 0.045])),
        data.draw(st.integers(1, 6)),
        passing=data.draw(st.booleans()),
    )
    sizes = data.draw(st.sampled_from([(1,), (1, 2, 3), (1, 5, 60)]))
    rows = [rng.choice(sizes) for _ in arrivals]
    service = {"affine": SERVICE, "superlinear": SUPERLINEAR}[data.draw(st.sampled_from(["affine", "superlinear"]))]
    service = replace(service, noise=data.draw(st.sampled_from([0.0, 0.3])))
    target, executors, shed = data.draw(st.sampled_from([0.02, 0.05, 0.2])), data.draw(st.integers(1, 6)), rng.random()
    got = forecast(
        arrivals, service, p, target, executors=executors, shed=shed < 0.5, rows=rows if sizes != (1,) else None
    )
    times = service.table(64)
    twin = Simulation(
        [(time, size) for time, size in zip(arrivals, rows, strict=True)],
        Device(table(times), executors=executors),
        slo=target,
        parameters=p,
        estimate=Estimate(times, tuple(service.slow(size) for size in range(65)), executors, service.noise),
        shed_slo=shed < 0.5,
        admission=Admission(max_queued_rows=10**9, timeout=Duration(1e6)),
    ).run()
    latencies = sorted(latency for latency in twin.latencies if latency < math.inf)
    assert got.shed_fraction == pytest.approx(1 - len(latencies) / count)
    for quantile, value in zip(QUANTILES, (got.p50, got.p90, got.p95, got.p99, got.p999), strict=True):
        exact = latencies[max(math.ceil(quantile * len(latencies)) - 1, 0)] if latencies else math.inf
        assert value == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("wait", [0.0, 0.004, 0.02])
@pytest.mark.parametrize(("slots", "executors"), [(1, 1), (4, 1), (4, 4), (8, 3)])
@pytest.mark.parametrize(("rate", "shed"), [(1200.0, False), (1200.0, True), (6000.0, True)])
def test_what_is_quick_equals_what_is_thorough(wait, slots, executors, rate, shed):
    # With rows given, each arrival is walked through the queue; without, a batch, or all who meet the same, at once.
    arrivals = first(Poisson(rate), 5000, Random(1))
    p, noisy = parameters(32, wait, slots), replace(SERVICE, noise=0.3)
    quick = forecast(arrivals, noisy, p, SLO, executors=executors, shed=shed)
    thorough = forecast(arrivals, noisy, p, SLO, executors=executors, shed=shed, rows=[1] * 5000)
    assert quick.shed_fraction == thorough.shed_fraction
    assert quick.p99 == pytest.approx(thorough.p99)
    assert quick.device_time == pytest.approx(thorough.device_time)
    assert quick.miss_fraction == thorough.miss_fraction


def test_one_request_is_served_alone():
    got = forecast([3.0], SERVICE, parameters(), SLO)
    assert got.p50 == got.p999 == pytest.approx(affine(1))
    assert (got.miss_fraction, got.mean_batch, got.stable, got.requests) == (0.0, 1.0, True, 1)
    assert got.device_time == pytest.approx(affine(1))
    waited = forecast([3.0], SERVICE, parameters(wait=0.01), SLO)
    assert waited.p50 == pytest.approx(0.01 + affine(1))


def test_a_full_batch_does_not_wait():
    # The fourth fills the batch at 3 ms; the fifth waits its 20 ms alone.
    got = forecast([0.0, 0.001, 0.002, 0.003, 0.004], SERVICE, parameters(4, 0.02, 2), SLO, executors=2)
    assert got.p999 == pytest.approx(0.02 + affine(1))
    assert got.p50 == pytest.approx(0.002 + affine(4))


def test_nobody_waits_until_it_is_late():
    # W is longer than the SLO: the batch leaves at 50 ms less t(2), so that the oldest is just in time.
    got = forecast([0.0, 0.001], SERVICE, parameters(64, 0.2), SLO)
    assert got.p999 == pytest.approx(SLO)
    assert got.miss_fraction == 0
    # Noise is allowed for: it leaves earlier by two standard deviations.
    noisy = ServiceTime.measured({rows: affine(rows) for rows in range(1, 65)}, noise=0.5)
    assert forecast([0.0, 0.001], noisy, parameters(64, 0.2), SLO).p999 == pytest.approx(SLO - affine(2))


def test_slots_beyond_executors_only_queue():
    arrivals = [0.0, 0.001, 0.002, 0.003]
    serial = forecast(arrivals, SERVICE, parameters(1, 0.0, 4), SLO, executors=1)
    assert serial.p999 == pytest.approx(4 * affine(1) - 0.003)
    # Device time is shared: four batches of 5.5 ms in a row are 22 ms of wall time, not the sum of their latencies.
    assert serial.device_time == pytest.approx(affine(1))
    parallel = forecast(arrivals, SERVICE, parameters(1, 0.0, 4), SLO, executors=4)
    assert parallel.p999 == pytest.approx(affine(1))
    assert parallel.device_time == pytest.approx((0.003 + affine(1)) / 4)


def test_device_time_at_a_backlog_is_not_the_sum_of_latencies():
    # DESIGN 3: with 4 in flight on a serial device the sum reads 6.65 ms a request where the truth is a quarter.
    arrivals = first(Poisson(500.0), 20_000, Random(1))
    got = forecast(arrivals, SERVICE, parameters(4, 0.0, 4), SLO, executors=1)
    assert got.device_time == pytest.approx(0.0017, rel=0.2)


def test_passing_through_ends_when_more_wait_than_are_served():
    calm = first(Poisson(30.0), 500, Random(1))
    got = forecast(calm, SERVICE, parameters(32, 0.01, 4, passing=True), SLO, executors=4)
    assert got.mean_batch == 1
    assert got.p99 == pytest.approx(affine(1))
    busy = first(Poisson(1500.0), 2000, Random(1))
    got = forecast(busy, SERVICE, parameters(32, 0.01, 4, passing=True), SLO, executors=1)
    assert got.mean_batch > 5
    assert got.stable


def test_noise_draws_multiply_batches_in_turn():
    arrivals = [0.0, 1.0, 2.0, 3.0]
    got = forecast(arrivals, SERVICE, parameters(), SLO, noise_draws=(1.0, 2.0))
    assert got.p50 == pytest.approx(affine(1))
    assert got.p999 == pytest.approx(2 * affine(1))


def test_a_request_larger_than_the_cap_is_split():
    got = forecast([0.0], SERVICE, parameters(8), SLO, rows=[20])
    assert got.p50 == pytest.approx(2 * affine(8) + affine(4))
    assert got.mean_batch == pytest.approx(20 / 3)
    # The rest of a split request takes others along.
    got = forecast([0.0, 0.001], SERVICE, parameters(8), SLO, rows=[12, 3])
    assert got.p999 == pytest.approx(affine(8) + affine(7))


def test_overload_is_seen_and_shedding_keeps_goodput():
    # DESIGN 3.7: at twice the capacity of t = 5 + 0.5 b, SLO 50 ms.
    capacity = stability(1.0, SERVICE, 64).capacity
    assert capacity == pytest.approx(64 / 0.037)
    arrivals = first(Poisson(2 * capacity), 100_000, Random(1))
    patient = forecast(arrivals, SERVICE, parameters(), SLO, deadline=10.0)
    shedding = forecast(arrivals, SERVICE, parameters(), SLO, shed=True)
    assert not patient.stable
    assert not shedding.stable
    assert patient.goodput < 20
    assert shedding.goodput > 1560
    assert shedding.p999 <= SLO + 1e-9
    # What is refused is missed: shedding does not make an SLO look met.
    assert shedding.miss_fraction >= shedding.shed_fraction > 0.4


def test_a_wait_at_mid_load_halves_the_device_time():
    # DESIGN 1b: four slots on as many executors, a wait inside the SLO.
    arrivals = first(Poisson(400.0), 20_000, Random(1))
    greedy = forecast(arrivals, SERVICE, parameters(64, 0.0, 1), SLO)
    waiting = forecast(arrivals, SERVICE, parameters(64, 0.02, 1), SLO)
    assert waiting.miss_fraction <= 0.005
    assert waiting.device_time < 0.6 * greedy.device_time


def test_a_superlinear_model_is_best_served_alone():
    arrivals = first(Poisson(300.0), 10_000, Random(1))
    alone = forecast(arrivals, SUPERLINEAR, parameters(1), SLO)
    assert all(
        alone.device_time < forecast(arrivals, SUPERLINEAR, parameters(cap), SLO).device_time for cap in (2, 4, 8, 64)
    )


# -- stability


def test_a_backlog_is_served_in_full_batches():
    load = stability(1000.0, SERVICE, 16, executors=2)
    assert load.capacity == pytest.approx(2 * 16 / affine(16))
    assert load.utilization == pytest.approx(1000 / load.capacity)
    assert load.stable
    assert load.peak_rows == 16


def test_a_large_cap_can_make_a_superlinear_model_unstable():
    assert stability(300.0, SUPERLINEAR, 1).stable
    load = stability(300.0, SUPERLINEAR, 64)
    assert not load.stable
    assert load.peak_rows == 1
    assert load.peak == pytest.approx(500.0)


# -- doubts


def test_a_percentile_needs_ten_beyond_it():
    assert not too_few_arrivals(1000, 0.99)
    assert too_few_arrivals(999, 0.99)
    assert not too_few_arrivals(200, 0.95)


def test_saturation_needs_a_horizon():
    assert near_saturation(0.96, 1e9, 0.01)
    assert not near_saturation(0.9, 100.0, 0.01)
    assert near_saturation(0.9, 5.0, 0.01)


def test_every_doubt_is_named():
    thin = fit([Measured(4, 1, 3, 0.03, 0.0003)])
    arrivals = first(Poisson(900.0), 500, Random(1))
    worried = doubts(forecast(arrivals, thin, parameters(8), SLO), thin, 8)
    assert set(worried) == set(Doubt)
    calm = first(Poisson(100.0), 2000, Random(1))
    assert doubts(forecast(calm, SERVICE, parameters(8), SLO), SERVICE, 8, seconds=calm[-1]) == ()


def test_a_glance_tells_with_how_many_who_misses_does():
    service = ServiceTime.measured({1: 1.0})
    point = Parameters(max_batch=1, max_wait=Duration(0.0), max_in_flight=1)
    # Due within 1.5 s: of three at once two are late, one by itself is not, of two at once one is.
    arrivals = [0.0, 0.0, 0.0, 10.0, 20.0, 20.0]
    seen = glance(arrivals, service, point, 1.5)
    assert seen.miss_fraction == pytest.approx(3 / 6)
    assert seen.together == pytest.approx((2**2 + 1**2) / 3)
    assert glance(arrivals, service, point, 3.5).together == 1.0, "where nobody misses"


@pytest.mark.parametrize("cv", [1.0, 2.0])
def test_runs_of_late_batches_tell_how_much_chance_adds_to_misses(cv):
    service = ServiceTime.measured({1: 0.00194, 8: 0.00656, 32: 0.01184})
    point = Parameters(max_batch=16, max_wait=Duration(0.002), max_in_flight=1)
    rate = 1150.0 if cv == 1 else 800.0
    seen = [glance(first(Gamma(rate, cv), 4000, Random(seed)), service, point, 0.015) for seed in range(80)]
    misses = [4000 * one.miss_fraction for one in seen]
    mean = sum(misses) / len(misses)
    spread = sum((each - mean) ** 2 for each in misses) / (len(misses) - 1)
    together = sum(each * one.together for each, one in zip(misses, seen, strict=True)) / sum(misses)
    assert together > 3
    assert spread / mean == pytest.approx(together, rel=0.5)
