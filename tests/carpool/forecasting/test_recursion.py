"""The quick loop by itself: batch by batch, against the thorough one that takes each request by itself."""

from __future__ import annotations

import math
from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.batching.requests import ROUNDING
from carpool.forecasting import recursion as module
from carpool.forecasting.recursion import Rules, Run, Tally, due_with, recursion, refusing
from carpool.forecasting.replay import Kind, replay
from carpool.learning.arrivals import Gamma, first

TIMES = (0.0, *(0.005 + 0.0005 * rows for rows in range(1, 65)))
SLOW = tuple(1.6 * each for each in TIMES)


def rules(cap=64, wait=0.0, slots=1, *, passing=False, concurrency=1, target=0.05, draws=(1.0,), **more):
    return Rules(cap, wait, slots, passing, concurrency, target, draws=draws, **more)


def course(arrivals, given):
    return recursion(arrivals, TIMES[: given.cap + 1], SLOW[: given.cap + 1], given, keeps=True)


def batches(arrivals, given):
    """List what was added to the sums: the end, leave and finish of each batch."""

    class Recorder(Tally):
        def add(self, beyond, leave, finish):
            super().add(beyond, leave, finish)
            added.append((beyond, leave, finish))

    added = []
    with mock.patch.object(module, "Tally", Recorder):
        course(arrivals, given)
    return zip(*added, strict=True)


def tally(arrivals, *added, limit=0.05):
    found = Tally(arrivals, TIMES, limit, keeps=True)
    for batch in added:
        found.add(*batch)
    return found


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
    quick = course(arrivals, given)
    brief = recursion(arrivals, TIMES, SLOW, given)
    thorough = replay(arrivals, None, [Kind(1.0, tuple(TIMES), tuple(SLOW))], given)
    # Latencies of the one are in order of service, of the other in order of arrival: first come, first served.
    assert quick.latencies == pytest.approx(thorough.latencies)
    assert quick.sizes == thorough.sizes
    assert quick.rows == thorough.rows
    for field in ("busy", "work", "end"):
        assert getattr(brief, field) == getattr(quick, field) == pytest.approx(getattr(thorough, field)), field
    assert brief.waited == pytest.approx(math.fsum(thorough.latencies), abs=1e-9)
    assert brief.misses == sum(latency > given.target + ROUNDING for latency in thorough.latencies)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_refusals_of_one_queue_are_those_of_many(data):
    arrivals, given = some(data, shed=True, surely=data.draw(st.sampled_from([1.0, 1.4])))
    quick = refusing(arrivals, TIMES[: given.cap + 1], SLOW[: given.cap + 1], given)
    thorough = replay(arrivals, None, [Kind(1.0, tuple(TIMES), tuple(SLOW))], given)
    for field in ("latencies", "sizes", "rows", "busy", "work", "end"):
        assert getattr(quick, field) == getattr(thorough, field), field


@pytest.mark.pure
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_batch_breaks_a_rule(data):
    rng = Random(data.draw(st.integers(0, 2**32)))
    arrivals = list(first(Gamma(data.draw(st.floats(20, 6000)), 2.0), data.draw(st.integers(1, 400)), rng))
    given = rules(data.draw(st.integers(1, 64)), data.draw(st.sampled_from([0.0, 0.004, 0.2])), rng.randint(1, 4))
    ends, leaves, finishes = batches(arrivals, given)
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


@pytest.mark.pure
def test_a_full_batch_leaves_at_once_and_what_comes_at_that_moment_waits_for_the_next():
    ends, leaves, _ = batches([0.0, 0.01, 0.01], rules(2, 0.02, 2, concurrency=2))
    assert ends == (2, 3)
    assert leaves == pytest.approx((0.01, 0.03))


@pytest.mark.pure
def test_each_arrival_makes_the_batch_leave_earlier():
    # Due after 20 ms: one row may wait for 11.2 ms, two for 10.4, three for 9.6.
    holds = [0.02 - each for each in SLOW]
    assert due_with([0.0, 0.005, 0.0095, 0.0097], 0, holds, 1, 4) == 3
    ends, leaves, _ = batches([0.0, 0.005, 0.0095, 0.0097], rules(8, 0.2, target=0.02))
    assert ends == (3, 4)
    assert leaves[0] == pytest.approx(holds[3])


def test_late_requests_of_a_batch_are_its_first():
    one = tally([0.0, 0.005, 0.02, 0.03], (3, 0.03, 0.06), (4, 0.04, 0.07))
    assert (one.misses, one.squares) == (2, 4)
    assert one.latencies == pytest.approx([0.06, 0.055, 0.04, 0.04])
    assert (one.waited, one.work) == pytest.approx((0.195, TIMES[3] + TIMES[1]))


def test_seconds_with_a_batch_in_flight_count_once():
    arrivals = [0.0, 1.0, 5.0]
    assert tally(arrivals, (1, 0.0, 2.0), (2, 1.0, 3.0), (3, 5.0, 6.0)).busy == pytest.approx(4.0)
    assert tally(arrivals, (1, 0.0, 5.0), (2, 1.0, 2.0)).busy == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("late", "count", "squares"), [([0, 2, 3, 0, 0, 1], 6, 5**2 + 1), ([4, 4], 8, 64), ([0, 0], 0, 0)]
)
def test_batches_in_a_row_that_have_late_requests_are_one_burst(late, count, squares):
    run = Run()
    for each in late:
        run.missed(each)
    assert (run.misses, run.squares) == (count, squares)
