"""Incoming requests: bytes become exchanges, and malformed requests are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from carpool_sidecar.http1.parsing import HttpError, RequestHead
from carpool_sidecar.http1.server.exchange import Exchange
from carpool_sidecar.http1.server.heads import FOREIGN, UNREAD, HeadReader, speaks_http1
from carpool_sidecar.http1.server.wire import Phase
from carpool_sidecar.http1.timing import BULK, NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_sidecar.http1.limits import ServerLimits
    from carpool_sidecar.http1.server.application import Application
    from carpool_sidecar.http1.server.connection import Connection
    from carpool_sidecar.http1.server.flow_control import FlowControl
    from carpool_sidecar.http1.server.intake import Intake
    from carpool_sidecar.http1.server.outgoing import Outgoing
    from carpool_sidecar.http1.server.time_limits import TimeLimits
    from carpool_sidecar.http1.server.wire import Wire
    from carpool_sidecar.http1.timing import Turns

# Looking a member of an enum up costs 0.2 us, and a request takes six of them.
_UNKNOWN: Final = Phase.UNKNOWN
_ENDING: Final = Phase.ENDING


class Incoming:
    """Reads the requests of a connection. Their exchanges refer to the connection, so that is an argument here.

    (Kept here, the two would refer to each other, and wait for the garbage collector.)
    """

    __slots__ = (
        "_app", "_clock", "_flow_control", "_heads", "_intake", "_limits", "_outgoing", "_parsing", "_passage",
        "_time_limits", "_turns", "_wire",
    )  # fmt: skip

    def __init__(
        self,
        app: Application,
        clock: Callable[[], float],
        limits: ServerLimits,
        turns: Turns,
        passage: Callable[[Exchange], None] | None,
        wire: Wire,
        intake: Intake,
        time_limits: TimeLimits,
        outgoing: Outgoing,
        flow_control: FlowControl,
    ) -> None:
        self._app = app
        self._clock = clock
        self._limits = limits
        self._turns = turns
        self._passage = passage
        self._wire = wire
        self._intake = intake
        self._time_limits = time_limits
        self._outgoing = outgoing
        self._flow_control = flow_control
        self._heads = HeadReader(limits)
        self._parsing = False

    def take(self, connection: Connection, data: bytes) -> None:
        """Read data from the client."""
        wire = self._wire
        if wire.phase >= _ENDING:
            self._flow_control.discard(len(data))
            return
        if wire.unread:
            data = wire.unread + data
            wire.unread = b""
        if wire.phase is _UNKNOWN and not self._knows(connection, data):
            return
        self._parse(connection, data)

    def _knows(self, connection: Connection, data: bytes) -> bool:
        """Check whether this is HTTP/1.1, and pass it through if not; return False if there is nothing to read."""
        wire = self._wire
        http1 = speaks_http1(data)
        if http1 is None:
            wire.unread = data
            self._time_limits.await_protocol(self._clock())
            return False
        wire.phase = Phase.OPEN
        if http1:
            return True
        assert self._passage is not None  # noqa: S101 - for the type checker
        wire.unread = data
        self._time_limits.deadline = NEVER
        exchange = Exchange(connection, FOREIGN, 0)
        self._outgoing.append(exchange)
        self._passage(exchange)
        self._flow_control.sync()
        return False

    def _parse(self, connection: Connection, data: bytes) -> None:
        """Read the data, and yield to other connections if that takes longer than a turn."""
        self._parsing = True
        wire, intake, outgoing = self._wire, self._intake, self._outgoing
        position, end = 0, len(data)
        try:
            while position < end and wire.phase < _ENDING:
                if intake.exchange is not None:
                    position = self._read_body(intake.exchange, data, position)
                elif len(outgoing.queue) >= outgoing.limit or not wire.writable:
                    break
                else:
                    head, position = self._heads.read(data, position)
                    if head is None:
                        if self._heads.check(data[position:]):
                            self._time_limits.await_head(self._clock())
                        break
                    position = self._accept(connection, head, data, position)
                # One read of the socket may hold 10,000 requests, or 40,000 chunks; a large one has more behind it.
                if (position < end or end >= BULK) and self._turns.over():
                    self._flow_control.yielded = True
                    self._turns.wait(connection.go_on)
                    break
        except HttpError as refusal:
            if intake.exchange is not None:
                self.break_body(intake.exchange, refusal)
            else:
                self.refuse(connection, refusal)
        finally:
            self._parsing = False
        if position < end and wire.phase < _ENDING:
            wire.unread = data[position:]
        self._flow_control.sync()

    def catch_up(self, connection: Connection) -> None:
        """Read the data that arrived while there were too many requests or unread answers."""
        if self._parsing:
            return
        if self._wire.unread and self._wire.phase < _ENDING and not self._flow_control.yielded:
            self._read_on(connection)
        elif self._flow_control.paused:
            self._flow_control.sync()

    def go_on(self, connection: Connection) -> None:
        """Read the data that arrived earlier: the other connections had their turn."""
        self._flow_control.yielded = False
        if self._wire.unread and self._wire.phase < _ENDING:
            self._read_on(connection)
        else:
            self._wire.unread = b""
            self._flow_control.sync()

    def _read_on(self, connection: Connection) -> None:
        data, self._wire.unread = self._wire.unread, b""
        self.take(connection, data)

    def _accept(self, connection: Connection, head: RequestHead, data: bytes, position: int) -> int:
        """Start a request after its head; return the end of its body, if all of it has arrived."""
        exchange = Exchange(connection, head, self._limits.max_body_bytes)
        self._outgoing.append(exchange)
        stop = position + head.length
        if not position <= stop <= len(data):
            self._begin_body(exchange, head, awaited=position == len(data))
            return position

        self._time_limits.deadline = NEVER
        if not head.keep_alive:
            self._wire.move_to(_ENDING)
        exchange.received_at = self._clock()
        self._app.head(exchange)
        if exchange.ended:
            return stop
        body, sink = data[position:stop], exchange.streamed_to
        if sink is None:
            if (refusal := self._intake.too_much(exchange, head.length, head.length)) is not None:
                self.break_body(exchange, refusal)
                return stop
            sink = exchange.streamed_to
        if sink is None:
            self._intake.hold(exchange, body)
        elif body:
            sink.data(body)
            if exchange.ended:
                return stop
        self._deliver(exchange)
        return stop

    def _begin_body(self, exchange: Exchange, head: RequestHead, *, awaited: bool) -> None:
        """Ask the application what to do with a body; `awaited`: no byte of it has arrived yet."""
        intake = self._intake
        intake.begin(exchange, head.length)
        self._time_limits.await_body(self._clock())
        if head.expects_continue and awaited:
            intake.continue_for = exchange
        self._app.head(exchange)
        if exchange.ended:
            return
        if (
            exchange.streamed_to is None
            and (refusal := intake.too_much(exchange, head.length, head.length)) is not None
        ):
            raise refusal
        if intake.continue_for is exchange and self._outgoing.queue[0] is exchange:
            self._outgoing.advance(exchange)

    def _read_body(self, exchange: Exchange, data: bytes, position: int) -> int:
        """Continue to read a body; return where the body or the data end."""
        stop = self._intake.read(exchange, data, position)
        if self._intake.complete:
            self._intake.end(exchange)
            if not exchange.keep_alive:
                self._wire.move_to(_ENDING)
            now = exchange.received_at = self._clock()
            self._time_limits.deadline = NEVER
            if not exchange.ended:
                self._deliver(exchange)
            elif not self._outgoing.queue:
                self._time_limits.await_request(now)
        return stop

    def _deliver(self, exchange: Exchange) -> None:
        if exchange.streamed_to is None:
            self._app.request(exchange)
        else:
            exchange.streamed_to.end()

    # Refusals

    def eof(self, connection: Connection) -> None:
        """Handle EOF from the client. It may still read the error of a request that ended so."""
        exchange = self._intake.exchange
        if exchange is not None:
            if exchange.ended:
                exchange.keep_alive = False  # answered, if not in its turn yet: what was left to skip won't come
            else:
                self.break_body(exchange, HttpError(400, "truncated-body", "the connection ended before the body did"))
        elif self._wire.unread and not self._outgoing.queue:
            text = "the connection ended before the request's head did"
            self.refuse(connection, HttpError(400, "truncated-head", text))

    def break_body(self, exchange: Exchange, refusal: HttpError) -> None:
        """Abort a request whose body is being read."""
        self._wire.move_to(Phase.REFUSED)
        self._intake.let_go(exchange)
        sink = exchange.streamed_to
        if not exchange.ended:
            exchange.keep_alive = False
            if exchange.started:
                exchange.abort()
            else:
                exchange.fail(refusal.status, refusal.reason, str(refusal), refusal.headers)
            if sink is not None:
                sink.aborted()
        elif not self._outgoing.queue:
            self._outgoing.finish()
            self._flow_control.sync()

    def refuse(self, connection: Connection, refusal: HttpError) -> None:
        """Answer a malformed request with an error, after the answers to earlier requests."""
        self._wire.move_to(Phase.REFUSED)
        self._time_limits.deadline = NEVER
        exchange = Exchange(connection, UNREAD, 0)
        exchange.known = False
        exchange.keep_alive = False
        self._outgoing.append(exchange)
        self._app.refused(refusal)
        exchange.fail(refusal.status, refusal.reason, str(refusal))
