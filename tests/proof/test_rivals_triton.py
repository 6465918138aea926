from __future__ import annotations

from random import Random

import pytest
from proof.rivals.triton import Triton, contender, preferred_sizes
from rivalry import batches, come, known, refusals, sizes


def triton(**options):
    return Triton(**{"slots": 1, "preferred": (4, 8), "delay": 0.010, **options})


@pytest.mark.parametrize(
    ("largest", "preferred"),
    [(1, (1,)), (3, (3,)), (4, (4,)), (5, (4, 5)), (40, (4, 8, 16, 32, 40)), (64, (4, 8, 16, 32, 64))],
)
def test_preferred_sizes_are_powers_of_two_and_the_largest(largest, preferred):
    assert preferred_sizes(largest) == preferred


def test_a_preferred_size_leaves_at_once():
    assert sizes(come(triton(), [0.0, 0.001, 0.002, 0.003])) == [4]


def test_any_other_waits_for_the_delay():
    batcher = triton()
    assert sizes(come(batcher, [0.0, 0.001, 0.002])) == []
    assert batcher.wake_at() == 0.010
    assert sizes(batcher.poll(0.010)) == [3]


def test_of_what_waits_the_largest_preferred_size_leaves_and_the_rest_waits_on():
    batcher = triton()
    (first,) = batches(come(batcher, [0.0] * 4))
    come(batcher, [0.004] * 6)
    # Four of six leave at once; two are left until 14 ms.
    (second,) = batches(batcher.complete(first, 0.007))
    assert second.rows == 4
    batcher.complete(second, 0.009)
    assert batcher.wake_at() == 0.014


def test_after_the_delay_all_leave_that_fit():
    batcher = triton()
    (first,) = batches(come(batcher, [0.0] * 4))
    come(batcher, [0.004] * 6)
    assert sizes(batcher.complete(first, 0.014)) == [6]


def test_who_queued_beyond_the_timeout_is_rejected():
    batcher = triton(timeout=0.020)
    (first,) = batches(come(batcher, [0.0] * 4))
    come(batcher, [0.001, 0.002, 0.010])
    actions = batcher.complete(first, 0.023)
    assert refusals(actions) == ["predicted-late"] * 2
    assert sizes(actions) == [1]


def test_its_contender_gathers_for_almost_half_the_slo():
    # The largest batch takes 25 ms, which leaves as many in the queue.
    batcher = contender(known(executors=2), Random(0)).dispatcher()
    assert sizes(come(batcher, [0.0])) == []
    assert batcher.wake_at() == pytest.approx(0.020)
    assert sizes(batcher.poll(0.0249)) == [1]
    assert batcher.cap == 40
    assert batcher.slots == 2
