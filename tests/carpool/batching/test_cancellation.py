"""Rule 8: requests that are cancelled or expire, and calls that are overdue."""

from __future__ import annotations

from math import inf

import pytest
from batchers import ITEM, batcher, batches, held, occupied, refusals, request, send, waiters
from machine import estimate

from carpool.batching.counters import CANCELLED
from carpool.batching.requests import Abort, Batch, Fault, FaultKind, Finish, Refusal, Refused
from carpool.batching.slots import LEAST_OVERDUE, OVERDUE_UNKNOWN
from carpool.policy.spec import Admission

# ------------------------------------------------------------------------------------------------- cancelled, expired


def test_rule_8_a_cancelled_request_leaves_the_queue() -> None:
    to = batcher()
    first = occupied(to)
    gone, stays = request(size=5), request(size=7)
    send(to, 0.0, gone, stays)
    assert to.cancel(gone, 0.001) == []
    assert (to.queued_rows, sum(each.load.size for each in to.models())) == (1, 7)
    (batch,) = batches(to.complete(first, 0.01))
    assert waiters(batch) == [stays]
    assert to.model("m").counters.misses == {CANCELLED: 1}


def test_rule_8_a_cancelled_job_is_not_counted() -> None:
    to = batcher()
    occupied(to)
    job = request(shadow=True)
    send(to, 0.0, job)
    assert to.cancel(job, 0.001) == []
    assert to.model("m").counters.misses == {}


def test_rule_8_mlserver_cancelling_one_request_leaves_the_others_of_its_batch() -> None:
    to = held(max_batch=2)
    gone, stays = request(), request()
    (batch,) = batches(send(to, 0.0, gone, stays))
    assert to.cancel(gone, 0.001) == []
    (finish,) = to.complete(batch, 0.006)
    assert finish.requests == [stays]


def test_rule_8_kserve_a_call_nobody_waits_for_is_aborted_and_its_slot_stays_taken() -> None:
    to = held(max_wait=0.0)
    gone = request()
    (batch,) = batches(to.arrive(gone, 0.0))
    waiting = request()
    to.arrive(waiting, 0.0)
    assert to.cancel(gone, 0.001) == [Abort(batch)]
    assert to.in_flight == 1
    assert to.wake_at() == pytest.approx(0.0055)  # servers compute on
    assert to.poll(0.0054) == []
    (following,) = batches(to.poll(to.wake_at()))
    assert waiters(following) == [waiting]
    assert to.complete(batch, 0.006) == []  # a report that crossed the abort


def test_rule_8_an_abandoned_slot_frees_for_the_waiting_even_when_an_arrival_is_refused_first() -> None:
    to = held(max_wait=0.0, admission=Admission(max_queued_rows=1))
    gone = request()
    to.arrive(gone, 0.0)
    waiting = request()
    to.arrive(waiting, 0.0)
    to.cancel(gone, 0.001)
    actions = to.arrive(request(0.01, deadline=0.01), 0.01)
    assert [waiters(batch) for batch in batches(actions)] == [[waiting]]


def test_rule_8_the_slot_frees_at_once_where_no_finish_is_predicted() -> None:
    to = batcher()
    gone = request()
    to.arrive(gone, 0.0)
    to.arrive(request(), 0.0)
    assert [type(action) for action in to.cancel(gone, 0.001)] == [Abort, Batch]


def test_rule_8_a_split_request_is_cancelled_in_the_queue_and_in_flight() -> None:
    to = held(max_batch=4, max_wait=0.0)
    gone = request(rows=10, size=3)
    (batch,) = batches(to.arrive(gone, 0.0))
    assert to.cancel(gone, 0.001) == [Abort(batch)]
    assert (to.queued_rows, sum(each.load.size for each in to.models())) == (0, 0)
    assert to.poll(to.wake_at()) == []
    assert to.idle


def test_rule_8_what_is_left_of_a_failed_batch_waits_for_the_abandoned_slot() -> None:
    to = held(max_batch=4)
    asked = [request() for _ in range(4)]
    (batch,) = batches(send(to, 0.0, *asked))
    (half,) = batches(to.complete(batch, 0.007, fault=ITEM))
    assert waiters(half) == asked[:2]
    to.cancel(asked[0], 0.008)
    assert to.cancel(asked[1], 0.008) == [Abort(half)]
    assert not to.idle
    assert to.poll(0.0129) == []  # two rows take 6 ms, from 7 ms on
    (rest,) = batches(to.poll(to.wake_at()))
    assert to.wake_at() == LEAST_OVERDUE
    assert waiters(rest) == asked[2:]
    assert rest.dispatched == pytest.approx(0.013)


