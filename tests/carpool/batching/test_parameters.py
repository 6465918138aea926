"""Rules 10 and 11: parameters that change under load, and pass-through; what is counted, and forgotten."""

from __future__ import annotations

import pytest
from batchers import batcher, batches, held, occupied, refusals, request, send, waiters
from machine import estimate

from carpool.batching.batcher import Batcher
from carpool.batching.counters import MAX_SIZES
from carpool.batching.requests import Finish, Refused, Request
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Admission

# ------------------------------------------------------------------------------------------------- rules 10 and 11


def test_rule_10_a_swap_under_load_loses_nothing() -> None:
    to = batcher(max_batch=8, slots=4)
    running = batches(send(to, 0.0, *(request() for _ in range(4))))
    asked = [request(rows=3) for _ in range(6)]
    send(to, 0.0, *asked)
    to.configure(Parameters(max_batch=2, max_in_flight=1), 0.001)
    assert to.slots == 1
    served: list[Request] = []
    while running:
        actions = to.complete(running.pop(0), 0.01)
        served += [done for action in actions if isinstance(action, Finish) for done in action.requests]
        running += batches(actions)
        assert all(batch.rows <= 2 for batch in batches(actions))
        assert not batches(actions) or len(running) == 1
    assert served[4:] == asked


def test_rule_10_parameters_and_slots_are_per_model() -> None:
    to = batcher(max_batch=8)
    to.configure(Parameters(max_batch=2, max_in_flight=3), 0.0, model="m")
    assert to.slots == 3
    assert to.model("m").cap == 2
    assert to.model("other").cap == 8
    assert to.slots == 4
    to.configure(Parameters(max_batch=5), 0.0)
    assert (to.slots, to.model("m").cap, to.model("other").cap) == (2, 5, 5)


def test_rule_10_more_slots_start_what_waits_at_once() -> None:
    to = batcher(max_batch=1)
    send(to, 0.0, *(request() for _ in range(3)))
    assert len(batches(to.configure(Parameters(max_batch=1, max_in_flight=2), 0.001))) == 1


def test_rule_11_pass_through_holds_and_merges_nothing() -> None:
    to = Batcher(Parameters(max_batch=8, max_wait=Duration(0.02), max_in_flight=2, pass_through=True))
    to.learn("m", estimate(), 0.0)
    sent = batches(send(to, 0.0, *(request() for _ in range(4))))
    assert [batch.rows for batch in sent] == [1, 1]
    assert all(batch.whole for batch in sent)
    assert to.in_flight == 2
    assert len(waiters(batches(to.complete(sent[0], 0.01))[0])) == 1


def test_rule_11_caps_and_deadlines_hold_in_pass_through() -> None:
    to = Batcher(Parameters(max_batch=4, pass_through=True), admission=Admission(max_queued_rows=6))
    large = request(rows=9, deadline=0.01)
    (batch,) = batches(to.arrive(large, 0.0))
    assert batch.rows == 4
    one_more, too_many = request(rows=1), request(rows=1)  # 5 rows wait, of 6
    assert refusals(send(to, 0.0, one_more, too_many)) == [(too_many, Refused.QUEUE_FULL)]
    assert refusals(to.poll(0.01)) == [(large, Refused.EXPIRED)]


def test_rule_11_a_backlog_ends_pass_through() -> None:
    to = Batcher(Parameters(max_batch=8, max_in_flight=1, pass_through=True))
    first = occupied(to)
    to.arrive(request(), 0.0)
    assert to.model("m").passing
    to.arrive(request(), 0.0)  # two wait where one is served
    assert not to.model("m").passing
    (batch,) = batches(to.complete(first, 0.01))
    assert batch.rows == 2
    to.configure(Parameters(pass_through=True), 0.02)
    assert to.model("m").passing


def test_rule_11_pass_through_is_back_once_the_backlog_is_gone() -> None:
    to = Batcher(Parameters(max_batch=8, max_in_flight=2, pass_through=True))
    one, two = batches(send(to, 0.0, request(), request()))
    send(to, 0.0, request(), request(), request())  # three wait where two are served
    (merged,) = batches(to.complete(one, 0.01))
    assert merged.rows == 3
    assert not to.model("m").passing
    to.complete(merged, 0.02)
    assert not to.model("m").passing, "a call is still under way"
    to.complete(two, 0.03)
    assert to.model("m").passing


