from __future__ import annotations

import math
from itertools import accumulate, pairwise
from random import Random

import pytest
from examples import parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from carpool.batching.requests import Estimate
from carpool.forecasting.forecast import Load, batches, forecast, glance
from carpool.learning.arrivals import Gamma, Poisson, first
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import PERCENTILES, Admission
from carpool.simulation.simulator import Device, Simulation, table


def affine(rows):
    return 0.005 + 0.0005 * rows


SERVICE = ServiceTime.measured({rows: affine(rows) for rows in range(1, 65)})
SUPERLINEAR = ServiceTime.measured({rows: 0.002 * rows**1.3 for rows in range(1, 65)}, noise=0.1)
SLO = 0.05


def played(arrivals, point, *, service=SERVICE, target=SLO, rows=1, draws=(1.0,), concurrency=1, **options):
    known = replace(service, executors=concurrency)
    return forecast(Load(arrivals, rows, draws=draws), known, point, target, **options)


# -- against the Batcher in the simulator


def spread(rng, rate, count):
    """Arrivals a microsecond apart at least: of two at the same instant, the order is a matter of the driver's."""
    gaps = pairwise([0.0, *first(Gamma(rate, rng.choice([0.3, 1.0, 2.0])), count, rng)])
    return list(accumulate(max(after - before, 1e-6) for before, after in gaps))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_recursion_foretells_what_the_batcher_does(data):
    rng = Random(data.draw(st.integers(0, 2**32)))
    arrivals = spread(rng, data.draw(st.floats(20, 4000)), data.draw(st.integers(1, 300)))
    p = parameters(
        data.draw(st.integers(1, 40)),
        data.draw(st.sampled_from([0.0, 0.001, 0.005, 0.02, 0.045, 0.2])),
        data.draw(st.integers(1, 6)),
        passing=data.draw(st.booleans()),
    )
    # Of requests alike, batches are played one after the other; of any others, the requests.
    sizes = data.draw(st.sampled_from([(1,), (1, 2, 3), (1, 5, 60)]))
    rows = [rng.choice(sizes) for _ in arrivals]
    service = {"affine": SERVICE, "superlinear": SUPERLINEAR}[data.draw(st.sampled_from(["affine", "superlinear"]))]
    service = replace(service, noise=data.draw(st.sampled_from([0.0, 0.3])))
    target, concurrency = data.draw(st.sampled_from([0.02, 0.05, 0.2])), data.draw(st.integers(1, 6))
    shed = data.draw(st.booleans())
    latencies: list[float] = []
    load = Load(arrivals, 1 if sizes == (1,) else rows)
    known = replace(service, executors=concurrency)
    got = forecast(load, known, p, target, shed=shed, latencies=latencies)
    times = service.table(64)
    twin = Simulation(
        [(time, size) for time, size in zip(arrivals, rows, strict=True)],
        Device(table(times), executors=concurrency),
        slo=target,
        parameters=p,
        estimate=Estimate(times, tuple(service.slow(size) for size in range(65)), concurrency, service.noise),
        shed_slo=shed,
        admission=Admission(max_queued_rows=10**9, timeout=Duration(1e6)),
    ).run()
    served = sorted(latency for latency in twin.latencies if latency < math.inf)
    assert sorted(latencies) == pytest.approx(served, abs=1e-9)
    if not shed:
        assert len(batches(load, known, p, target)) == len(twin.batch_rows)
    if served:
        truth = twin.summary()
        assert got.device_time == pytest.approx(truth.device_busy / len(served))
        assert got.mean_batch == pytest.approx(truth.rows / truth.batches)
        assert got.mean == pytest.approx(sum(served) / len(served))
        for quantile, value in zip(PERCENTILES, (got.p50, got.p90, got.p95, got.p99, got.p999), strict=True):
            assert value == pytest.approx(served[max(math.ceil(quantile * len(served)) - 1, 0)], abs=1e-9)
    near = sum(abs(each - target) < 1e-9 for each in served)
    assert abs(got.miss_fraction - truth_of_misses(twin, target)) <= (near + 0.5) / len(arrivals)


def truth_of_misses(twin, target):
    return sum(latency > target for latency in twin.latencies) / len(twin.latencies)


# -- what is foretold


def test_one_request_is_served_alone():
    got = played([3.0], parameters())
    assert got.p50 == got.p999 == got.mean == pytest.approx(affine(1))
    assert (got.miss_fraction, got.mean_batch, got.requests) == (0.0, 1.0, 1)
    assert got.device_time == pytest.approx(affine(1))
    assert got.utilization == pytest.approx(1.0)
    waited = played([3.0], parameters(wait=0.01))
    assert waited.p50 == pytest.approx(0.01 + affine(1))


def test_a_full_batch_does_not_wait():
    # The fourth fills the batch at 3 ms; the fifth waits its 20 ms alone.
    got = played([0.0, 0.001, 0.002, 0.003, 0.004], parameters(4, 0.02, 2), concurrency=2)
    assert got.p999 == pytest.approx(0.02 + affine(1))
    assert got.p50 == pytest.approx(0.002 + affine(4))


