"""The body that a connection is reading: where its bytes go, and how many are counted in the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_sidecar.http1.bodies import BodyReader
from carpool_sidecar.http1.memory import count_while_alive, counts_itself
from carpool_sidecar.http1.parsing import HttpError

if TYPE_CHECKING:
    from carpool_sidecar.http1.limits import ServerLimits
    from carpool_sidecar.http1.memory import Budget
    from carpool_sidecar.http1.messages import Buffer
    from carpool_sidecar.http1.server.application import Sink
    from carpool_sidecar.http1.server.exchange import Exchange

BUFFERS_FULL = "buffers-full"
"""The reason of a refusal when the memory budget is used up."""


class Intake:
    """Collects or passes on one request body at a time, and counts the bytes held for a connection.

    `exchange` is the one whose body is being read, `paused` that its application wants no more of it now, and
    `continue_for` the one whose client waits for 100 Continue.
    """

    __slots__ = ("_budget", "_drained", "_reader", "continue_for", "exchange", "paused")

    def __init__(self, limits: ServerLimits, budget: Budget) -> None:
        self._drained = limits.drain_bytes
        self._budget = budget
        self._reader = BodyReader(0)
        self.exchange: Exchange | None = None
        self.paused = False
        self.continue_for: Exchange | None = None

    # One body

    def begin(self, exchange: Exchange, length: int) -> None:
        """Start a body of so many bytes, or in chunks."""
        self.exchange = exchange
        self._reader = BodyReader(length)
        self.paused = False

    def read(self, exchange: Exchange, data: bytes, position: int) -> int:
        """Read; return where the body or the data ended. Raises HttpError if it can't be read or held."""
        reader, sink = self._reader, exchange.streamed_to
        pieces: list[Buffer] = []
        stop = reader.read(data, position, pieces)
        self.continue_for = None
        if exchange.ended:
            pass  # answered already: the rest is skipped
        elif sink is None:
            self._keep(exchange, pieces)
        elif pieces:
            sink.data(bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces))
        return stop

    def _keep(self, exchange: Exchange, pieces: list[Buffer]) -> None:
        reader = self._reader
        try:
            reader.keep(pieces)
        except OSError:
            raise self.no_room() from None
        held = reader.held
        if (refusal := self.too_much(exchange, reader.kept, held)) is not None:
            raise refusal
        if exchange.streamed_to is not None:
            self._spill(exchange, exchange.streamed_to)
        else:
            self._budget.held += held - exchange.buffered
            exchange.buffered = held

    def _spill(self, exchange: Exchange, sink: Sink) -> None:
        """Pass on the collected part of a body that can't be held; the rest follows the same way."""
        collected = bytes(self._reader.join())
        self._reader.kept = 0
        self.let_go(exchange)
        sink.data(collected)

    @property
    def complete(self) -> bool:
        """Whether the body is complete."""
        return self._reader.complete

    @property
    def size(self) -> int:
        """Bytes of the body that were read, with their framing."""
        return self._reader.size

    @property
    def rest_is_small(self) -> bool:
        """Whether to skip the rest of the body instead of closing."""
        return (
            self._reader.remaining is not None
            and self._reader.remaining <= self._drained
            # A client that waits for 100 Continue may send the body or not, so the next bytes are ambiguous.
            and self.continue_for is not self.exchange
        )

    def end(self, exchange: Exchange) -> None:
        """Deliver a complete body."""
        if exchange.ended:
            self.let_go(exchange)
        elif exchange.streamed_to is None:
            exchange.body = self._reader.join()
            if counts_itself(exchange.body):
                # It is given back when nobody holds it any more, be that before or after the answer.
                count_while_alive(exchange.body, self._budget)
                self.let_go(exchange)
        self.exchange = None
        self.paused = False

    def lost(self) -> Exchange | None:
        """Handle the end of the connection; return the exchange whose body was being read."""
        exchange, self.exchange = self.exchange, None
        # An exchange that somebody still works on keeps its connection, which need not keep half a body for it.
        self._reader.drop()
        return exchange

    # What is held

    def hold(self, exchange: Exchange, body: bytes) -> None:
        """Deliver a body that arrived in one piece."""
        exchange.body = body
        exchange.buffered = len(body)
        self._budget.held += len(body)

    def charge(self, exchange: Exchange, extra: int) -> bool:
        """Count more bytes as held for this exchange, if there is room."""
        if not self._budget.take(extra):
            return False
        exchange.buffered += extra
        return True

    def refund(self, exchange: Exchange, count: int) -> None:
        """Count so many bytes as released."""
        count = min(count, exchange.buffered)
        exchange.buffered -= count
        self._budget.give(count)

    def let_go(self, exchange: Exchange) -> None:
        """Count the body of this exchange as released."""
        self._budget.held -= exchange.buffered
        exchange.buffered = 0
        if exchange is self.exchange:
            self._reader.drop()

    def too_much(self, exchange: Exchange, size: int, held: int) -> HttpError | None:
        """Return why so much of this exchange's body can't be held, in bytes of content and of memory.

        None: it can, or the application had it streamed.
        """
        budget = self._budget
        if size > exchange.limit:
            if exchange.overflow is None or not exchange.overflow(exchange, too_large=True):
                text = f"the body is over {exchange.limit} bytes; raise bodies.maxRequest"
                return HttpError(413, "body-too-large", text)
        elif budget.held - exchange.buffered + held > budget.limit and (
            exchange.overflow is None or not exchange.overflow(exchange, too_large=False)
        ):
            return self.no_room()
        return None

    def no_room(self) -> HttpError:
        """Return the error for a used-up budget."""
        self._budget.short = True
        limit = f"{self._budget.limit:.0f} bytes"
        text = f"with this body over {limit} would be buffered; raise bodies.maxBuffered or replicas"
        return HttpError(503, BUFFERS_FULL, text, [(b"retry-after", b"1")])