def test_rule_11_pass_through_holds_no_request_whatever_the_wait_is() -> None:
    to = Batcher(Parameters(max_batch=8, max_wait=Duration(0.5), max_in_flight=2, pass_through=True))
    one, _ = batches(send(to, 0.0, request(), request()))
    send(to, 0.0, request(), request(), request())
    (merged,) = batches(to.complete(one, 0.01))  # a backlog ended pass-through, until the other call has ended, too
    to.complete(merged, 0.02)
    assert len(batches(to.arrive(request(), 0.03))) == 1


# ------------------------------------------------------------------------------------------------- counting


def test_samples_are_cold_first_then_by_rows_and_in_flight_and_never_stalled() -> None:
    to = batcher(max_batch=1, slots=2)
    for start in (0.0, 1.0, 2.0):
        one, two = batches(send(to, start, request(start), request(start)))
        to.complete(one, start + 0.1, stalled=start == 2.0)
        to.complete(two, start + 0.2)
    counters = to.model("m").counters
    assert (counters.cold, counters.stalled) == (1, 1)
    seen = {sample[:4]: sample for sample in counters.snapshot(9.0).samples()}
    assert {kind[:3]: sample.batches for kind, sample in seen.items() if kind[3] == 0} == {(0, 1, 1): 1, (0, 1, 2): 3}
    assert seen[0, 1, 2, 0].busy == pytest.approx(0.6)
    # At server concurrency 1 the second would have begun when the first was done: 0.1 s each, not 0.2.
    assert seen[0, 1, 2, 1].busy == pytest.approx(0.3)
    assert to.stats(9.0).device_busy == pytest.approx(0.6)


def test_a_batch_that_is_answered_before_one_sent_earlier_is_counted() -> None:
    to = batcher(max_batch=1, slots=3)
    one, two, three = batches(send(to, 0.0, request(0.0), request(0.0), request(0.0)))
    to.complete(one, 0.1)
    to.complete(three, 0.2)
    to.complete(two, 0.3)
    samples = to.model("m").counters.snapshot(0.3).samples()
    assert {kind[:4]: kind.batches for kind in samples if kind.in_flight == kind.executors} == {(0, 1, 3, 3): 1}


def test_sizes_seen_are_bounded() -> None:
    to = batcher(max_batch=1)
    to.model("m").first_batches.seen = {(bucket, 1) for bucket in range(MAX_SIZES)}
    (batch,) = batches(to.arrive(request(), 0.0))
    assert batch.cold is ((0, 1) not in to.model("m").first_batches.seen)
    (batch,) = batches(to.complete(batch, 0.01) + to.arrive(request(bucket=-1), 0.02))
    assert not batch.cold
    assert len(to.model("m").first_batches.seen) == MAX_SIZES


def test_queue_seconds_count_each_request_once() -> None:
    to = batcher(max_batch=4)
    first = occupied(to, 2.0)
    to.arrive(request(2.0, rows=8), 2.0)
    (batch,) = batches(to.complete(first, 2.01))
    to.complete(batch, 2.03)
    counters = to.model("m").counters
    assert counters.queue_seconds == pytest.approx(0.01)
    assert counters.dispatched == 2


def test_an_unknown_service_time_is_learned_again_after_a_restart() -> None:
    to = held()
    (batch,) = batches(send(to, 0.0, *(request() for _ in range(8))))
    to.complete(batch, 0.01)
    assert to.restarted(0.02) == []
    assert to.model("m").belief.estimate is None
    assert batches(to.arrive(request(0.03), 0.03))[0].cold


def test_a_model_that_was_replaced_is_forgotten_and_no_other() -> None:
    to = held()
    to.learn("n", to.model("m").belief.estimate, 0.0)
    to.restarted(0.01, model="m")
    assert to.model("m").belief.estimate is None
    assert to.model("n").belief.estimate is not None
