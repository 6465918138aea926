"""A pool of keep-alive connections to one upstream, and the calls made through it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from carpool_sidecar.http1.limits import ClientLimits
from carpool_sidecar.http1.messages import LAST_CHUNK, Body, Buffer, Headers, chunk_of, gather, parts_of
from carpool_sidecar.http1.timing import NEVER, Ticker
from carpool_sidecar.http1.upstream import Upstream

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_sidecar.http1.exchange import Flow

FailureKind: TypeAlias = Literal["refused", "reset", "timeout", "protocol", "too-large"]


class UpstreamError(Exception):
    """A call that got no complete answer.

    `kind` says how: no connection could be made (refused), the upstream closed or reset it (reset), it was silent
    (timeout), it sent what is no HTTP or more than one answer (protocol), or more than is accepted (too-large).
    `answered_bytes`: some of an answer had come, so the upstream has seen the request.
    """

    def __init__(self, kind: FailureKind, text: str, *, answered_bytes: bool) -> None:
        super().__init__(text)
        self.kind = kind
        self.answered_bytes = answered_bytes


class Receiver(Protocol):
    """Who is told of a call's outcome: exactly one of the two, once, and neither after `Call.cancel`."""

    def answered(self, status: int, headers: Headers, body: bytes) -> None:
        """Take the whole answer."""

    def failed(self, error: UpstreamError) -> None:
        """Take the failure."""


class StreamReceiver(Receiver, Protocol):
    """Who is told of an answer as it comes.

    Either `answered`, for an answer that came in one piece, or `head`, any number of `data`, `end`. `failed` may
    come instead of the first or after any of them but the last.
    """

    def head(self, status: int, headers: Headers) -> None:
        """Take the answer's head."""

    def data(self, chunk: bytes) -> None:
        """Take the next piece of the body."""

    def end(self) -> None:
        """Take note that the body is complete."""


@dataclass(frozen=True, slots=True)
class Upload:
    """In place of a request's body: it will be streamed by `Call.write` and `Call.end`.

    `length` is what the head's Content-Length says; None for a head that says chunked. `flow` is told of backpressure;
    as long as the call waits for a connection, `Call.writable` is False, and `flow` hears when that changes.
    """

    length: int | None
    flow: Flow


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
        else:
            self._pieces = gather((head, *parts_of(body)))
            self.uploading = False
        self.method = b"HEAD" if head.startswith(b"HEAD ") else b""
        self.receiver = receiver
        self.streamed = streamed
        self.timeout = timeout
        self.expires = NEVER  # while the call waits for a connection
        # What was streamed is not kept, so it can't be sent again.
        self.retry_stale = retry_stale and not self.uploading
        self.answered_bytes = False
        self.done = False

    @property
    def writable(self) -> bool:
        """Whether `write` goes out at once, without piling up."""
        return self._link is not None and self._link.writable

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
        """Tell the receiver."""
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


