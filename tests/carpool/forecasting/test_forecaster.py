from __future__ import annotations

from random import Random

import pytest
from examples import CURVE, LIMITS, parameters, situation, tiled
from msgspec.structs import replace

from carpool.forecasting import refinement, sampling
from carpool.forecasting.forecast import Glance, Load, forecast
from carpool.forecasting.forecaster import HEADROOM, REQUESTS, Forecaster
from carpool.learning.arrivals import Gamma, Poisson, first
from carpool.learning.latency_model import ServiceTime
from carpool.tuning.objective import most_efficient

NOISY = replace(CURVE, noise=0.5)


# -- what is played


def test_bursts_need_more_room_than_poisson():
    steady = Forecaster(situation(1100.0)).assess(parameters(64))
    bursty = Forecaster(situation(1100.0, process=Gamma(1100.0, 4.0))).assess(parameters(64))
    assert bursty.now.p99 > steady.now.p99


def test_requests_of_many_rows_count_by_rows():
    single = Forecaster(situation(200.0)).assess(parameters(64))
    large = Forecaster(situation(200.0, rows=5)).assess(parameters(64))
    assert large.now.mean_batch > 3 * single.now.mean_batch


def test_rows_that_differ_are_played_as_they_differ_at_the_same_rows_per_second():
    # Nine of ten have one row, one in ten 33 to 64: 5.75 on average, said to be six.
    shares = (0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1)
    alike, heavy = (Forecaster(situation(90.0, rows=6, row_shares=each)) for each in ((), shares))
    assert alike.load().rows == 6
    drawn = heavy.load().rows
    assert {row for row in drawn if row <= 2} == {1}
    assert sum(row > 32 for row in drawn) / len(drawn) == pytest.approx(0.1, abs=0.02)
    assert sum(drawn) / heavy.load().arrivals[-1] == pytest.approx(90 * 6, rel=0.01)
    # A few large requests make the others late, and as many rows in equal parts do not.
    point = parameters(64)
    assert heavy.assess(point).now.p99 > 1.2 * alike.assess(point).now.p99


@pytest.mark.parametrize("shares", [(), (0.8, 0.0, 0.2)], ids=["alike", "of one row, and of three or four"])
def test_as_many_rows_come_as_do_where_their_mean_is_no_whole_number(shares):
    # A mean of 1.4 rounded to one made the forecast load 30 % lower than it was.
    point = parameters(64, 0.008)
    played = Forecaster(situation(400.0, rows=1.4, row_shares=shares))
    load = played.load()
    rows = load.rows if shares else [load.rows] * len(load.arrivals)
    assert sum(rows) / load.arrivals[-1] == pytest.approx(400 * 1.4, rel=0.01)
    assert played.load_share(point) == pytest.approx(1.4 * Forecaster(situation(400.0)).load_share(point))
    # Figures are of real requests; more or fewer are played.
    found = played.forecast(point)
    assert found.throughput == pytest.approx(400.0, rel=0.01)
    assert found.device_time * 400 == pytest.approx(found.utilization, rel=0.02)
    # Further samples, which the tail is taken from, are of the same load.
    known = played.assess(point)
    known.refine()
    assert known.refined.utilization == pytest.approx(known.now.utilization, rel=0.02)
    assert known.refined.p99 == pytest.approx(known.now.p99, rel=0.1)


def test_of_a_long_target_more_requests_are_played():
    assert Forecaster(situation(300.0)).requests == REQUESTS
    assert Forecaster(situation(3000.0, target=0.5)).requests == 4 * REQUESTS


def test_what_is_lost_is_played_four_times_as_long():
    forecaster = Forecaster(situation(3000.0, target=0.1))
    forecaster.forecast(parameters(64))
    assert set(forecaster._loads) == {(1.0, 0, REQUESTS)}
    forecaster.rest()
    forecaster.loss(parameters(64))
    ((key, load),) = forecaster._loads.items()
    assert key == (1.0, 0, 4 * REQUESTS)
    assert len(load.arrivals) == 4 * REQUESTS
    assert load.arrivals[-1] == pytest.approx(4 * REQUESTS / 3000, rel=0.001)


