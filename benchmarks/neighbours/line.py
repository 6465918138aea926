"""A client's keep-alive connection that sends bytes as they are given and reads one answer at a time."""

from __future__ import annotations

import asyncio
import re

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)\r\n")


class Line:
    """One connection to ``port`` of 127.0.0.1, opened on first use."""

    def __init__(self, port: int) -> None:
        self.answers = 0
        """How many it has read."""
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection's two ends."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        return self._streams

    async def write(self, message: bytes) -> None:
        """Send bytes; those before them are on their way when it returns.

        Raises ``OSError`` when the connection can't be had or is closed.
        """
        _, writer = await self.open()
        if writer.transport.is_closing():
            raise ConnectionResetError
        writer.write(message)
        await writer.drain()

    async def ask(self, message: bytes) -> tuple[int, bytes]:
        """Send a request; return the status and the whole answer, head and body.

        Raises ``OSError`` or ``EOFError`` when the connection can't be had or ends early.
        """
        reader, _ = await self.open()
        await self.write(message)
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head[9:12])
            if status >= 200:
                break
        length = _LENGTH.search(head)
        answer = head + (await reader.readexactly(int(length[1])) if length else b"")
        self.answers += 1
        return status, answer

    def close(self) -> None:
        """Cut the connection; the next request opens another one."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
