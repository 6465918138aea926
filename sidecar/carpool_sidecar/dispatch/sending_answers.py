"""Sends answers to the callers that wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool.batching.requests import Fault, FaultKind, Refused
from carpool_sidecar.dispatch.answers import ISOLATED, REFUSALS, UNRESOLVED, UpstreamAnswer, retry_after
from carpool_sidecar.http1.client.errors import UpstreamError
from carpool_sidecar.http1.messages import forwardable
from carpool_sidecar.protocols import CODECS
from carpool_sidecar.protocols.common import WrongRows

if TYPE_CHECKING:
    from carpool.batching.requests import Batch, Refusal, Request
    from carpool_sidecar.dispatch.waiters import Shadow, Waiter
    from carpool_sidecar.http1.messages import Body
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.protocols.common import Piece


def answer(request: Request, batch: Batch) -> None:
    """Answer a request after the answers to all its rows have arrived."""
    waiter: Waiter = request.payload
    waiter.answered = True
    if (alone := waiter.answer) is not None:
        status, headers, body = alone.status, alone.headers, alone.body
        headers = forwardable(headers)
        parts: Body = body
    else:
        pieces = waiter.pieces
        if len(pieces) > 1:
            pieces.sort(key=_first_row)
        message = CODECS[waiter.parsed.endpoint.protocol].assemble(waiter.parsed, [piece for _, piece in pieces])
        status = waiter.status
        headers = [*waiter.headers, *message.headers] if message.headers else waiter.headers
        parts = message.parts[0] if len(message.parts) == 1 else message.parts
    if waiter.facts.debug:
        waited = (batch.dispatched - request.arrived) * 1e3
        headers = [
            *headers,
            (b"x-carpool-batch-size", b"%d" % batch.rows),
            (b"x-carpool-queue-ms", b"%.3f" % max(waited, 0.0)),
        ]
    waiter.exchange.respond(status, headers, parts)


def fail(waiter: Waiter, fault: Fault, *, unresolved: bool) -> None:
    """Answer a request that failed. ``unresolved``: another request of its batch may have caused the failure."""
    waiter.answered = True
    exchange = waiter.exchange
    marks = [UNRESOLVED] if unresolved else []
    match fault.detail:
        case UpstreamAnswer(status=status, headers=headers, body=body):
            exchange.respond(status, [*forwardable(headers), *marks], body)
        case UpstreamError() as error:
            exchange.fail(error.status, error.reason, str(error), [retry_after(1.0)])
        case WrongRows(reason=reason) as error:
            exchange.fail(502, reason, f"the model's answer can't be split by rows: {error}", marks)
        case None if fault.kind is FaultKind.ROWS:
            exchange.fail(502, "wrong-rows", "the model does not answer row by row; it is no longer batched")
        case _:
            exchange.fail(500, "internal", "the sidecar could not handle this request; its log says why", marks)


def refuse(refusal: Refusal, *, isolating: bool) -> None:
    """Answer a request that the Batcher refused. ``isolating``: requests of its model that fail are kept apart."""
    status, text = REFUSALS[refusal.reason]
    if isolating and refusal.reason is Refused.LATE:
        text = ISOLATED
    exchange: Exchange | Shadow = refusal.request.payload.exchange
    exchange.fail(status, refusal.reason.value, text, [retry_after(refusal.retry_after)])


def _first_row(part: tuple[int, Piece]) -> int:
    return part[0]