def test_more_than_full_batches_carry_is_no_load_that_holds_however_slowly_a_backlog_grows():
    # 1,728 requests/s in batches of 64; a hundredth more, in three seconds, leaves a backlog of half a batch.
    capacity = 64 / 0.037
    assert Forecaster(situation(0.9 * capacity)).assess(parameters(64)).is_overload is False
    over = Forecaster(situation(1.01 * capacity, target=2.0)).assess(parameters(64))
    assert over.glance.miss_fraction == 0
    assert not over.holds_now
    assert over.is_overload
    ahead = Forecaster(situation(0.85 * capacity, target=2.0)).assess(parameters(64))
    assert ahead.holds_now
    assert not ahead.holds_ahead


def test_a_mix_carries_what_its_kinds_do():
    slower = ServiceTime.measured({rows: 3 * CURVE.time(rows) for rows in CURVE.sizes})
    mixed = replace(CURVE, mix=((0.75, CURVE), (0.25, slower)))
    share, alone = (Forecaster(situation(500.0, service=each)).load_share(parameters(64)) for each in (mixed, CURVE))
    assert share == pytest.approx(alone * (0.75 + 0.25 * 3))


def test_utilization_does_not_depend_on_which_batches_chance_makes_slow():
    # 4,000 requests are few batches: with a CV of 40 % their times add up to 4 % more or less than their means do.
    exact = Forecaster(situation(300.0)).glance(parameters(8)).utilization
    noisy = Forecaster(situation(300.0, service=replace(CURVE, noise=0.4)))
    found = [noisy.glance(parameters(8), sample=sample).utilization for sample in range(4)]
    assert max(found) - min(found) < 0.03 * exact


def test_loads_are_let_go_of_and_come_back_the_same():
    forecaster = Forecaster(situation(300.0))
    before = forecaster.load(HEADROOM)
    assert forecaster.load(HEADROOM) is before
    forecaster.rest()
    assert forecaster.load(HEADROOM) is not before
    assert forecaster.load(HEADROOM) == before


def test_as_many_batches_are_computed_at_once_as_the_device_is_known_to_compute():
    unseen = Forecaster(situation(100.0, service=replace(CURVE, largest_in_flight=4)))
    known, more = (unseen.assess(parameters(1, flights=flights)) for flights in (1, 4))
    passing = unseen.assess(parameters(1, flights=4, passing=True))
    for one in (more, passing):
        assert one.now.device_time == pytest.approx(known.now.device_time)
        assert one.now.p99 == pytest.approx(known.now.p99)
    seen = Forecaster(situation(100.0, service=replace(CURVE, executors=4, largest_in_flight=4)))
    for one in (more, passing):
        assert seen.assess(one.parameters).now.device_time < 0.9 * known.now.device_time


# -- what the Batcher makes of a setting


def test_where_few_requests_can_share_a_batch_a_wait_is_forecast_as_none():
    forecaster = Forecaster(situation(50.0, target=0.5, limits=replace(LIMITS, max_wait=0.5), share=0.01))
    held, unheld = (forecaster.assess(parameters(16, wait)) for wait in (0.25, 0.0))
    assert not forecaster.holds(0.25)
    assert held.now == unheld.now
    assert held.parameters != unheld.parameters


def test_where_none_can_batches_have_one_request():
    forecaster = Forecaster(situation(200.0, share=0.0, rows=2))
    assert forecaster.effective(parameters(16, 0.02)) == parameters(2)
    assert forecaster.assess(parameters(16, 0.02)).now.mean_batch == 2


def test_batches_are_no_larger_than_the_server_takes():
    limited = Forecaster(situation(900.0, largest=6))
    assert limited.effective(parameters(16, 0.01)) == parameters(6, 0.01)
    assert limited.assess(parameters(16, 0.01)).now == limited.assess(parameters(6, 0.01)).now
    assert limited.effective(parameters(4, 0.01)) == parameters(4, 0.01)


# -- does it meet the SLO?


def test_other_percentiles_of_the_slo_have_to_be_met_too():
    forecaster = Forecaster(situation(300.0, quantiles=((0.5, 0.010),)))
    assert not forecaster.assess(parameters(64, 0.025)).holds_now
    assert forecaster.assess(parameters(64)).holds_now


def test_one_with_headroom_meets_the_slo_at_a_quarter_more_load():
    forecaster = Forecaster(situation(1000.0))
    one = forecaster.assess(parameters(64, 0.005))
    assert one.holds_ahead
    assert one.ahead.throughput == pytest.approx(HEADROOM * one.now.throughput, rel=0.02)
    busy = Forecaster(situation(1350.0)).assess(parameters(64))
    assert busy.holds_now
    assert not busy.holds_ahead


