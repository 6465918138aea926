"""Contents of answers: the headers that requests of a batch share, refusals, and errors. Pure functions."""

from __future__ import annotations

from math import ceil

import msgspec

from carpool.batching.requests import FaultKind, Refused
from carpool_sidecar.http1.fields import FieldLines
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
        # These concern one caller; the other callers of the batch must not get them.
        b"set-cookie",
        b"x-request-id",
        b"request-id",
        b"x-correlation-id",
    }
)
"""Names (lower case) of answer headers that the requests of a batch can't share."""

UNRESOLVED = (b"x-carpool-fault", b"unresolved")
"""Marks an error that another request of the batch may have caused.

With ``idempotent: false`` in the policy, no request is sent again to find the cause.
"""

OF_EVERY_CALLER = frozenset({b"retry-after", b"www-authenticate", b"allow", b"location"})
"""Names (lower case) of an error's headers that apply to every request of a batch."""

REFUSALS = {
    Refused.QUEUE_FULL: (429, "the queue is full: raise admission.maxQueuedRows or maxQueuedBytes, or add replicas"),
    Refused.LATE: (503, "predicted to miss its limit: the server is too slow for this load, or hangs; add replicas"),
    Refused.EXPIRED: (504, "its deadline passed before the model had answered"),
    Refused.DRAINING: (503, "this replica is shutting down: try another one"),
}
"""Status and text for each reason to refuse a request."""

ISOLATED = (
    "predicted to miss its limit: requests that fail are sent alone, or in smaller batches with others, which takes "
    "the server's time: correct those requests"
)
"""The text for ``Refused.LATE`` while requests that fail are the likely cause."""


class UpstreamAnswer:
    """An upstream's answer, unchanged."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, headers: Headers, body: bytes | memoryview) -> None:
        self.status = status
        self.headers = headers
        self.body = body


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
    """Whether the upstream's status means that the caller made an error: 4xx, except 408 and 429 (overload)."""
    return 400 <= status < 500 and status not in {408, 429}


def without_text(answer: UpstreamAnswer) -> UpstreamAnswer:
    """Return a batch's error in the form that each of its requests may see.

    The original text may concern or quote one request, so it is replaced. The status applies to all.
    """
    text = f"the model server answered {answer.status} to the batch that this request was in"
    body = msgspec.json.encode({"error": text, "reason": f"upstream-{answer.status}"})
    headers = [field for field in answer.headers if field[0].lower() in OF_EVERY_CALLER]
    return UpstreamAnswer(answer.status, [*headers, (b"content-type", b"application/json")], body)


def shareable(headers: Headers) -> Headers:
    """Return the answer headers of a batch that every caller in it may get."""
    return FieldLines([field for field in forwardable(headers) if field[0].lower() not in OF_ONE_BODY])


def retry_after(seconds: float) -> tuple[bytes, bytes]:
    """Return the header that says when to try again: whole seconds, at least one (RFC 9110, 10.2.3)."""
    return (b"retry-after", b"%d" % max(1, ceil(seconds)))
