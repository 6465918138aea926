"""Payloads of requests that wait for an answer: a caller's, or one of the sidecar's own trials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from carpool_sidecar.dispatch.answers import UpstreamAnswer
from carpool_sidecar.http1.messages import parts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool.batching.counters import Counters
    from carpool_sidecar.axis_verification.check import Check
    from carpool_sidecar.http1.messages import Body, Headers
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.models import Entry
    from carpool_sidecar.protocols.common import Message, Parsed, Piece
    from carpool_sidecar.protocols.headers import Facts


class Waiter:
    """One waiting caller: the payload of a request of the Batcher.

    The exchange's context refers to that request, and nothing here refers back to it. So all of it is freed as soon as
    the exchange drops it. If it had to wait for the garbage collector, bodies of a megabyte would accumulate.
    """

    __slots__ = (
        "answer", "answered", "check", "counters", "entry", "exchange", "facts", "headers", "parsed", "pieces",
        "status",
    )  # fmt: skip

    def __init__(
        self,
        exchange: Exchange | Shadow,
        entry: Entry,
        counters: Counters,
        facts: Facts,
        parsed: Parsed[Any],
        check: Check | None,
    ) -> None:
        self.exchange = exchange
        self.entry = entry
        self.check = check
        """The check that examines its answer."""
        self.counters = counters
        self.facts = facts
        self.parsed = parsed
        self.answer: UpstreamAnswer | None = None
        """The upstream's answer, if the request was sent alone."""
        self.headers: Headers = []
        """Headers of the answer to its last batch; ``status`` likewise."""
        self.status = 200
        self.pieces: list[tuple[int, Piece]] = []
        """Answers to its rows with the first row of each, in order of arrival."""
        self.answered = False
        """Whether it got an answer of the upstream, which is counted once it is sent."""


class Shadow:
    """Takes the place of the exchange for a trial, a request of the sidecar itself."""

    __slots__ = ("_answered", "body", "headers")

    def __init__(self, message: Message, facts: Facts, answered: Callable[[UpstreamAnswer | None], None]) -> None:
        self.body: Body = message.parts
        self.headers: Headers = [*facts.shared, *message.headers]
        self._answered = answered

    def respond(self, status: int, headers: Headers, body: Body = b"") -> None:
        """Take the upstream's answer."""
        self._answered(UpstreamAnswer(status, headers, b"".join(parts_of(body))))

    def fail(self, status: int, reason: str, error: str, headers: Headers | None = None) -> None:  # noqa: ARG002 - an exchange's signature
        """Report to the verifier that there is no answer."""
        self._answered(None)
