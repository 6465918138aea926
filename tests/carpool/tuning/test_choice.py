"""Which setting is chosen under Efficiency, and how settings are ranked. Pure: forecasts of a known device."""

from __future__ import annotations

import pytest
from examples import CURVE, LIMITS, parameters, situation, tiled
from msgspec.structs import replace

from carpool.forecasting.forecast import Glance
from carpool.forecasting.forecaster import Forecaster
from carpool.learning.latency_model import ServiceTime
from carpool.policy.parameters import Limits
from carpool.policy.spec import PassThroughMode
from carpool.tuning import messages
from carpool.tuning.candidates import SIZES, WAITS
from carpool.tuning.moves import is_worth
from carpool.tuning.objective import Aim, choose, is_better, rank


def chosen_by(forecaster, current, **options):
    return choose(forecaster, Aim(), current, PassThroughMode.NEVER, **options).target


def best(rate, **changes):
    found = situation(rate, **changes)
    return chosen_by(Forecaster(found), found.limits.clamp(parameters(8)))


def test_at_mid_load_waiting_is_chosen_for_the_device_time_it_saves():
    chosen = best(700.0)
    greedy = Forecaster(situation(700.0)).assess(parameters(64))
    assert chosen.holds_ahead
    assert chosen.parameters.max_wait > 0.01
    assert chosen.now.device_time < 0.6 * greedy.now.device_time


def test_the_choice_holds_at_a_quarter_more_load_where_any_does():
    for rate in (200.0, 500.0, 900.0, 1050.0):
        chosen = best(rate)
        assert chosen.holds_ahead
        assert chosen.ahead.miss_fraction <= 0.005


def test_near_capacity_the_fastest_that_holds_now_is_chosen():
    chosen = best(1350.0)
    assert chosen.holds_now
    assert not chosen.holds_ahead
    assert rank(chosen)[0] == 1


BERT = {1: 1.95, 2: 2.71, 4: 4.53, 8: 9.09, 12: 12.53, 16: 17.9, 64: 72.04}
MATRIX = {2: 6.34, 3: 7.16, 8: 17.99, 10: 28.51, 32: 28.51, 33: 55.6, 64: 55.6}


@pytest.mark.parametrize("rate", [200.0, 250.0, 350.0])
@pytest.mark.parametrize(("milliseconds", "target"), [(BERT, 0.010), (MATRIX, 0.040)])
def test_what_is_chosen_is_hardly_worse_than_the_best_there_is(milliseconds, target, rate):
    # Small batches with a long wait beat large ones with a short one, or the reverse: what lies between is worse.
    service = replace(ServiceTime.measured({rows: ms / 1e3 for rows, ms in milliseconds.items()}), largest_in_flight=2)
    limits = replace(LIMITS, max_wait=target / 2)
    forecaster = Forecaster(situation(rate, service=service, target=target, limits=limits))
    chosen = chosen_by(forecaster, parameters(32))
    grid = [parameters(size, share * limits.max_wait) for size in SIZES if size <= 64 for share in WAITS]
    least = min((one.device_time for one in map(forecaster.assess, grid) if one.holds_ahead), default=None)
    assert chosen.holds_ahead is (least is not None)
    assert least is None or chosen.device_time < 1.01 * least


def test_one_tile_is_found_from_two_though_what_lies_between_is_far_worse():
    for size in (64, 32):
        chosen = chosen_by(tiled(1030.0), parameters(size, 0.075))
        assert chosen.parameters.max_batch == 32
        assert chosen.holds_now


def test_where_one_figure_is_hardly_better_the_next_one_decides():
    forecaster = Forecaster(situation(1350.0))
    one, other = (forecaster.assess(parameters(size)) for size in (64, 48))

    def lose(assessment, now, ahead):
        assessment.__dict__.update(glance=Glance(now, 0.0007, 0.02, 0.9), lost_ahead=ahead)

    lose(one, 0.002, 0.10)
    lose(other, 0.005, 0.11)
    assert is_better(one, other, 0.02)
    assert not is_better(other, one, 0.02)
    lose(one, 0.005, 0.10)
    lose(other, 0.002, 0.11)
    assert not is_better(one, other, 0.02)


def test_without_headroom_the_shorter_of_two_waits_is_better_that_lose_as_much():
    forecaster = Forecaster(situation(1350.0))
    held, unheld = forecaster.assess(parameters(64, 0.02)), forecaster.assess(parameters(64))
    for one in (held, unheld):
        one.__dict__.update(glance=Glance(0.0, 0.0007, 0.02, 0.9), lost_ahead=0.1, device_time=0.0007)
    held.__dict__.update(device_time=0.0006)
    assert is_better(unheld, held, 0.02)
    assert not is_better(held, unheld, 0.02)
    # A wait that loses less is worth it all the same.
    held.__dict__.update(lost_ahead=0.05)
    assert is_better(held, unheld, 0.02)


def test_in_overload_the_most_goodput_is_chosen():
    chosen = best(3000.0)
    assert not chosen.holds_now
    assert chosen.now.goodput > 1400
    assert chosen.now.shed_fraction > 0.3


def test_a_superlinear_model_is_not_batched():
    service = ServiceTime.measured({rows: 0.0057 * rows**1.12 for rows in range(1, 65)})
    assert best(60.0, service=service).parameters.max_batch == 1


