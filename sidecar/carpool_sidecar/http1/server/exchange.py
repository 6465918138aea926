"""The server's interface for applications: a request, and the methods to answer it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from carpool_sidecar.http1.messages import (
    CHUNKED,
    LAST_CHUNK,
    Added,
    Body,
    Buffer,
    Flow,
    Headers,
    chunk_of,
    content_length,
    encode_response_head,
    gather,
    has_body,
    message,
    size_of,
)

if TYPE_CHECKING:
    from carpool_sidecar.http1.client.upstream import Upstream
    from carpool_sidecar.http1.parsing import HttpError, RequestHead
    from carpool_sidecar.http1.server.connection import Connection

_CLOSE = (b"connection", b"close")
_KEEP_ALIVE = (b"connection", b"keep-alive")


class Application(Protocol):
    """Called by a server. Every exchange that reached `head` ends in exactly one of `sent` and `disconnected`."""

    def head(self, exchange: Exchange) -> None:
        """Take note of a request's head; its body has not been read.

        The application chooses here: `exchange.buffer(limit)`, `exchange.stream(sink)`, or an answer at once.
        Without a choice the body is buffered up to the server's limit.
        """

    def request(self, exchange: Exchange) -> None:
        """Take a request whose body was buffered and is complete; answer it now or later."""

    def sent(self, exchange: Exchange) -> None:
        """Take note that the answer's last byte went to the transport.

        The server itself may have answered (400, 408, 413, 503): see `exchange.status`.
        """

    def disconnected(self, exchange: Exchange) -> None:
        """Take note that the client is gone before its answer was complete; answering from now on does nothing.

        A client that closes while it waits is noticed within a tick; once its answer has begun, at the next write.
        """

    def refused(self, refusal: HttpError) -> None:
        """Take note that the server answered a request whose head it did not accept: it made no exchange."""


class Sink(Protocol):
    """Where a streamed request body goes. `end` or `aborted` is the last call, unless the exchange ended before."""

    def data(self, chunk: bytes) -> None:
        """Take the next piece."""

    def end(self) -> None:
        """Take note that the body is complete."""

    def aborted(self) -> None:
        """Take note that the rest will not come: the client left, was too slow, or broke the framing."""


class Overflow(Protocol):
    """Called when a body can't be buffered."""

    def __call__(self, exchange: Exchange, *, too_large: bool) -> bool:
        """Choose a sink, which gets the data collected so far, and return True; False: refuse the request.

        ``too_large``: the body is over its limit, and would be at any other time.
        """


