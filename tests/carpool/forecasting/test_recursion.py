"""The quick loop by itself: batch by batch, against the thorough one that takes each request by itself."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.forecasting.recursion import Course, Rules, due_with, in_bursts, recursion, refusing
from carpool.forecasting.replay import Kind, replay
from carpool.learning.arrivals import Gamma, first

TIMES = [0.0, *(0.005 + 0.0005 * rows for rows in range(1, 65))]
SLOW = [1.6 * each for each in TIMES]


def rules(cap=64, wait=0.0, slots=1, *, passing=False, concurrency=1, target=0.05, draws=(1.0,), **more):
    return Rules(cap, wait, slots, passing, concurrency, target, draws=draws, **more)


def course(arrivals, given):
    return recursion(arrivals, TIMES[: given.cap + 1], SLOW[: given.cap + 1], given)


def some(data, **more):
    """Draw arrivals and rules."""
    rng = Random(data.draw(st.integers(0, 2**32)))
    rate, cv = data.draw(st.floats(20, 6000)), data.draw(st.sampled_from([0.3, 1.0, 3.0]))
    arrivals = list(first(Gamma(rate, cv), data.draw(st.integers(1, 400)), rng))
    slots = data.draw(st.integers(1, 8))
    return arrivals, rules(
        data.draw(st.integers(1, 64)),
        data.draw(st.sampled_from([0.0, 0.001, 0.004, 0.02, 0.045, 0.2])),
        slots,
        concurrency=data.draw(st.integers(1, slots)),
        target=data.draw(st.sampled_from([0.02, 0.05, 0.2])),
        draws=data.draw(st.sampled_from([(1.0,), (0.7, 1.9, 0.8)])),
        **more,
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_batch_by_batch_is_the_same_as_request_by_request(data):
    arrivals, given = some(data, passing=data.draw(st.booleans()))
    quick = course(arrivals, given).run(arrivals, TIMES)
    thorough = replay(arrivals, None, [Kind(1.0, tuple(TIMES), tuple(SLOW))], given)
    # Latencies of the one are in order of service, of the other in order of arrival: first come, first served.
    assert quick.latencies == pytest.approx(thorough.latencies)
    assert quick.sizes == thorough.sizes
    assert quick.rows == thorough.rows
    for field in ("busy", "work", "end"):
        assert getattr(quick, field) == pytest.approx(getattr(thorough, field)), field


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_refusals_of_one_queue_are_those_of_many(data):
    arrivals, given = some(data, shed=True, surely=data.draw(st.sampled_from([1.0, 1.4])))
    quick = refusing(arrivals, TIMES[: given.cap + 1], SLOW[: given.cap + 1], given)
    thorough = replay(arrivals, None, [Kind(1.0, tuple(TIMES), tuple(SLOW))], given)
    assert quick == thorough


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_batch_breaks_a_rule(data):
    rng = Random(data.draw(st.integers(0, 2**32)))
    arrivals = list(first(Gamma(data.draw(st.floats(20, 6000)), 2.0), data.draw(st.integers(1, 400)), rng))
    given = rules(data.draw(st.integers(1, 64)), data.draw(st.sampled_from([0.0, 0.004, 0.2])), rng.randint(1, 4))
    ends, leaves, finishes = course(arrivals, given)
    begun = 0
    for number, (end, leave) in enumerate(zip(ends, leaves, strict=True)):
        assert 1 <= end - begun <= given.cap
        assert leave >= arrivals[end - 1], "none leaves before it came"
        assert sum(finish > leave for finish in finishes[:number]) < given.slots
        free = max(finishes[:number]) if given.slots == 1 and number else -math.inf
        latest = max(arrivals[begun] + min(given.wait, max(given.target - SLOW[1], 0.0)), free, arrivals[end - 1])
        assert given.slots > 1 or leave <= latest + 1e-12, "nor is one held beyond its wait"
        begun = end
    assert begun == len(arrivals)


def test_a_full_batch_leaves_at_once_and_what_comes_at_that_moment_waits_for_the_next():
    found = course([0.0, 0.01, 0.01], rules(2, 0.02, 2, concurrency=2))
    assert found.ends == [2, 3]
    assert found.leaves == pytest.approx([0.01, 0.03])


def test_each_arrival_makes_the_batch_leave_earlier():
    # Due after 20 ms: one row may wait for 11.2 ms, two for 10.4, three for 9.6.
    holds = [0.02 - each for each in SLOW]
    assert due_with([0.0, 0.005, 0.0095, 0.0097], 0, holds, 1, 4) == 3
    assert course([0.0, 0.005, 0.0095, 0.0097], rules(8, 0.2, target=0.02)).ends == [3, 4]
    assert course([0.0, 0.005, 0.0095, 0.0097], rules(8, 0.2, target=0.02)).leaves[0] == pytest.approx(holds[3])


def test_late_requests_of_a_batch_are_its_first():
    one = Course([3, 4], [0.03, 0.04], [0.06, 0.07])
    arrivals = [0.0, 0.005, 0.02, 0.03]
    assert list(one.late(arrivals, 0.05)) == [2, 0]
    assert one.run(arrivals, TIMES).latencies == pytest.approx([0.06, 0.055, 0.04, 0.04])
    assert one.sums(arrivals, TIMES) == pytest.approx((0.195, TIMES[3] + TIMES[1]))


def test_seconds_with_a_batch_in_flight_count_once():
    assert Course([1, 2, 3], [0.0, 1.0, 5.0], [2.0, 3.0, 6.0]).busy() == pytest.approx(4.0)
    assert Course([1, 2], [0.0, 1.0], [5.0, 2.0]).busy() == pytest.approx(5.0)


def test_batches_in_a_row_that_have_late_requests_are_one_burst():
    assert in_bursts([0, 2, 3, 0, 0, 1]) == (6, 5**2 + 1)
    assert in_bursts([4, 4]) == (8, 64)
    assert in_bursts([0, 0]) == (0, 0)
