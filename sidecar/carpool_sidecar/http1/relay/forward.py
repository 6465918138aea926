"""Forwards an exchange to an upstream, in both directions at once, without waiting for complete bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_sidecar.http1.client.calls import Call, Upload
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
from carpool_sidecar.http1.relay.intermediary import (
    COUNTED,
    final_answer,
    hops_left,
    offer,
    one_hop_less,
    upgrade_fields,
)

if TYPE_CHECKING:
    from carpool_sidecar.http1.client.errors import UpstreamError
    from carpool_sidecar.http1.client.pool import Pool
    from carpool_sidecar.http1.client.upstream import Upstream
    from carpool_sidecar.http1.server.exchange import Exchange

# Bodies up to here are read whole first: one write upstream instead of two, and a stale connection may be retried.
_SMALL = 64 * 1024
UPGRADE_REQUIRED = 426
_IDEMPOTENT = frozenset({b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"PUT", b"DELETE"})  # RFC 9110, 9.2.2
_RETRY_AFTER = [(b"retry-after", b"1")]


class Forwarding:
    """One forwarded exchange; it receives the upstream's answer and passes it to the client.

    - Host and all end-to-end fields are passed on unchanged; hop-by-hop fields are dropped. Nothing is added.
    - Interim responses and offers to switch protocols are passed on. If the upstream switches, all bytes pass from then
      on, in both directions.
    - If the upstream fails before its answer began, the client gets a JSON error (502, 503, 504). If it fails later,
      the client's connection is cut, so that a part is not taken for the whole.

    `short`: the answer is small, so it is buffered, and a client that reads slowly occupies no connection.
    """

    __slots__ = ("_call", "_exchange", "_pool", "_short", "_switching", "_timeout")

    def __init__(self, exchange: Exchange, pool: Pool, timeout: float = 60.0, *, short: bool = False) -> None:
        self._exchange = exchange
        self._pool = pool
        self._timeout = timeout
        self._short = short
        self._switching = False
        self._call: Call | None = None

    # Called by the application

    def begin(self, *, whole: bool = True) -> None:
        """Choose how the request is read (in `Application.head`): a small one is buffered, a larger one streamed.

        If not `whole`, or without memory for it, a small one is streamed, too.
        """
        exchange = self._exchange
        if exchange.method in COUNTED and hops_left(exchange.headers) == 0:
            exchange.respond(200, *final_answer(exchange.method, exchange.target, exchange.headers))
            return
        self._switching = bool(exchange.upgrade) and exchange.await_switch()
        if whole and 0 <= exchange.length <= _SMALL:
            exchange.buffer(_SMALL, self._stream)
        else:
            self._stream(exchange)

    def _stream(self, exchange: Exchange, *, too_large: bool = False) -> bool:  # noqa: ARG002 - an overflow's signature
        exchange.stream(_Uplink(self, exchange))
        return True

    def upload(self, uplink: Upload) -> Call:
        """Pass on a streamed request."""
        framing = CHUNKED if uplink.length is None else content_length(uplink.length)
        return self._send(uplink, framing, retry_stale=False)

    def request(self) -> None:
        """Pass on a request that was read whole (in `Application.request`)."""
        exchange = self._exchange
        announced = exchange.length or find(exchange.headers, b"content-length") is not None
        framing = content_length(len(exchange.body)) if announced else None
        self._send(exchange.body, framing, retry_stale=exchange.method in _IDEMPOTENT)

    def cancel(self) -> None:
        """Cancel the call (in `Application.disconnected`)."""
        if self._call is not None:
            self._call.cancel()

    def _send(self, body: Body | Upload, framing: tuple[bytes, bytes] | None, *, retry_stale: bool) -> Call:
        exchange = self._exchange
        headers = forwardable(exchange.headers)
        if exchange.method in COUNTED and (left := hops_left(headers)):
            headers = one_hop_less(headers, left)
        added: Added = () if framing is None else (framing,)
        if self._switching:
            headers = [*headers, *offer(exchange.upgrade)]
        if exchange.version == (1, 0) and find(headers, b"host") is None:
            added = ((b"host", self._pool.authority), *added)
        head = encode_request_head(exchange.method, exchange.target, headers, added)
        if self._short:
            call = self._pool.send(head, body, self, timeout=self._timeout, retry_stale=retry_stale)
        else:
            call = self._pool.stream(
                head, body, self, timeout=self._timeout, retry_stale=retry_stale, upgrade=self._switching
            )
        self._call = call
        return call

    # Called with the upstream's answer

    def interim(self, status: int, headers: Headers) -> None:
        """Pass on an interim response."""
        self._exchange.interim(status, forwardable(headers))

    def switched(self, headers: Headers, link: Upstream, rest: bytes) -> None:
        """Pass on the switch to another protocol, and from then on all bytes."""
        self._exchange.switch(_with_offer(headers), link, rest)

    def answered(self, status: int, headers: Headers, body: bytes | memoryview) -> None:
        """Pass on a whole answer."""
        if has_body(self._exchange.method, status):
            passed = forwardable(headers) if status != UPGRADE_REQUIRED else _with_offer(headers)
            self._exchange.respond(status, passed, body)
        else:
            # In answers to HEAD and in a 304, an upstream states the length of a body that it does not send.
            self.head(status, headers)
            self._exchange.end()

    def head(self, status: int, headers: Headers) -> None:
        """Pass on the beginning of an answer."""
        announced = find(headers, b"content-length")
        length = None if announced is None else int(announced)
        passed = forwardable(headers) if status != UPGRADE_REQUIRED else _with_offer(headers)
        self._exchange.start(status, passed, length, self)

    def data(self, chunk: bytes) -> None:
        """Pass on a piece of the answer's body."""
        self._exchange.write(chunk)

    def end(self) -> None:
        """Pass on the end of the answer."""
        self._exchange.end()

    def failed(self, error: UpstreamError) -> None:
        """Answer with an error; or cut the connection if an incomplete answer was already sent."""
        exchange = self._exchange
        if exchange.started:
            exchange.abort()
        else:
            headers = _RETRY_AFTER if error.kind in {"busy", "buffers-full"} else None
            exchange.fail(error.status, error.reason, str(error), headers)

    # Called when the client reads too slowly

    def pause_writing(self) -> None:
        """Stop reading from the upstream."""
        if self._call is not None:
            self._call.pause_reading()

    def resume_writing(self) -> None:
        """Resume reading from the upstream."""
        if self._call is not None:
            self._call.resume_reading()


