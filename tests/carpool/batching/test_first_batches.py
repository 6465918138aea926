from __future__ import annotations

from math import inf
from typing import Any

import pytest
from machine import estimate

from carpool.batching.first_batches import FirstBatches
from carpool.batching.model_state import ModelState
from carpool.batching.queues import Queue
from carpool.batching.requests import Batch, Request
from carpool.policy.parameters import Parameters
from carpool_sidecar.dispatch.trials import seconds_of


def state(max_batch: int = 64) -> ModelState:
    return ModelState("m", Parameters(max_batch=max_batch))


def queue(*requests: Request, merge: bool = True, of: ModelState | None = None) -> Queue:
    result = Queue("k", of or state(8), merge=merge)
    for request in requests:
        result.add(request)
    return result


def request(**fields: Any) -> Request:
    return Request(**{"key": "k", "arrived": 0.0, "due": 0.05, **fields})


def first(of: ModelState, rows: int, *, took: float) -> float:
    """Serve the first batch of a size that 10 ms were forecast for."""
    batch = Batch(of, "k", 0, [], rows)
    batch.finish = 1.01
    of.first_batches.sent(batch)
    assert batch.cold
    return of.first_batches.ended(batch, of.belief.estimate, 1.0 + took)


def test_a_size_that_is_slow_the_first_time_is_distinguished_from_one_that_is_not() -> None:
    of = state()
    of.belief.estimate = estimate(0.01, 0.0)
    assert first(of, 5, took=0.011) == 0.0
    assert first(of, 7, took=0.1) == pytest.approx(0.09)
    assert not of.first_batches.slow, "one may be chance"
    first(of, 9, took=0.1)
    assert of.first_batches.slow
    of.forget()
    assert not of.first_batches.slow


def test_a_first_batch_is_expected_to_be_as_slow_as_the_others_were() -> None:
    of = state()
    assert seconds_of(of, 0, 16) == inf, "nothing was measured"
    of.belief.estimate = estimate(0.01, 0.001)
    first(of, 5, took=0.1)
    assert seconds_of(of, 0, 16) == pytest.approx(0.026), "one may be chance"
    first(of, 7, took=0.2)
    assert seconds_of(of, 0, 16) == pytest.approx(0.026 + (0.09 + 0.19) / 2)
    assert seconds_of(of, 0, 7) == pytest.approx(0.017), "it was served before"
    assert seconds_of(of, 64, 7) > 0.1, "but not of that length"
    of.first_batches = FirstBatches()
    assert seconds_of(of, 0, 16) == pytest.approx(0.026)


def test_where_first_batches_are_slow_only_few_sizes_are_used() -> None:
    of = state(64)
    of.belief.estimate = estimate(0.01, 0.0)
    for rows in (7, 9):
        first(of, rows, took=0.1)
    assert [of.first_batches.known_size(0, rows) for rows in (1, 2, 5, 7, 8, 10, 11, 47, 64)] == [
        1,
        2,
        4,
        7,
        8,
        9,
        9,
        32,
        64,
    ]
    waiting = queue(*(request(arrived=0.001 * index) for index in range(23)), of=of)
    slices, rows, _ = waiting.take(0.05, 0.05, 1.0)
    assert rows == 16
    assert [waiter.arrived for waiter, _, _ in slices] == [0.001 * index for index in range(16)], "oldest first"
    assert waiting.rows == 7


def test_a_request_of_many_rows_is_not_cut_for_the_sake_of_a_known_size() -> None:
    of = state(64)
    of.belief.estimate = estimate(0.01, 0.0)
    for rows in (7, 9):
        first(of, rows, took=0.1)
    waiting = queue(request(rows=5), request(rows=6), of=of)
    assert waiting.take(0.05, 0.05, 1.0)[1] == 5
    assert waiting.take(0.05, 0.05, 1.0)[1] == 6
