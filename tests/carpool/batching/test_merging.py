"""Rules 1 to 3: which requests are batched together, and how those larger than a batch are split."""

from __future__ import annotations

from typing import Any

import pytest
from batchers import batcher, batches, occupied, one_after_another, refusals, request, send, waiters
from machine import estimate

from carpool.batching.batcher import Batcher
from carpool.batching.queue_set import MAX_KEYS
from carpool.batching.requests import Estimate, Finish, Refusal, Refused, Request
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Admission


def test_rule_1_only_equal_keys_and_models_merge() -> None:
    to = batcher()
    first = occupied(to)
    asked = [request(key="k"), request(key="l"), request(key="k"), request(key="k")]
    other = request(key="k", model="other")
    (at_once,) = batches(send(to, 0.0, *asked, other))
    assert waiters(at_once) == [other], "another model has slots of its own"
    groups = [waiters(batch) for batch in one_after_another(to, first)]
    assert groups == [[asked[0], asked[2], asked[3]], [asked[1]]]


def test_beyond_the_limit_of_waiting_keys_requests_with_a_new_key_are_sent_alone() -> None:
    to = batcher(max_batch=8)
    first = occupied(to)
    send(to, 0.0, *(request(key=kind) for kind in range(MAX_KEYS)))
    late, later = (request(key="another") for _ in range(2))
    assert not refusals(send(to, 0.0, late, later, request(key=0)))
    sent = one_after_another(to, first)
    assert [waiters(batch) for batch in sent if late in waiters(batch)] == [[late]]
    assert [waiters(batch) for batch in sent if later in waiters(batch)] == [[later]]
    assert sorted(batch.rows for batch in sent) == [1] * (MAX_KEYS + 1) + [2]


def test_rule_2_rows_count_and_not_requests() -> None:
    to = batcher(max_batch=8)
    first = occupied(to)
    asked = [request(rows=3), request(rows=4), request(rows=2)]
    send(to, 0.0, *asked)
    (batch,) = batches(to.complete(first, 0.01))
    assert waiters(batch) == asked[:2]
    assert batch.rows == 7


def test_rule_2_a_larger_request_is_split_at_the_cap_and_ends_with_its_last_row() -> None:
    to = batcher(max_batch=8)
    large = request(rows=20)
    (batch,) = batches(to.arrive(large, 0.0))
    spans = []
    finished: list[Request] = []
    while True:
        spans += [(start, stop) for _, start, stop in batch.slices]
        actions = to.complete(batch, 0.01)
        (finish,) = (action for action in actions if isinstance(action, Finish))
        finished += finish.requests
        if not batches(actions):
            break
        assert finished == []
        (batch,) = batches(actions)
    assert spans == [(0, 8), (8, 16), (16, 20)]
    assert finished == [large]


def test_rule_2_the_last_part_of_a_split_request_takes_others_along() -> None:
    to = batcher(max_batch=8)
    large, small = request(rows=10), request(rows=3)
    (batch,) = batches(to.arrive(large, 0.0))
    to.arrive(small, 0.0)
    (batch,) = batches(to.complete(batch, 0.01))
    assert batch.slices == [(large, 8, 10), (small, 0, 3)]


def test_rule_2_tei_array_inputs_do_not_slip_past_the_cap() -> None:
    to = batcher(max_batch=4)
    first = occupied(to)
    send(to, 0.0, request(rows=3), request(rows=100))
    (batch,) = batches(to.complete(first, 0.01))
    assert batch.rows == 4


@pytest.mark.parametrize("passing", [False, True])
def test_rule_2_a_model_s_own_cap_holds(passing: bool) -> None:
    to = Batcher(Parameters(max_batch=16, pass_through=passing))
    to.model("m").limits.max_rows = 4
    (batch,) = batches(to.arrive(request(rows=10), 0.0))
    assert batch.rows == 4


def test_of_another_kind_what_is_larger_than_a_batch_is_split_all_the_same() -> None:
    to = batcher(max_batch=8)
    first = occupied(to)
    send(to, 0.0, *(request(key=kind) for kind in range(MAX_KEYS)), request(key="another", rows=20))
    assert max(batch.rows for batch in one_after_another(to, first)) == 8


