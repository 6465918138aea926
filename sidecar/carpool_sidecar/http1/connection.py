"""The server's side of one connection: bytes in, exchanges out, answers in order."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from carpool_sidecar.http1.bodies import BodyReader
from carpool_sidecar.http1.exchange import Exchange
from carpool_sidecar.http1.fields import FieldLines
from carpool_sidecar.http1.memory import count_while_alive, counts_itself
from carpool_sidecar.http1.messages import CONTINUE, Buffer
from carpool_sidecar.http1.parsing import LONGEST_KEPT, HeadCheck, HttpError, RequestHead, parse_request_head
from carpool_sidecar.http1.passage import FOREIGN, speaks_http1
from carpool_sidecar.http1.sockets import peer_has_reset, reset
from carpool_sidecar.http1.timing import BULK, NEVER
from carpool_sidecar.http1.tunnel import splice

if TYPE_CHECKING:
    from carpool_sidecar.http1.exchange import Sink
    from carpool_sidecar.http1.server import Server
    from carpool_sidecar.http1.upstream import Upstream

BUFFERS_FULL = "buffers-full"
"""The reason of a refusal for want of room in the budget."""

# Stands for a request that could not be read, so that its refusal waits for its turn among the answers.
_UNREAD = RequestHead(b"", b"", FieldLines(), 1, False, 0, False)


class Connection(asyncio.Protocol):
    """One accepted connection.

    `read_deadline` and `write_deadline` are times of the server's clock; the server calls `expire` when one passes.
    """

    __slots__ = (
        "_aborted",
        "_app",
        "_body",
        "_body_of",
        "_body_paused",
        "_body_since",
        "_budget",
        "_buffer",
        "_check",
        "_clock",
        "_continue_for",
        "_counted",
        "_discarded",
        "_eof",
        "_known",
        "_last",
        "_last_head",
        "_limits",
        "_lingering",
        "_most_queued",
        "_no_more",
        "_parsing",
        "_paused_at",
        "_queue",
        "_reading",
        "_server",
        "_taken",
        "_transport",
        "_unsound",
        "_waiting_bytes",
        "_waiting_since",
        "_written",
        "_yielded",
        "peer",
        "read_deadline",
        "writable",
        "write_deadline",
    )

    _transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self._server = server
        self._app = server.app
        self._limits = server.limits
        self._clock = server.clock
        self._budget = server.budget
        # Input
        self._buffer = b""  # the beginning of a head, or requests beyond the pipelining limit
        self._check: HeadCheck | None = None  # of the head that begins in the buffer
        # Clients send the same head again and again: the last one, as it came and as it was read. Equal bytes are read
        # equally, whatever follows them, so what was accepted once need not be read again.
        self._last = b""
        self._last_head = _UNREAD
        self._known = server.passage is None  # that this is HTTP/1.1
        self._parsing = False
        self._yielded = False  # goes on with the buffer once others had their turn
        self._most_queued = server.limits.max_pipelined  # 1 while what comes next may be of another protocol
        self._reading = True  # the transport is not paused
        self._eof = False
        self._no_more = False  # what else comes in is not a request for us
        self._unsound = False  # the client may still be sending what we refused to read
        self._lingering = False
        self._discarded = 0
        # The request whose body is being read
        self._body_of: Exchange | None = None
        self._body = BodyReader(0)
        self._body_paused = False
        self._body_since = 0.0  # when it began, later by the time for which reading was paused
        self._paused_at = 0.0
        self._continue_for: Exchange | None = None  # its client waits for 100 Continue
        # Output
        self._queue: deque[Exchange] = deque()  # not answered yet, in order of arrival
        self._aborted: Exchange | None = None  # the answer at which the connection is to be cut
        self._written = 0  # bytes handed to the transport
        self._counted = 0  # of these, up to the last that are counted elsewhere
        self._taken = 0  # of these, what the client had taken when last looked
        self.writable = True
        self.read_deadline = NEVER
        self.write_deadline = NEVER
        # What waits for the client, or before its turn: looked at with every tick
        self._waiting_bytes = 0  # those that are counted as held
        self._waiting_since = NEVER
        self.peer: str | None = None
        """The client's address, without its port."""

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        # Only stream sockets are served; uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        name = transport.get_extra_info("peername")
        self.peer = name[0] if isinstance(name, tuple) else None
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self.read_deadline = self._clock() + self._limits.idle_timeout
        if not self._server.opened(self):
            limit = self._limits.max_connections
            self._refuse(
                HttpError(
                    503, "too-many-connections", f"{limit} connections are open; raise max_connections or replicas"
                )
            )

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        if self._no_more:
            self._discarded += len(data)
            self._sync_reading()
            return
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        self._parse(data)

    def eof_received(self) -> bool:
        """Take the end of what the client sends; return True to stay open, since it may still wait for answers."""
        self._eof = True
        if self._lingering:
            return False
        # Whoever ended its side inside a request may still read what was wrong with that.
        if (exchange := self._body_of) is not None:
            if exchange.ended:
                exchange.keep_alive = False  # answered, if not in its turn yet: what was left to skip won't come
            else:
                self._break_body(exchange, HttpError(400, "truncated-body", "the connection ended before the body did"))
        elif self._buffer and not self._queue:
            self._refuse(HttpError(400, "truncated-head", "the connection ended before the request's head did"))
        if not self._queue:
            return False
        self._probe()
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        """Take the end of the connection: nobody waits for the answers that are not complete."""
        self._no_more = True
        self._buffer = b""
        self._budget.give(self._waiting_bytes)
        self._waiting_bytes = 0
        self.writable = False
        self.read_deadline = self.write_deadline = NEVER
        body_of, self._body_of = self._body_of, None
        lost = [exchange for exchange in self._queue if exchange.known]
        for exchange in self._queue:
            self._let_go(exchange)
        self._queue.clear()
        # An exchange that somebody still works on keeps this connection, which need not keep half a body for it.
        self._body.drop()
        self._server.closed(self)
        if body_of is not None and body_of.streamed_to is not None and not body_of.ended:
            body_of.ended = True
            body_of.streamed_to.aborted()
        for exchange in lost:
            exchange.ended = True
            self._app.disconnected(exchange)

    def pause_writing(self) -> None:
        """Let answers wait for a client that reads too slowly, and take no more requests meanwhile."""
        self.writable = False
        self._await_client()
        self._sync_reading()
        if self._queue:
            self._queue[0].pause_writing()

    def resume_writing(self) -> None:
        """Go on: the client has caught up."""
        self.writable = True
        self.write_deadline = NEVER
        if self._queue:
            self._queue[0].resume_writing()
        self._catch_up()

    # Called by the server

    @property
    def idle(self) -> bool:
        """Whether no request is being read or answered."""
        return not self._queue and not self._buffer and self._body_of is None

    @property
    def is_flushed(self) -> bool:
        """Whether the system has taken all that was written; what it has it sends, whatever becomes of this process."""
        return not self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Close once what was written is sent."""
        self._no_more = True
        self._transport.close()
        self._await_client()

    def abort(self) -> None:
        """Cut."""
        self._transport.abort()

    def patience_used(self, now: float) -> float | None:
        """Say which share of its patience the server has had with a client that asks nothing; None: it does ask.

        A client in a head, or one that has not begun its first, has `head_timeout`; one between requests has
        `idle_timeout`. A client whose last answer is sent has none.
        """
        if self._queue or self._body_of is not None or self._transport.is_closing():
            return None
        if self._lingering:
            return 1.0
        limits = self._limits
        if self._buffer:
            return 1.0 - (self.read_deadline - now) / limits.head_timeout
        idle = now - (self.read_deadline - limits.idle_timeout)
        return idle / (limits.idle_timeout if self._written else limits.head_timeout)

    def holds_back(self, now: float, patience: float) -> int:
        """Return the bytes held for a client that has not taken its answer, or sent its body, for so long."""
        held = 0
        if now - self._waiting_since > patience:
            held = self._transport.get_write_buffer_size()
        if (exchange := self._body_of) is not None and now - self._body_since > patience:
            held += exchange.buffered
        return held

    def make_room(self) -> None:
        """Give up what is held for this client."""
        exchange = self._body_of
        if exchange is None or exchange.buffered < self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._break_body(exchange, self._no_room())

    def expire(self, now: float) -> None:
        """Act on deadlines that have passed, and look whether a half-closed client is still there."""
        limits = self._limits
        self._weigh(now)
        if now >= self.write_deadline:
            taken = self._written - self._transport.get_write_buffer_size()
            if self._lingering or taken == self._taken:
                self._transport.abort()
                return
            self._await_client()
        if now >= self.read_deadline:
            self.read_deadline = NEVER
            if (exchange := self._body_of) is not None:
                earned = self._body_since + limits.body_timeout + self._body.size / limits.min_body_rate
                if now < earned:
                    self.read_deadline = earned
                else:
                    self._break_body(
                        exchange,
                        HttpError(
                            408,
                            "body-timeout",
                            f"the body took over {limits.body_timeout:g} s at {limits.min_body_rate:g} bytes/s; "
                            "raise body_timeout or lower min_body_rate",
                        ),
                    )
            elif self._buffer:
                text = f"the head took over {limits.head_timeout:g} s; raise head_timeout"
                self._refuse(HttpError(408, "head-timeout", text))
            else:
                self._transport.close()
        if self._eof and self._queue and peer_has_reset(self._transport):
            self._transport.abort()

    # Called by the exchanges

    def write(self, pieces: list[Buffer]) -> None:
        """Hand pieces to the transport, each as it is."""
        transport = self._transport
        if transport.is_closing():
            return
        for piece in pieces:
            self._written += len(piece)
            transport.write(piece)
        if len(pieces) > 1 and counts_itself(pieces[-1]):  # before a large body goes a head
            self._counted = self._written

    def keeps_open(self, exchange: Exchange, *, final: bool) -> bool:
        """Say whether the connection outlives this answer; `final`: the rest of the request's body is not wanted."""
        if not exchange.keep_alive:
            return False
        if exchange is self._body_of:
            return not final or self._rest_is_small(exchange)
        if self._queue[-1] is not exchange or self._buffer:
            return True
        # Only the last answer says so: a client need not expect answers behind "close".
        if self._server.draining or self._eof:
            self._no_more = True
            return False
        return True

    def answered(self, exchange: Exchange) -> None:
        """Go on with the next exchange; this, the first of them, is answered."""
        queue = self._queue
        queue.popleft()
        if exchange.buffered:
            self._let_go(exchange)
        now = exchange.sent_at = self._clock()
        if not exchange.keep_alive or (exchange is self._body_of and not self._rest_is_small(exchange)):
            self._finish()
        elif exchange is self._body_of:
            # Read on, to skip the rest of its body.
            self._body_paused = False
        elif not queue and not self._buffer:
            self.read_deadline = now + self._limits.idle_timeout
            if self._eof:
                self._finish()
        if exchange.known:
            self._app.sent(exchange)
        if not queue:
            self._most_queued = self._limits.max_pipelined
            if self._server.waited_for:
                self._server.became_idle()
        elif exchange.keep_alive:
            self._advance(queue[0])
        self._catch_up()

    def abort_answer(self, exchange: Exchange) -> None:
        """Cut the connection when it is the turn of this exchange."""
        exchange.ended = True
        self._no_more = True
        self._aborted = exchange
        if self._queue[0] is exchange:
            reset(self._transport)

    def charge(self, exchange: Exchange, extra: int) -> bool:
        """Count more bytes as held for this exchange, if there is room."""
        if not self._budget.take(extra):
            return False
        exchange.buffered += extra
        return True

    def refund(self, exchange: Exchange, count: int) -> None:
        """Count so many of them as held no more."""
        count = min(count, exchange.buffered)
        exchange.buffered -= count
        self._budget.give(count)

    def await_switch(self, exchange: Exchange) -> bool:
        """Read nothing behind this request until it is answered; return False where others are to be answered first."""
        if self._queue[0] is not exchange or self._eof:
            return False
        self._most_queued = 1
        return True

    def switch(self, exchange: Exchange, head: bytes, upstream: Upstream, rest: bytes) -> None:
        """Answer with this head, and from then on pass all bytes between the client and the upstream.

        The exchange stays the connection's first until that ends. `rest` is what the upstream sent behind its head.
        """
        self.write([head])
        self.read_deadline = NEVER
        exchange.sent_at = self._clock()
        exchange.ended = True
        exchange.known = False
        self._app.sent(exchange)
        early, self._buffer = self._buffer, b""
        self._no_more = True
        client, model = splice(self._transport, self, upstream.transport, upstream)
        client.take(rest)
        model.take(early)
        if self._eof:
            client.eof_received()

    def stuck(self) -> None:
        """Give a client on the other side of a tunnel time to read."""
        self.writable = False
        self._await_client()

    def moved(self) -> None:
        """Take note that it has read."""
        self.writable = True
        self.write_deadline = NEVER

    def pause_body(self, exchange: Exchange) -> None:
        """Stop reading the body of this exchange, if it is being read."""
        if exchange is self._body_of and not self._body_paused:
            self._body_paused = True
            self._sync_reading()

    def resume_body(self, exchange: Exchange) -> None:
        """Go on reading it."""
        if exchange is self._body_of and self._body_paused:
            self._body_paused = False
            self._sync_reading()

    # Input

    def _parse(self, data: bytes) -> None:
        """Read what is here, and yield where that takes longer than a turn."""
        if not self._known and not self._knows(data):
            return
        self._parsing = True
        position, end = 0, len(data)
        try:
            while position < end and not self._no_more:
                began = position
                if self._body_of is not None:
                    position = self._read_body(self._body_of, data, position)
                elif len(self._queue) >= self._most_queued or not self.writable:
                    break
                else:
                    position = self._read_head(data, position)
                    if position == began:
                        break
                # One read of the socket may hold 10,000 requests, or 40,000 chunks; a large one has more behind it.
                if (position < end or end >= BULK) and self._server.turns.over():
                    self._yielded = True
                    self._server.turns.wait(self._go_on)
                    break
        except HttpError as refusal:
            if self._body_of is not None:
                self._break_body(self._body_of, refusal)
            else:
                self._refuse(refusal)
        finally:
            self._parsing = False
        if position < end and not self._no_more:
            self._buffer = data[position:]
        self._sync_reading()

    def _knows(self, data: bytes) -> bool:
        """Look whether this is HTTP/1.1, and pass it through if not; return False where there is nothing to read."""
        http1 = speaks_http1(data)
        if http1 is None:
            self._buffer = data
            self.read_deadline = min(self.read_deadline, self._clock() + self._limits.head_timeout)
            return False
        self._known = True
        if http1:
            return True
        assert self._server.passage is not None  # noqa: S101 - for the type checker
        self._buffer = data
        self.read_deadline = NEVER
        exchange = Exchange(self, FOREIGN, 0)
        self._queue.append(exchange)
        self._server.passage(exchange)
        self._sync_reading()
        return False

    def _catch_up(self) -> None:
        """Read on in what came while there were too many requests, or a client that did not read its answers."""
        if self._parsing:
            return
        if self._buffer and not self._no_more and not self._yielded:
            data, self._buffer = self._buffer, b""
            self._parse(data)
        elif not self._reading:
            self._sync_reading()

    def _go_on(self) -> None:
        """Read on in what came earlier."""
        self._yielded = False
        data, self._buffer = self._buffer, b""
        if data and not self._no_more:
            self._parse(data)
        else:
            self._sync_reading()

    def _read_head(self, data: bytes, position: int) -> int:
        """Read the head that begins here, and a body that is here with it.

        Return where they ended, or where the head began if it is not complete.
        """
        if (last := self._last) and data.startswith(last, position):
            self._check = None
            return self._accept(self._last_head, data, position + len(last))
        limits = self._limits
        while data.startswith(b"\r\n", position):  # some clients end a body with a line break too many (RFC 9112, 2.2)
            position += 2
        stop = data.find(b"\r\n\r\n", position) + 4
        complete = stop > 3
        size = (stop if complete else len(data)) - position
        if size > limits.max_target_bytes and data.find(b"\r\n", position, position + limits.max_target_bytes) < 0:
            text = f"the request's target is over {limits.max_target_bytes} bytes; raise max_target_bytes"
            raise HttpError(414, "target-too-long", text)
        if size > limits.max_head_bytes:
            text = f"the request's head is over {limits.max_head_bytes} bytes; raise max_head_bytes"
            raise HttpError(431, "head-too-large", text)
        if not complete:
            if size and data[position:] != b"\r":  # half a line break before the head
                if self._check is None:
                    self._check = HeadCheck(httptools.HttpRequestParser)
                    self.read_deadline = self._clock() + limits.head_timeout
                self._check.feed(data[position:])
            return position

        self._check = None
        raw = data if size == len(data) else data[position:stop]
        head = parse_request_head(raw)
        if len(head.headers) > limits.max_headers:
            text = f"the request has over {limits.max_headers} header fields; raise max_headers"
            raise HttpError(431, "too-many-headers", text)
        if size <= LONGEST_KEPT:
            self._last, self._last_head = raw, head
        return self._accept(head, data, stop)

    def _accept(self, head: RequestHead, data: bytes, position: int) -> int:
        """Take a request whose head ended here; return where its body ended, if all of it is here."""
        exchange = Exchange(self, head, self._limits.max_body_bytes)
        if self._queue:
            exchange.hold()
        self._queue.append(exchange)
        stop = position + head.length
        if not position <= stop <= len(data):
            self._begin_body(exchange, head, awaited=position == len(data))
            return position

        self.read_deadline = NEVER
        if not head.keep_alive:
            self._no_more = True
        exchange.received_at = self._clock()
        self._app.head(exchange)
        if exchange.ended:
            return stop
        body = data[position:stop]
        if exchange.streamed_to is None and (refusal := self._too_much(exchange, head.length, head.length)) is not None:
            self._break_body(exchange, refusal)
            return stop
        if exchange.streamed_to is None:
            exchange.body = body
            exchange.buffered = head.length
            self._budget.held += head.length
        elif body:
            exchange.streamed_to.data(body)
            if exchange.ended:
                return stop
        self._deliver(exchange)
        return stop

    def _begin_body(self, exchange: Exchange, head: RequestHead, *, awaited: bool) -> None:
        """Ask the application what to do with a body, of which no byte is here yet if it is awaited."""
        self._body_of = exchange
        self._body = BodyReader(head.length)
        self._body_paused = False
        self._body_since = self._clock()
        self.read_deadline = self._body_since + self._limits.body_timeout
        if head.expects_continue and awaited:
            self._continue_for = exchange
        self._app.head(exchange)
        if exchange.ended:
            return
        if exchange.streamed_to is None and (refusal := self._too_much(exchange, head.length, head.length)) is not None:
            raise refusal
        if self._continue_for is exchange and self._queue[0] is exchange:
            self._advance(exchange)

    def _read_body(self, exchange: Exchange, data: bytes, position: int) -> int:
        """Read on in a body; return where it, or the data, ended."""
        body, sink = self._body, exchange.streamed_to
        pieces: list[Buffer] = []
        stop = body.read(data, position, pieces)
        self._continue_for = None
        if exchange.ended:
            pass  # answered already: the rest is skipped
        elif sink is None:
            try:
                body.keep(pieces)
            except OSError:
                raise self._no_room() from None
            held = body.held
            if (refusal := self._too_much(exchange, body.kept, held)) is not None:
                raise refusal
            if exchange.streamed_to is not None:
                self._spill(exchange, exchange.streamed_to, body)
            else:
                self._budget.held += held - exchange.buffered
                exchange.buffered = held
        elif pieces:
            sink.data(bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces))
        if body.complete:
            self._end_body(exchange, body)
        return stop

    def _spill(self, exchange: Exchange, sink: Sink, body: BodyReader) -> None:
        """Pass on what was collected of a body that can't be collected; the rest goes the same way."""
        collected = bytes(body.join())
        body.kept = 0
        self._let_go(exchange)
        sink.data(collected)

    def _end_body(self, exchange: Exchange, body: BodyReader) -> None:
        if exchange.ended:
            self._let_go(exchange)
        self._body_of = None
        self._body_paused = False
        if not exchange.keep_alive:
            self._no_more = True
        now = exchange.received_at = self._clock()
        self.read_deadline = NEVER
        if not exchange.ended:
            if exchange.streamed_to is None:
                exchange.body = body.join()
                if counts_itself(exchange.body):
                    # It is given back when nobody holds it any more, be that before or after the answer.
                    count_while_alive(exchange.body, self._budget)
                    self._let_go(exchange)
            self._deliver(exchange)
        elif not self._queue:
            self.read_deadline = now + self._limits.idle_timeout

    def _rest_is_small(self, exchange: Exchange) -> bool:
        """Say whether to skip what is to come of this exchange's body, rather than close."""
        return (
            self._body.remaining is not None
            and self._body.remaining <= self._limits.drain_bytes
            # A client told to wait may send the body or not; both are legal, so what follows would be a guess.
            and self._continue_for is not exchange
        )

    def _deliver(self, exchange: Exchange) -> None:
        if exchange.streamed_to is None:
            self._app.request(exchange)
        else:
            exchange.streamed_to.end()

    def _let_go(self, exchange: Exchange) -> None:
        """Count the body of this exchange as held no more."""
        self._budget.held -= exchange.buffered
        exchange.buffered = 0
        if exchange is self._body_of:
            self._body.drop()

    # Refusals

    def _too_much(self, exchange: Exchange, size: int, held: int) -> HttpError | None:
        """Say why so much of this exchange's body can't be held, in bytes of content and of memory.

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
            return self._no_room()
        return None

    def _no_room(self) -> HttpError:
        self._budget.short = True
        limit = f"{self._budget.limit:.0f} bytes"
        text = f"with this body over {limit} would be buffered; raise bodies.maxBuffered or replicas"
        return HttpError(503, BUFFERS_FULL, text, [(b"retry-after", b"1")])

    def _break_body(self, exchange: Exchange, refusal: HttpError) -> None:
        """Give up a request in its body."""
        self._no_more = True
        self._unsound = True
        self._let_go(exchange)
        sink = exchange.streamed_to
        if not exchange.ended:
            exchange.keep_alive = False
            if exchange.started:
                exchange.abort()
            else:
                exchange.fail(refusal.status, refusal.reason, str(refusal), refusal.headers)
            if sink is not None:
                sink.aborted()
        elif not self._queue:
            self._finish()

    def _refuse(self, refusal: HttpError) -> None:
        """Answer, in its turn, what could not be read as a request."""
        self._no_more = True
        self._unsound = True
        self.read_deadline = NEVER
        exchange = Exchange(self, _UNREAD, 0)
        exchange.known = False
        exchange.keep_alive = False
        if self._queue:
            exchange.hold()
        self._queue.append(exchange)
        self._app.refused(refusal)
        exchange.fail(refusal.status, refusal.reason, str(refusal))

    # Output

    def _advance(self, exchange: Exchange) -> None:
        """Let this exchange be answered: its turn has come."""
        if self._continue_for is exchange:
            self._continue_for = None
            if not exchange.started:
                self.write([CONTINUE])
        exchange.release()
        if exchange is self._aborted:
            reset(self._transport)
        elif exchange.ended:
            self.answered(exchange)
        elif self.writable:
            exchange.resume_writing()

    def _weigh(self, now: float) -> None:
        """Count what the client does not take, and what it has sent before its turn.

        That is counted late, and without asking for room: it is here already. What could be asked for is.
        """
        unsent = self._transport.get_write_buffer_size()
        waiting = len(self._buffer) + min(unsent, self._written - self._counted)
        if len(self._queue) > 1:
            waiting += sum(exchange.held_bytes for exchange in self._queue)
        if not unsent:
            self._waiting_since = NEVER
        elif self._waiting_since == NEVER:
            self._waiting_since = now
            if self.write_deadline == NEVER:
                self._await_client()
        if not unsent and self.writable and not self._lingering and not self._transport.is_closing():
            self.write_deadline = NEVER
        self._budget.held += waiting - self._waiting_bytes
        self._waiting_bytes = waiting

    def _finish(self) -> None:
        """Close behind the last answer."""
        self._no_more = True
        transport = self._transport
        if self._eof or (self._body_of is None and not self._unsound):
            transport.close()
            self._await_client()
            return
        # Closing with input unread resets the connection, and the reset overtakes the answer. So: end our side, and
        # read on for a moment until the client ends its own.
        self._lingering = True
        if transport.can_write_eof():
            transport.write_eof()
        self.write_deadline = self._clock() + self._limits.linger_timeout
        self.read_deadline = NEVER
        self._sync_reading()

    def _await_client(self) -> None:
        """Give the client time to take some of what was written."""
        self._taken = self._written - self._transport.get_write_buffer_size()
        self.write_deadline = self._clock() + self._limits.write_timeout

    def _sync_reading(self) -> None:
        """Pause or resume the transport, whichever is due."""
        want = self._lingering or (
            self.writable
            and not self._body_paused
            and not self._yielded
            # With nothing in store one more read does no harm, and tells when the client leaves.
            and (len(self._queue) < self._most_queued or not self._buffer)
            and self._discarded <= self._limits.drain_bytes
        )
        if want is self._reading or self._transport.is_closing():
            return
        self._reading = want
        if want:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
        if self._body_of is not None and not self._lingering:
            # Only the client's own time counts.
            now = self._clock()
            if want:
                self._body_since += now - self._paused_at
                self.read_deadline = now + self._limits.body_timeout
            else:
                self._paused_at = now
                self.read_deadline = NEVER

    def _probe(self) -> None:
        """Provoke a reset from a client that has gone entirely.

        The end of its stream looks the same whether it only ended its side, and waits for the answer, or closed. To
        what arrives for a closed socket its kernel answers with a reset. An interim response may be sent at any time
        (RFC 9110, 15.2), and clients skip it.
        """
        exchange = self._queue[0]
        if not exchange.started and exchange.version == (1, 1):
            self.write([CONTINUE])
