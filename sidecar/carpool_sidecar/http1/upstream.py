"""The client's side of one connection: one call at a time, its answer told to its receiver."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import httptools

from carpool_sidecar.http1.bodies import BodyReader
from carpool_sidecar.http1.parsing import (
    LONGEST_KEPT,
    UNTIL_CLOSE,
    HeadCheck,
    HttpError,
    ResponseHead,
    parse_response_head,
)
from carpool_sidecar.http1.timing import NEVER

if TYPE_CHECKING:
    from carpool_sidecar.http1.calls import Call, FailureKind
    from carpool_sidecar.http1.client import Pool
    from carpool_sidecar.http1.messages import Buffer


class Upstream(asyncio.Protocol):
    """One connection of a pool.

    `deadline` is a time of the pool's clock; the pool calls `expire` when it has passed.
    """

    _transport: asyncio.Transport

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._clock = pool.clock
        self._call: Call | None = None
        self._used = False  # an earlier call was answered here: the upstream may be about to close
        self._body = BodyReader(0)  # of the answer being read
        # Upstreams answer with the same head again and again, to whomever: the last one, as it came and as it was read.
        self._last = b""
        self._last_response: ResponseHead | None = None
        self.deadline = NEVER
        self.writable = True
        self._reset()

    def _reset(self) -> None:
        """Forget the answer read last."""
        self._buffer = b""
        self._check: HeadCheck | None = None
        self._response: ResponseHead | None = None
        self._told = False  # the receiver knows the head: the answer comes in pieces

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        # Only stream sockets are served; uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._pool.limits.write_buffer_bytes)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        """Take what the upstream sent."""
        call = self._call
        if call is None:
            self.close()  # nobody asked: whatever this is, it would be read as the next call's answer
            return
        call.answered_bytes = True
        if not call.uploading:
            self.deadline = self._clock() + call.timeout
        try:
            if self._response is None:
                self._read_head(call, self._buffer + data if self._buffer else data)
            else:
                self._read_body(call, self._response, data, 0)
        except HttpError as error:
            self._fail("protocol", str(error))

    def eof_received(self) -> None:
        """Take the end of what the upstream sends; the transport closes."""
        self._lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Take the end of the connection."""
        self._lost(exc)

    def pause_writing(self) -> None:
        """Pass backpressure on; from now on the upstream's silence counts, since it does not read."""
        self.writable = False
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
        """Send a call, or as much of it as there is."""
        self._call = call
        # While the request is not complete, the upstream may rightly be silent.
        self.deadline = NEVER if call.uploading else self._clock() + call.timeout
        for piece in pieces:
            self._transport.write(piece)

    def expire(self) -> None:
        """Act on the deadline, which has passed."""
        if (call := self._call) is None:
            self.close()
        else:
            self._fail("timeout", f"the upstream was silent for {call.timeout:g} s")

    def abandon(self, text: str) -> None:
        """Cut, and tell the receiver if there is a call."""
        self._fail("reset", text)

    def close(self) -> None:
        """Cut, and tell nobody."""
        self._call = None
        self._pool.forget(self)
        self._transport.abort()

    # Called by the call

    def write(self, pieces: list[Buffer]) -> None:
        """Send the next piece of the request's body."""
        for piece in pieces:
            self._transport.write(piece)

    def uploaded(self, call: Call) -> None:
        """Count the upstream's silence from now on: the request is complete."""
        self.deadline = self._clock() + call.timeout

    def pause_reading(self) -> None:
        """Stop reading; the upstream's silence does not count meanwhile."""
        if not self._transport.is_closing() and self._transport.is_reading():
            self._transport.pause_reading()
            self.deadline = NEVER

    def resume_reading(self, call: Call) -> None:
        """Go on."""
        if not self._transport.is_closing() and not self._transport.is_reading():
            self._transport.resume_reading()
            if not call.uploading:
                self.deadline = self._clock() + call.timeout

    # The answer

    def _read_head(self, call: Call, data: bytes) -> None:
        # Whether there is a body depends on the method, which for those kept was another than HEAD.
        if (last := self._last_response) is not None and data.startswith(self._last) and not call.method:
            self._accept(call, last, data, len(self._last))
            return
        limit = self._pool.limits.max_head_bytes
        position = 0
        while True:
            stop = data.find(b"\r\n\r\n", position) + 4
            size = (stop if stop > 3 else len(data)) - position
            if size > limit:
                raise HttpError(502, "head-too-large", f"the answer's head is over {limit} bytes; raise max_head_bytes")
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
                raise HttpError(502, "unasked-upgrade", "the upstream switched protocols without being asked")
            if response.status >= 200:
                break
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
        else:
            self._body = BodyReader(response.length)
            self._read_body(call, response, data, position)

    def _read_body(self, call: Call, response: ResponseHead, data: bytes, position: int) -> None:
        body, receiver = self._body, call.streamed
        pieces: list[Buffer] = []
        stop = body.read(data, position, pieces)
        if body.complete and stop < len(data):
            surplus = len(data) - stop
            raise HttpError(502, "surplus-bytes", f"the upstream sent {surplus} bytes more than one answer")
        if receiver is None or (body.complete and not self._told):
            if body.keep(pieces) > self._pool.limits.max_body_bytes and receiver is None:
                self._too_large()
            elif body.complete:
                self._done(call, response)
                call.receiver.answered(response.status, response.headers, body.join())
            return
        if not self._told:
            self._told = True
            receiver.head(response.status, response.headers)
        for piece in pieces:
            if self._call is not call:  # cancelled by what it was told
                return
            receiver.data(bytes(piece))
        if body.complete and self._call is call:
            self._done(call, response)
            receiver.end()

    def _done(self, call: Call, response: ResponseHead) -> None:
        """Make the connection free, or close it where it can't serve another call."""
        reusable = response.keep_alive and not call.uploading and self.writable
        call.finish()
        self._call = None
        self._reset()
        if reusable:
            self._used = True
            if not self._transport.is_reading():
                self._transport.resume_reading()
            self._pool.release(self)
        else:
            self.close()

    def _too_large(self) -> None:
        limit = self._pool.limits.max_body_bytes
        self._fail("too-large", f"the upstream's answer is over {limit} bytes; raise bodies.maxAnswer")

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
            return
        if response is not None and response.length == UNTIL_CLOSE and exc is None:
            call.finish()
            if self._told and call.streamed is not None:
                call.streamed.end()
            else:
                call.receiver.answered(response.status, response.headers, self._body.join())
        elif self._used and not call.answered_bytes and call.retry_stale:
            self._pool.retry(call)
        else:
            call.fail("reset", "the upstream closed the connection before its answer was complete")
