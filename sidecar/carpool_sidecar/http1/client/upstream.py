"""One connection to an upstream: one call at a time, its answer passed to its receiver.

It has these parts, which know nothing of it: `UpstreamWire` (the transport, and whether it is read),
`ResponseHeadReader` (the heads of answers) and `IncomingAnswer` (the answer being read).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from carpool_sidecar.http1.client.answer import IncomingAnswer
from carpool_sidecar.http1.client.errors import UpstreamError
from carpool_sidecar.http1.client.heads import ResponseHeadReader
from carpool_sidecar.http1.client.wire import UpstreamWire
from carpool_sidecar.http1.parsing import UNTIL_CLOSE, HttpError
from carpool_sidecar.http1.timing import BULK, NEVER

if TYPE_CHECKING:
    from carpool_sidecar.http1.client.calls import Call
    from carpool_sidecar.http1.client.errors import FailureKind
    from carpool_sidecar.http1.client.pool import Pool
    from carpool_sidecar.http1.messages import Buffer
    from carpool_sidecar.http1.parsing import ResponseHead


class Upstream(asyncio.Protocol):
    """One connection of a pool.

    `deadline` is a time of the pool's clock; the pool calls `expire` when it has passed.
    """

    _wire: UpstreamWire

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._clock = pool.clock
        self._call: Call | None = None
        self._used = False  # an earlier call was answered here: the upstream may be about to close
        self._heads = ResponseHeadReader(pool.limits)
        self._answer = IncomingAnswer(pool.limits, pool.budget)
        self._patience = 0.0  # seconds for an upstream behind a tunnel that does not read
        self.deadline = NEVER

    @property
    def transport(self) -> asyncio.Transport:
        """The connection's transport."""
        return self._wire.transport

    @property
    def writable(self) -> bool:
        """Whether the upstream has read most of what was written."""
        return self._wire.writable

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._use(transport)
        self._pool.opened(self)

    def _use(self, transport: asyncio.BaseTransport) -> None:
        # Only stream sockets are served; uvloop's transports are no subclasses of asyncio's.
        stream = cast("asyncio.Transport", transport)
        self._wire = UpstreamWire(stream, self._pool.limits.write_buffer_bytes, self._pool.budget)

    def data_received(self, data: bytes) -> None:
        """Take what the upstream sent."""
        if (call := self._call) is None:
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
        self._wire.writable = False
        self.weigh()
        if (call := self._call) is not None:
            self.deadline = self._clock() + call.timeout
            call.pause_writing()

    def resume_writing(self) -> None:
        """Pass its end on."""
        self._wire.writable = True
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
        self._wire.write(pieces)

    def expire(self) -> None:
        """Act on the deadline, which has passed."""
        if (call := self._call) is None:
            self.close()
        else:
            self._fail("timeout", f"the upstream was silent for {call.timeout:g} s")

    def weigh(self) -> None:
        """Count bytes that the upstream has not read, unless the request is kept until it is answered anyway."""
        call = self._call
        self._wire.weigh(kept=call is not None and not call.streaming)

    def abandon(self, text: str) -> None:
        """Cut the connection, and report the failure to the receiver if there is a call."""
        self._fail("reset", text)

    def close(self) -> None:
        """Cut the connection without a report to the receiver."""
        self._call = None
        self._let_go()
        self._pool.forget(self)
        self._wire.transport.abort()

    # Called by the call

    def write(self, pieces: list[Buffer]) -> None:
        """Send the next piece of the request's body."""
        self._wire.write(pieces)

    def uploaded(self, call: Call) -> None:
        """Count the upstream's silence from now on: the request is complete."""
        self.deadline = self._clock() + call.timeout

    def pause_reading(self) -> None:
        """Stop reading; the upstream's silence does not count meanwhile."""
        self.deadline = NEVER
        self._wire.pause()

    def resume_reading(self, call: Call) -> None:
        """Go on."""
        if self._wire.paused:
            self._wire.resume()
            self._hear(call)

    # Called by a tunnel

    def stuck(self) -> None:
        """Set a deadline by which an upstream on the other side of a tunnel has to read."""
        self._wire.writable = False
        self.deadline = self._clock() + self._patience

    def moved(self) -> None:
        """Take note that the upstream has read."""
        self._wire.writable = True
        self.deadline = NEVER

    # The answer

    def _read(self, call: Call, data: bytes) -> None:
        try:
            head = self._answer.head
            if head is None:
                self._read_head(call, self._heads.joined(data))
            else:
                self._hear(call)
                self._read_body(call, head, data, 0)
        except HttpError as error:
            self._fail("protocol", str(error))
        except UpstreamError as failure:
            self._fail(failure.kind, str(failure))

    def _hear(self, call: Call) -> None:
        """Count the upstream's silence from now on; while the request is not complete, it may rightly be silent."""
        if not call.uploading and not self._wire.paused:
            self.deadline = self._clock() + call.timeout

    def _go_on(self) -> None:
        """Resume reading, first the data that arrived earlier."""
        data = self._wire.take_turn()
        call = self._call
        if call is not None and data:
            self._read(call, data)
        self._wire.sync_reading()

    def _read_head(self, call: Call, data: bytes) -> None:
        position = 0
        while True:
            head, position = self._heads.read(data, position, call.method)
            if head is None:
                return
            if head.status >= 200:
                self._accept(call, head, data, position)
                return
            if head.status == 101:
                self._switch(call, head, data[position:])
                return
            self._hear(call)
            if call.streamed is not None and head.status != 100:
                call.streamed.interim(head.status, head.headers)
                if self._call is not call:  # its receiver has cancelled it
                    return

    def _accept(self, call: Call, head: ResponseHead, data: bytes, position: int) -> None:
        """Take an answer whose head ended here."""
        answer, whole = self._answer, call.streamed is None
        answer.head = head
        if whole and answer.is_too_large(head.length):
            raise answer.too_large()
        if position + head.length == len(data) and head.length >= 0:
            # All of it is here, and nothing else.
            self._done(call, head)
            call.receiver.answered(head.status, head.headers, data[position:])
            return
        if whole and not answer.has_room(head.length):
            raise answer.no_room()
        answer.begin(head.length)
        self._hear(call)
        self._read_body(call, head, data, position)
        if self._call is call:
            self._wire.acknowledge()

    def _read_body(self, call: Call, head: ResponseHead, data: bytes, position: int) -> None:
        answer, end = self._answer, len(data)
        while True:
            position = answer.read(call, head, data, position)
            if self._call is not call:  # its receiver has cancelled it
                return
            if answer.body.complete:
                # The answer is good. Data behind it belong to no call, so the connection can't be used again.
                self._complete(call, head if position == end else head._replace(keep_alive=False))
                return
            if position == end and position < BULK:
                return
            # One read may hold 40,000 chunks; a large one has more behind it.
            if self._pool.turns.over():
                self._pool.turns.wait(self._go_on)
                self._wire.yield_turn(data[position:])
                return
            if position == end:
                return

    def _complete(self, call: Call, head: ResponseHead) -> None:
        """Deliver an answer whose body is complete, or its end."""
        answer = self._answer
        if answer.streaming and call.streamed is not None:
            self._done(call, head)
            call.streamed.end()
        else:
            whole = answer.join()
            self._wire.let_go()
            self._done(call, head)
            call.receiver.answered(head.status, head.headers, whole)

    def _let_go(self) -> None:
        """Release all data kept for this connection, and return their bytes to the budget."""
        self._answer.let_go()
        self._wire.let_go()

    def _switch(self, call: Call, head: ResponseHead, rest: bytes) -> None:
        """Hand the connection over to the receiver; it no longer carries HTTP."""
        if not call.upgrade or call.streamed is None:
            raise HttpError(502, "unasked-upgrade", "the upstream switched protocols without being asked")
        self._call = None
        self._patience = call.timeout
        self.deadline = NEVER
        call.finish()
        call.streamed.switched(head.headers, self, rest)

    def _done(self, call: Call, head: ResponseHead) -> None:
        """Make the connection free, or close it if it can't serve another call."""
        wire = self._wire
        reusable = (
            self._pool.reuse
            and head.keep_alive
            and head.status < call.unread_from
            and not call.uploading
            and wire.unsent == 0  # otherwise the upstream has not read all of the request
        )
        call.finish()
        self._pool.answers += 1
        self._call = None
        self._heads.reset()
        self._answer.reset()
        if reusable:
            self._used = True
            if wire.paused:
                wire.resume()
            self._pool.release(self)
        else:
            self.close()

    def _fail(self, kind: FailureKind, text: str) -> None:
        call = self._call
        self.close()
        if call is not None:
            call.fail(kind, text)

    def _lost(self, exc: Exception | None) -> None:
        call, answer, head = self._call, self._answer, self._answer.head
        self._call = None
        self._pool.forget(self)
        whole = head is not None and head.length == UNTIL_CLOSE and exc is None
        body = answer.join() if whole and not answer.streaming else b""
        self._let_go()
        if call is None:
            return
        if whole and head is not None:
            call.finish()
            self._pool.answers += 1
            if answer.streaming and call.streamed is not None:
                call.streamed.end()
            else:
                call.receiver.answered(head.status, head.headers, body)
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
        self._use(transport)
        self._wire.transport.pause_reading()
        self._pool.adopt(self)
