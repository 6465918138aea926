from __future__ import annotations

import pytest
from examples import CURVE, LIMITS, parameters
from msgspec.structs import replace

from carpool.learning.latency_model import ServiceTime
from carpool.tuning.candidate_range import flights_worth, productive, sizes_within


def rows_cost(*each):
    """Return a curve whose batches of one row, two, and so on cost so much a row."""
    return ServiceTime.measured({rows: rows * cost for rows, cost in enumerate(each, 1)})


# -- sizes


def test_the_grid_has_the_bounds_what_lies_between_them_and_what_is_in_force():
    assert sizes_within((1, 2, 4, 8, 16), 3, 10, also=7) == [3, 4, 7, 8, 10]


@pytest.mark.parametrize(("also", "found"), [(1, [2, 4, 8]), (4, [2, 4, 8]), (64, [2, 4, 8])])
def test_the_grid_stays_within_bounds_and_has_each_value_once(also, found):
    assert sizes_within((1, 2, 4, 8, 16), 2, 8, also=also) == found


# Four waves of 13 rows: the last of each is the cheapest.
def test_where_rows_get_cheaper_all_sizes_are_within_reach():
    assert productive(CURVE, 64) == 64
    assert productive(CURVE, 16) == 16
    # Beyond the largest measured, where the line goes on, too.
    assert productive(CURVE, 128) == 128


def test_where_rows_get_dearer_no_larger_batch_is_within_reach():
    assert productive(ServiceTime.measured({rows: 0.001 * rows**1.2 for rows in range(1, 33)}), 32) == 1


def test_a_size_as_cheap_as_any_is_within_reach_though_others_before_it_are_dearer():
    assert productive(rows_cost(4, 2, 3, 2, 3), 5) == 4


def test_a_size_that_may_be_as_cheap_is_within_reach():
    dearer = rows_cost(4, 2, 2.2)
    assert productive(dearer, 3) == 2
    assert productive(replace(dearer, lowers=(*dearer.lowers[:-1], 3 * 1.9)), 3) == 3


# -- batches in flight


def test_while_every_batch_in_flight_was_computed_twice_and_four_times_as_many_are_worth_trying():
    hopeful = replace(CURVE, executors=2, largest_in_flight=2)
    assert flights_worth(hopeful, LIMITS, parameters()) == [1, 2, 4, 8]


def test_once_more_were_in_flight_than_are_computed_no_more_are_worth_trying():
    known = replace(CURVE, executors=2, largest_in_flight=3)
    assert flights_worth(known, LIMITS, parameters(flights=2)) == [1, 2]


def test_what_is_in_force_is_worth_trying_again():
    assert flights_worth(CURVE, LIMITS, parameters(flights=5)) == [1, 5]


def test_numbers_in_flight_stay_within_bounds():
    hopeful = replace(CURVE, executors=2, largest_in_flight=2)
    assert flights_worth(hopeful, replace(LIMITS, max_in_flight=3), parameters()) == [1, 2, 3]
    assert flights_worth(hopeful, replace(LIMITS, min_in_flight=3), parameters()) == [3, 4, 8]