class Pool:
    """Connections to one upstream, by TCP (`host`, `port`) or by a Unix socket (`path`).

    The connection used last is used first, so that those beyond the need fall idle and close. A connection is opened
    when a call finds none idle; at the cap, calls wait, first come, first served. Times are seconds of `clock`, by
    default the running loop's.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        path: str | None = None,
        max_connections: int = 256,
        connect_timeout: float = 5.0,
        idle_timeout: float = 30.0,
        limits: ClientLimits | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._path = path
        self._max_connections = max_connections
        self._connect_timeout = connect_timeout
        self._idle_timeout = idle_timeout
        self._loop = asyncio.get_running_loop()
        self.limits = limits or ClientLimits()
        self.clock = clock or self._loop.time
        self._open: set[Upstream] = set()
        self._idle: list[Upstream] = []
        self._waiting: deque[Call] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._ticker = Ticker(self.limits.tick, self._expire, self.clock)
        self._closed = False

    @property
    def authority(self) -> bytes:
        """What a Host header names this upstream."""
        if self._path is not None:
            return b"localhost"
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}".encode()

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._open)

    @property
    def idle(self) -> int:
        """How many of them have no call."""
        return len(self._idle)

    @property
    def waiting(self) -> int:
        """How many calls wait for a connection."""
        return len(self._waiting)

    def send(
        self,
        head: bytes,
        body: Body | Upload,
        receiver: Receiver,
        *,
        timeout: float = 60.0,
        retry_stale: bool = False,
    ) -> Call:
        """Send a request; the answer is buffered and told in one piece. Never blocks, never raises.

        `timeout` is how long the upstream may be silent, and how long the call may wait for a connection. With
        `retry_stale`, a request that dies on a reused connection before any byte of an answer is sent once more on a
        new one: upstreams close idle connections at any time, and the two may cross. It may then be served twice.
        """
        return self._place(Call(self, head, body, receiver, None, timeout=timeout, retry_stale=retry_stale))

    def stream(
        self,
        head: bytes,
        body: Body | Upload,
        receiver: StreamReceiver,
        *,
        timeout: float = 60.0,
        retry_stale: bool = False,
    ) -> Call:
        """Send a request as `send` does; the answer is told piece by piece, unless it comes in one."""
        return self._place(Call(self, head, body, receiver, receiver, timeout=timeout, retry_stale=retry_stale))

    async def close(self) -> None:
        """Close everything; calls under way fail with "reset"."""
        self._closed = True
        self._ticker.stop()
        for task in tuple(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for call in tuple(self._waiting):
            call.fail("reset", "the pool was closed")
        self._waiting.clear()
        for link in tuple(self._open):
            link.abandon("the pool was closed")

    # Called by calls and connections

    def release(self, link: Upstream) -> None:
        """Take back a connection whose call is answered."""
        if self._waiting:
            self._waiting.popleft().begin(link)
        else:
            link.deadline = self.clock() + self._idle_timeout
            self._idle.append(link)

    def forget(self, link: Upstream) -> None:
        """Take note that a connection is gone."""
        if link in self._open:
            self._open.discard(link)
            if link in self._idle:
                self._idle.remove(link)
            self._connect_as_needed()

    def retry(self, call: Call) -> None:
        """Send a call again, before all that wait; the connections idle now are as old as the one it died on."""
        call.unlink()
        for link in tuple(self._idle):
            link.close()
        self._waiting.appendleft(call)
        self._connect_as_needed()

    def withdraw(self, call: Call) -> None:
        """Take a cancelled call out of the queue."""
        self._waiting.remove(call)

    # Connections

    def _place(self, call: Call) -> Call:
        if self._idle:
            call.begin(self._idle.pop())
        else:
            call.expires = self.clock() + call.timeout
            self._waiting.append(call)
            self._connect_as_needed()
        return call

    def _connect_as_needed(self) -> None:
        while (
            len(self._connecting) < len(self._waiting)
            and len(self._connecting) + len(self._open) < self._max_connections
            and not self._closed
        ):
            task = self._loop.create_task(self._connect())
            self._connecting.add(task)
            self._ticker.start()

    async def _connect(self) -> None:
        failure: tuple[FailureKind, str] | None = None
        try:
            async with asyncio.timeout(self._connect_timeout):
                if self._path is not None:
                    _, link = await self._loop.create_unix_connection(lambda: Upstream(self), self._path)
                else:
                    _, link = await self._loop.create_connection(lambda: Upstream(self), self._host, self._port)
        except TimeoutError:
            failure = ("timeout", f"no connection to the upstream within {self._connect_timeout:g} s")
        except OSError as error:
            failure = ("refused", f"no connection to the upstream: {error}")
        finally:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - for the type checker: this is a coroutine
            self._connecting.discard(task)
        if failure is None:
            self._open.add(link)
            self._ticker.start()
            self.release(link)
            return
        if self._waiting:
            # One attempt, one call: those behind it have attempts of their own, or get them now.
            self._waiting.popleft().fail(*failure)
        self._connect_as_needed()

    def _expire(self, now: float) -> bool:
        for link in tuple(self._open):
            if now >= link.deadline:
                link.expire()
        for call in tuple(self._waiting):
            if now >= call.expires and not call.done:
                self._waiting.remove(call)
                call.fail("timeout", f"no connection to the upstream was free within {call.timeout:g} s")
        return bool(self._open or self._waiting or self._connecting)
