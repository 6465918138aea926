from __future__ import annotations

from math import inf

from proof.rivals.fifo import Fifo, Verdict
from rivalry import batches, come, refusals, request, sizes

from carpool.batching.requests import Failure, Fault, FaultKind, Finish, Refused


class AtLeast(Fifo):
    """Sends at least ``fewest`` rows, or any when the head is 10 ms old; refuses as many as a test sets in ``late``."""

    def __init__(self, fewest=1, **options):
        self.fewest = fewest
        self.late = 0
        self.taken = []
        super().__init__(**{"slots": 1, "max_batch": 4, **options})

    def decide(self, line, now):
        late, self.late = self.late, 0
        rows = line.rows - late
        due = line.head.arrived + 0.010
        if not rows:
            return Verdict(late=late)
        if rows >= self.fewest or now >= due:
            return Verdict(min(rows, self.cap), late=late)
        return Verdict(again=due, late=late)

    def completed(self, batch, now):
        self.taken.append((batch.rows, now - batch.dispatched))


def test_a_slot_is_given_again_when_its_batch_ends():
    fifo = AtLeast()
    (first,) = batches(come(fifo, [0.0, 0.001, 0.002]))
    assert first.rows == 1
    finish, second = fifo.complete(first, 0.005)
    assert isinstance(finish, Finish)
    assert len(finish.requests) == 1
    assert second.rows == 2
    assert fifo.taken == [(1, 0.005)]


def test_as_many_batches_as_slots():
    fifo = AtLeast(slots=2)
    assert sizes(come(fifo, [0.0, 0.001, 0.002])) == [1, 1]
    assert list(fifo.in_flight) != []
    assert fifo.stats(0.003).queued_rows == 1


def test_it_wakes_when_it_is_to_be_asked_again():
    fifo = AtLeast(fewest=3)
    assert sizes(come(fifo, [0.0, 0.004])) == []
    assert fifo.wake_at() == 0.010
    assert sizes(fifo.poll(0.010)) == [2]
    assert fifo.wake_at() == inf


def test_keys_do_not_mix_and_the_longest_wait_goes_first():
    fifo = AtLeast(slots=1)
    (first,) = batches(fifo.arrive(request(0.0, key="a"), 0.0))
    fifo.arrive(request(0.001, key="b"), 0.001)
    fifo.arrive(request(0.002, key="a"), 0.002)
    (second,) = batches(fifo.complete(first, 0.005))
    assert second.key == "b"
    (third,) = batches(fifo.complete(second, 0.010))
    assert third.key == "a"


def test_a_request_is_cut_where_the_batch_is_full_and_ends_once():
    fifo = AtLeast()
    whole = request(0.0, rows=6)
    (first,) = batches(fifo.arrive(whole, 0.0))
    finish, second = fifo.complete(first, 0.005)
    assert (first.rows, second.rows) == (4, 2)
    assert finish.requests == []
    (finish,) = fifo.complete(second, 0.010)
    assert finish.requests == [whole]


def test_refused_are_who_is_late_and_who_finds_no_room():
    fifo = AtLeast(fewest=9, max_queued_rows=2)
    actions = come(fifo, [0.0, 0.001, 0.002])
    assert refusals(actions) == [Refused.QUEUE_FULL]
    fifo.late = 2
    assert refusals(fifo.poll(0.003)) == [Refused.LATE, Refused.LATE]
    assert fifo.stats(0.003).queued_rows == 0
    assert fifo.model("").counters.misses == {Refused.QUEUE_FULL: 1, Refused.LATE: 2}


def test_who_waits_beyond_the_deadline_has_expired():
    fifo = AtLeast()
    come(fifo, [0.0])
    fifo.arrive(request(0.001, deadline=0.003), 0.001)
    fifo.arrive(request(0.002, deadline=0.009), 0.002)
    assert fifo.wake_at() == 0.003
    assert refusals(fifo.poll(0.003)) == [Refused.EXPIRED]
    assert fifo.wake_at() == 0.009


def test_who_leaves_is_not_answered():
    fifo = AtLeast()
    waiter, waiting = request(0.0), request(0.001)
    (first,) = batches(fifo.arrive(waiter, 0.0))
    fifo.arrive(waiting, 0.001)
    for gone in (waiter, waiting, waiting):
        assert fifo.cancel(gone, 0.002) == []
    (finish,) = fifo.complete(first, 0.005)
    assert finish.requests == []
    assert fifo.model("").counters.misses == {"cancelled": 2}


def test_a_batch_too_large_is_halved_and_larger_ones_are_not_tried_again():
    fifo = AtLeast(fewest=4, max_batch=4)
    (first,) = batches(come(fifo, [0.0] * 4))
    (half,) = fifo.complete(first, 0.005, fault=Fault(FaultKind.SIZE))
    _, other = fifo.complete(half, 0.010)
    fifo.complete(other, 0.015)
    assert (half.rows, other.rows, fifo.cap) == (2, 2, 2)


def test_a_fault_of_the_upstream_fails_all_waiters():
    fifo = AtLeast(max_batch=4)
    large = request(0.0, rows=6)
    (first,) = batches(fifo.arrive(large, 0.0))
    (failure,) = fifo.complete(first, 0.005, fault=Fault(FaultKind.SHARED))
    assert isinstance(failure, Failure)
    assert failure.requests == [large]
    assert fifo.stats(0.005).queued_rows == 0  # the rows that had waited for the next batch have gone with it


def test_nothing_is_learned_from_a_stalled_batch():
    fifo = AtLeast()
    (first,) = batches(come(fifo, [0.0]))
    fifo.complete(first, 0.5, stalled=True)
    assert fifo.taken == []


def test_the_device_is_busy_while_anything_is_in_flight():
    fifo = AtLeast(slots=2)
    first, second = batches(come(fifo, [0.0, 0.002]))
    fifo.complete(first, 0.005)
    assert fifo.stats(0.006).device_busy == 0.006
    fifo.complete(second, 0.007)
    assert fifo.stats(0.010).device_busy == 0.007
