"""Who waits for an answer: a caller, or a trial of the sidecar's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from carpool_sidecar.dispatch.answers import UpstreamAnswer
from carpool_sidecar.http1.messages import parts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool.batching.counters import Counters
    from carpool_sidecar.http1.messages import Body, Headers
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.models import Entry
    from carpool_sidecar.protocols.common import Message, Parsed, Piece
    from carpool_sidecar.protocols.headers import Facts
    from carpool_sidecar.verification.check import Check


class Waiter:
    """One caller on the way: the payload of the Batcher's request.

    An exchange's context is that request, and nothing here points back at it: once the exchange lets go of it, all of
    it is freed at once. Left to the garbage collector, bodies of a megabyte would pile up.
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
        """Who looks at its answer."""
        self.counters = counters
        self.facts = facts
        self.parsed = parsed
        self.answer: UpstreamAnswer | None = None
        """The upstream's answer to this request alone."""
        self.headers: Headers = []
        """Of the last batch that it was in, like the status."""
        self.status = 200
        self.pieces: list[tuple[int, Piece]] = []
        """Its rows' answers by first row, as they came in."""
        self.answered = False
        """Whether it got an answer of the upstream's, to be counted once it is sent."""


class Shadow:
    """Stands in for the exchange of a request of the sidecar's own: a trial's."""

    __slots__ = ("_answered", "body", "headers")

    def __init__(self, message: Message, facts: Facts, answered: Callable[[UpstreamAnswer | None], None]) -> None:
        self.body: Body = message.parts
        self.headers: Headers = [*facts.shared, *message.headers]
        self._answered = answered

    def respond(self, status: int, headers: Headers, body: Body = b"") -> None:
        """Take the upstream's answer."""
        self._answered(UpstreamAnswer(status, headers, b"".join(parts_of(body))))

    def fail(self, status: int, reason: str, error: str, headers: Headers | None = None) -> None:  # noqa: ARG002 - an exchange's signature
        """Take that there is none."""
        self._answered(None)
