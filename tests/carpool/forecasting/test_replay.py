from __future__ import annotations

from itertools import accumulate, pairwise
from math import inf
from random import Random

import pytest
from examples import parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from carpool.batching.batcher import Batcher
from carpool.batching.queue_set import QueueSet
from carpool.forecasting import replay
from carpool.forecasting.forecast import Forecast, Load, forecast, glance
from carpool.forecasting.forecaster import Forecaster, Situation
from carpool.forecasting.recursion import Run
from carpool.forecasting.replay import assigned
from carpool.forecasting.sampling import draws
from carpool.learning.arrivals import Gamma, Poisson, first
from carpool.learning.batchable_share import groups
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Limits
from carpool.policy.spec import Admission, PassThroughMode
from carpool.simulation.simulator import Arrival, Device, Simulation, table
from carpool.tuning.objective import Aim, choose

SLO = 0.2
SHARES = {1: 0.5, 2: 0.3, 8: 0.2}
"""Length buckets, as factors on what a row takes, and their shares of the requests."""


def seconds(rows, bucket):
    return 0.002 + 0.001 * rows * bucket


def curve(bucket, concurrency=1):
    return ServiceTime.measured({rows: seconds(rows, bucket) for rows in range(1, 65)}, executors=concurrency)


def mixed(concurrency=1):
    mean = sum(share * bucket for bucket, share in SHARES.items())
    mix = tuple((share, curve(bucket, concurrency)) for bucket, share in SHARES.items())
    return replace(curve(mean, concurrency), mix=mix)


def simulated(rate, point, *, shed=False, concurrency=1, seed=6):
    """Play the same requests event by event, with the Batcher that knows every bucket."""
    arrived = times(rate, seed)
    buckets = [[*SHARES][which] for which in assigned(len(arrived), tuple(SHARES.values()), arrived[0])]
    arrivals = [Arrival(time, length=bucket) for time, bucket in zip(arrived, buckets, strict=True)]
    device = Device(seconds, executors=concurrency)
    believed = mixed(concurrency).believed(64)
    estimate = replace(believed, buckets={bucket: curve(bucket, concurrency).believed(64) for bucket in SHARES})
    return Simulation(
        arrivals, device, slo=SLO, parameters=point, estimate=estimate, shed_slo=shed, bucket=int
    ).run().summary()  # fmt: skip


def times(rate, seed=6):
    return list(first(Poisson(rate), 20_000, Random(seed)))


@pytest.mark.parametrize(
    ("rate", "point", "concurrency"),
    [
        (100.0, parameters(8, 0.05), 1),
        (200.0, parameters(16, 0.1), 1),
        (250.0, parameters(6, 0.0), 1),
        (450.0, parameters(8, 0.02, flights=2), 2),
        (60.0, parameters(8, 0.0, flights=2, passing=True), 2),
    ],
)
def test_buckets_that_share_a_device_are_forecast_as_the_simulator_plays_them(rate, point, concurrency):
    found = forecast(Load(times(rate)), mixed(concurrency), point, SLO)
    truth = simulated(rate, point, concurrency=concurrency)
    assert found.device_time == pytest.approx(truth.device_busy / truth.answers, rel=0.02)
    assert found.mean_batch == pytest.approx(truth.rows / truth.batches, rel=0.03)
    assert found.p99 == pytest.approx(truth.p99, rel=0.06)
    assert found.miss_fraction == pytest.approx(truth.miss_fraction, abs=0.002)


@pytest.mark.parametrize("batch", [4, 16, 64])
def test_in_overload_it_forecasts_what_shedding_leaves(batch):
    # Three times what it can serve.
    found = forecast(Load(times(1000.0)), mixed(), parameters(batch), SLO, shed=True)
    truth = simulated(1000.0, parameters(batch), shed=True)
    assert found.goodput == pytest.approx(truth.goodput, rel=0.1)
    assert forecast(Load(times(1000.0)), mixed(), parameters(batch), SLO).goodput < 0.1 * found.goodput


def test_a_glance_has_the_same_figures():
    for point in (parameters(8, 0.05), parameters(64, 0.1), parameters(4, 0.0, passing=True)):
        whole = forecast(Load(times(300.0)), mixed(), point, SLO)
        brief = glance(Load(times(300.0)), mixed(), point, SLO)
        assert brief.miss_fraction == pytest.approx(whole.miss_fraction)
        assert brief.device_time == pytest.approx(whole.device_time)
        assert brief.mean == pytest.approx(whole.mean)


