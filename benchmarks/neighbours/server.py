"""The model server, in a process of its own: `python -m neighbours.server PORT`.

It computes one call at a time, which takes 3 ms and 0.3 ms for each row. It misbehaves only towards callers that
provoke it:

- Calls of the model `other` are never answered.
- `/interim` and the model `interim` send 103 without end.
- `/large` and the model `large` send 400 MB, the latter in chunks. The model `fitting` sends 250 MB.
- `/stream` sends a few bytes each second.
- Bodies over 1 MiB are read and refused.

`GET /counts` returns calls and rows of the model `m`.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys
from collections import deque
from typing import TYPE_CHECKING, cast

import uvloop

from neighbours.model import FITTING, LARGE, PRIVATE, metadata, reply

if TYPE_CHECKING:
    from collections.abc import Coroutine

FIXED, PER_ROW = 0.003, 0.0003
"""Seconds of a call, and of each row in it: 330 requests a second one by one, 2,500 in batches of 32."""

MIB = 1 << 20
BLOCK = bytes(MIB)

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_CHUNKED = re.compile(rb"(?i)\r\ntransfer-encoding: *chunked")
_MODEL = re.compile(rb"/v[12]/models/([^/:]+)[:/](?:predict|infer)$")
_METADATA = re.compile(rb"/v2/models/([^/]+)$")


class Executor:
    """Computes calls one after the other, first come, first served. Calls whose caller has left are skipped."""

    def __init__(self) -> None:
        self.calls = 0
        self.rows = 0
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Connection, int, bytes]] = deque()
        self._busy = False

    def serve(self, connection: Connection, rows: int, message: bytes) -> None:
        """Send ``message`` once the rows have been computed."""
        self._waiting.append((connection, rows, message))
        if not self._busy:
            self._next(self._loop.time())

    def _next(self, start: float) -> None:
        """Begin the next call at ``start``: timers that fire late must not make the server slower."""
        self._busy = False
        while self._waiting:
            connection, rows, message = self._waiting.popleft()
            if not connection.gone:
                self._busy = True
                self.calls += 1
                self.rows += rows
                end = start + FIXED + PER_ROW * rows
                self._loop.call_at(end, self._end, connection, message, end)
                return

    def _end(self, connection: Connection, message: bytes, end: float) -> None:
        connection.send(message)
        self._next(end)


class Connection(asyncio.Protocol):
    """One connection: a request at a time."""

    _transport: asyncio.Transport

    def __init__(self, executor: Executor) -> None:
        self.gone = False
        self._executor = executor
        self._buffer = bytearray()
        self._skip = 0
        """Bytes of a large body that are still to come."""
        self._endless = False
        """A body in chunks, which only uploads have here: read until its last chunk."""
        self._target = b""
        self._answering = False
        self._room = asyncio.Event()
        self._room.set()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        """Stop working for a caller who left."""
        self.gone = True
        self._room.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """Wait for the caller."""
        self._room.clear()

    def resume_writing(self) -> None:
        """Go on."""
        self._room.set()

    def data_received(self, data: bytes) -> None:
        """Read."""
        if self._skip:
            taken = min(self._skip, len(data))
            self._skip -= taken
            data = data[taken:]
            if not self._skip:
                self._skipped()
        self._buffer += data
        if self._endless:
            if self._buffer.endswith(b"0\r\n\r\n"):
                self._endless = False
                self._skipped()
            del self._buffer[:-5]
            return
        if not self._answering and not self._skip:
            self._read()

    def send(self, message: bytes) -> None:
        """Send the answer and take the next request."""
        self._answering = False
        if not self.gone:
            self._transport.write(message)
            self._read()

    def _read(self) -> None:
        end = self._buffer.find(b"\r\n\r\n") + 4
        if end == 3:
            return
        head = bytes(self._buffer[: end - 2])
        method, self._target, _ = head.split(b" ", 2)
        found = _LENGTH.search(head)
        length = int(found[1]) if found else 0
        if length > MIB or self._target == b"/upload":
            self._skip = max(length - (len(self._buffer) - end), 0)
            self._endless = _CHUNKED.search(head) is not None
            self._buffer.clear()
            if not self._skip and not self._endless:
                self._skipped()
        elif len(self._buffer) >= end + length:
            body = bytes(self._buffer[end : end + length])
            del self._buffer[: end + length]
            self._answering = True
            self._take(method, body)

    def _skipped(self) -> None:
        self.send(answer(200, b"{}") if self._target == b"/upload" else answer(400, b'{"error":"%b ?"}' % PRIVATE))

    def _take(self, method: bytes, body: bytes) -> None:
        target = self._target
        inference = _MODEL.match(target) if method == b"POST" else None
        name = inference[1] if inference else target[1:]
        if name == b"m":
            status, said, rows = reply(target, body)
            self._executor.serve(self, rows, answer(status, said))
        elif name == b"interim":
            self._spawn(self._interim())
        elif name in {b"large", b"fitting"}:
            size = LARGE if name == b"large" else FITTING
            self._spawn(self._large(size, chunked=inference is not None and size == LARGE))
        elif name == b"stream":
            self._spawn(self._stream())
        elif inference is None:
            self.send(self._document())
        # Calls of any other model are never answered.

    def _document(self) -> bytes:
        if found := _METADATA.match(self._target):
            return answer(200, metadata(found[1].decode()))
        if self._target == b"/counts":
            return answer(200, json.dumps([self._executor.calls, self._executor.rows]).encode())
        if self._target.startswith(b"/v2/health/"):
            return answer(200, b"{}")
        return answer(404, b'{"error":"not here"}')

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)

    async def _interim(self) -> None:
        """Send 103 without end: 5,000 a second."""
        while True:
            self._transport.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n" * 50)
            await asyncio.sleep(0.01)
            await self._room.wait()

    async def _large(self, size: int, *, chunked: bool) -> None:
        """Send so much as fast as it is taken."""
        framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % size
        self._transport.write(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % framing)
        for at in range(0, size, MIB):
            block = BLOCK[: size - at]
            self._transport.write(b"%x\r\n%b\r\n" % (len(block), block) if chunked else block)
            await asyncio.sleep(0)
            await self._room.wait()
        self.send(b"0\r\n\r\n" if chunked else b"")

    async def _stream(self) -> None:
        """Send an event each second without end."""
        self._transport.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            self._transport.write(b"6\r\nevent\n\r\n")
            await asyncio.sleep(1)


def answer(status: int, body: bytes) -> bytes:
    """Return an answer."""
    head = b"HTTP/1.1 %d Answer\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(body)) + body


async def serve(port: int) -> None:
    """Serve until ended."""
    executor = Executor()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(executor), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    uvloop.run(serve(int(sys.argv[1])))
