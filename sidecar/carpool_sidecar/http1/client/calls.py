"""Calls to an upstream: who is told of what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from carpool_sidecar.http1.messages import LAST_CHUNK, Body, Buffer, Flow, Headers, chunk_of, gather, message
from carpool_sidecar.http1.timing import NEVER

if TYPE_CHECKING:
    from carpool_sidecar.http1.client.pool import Pool
    from carpool_sidecar.http1.client.upstream import Upstream

FailureKind: TypeAlias = Literal[
    "refused", "reset", "timeout", "protocol", "too-large", "busy", "buffers-full"
]  # fmt: skip

STATUS = {"refused": 503, "timeout": 504, "busy": 503, "buffers-full": 503}
"""Status by kind of failure; 502 for any other."""

# A server that answers without reading a request's body takes the body for the next request on the connection, and the
# next caller gets the answer to it. Servers read the bodies of these methods, unless they redirect or refuse.
_BODY_READ = (b"POST ", b"PUT ", b"PATCH ")
_REDIRECT = 300
_NO_STATUS = 1000


class UpstreamError(Exception):
    """A call that got no complete answer.

    `kind` says how: no connection could be made (refused), the upstream closed or reset it (reset), it was silent
    (timeout), it sent what is no HTTP (protocol), or more than is accepted (too-large);
    too many calls wait for a connection already (busy), or there is no room to buffer the answer (buffers-full).
    `answered_bytes`: some of an answer had come, so the upstream has seen the request.
    """

    def __init__(self, kind: FailureKind, text: str, *, answered_bytes: bool) -> None:
        super().__init__(text)
        self.kind = kind
        self.answered_bytes = answered_bytes

    @property
    def status(self) -> int:
        """What a client is answered."""
        return STATUS.get(self.kind, 502)

    @property
    def reason(self) -> str:
        """The word for machines that goes with it."""
        # The one budget has the one reason, whichever way the bytes went.
        return self.kind if self.kind == "buffers-full" else f"upstream-{self.kind}"


class Receiver(Protocol):
    """Who is told of a call's outcome: exactly one of the two, once, and neither after `Call.cancel`."""

    def answered(self, status: int, headers: Headers, body: bytes | memoryview) -> None:
        """Take the whole answer; a large body is a read-only view, so that it is held once."""

    def failed(self, error: UpstreamError) -> None:
        """Take the failure."""


class StreamReceiver(Receiver, Protocol):
    """Who is told of an answer as it comes.

    Either `answered`, for an answer that came in one piece, or `head`, any number of `data`, `end`. `failed` may
    come instead of the first or after any of them but the last. Before all that `interim`, any number of times. A call
    that offers an upgrade may instead end in `switched`.
    """

    def interim(self, status: int, headers: Headers) -> None:
        """Take an interim response (1xx) other than 100 and 101."""

    def switched(self, headers: Headers, link: Upstream, rest: bytes) -> None:
        """Take over the connection: what it speaks from now on is no HTTP. `rest` came behind the head."""

    def head(self, status: int, headers: Headers) -> None:
        """Take the answer's head."""

    def data(self, chunk: bytes) -> None:
        """Take the next piece of the body."""

    def end(self) -> None:
        """Take note that the body is complete."""


class Upload:
    """In place of a request's body: it will be streamed by `Call.write` and `Call.end`.

    `length` is what the head's Content-Length says; None for a head that says chunked. `flow` is told of backpressure;
    as long as the call waits for a connection, `Call.writable` is False, and `flow` hears when that changes.
    """

    __slots__ = ("flow", "length")

    def __init__(self, length: int | None, flow: Flow) -> None:
        self.length = length
        self.flow = flow


class Call:
    """One request under way."""

    __slots__ = (
        "_flow",
        "_link",
        "_owed",
        "_pieces",
        "_pool",
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
        "uploading",
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
        self._owed: int | None = None
        self._flow: Flow | None = None
        if isinstance(body, Upload):
            self._pieces: list[Buffer] = [head]
            self._owed = body.length
            self._flow = body.flow
            self.uploading = True
            carries = True
        else:
            self._pieces = message(head, body)
            self.uploading = False
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
        # What was streamed is not kept, so it can't be sent again.
        self.retry_stale = retry_stale and not self.uploading
        self.answered_bytes = False
        self.done = False

    @property
    def writable(self) -> bool:
        """Whether `write` goes out at once, without piling up."""
        return self._link is not None and self._link.writable

    @property
    def waiting_bytes(self) -> int:
        """Bytes of a body that comes in pieces and waits for a connection."""
        return sum(map(len, self._pieces)) if self.streaming else 0

    @property
    def streaming(self) -> bool:
        """Whether its body comes, or came, in pieces that nobody holds once they are sent."""
        return self._flow is not None

    def write(self, chunk: Buffer) -> None:
        """Send the next piece of an `Upload`; ignored once the call is over. Raises ValueError beyond its length."""
        if self.done:
            return
        if self._owed is not None:
            self._owed -= len(chunk)
            if self._owed < 0:
                raise ValueError("more was written than the request's announced length")
            self._write([chunk])
        else:
            self._write(gather(chunk_of(chunk)) if len(chunk) else [])

    def end(self) -> None:
        """Complete an `Upload`; ignored once the call is over. Raises ValueError short of its length."""
        if self.done:
            return
        if self._owed:
            raise ValueError(f"{self._owed} bytes less were written than the request's announced length")
        if self._owed is None:
            self._write([LAST_CHUNK])
        self.uploading = False
        if self._link is not None:
            self._link.uploaded(self)

    def cancel(self) -> None:
        """Give the call up: its connection closes, its receiver hears nothing more. Ignored once it is over."""
        if self.done:
            return
        link = self._link
        self.finish()
        if link is None:
            self._pool.withdraw(self)
        else:
            link.close()

    def pause_reading(self) -> None:
        """Stop reading a streamed answer; what was already read (at most one read of the socket) still comes."""
        if self._link is not None:
            self._link.pause_reading()

    def resume_reading(self) -> None:
        """Go on."""
        if self._link is not None:
            self._link.resume_reading(self)

    # Called by the pool and the connection

    def begin(self, link: Upstream) -> None:
        """Send what there is on this connection."""
        self._link = link
        link.begin(self, self._pieces)
        if not self.retry_stale:
            self._pieces = []
        if self._flow is not None and link.writable:
            self._flow.resume_writing()

    def finish(self) -> None:
        """Take note that the call is over."""
        self.done = True
        self._link = None
        self._flow = None

    def fail(self, kind: FailureKind, text: str) -> None:
        """Tell the receiver, unless the call is over."""
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
        if self._flow is not None:
            self._flow.pause_writing()

    def resume_writing(self) -> None:
        """Pass its end on."""
        if self._flow is not None:
            self._flow.resume_writing()

    def _write(self, pieces: list[Buffer]) -> None:
        if self._link is None:
            self._pieces += pieces
        else:
            self._link.write(pieces)