def test_a_tight_slo_forbids_the_wait():
    limits = replace(LIMITS, max_wait=0.006)
    chosen = best(400.0, target=0.012, limits=limits)
    assert chosen.now.p99 <= 0.012 + 1e-9
    assert chosen.parameters.max_wait < 0.006


def test_nothing_beyond_twice_the_largest_size_measured_is_chosen():
    service = ServiceTime.measured({1: 0.0055, 2: 0.006, 4: 0.007})
    assert best(1000.0, service=service).parameters.max_batch <= 8


def test_bounds_are_kept():
    limits = Limits(2, 16, 0.002, 0.008, 2, 2)
    for rate in (50.0, 700.0, 3000.0):
        chosen = best(rate, limits=limits).parameters
        assert 2 <= chosen.max_batch <= 16
        assert 0.002 <= chosen.max_wait <= 0.008
        assert chosen.max_in_flight == 2


def test_where_none_is_answered_in_time_the_smallest_batch_shows_soonest_whether_any_can_be():
    chosen = best(700.0, service=ServiceTime.measured({32: 1.0}))
    assert not chosen.now.goodput
    assert chosen.parameters.max_batch == 1
    assert chosen.parameters.max_wait == 0


@pytest.mark.parametrize("rate", [10.0, 75.0, 200.0])
def test_an_slo_shorter_than_one_request_takes_costs_no_throughput(rate):
    # 22 ms alone, 148 ms for 64 rows: one by one 45/s, in batches 430/s. With 10ms for 100ms answers are late,
    # but no queue grows.
    slow = ServiceTime.measured({rows: 0.020 + 0.002 * rows for rows in range(1, 65)})
    for target in (0.010, 0.021):
        chosen = best(rate, service=slow, target=target, limits=replace(LIMITS, max_wait=target / 2))
        assert chosen.parameters.max_wait == 0
        assert chosen.mean == pytest.approx(
            Forecaster(chosen.situation).assess(parameters(64, flights=chosen.parameters.max_in_flight)).mean, rel=0.02
        )
        assert messages.out_of_reach(chosen) == (
            "one request alone takes 22ms, longer than the SLO: raise it; until then no request waits for others"
        )
        # Nothing is better, so it stays.
        again = chosen_by(Forecaster(chosen.situation), chosen.parameters)
        assert not is_worth(again, chosen)
    assert not messages.out_of_reach(best(rate, service=slow, target=0.1))
    # While all requests passed through, thousands waited in the server: that shows nothing of one alone.
    queued = replace(slow, executors=1000, largest_in_flight=1000)
    assert not messages.out_of_reach(best(rate, service=queued, target=0.01))


def test_an_slo_is_out_of_reach_only_if_the_smallest_requests_miss_it():
    slow = ServiceTime.measured({rows: 0.0025 + 0.0025 * rows for rows in range(1, 65)})
    # One request in 17 has 64 rows and takes 160 ms, so the mean has 5 and takes 15; the others take 5.
    shares = (0.94, *[0.0] * 5, 0.06)
    assert not situation(5.0, service=slow, target=0.014, rows=4.8, row_shares=shares).is_out_of_reach
    # All have 17 rows or more, and take 45 ms at least.
    large = (*[0.0] * 5, 0.5, 0.5)
    assert situation(5.0, service=slow, target=0.014, rows=36.0, row_shares=large).is_out_of_reach
    assert not situation(5.0, service=slow, target=0.050, rows=36.0, row_shares=large).is_out_of_reach


def test_no_more_are_in_flight_than_are_computed_at_once_or_were_in_force():
    unknown = replace(CURVE, executors=2, largest_in_flight=2)
    assert best(1000.0, service=unknown).parameters.max_in_flight in {1, 2}
    assert chosen_by(Forecaster(situation(700.0)), parameters(8, 0.01, 4)).parameters.max_in_flight in {1, 4}


def test_what_is_to_be_avoided_is_not_chosen():
    forecaster = Forecaster(situation(700.0))
    first = chosen_by(forecaster, parameters(8))
    second = chosen_by(forecaster, parameters(8), avoid={first.parameters})
    assert second.parameters != first.parameters
    assert second.holds_ahead


def test_only_given_sizes_are_compared():
    assert chosen_by(Forecaster(situation(700.0)), parameters(8), sizes=[16]).parameters.max_batch == 16


def test_what_is_lost_of_the_present_load_outweighs_what_would_be_of_more():
    forecaster = tiled(1010.0)
    one, two = (forecaster.assess(parameters(size, 0.075)) for size in (32, 64))
    assert one.holds_now
    assert two.lost_ahead < one.lost_ahead
    assert two.glance.miss_fraction > one.glance.miss_fraction
    assert rank(one) < rank(two)


@pytest.mark.parametrize("mode", [PassThroughMode.AUTOMATIC, PassThroughMode.ALWAYS])
def test_requests_pass_where_batching_saves_too_little_or_always(mode):
    rate = 0.2 if mode is PassThroughMode.AUTOMATIC else 300.0
    chosen = choose(Forecaster(situation(rate)), Aim(), parameters(8), mode).target
    assert chosen.parameters.pass_through
    assert choose(
        Forecaster(situation(300.0)), Aim(), parameters(8), PassThroughMode.AUTOMATIC
    ).target.parameters.max_wait
