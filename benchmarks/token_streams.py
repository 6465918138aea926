"""Cost of token streams in the sidecar: CPU time per forwarded piece, and memory per open stream."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, cast

import processes
from evidence import Figure
from load import post

if TYPE_CHECKING:
    from pathlib import Path

STREAMS = 64
"""Streams under way while pieces are counted."""

ROUNDS = 50
"""Pieces of each stream in a trial: 3,200 in all."""

TRIALS = 15
OPEN = 2000
"""Streams open while memory is read."""

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
EVENT = (
    b'data: {"id":"chatcmpl-4f7c2a90b1d84c3f","object":"chat.completion.chunk","created":1764000000,"model":"llama",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
PIECE = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
POLICY = {"slo": {"ttft": {"p99": "100s"}, "tpot": {"p99": "10s"}}}
"""The gate runs, and admits all."""


class Source(asyncio.Protocol):
    """The engine's side of a stream: answers with a head and a first token, and sends the rest on request."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer what is a request for a stream; to all else, that it is not here."""
        if not data.startswith(b"POST"):
            self.transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            return
        self.transport.write(HEAD + PIECE)
        self._sources.append(self)


class Listener(asyncio.Protocol):
    """The client's side: counts the bytes of all streams."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self.transport = cast("asyncio.Transport", transport)
        body = json.dumps({"model": "llama", "messages": [{"role": "user", "content": "x" * 200}], "stream": True})
        self.transport.write(post("/v1/chat/completions", body.encode()))

    def data_received(self, data: bytes) -> None:
        """Count."""
        self._seen.add(data.count(b"data: "))


class Seen:
    """Pieces that all clients have, and somebody who waits for a number of them."""

    def __init__(self) -> None:
        self._count = 0
        self._enough = asyncio.Event()
        self._wanted = 0

    def add(self, count: int) -> None:
        """Count."""
        self._count += count
        if self._count >= self._wanted:
            self._enough.set()

    async def more(self, count: int) -> None:
        """Wait for so many more than were waited for before."""
        self._wanted += count
        if self._count < self._wanted:
            self._enough.clear()
            await self._enough.wait()


async def token_streams(folder: Path) -> list[Figure]:
    """Measure both."""
    sources: list[Source] = []
    loop = asyncio.get_running_loop()
    engine = await loop.create_server(lambda: Source(sources), "127.0.0.1", 0, backlog=OPEN)
    port = engine.sockets[0].getsockname()[1]
    seen = Seen()
    with processes.sidecar(folder, port, policy=POLICY, upstream_options={"maxForwarded": 2 * OPEN}) as sidecar:

        async def open_streams(count: int) -> None:
            for _ in range(count):
                await loop.create_connection(lambda: Listener(seen), "127.0.0.1", sidecar.port)
                await seen.more(1)

        await open_streams(STREAMS)
        costs = []
        for _ in range(TRIALS):
            before = sidecar.cpu_seconds()
            for _ in range(ROUNDS):
                # One piece of each stream, as a step of an engine gives them; the next when all have arrived.
                for source in sources:
                    source.transport.write(PIECE)
                await seen.more(len(sources))
            costs.append((sidecar.cpu_seconds() - before) / (ROUNDS * len(sources)))
        resident = processes.rss_mib(sidecar.pid)
        await open_streams(OPEN - STREAMS)
        grown = processes.rss_mib(sidecar.pid) - resident
        for source in sources:
            source.transport.abort()
    engine.close()
    return [
        Figure("token stream pieces", 1 / min(costs), TRIALS, {"streams": STREAMS, "bytes a piece": len(EVENT)}),
        Figure("open token streams", 1024 * grown / (OPEN - STREAMS), 1, {"streams": OPEN}),
    ]
