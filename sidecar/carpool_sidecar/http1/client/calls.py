"""Calls to an upstream, and the interfaces that receive their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from carpool_sidecar.http1.client.errors import FailureKind, UpstreamError
from carpool_sidecar.http1.messages import LAST_CHUNK, Body, Buffer, Flow, Headers, chunk_of, gather, message
from carpool_sidecar.http1.timing import NEVER

if TYPE_CHECKING:
    from carpool_sidecar.http1.client.pool import Pool
    from carpool_sidecar.http1.client.upstream import Upstream

# A server that answers without reading a request's body takes the body for the next request on the connection, and the
# next caller gets the answer to it. Servers read the bodies of these methods, unless they redirect or refuse.
_BODY_READ: Final = (b"POST ", b"PUT ", b"PATCH ")
_REDIRECT: Final = 300
_NO_STATUS: Final = 1000


class Receiver(Protocol):
    """Receives a call's outcome: exactly one of the two methods is called, once, and none after `Call.cancel`."""

    def answered(self, status: int, headers: Headers, body: bytes | memoryview) -> None:
        """Take the whole answer; a large body is a read-only view, so that it is in memory once."""

    def failed(self, error: UpstreamError) -> None:
        """Take the failure."""


class StreamReceiver(Receiver, Protocol):
    """Receives an answer piece by piece.

    Either `answered` is called, for an answer that arrived in one piece, or `head`, any number of `data`, then `end`.
    `failed` may be called instead of the first or after any but the last of these. `interim` may be called any number
    of times before. A call that offers an upgrade may instead end in `switched`.
    """

    def interim(self, status: int, headers: Headers) -> None:
        """Take an interim response (1xx) other than 100 and 101."""

    def switched(self, headers: Headers, link: Upstream, rest: bytes) -> None:
        """Take over the connection, which no longer carries HTTP. `rest`: bytes received after the head."""

    def head(self, status: int, headers: Headers) -> None:
        """Take the answer's head."""

    def data(self, chunk: bytes) -> None:
        """Take the next piece of the body."""

    def end(self) -> None:
        """Take note that the body is complete."""


class Upload:
    """Takes the place of a request's body that will be streamed by `Call.write` and `Call.end`.

    `length` is the head's Content-Length; None for the chunked coding. `flow` receives backpressure. While the call
    waits for a connection, `Call.writable` is False; `flow` is called when that changes. An upload is for one call.
    """

    __slots__ = ("_left", "complete", "flow", "length")

    def __init__(self, length: int | None, flow: Flow) -> None:
        self.length = length
        self.flow = flow
        self.complete = False
        self._left = length  # bytes of it that were not written yet

    def frame(self, chunk: Buffer) -> list[Buffer]:
        """Return what to send for the next piece. Raises ValueError beyond the length."""
        if self._left is None:
            return gather(chunk_of(chunk)) if len(chunk) else []
        self._left -= len(chunk)
        if self._left < 0:
            raise ValueError("more was written than the request's announced length")
        return [chunk]

    def last(self) -> list[Buffer]:
        """Return what to send behind the last piece. Raises ValueError unless the whole length was written."""
        if self._left:
            written = f"{self._left} bytes less were" if self._left > 0 else "more was"
            raise ValueError(f"{written} written than the request's announced length")
        return [LAST_CHUNK] if self._left is None else []


