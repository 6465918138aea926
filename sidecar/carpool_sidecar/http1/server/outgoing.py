"""Outgoing answers, in the order of their requests."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from carpool_sidecar.http1.messages import CONTINUE, size_of
from carpool_sidecar.http1.server.wire import Phase
from carpool_sidecar.http1.sockets import reset
from carpool_sidecar.http1.timing import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_sidecar.http1.messages import Buffer
    from carpool_sidecar.http1.server.application import Application
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.http1.server.intake import Intake
    from carpool_sidecar.http1.server.time_limits import TimeLimits
    from carpool_sidecar.http1.server.wire import Wire


class Outgoing:
    """The exchanges of a connection that are not answered yet, in order of arrival: `queue`.

    `current` is the one whose answer is sent; those behind it have theirs held until it is their turn. `limit`: so many
    exchanges, and no more requests are read. It is 1 while what comes next may be of another protocol.
    """

    __slots__ = (
        "_aborted", "_app", "_clock", "_held", "_intake", "_max_pipelined", "_time_limits", "_wire", "current", "limit",
        "queue",
    )  # fmt: skip

    def __init__(
        self,
        app: Application,
        clock: Callable[[], float],
        max_pipelined: int,
        wire: Wire,
        intake: Intake,
        time_limits: TimeLimits,
    ) -> None:
        self._app = app
        self._clock = clock
        self._max_pipelined = max_pipelined
        self._wire = wire
        self._intake = intake
        self._time_limits = time_limits
        self._aborted: Exchange | None = None  # the answer at which the connection is to be cut
        self._held: dict[Exchange, list[Buffer]] = {}  # what was written before its turn
        self.queue: deque[Exchange] = deque()
        self.current: Exchange | None = None
        self.limit = max_pipelined

    def append(self, exchange: Exchange) -> None:
        """Add an exchange that waits for its turn."""
        if not self.queue:
            self.current = exchange
        self.queue.append(exchange)

    def write(self, exchange: Exchange, pieces: list[Buffer]) -> None:
        """Write pieces of this exchange's answer, now or when it is its turn."""
        if exchange is self.current:
            self._wire.write(pieces)
        elif self.queue:  # if it is empty, the client has left
            self._held.setdefault(exchange, []).extend(pieces)

    @property
    def held_bytes(self) -> int:
        """Bytes of answers that wait for their turn."""
        return sum(map(size_of, self._held.values())) if len(self.queue) > 1 else 0

    @property
    def later_bytes(self) -> int:
        """Bytes held for the requests behind the first: their bodies, and answers that wait for their turn."""
        later = islice(self.queue, 1, None)
        # A large body counts itself, so it is not in `buffered`.
        return sum(
            max(exchange.buffered, len(exchange.body)) + size_of(self._held.get(exchange, ())) for exchange in later
        )

    def keeps_open(self, exchange: Exchange, *, final: bool, draining: bool) -> bool:
        """Return whether the connection stays open after this answer; `final`: skip the rest of the request's body."""
        if not exchange.keep_alive:
            return False
        if exchange is self._intake.exchange:
            return not final or self._intake.rest_is_small
        if self.queue[-1] is not exchange or self._wire.unread:
            return True
        # Only the last answer says so: a client need not expect answers behind "close".
        if draining or self._wire.eof:
            self._wire.move_to(Phase.ENDING)
            return False
        return True

    def answered(self, exchange: Exchange) -> None:
        """Continue with the next exchange; this one, the first, is answered."""
        queue, intake = self.queue, self._intake
        queue.popleft()
        self.current = None
        if exchange.buffered:
            intake.let_go(exchange)
        now = exchange.sent_at = self._clock()
        if not exchange.keep_alive or (exchange is intake.exchange and not intake.rest_is_small):
            self.finish()
        elif exchange is intake.exchange:
            # Read on, to skip the rest of its body.
            intake.paused = False
        elif not queue and self._wire.unread in {b"", b"\r"}:  # half a line break begins no head
            self._time_limits.await_request(now)
            if self._wire.eof:
                self.finish()
        if exchange.known:
            self._app.sent(exchange)
        if not queue:
            self.limit = self._max_pipelined
        elif exchange.keep_alive:
            self.advance(queue[0])

    def advance(self, exchange: Exchange) -> None:
        """Send this exchange's answer: it is next."""
        if self._intake.continue_for is exchange:
            self._intake.continue_for = None
            if not exchange.started:
                self._wire.write([CONTINUE])
        self.current = exchange
        if (held := self._held.pop(exchange, None)) is not None:
            self._wire.write(held)
        if exchange is self._aborted:
            reset(self._wire.transport)
        elif exchange.ended:
            self.answered(exchange)
        elif self._wire.writable:
            exchange.resume_writing()

    def abort(self, exchange: Exchange) -> None:
        """Abort the connection when this exchange is next."""
        exchange.ended = True
        self._wire.move_to(Phase.ENDING)
        self._aborted = exchange
        if self.queue[0] is exchange:
            reset(self._wire.transport)

    def await_switch(self, exchange: Exchange) -> bool:
        """Read nothing after this request until it is answered; return False if others have to be answered first."""
        if self.queue[0] is not exchange or self._wire.eof:
            return False
        self.limit = 1
        return True

    def switched(self, exchange: Exchange, head: bytes) -> None:
        """Answer with the head of a switch to another protocol; the exchange stays the first while that lasts."""
        self._wire.write([head])
        self._time_limits.deadline = NEVER
        exchange.sent_at = self._clock()
        exchange.ended = True
        exchange.known = False
        self._app.sent(exchange)

    def probe(self) -> None:
        """Provoke a reset from a client that has gone entirely.

        The end of its stream looks the same whether it only ended its side, and waits for the answer, or closed. To
        what arrives for a closed socket its kernel answers with a reset. An interim response may be sent at any time
        (RFC 9110, 15.2), and clients skip it.
        """
        exchange = self.queue[0]
        if not exchange.started and exchange.version == (1, 1):
            self._wire.write([CONTINUE])

    def lost(self) -> list[Exchange]:
        """Handle the end of the connection; return the exchanges that the application knows."""
        known = [exchange for exchange in self.queue if exchange.known]
        for exchange in self.queue:
            self._intake.let_go(exchange)
        self.queue.clear()
        self._held.clear()
        self.current = None
        return known

    def finish(self) -> None:
        """Close after the last answer; linger if input is unread."""
        wire = self._wire
        if wire.eof or (self._intake.exchange is None and wire.phase < Phase.REFUSED):
            wire.close()
        else:
            wire.linger()
            self._time_limits.deadline = NEVER