@pytest.mark.parametrize("rate", [60.0, 400.0, 1200.0])
@pytest.mark.parametrize("wait", [0.0, 0.008, 0.015, 0.1])
@pytest.mark.parametrize(("cap", "flights", "concurrency"), [(1, 1, 1), (16, 1, 1), (64, 1, 1), (64, 2, 2), (16, 4, 2)])
@pytest.mark.parametrize("more", [{}, {"shed": True}, {"passing": True}])
def test_a_mix_of_one_bucket_is_none(rate, wait, cap, flights, concurrency, more):
    # Due times bind: 64 rows alone take longer than the 30 ms.
    alone = ServiceTime.measured({1: 0.0105, 64: 0.042}, executors=concurrency)
    load, point = Load(times(rate)[:2000]), parameters(cap, wait, flights, passing="passing" in more)
    of_one = replace(alone, mix=((1.0, alone),))
    found, plain = (forecast(load, service, point, 0.03, shed="shed" in more) for service in (of_one, alone))
    for field in Forecast.__struct_fields__:
        assert getattr(found, field) == pytest.approx(getattr(plain, field)), field
    found, plain = (astuple(glance(load, service, point, 0.03)) for service in (of_one, alone))
    assert found == pytest.approx(plain)


def test_every_bucket_has_its_share_of_every_sample_in_an_order_of_its_own():
    shares = (0.98, 0.015, 0.005)
    samples = [assigned(4000, shares, first) for first in (0.1, 0.2)]
    for members in samples:
        assert [members.count(which) for which in range(3)] == [3920, 60, 20]
    assert samples[0] != samples[1]
    assert assigned(4000, shares, 0.1) == samples[0]


def test_as_one_queue_batches_come_out_too_large():
    alone = forecast(Load(times(200.0)), replace(mixed(), mix=()), parameters(64, 0.1), SLO)
    assert alone.mean_batch > 1.5 * forecast(Load(times(200.0)), mixed(), parameters(64, 0.1), SLO).mean_batch


def test_a_choice_for_a_mix_meets_the_slo_at_a_quarter_more_load_and_one_for_one_queue_does_not():
    limits = Limits(1, 64, 0.0, 0.1, 1, 1)
    situation = Situation(process=Poisson(220.0), service=mixed(), target=SLO, budget=0.005, limits=limits)
    as_one = replace(situation, service=replace(mixed(), mix=()))
    for each, missed in ((situation, 0.005), (as_one, 0.012)):
        best = choose(Forecaster(each), Aim(), parameters(32), PassThroughMode.NEVER).target
        assert best.holds_ahead
        found = sum(simulated(275.0, best.parameters, seed=seed).miss_fraction for seed in range(6)) / 6
        assert found == pytest.approx(missed, rel=0.1)


# -- requests of several keys