def test_where_the_slo_is_missed_what_refusals_leave_is_forecast():
    one = Forecaster(situation(2500.0)).assess(parameters(64))
    assert not one.holds_now
    assert one.now.shed_fraction > 0.3
    assert one.now.p99 <= 0.050 + 1e-9
    assert one.now.goodput > 1000 > one.ahead.goodput, "the present load without refusals"
    assert one.device_time == one.now.device_time
    assert one.glance.miss_fraction > 0.9


def test_risk_is_judged_at_the_upper_confidence_and_not_by_size():
    doubtful = replace(CURVE, uppers=tuple(2.5 * value for value in CURVE.means))
    forecaster = Forecaster(situation(700.0, service=doubtful))
    # Overloaded at the upper confidence: the larger batch is the safer one.
    assert forecaster.assess(parameters(64)).risk < forecaster.assess(parameters(4)).risk


def test_beyond_the_capacity_as_much_is_lost_of_the_present_load_as_more_load_leaves():
    one = tiled(1010.0).assess(parameters(64, 0.075))
    assert 0 < one.lost < one.lost_ahead
    drowned = Forecaster(situation(4000.0)).assess(parameters(64))
    assert 1 - drowned.lost == pytest.approx(HEADROOM * (1 - drowned.lost_ahead), rel=0.02)


@pytest.mark.parametrize("rate", [300.0, 900.0, 1500.0, 4000.0])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_less_is_lost_than_full_batches_leave(rate, concurrency):
    service = replace(CURVE, executors=concurrency, noise=0.4)
    forecaster = Forecaster(situation(concurrency * rate, service=service))
    for size in (1, 4, 16, 64):
        one = forecaster.assess(parameters(size, flights=concurrency))
        assert one.least_loss <= one.lost
    # In batches that fit into the SLO, refusals leave little more than that.
    assert one.lost <= max(one.least_loss, 0.0) + 0.15


def test_utilization_is_of_all_that_the_device_computes_at_once():
    quad = replace(CURVE, executors=4, largest_in_flight=8)
    forecaster = Forecaster(situation(100.0, service=quad))
    for flights in (1, 4, 8):
        assert forecaster.assess(parameters(1, flights=flights)).utilization == pytest.approx(
            100 * 0.0055 / 4, rel=0.05
        )


def test_what_pass_through_would_use_and_what_batching_saves():
    forecaster = Forecaster(situation(100.0))
    assert forecaster.single_load() == pytest.approx(HEADROOM * 100 * 0.0055)
    through, batched = (
        forecaster.assess(each) for each in (parameters(8, flights=4, passing=True), parameters(64, 0.025))
    )
    saving = forecaster.saving(batched, through)
    assert saving == pytest.approx(1 - batched.now.device_time / through.now.device_time)
    assert saving > 0.3
    assert forecaster.saving(through, through) == 0


# -- misses near the budget


def test_where_no_single_request_was_measured_it_may_take_as_long_as_the_smallest_batch():
    # The line through both ends at 1 ms.
    service = ServiceTime.measured({16: 0.016, 32: 0.032})
    assert service.time(1) == pytest.approx(0.001)
    assert Forecaster(situation(100, service=service)).single_load() == pytest.approx(HEADROOM * 100 * 0.016)


def test_a_miss_fraction_near_the_budget_is_judged_by_more_requests():
    bursty, point = situation(1100.0, process=Gamma(1100.0, 2.0)), parameters(64, 0.012)
    true = forecast(Load(first(bursty.process, 200_000, Random(5))), CURVE, point, bursty.target).miss_fraction
    judged = Forecaster(bursty).assess(point).glance
    assert judged.miss_fraction == pytest.approx(true, rel=0.3), "4,000 requests are twice as far off"
    assert judged.device_time == Forecaster(bursty).glance(point).device_time, "candidates differ in that"


TOWER = ServiceTime.measured({1: 0.00194, 8: 0.00656, 32: 0.01184, 64: 0.01536}, noise=0.05)
"""A ranking tower on one core (benchmarks/profiles/ranking-tower-cpu.json), due within 15 ms."""


