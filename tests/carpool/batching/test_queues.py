from __future__ import annotations

from typing import Any

import pytest
from machine import estimate

from carpool.batching.model_state import ModelState
from carpool.batching.queues import Queue
from carpool.batching.requests import Request
from carpool.policy.parameters import Parameters


def state(max_batch: int = 64) -> ModelState:
    return ModelState("m", Parameters(max_batch=max_batch))


def queue(*requests: Request, merge: bool = True, of: ModelState | None = None) -> Queue:
    result = Queue("k", of or state(8), merge=merge)
    for request in requests:
        result.add(request)
    return result


def request(**fields: Any) -> Request:
    return Request(**{"key": "k", "arrived": 0.0, "due": 0.05, **fields})


def test_work_is_full_batches_and_a_rest() -> None:
    times = estimate().times
    waiting = queue(*(request(rows=3) for _ in range(6)))  # 18 rows of 8 a batch
    assert waiting.work(times) == pytest.approx(0.009 + 0.009 + 0.006)
    assert waiting.work(times, joins=True) == pytest.approx(0.018)


def test_work_of_a_class_is_what_goes_before_it() -> None:
    times = estimate().times
    waiting = queue(request(rows=8, priority=1), request(rows=8, priority=2), request(rows=8, priority=3))
    assert [waiting.work(times, priority=priority) for priority in (1, 2, 3)] == pytest.approx([0.009, 0.018, 0.027])
    waiting.add(request(rows=8, priority=1))  # counted without summing up again
    assert waiting.work(times, priority=1) == pytest.approx(0.018)
    waiting.classes[1].popleft()
    waiting.changed()
    assert waiting.work(times, priority=1) == pytest.approx(0.009)
    assert queue(request(rows=8, priority=3)).work(times, priority=2) == 0.0


def test_work_of_requests_that_are_not_batched_is_theirs_one_by_one() -> None:
    times = estimate().times
    waiting = queue(request(rows=20), request(rows=40), merge=False)
    assert waiting.work(times) == pytest.approx(2 * 0.020)
    assert waiting.work(times, priority=1) == 0.0


def test_a_queue_knows_when_holding_ends_after_any_leaves() -> None:
    upper = estimate().times
    urgent, patient = request(due=0.02), request(due=0.5, deadline=0.1)
    for each, hold in ((urgent, 0.1), (patient, 0.2)):
        each.hold_until = hold
    waiting = queue(urgent, patient)
    assert waiting.due_at(upper) == pytest.approx(0.02 - 0.006)
    waiting.classes[2].popleft()
    waiting.rows -= 1
    waiting.changed()
    assert waiting.due_at(upper) == pytest.approx(0.1 - 0.0055)
    patient.deadline = 10.0
    waiting.changed()
    assert waiting.due_at(upper) == pytest.approx(0.2)


def test_ageing_lifts_a_class_a_second() -> None:
    low, high = request(priority=3, arrived=0.0), request(priority=1, arrived=1.5)
    waiting = queue(low, high)
    assert waiting.first(1.9, 1.0)[0] is high
    assert queue(low, request(priority=1, arrived=2.5)).first(2.6, 1.0)[0] is low
