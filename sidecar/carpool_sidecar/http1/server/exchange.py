"""An exchange: a request, and the methods with which an application reads and answers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from carpool_sidecar.http1.messages import (
    Body,
    Buffer,
    Flow,
    Headers,
    encode_response_head,
    has_body,
    message,
    size_of,
)
from carpool_sidecar.http1.server.framing import BodyWriter, framing_fields

if TYPE_CHECKING:
    from carpool_sidecar.http1.client.upstream import Upstream
    from carpool_sidecar.http1.fields import FieldLines
    from carpool_sidecar.http1.parsing import RequestHead
    from carpool_sidecar.http1.server.application import Overflow, Sink
    from carpool_sidecar.http1.server.connection import Connection

_CLOSE = (b"connection", b"close")
_KEEP_ALIVE = (b"connection", b"keep-alive")


class Exchange:
    """One request and its answer.

    `context` belongs to the application. `body` is complete when `Application.request` is called: bytes, or for a large
    one a read-only view, so that it is in memory once. `received_at` is then the clock's time of its last byte,
    `sent_at` the time when the answer's last byte was handed to the transport (seconds).
    """

    __slots__ = (
        "_body_writer", "_connection", "_flow", "_head", "_sink", "body", "buffered", "context", "ended",
        "keep_alive", "known", "limit", "overflow", "received_at", "sent_at", "started", "status",
    )  # fmt: skip

    def __init__(self, connection: Connection, head: RequestHead, limit: int) -> None:
        self._connection = connection
        self._head = head
        self._sink: Sink | None = None
        self._flow: Flow | None = None
        self.started = False  # an answer was begun
        self._body_writer: BodyWriter | None = None  # of an answer that comes in pieces
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
    def method(self) -> bytes:
        """The method, in capitals."""
        return self._head.method

    @property
    def target(self) -> bytes:
        """The request target in origin-form, as received."""
        return self._head.target

    @property
    def path(self) -> bytes:
        """The target up to the question mark, not decoded."""
        return self._head.path

    @property
    def query(self) -> bytes:
        """The target behind the question mark, not decoded; empty where there is none."""
        return self._head.query

    @property
    def headers(self) -> FieldLines:
        """The field lines as received."""
        return self._head.headers

    @property
    def version(self) -> tuple[int, int]:
        """The HTTP version: (1, 1) or (1, 0)."""
        return (1, self._head.minor_version)

    @property
    def peer(self) -> str | None:
        """The client's address, without its port; None where it has none, as on a Unix socket."""
        return self._connection.peer

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

    def pause_reading(self) -> None:
        """Stop reading a streamed body; pieces already read (at most one read of the socket) still come."""
        self._connection.pause_body(self)

    def resume_reading(self) -> None:
        """Go on."""
        self._connection.resume_body(self)

    # The answer

    @property
    def writable(self) -> bool:
        """Whether written data are sent at once, without queueing."""
        return not self.ended and self._connection.sends_at_once(self)

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
        if not self.ended and not self.started and self._head.minor_version:
            self._write([encode_response_head(status, headers)])

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
        self._body_writer = BodyWriter(self._head, length)
        self._write([head])
        if flow is not None and not self.writable:
            flow.pause_writing()

    def write(self, chunk: Buffer) -> None:
        """Send the next piece of the body. Raises ValueError beyond the announced length."""
        writer = self._body_writer
        if writer is not None and not self.ended and has_body(self.method, self.status):
            self._write(writer.piece(chunk))

    def end(self) -> None:
        """Complete the answer. If less than its announced length was written, the connection is cut instead."""
        if self.ended:
            return
        writer = self._body_writer
        if writer is not None and has_body(self.method, self.status):
            if not writer.is_complete:
                self.abort()
                return
            self._write(writer.last())
        self._finish()

    def abort(self) -> None:
        """Cut the connection, so that no client takes what it has for the whole; earlier answers are sent first."""
        if not self.ended:
            self._connection.abort_answer(self)

    def _begin(self, status: int, headers: Headers, length: int | None, *, final: bool) -> bytes:
        if self.started:
            raise RuntimeError("an answer was begun already")
        added = framing_fields(self._head, status, length)
        if not self._connection.keeps_open(self, final=final):
            self.keep_alive = False
            added += (_CLOSE,)
        elif not self._head.minor_version:
            added += (_KEEP_ALIVE,)
        head = encode_response_head(status, headers, added)
        self.started = True
        self.status = status
        return head

    def _write(self, pieces: list[Buffer]) -> None:
        self._connection.send(self, pieces)

    def _finish(self) -> None:
        self.ended = True
        self._connection.answered(self)

    # Another protocol

    def await_switch(self) -> bool:
        """Read nothing after this request until it is answered, since the answer may change the protocol.

        Return False if a switch is not possible because earlier requests have to be answered first.
        """
        return self._connection.await_switch(self)

    def switch(self, headers: Headers, upstream: Upstream, rest: bytes) -> None:
        """Answer 101, after `await_switch`, and pass all further bytes between the client and this connection.

        `headers` name the protocol; `rest` is what the upstream sent behind its head.
        """
        self._hand_over(headers, upstream, rest)

    def splice(self, upstream: Upstream) -> None:
        """Pass all bytes between the client and this connection, after `await_switch`; nothing is added."""
        self._hand_over(None, upstream, b"")

    def _hand_over(self, headers: Headers | None, upstream: Upstream, rest: bytes) -> None:
        if self.ended:
            upstream.close()
            return
        self.started = True
        self.status = 101
        head = b"" if headers is None else encode_response_head(101, headers)
        self._connection.switch(self, head, upstream, rest)

    # For the connection

    def pause_writing(self) -> None:
        """Pass backpressure on."""
        if self._flow is not None:
            self._flow.pause_writing()

    def resume_writing(self) -> None:
        """Pass its end on."""
        if self._flow is not None:
            self._flow.resume_writing()
