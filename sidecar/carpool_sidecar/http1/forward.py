"""Passing an exchange on to an upstream, both ways at once, as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_sidecar.http1.calls import Call, Upload, UpstreamError
from carpool_sidecar.http1.messages import (
    CHUNKED,
    Added,
    Body,
    Headers,
    content_length,
    encode_request_head,
    find,
    forwardable,
    has_body,
)
from carpool_sidecar.http1.parsing import IN_CHUNKS

if TYPE_CHECKING:
    from carpool_sidecar.http1.client import Pool
    from carpool_sidecar.http1.exchange import Exchange
    from carpool_sidecar.http1.parsing import HttpError

# Bodies up to here are read whole first: one write upstream instead of two, and a stale connection may be retried.
_SMALL = 64 * 1024
_IDEMPOTENT = frozenset({b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"PUT", b"DELETE"})  # RFC 9110, 9.2.2
_FAILURES = {"refused": 503, "timeout": 504}  # all else is 502


class Forwarding:
    """One exchange on its way through; it receives the upstream's answer and hands it to the client.

    Host and all end-to-end fields go on as sent; those of one hop are dropped. Nothing is added. An upstream that
    fails before its answer began is answered for with a JSON error (502, 503, 504); one that fails later costs the
    client its connection, so that no part is taken for the whole.
    """

    __slots__ = ("_call", "_exchange", "_pool", "_timeout")

    def __init__(self, exchange: Exchange, pool: Pool, timeout: float = 60.0) -> None:
        self._exchange = exchange
        self._pool = pool
        self._timeout = timeout
        self._call: Call | None = None

    # Called by the application

    def begin(self) -> None:
        """Choose how the request is read (in `Application.head`): a small one whole, a larger one as it comes."""
        exchange = self._exchange
        if 0 <= exchange.length <= _SMALL:
            exchange.buffer(_SMALL)
            return
        length = None if exchange.length == IN_CHUNKS else exchange.length
        uplink = _Uplink(exchange)
        exchange.stream(uplink)
        uplink.call = self._send(
            Upload(length, uplink), CHUNKED if length is None else content_length(length), retry_stale=False
        )
        if not uplink.call.writable:
            exchange.pause_reading()

    def request(self) -> None:
        """Pass on a request that was read whole (in `Application.request`)."""
        exchange = self._exchange
        announced = exchange.length or find(exchange.headers, b"content-length") is not None
        framing = content_length(len(exchange.body)) if announced else None
        self._send(exchange.body, framing, retry_stale=exchange.method in _IDEMPOTENT)

    def cancel(self) -> None:
        """Give up (in `Application.disconnected`)."""
        if self._call is not None:
            self._call.cancel()

    def _send(self, body: Body | Upload, framing: tuple[bytes, bytes] | None, *, retry_stale: bool) -> Call:
        exchange = self._exchange
        headers = forwardable(exchange.headers)
        added: Added = () if framing is None else (framing,)
        if exchange.version == (1, 0) and find(headers, b"host") is None:
            added = ((b"host", self._pool.authority), *added)
        head = encode_request_head(exchange.method, exchange.target, headers, added)
        self._call = self._pool.stream(head, body, self, timeout=self._timeout, retry_stale=retry_stale)
        return self._call

    # Called with the upstream's answer

    def answered(self, status: int, headers: Headers, body: bytes) -> None:
        """Pass on a whole answer."""
        if has_body(self._exchange.method, status):
            self._exchange.respond(status, forwardable(headers), body)
        else:
            # To HEAD and with 304 an upstream tells the length of a body that it does not send.
            self.head(status, headers)
            self._exchange.end()

    def head(self, status: int, headers: Headers) -> None:
        """Pass on the beginning of an answer."""
        announced = find(headers, b"content-length")
        length = None if announced is None else int(announced)
        self._exchange.start(status, forwardable(headers), length, self)

    def data(self, chunk: bytes) -> None:
        """Pass on a piece of the answer's body."""
        self._exchange.write(chunk)

    def end(self) -> None:
        """Pass on the end of the answer."""
        self._exchange.end()

    def failed(self, error: UpstreamError) -> None:
        """Answer for the upstream, or cut what it has left incomplete."""
        exchange = self._exchange
        if exchange.started:
            exchange.abort()
        else:
            exchange.fail(_FAILURES.get(error.kind, 502), f"upstream-{error.kind}", str(error))

    # Called when the client reads too slowly

    def pause_writing(self) -> None:
        """Let the upstream wait."""
        if self._call is not None:
            self._call.pause_reading()

    def resume_writing(self) -> None:
        """Let it go on."""
        if self._call is not None:
            self._call.resume_reading()


class _Uplink:
    """Hands the body of a request on as it comes, at the upstream's pace."""

    __slots__ = ("_exchange", "call")

    call: Call

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def data(self, chunk: bytes) -> None:
        self.call.write(chunk)

    def end(self) -> None:
        self.call.end()

    def aborted(self) -> None:
        self.call.cancel()

    def pause_writing(self) -> None:
        self._exchange.pause_reading()

    def resume_writing(self) -> None:
        self._exchange.resume_reading()


class ForwardAll:
    """The application that forwards every request."""

    def __init__(self, pool: Pool, timeout: float = 60.0) -> None:
        self._pool = pool
        self._timeout = timeout

    def head(self, exchange: Exchange) -> None:
        """Begin to forward."""
        exchange.context = Forwarding(exchange, self._pool, self._timeout)
        exchange.context.begin()

    def request(self, exchange: Exchange) -> None:
        """Forward a request that was read whole."""
        exchange.context.request()

    def sent(self, exchange: Exchange) -> None:
        """Nothing is left to do."""

    def disconnected(self, exchange: Exchange) -> None:
        """Cancel the call."""
        exchange.context.cancel()

    def refused(self, error: HttpError) -> None:
        """Nothing was begun."""