def test_rule_8_deadlines_hold_for_what_waits_behind_an_abandoned_call() -> None:
    to = held(max_batch=2)
    asked = [request(deadline=0.009), request(deadline=0.011)]
    (batch,) = batches(send(to, 0.0, *asked))
    (half,) = batches(to.complete(batch, 0.007, fault=ITEM))
    assert to.cancel(asked[0], 0.008) == [Abort(half)]  # its slot is taken until 12.5 ms
    actions = to.poll(0.009)
    assert actions == []
    assert to.wake_at() == 0.011
    assert refusals(to.poll(0.011)) == [(asked[1], Refused.EXPIRED)]
    assert to.poll(0.0125) == []
    assert to.idle


def test_rule_8_triton_deadlines_end_waiting_requests_and_running_batches() -> None:
    to = batcher(max_batch=1)
    riding, waiting = request(deadline=0.01), request(deadline=0.02)
    (batch,) = batches(send(to, 0.0, riding, waiting))
    assert to.wake_at() == 0.01
    actions = to.poll(0.01)
    assert actions[:2] == [Refusal(riding, Refused.EXPIRED), Abort(batch)]
    assert [waiters(batch) for batch in batches(actions)] == [[waiting]]
    assert to.wake_at() == 0.02
    assert refusals(to.poll(0.02)) == [(waiting, Refused.EXPIRED)]
    assert to.wake_at() == inf
    assert to.idle
    assert to.model("m").counters.misses == {Refused.EXPIRED: 2}


def test_rule_8_an_expired_request_is_not_dispatched_when_the_poll_is_late() -> None:
    to = batcher(max_batch=1)
    first = occupied(to)
    waiting = request(deadline=0.005)
    to.arrive(waiting, 0.0)
    actions = to.complete(first, 0.006)
    assert refusals(actions) == [(waiting, Refused.EXPIRED)]
    assert batches(actions) == []


def test_rule_8_device_time_of_abandoned_calls_ends_with_them() -> None:
    to = held(max_wait=0.0)
    gone = request()
    to.arrive(gone, 0.0)
    to.cancel(gone, 0.001)
    before = to.stats(1.0).device_busy
    to.poll(1.0)
    assert before == to.stats(1.0).device_busy == pytest.approx(0.0055)


# ------------------------------------------------------------------------------------------------- overdue


def test_rule_8_an_overdue_call_gives_its_slot_back() -> None:
    to = held(max_batch=1, max_wait=0.0)
    (hung,) = batches(to.arrive(request(), 0.0))
    waiting = request(deadline=60.0)
    to.arrive(waiting, 0.0)
    assert to.wake_at() == LEAST_OVERDUE
    (next_one,) = batches(to.poll(LEAST_OVERDUE))
    assert waiters(next_one) == [waiting]
    assert (to.model("m").load.overdue, to.model("m").load.gave_back, to.in_flight) == (1, 1, 2)
    # Answered after all, it is an answer like any other, and frees no second slot.
    (finish,) = to.complete(hung, 1.5)
    assert isinstance(finish, Finish)
    assert not to.model("m").free
    to.complete(next_one, 1.5)
    assert to.model("m").free
    assert to.idle


def test_rule_8_a_long_call_is_overdue_after_four_times_its_forecast() -> None:
    to = batcher(max_batch=1)
    to.learn("m", estimate(base=1.0, row=0.0), 0.0)
    to.arrive(request(slo=10.0), 0.0)
    assert to.wake_at() == 4.0


def test_rule_8_a_call_of_unknown_duration_is_overdue_too() -> None:
    to = batcher(max_batch=1)
    to.arrive(request(), 0.0)
    assert to.wake_at() == OVERDUE_UNKNOWN


def test_rule_8_as_many_calls_may_be_overdue_as_there_are_slots() -> None:
    to = held(max_batch=1, max_wait=0.0, slots=2)
    sent = len(batches(send(to, 0.0, *(request(deadline=60.0) for _ in range(9)))))
    for second in range(1, 30):
        sent += len(batches(to.poll(float(second))))
    assert sent == 4
    assert to.wake_at() == 60.0, "nothing else can become due"


def test_rule_8_the_device_is_not_busy_with_an_overdue_call() -> None:
    to = held(max_batch=1, max_wait=0.0)
    (hung,) = batches(to.arrive(request(deadline=60.0), 0.0))
    to.poll(LEAST_OVERDUE)
    assert to.stats(30.0).device_busy == LEAST_OVERDUE
    to.complete(hung, 40.0)
    assert to.stats(50.0).device_busy == LEAST_OVERDUE


