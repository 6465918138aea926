"""In-memory transports, a hand-set clock, and an application and a receiver that write down what they are told."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from carpool_sidecar.http1.limits import ServerLimits
from carpool_sidecar.http1.server import Server


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class MemoryTransport(asyncio.Transport):
    """Keeps what is written; `unsent` bytes of it are pretended to be waiting for the peer."""

    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = b""
        self.writes: list[Any] = []
        self.closing = False
        self.aborted = False
        self.eof = False
        self.paused = False
        self.unsent = 0
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        assert not self.eof
        self.writes.append(data)
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof = True

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def is_closing(self) -> bool:
        return self.closing

    def is_reading(self) -> bool:
        return not self.paused

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False

    # What the peer does

    def feed(self, *pieces: bytes) -> bytes:
        """Let pieces arrive; return what was written meanwhile."""
        before = len(self.written)
        for piece in pieces:
            self.protocol.data_received(piece)
        return self.written[before:]

    def feed_eof(self) -> bool:
        """End the peer's side; return whether the protocol keeps its own open."""
        keep = bool(self.protocol.eof_received())
        self.closing = self.closing or not keep
        return keep

    def lose(self, exc: Exception | None = None) -> None:
        """End the connection."""
        self.closing = True
        self.protocol.connection_lost(exc)


class App:
    """An application that answers with the body it got, unless told otherwise, and writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.exchanges: list[Any] = []
        self.answers = True
        self.on_head: Any = None

    def head(self, exchange: Any) -> None:
        self.exchanges.append(exchange)
        if self.on_head is not None:
            self.on_head(exchange)

    def request(self, exchange: Any) -> None:
        self.events.append(("request", exchange.target, exchange.body))
        if self.answers:
            exchange.respond(200, [], exchange.body)

    def sent(self, exchange: Any) -> None:
        self.events.append(("sent", exchange.target, exchange.status))

    def disconnected(self, exchange: Any) -> None:
        self.events.append(("disconnected", exchange.target))

    def refused(self, error: Any) -> None:
        self.events.append(("refused", error.status, error.reason))


class Sink:
    """Writes down a streamed body."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def data(self, chunk: bytes) -> None:
        assert type(chunk) is bytes
        self.events.append(chunk)

    def end(self) -> None:
        self.events.append("end")

    def aborted(self) -> None:
        self.events.append("aborted")

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")


class Receiver:
    """Writes down what a call comes to; `over` is set when it is over."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.over = asyncio.Event()

    def answered(self, status: int, headers: Any, body: bytes) -> None:
        assert type(body) is bytes
        self.events.append(("answered", status, body))
        self.over.set()

    def head(self, status: int, headers: Any) -> None:
        self.events.append(("head", status))

    def data(self, chunk: bytes) -> None:
        assert type(chunk) is bytes
        self.events.append(chunk)

    def end(self) -> None:
        self.events.append("end")
        self.over.set()

    def failed(self, error: Any) -> None:
        self.events.append(("failed", error.kind, error.answered_bytes))
        self.over.set()


class Site:
    """A server without sockets."""

    def __init__(self, **limits: Any) -> None:
        self.app = App()
        self.clock = Clock()
        self.limits = dataclasses.replace(ServerLimits(tick=1e6), **limits)
        self.server = Server(self.app, self.limits, self.clock)

    def connect(self) -> MemoryTransport:
        return MemoryTransport(self.server.protocol())

    def after(self, seconds: float) -> None:
        """Let time pass, and the server look at its deadlines."""
        self.clock.now += seconds
        self.server._expire(self.clock.now)


@pytest.fixture
def kit() -> Any:
    """The doubles of this folder, by name."""

    class Kit:
        pass

    for double in (App, Clock, MemoryTransport, Receiver, Sink, Site):
        setattr(Kit, double.__name__, double)
    return Kit


@pytest.fixture
async def site() -> Site:
    return Site()
