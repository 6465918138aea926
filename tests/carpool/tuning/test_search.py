from __future__ import annotations

import pytest
from examples import CURVE, LIMITS, parameters, situation, tiled
from msgspec.structs import replace

from carpool.forecasting.queueing import Glance, glance
from carpool.learning.arrivals import Gamma
from carpool.learning.latency_model import ServiceTime
from carpool.policy.parameters import Limits
from carpool.tuning.assessment import WEIGHED, Assessor
from carpool.tuning.candidate_range import SIZES, WAITS, spoken_for
from carpool.tuning.search import choose, is_better


def best(rate, **changes):
    return choose(Assessor(situation(rate, **changes)), parameters(8)).best


def test_at_mid_load_waiting_is_chosen_for_the_device_time_it_saves():
    chosen = best(700.0)
    greedy = Assessor(situation(700.0)).assess(parameters(64))
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
    assert chosen.rank[0] == 1


@pytest.mark.parametrize(("rate", "wants"), [(1100.0, True), (1300.0, False), (1600.0, True)])
def test_a_size_never_used_is_turned_to_for_what_it_saves_or_restores_and_not_for_margin(rate, wants):
    measured = ServiceTime.measured({rows: 0.008 + 0.0004 * rows for rows in (1, 8, 16, 24, 32)})
    service = replace(measured, largest_in_flight=2)
    assessor, current = Assessor(situation(rate, service=service)), parameters(32, 0.0125)
    assert choose(assessor, current).best.parameters.max_batch > 32
    assert (choose(assessor, current, unused=0.1).best.parameters.max_batch > 32) is wants


BERT = {1: 1.95, 2: 2.71, 4: 4.53, 8: 9.09, 12: 12.53, 16: 17.9, 64: 72.04}
MATRIX = {2: 6.34, 3: 7.16, 8: 17.99, 10: 28.51, 32: 28.51, 33: 55.6, 64: 55.6}


@pytest.mark.parametrize("rate", [200.0, 250.0, 350.0])
@pytest.mark.parametrize(("milliseconds", "target"), [(BERT, 0.010), (MATRIX, 0.040)])
def test_what_is_chosen_is_hardly_worse_than_the_best_there_is(milliseconds, target, rate):
    # Small batches with a long wait beat large ones with a short one, or the reverse: what lies between is worse.
    service = replace(ServiceTime.measured({rows: ms / 1e3 for rows, ms in milliseconds.items()}), largest_in_flight=2)
    limits = replace(LIMITS, max_wait=target / 2)
    assessor = Assessor(situation(rate, service=service, target=target, limits=limits))
    chosen = choose(assessor, parameters(32)).best
    grid = [parameters(size, share * limits.max_wait) for size in SIZES if size <= 64 for share in WAITS]
    least = min((one.device_time for one in map(assessor.assess, grid) if one.holds_ahead), default=None)
    assert chosen.holds_ahead is (least is not None)
    assert least is None or chosen.device_time < 1.01 * least


def test_one_tile_is_found_from_two_though_what_lies_between_is_far_worse():
    for size in (64, 32):
        chosen = choose(tiled(1030.0), parameters(size, 0.075)).best
        assert chosen.parameters.max_batch == 32
        assert chosen.holds_now


def test_where_one_figure_is_hardly_better_the_next_one_decides():
    assessor = Assessor(situation(1350.0))
    one, other = (assessor.assess(parameters(size)) for size in (64, 48))

    def lose(assessment, now, ahead):
        assessment.outlook.__dict__.update(glance=Glance(now, 0.0007), excess=ahead)

    lose(one, 0.002, 0.10)
    lose(other, 0.005, 0.11)
    assert is_better(one, other, 0.02)
    assert not is_better(other, one, 0.02)
    lose(one, 0.005, 0.10)
    lose(other, 0.002, 0.11)
    assert not is_better(one, other, 0.02)


def test_of_equals_that_which_makes_fewer_late_is_chosen():
    # One of four executors is always busy: no setting takes less of the device, but 48 rows are late at times.
    service = ServiceTime.measured({rows: 0.02 + 0.002 * rows for rows in range(1, 65)}, noise=0.4, executors=4)
    limits = replace(LIMITS, max_wait=0.15, max_in_flight=8)
    assessor = Assessor(situation(950.0, service=replace(service, largest_in_flight=5), target=0.3, limits=limits))
    chosen = choose(assessor, parameters(32, 0.15, flights=4)).best
    assert chosen.holds_ahead
    assert chosen.misses < 0.001
    dear = [assessor.assess(parameters(48, wait, flights=4)) for wait in (0.075, 0.15)]
    assert all(one.misses > 0.002 for one in dear)
    assert all(one.device_time > 0.997 * chosen.device_time for one in dear)


