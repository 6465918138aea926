"""The load on a measured proxy: callers that never pause, and a model server that answers at once.

Both run in the measuring process, on one loop, and do as little as can be: what they cost is not counted, but what they
take of the machine the proxy can't have.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from processes import Process

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_READ_BUFFER = 1 << 20


def post(target: str, body: bytes, *headers: str) -> bytes:
    """Return a request as a usual client sends it."""
    lines = [
        f"POST {target} HTTP/1.1",
        "Host: 127.0.0.1",
        "User-Agent: python-requests/2.32.3",
        "Accept-Encoding: gzip, deflate",
        "Accept: */*",
        "Connection: keep-alive",
        *(headers or ("Content-Type: application/json",)),
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answer(body: bytes, *headers: str) -> bytes:
    """Return an answer as a usual model server sends it."""
    lines = ["HTTP/1.1 200 OK", *(headers or ("Content-Type: application/json",)), f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Messages(asyncio.BufferedProtocol):
    """Cuts a stream into messages that have a Content-Length, or none and no body; each goes to ``take``."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray(_READ_BUFFER)
        self._message = bytearray()
        self._size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002 - the protocol's signature
        """Lend the buffer that is read into."""
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        """Take what was read."""
        self._message += memoryview(self._buffer)[:count]
        while self._message:
            if not self._size:
                end = self._message.find(b"\r\n\r\n") + 4
                if end == 3:
                    return
                length = _LENGTH.search(self._message, 0, end)
                self._size = end + (int(length[1]) if length else 0)
            if len(self._message) < self._size:
                return
            message = bytes(self._message[: self._size])
            del self._message[: self._size]
            self._size = 0
            self.take(message)

    def take(self, message: bytes) -> None:
        """Take a message, head and body."""
        raise NotImplementedError


class Model(Messages):
    """The model server's side of a connection: ``reply`` makes an answer of a request for inference."""

    def __init__(self, reply: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._reply = reply

    def take(self, message: bytes) -> None:
        """Answer; what is no inference is a question that gets a plain yes."""
        self.transport.write(self._reply(message) if message.startswith(b"POST") else answer(b"{}"))


class Caller(Messages):
    """A client that asks again as soon as it has its answer, which must end in ``expected``."""

    def __init__(self, request: bytes, expected: bytes) -> None:
        super().__init__()
        self._request = request
        self._expected = expected
        self.answers = 0
        self.wrong = b""
        """An answer that should have been another, or word of a lost connection."""
        self.asking = True
        self.begun = asyncio.Event()
        """Two answers have come, so that connections and routes stand."""
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        super().connection_made(transport)
        self.transport.write(self._request)

    def take(self, message: bytes) -> None:
        """Check and count an answer, and ask again."""
        if not message.startswith(b"HTTP/1.1 200") or not message.endswith(self._expected):
            self.wrong = message[:500]
            self.asking = False
        self.answers += 1
        if self.answers == 2 or self.wrong:
            self.begun.set()
        if self.asking:
            self.transport.write(self._request)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take note of an end that was not ours."""
        if self.asking:
            self.wrong = b"the connection was lost: %a" % exc
        self.asking = False
        self.begun.set()
        self.ended.set()


@asynccontextmanager
async def model(reply: Callable[[bytes], bytes]) -> AsyncIterator[int]:
    """Serve a model on a free port, which is returned."""
    server = await asyncio.get_running_loop().create_server(lambda: Model(reply), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


class Load:
    """Callers at one proxy. ``asked``: a request and the end of its answer for each of them."""

    def __init__(self, process: Process, asked: Sequence[tuple[bytes, bytes]]) -> None:
        self.process = process
        self.answered = 0
        """Answers in all trials, their beginnings and ends included."""
        self._asked = asked

    async def trial(self, seconds: float) -> float:
        """Call for so long; return the proxy's CPU seconds for each answer, beginning and end left out.

        Raises ``RuntimeError`` for a wrong answer.
        """
        loop = asyncio.get_running_loop()
        callers = [Caller(*each) for each in self._asked]
        for caller in callers:
            await loop.create_connection(lambda caller=caller: caller, "127.0.0.1", self.process.port)  # type: ignore[misc]
        await asyncio.gather(*(caller.begun.wait() for caller in callers))
        before = sum(caller.answers for caller in callers)
        start = self.process.cpu_seconds()
        await asyncio.sleep(seconds)
        used = self.process.cpu_seconds() - start
        answers = sum(caller.answers for caller in callers) - before
        for caller in callers:
            caller.asking = False
        await asyncio.gather(*(caller.ended.wait() for caller in callers))
        self.answered += sum(caller.answers for caller in callers)
        if wrong := next((caller.wrong for caller in callers if caller.wrong), b""):
            raise RuntimeError(f"a wrong answer: {wrong!r}")
        return used / answers