def test_rule_8_nobody_waits_for_a_stuck_model_to_be_refused() -> None:
    to = held(max_batch=1, max_wait=0.0)
    to.learn("m", estimate(base=0.01, row=0.0), 0.0, shed_slo=True)
    (hung,) = batches(to.arrive(request(), 0.0))
    # 1. Until the call is overdue, it may be answered any moment.
    late = [request(0.005, slo=0.5) for _ in range(3)]
    assert not send(to, 0.005, *late)
    assert to.wake_at() == LEAST_OVERDUE
    assert refusals(to.poll(LEAST_OVERDUE)) == [(one, Refused.LATE) for one in late]
    # 2. A request that comes now is sent, as the slot is free; the next ones wait until they are late.
    (next_one,) = batches(to.arrive(request(1.25), 1.25))
    waits, too_short = request(1.25, slo=0.125), request(1.25, slo=0.001)
    assert not send(to, 1.25, waits, too_short)
    assert to.wake_at() == 1.375
    assert refusals(to.poll(1.375)) == [(waits, Refused.LATE)], "the other would be late anywhere"
    # 3. The model answers again.
    to.complete(hung, 1.5)
    (last,) = batches(to.complete(next_one, 1.5))
    assert waiters(last) == [too_short]


def test_rule_8_what_waited_behind_an_overdue_call_took_no_longer_itself() -> None:
    """Two such times in one interval are no outlier any more: the model seemed to vary, and overloaded for minutes."""
    to = held(max_batch=1, max_wait=0.0)
    (hung,) = batches(to.arrive(request(), 0.0))
    to.poll(LEAST_OVERDUE)
    (behind,) = batches(to.arrive(request(LEAST_OVERDUE), LEAST_OVERDUE))
    to.complete(hung, 3.0)
    to.complete(behind, 3.0 + 2**-7)
    (kind,) = to.stats(4.0).models["m"].samples()
    assert (kind.batches, kind.busy) == (1, 2**-7), "the first of a size does not count"
    # A slower model is overdue with each call, and is learned from all the same.
    (first,) = batches(to.arrive(request(4.0), 4.0))
    to.poll(4.0 + LEAST_OVERDUE)
    (second,) = batches(to.arrive(request(5.0), 5.0))
    to.complete(first, 6.0)
    to.poll(7.0)
    assert second.overdue
    to.complete(second, 8.0)
    (kind,) = to.stats(9.0).models["m"].samples()
    assert (kind.batches, kind.busy) == (3, 2**-7 + 2.0 + 2.0)


def test_rule_8_requests_that_wait_when_shedding_begins_are_refused_once_they_are_late() -> None:
    to = held(max_batch=1, max_wait=0.0)
    hung = batches(to.arrive(request(), 0.0)) + batches(to.poll(LEAST_OVERDUE))
    hung += batches(to.arrive(request(1.25), 1.25))
    late, waits = request(1.25, slo=0.25, deadline=60.0), request(1.25, slo=1.0, deadline=60.0)
    assert not send(to, 1.25, late, waits)
    to.poll(1.75)
    assert refusals(to.learn("m", estimate(), 2.0, shed_slo=True)) == [(late, Refused.LATE)]
    assert to.wake_at() == 2.25
    assert refusals(to.poll(2.25)) == [(waits, Refused.LATE)]
    assert len(hung) == 2


def test_rule_8_the_next_call_is_overdue_once_the_first_has_ended() -> None:
    to = held(max_batch=1, max_wait=0.0)
    first, second, third = request(), request(deadline=60.0), request(deadline=60.0)
    (hung,) = batches(send(to, 0.0, first, second, third))
    to.poll(LEAST_OVERDUE)
    assert not batches(to.poll(3.0)), "one may be overdue"
    (sent,) = batches(to.complete(hung, 3.0, fault=Fault(FaultKind.TRANSPORT)))
    assert waiters(sent) == [third]
    assert to.model("m").stuck


def test_rule_8_a_call_that_took_as_long_as_forecast_did_not_wait_for_an_overdue_one() -> None:
    to = held(max_batch=1, max_wait=0.0, slots=2)
    to.learn("m", estimate(base=0.5, row=0.0).computed(2), 0.0)
    for start in (0.0, 4.0):
        hung, other = batches(send(to, start, request(start, slo=9.0), request(start, slo=9.0)))
        to.complete(other, start + 0.5)
        to.poll(start + 2.0)
        (beside,) = batches(to.arrive(request(start + 2.0, slo=9.0), start + 2.0))
        to.complete(hung, start + 2.25)
        to.complete(beside, start + 2.5)
    assert hung.overdue
    assert beside.dispatched == 6.0


def test_rule_8_a_held_request_ends_at_its_due_time_if_another_takes_the_last_slot_of_a_stuck_model() -> None:
    to = held(max_batch=8, max_wait=5.0)
    to.learn("m", estimate(), 0.0, shed_slo=True)
    assert len(batches(to.arrive(request(rows=8), 0.0))) == 1
    to.poll(LEAST_OVERDUE)
    waits = request(1.25, slo=0.375)
    assert not to.arrive(waits, 1.25)
    assert len(batches(to.arrive(request(1.25, key="another", rows=8), 1.25))) == 1
    assert to.wake_at() == 1.625
    assert refusals(to.poll(1.625)) == [(waits, Refused.LATE)]
