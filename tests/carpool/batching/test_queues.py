from __future__ import annotations

from typing import Any

import pytest
from machine import estimate
from msgspec.structs import replace

from carpool.batching.model_state import PROBE_AFTER, Lane
from carpool.batching.queues import Queue
from carpool.batching.requests import PROBES, Batch, Request
from carpool.policy.parameters import Parameters


def lane(max_batch: int = 64) -> Lane:
    return Lane("m", Parameters(max_batch=max_batch))


def queue(*requests: Request, merge: bool = True, of: Lane | None = None) -> Queue:
    result = Queue("k", of or lane(8), merge=merge)
    for request in requests:
        result.add(request)
    return result


def request(**fields: Any) -> Request:
    return Request(**{"key": "k", "arrived": 0.0, "due": 0.05, **fields})


def test_the_least_of_all_caps_holds() -> None:
    of = lane(64)
    assert of.cap == 64
    of.max_batch = 32
    assert of.cap == 32
    of.too_large(20, works=10)
    assert of.cap == 10


def test_a_ceiling_only_falls_until_it_is_probed() -> None:
    of = lane()
    of.too_large(64, works=32)
    of.too_large(16, works=8)
    of.too_large(32, works=16)
    assert of.ceiling == 8


def test_a_ceiling_is_probed_after_many_full_batches_an_eighth_at_a_time() -> None:
    of = lane()
    of.too_large(64, works=32)
    for _ in range(PROBE_AFTER):
        assert of.ceiling == 32
        of.served("k", 31)  # not full: says nothing
        of.served("k", 32)
    assert of.ceiling == 36


def test_a_failed_probe_goes_back_to_what_worked_and_waits_twice_as_long() -> None:
    of = lane()
    of.too_large(64, works=32)
    for _ in range(PROBE_AFTER):
        of.served("k", 32)
    of.too_large(36, works=18)
    assert of.ceiling == 32
    for _ in range(2 * PROBE_AFTER):
        assert of.ceiling == 32
        of.served("k", 32)
    assert of.ceiling == 36


def test_a_size_that_no_longer_works_is_forgotten() -> None:
    of = lane()
    of.too_large(64, works=32)
    for _ in range(PROBE_AFTER):
        of.served("k", 32)
    of.too_large(36, works=18)
    of.too_large(32, works=16)
    assert of.ceiling == 16


def test_what_was_served_before_a_larger_batch_failed_still_works() -> None:
    of = lane()
    of.served("k", 24)
    of.served("k", 8)
    of.too_large(27, works=14)
    assert of.ceiling == 24
    of.too_large(24, works=12)  # less fits now: what was served once says nothing any more
    assert of.ceiling == 12
    of.forget()
    of.too_large(27, works=14)
    assert of.ceiling == 14


def test_the_ceiling_goes_once_it_reaches_the_largest_batch() -> None:
    of = lane(9)
    of.too_large(9, works=8)
    for _ in range(PROBE_AFTER):
        of.served("k", 8)
    assert of.ceiling is None
    of.too_large(9, works=5)
    assert of.ceiling == 8


def test_the_budget_for_finding_a_size_is_64_rows_then_a_fifth() -> None:
    of = lane()
    assert of.may_serve_again(64)
    assert not of.may_serve_again(1)
    of.served("k", 5)
    assert of.may_serve_again(1)
    assert not of.may_serve_again(1)


def test_a_replaced_server_is_unknown() -> None:
    of = lane()
    of.estimate = estimate()
    of.seen.add((0, 1))
    of.quarantined = True
    of.too_large(64, works=32)
    of.forget()
    assert (of.estimate, of.seen, of.quarantined, of.cap) == (None, set(), False, 64)


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


def test_work_of_requests_that_ride_alone_is_theirs_one_by_one() -> None:
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


def first(of: Lane, rows: int, *, took: float) -> float:
    """Serve the first batch of a size that 10 ms were foreseen for."""
    batch = Batch(of, "k", 0, [], rows)
    batch.finish = 1.01
    of.seen.add((0, rows))
    return of.warmed(batch, 1.0 + took)


def test_a_size_that_is_slow_the_first_time_is_told_from_one_that_is_not() -> None:
    of = lane()
    of.estimate = estimate(0.01, 0.0)
    assert first(of, 5, took=0.011) == 0.0
    assert first(of, 7, took=0.1) == pytest.approx(0.09)
    assert not of.picky, "one may be chance"
    first(of, 9, took=0.1)
    assert of.picky
    of.forget()
    assert not of.picky


def test_where_first_batches_are_slow_only_few_sizes_are_used() -> None:
    of = lane(64)
    of.estimate = estimate(0.01, 0.0)
    for rows in (7, 9):
        first(of, rows, took=0.1)
    assert [of.familiar(0, rows) for rows in (1, 2, 5, 7, 8, 10, 11, 47, 64)] == [1, 2, 4, 7, 8, 9, 9, 32, 64]
    waiting = queue(*(request(arrived=0.001 * index) for index in range(23)), of=of)
    boarding = waiting.board(0.05, 0.05, 1.0)
    assert boarding.rows == 16
    assert [rider.arrived for rider, _, _ in boarding.rides] == [0.001 * index for index in range(16)], "oldest first"
    assert waiting.rows == 7


def test_a_request_of_many_rows_is_not_cut_for_the_sake_of_a_familiar_size() -> None:
    of = lane(64)
    of.estimate = estimate(0.01, 0.0)
    for rows in (7, 9):
        first(of, rows, took=0.1)
    waiting = queue(request(rows=5), request(rows=6), of=of)
    assert waiting.board(0.05, 0.05, 1.0).rows == 5
    assert waiting.board(0.05, 0.05, 1.0).rows == 6


def test_one_batch_in_several_is_of_the_size_to_be_told() -> None:
    of = lane(8)
    of.believe(replace(estimate(), probed=12))
    sizes = []
    for _ in range(3 * PROBES):
        sizes.append(of.full)
        of.begun()
    assert [index for index, size in enumerate(sizes) if size == 12] == [PROBES, 2 * PROBES]
    assert {*sizes} == {8, 12}
    assert of.cap == 8


def test_no_probe_goes_beyond_what_fits() -> None:
    of = lane(8)
    of.believe(replace(estimate(), probed=12))
    of.probing = 12
    of.max_batch = 10
    assert of.full == 10
    of.too_large(12, works=6)
    assert of.full == 6


def test_a_probe_ends_with_what_it_was_chosen_for() -> None:
    of = lane(8)
    probed = replace(estimate(), probed=12)
    for end in (
        lambda: of.believe(estimate()),
        lambda: of.believe(replace(estimate(), probed=6)),
        lambda: of.obey(Parameters(max_batch=4)),
        of.forget,
    ):
        of.obey(Parameters(max_batch=8))
        of.believe(probed)
        of.probing = 12
        end()
        assert of.full == of.cap
    assert not of.probing
    of.obey(Parameters(max_batch=8))
    of.believe(probed)
    of.probing = 12
    of.believe(replace(probed, executors=2))
    of.obey(Parameters(max_batch=8))
    assert of.full == 12, "nothing of it changed"


def test_no_request_is_cut_to_probe_a_smaller_size() -> None:
    of = lane(8)
    of.probing = 4
    waiting = queue(request(rows=3), request(rows=6), request(rows=2), of=of)
    assert waiting.board(0.0, 0.0, 1.0).rows == 3
    assert waiting.board(0.0, 0.0, 1.0).rows == 6
    assert waiting.board(0.0, 0.0, 1.0).rows == 2
