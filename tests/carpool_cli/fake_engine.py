"""A server with OpenAI's streaming API on 127.0.0.1, in a thread. It answers at once; the model's name says what."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def event(content: str | None = None, **fields: object) -> bytes:
    choice = {"index": 0, "delta": {} if content is None else {"content": content}, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], **fields}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}}\n\n'
LAST = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}\n\n'
DONE = b"data: [DONE]\n\n"

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"

STREAMS = {
    "good": [event(""), event("a"), event("b"), event("c"), LAST, USAGE, DONE],
    "uncounted": [event("a"), event("b"), LAST, DONE],
    "text": [b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n', LAST, DONE],
    "cut": [event("a")],
    "error": [event("a"), b'data: {"error": {"message": "out of memory"}}\n\n', DONE],
    "garbled": [b"data: {\n\n", DONE],
    "empty": [LAST, DONE],
}


class FakeEngine:
    """Bodies that it got are in ``seen``. ``key``: what a question for models has to have in its head."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, object], bytes]] = []
        self.port = 0
        self.key = ""
        self.tasks: list[asyncio.Task[None]] = []
        self.over = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            if path.endswith("/models") and self.key.encode() not in head:
                writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n")
            elif path.endswith("/models"):
                body = b'{"data": [{"id": "good"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            else:
                length = int(head.lower().split(b"content-length:")[1].split()[0])
                body = json.loads(await reader.readexactly(length))
                self.seen.append((path, body, head))
                await self._answer(body["model"], writer)
            await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def _answer(self, model: str, writer: asyncio.StreamWriter) -> None:
        if model == "silent":
            await self.over.wait()
            return
        if model == "full":
            body = b'{"error": "too many"}'
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        elif model == "plain":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        elif model == "until-the-end":
            writer.write(HEAD + b"\r\n" + b"".join(STREAMS["good"]))
        else:
            writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
            for piece in STREAMS[model]:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if model != "cut":
                writer.write(b"0\r\n\r\n")


@contextmanager
def fake_engine() -> Iterator[FakeEngine]:
    engine, ready = FakeEngine(), threading.Event()

    async def listen() -> None:
        async with await asyncio.start_server(engine.serve, "127.0.0.1", 0) as server:
            engine.port = server.sockets[0].getsockname()[1]
            engine.loop = asyncio.get_running_loop()
            ready.set()
            await engine.over.wait()
            await asyncio.gather(*engine.tasks)

    thread = threading.Thread(target=asyncio.run, args=(listen(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield engine
    finally:
        engine.loop.call_soon_threadsafe(engine.over.set)
        thread.join()
