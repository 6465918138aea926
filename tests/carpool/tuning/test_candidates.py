from __future__ import annotations

import pytest
from examples import CURVE, LIMITS, parameters, situation
from msgspec.structs import replace

from carpool.forecasting.forecaster import Forecaster
from carpool.learning.latency_model import ServiceTime
from carpool.policy.parameters import Limits
from carpool.tuning.candidates import (
    SIZES,
    TAKES,
    VAIN,
    WAITS,
    Grid,
    known_flights,
    largest_reliable,
    productive_sizes,
    to_measure,
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


# -- what is measured for the capacity


def measured(*seen, noise=0.0, count=5.0):
    """A latency model; the sizes ``seen`` were measured ``count`` times each."""
    curve = ServiceTime.measured({size: CURVE.time(size) for size in seen}, noise=noise)
    return replace(curve, counts=tuple(count for _ in seen))


def order(service, target, limits=LIMITS):
    """The sizes that are measured one after the other, each taking what it does."""
    found = []
    seen = list(service.sizes)
    while (size := to_measure(service, limits, target)) is not None:
        assert size not in seen
        found.append(size)
        seen = sorted([*seen, size])
        service = measured(*seen)
    return found


def test_the_largest_is_measured_first_and_at_most_twice_the_largest_known():
    found = order(measured(1, 2, 3, 4), 1.0)
    assert found[:4] == [8, 16, 32, 64]
    assert sorted(found) == [6, 8, 12, 16, 24, 32, 48, 64]


def test_what_lies_between_comes_first_where_a_step_may_be():
    """48 rows take twice as long as 24 in tiles of 32, so 32 may take as little as 24. 64 take hardly more than 48."""
    tiles = {rows: 0.004 + 0.024 * -(-rows // 32) for rows in range(1, 129)}
    service = replace(ServiceTime.measured({rows: tiles[rows] for rows in (1, 2, 4, 8, 16, 24)}), largest_in_flight=2)
    assert to_measure(service, LIMITS, 1.0) == 48
    stepped = replace(
        ServiceTime.measured({rows: tiles[rows] for rows in (1, 2, 4, 8, 16, 24, 48)}), largest_in_flight=2
    )
    assert to_measure(stepped, LIMITS, 1.0) == 32


def test_a_batch_that_takes_too_much_of_the_slo_is_not_measured():
    service = measured(1, 2, 3, 4)
    target = max(service.time(6) / TAKES, service.upper(6))
    assert to_measure(service, LIMITS, 1.01 * target) == 6
    assert to_measure(service, LIMITS, 0.99 * target) is None


def test_nothing_is_measured_beyond_the_bounds_nor_where_rows_get_dearer():
    assert order(measured(1, 2, 3, 4), 1.0, replace(LIMITS, max_batch=6)) == [6]
    dear = ServiceTime.measured({rows: 0.001 * rows**1.5 for rows in (1, 2, 3, 4)})
    assert to_measure(dear, LIMITS, 10.0) is None


def test_one_batch_shows_a_size_and_of_a_noisy_model_two():
    once = replace(measured(1, 2, 3, 4, 6, 8), counts=(9.0, 9.0, 9.0, 9.0, 9.0, 1.0))
    assert to_measure(once, LIMITS, 1.0) == 16
    assert to_measure(replace(once, noise=0.3), LIMITS, 1.0) in {8, 12, 16}
    twice = replace(once, noise=0.3, counts=(9.0, 9.0, 9.0, 9.0, 9.0, 2.0))
    assert to_measure(twice, LIMITS, 1.0) != 8
