"""In-memory transports, a hand-set clock, and an application and a receiver that write down their events."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop

from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.limits import ClientLimits, ServerLimits
from carpool_sidecar.http1.server.server import Server

sys.path.append(str(Path(__file__).parent))

# Modules whose tests use real sockets: there, the two loops differ.
ON_BOTH_LOOPS = {
    "test_buffered_bytes",
    "test_forward",
    "test_pool",
    "test_pool_connecting",
    "test_pool_interim",
    "test_pool_unread_bodies",
    "test_server",
    "test_sockets",
    "test_tunnel",
}


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Any]:
    if item.path.stem in ON_BOTH_LOOPS:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


class Clock:
    """Time that only a test moves."""

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
    """An application that answers with the body it got, if ``answers``, and writes down its events."""

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

    def interim(self, status: int, headers: Any) -> None:
        self.events.append(("interim", status))

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
        self.server._connections.expire(self.clock.now)


class Upstream:
    """A server of raw bytes on 127.0.0.1; `script(peer, received)` is called with all a connection has received."""

    class Peer(asyncio.Protocol):
        transport: asyncio.Transport

        def __init__(self, upstream: Upstream) -> None:
            self.upstream = upstream
            self.received = b""
            self.lost = asyncio.Event()
            self.writable = True
            upstream.peers.append(self)

        def connection_made(self, transport: Any) -> None:
            self.transport = transport
            self.upstream.connected.set()
            if self.upstream.on_connect is not None:
                self.upstream.on_connect(self)

        def data_received(self, data: bytes) -> None:
            self.received += data
            self.upstream.script(self, self.received)

        def connection_lost(self, exc: Exception | None) -> None:
            self.lost.set()

        def pause_writing(self) -> None:
            self.writable = False

        def resume_writing(self) -> None:
            self.writable = True

        def answer(self, data: bytes) -> None:
            """Take what was received as one request, and send this."""
            self.received = b""
            self.transport.write(data)

        def reset(self) -> None:
            """Go away without an answer."""
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    def __init__(self) -> None:
        self.peers: list[Upstream.Peer] = []
        self.connected = asyncio.Event()
        self.on_connect: Any = None
        self.port = 0
        self.path = ""

    def script(self, peer: Upstream.Peer, received: bytes) -> None:
        """Answer every request with its body, if it has a Content-Length; replaced by most tests."""
        head, blank, body = received.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or b"0")
        if blank and len(body) >= size:
            peer.answer(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + body)


async def turn_until(condition: Any) -> None:
    """Let the loop turn until the condition holds."""
    while not condition():  # noqa: ASYNC110 - what is waited for happens inside the code under test
        await asyncio.sleep(0)


async def settle() -> None:
    """Let closed transports end before their loop does."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def upstream(tmp_path: Any) -> Any:
    upstream = Upstream()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream.Peer(upstream), "127.0.0.1", 0)
    upstream.port = server.sockets[0].getsockname()[1]
    upstream.path = str(tmp_path / "socket")
    unix_server = await loop.create_unix_server(lambda: Upstream.Peer(upstream), upstream.path)
    yield upstream
    server.close()
    unix_server.close()
    for peer in upstream.peers:
        if not peer.lost.is_set():
            peer.transport.abort()
    await settle()


@pytest.fixture
async def pool(upstream: Upstream) -> Any:
    pool = Pool("127.0.0.1", upstream.port, limits=ClientLimits(tick=0.01))
    yield pool
    await pool.close()
    await settle()


class Client(asyncio.Protocol):
    """A client of raw bytes: write, then wait for what comes."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.received = bytearray()
        self.changed = asyncio.Event()
        self.ended = False  # the server ended its side
        self.lost: Any = None  # the exception, or True

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.changed.set()

    def eof_received(self) -> bool:
        self.ended = True
        self.changed.set()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = exc or True
        self.changed.set()

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    async def until(self, condition: Any) -> bytes:
        """Wait until the condition holds; return all that was received."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()
        return self.received

    async def until_received(self, end: bytes) -> bytes:
        return await self.until(lambda: self.received.endswith(end))

    async def until_lost(self) -> bytes:
        return await self.until(lambda: self.lost)


@pytest.fixture
async def serve() -> Any:
    """Start servers and connect clients to them."""
    servers: list[Server] = []
    clients: list[Client] = []

    class Serve:
        @staticmethod
        async def start(app: Any, **limits: Any) -> Server:
            server = Server(app, ServerLimits(**{"tick": 0.01, **limits}))
            await server.listen("127.0.0.1", 0)
            servers.append(server)
            return server

        @staticmethod
        async def connect(server: Server) -> Client:
            loop = asyncio.get_running_loop()
            address = server.addresses[0]
            if isinstance(address, str):
                _, client = await loop.create_unix_connection(Client, address)
            else:
                _, client = await loop.create_connection(Client, *address)
            clients.append(client)
            return client

    yield Serve
    for server in servers:
        server.stop_accepting()
        server.abort()
    for client in clients:
        if not client.lost:
            client.transport.abort()
    await settle()


@pytest.fixture
def kit() -> Any:
    """The doubles of this folder, by name."""

    class Kit:
        until = staticmethod(turn_until)

    for double in (App, Clock, MemoryTransport, Receiver, Sink, Site):
        setattr(Kit, double.__name__, double)
    return Kit


@pytest.fixture
async def site() -> Site:
    return Site()
