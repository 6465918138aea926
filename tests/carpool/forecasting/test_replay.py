from __future__ import annotations

from random import Random

import pytest
from examples import parameters
from msgspec.structs import replace

from carpool.forecasting.mixed import _members
from carpool.forecasting.queueing import forecast, glance
from carpool.learning.arrivals import Poisson, first
from carpool.learning.batchable_share import groups
from carpool.learning.latency_model import ServiceTime
from carpool.policy.parameters import Limits
from carpool.simulation.simulator import Arrival, Device, Simulation
from carpool.tuning.assessment import Assessor, Situation
from carpool.tuning.search import choose

SLO = 0.2
SHARES = {1: 0.5, 2: 0.3, 8: 0.2}
"""Length buckets, as factors on what a row takes, and their shares of the requests."""


def seconds(rows, bucket):
    return 0.002 + 0.001 * rows * bucket


def curve(bucket, executors=1):
    return ServiceTime.measured({rows: seconds(rows, bucket) for rows in range(1, 65)}, executors=executors)


def mixed(executors=1):
    mean = sum(share * bucket for bucket, share in SHARES.items())
    mix = tuple((share, curve(bucket, executors)) for bucket, share in SHARES.items())
    return replace(curve(mean, executors), mix=mix)


def simulated(rate, point, *, shed=False, executors=1, seed=6):
    """Play the same requests event by event, with the Batcher that knows every bucket."""
    arrived = times(rate, seed)
    buckets = [[*SHARES][which] for which in _members(len(arrived), tuple(SHARES.values()), arrived[0])]
    arrivals = [Arrival(time, length=bucket) for time, bucket in zip(arrived, buckets, strict=True)]
    device = Device(seconds, executors=executors)
    believed = mixed(executors).believed(64)
    estimate = replace(believed, buckets={bucket: curve(bucket, executors).believed(64) for bucket in SHARES})
    return Simulation(
        arrivals, device, slo=SLO, parameters=point, estimate=estimate, shed_slo=shed, bucket=int
    ).run().summary()  # fmt: skip


def times(rate, seed=6):
    return list(first(Poisson(rate), 20_000, Random(seed)))


@pytest.mark.parametrize(
    ("rate", "point", "executors"),
    [
        (100.0, parameters(8, 0.05), 1),
        (200.0, parameters(16, 0.1), 1),
        (250.0, parameters(6, 0.0), 1),
        (450.0, parameters(8, 0.02, flights=2), 2),
        (60.0, parameters(8, 0.0, flights=2, passing=True), 2),
    ],
)
def test_buckets_that_share_a_device_are_forecast_as_the_simulator_plays_them(rate, point, executors):
    found = forecast(times(rate), mixed(executors), point, SLO, executors=executors)
    truth = simulated(rate, point, executors=executors)
    assert found.device_time == pytest.approx(truth.device_busy / truth.answers, rel=0.02)
    assert found.mean_batch == pytest.approx(truth.rows / truth.batches, rel=0.03)
    assert found.p99 == pytest.approx(truth.p99, rel=0.06)
    assert found.miss_fraction == pytest.approx(truth.miss_fraction, abs=0.002)


@pytest.mark.parametrize("batch", [4, 16, 64])
def test_in_overload_it_forecasts_what_shedding_leaves(batch):
    # Three times what it can serve.
    found = forecast(times(1000.0), mixed(), parameters(batch), SLO, shed=True)
    truth = simulated(1000.0, parameters(batch), shed=True)
    assert found.goodput == pytest.approx(truth.goodput, rel=0.1)
    assert forecast(times(1000.0), mixed(), parameters(batch), SLO).goodput < 0.1 * found.goodput


def test_a_glance_says_the_same_for_less():
    for point in (parameters(8, 0.05), parameters(64, 0.1), parameters(4, 0.0, passing=True)):
        whole = forecast(times(300.0), mixed(), point, SLO)
        brief = glance(times(300.0), mixed(), point, SLO)
        assert brief.miss_fraction == pytest.approx(whole.miss_fraction)
        assert brief.device_time == pytest.approx(whole.device_time)


