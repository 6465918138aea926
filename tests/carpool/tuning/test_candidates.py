from __future__ import annotations

import pytest
from examples import CURVE, LIMITS, parameters, situation
from msgspec.structs import replace

from carpool.forecasting.forecaster import Forecaster
from carpool.learning.latency_model import ServiceTime
from carpool.policy.parameters import Limits
from carpool.tuning.candidates import (
    SIZES,
    VAIN,
    WAITS,
    Grid,
    known_flights,
    largest_reliable,
    productive_sizes,
)


def of_rows(*seconds):
    """Return a curve whose batches of one row, two, and so on take so many seconds per row."""
    return ServiceTime.measured({rows: rows * each for rows, each in enumerate(seconds, 1)})


# -- sizes


def sizes(service, most=64, least=1, also=1):
    return productive_sizes(service, replace(LIMITS, min_batch=least, max_batch=most), also=also)


def test_where_rows_get_cheaper_all_usual_sizes_are_compared():
    assert sizes(CURVE) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert sizes(CURVE, 16)[-1] == 16


def test_bounds_and_the_size_in_force_are_compared_too():
    assert sizes(CURVE, 10, 3, also=7) == [3, 4, 6, 7, 8, 10]


@pytest.mark.parametrize("also", [1, 64])
def test_what_is_in_force_beyond_the_bounds_is_not(also):
    assert sizes(CURVE, 8, 2, also) == [2, 3, 4, 6, 8]


def test_where_rows_get_dearer_no_larger_batch_is_compared():
    assert sizes(ServiceTime.measured({rows: 0.001 * rows**1.2 for rows in range(1, 33)}), 32) == [1]


def test_a_size_as_cheap_as_any_is_compared_though_others_before_it_are_dearer():
    assert sizes(of_rows(4, 2, 3, 2, 3), 5) == [1, 2, 3, 4]


def test_a_size_that_may_be_as_cheap_is_compared():
    dearer = of_rows(4, 2, 2.2)
    assert sizes(dearer, 3) == [1, 2]
    assert sizes(replace(dearer, lowers=(*dearer.lowers[:-1], 3 * 1.9)), 3) == [1, 2, 3]


def test_nothing_beyond_twice_the_largest_size_measured_is_compared():
    assert sizes(ServiceTime.measured({1: 0.0055, 2: 0.006, 4: 0.007})) == [1, 2, 3, 4, 6, 8]


def test_the_largest_reliable_size_is_one_of_those_usually_compared():
    def largest(measured, most=64):
        return largest_reliable(ServiceTime.measured({1: 0.005, measured: 0.006}), replace(LIMITS, max_batch=most))

    assert largest(23) == 32, "46 rows would be 4 % short of 48, and stay so"
    assert largest(24) == 48
    assert largest(23, most=46) == 46, "a bound is a size too"
    assert largest(800, most=1500) == 1500
    assert largest(1100, most=8192) == 2048, "up to the largest bound there may be"
    assert largest(60_000, most=65_536) == 65_536 == SIZES[-1]


# -- batches in flight, waits


def test_as_many_are_in_flight_as_the_device_is_known_to_compute_at_once():
    assert known_flights(CURVE, LIMITS) == 1
    quad = replace(CURVE, executors=4, largest_in_flight=4)
    assert known_flights(quad, LIMITS) == 4
    assert known_flights(quad, replace(LIMITS, max_in_flight=3)) == 3
    assert known_flights(CURVE, replace(LIMITS, min_in_flight=2)) == 2


def test_waits_are_whole_microseconds_between_the_bounds():
    waits = Limits(1, 64, 0.002, 0.010, 1, 1).waits(WAITS)
    assert (waits[0], waits[-1]) == (0.002, 0.010)
    assert waits == sorted(waits)
    assert all(wait == round(wait, 6) for wait in LIMITS.waits(WAITS))
    assert LIMITS.waits(WAITS)[0] == 0.0


# -- the grid


def grid(rate, *sizes, avoid=(), **changes):
    return Grid(Forecaster(situation(rate, **changes)), sizes, 1, avoid)


def test_of_each_size_the_longest_wait_that_meets_the_slo_is_found():
    (found,) = grid(500.0, 16).with_headroom()
    assert found.holds_ahead
    # The load fills 16 rows before that wait ends, so that more of it would be in vain.
    waits = LIMITS.waits(WAITS)
    longer = [parameters(16, wait) for wait in waits if wait > found.parameters.max_wait]
    assessed = [Forecaster(situation(500.0)).assess(point) for point in longer]
    enough = found.device_time * (1 - VAIN)
    assert all(not one.holds_ahead or one.device_time >= 0.999 * enough for one in assessed)


def test_a_wait_that_gathers_no_more_is_not_taken():
    (alone,) = grid(100.0, 1).with_headroom()
    assert alone.parameters.max_wait == 0.0


def test_sizes_that_can_not_carry_the_load_are_left_out():
    # Single rows serve 182/s.
    assert grid(500.0, 1).with_headroom() == []
    assert len(grid(500.0, 1).unheld()) == 1


def test_settings_to_be_avoided_are_left_out():
    (found,) = grid(500.0, 16).with_headroom()
    (other,) = grid(500.0, 16, avoid={found.parameters}).with_headroom()
    assert other.parameters.max_wait < found.parameters.max_wait
    assert grid(500.0, 16, avoid={parameters(16)}).unheld() == []