@pytest.fixture(scope="module")
def no_floods():
    """No key has to step back for the others: forecasts know nothing of that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QueueSet, "floods", lambda *_: False)
        yield


@pytest.mark.pure
@pytest.mark.usefixtures("no_floods")
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_keys_and_rows_are_replayed_as_the_batcher_serves_them(data):
    rng = Random(data.draw(st.integers(0, 2**32)))
    count = data.draw(st.integers(1, 300))
    gaps = pairwise([0.0, *first(Gamma(data.draw(st.floats(20, 2000)), rng.choice([0.3, 1.0, 2.0])), count, rng)])
    arrived = list(accumulate(max(after - before, 1e-6) for before, after in gaps))
    shares = data.draw(st.sampled_from([(0.5, 0.5), (0.7, 0.2, 0.1), (0.1,) * 10]))
    sizes = data.draw(st.sampled_from([(1,), (1, 2, 3), (1, 5, 60)]))
    rows = [rng.choice(sizes) for _ in arrived]
    slots, concurrency = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    # No wait: whether the Batcher holds anything for others it finds out as it goes.
    point = parameters(data.draw(st.integers(1, 40)), 0.0, slots, passing=data.draw(st.booleans()))
    shed, target = data.draw(st.booleans()), data.draw(st.sampled_from([0.02, 0.05, 0.2]))
    service = replace(curve(0.5), noise=data.draw(st.sampled_from([0.0, 0.3])), executors=concurrency)
    assert forecast_latencies(arrived, rows, service, point, target, shed=shed, shares=shares) == pytest.approx(
        batcher_latencies(arrived, rows, service, point, target, shed=shed, shares=shares), abs=1e-9
    )


def forecast_latencies(arrived, rows, service, point, target, *, shed, shares=(1.0,)):
    latencies = []
    forecast(Load(arrived, rows, shares), service, point, target, shed=shed, latencies=latencies)
    return latencies


def batcher_latencies(arrived, rows, service, point, target, *, shed, shares=(1.0,)):
    """Play the same requests event by event, each with a key of its kind."""
    admission = Admission(max_queued_rows=10**9, timeout=Duration(1e6))
    keys = assigned(len(arrived), shares, arrived[0])
    twin = Simulation(
        [Arrival(time, size, key=1 + key) for time, size, key in zip(arrived, rows, keys, strict=True)],
        Device(table(service.table(64)), executors=service.executors),
        slo=target,
        parameters=point,
        estimate=service.believed(64),
        shed_slo=shed,
        dispatcher=lambda: Batcher(point, admission=admission),
        admission=admission,
    ).run()
    return [latency for latency in twin.latencies if latency < inf]


@pytest.mark.parametrize("rows", [1, 2], ids=["of one row", "cut"])
@pytest.mark.parametrize("concurrency", [1, 2])
def test_what_takes_just_the_target_is_in_time_whichever_way_it_is_added_up(rows, concurrency):
    # 0.002 + 0.0005 * 36 is 0.02 and one bit more: a longer time than the target, and yet the same sum with an arrival.
    exactly = 0.002 + 0.0005 * 36
    service = ServiceTime.measured({1: exactly, 2: 2 * exactly}, executors=concurrency)
    arrived = times(100.0)[:1000]
    point = parameters(1, 0.0, concurrency)
    target = 0.02 * rows / min(rows, concurrency)  # a cut request's parts are computed at once, if they can be
    played = [
        of(arrived, [rows] * 1000, service, point, target, shed=True) for of in (forecast_latencies, batcher_latencies)
    ]
    assert 0 < len(played[0]) < 1000
    assert played[0] == pytest.approx(played[1], abs=1e-9)


def of_groups(shares, rate, point, *, rows=1, shed=False):
    """Play requests with one of several keys event by event."""
    arrived = times(rate)
    keys = assigned(len(arrived), shares, arrived[0])
    arrivals = [Arrival(time, rows, key=1 + key) for time, key in zip(arrived, keys, strict=True)]
    simulation = Simulation(
        arrivals, Device(seconds), slo=SLO, parameters=point, estimate=curve(0).believed(64), shed_slo=shed
    )
    return simulation.run().summary()


@pytest.mark.parametrize("shares", [groups(0.7), groups(0.25), groups(0.05)], ids=len)
@pytest.mark.parametrize(
    ("rate", "point", "rows"),
    [
        (300.0, parameters(16, 0.1), 1),
        (450.0, parameters(16, 0.0), 1),
        (300.0, parameters(16, 0.1), 3),
        (60.0, parameters(8, 0.0, passing=True), 1),
    ],
)
def test_keys_that_share_a_device_are_forecast_as_the_simulator_plays_them(shares, rate, point, rows):
    arrived = times(rate)
    found = forecast(Load(arrived, rows, shares), curve(0), point, SLO)
    truth = of_groups(shares, rate, point, rows=rows)
    assert found.device_time == pytest.approx(truth.device_busy / truth.answers, rel=0.03)
    assert found.mean_batch == pytest.approx(truth.rows / truth.batches, rel=0.03)
    assert found.p50 == pytest.approx(truth.p50, rel=0.06)
    assert found.p99 == pytest.approx(truth.p99, rel=0.06)


def test_many_keys_in_overload_are_forecast_with_what_shedding_leaves():
    shares = groups(0.05)
    found = forecast(Load(times(1500.0), groups=shares), curve(0), parameters(16), SLO, shed=True)
    truth = of_groups(shares, 1500.0, parameters(16), shed=True)
    assert found.goodput == pytest.approx(truth.goodput, rel=0.1)


def test_a_glance_at_keys_says_the_same():
    load = Load(times(300.0), groups=groups(0.2))
    whole = forecast(load, curve(1), parameters(16, 0.1), SLO)
    brief = glance(load, curve(1), parameters(16, 0.1), SLO)
    assert brief.miss_fraction == pytest.approx(whole.miss_fraction)
    assert brief.device_time == pytest.approx(whole.device_time)


def test_keys_and_lengths_together_make_smaller_batches_than_either():
    point = parameters(16, 0.1)
    sizes = {
        name: forecast(Load(times(200.0), groups=shares), service, point, SLO).mean_batch
        for name, service, shares in [
            ("neither", curve(2.7), (1.0,)),
            ("keys", curve(2.7), groups(0.25)),
            ("lengths", mixed(), (1.0,)),
            ("both", mixed(), groups(0.25)),
        ]
    }
    assert sizes["both"] < min(sizes["keys"], sizes["lengths"]) < sizes["neither"]


@pytest.mark.parametrize(("flights", "concurrency"), [(1, 1), (2, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("more", [{}, {"shed": True}])
@pytest.mark.parametrize("rate", [60.0, 200.0])
def test_requests_of_many_batches_are_played_as_one_batch_with_about_the_same_outcome(
    monkeypatch, flights, concurrency, more, rate
):
    service = ServiceTime.measured({1: 0.0021, 16: 0.0036}, executors=concurrency, noise=0.1)
    rows = [650 if number % 20 == 7 else 1 for number in range(4000)]
    load, point = Load(times(rate)[:4000], rows, draws=draws(0.1)), parameters(16, 0.005, flights)
    exact = forecast(load, service, point, 1.0, **more)
    sent = []
    batch = Run.batch
    monkeypatch.setattr(Run, "batch", lambda *args: sent.append(1) or batch(*args))
    monkeypatch.setattr(replay, "MOST", 1000)
    found = forecast(load, service, point, 1.0, **more)
    assert len(sent) < 4300, "one by one there are 8,200 batches for the large requests alone"
    for field in ("device_time", "utilization", "mean_batch"):
        assert getattr(found, field) == pytest.approx(getattr(exact, field), rel=0.04), field
    for field in ("mean", "p99"):
        assert getattr(found, field) == pytest.approx(getattr(exact, field), rel=0.1), field
    assert found.miss_fraction == pytest.approx(exact.miss_fraction, abs=0.01)