@pytest.mark.parametrize("rate", [60.0, 400.0, 1200.0])
@pytest.mark.parametrize("wait", [0.0, 0.008, 0.015, 0.1])
@pytest.mark.parametrize(("cap", "flights", "executors"), [(1, 1, 1), (16, 1, 1), (64, 1, 1), (64, 2, 2), (16, 4, 2)])
@pytest.mark.parametrize("more", [{}, {"shed": True}, {"passing": True}])
def test_a_mix_of_one_bucket_is_none(rate, wait, cap, flights, executors, more):
    # Due times bind: 64 rows alone take longer than the 30 ms.
    alone = ServiceTime.measured({1: 0.0105, 64: 0.042}, executors=executors)
    arrived, point = times(rate)[:2000], parameters(cap, wait, flights, passing="passing" in more)
    found, plain = (
        forecast(arrived, service, point, 0.03, shed="shed" in more)
        for service in (replace(alone, mix=((1.0, alone),)), alone)
    )
    if "shed" in more and wait:
        # Who would be on time to the letter is refused by a rounding error here or there.
        assert found.goodput == pytest.approx(plain.goodput, rel=0.01)
        assert found.device_time == pytest.approx(plain.device_time, rel=0.01)
    else:
        assert found == plain
    if not more:
        mixed, single = (
            glance(arrived, service, point, 0.03) for service in (replace(alone, mix=((1.0, alone),)), alone)
        )
        assert mixed == pytest.approx(single), "but for the order in which latencies are summed up"


def test_every_bucket_has_its_share_of_every_lot_in_an_order_of_its_own():
    shares = (0.98, 0.015, 0.005)
    lots = [_members(4000, shares, first) for first in (0.1, 0.2)]
    for members in lots:
        assert [members.count(which) for which in range(3)] == [3920, 60, 20]
    assert lots[0] != lots[1]
    assert _members(4000, shares, 0.1) == lots[0]


def test_as_one_queue_batches_come_out_too_large():
    alone = forecast(times(200.0), replace(mixed(), mix=()), parameters(64, 0.1), SLO)
    assert alone.mean_batch > 1.5 * forecast(times(200.0), mixed(), parameters(64, 0.1), SLO).mean_batch


def test_what_is_chosen_for_a_mix_holds_at_a_quarter_more_load_though_not_as_one_queue():
    limits = Limits(1, 64, 0.0, 0.1, 1, 1)
    situation = Situation(process=Poisson(220.0), service=mixed(), target=SLO, budget=0.005, limits=limits)
    as_one = replace(situation, service=replace(mixed(), mix=()))
    for each, missed in ((situation, 0.005), (as_one, 0.012)):
        best = choose(Assessor(each), parameters(32)).best
        assert best.holds_ahead
        found = sum(simulated(275.0, best.parameters, seed=seed).miss_fraction for seed in range(6)) / 6
        assert found == pytest.approx(missed, rel=0.1)


# -- groups of callers


def of_groups(shares, rate, point, *, rows=1, shed=False):
    """Play requests with one of several keys event by event."""
    arrived = times(rate)
    keys = _members(len(arrived), shares, arrived[0])
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
    each = [rows] * len(arrived) if rows > 1 else None
    found = forecast(arrived, curve(0), point, SLO, rows=each, groups=shares)
    truth = of_groups(shares, rate, point, rows=rows)
    assert found.device_time == pytest.approx(truth.device_busy / truth.answers, rel=0.03)
    assert found.mean_batch == pytest.approx(truth.rows / truth.batches, rel=0.03)
    assert found.p50 == pytest.approx(truth.p50, rel=0.06)
    assert found.p99 == pytest.approx(truth.p99, rel=0.06)


def test_many_keys_in_overload_are_forecast_with_what_shedding_leaves():
    shares = groups(0.05)
    found = forecast(times(1500.0), curve(0), parameters(16), SLO, groups=shares, shed=True)
    truth = of_groups(shares, 1500.0, parameters(16), shed=True)
    assert found.goodput == pytest.approx(truth.goodput, rel=0.1)


def test_a_glance_at_keys_says_the_same():
    whole = forecast(times(300.0), curve(1), parameters(16, 0.1), SLO, groups=groups(0.2))
    brief = glance(times(300.0), curve(1), parameters(16, 0.1), SLO, groups=groups(0.2))
    assert brief.miss_fraction == pytest.approx(whole.miss_fraction)
    assert brief.device_time == pytest.approx(whole.device_time)


def test_keys_and_lengths_together_make_smaller_batches_than_either():
    point = parameters(16, 0.1)
    sizes = {
        name: forecast(times(200.0), service, point, SLO, groups=shares).mean_batch
        for name, service, shares in [
            ("neither", curve(2.7), (1.0,)),
            ("keys", curve(2.7), groups(0.25)),
            ("lengths", mixed(), (1.0,)),
            ("both", mixed(), groups(0.25)),
        ]
    }
    assert sizes["both"] < min(sizes["keys"], sizes["lengths"]) < sizes["neither"]


def test_a_wait_without_company_is_forecast_as_none():
    situation = Situation(
        process=Poisson(50.0),
        service=curve(1),
        target=0.5,
        budget=0.005,
        limits=Limits(1, 64, 0.0, 0.5, 1, 1),
        share=0.01,
    )
    assessor = Assessor(situation)
    held, unheld = (assessor.assess(parameters(16, wait)) for wait in (0.25, 0.0))
    assert not assessor.holds(0.25)
    assert held.now == unheld.now
    assert held.parameters != unheld.parameters