def test_no_request_waits_until_it_is_late():
    # W is longer than the SLO: the batch leaves at 50 ms less its own time, so that the oldest is just in time.
    got = played([0.0, 0.001], parameters(64, 0.2))
    assert got.p999 == pytest.approx(SLO)
    assert got.miss_fraction == 0
    # Noise is allowed for: it leaves earlier by two standard deviations.
    noisy = ServiceTime.measured({rows: affine(rows) for rows in range(1, 65)}, noise=0.5)
    assert played([0.0, 0.001], parameters(64, 0.2), service=noisy).p999 == pytest.approx(SLO - affine(2))


def test_a_margin_judges_answers_and_does_not_make_batches_leave_sooner():
    load = Load(arrivals=[0.0, 0.001])
    setting = parameters(64, 0.03)
    whole, cautious = (forecast(load, SERVICE, setting, SLO, margin=margin) for margin in (1.0, 0.5))
    assert whole.p999 == cautious.p999 == pytest.approx(0.03 + affine(2))
    assert (whole.miss_fraction, cautious.miss_fraction) == (0.0, 1.0)
    assert glance(load, SERVICE, setting, SLO, 0.5).miss_fraction == 1.0


def test_slots_beyond_the_concurrency_only_queue():
    arrivals = [0.0, 0.001, 0.002, 0.003]
    serial = played(arrivals, parameters(1, 0.0, 4), concurrency=1)
    assert serial.p999 == pytest.approx(4 * affine(1) - 0.003)
    # Device time is shared: four batches of 5.5 ms in a row are 22 ms of wall time, not the sum of their latencies.
    assert serial.device_time == pytest.approx(affine(1))
    parallel = played(arrivals, parameters(1, 0.0, 4), concurrency=4)
    assert parallel.p999 == pytest.approx(affine(1))
    assert parallel.device_time == pytest.approx((0.003 + affine(1)) / 4)


def test_utilization_is_the_share_of_what_can_be_computed_at_once():
    arrivals = [0.0, 0.0, 0.0, 0.0]
    assert played(arrivals, parameters(1, 0.0, 4), concurrency=4).utilization == pytest.approx(1.0)
    # Four at a time are sent, and eight would be computed: never more than are sent.
    assert played(arrivals, parameters(1, 0.0, 4), concurrency=8).utilization == pytest.approx(1.0)
    # Three batches of one row take 5.5 ms each, in 105.5 ms at server concurrency 2.
    got = played([0.0, 0.0, 0.1], parameters(2, 0.0, 2), concurrency=2)
    assert got.utilization == pytest.approx((affine(1) * 3) / (2 * (0.1 + affine(1))))


def test_device_time_at_a_backlog_is_not_the_sum_of_latencies():
    # With 4 in flight on a serial device the sum reads 6.65 ms a request where the truth is a quarter.
    arrivals = first(Poisson(500.0), 20_000, Random(1))
    got = played(arrivals, parameters(4, 0.0, 4), concurrency=1)
    assert got.device_time == pytest.approx(0.0017, rel=0.2)


def test_passing_through_ends_when_more_wait_than_are_served():
    calm = first(Poisson(30.0), 500, Random(1))
    got = played(calm, parameters(32, 0.01, 4, passing=True), concurrency=4)
    assert got.mean_batch == 1
    assert got.p99 == pytest.approx(affine(1))
    busy = first(Poisson(1500.0), 2000, Random(1))
    got = played(busy, parameters(32, 0.01, 4, passing=True), concurrency=1)
    assert got.mean_batch > 5


@pytest.mark.parametrize("rows", [1, [1] * 60])
def test_pass_through_is_back_once_a_backlog_is_gone(rows):
    # Of four at once two are sent and two wait, which is no backlog: merged they would be three batches.
    arrivals = [0.0] * 20 + [float(second) for second in range(1, 11) for _ in range(4)]
    point = parameters(32, 0.5, 2, passing=True)
    sizes = batches(Load(arrivals, rows), replace(SERVICE, executors=2), point, 1.0)
    assert sizes[:3] == [1, 1, 18]
    assert sizes[3:] == [1] * 40
    device = Device(table(SERVICE.table(64)), executors=2)
    assert [*Simulation(arrivals, device, slo=1.0, parameters=point).run().batch_rows] == sizes


def test_noise_draws_multiply_batches_in_turn():
    got = played([0.0, 1.0, 2.0, 3.0], parameters(), draws=(1.0, 2.0))
    assert got.p50 == pytest.approx(affine(1))
    assert got.p999 == pytest.approx(2 * affine(1))


def test_a_request_larger_than_the_cap_is_split():
    got = played([0.0], parameters(8), rows=[20])
    assert got.p50 == pytest.approx(2 * affine(8) + affine(4))
    assert got.mean_batch == pytest.approx(20 / 3)
    # The rest of a split request takes others along.
    got = played([0.0, 0.001], parameters(8), rows=[12, 3])
    assert got.p999 == pytest.approx(affine(8) + affine(7))