def test_a_burst_makes_many_late_at_once_so_that_one_sample_says_little(monkeypatch):
    bursty = replace(situation(650.0, process=Gamma(650.0, 1.8), service=TOWER), target=0.015)
    point = parameters(24, 0.0005)
    found = [Forecaster(bursty).glance(point, HEADROOM, sample).miss_fraction for sample in range(40)]
    true = sum(found) / len(found)
    assert true < bursty.budget < found[0] / 2, "the first sample has twice as many as may miss"
    assert Forecaster(bursty).assess(point).glance_ahead.miss_fraction == pytest.approx(true, rel=0.25)
    # Without further samples, the first would have decided.
    monkeypatch.setattr(Forecaster, "samples", 1)
    assert Forecaster(bursty).assess(point).glance_ahead.miss_fraction == found[0]


def test_where_the_budget_is_clearly_kept_or_missed_one_sample_is_enough():
    for rate, misses in ((300.0, 0.0), (3000.0, 1.0)):
        forecaster = Forecaster(situation(rate))
        glance = forecaster.assess(parameters(64, 0.025)).glance
        assert glance.miss_fraction == pytest.approx(misses, abs=0.3)
        assert set(forecaster._loads) == {(1.0, 0, forecaster.requests)}
        assert isinstance(glance, Glance)


# -- the tail in more detail


def refined(forecaster, setting, *, shed=False):
    """Return a setting's forecast with its tail as sure as it gets."""
    played = refinement.Refinement()
    while not played.is_done:
        forecaster.sample(setting, played, shed=shed)
    return played.refined(forecaster.forecast(setting, shed=shed))


def test_the_refined_p99_of_a_noisy_device_near_its_capacity_does_not_depend_on_the_seed(monkeypatch):
    busy, near = situation(900.0, service=NOISY), parameters(48, 0.002)

    def with_seed(seed):
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "SEED", seed)
            sampling._unit.cache_clear()
            forecaster = Forecaster(busy)
            return forecaster.forecast(near), refined(forecaster, near)

    searched, sure = zip(*(with_seed(seed) for seed in range(5)), strict=True)
    sampling._unit.cache_clear()
    assert max(one.p99 for one in searched) > 1.10 * min(one.p99 for one in searched)
    rng = Random(98)
    noise = [rng.gammavariate(4.0, 0.25) for _ in range(100_000)]
    truth = forecast(Load(first(Poisson(900.0), 400_000, Random(99)), draws=tuple(noise)), NOISY, near, 0.050)
    for one in sure:
        assert one.requests > 4 * searched[0].requests
        assert one.p99 == pytest.approx(truth.p99, rel=0.05)


def test_where_nothing_is_open_few_samples_are_enough():
    one = Forecaster(situation(100.0)).assess(parameters(64, 0.025))
    assert one.refined == one.now
    samples = 1
    while not one.refine():
        samples += 1
    assert samples == refinement.ENOUGH
    assert one.refined.p99 == pytest.approx(one.now.p99, rel=refinement.WITHIN)
    assert one.refined.requests == samples * one.now.requests
    assert one.refinement.expected_p99 == one.refined.p99


def test_in_overload_it_is_refined_for_the_requests_that_are_served():
    forecaster = Forecaster(situation(2200.0, service=NOISY))
    one = forecaster.assess(parameters(64))
    while not one.refine():
        pass
    # A p99 from the first sample is off by more than 10 % at times.
    assert one.refined.p99 == pytest.approx(one.now.p99, rel=0.15)
    assert one.refined.p99 < 0.2 < refined(forecaster, parameters(64)).p99
    assert one.refined.miss_fraction == pytest.approx(one.now.miss_fraction, rel=0.1)
    assert refined(forecaster, parameters(64), shed=True).p99 == one.refined.p99


@pytest.mark.parametrize("target", [1.0, 10.0, 60.0])
def test_what_full_batches_do_not_carry_is_lost_however_long_a_backlog_the_slo_allows(target):
    # 64 rows in 84 ms: 762/s at most; 16 rows in 36 ms: 444/s.
    service = ServiceTime.measured({1: 0.021, 64: 0.084})
    busy = replace(situation(900.0, service=service), target=target)
    forecaster = Forecaster(busy)
    assert forecaster.assess(parameters(64)).lost >= 1 - 762 / 900
    assert forecaster.assess(parameters(16)).lost >= 1 - 445 / 900
    assert most_efficient(forecaster, parameters(), [8, 16, 32, 48, 64]).parameters.max_batch == 64