def test_rule_3_without_a_batch_axis_requests_are_sent_alone_and_whole() -> None:
    to = batcher(max_batch=4)
    first = occupied(to)
    asked = [request(mergeable=False, rows=6), request(mergeable=False)]
    send(to, 0.0, *asked)
    (one,) = batches(to.complete(first, 0.01))
    (two,) = batches(to.complete(one, 0.02))
    assert (one.slices, two.slices) == ([(asked[0], 0, 6)], [(asked[1], 0, 1)])
    assert one.whole
    assert two.whole


def test_rule_3_a_shadow_takes_a_slot_and_is_counted_as_nobody() -> None:
    """The driver's own requests: their batches are samples like any, their ends are neither hits nor misses."""
    to = batcher(admission=Admission(max_queued_rows=4))

    def shadow(now: float, **fields: Any) -> Request:
        return request(now, mergeable=False, shadow=True, rows=4, **fields)

    (first,) = batches(send(to, 0.0, shadow(0.0)))
    assert to.in_flight == 1
    real, late = request(0.0), shadow(0.0, deadline=0.5)
    assert send(to, 0.0, real, late) == [Refusal(late, Refused.QUEUE_FULL, 1.0)]
    (second,) = batches(to.complete(first, 0.1))
    assert [each for each, _, _ in second.slices] == [real]
    expiring = shadow(0.1, deadline=0.5)
    send(to, 0.1, expiring)
    assert Refusal(expiring, Refused.EXPIRED) in to.poll(0.6)
    to.learn("m", estimate(), 0.6)
    hopeless = shadow(0.6, deadline=0.601)
    assert [action.reason for action in send(to, 0.6, hopeless) if isinstance(action, Refusal)] == [Refused.LATE]
    dropped = shadow(0.7, deadline=0.75)
    send(to, 0.7, dropped)
    assert refusals(to.complete(second, 0.749)) == [(dropped, Refused.LATE)]
    counted = to.stats(1.0).models["m"]
    assert (counted.arrivals, counted.rows, counted.misses) == (1, 1, {})
    assert {(rows, batches) for _, rows, _, _, batches, *_ in counted.cells} <= {(4, 1), (1, 1)}


def test_requests_that_wait_alone_are_merged_when_that_becomes_possible() -> None:
    to = batcher(max_batch=8)
    first = occupied(to)
    asked = [request(key=None, mergeable=False) for _ in range(4)]
    suspect = request(key=None, mergeable=False, caller="gateway")
    to.model(first.model).isolation.suspects.failed("gateway", "k")
    send(to, 0.0, *asked, suspect)
    assert not batches(to.merge(first.model, lambda one: None if one is asked[1] else "k", 0.0))
    assert not asked[1].mergeable
    late = request(key="k")
    send(to, 0.0, late)
    groups = [waiters(batch) for batch in one_after_another(to, first)]
    assert sorted(groups, key=len) == [[asked[1]], [suspect], [asked[0], asked[2], asked[3], late]]


def test_of_requests_that_are_with_the_upstream_nothing_changes() -> None:
    to = batcher()
    alone = request(key=None, mergeable=False)
    assert len(batches(send(to, 0.0, alone))) == 1
    assert not to.merge("m", lambda _: "k", 0.0)
    assert not alone.mergeable


@pytest.mark.parametrize(
    ("seconds", "verifies", "refused"), [(0.2, True, False), (0.2, False, True), (0.02, True, True)]
)
def test_requests_of_a_slow_model_are_not_refused_while_it_may_turn_out_that_it_can_batch_them(
    seconds: float, verifies: bool, refused: bool
) -> None:
    to = batcher()
    to.learn("m", Estimate((0.0, seconds), (0.0, seconds)), 0.0, shed_slo=True)
    occupied(to)
    to.model("m").isolation.verifies = verifies
    send(to, 0.0, request(key=None, mergeable=False, slo=10.0))
    late = request(key=None, mergeable=False, slo=1.5 * seconds)
    assert bool(refusals(send(to, 0.0, late))) == refused
    assert to.grows("m") == (not refused)