class _Uplink:
    """Passes on the body of a request as it arrives, at the upstream's pace.

    A connection is taken once there is enough to send. For a body of known length, that is so much that sending it is
    not the slow part. For any other, it is the first byte, because the client may wait for an answer to it.
    """

    __slots__ = ("_call", "_charged", "_exchange", "_first", "_forwarding", "_size")

    def __init__(self, forwarding: Forwarding, exchange: Exchange) -> None:
        self._forwarding = forwarding
        self._exchange = exchange
        self._call: Call | None = None
        self._first: list[bytes] = []  # pieces that arrived before there was a call
        self._size = 0
        self._charged = 0

    def data(self, chunk: bytes) -> None:
        if self._call is not None:
            self._call.write(chunk)
            return
        exchange = self._exchange
        self._first.append(chunk)
        self._size += len(chunk)
        if exchange.length == IN_CHUNKS or self._size >= _SMALL or not exchange.charge(len(chunk)):
            self._begin()
        else:
            self._charged += len(chunk)

    def end(self) -> None:
        (self._call or self._begin()).end()

    def aborted(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _begin(self) -> Call:
        exchange, length = self._exchange, self._exchange.length
        call = self._call = self._forwarding.upload(Upload(None if length == IN_CHUNKS else length, self))
        for chunk in self._first:
            call.write(chunk)
        self._first.clear()
        exchange.refund(self._charged)
        if not call.writable:
            exchange.pause_reading()
        return call

    def pause_writing(self) -> None:
        self._exchange.pause_reading()

    def resume_writing(self) -> None:
        self._exchange.resume_reading()


def _with_offer(headers: Headers) -> Headers:
    return [*forwardable(headers), *upgrade_fields(headers)]
