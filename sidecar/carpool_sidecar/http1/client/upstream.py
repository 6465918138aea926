"""The client's side of one connection: one call at a time, its answer passed to its receiver."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import httptools

from carpool_sidecar.http1.bodies import BodyReader
from carpool_sidecar.http1.memory import count_while_alive, counts_itself
from carpool_sidecar.http1.parsing import (
    LONGEST_KEPT,
    UNTIL_CLOSE,
    HeadCheck,
    HttpError,
    ResponseHead,
    parse_response_head,
)
from carpool_sidecar.http1.timing import BULK, NEVER

if TYPE_CHECKING:
    from carpool_sidecar.http1.client.calls import Call, FailureKind, StreamReceiver
    from carpool_sidecar.http1.client.pool import Pool
    from carpool_sidecar.http1.messages import Buffer


class Upstream(asyncio.Protocol):
    """One connection of a pool.

    `deadline` is a time of the pool's clock; the pool calls `expire` when it has passed.
    """

    transport: asyncio.Transport

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._clock = pool.clock
        self._budget = pool.budget
        self._call: Call | None = None
        self._used = False  # an earlier call was answered here: the upstream may be about to close
        self._body = BodyReader(0)  # of the answer being read
        # Upstreams repeat the same head for all callers, so the last one is kept as received and as parsed.
        self._last = b""
        self._last_response: ResponseHead | None = None
        self._held = 0  # bytes of the answer that are counted as held
        self._waiting_bytes = 0  # bytes of a streamed request that the upstream has not read, likewise
        self._rest = b""  # data to read after the other connections had their turn
        self._yielded = False  # others have their turn
        self._flow_paused = False
        self._patience = 0.0  # seconds for an upstream behind a tunnel that does not read
        self.deadline = NEVER
        self.writable = True
        self._reset()

    def _reset(self) -> None:
        """Forget the answer read last."""
        self._buffer = b""
        self._check: HeadCheck | None = None
        self._response: ResponseHead | None = None
        self._streaming = False  # the receiver has got the head: the answer is streamed
        self._interim = 0  # interim responses before the answer

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        # Only stream sockets are served; uvloop's transports are no subclasses of asyncio's.
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=self._pool.limits.write_buffer_bytes)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        """Take what the upstream sent."""
        call = self._call
        if call is None:
            self.close()  # there was no request: the data would be read as the next call's answer
            return
        call.answered_bytes = True
        self._read(call, data)

    def eof_received(self) -> None:
        """Take the end of what the upstream sends; the transport closes."""
        self._lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Take the end of the connection."""
        self._lost(exc)

    def pause_writing(self) -> None:
        """Pass backpressure on; from now on the upstream's silence counts, since it does not read."""
        self.writable = False
        self.weigh()
        if (call := self._call) is not None:
            self.deadline = self._clock() + call.timeout
            call.pause_writing()

    def resume_writing(self) -> None:
        """Pass its end on."""
        self.writable = True
        if (call := self._call) is not None:
            if call.uploading:
                self.deadline = NEVER
            call.resume_writing()

    # Called by the pool

    def begin(self, call: Call, pieces: list[Buffer]) -> None:
        """Send a call, or the part of it that is available."""
        self._call = call
        # While the request is not complete, the upstream may rightly be silent.
        self.deadline = NEVER if call.uploading else self._clock() + call.timeout
        for piece in pieces:
            self.transport.write(piece)

    def expire(self) -> None:
        """Act on the deadline, which has passed."""
        if (call := self._call) is None:
            self.close()
        else:
            self._fail("timeout", f"the upstream was silent for {call.timeout:g} s")

    def weigh(self) -> None:
        """Count bytes that the upstream has not read, unless the request is kept until it is answered anyway."""
        call = self._call
        waiting = self.transport.get_write_buffer_size() if call is None or call.streaming else 0
        self._budget.held += waiting - self._waiting_bytes
        self._waiting_bytes = waiting

    def abandon(self, text: str) -> None:
        """Cut the connection, and report the failure to the receiver if there is a call."""
        self._fail("reset", text)

    def close(self) -> None:
        """Cut the connection without a report to the receiver."""
        self._call = None
        self._let_go()
        self._pool.forget(self)
        self.transport.abort()

    # Called by the call

    def write(self, pieces: list[Buffer]) -> None:
        """Send the next piece of the request's body."""
        for piece in pieces:
            self.transport.write(piece)

    def uploaded(self, call: Call) -> None:
        """Count the upstream's silence from now on: the request is complete."""
        self.deadline = self._clock() + call.timeout

    def pause_reading(self) -> None:
        """Stop reading; the upstream's silence does not count meanwhile."""
        self._flow_paused = True
        self.deadline = NEVER
        self._sync_reading()

    def resume_reading(self, call: Call) -> None:
        """Go on."""
        if self._flow_paused:
            self._flow_paused = False
            self._sync_reading()
            self._hear(call)

    def _sync_reading(self) -> None:
        transport, want = self.transport, not (self._flow_paused or self._yielded)
        if not transport.is_closing() and transport.is_reading() is not want:
            (transport.resume_reading if want else transport.pause_reading)()

    # Called by a tunnel

    def stuck(self) -> None:
        """Set a deadline by which an upstream on the other side of a tunnel has to read."""
        self.writable = False
        self.deadline = self._clock() + self._patience

    def moved(self) -> None:
        """Take note that the upstream has read."""
        self.writable = True
        self.deadline = NEVER

    # The answer

    def _read(self, call: Call, data: bytes) -> None:
        try:
            if self._response is None:
                self._read_head(call, self._buffer + data if self._buffer else data)
            else:
                self._hear(call)
                self._read_body(call, self._response, data, 0)
        except HttpError as error:
            self._fail("protocol", str(error))

    def _hear(self, call: Call) -> None:
        """Count the upstream's silence from now on; while the request is not complete, it may rightly be silent."""
        if not call.uploading and not self._flow_paused:
            self.deadline = self._clock() + call.timeout

    def _go_on(self) -> None:
        """Resume reading, first the data that arrived earlier."""
        data, self._rest = self._rest, b""
        self._yielded = False
        call = self._call
        if call is not None and data:
            self._read(call, data)
        self._sync_reading()

    def _read_head(self, call: Call, data: bytes) -> None:
        # Whether there is a body depends on the method. Heads are only kept for methods other than HEAD.
        if (last := self._last_response) is not None and data.startswith(self._last) and not call.method:
            self._accept(call, last, data, len(self._last))
            return
        limit = self._pool.limits.max_head_bytes
        position = 0
        while True:
            stop = data.find(b"\r\n\r\n", position) + 4
            size = (stop if stop > 3 else len(data)) - position
            if size > limit:
                raise HttpError(
                    502, "head-too-large", f"the model answers with a head of over {limit:.0f} bytes, a fixed limit"
                )
            if stop == 3:
                self._buffer = data[position:]
                if self._buffer:
                    if self._check is None:
                        self._check = HeadCheck(httptools.HttpResponseParser)
                    self._check.feed(self._buffer)
                return
            raw = data if size == len(data) else data[position:stop]
            response = parse_response_head(raw, call.method)
            self._check = None
            position = stop
            if response.status == 101:
                self._switch(call, response, data[position:])
                return
            if response.status >= 200:
                break
            self._interim += 1
            if self._interim > self._pool.limits.max_interim:
                text = f"the upstream sent over {self._pool.limits.max_interim} interim responses (1xx) and no answer"
                raise HttpError(502, "too-many-interim", text)
            self._hear(call)
            if call.streamed is not None and response.status != 100:
                call.streamed.interim(response.status, response.headers)
                if self._call is not call:  # its receiver has cancelled it
                    return
        if size <= LONGEST_KEPT and not call.method:
            self._last, self._last_response = raw, response
        self._accept(call, response, data, position)

    def _accept(self, call: Call, response: ResponseHead, data: bytes, position: int) -> None:
        """Take an answer whose head ended here."""
        self._response = response
        if response.length > self._pool.limits.max_body_bytes and call.streamed is None:
            self._too_large()
        elif position + response.length == len(data) and response.length >= 0:
            # All of it is here, and nothing else.
            self._done(call, response)
            call.receiver.answered(response.status, response.headers, data[position:])
        elif call.streamed is None and self._budget.held + response.length > self._budget.limit:
            self._no_room()
        else:
            self._body = BodyReader(response.length)
            self._hear(call)
            self._read_body(call, response, data, position)

    def _read_body(self, call: Call, response: ResponseHead, data: bytes, position: int) -> None:
        body = self._body
        while True:
            pieces: list[Buffer] = []
            position = body.read(data, position, pieces)
            if body.complete and position < len(data):
                # The answer is good. The data behind it belong to no call, so the connection can't be used again.
                position = len(data)
                response = response._replace(keep_alive=False)
            if call.streamed is None or (body.complete and not self._streaming):
                self._keep(call, response, pieces)
            else:
                self._deliver(call, call.streamed, response, pieces)
            if self._call is not call or (position == len(data) and position < BULK):
                return
            # One read may hold 40,000 chunks; a large one has more behind it.
            if self._pool.turns.over():
                self._rest = data[position:]
                self._yielded = True
                self._pool.turns.wait(self._go_on)
                self._sync_reading()
                return
            if position == len(data):
                return

    def _keep(self, call: Call, response: ResponseHead, pieces: list[Buffer]) -> None:
        """Keep data of an answer that is delivered in one piece."""
        body, budget = self._body, self._budget
        try:
            body.keep(pieces)
        except OSError:
            self._no_room()
            return
        if body.kept > self._pool.limits.max_body_bytes and call.streamed is None:
            self._too_large()
        elif not budget.take(body.held - self._held):
            self._no_room()
        else:
            self._held = body.held
            if body.complete:
                whole = self._join()
                self._done(call, response)
                call.receiver.answered(response.status, response.headers, whole)

    def _deliver(self, call: Call, receiver: StreamReceiver, response: ResponseHead, pieces: list[Buffer]) -> None:
        """Pass data of a streamed answer to the receiver."""
        if not self._streaming:
            self._streaming = True
            receiver.head(response.status, response.headers)
        if pieces and self._call is call:  # its receiver has not cancelled it
            receiver.data(bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces))
        if self._body.complete and self._call is call:
            self._done(call, response)
            receiver.end()

    def _join(self) -> bytes | memoryview:
        """Return the kept body. A large one stays counted in the budget for as long as a piece of it lives."""
        whole = self._body.join()
        self._let_go()
        if counts_itself(whole):
            count_while_alive(whole, self._budget)
        return whole

    def _let_go(self) -> None:
        """Release all data kept for this connection, and return their bytes to the budget."""
        self._budget.held -= self._held + self._waiting_bytes
        self._held = self._waiting_bytes = 0
        self._body.drop()

    def _switch(self, call: Call, response: ResponseHead, rest: bytes) -> None:
        """Hand the connection over to the receiver; it no longer carries HTTP."""
        if not call.upgrade or call.streamed is None:
            raise HttpError(502, "unasked-upgrade", "the upstream switched protocols without being asked")
        self._call = None
        self._patience = call.timeout
        self.deadline = NEVER
        call.finish()
        call.streamed.switched(response.headers, self, rest)

    def _done(self, call: Call, response: ResponseHead) -> None:
        """Make the connection free, or close it if it can't serve another call."""
        reusable = (
            self._pool.reuse
            and response.keep_alive
            and response.status < call.unread_from
            and not call.uploading
            and self.transport.get_write_buffer_size() == 0  # unsent data: the upstream has not read all of the request
        )
        call.finish()
        self._pool.answers += 1
        self._call = None
        self._reset()
        if reusable:
            self._used = True
            if self._flow_paused:
                self._flow_paused = False
                self._sync_reading()
            self._pool.release(self)
        else:
            self.close()

    def _no_room(self) -> None:
        self._budget.short = True
        limit = self._budget.limit
        text = (
            f"with the upstream's answer over {limit:.0f} bytes would be buffered; raise bodies.maxBuffered or replicas"
        )
        self._fail("buffers-full", text)

    def _too_large(self) -> None:
        limit = self._pool.limits.max_body_bytes
        self._fail("too-large", f"the upstream's answer is over {limit:.0f} bytes; raise bodies.maxAnswer")

    def _fail(self, kind: FailureKind, text: str) -> None:
        call = self._call
        self.close()
        if call is not None:
            call.fail(kind, text)

    def _lost(self, exc: Exception | None) -> None:
        call, response = self._call, self._response
        self._call = None
        self._pool.forget(self)
        if call is None:
            self._let_go()
            return
        whole = response is not None and response.length == UNTIL_CLOSE and exc is None
        body = self._join() if whole and not self._streaming else b""
        self._let_go()
        if whole and response is not None:
            call.finish()
            self._pool.answers += 1
            if self._streaming and call.streamed is not None:
                call.streamed.end()
            else:
                call.receiver.answered(response.status, response.headers, body)
        elif self._used and not call.answered_bytes and call.retry_stale:
            self._pool.retry(call)
        else:
            call.fail("reset", "the upstream closed the connection before its answer was complete")


class Tunnel(Upstream):
    """A connection that serves no calls, but carries all bytes of another connection."""

    def __init__(self, pool: Pool, patience: float) -> None:
        super().__init__(pool)
        self._patience = patience

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; data from the upstream wait until the tunnel is connected."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=self._pool.limits.write_buffer_bytes)
        self.transport.pause_reading()
        self._pool.adopt(self)