class Exchange:
    """One request and its answer.

    `context` belongs to the application. `body` is complete when `Application.request` is called: bytes, or for a large
    one a read-only view, so that it is in memory once. `received_at` is then the clock's time of its last byte,
    `sent_at` the time when the answer's last byte was handed to the transport (seconds).
    """

    __slots__ = (
        "_connection",
        "_flow",
        "_head",
        "_held",
        "_owed",
        "_path",
        "_sink",
        "_started",
        "body",
        "buffered",
        "context",
        "ended",
        "headers",
        "keep_alive",
        "known",
        "limit",
        "method",
        "overflow",
        "received_at",
        "sent_at",
        "status",
        "target",
    )

    def __init__(self, connection: Connection, head: RequestHead, limit: int) -> None:
        self._connection = connection
        self._head = head
        self.method = head.method
        """The method, in capitals."""
        self.target = head.target
        """The request target in origin-form, as received."""
        self.headers = head.headers
        """The field lines as received."""
        self._sink: Sink | None = None
        self._flow: Flow | None = None
        self._path: tuple[bytes, bytes] | None = None
        # What was written while an earlier request of the connection was not answered yet; None: nothing is held.
        self._held: list[Buffer] | None = None
        self._started = False
        self._owed: int | None = None  # bytes still owed of an announced length; None: chunked, or ends with the close
        self.context: Any = None
        self.body: Buffer = b""
        self.buffered = 0  # bytes that are counted as held: of the body, and what the application charged
        self.limit = limit
        self.overflow: Overflow | None = None
        self.keep_alive = head.keep_alive
        self.known = True  # to the application
        self.ended = False  # no more can be written: answered, aborted or disconnected
        self.received_at = 0.0
        self.sent_at = 0.0
        self.status = 0

    # The request

    @property
    def version(self) -> tuple[int, int]:
        """The HTTP version: (1, 1) or (1, 0)."""
        return (1, self._head.minor_version)

    @property
    def peer(self) -> str | None:
        """The client's address, without its port; None where it has none, as on a Unix socket."""
        return self._connection.peer

    @property
    def path(self) -> bytes:
        """The target up to the question mark, not decoded."""
        return self._split()[0]

    @property
    def query(self) -> bytes:
        """The target behind the question mark, not decoded; empty where there is none."""
        return self._split()[1]

    @property
    def length(self) -> int:
        """The length of the request's body in bytes, or `parsing.IN_CHUNKS`."""
        return self._head.length

    @property
    def upgrade(self) -> bytes:
        """The protocols that the client offers to switch to; empty where it offers none."""
        return self._head.upgrade

    @property
    def streamed_to(self) -> Sink | None:
        """Where the body goes piece by piece; None: it is buffered."""
        return self._sink

    def _split(self) -> tuple[bytes, bytes]:
        if self._path is None:
            path, _, query = self._head.target.partition(b"?")
            self._path = (path, query)
        return self._path

    # Choices, inside `Application.head`

    def buffer(self, limit: int, overflow: Overflow | None = None) -> None:
        """Collect the body, of at most `limit` bytes; a larger one is answered with 413 by the server.

        If the server's memory for bodies is used up, the answer is 503. Before either answer `overflow` is called.
        """
        self.limit = limit
        self.overflow = overflow

    def stream(self, sink: Sink) -> None:
        """Hand the body to `sink` piece by piece; `Application.request` is not called."""
        self._sink = sink

    def charge(self, extra: int) -> bool:
        """Count `extra` more bytes as held for this exchange, until it is answered or `refund` gives them back.

        Return False, and count nothing, if there is no room for them, or if the exchange is over.
        """
        return not self.ended and self._connection.charge(self, extra)

    def refund(self, count: int) -> None:
        """Return `count` charged bytes to the budget."""
        if not self.ended:
            self._connection.refund(self, count)

    def await_switch(self) -> bool:
        """Read nothing after this request until it is answered, since the answer may change the protocol.

        Return False if a switch is not possible because earlier requests have to be answered first.
        """
        return self._connection.await_switch(self)

    def pause_reading(self) -> None:
        """Stop reading a streamed body; pieces already read (at most one read of the socket) still come."""
        self._connection.pause_body(self)

    def resume_reading(self) -> None:
        """Go on."""
        self._connection.resume_body(self)

    # The answer

    @property
    def started(self) -> bool:
        """Whether an answer was begun."""
        return self._started

    @property
    def writable(self) -> bool:
        """Whether written data are sent at once, without queueing."""
        return not self.ended and self._held is None and self._connection.writable

    def respond(self, status: int, headers: Headers, body: Body = b"") -> None:
        """Send a whole answer.

        Content-Length and Connection are added; `headers` must not carry framing (see `messages.forwardable`). Large
        parts go to the transport uncopied and must not be changed afterwards. Does nothing if the client is gone.
        Raises ValueError where a header carries a line break or NUL.
        """
        if self.ended:
            return
        head = self._begin(status, headers, size_of(body), final=True)
        self._write(message(head, body) if has_body(self.method, status) else [head])
        self._finish()

    def fail(self, status: int, reason: str, error: str, headers: Headers | None = None) -> None:
        """Send an error as JSON: `{"error": text for people, "reason": word for machines}`."""
        body = msgspec.json.encode({"error": error, "reason": reason})
        self.respond(status, [*(headers or []), (b"content-type", b"application/json")], body)

    def interim(self, status: int, headers: Headers) -> None:
        """Send an interim response (1xx) before the answer; clients of HTTP/1.0 do not know them."""
        if not self.ended and not self._started and self._head.minor_version:
            self._write([encode_response_head(status, headers)])

    def switch(self, headers: Headers, upstream: Upstream, rest: bytes) -> None:
        """Answer 101, after `await_switch`, and pass all further bytes between the client and this connection.

        `headers` name the protocol; `rest` is what the upstream sent behind its head.
        """
        if self.ended:
            upstream.close()
            return
        self._started = True
        self.status = 101
        self._connection.switch(self, encode_response_head(101, headers), upstream, rest)

    def splice(self, upstream: Upstream) -> None:
        """Pass all bytes between the client and this connection, after `await_switch`; nothing is added."""
        if self.ended:
            upstream.close()
            return
        self._started = True
        self.status = 101
        self._connection.switch(self, b"", upstream, b"")

    def start(self, status: int, headers: Headers, length: int | None, flow: Flow | None = None) -> None:
        """Begin an answer that comes in pieces: `write` them, then `end`.

        `length` is the body's length in bytes. With None the chunked coding is used, or, for HTTP/1.0, the close of
        the connection marks the end. For HEAD it is the length for GET. `flow` receives backpressure, maybe at once.
        """
        if self.ended:
            return
        self._flow = flow
        if length is None and not self._head.minor_version:
            self.keep_alive = False
        head = self._begin(status, headers, length, final=self._sink is None)
        self._owed = length
        self._write([head])
        if flow is not None and not self.writable:
            flow.pause_writing()

    def write(self, chunk: Buffer) -> None:
        """Send the next piece of the body. Raises ValueError beyond the announced length."""
        if self.ended or not has_body(self.method, self.status):
            return
        if self._owed is not None:
            self._owed -= len(chunk)
            if self._owed < 0:
                raise ValueError("more was written than the answer's announced length")
            self._write([chunk])
        elif self._head.minor_version:
            self._write(gather(chunk_of(chunk)))
        else:
            self._write([chunk])

    def end(self) -> None:
        """Complete the answer. If less than its announced length was written, the connection is cut instead."""
        if self.ended:
            return
        if has_body(self.method, self.status):
            if self._owed:
                self.abort()
                return
            if self._owed is None and self._head.minor_version:
                self._write([LAST_CHUNK])
        self._finish()

    def abort(self) -> None:
        """Cut the connection, so that no client takes what it has for the whole; earlier answers are sent first."""
        if not self.ended:
            self._connection.abort_answer(self)

    def _begin(self, status: int, headers: Headers, length: int | None, *, final: bool) -> bytes:
        if self._started:
            raise RuntimeError("an answer was begun already")
        added: Added = ()
        if length is not None:
            if status != 204 and (length or status != 304):  # a 304 would state the length of a body it does not send
                added = (content_length(length),)
        elif self._head.minor_version and has_body(self.method, status):
            added = (CHUNKED,)
        if not self._connection.keeps_open(self, final=final):
            self.keep_alive = False
            added += (_CLOSE,)
        elif not self._head.minor_version:
            added += (_KEEP_ALIVE,)
        head = encode_response_head(status, headers, added)
        self._started = True
        self.status = status
        return head

    def _write(self, pieces: list[Buffer]) -> None:
        if self._held is None:
            self._connection.write(pieces)
        else:
            self._held += pieces

    def _finish(self) -> None:
        self.ended = True
        if self._held is None:
            self._connection.answered(self)

    # For the connection

    @property
    def held_bytes(self) -> int:
        """Bytes that were written before it was this exchange's turn to be answered."""
        return sum(map(len, self._held)) if self._held else 0

    def hold(self) -> None:
        """Keep written data: an earlier request of the connection is not answered yet."""
        self._held = []

    def release(self) -> None:
        """Write the kept data; later data are written at once."""
        held, self._held = self._held, None
        if held:
            self._connection.write(held)

    def drop(self) -> None:
        """Forget the kept data: the client has left."""
        if self._held:
            self._held.clear()

    def pause_writing(self) -> None:
        """Pass backpressure on."""
        if self._flow is not None:
            self._flow.pause_writing()

    def resume_writing(self) -> None:
        """Pass its end on."""
        if self._flow is not None:
            self._flow.resume_writing()
