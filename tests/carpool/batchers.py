"""Batchers, requests for them, and what is read from their actions, for the tests of the Batcher's rules."""

from __future__ import annotations

from typing import Any

from machine import estimate
from msgspec.structs import replace

from carpool.batching.batcher import Batcher
from carpool.batching.requests import Action, Batch, Estimate, Fault, FaultKind, Refusal, Refused, Request
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters

ITEM = Fault(FaultKind.ITEM, detail="bad row")


def batcher(max_batch: int = 8, max_wait: float = 0.0, slots: int = 1, **fields: Any) -> Batcher:
    return Batcher(Parameters(max_batch=max_batch, max_wait=Duration(max_wait), max_in_flight=slots), **fields)


def held(max_batch: int = 8, max_wait: float = 0.02, slots: int = 1, **fields: Any) -> Batcher:
    """A Batcher that holds requests for others: it knows the batch latency, 5 ms + 0.5 ms per row."""
    result = batcher(max_batch, max_wait, slots, **fields)
    result.learn("m", estimate(), 0.0)
    return result


def request(now: float = 0.0, *, rows: int = 1, slo: float = 0.05, **fields: Any) -> Request:
    return Request(**{"key": "k", "model": "m", "arrived": now, "due": now + slo, "rows": rows, **fields})


def send(to: Batcher, now: float, *requests: Request) -> list[Action]:
    return [action for each in requests for action in to.arrive(each, now)]


def batches(actions: list[Action]) -> list[Batch]:
    return [action for action in actions if isinstance(action, Batch)]


def waiters(batch: Batch) -> list[Request]:
    return [each for each, _, _ in batch.slices]


def refusals(actions: list[Action]) -> list[tuple[Request, Refused]]:
    return [(action.request, action.reason) for action in actions if isinstance(action, Refusal)]


def occupied(to: Batcher, now: float = 0.0) -> Batch:
    """Fill the one slot, so that what comes next waits."""
    (batch,) = batches(to.arrive(request(now, key="first"), now))
    return batch


def one_after_another(to: Batcher, running: Batch) -> list[Batch]:
    """Complete what runs until nothing waits; what was dispatched meanwhile."""
    sent: list[Batch] = []
    while following := batches(to.complete(running, 0.01)):
        (running,) = following
        sent.append(running)
    return sent


def by_bucket() -> Estimate:
    """All together: 5 ms + 0.5 ms a row; short ones half of that, long ones four times as much."""
    return replace(estimate(), buckets={1: estimate(0.0025, 0.00025), 4: estimate(0.020, 0.002)})