def test_in_overload_the_most_goodput_is_chosen():
    chosen = best(3000.0)
    assert not chosen.holds_now
    assert chosen.now.goodput > 1400
    assert chosen.now.shed_fraction > 0.3


def test_where_nobody_is_answered_in_time_executors_are_looked_for_with_the_smallest_batch():
    slow = ServiceTime.measured({32: 1.0})
    chosen = best(700.0, service=slow)
    assert not chosen.now.goodput
    assert chosen.parameters == parameters(1, flights=4)
    # Not where more than one were tried in vain.
    assert best(700.0, service=replace(slow, largest_in_flight=4)).parameters == parameters(1)


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


def test_more_in_flight_is_tried_only_while_nobody_knows_better():
    unknown = replace(CURVE, executors=2, largest_in_flight=2)
    assert best(3000.0, service=unknown).parameters.max_in_flight == 4
    serial = replace(CURVE, executors=1, largest_in_flight=4)
    assert best(1000.0, service=serial).parameters.max_in_flight == 1


def test_a_saving_is_weighed_over_other_requests_than_those_that_chose_it():
    noisy = replace(CURVE, noise=0.2, executors=2, largest_in_flight=2)
    bursty = situation(600.0, process=Gamma(600.0, 2.0), service=noisy)
    assessor = Assessor(bursty)
    choice = choose(assessor, parameters(4, 0.0, 2))
    for one in (choice.best, choice.current):
        lots = [Assessor(bursty)._lot(number, ahead=False) for number in range(WEIGHED)]
        found = [
            glance(times, noisy, one.parameters, bursty.target, noise_draws=draws).device_time for times, draws in lots
        ]
        assert one.device_time == pytest.approx(sum(found) / len(found))
        assert one.device_time != pytest.approx(found[0], rel=1e-3)


def test_where_nothing_would_be_changed_nothing_is_weighed(monkeypatch):
    best = choose(Assessor(situation(300.0)), parameters(8)).best.parameters
    monkeypatch.delattr(Assessor, "weighed")
    assert choose(Assessor(situation(300.0)), best).best.parameters == best


def test_sizes_spoken_for_are_those_usually_tried():
    def reach(largest, most=64):
        return spoken_for(ServiceTime.measured({1: 0.005, largest: 0.006}), replace(LIMITS, max_batch=most))

    assert reach(23) == 32, "46 rows would be 4 % short of 48, and stay so"
    assert reach(24) == 48
    assert reach(23, most=46) == 46, "a bound is a size too"
    assert reach(800, most=1500) == 1500
    assert reach(1100, most=8192) == 2048, "up to the largest bound there may be"
    assert reach(60_000, most=65_536) == 65_536


def test_margin_is_restored_by_what_is_known_before_more_in_flight_is_tried():
    # Two executors, and nobody knows whether there are more: two were in flight at most.
    pair = ServiceTime.measured({rows: 0.002 + 0.002 * rows for rows in range(1, 65)}, executors=2)
    assessor = Assessor(situation(450.0, service=pair))
    lost, kept = choose(assessor, parameters(1)), choose(assessor, parameters(8, 0.0125, 2))
    assert not lost.current.holds_ahead
    assert kept.current.holds_ahead
    assert lost.best.holds_ahead
    assert lost.best.parameters.max_in_flight == 2
    assert kept.best.parameters.max_in_flight > 2, "it may save device time"


def test_no_setting_in_force_is_left_for_executors_without_which_the_slo_is_broken():
    # Rows get cheaper up to eight and no further. In the hope of a second executor single rows look best, of which the
    # one that is known serves 500/s.
    bending = ServiceTime.measured({1: 0.002, 2: 0.0035, 4: 0.0066, 8: 0.0128, 16: 0.0252, 32: 0.05})
    assert bending.largest_in_flight == 1
    limits = replace(LIMITS, max_wait=0.025)
    assessor = Assessor(situation(512.0, service=bending, target=0.05, limits=limits))
    hoping = assessor.assess(parameters(1, 0.025, 2))
    chosen = choose(assessor, parameters(16, 0.0125))
    assert chosen.current.holds_now
    assert hoping.holds_ahead
    assert hoping.device_time < chosen.best.device_time
    # Without that executor it keeps the SLO too.
    sober = Assessor(replace(assessor.situation, service=replace(bending, largest_in_flight=8)))
    assert not sober.assess(hoping.parameters).holds_now
    assert sober.assess(chosen.best.parameters).holds_now
    # Who does not keep it as it is has nothing to lose.
    drowning = Assessor(situation(800.0, service=bending, target=0.05, limits=limits))
    assert choose(drowning, parameters(16, 0.0125)).best.parameters.max_in_flight > 1