class Call:
    """One request under way."""

    __slots__ = (
        "_link",
        "_pieces",
        "_pool",
        "_upload",
        "answered_bytes",
        "done",
        "expires",
        "method",
        "receiver",
        "retry_stale",
        "streamed",
        "timeout",
        "unread_from",
        "upgrade",
    )

    def __init__(
        self,
        pool: Pool,
        head: bytes,
        body: Body | Upload,
        receiver: Receiver,
        streamed: StreamReceiver | None,
        *,
        timeout: float,
        retry_stale: bool,
        upgrade: bool = False,
    ) -> None:
        self._pool = pool
        self._link: Upstream | None = None
        self._upload: Upload | None = None
        if isinstance(body, Upload):
            self._pieces: list[Buffer] = [head]
            self._upload = body
            carries = True
        else:
            self._pieces = message(head, body)
            carries = len(self._pieces) > 1 or len(self._pieces[0]) > len(head)
        # The lowest status of an answer that may leave the body unread: the connection then serves no other call.
        self.unread_from = _NO_STATUS
        if carries and pool.shared:
            self.unread_from = _REDIRECT if head.startswith(_BODY_READ) else 0
        self.method = b"HEAD" if head.startswith(b"HEAD ") else b""
        self.receiver = receiver
        self.streamed = streamed
        self.timeout = timeout
        self.upgrade = upgrade
        self.expires = NEVER  # while the call waits for a connection
        # A streamed body is not kept, so it can't be sent again.
        self.retry_stale = retry_stale and self._upload is None
        self.answered_bytes = False
        self.done = False

    @property
    def writable(self) -> bool:
        """Whether `write` sends at once, without queueing."""
        return self._link is not None and self._link.writable

    @property
    def waiting_bytes(self) -> int:
        """Bytes of a streamed body that wait for a connection."""
        return sum(map(len, self._pieces)) if self.streaming else 0

    @property
    def streaming(self) -> bool:
        """Whether its body is streamed, so that no piece is kept after it was sent."""
        return self._upload is not None

    @property
    def uploading(self) -> bool:
        """Whether its body is streamed and not complete."""
        return self._upload is not None and not self._upload.complete

    def write(self, chunk: Buffer) -> None:
        """Send the next piece of an `Upload`; ignored once the call is over. Raises ValueError beyond its length."""
        if self._upload is not None:
            self._write(self._upload.frame(chunk))

    def end(self) -> None:
        """Complete an `Upload`; ignored once the call is over. Raises ValueError short of its length."""
        upload = self._upload
        if upload is None:
            return
        self._write(upload.last())
        upload.complete = True
        if self._link is not None:
            self._link.uploaded(self)

    def cancel(self) -> None:
        """Cancel the call: its connection closes, its receiver is not called any more. Ignored once it is over."""
        if self.done:
            return
        link = self._link
        self.finish()
        if link is None:
            self._pool.withdraw(self)
        else:
            link.close()

    def pause_reading(self) -> None:
        """Stop reading a streamed answer; data already read (at most one read of the socket) are still delivered."""
        if self._link is not None:
            self._link.pause_reading()

    def resume_reading(self) -> None:
        """Go on."""
        if self._link is not None:
            self._link.resume_reading(self)

    # Called by the pool and the connection

    def begin(self, link: Upstream) -> None:
        """Send the available part of the request on this connection."""
        self._link = link
        link.begin(self, self._pieces)
        if not self.retry_stale:
            self._pieces = []
        if self._upload is not None and link.writable:
            self._upload.flow.resume_writing()

    def finish(self) -> None:
        """Take note that the call is over."""
        self.done = True
        self._link = None
        self._upload = None

    def fail(self, kind: FailureKind, text: str) -> None:
        """Report a failure to the receiver, unless the call is over."""
        if self.done:
            return
        self.finish()
        self.receiver.failed(UpstreamError(kind, text, answered_bytes=self.answered_bytes))

    def unlink(self) -> None:
        """Take note that the connection is gone and the call is to be sent again, once."""
        self._link = None
        self.retry_stale = False

    def pause_writing(self) -> None:
        """Pass backpressure on."""
        if self._upload is not None:
            self._upload.flow.pause_writing()

    def resume_writing(self) -> None:
        """Pass its end on."""
        if self._upload is not None:
            self._upload.flow.resume_writing()

    def _write(self, pieces: list[Buffer]) -> None:
        if self._link is None:
            self._pieces += pieces
            if self.expires < NEVER:  # it waits, unless the pool has refused it
                self._pool.keep(pieces)
        else:
            self._link.write(pieces)
