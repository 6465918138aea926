"""What callers are told: which of an answer's headers a batch shares, and how refusals and faults read. Pure."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import msgspec

from carpool.batching.requests import FaultKind, Refused
from carpool_sidecar.http1.messages import Headers, forwardable

OF_ONE_BODY = frozenset(
    {
        b"inference-header-content-length",
        b"etag",
        b"last-modified",
        b"content-md5",
        b"content-digest",
        b"digest",
        b"repr-digest",
        b"accept-ranges",
        # About one caller: among the waiters of a batch it would be somebody else's.
        b"set-cookie",
        b"x-request-id",
        b"request-id",
        b"x-correlation-id",
    }
)
"""Names (lower case) of an answer's headers that its waiters can't share."""

UNRESOLVED = (b"x-carpool-fault", b"unresolved")
"""Marks an error that may be another request's: the policy says ``idempotent: false``, so none was sent again."""

OF_EVERY_CALLER = frozenset({b"retry-after", b"www-authenticate", b"allow", b"location"})
"""Names (lower case) of an error's headers that hold for every request of a batch."""

REFUSALS = {
    Refused.QUEUE_FULL: (429, "the queue is full: raise admission.maxQueuedRows or maxQueuedBytes, or add replicas"),
    Refused.LATE: (503, "predicted to miss its limit: send fewer requests at a time, or add replicas"),
    Refused.EXPIRED: (504, "its deadline passed before the model had answered"),
    Refused.DRAINING: (503, "this replica is shutting down: try another one"),
}
"""Status and words for each reason to refuse service."""


class UpstreamAnswer(NamedTuple):
    """An upstream's answer, as it came."""

    status: int
    headers: Headers
    body: bytes | memoryview


def fault_kind(status: int) -> FaultKind | None:
    """Classify an upstream's status for a batch; ``None`` is success."""
    if 200 <= status < 300:
        return None
    if status == 413:
        return FaultKind.SIZE
    if status in {400, 422, 500}:
        return FaultKind.ITEM
    if status in {502, 503, 504}:
        return FaultKind.TRANSPORT
    return FaultKind.SHARED


def callers_fault(status: int) -> bool:
    """Whether an upstream's status for one request is its caller's fault: 4xx, but for those that mean overload."""
    return 400 <= status < 500 and status not in {408, 429}


def without_text(answer: UpstreamAnswer) -> UpstreamAnswer:
    """Return an error that a batch got as each of its requests may see it.

    The text may be about one of them, or quote it; the status holds for all.
    """
    text = f"the model server answered {answer.status} to the batch that this request was in"
    body = msgspec.json.encode({"error": text, "reason": f"upstream-{answer.status}"})
    headers = [field for field in answer.headers if field[0].lower() in OF_EVERY_CALLER]
    return UpstreamAnswer(answer.status, [*headers, (b"content-type", b"application/json")], body)


def shareable(headers: Headers) -> Headers:
    """Return those of a batch's answer headers that every waiter may get."""
    return [field for field in forwardable(headers) if field[0].lower() not in OF_ONE_BODY]


def retry_after(seconds: float) -> tuple[bytes, bytes]:
    """Return the header that says when to try again: whole seconds, at least one (RFC 9110, 10.2.3)."""
    return (b"retry-after", b"%d" % max(1, ceil(seconds)))