@pytest.mark.parametrize("rows", [2, 3, 8, 20])
@pytest.mark.parametrize("wait", [0.0, 0.01])
def test_rows_alike_are_forecast_as_rows_given_one_by_one(rows, wait):
    # Of a cap that they divide the batches are played, of others the requests.
    arrivals = first(Poisson(100.0), 2000, Random(1))
    alike, each = (played(arrivals, parameters(8, wait), rows=how) for how in (rows, [rows] * 2000))
    for field in ("p50", "p99", "mean", "miss_fraction", "device_time", "mean_batch", "utilization", "goodput"):
        assert getattr(alike, field) == pytest.approx(getattr(each, field)), field


def test_shedding_keeps_goodput_in_overload():
    # At twice the capacity of 5 + 0.5 b, SLO 50 ms.
    capacity = SERVICE.capacity(64, 1)
    assert capacity == pytest.approx(64 / 0.037)
    arrivals = first(Poisson(2 * capacity), 100_000, Random(1))
    patient = played(arrivals, parameters())
    shedding = played(arrivals, parameters(), shed=True)
    assert patient.goodput < 20
    assert shedding.goodput > 1560
    assert shedding.p999 <= SLO + 1e-9
    # What is refused is missed: shedding does not make an SLO look met.
    assert shedding.miss_fraction >= shedding.shed_fraction > 0.4


def test_a_wait_at_mid_load_halves_the_device_time():
    arrivals = first(Poisson(400.0), 20_000, Random(1))
    greedy = played(arrivals, parameters(64, 0.0, 1))
    waiting = played(arrivals, parameters(64, 0.02, 1))
    assert waiting.miss_fraction <= 0.005
    assert waiting.device_time < 0.6 * greedy.device_time


def test_a_superlinear_model_is_best_served_alone():
    arrivals = first(Poisson(300.0), 10_000, Random(1))
    alone = played(arrivals, parameters(1), service=SUPERLINEAR)
    assert all(
        alone.device_time < played(arrivals, parameters(cap), service=SUPERLINEAR).device_time for cap in (2, 4, 8, 64)
    )


# -- a glance


@pytest.mark.parametrize("rows", [1, 2, [1, 2, 3] * 1000], ids=["single", "pairs", "mixed"])
@pytest.mark.parametrize("point", [parameters(8, 0.01), parameters(16, 0.0, 3), parameters(4, 0.0, passing=True)])
def test_a_glance_has_the_figures_of_the_forecast(rows, point):
    load = Load(first(Poisson(500.0), 3000, Random(1)), rows, draws=(0.8, 1.3, 0.9))
    pair = replace(SERVICE, executors=2)
    whole, brief = forecast(load, pair, point, SLO), glance(load, pair, point, SLO)
    for field in ("miss_fraction", "device_time", "mean", "utilization"):
        assert getattr(brief, field) == pytest.approx(getattr(whole, field)), field


def test_a_glance_says_how_many_requests_miss_together():
    service = ServiceTime.measured({1: 1.0})
    point = Parameters(max_batch=1, max_wait=Duration(0.0), max_in_flight=1)
    # Due within 1.5 s: of three at once two are late, one by itself is not, of two at once one is.
    load = Load([0.0, 0.0, 0.0, 10.0, 20.0, 20.0])
    seen = glance(load, service, point, 1.5)
    assert seen.miss_fraction == pytest.approx(3 / 6)
    assert seen.together == pytest.approx((2**2 + 1**2) / 3)
    assert glance(load, service, point, 3.5).together == 1.0, "where none misses"
    # Requests played one by one are counted alike.
    assert glance(load._replace(rows=[1] * 6), service, point, 1.5).together == pytest.approx(seen.together)


@pytest.mark.parametrize("cv", [1.0, 2.0])
def test_runs_of_late_batches_show_how_much_chance_adds_to_misses(cv):
    service = ServiceTime.measured({1: 0.00194, 8: 0.00656, 32: 0.01184})
    point = Parameters(max_batch=16, max_wait=Duration(0.002), max_in_flight=1)
    rate = 1150.0 if cv == 1 else 800.0
    seen = [glance(Load(first(Gamma(rate, cv), 4000, Random(seed))), service, point, 0.015) for seed in range(80)]
    misses = [4000 * one.miss_fraction for one in seen]
    mean = sum(misses) / len(misses)
    spread = sum((each - mean) ** 2 for each in misses) / (len(misses) - 1)
    together = sum(each * one.together for each, one in zip(misses, seen, strict=True)) / sum(misses)
    assert together > 3
    assert spread / mean == pytest.approx(together, rel=0.5)


# -- capacity


def test_a_backlog_is_served_in_full_batches():
    assert replace(SERVICE, executors=2).capacity(16, 2) == pytest.approx(2 * 16 / affine(16))


def test_a_large_cap_can_make_a_superlinear_model_unstable():
    assert SUPERLINEAR.capacity(64, 1) < 300.0 < SUPERLINEAR.capacity(1, 1)
