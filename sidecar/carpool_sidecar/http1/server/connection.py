"""One connection of the server: the methods that its transport, the server and its exchanges call.

It has these parts, which know nothing of it: `Wire` (the transport, and the phase of the connection), `TimeLimits`
(what the client has time for), `Intake` (the body under way), `Incoming` (bytes become exchanges), `Outgoing` (answers,
in order) and `FlowControl` (whether the client's data is read).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from carpool_sidecar.http1.parsing import HttpError
from carpool_sidecar.http1.server.flow_control import FlowControl
from carpool_sidecar.http1.server.incoming import Incoming
from carpool_sidecar.http1.server.intake import Intake
from carpool_sidecar.http1.server.outgoing import Outgoing
from carpool_sidecar.http1.server.time_limits import TimeLimits
from carpool_sidecar.http1.server.wire import Phase, Wire
from carpool_sidecar.http1.sockets import peer_has_reset
from carpool_sidecar.http1.timing import NEVER
from carpool_sidecar.http1.tunnel import splice

if TYPE_CHECKING:
    from carpool_sidecar.http1.client.upstream import Upstream
    from carpool_sidecar.http1.messages import Buffer
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.http1.server.server import Server


class Connection(asyncio.Protocol):
    """One accepted connection. The server calls `expire` a few times a second, for its deadlines."""

    __slots__ = ("_flow_control", "_incoming", "_intake", "_outgoing", "_server", "_time_limits", "_wire", "peer")

    _wire: Wire
    _time_limits: TimeLimits
    _intake: Intake
    _outgoing: Outgoing
    _flow_control: FlowControl
    _incoming: Incoming

    def __init__(self, server: Server) -> None:
        self._server = server
        self.peer: str | None = None
        """The client's address, without its port."""

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection."""
        name = transport.get_extra_info("peername")
        self.peer = name[0] if isinstance(name, tuple) else None
        server, limits = self._server, self._server.limits
        app, clock, budget = server.app, server.clock, server.budget
        phase = Phase.OPEN if server.passage is None else Phase.UNKNOWN
        # Only stream sockets are served; uvloop's transports are no subclasses of asyncio's.
        wire = self._wire = Wire(cast("asyncio.Transport", transport), limits, clock, budget, phase)
        time_limits = self._time_limits = TimeLimits(limits, clock())
        intake = self._intake = Intake(limits, budget)
        outgoing = self._outgoing = Outgoing(app, clock, limits.max_pipelined, wire, intake, time_limits)
        flow = self._flow_control = FlowControl(clock, limits.drain_bytes, wire, intake, time_limits, outgoing)
        self._incoming = Incoming(
            app, clock, limits, server.turns, server.passage, wire, intake, time_limits, outgoing, flow
        )
        if not server.opened(self):
            text = f"{limits.max_connections} connections are open, a fixed limit: add replicas"
            self._incoming.refuse(self, HttpError(503, "too-many-connections", text))

    def data_received(self, data: bytes) -> None:
        """Read data from the client."""
        self._incoming.take(self, data)

    def eof_received(self) -> bool:
        """Handle EOF from the client. Return True to stay open: the client may still wait for answers."""
        self._wire.eof = True
        if self._wire.phase is Phase.LINGERING:
            return False
        self._incoming.eof(self)
        if not self._outgoing.queue:
            return False
        self._outgoing.probe()
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        """Handle the end of the connection: incomplete answers are dropped."""
        self._wire.lost()
        self._time_limits.deadline = NEVER
        body_of = self._intake.lost()
        lost = self._outgoing.lost()
        self._server.closed(self)
        if body_of is not None and body_of.streamed_to is not None and not body_of.ended:
            body_of.ended = True
            body_of.streamed_to.aborted()
        # All of them first: that one has left may make the application answer another.
        for exchange in lost:
            exchange.ended = True
        for exchange in lost:
            self._server.app.disconnected(exchange)

    def pause_writing(self) -> None:
        """Pause answers to a client that reads too slowly, and read no more requests meanwhile."""
        self._wire.pause()
        self._flow_control.sync()
        if self._outgoing.queue:
            self._outgoing.queue[0].pause_writing()

    def resume_writing(self) -> None:
        """Resume: the client has caught up."""
        self._wire.resume()
        if self._outgoing.queue:
            self._outgoing.queue[0].resume_writing()
        self._incoming.catch_up(self)

    # Called by the server

    @property
    def idle(self) -> bool:
        """Whether no request is being read or answered."""
        return not self._outgoing.queue and not self._wire.unread and self._intake.exchange is None

    @property
    def is_flushed(self) -> bool:
        """Whether the operating system has accepted all that was written."""
        return not self._wire.unsent

    def close(self) -> None:
        """Close after all written data was sent."""
        self._wire.close()

    def abort(self) -> None:
        """Abort the connection."""
        self._wire.transport.abort()

    def patience_used(self, now: float) -> float | None:
        """Return which share of its time an idle client has used; None: the client is not idle.

        A client in a head, or one that has not begun its first, has `head_timeout`; one between requests has
        `idle_timeout`. A client whose last answer is sent has none.
        """
        wire = self._wire
        if self._outgoing.queue or self._intake.exchange is not None or wire.transport.is_closing():
            return None
        if wire.phase is Phase.LINGERING:
            return 1.0
        if wire.unread:
            return self._time_limits.used_by_head(now)
        return self._time_limits.used_between(now, first=not wire.written)

    def holds_back(self, now: float, patience: float) -> int:
        """Return the bytes held for a client that did not read its answer, or send its body, for so long.

        Those of requests count, too, that were sent behind one that takes so long to answer.
        """
        held = self._wire.holds_back(now, patience)
        exchange, outgoing = self._intake.exchange, self._outgoing
        if len(outgoing.queue) > 1 and now - outgoing.queue[0].received_at > patience:
            held += outgoing.later_bytes
        elif exchange is not None and self._time_limits.body_takes(now) > patience:
            held += exchange.buffered
        return held

    def make_room(self) -> None:
        """Drop what is held for this client."""
        exchange = self._intake.exchange
        if exchange is None or exchange.buffered < max(self._wire.unsent, self._outgoing.later_bytes):
            self._wire.transport.abort()
        else:
            self._incoming.break_body(exchange, self._intake.no_room())

    def expire(self, now: float) -> None:
        """Handle deadlines that have passed, and check whether a half-closed client still exists."""
        wire = self._wire
        wire.weigh(now, self._outgoing.held_bytes)
        if wire.is_overdue(now):
            wire.transport.abort()
            return
        if now >= self._time_limits.deadline:
            self._time_limits.deadline = NEVER
            self._hurry(now)
        if wire.eof and self._outgoing.queue and peer_has_reset(wire.transport):
            wire.transport.abort()

    def _hurry(self, now: float) -> None:
        """Handle the end of the client's time for its next request, its head or its body."""
        exchange = self._intake.exchange
        if exchange is not None:
            if (refusal := self._time_limits.body_is_late(now, self._intake.size)) is not None:
                self._incoming.break_body(exchange, refusal)
        elif self._wire.unread:
            self._incoming.refuse(self, self._time_limits.head_is_late())
        else:
            self._wire.transport.close()

    # Called when others had their turn

    def go_on(self) -> None:
        """Read data that arrived earlier."""
        self._incoming.go_on(self)

    # Called by the exchanges

    def sends_at_once(self, exchange: Exchange) -> bool:
        """Return whether it is this exchange's turn, and the client has accepted all earlier data."""
        return self._outgoing.current is exchange and self._wire.writable

    def send(self, exchange: Exchange, pieces: list[Buffer]) -> None:
        """Write pieces of this exchange's answer to the transport without copies; before its turn, hold them."""
        self._outgoing.write(exchange, pieces)

    def keeps_open(self, exchange: Exchange, *, final: bool) -> bool:
        """Return whether the connection stays open after this answer; `final`: skip the rest of the request's body."""
        return self._outgoing.keeps_open(exchange, final=final, draining=self._server.draining)

    def answered(self, exchange: Exchange) -> None:
        """Continue with the next exchange, if it was the turn of this one, which has its whole answer."""
        if self._outgoing.current is not exchange:
            return
        self._outgoing.answered(exchange)
        if self._server.waited_for and not self._outgoing.queue:
            self._server.became_idle()
        self._incoming.catch_up(self)

    def abort_answer(self, exchange: Exchange) -> None:
        """Abort the connection when this exchange is next."""
        self._outgoing.abort(exchange)

    def charge(self, exchange: Exchange, extra: int) -> bool:
        """Count more bytes as held for this exchange, if there is room."""
        return self._intake.charge(exchange, extra)

    def refund(self, exchange: Exchange, count: int) -> None:
        """Count so many bytes as released."""
        self._intake.refund(exchange, count)

    def pause_body(self, exchange: Exchange) -> None:
        """Stop reading the body of this exchange, if it is being read."""
        self._flow_control.pause_body(exchange, paused=True)

    def resume_body(self, exchange: Exchange) -> None:
        """Continue to read it."""
        self._flow_control.pause_body(exchange, paused=False)

    def await_switch(self, exchange: Exchange) -> bool:
        """Read nothing after this request until it is answered; return False if others have to be answered first."""
        return self._outgoing.await_switch(exchange)

    def switch(self, exchange: Exchange, head: bytes, upstream: Upstream, rest: bytes) -> None:
        """Answer with this head, and then pass all bytes between the client and the upstream.

        The exchange stays the connection's first until that ends. `rest` is what the upstream sent behind its head.
        """
        self._outgoing.switched(exchange, head)
        wire = self._wire
        early, wire.unread = wire.unread, b""
        wire.move_to(Phase.ENDING)
        client, model = splice(wire.transport, self, upstream.transport, upstream)
        client.take(rest)
        model.take(early)
        if wire.eof:
            client.eof_received()

    # Called by a tunnel, after a switch

    @property
    def writable(self) -> bool:
        """Whether the client has accepted all earlier data."""
        return self._wire.writable

    def write(self, pieces: list[Buffer]) -> None:
        """Write the pieces to the transport without copies."""
        self._wire.write(pieces)

    def stuck(self) -> None:
        """Give a client at the other end of a tunnel time to read."""
        self._wire.pause()

    def moved(self) -> None:
        """Note that the client has read."""
        self._wire.resume()
