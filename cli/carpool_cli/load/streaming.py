"""Open-loop load of token streams on a server with OpenAI's API; records the arrival of every chunk.

Each request has a connection of its own. As in `loadgen`, times count from a request's due time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import httptools
import msgspec
from msgspec import Struct

from carpool_cli.answers import UNREADABLE
from carpool_cli.load.loadgen import COMPLAINT, OnTime, when_due
from carpool_sidecar.http1.messages import Headers, content_length, encode_request_head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_sidecar.tuning.stalls import Stall

JSON = (b"content-type", b"application/json")

OK = 200


class Streamed(NamedTuple):
    """The result of a request; times are seconds from the start, ``first`` and ``last`` of chunks with text.

    ``failure`` is empty for a complete answer, else an HTTP status or an outcome. ``complaint`` is the beginning of an
    error answer.
    """

    due: float
    sent: float
    first: float
    last: float
    gaps: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    failure: str
    complaint: str

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.due

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first; 0 for one token."""
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class StreamRecording(NamedTuple):
    """All ended requests, in the order in which they were due; ``left_out`` were in progress when it was stopped."""

    streams: list[Streamed]
    stalls: list[Stall]
    cpu_seconds: float
    seconds: float
    most_outstanding: int
    stopped_at: float | None
    left_out: int


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(Struct):
    choices: list[dict[str, Any]] = []
    usage: _Usage | None = None
    error: Any = None


class Answer:
    """A stream of server-sent events, fed with bytes."""

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self.gaps: list[float] = []
        self.usage: _Usage | None = None
        self.complete = False
        self.error = ""
        self._rest = b""

    @property
    def chunks(self) -> int:
        """Events with text so far."""
        return len(self.gaps) + 1 if self.first else 0

    def feed(self, data: bytes, now: float) -> None:
        """Add bytes of the body that arrived at ``now``, which is above 0."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.complete = True
            return
        try:
            event = msgspec.json.decode(data, type=_Event)
        except UNREADABLE as error:
            self.error = f"an event that does not read: {error}"
            return
        if event.error is not None:
            self.error = str(event.error)[:COMPLAINT]
        self.usage = event.usage or self.usage
        for choice in event.choices:
            self.complete = self.complete or choice.get("finish_reason") is not None
            if choice.get("text") or _has_text(choice.get("delta")):
                if self.first:
                    self.gaps.append(now - self.last)
                else:
                    self.first = now
                self.last = now


def _has_text(delta: object) -> bool:
    """Return whether a chunk of a chat has content: text, reasoning, a tool's arguments."""
    return isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role")


class StreamGenerator(OnTime):
    """Sends ``bodies``, one at each of the ``due`` times, and records the answers.

    A request without a complete answer ``timeout`` seconds after it was sent has failed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        target: str,
        bodies: Sequence[bytes],
        due: Sequence[float],
        *,
        timeout: float,
        headers: Headers,
    ) -> None:
        super().__init__(due)
        self._where = (host, port)
        self._timeout = timeout
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        fields = [(b"host", authority.encode()), JSON, (b"connection", b"close"), *headers]
        self._requests = [
            encode_request_head(b"POST", target.encode(), [*fields, content_length(len(body))]) + body
            for body in bodies
        ]
        self._ended: dict[int, Streamed] = {}
        self._under_way: dict[int, _Shot] = {}
        self._most = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def under_way(self) -> int:
        """Sent requests that have not ended."""
        return len(self._under_way)

    async def run(self) -> StreamRecording:
        """Send everything, wait for the answers, and return the recording."""
        stalls, cpu_seconds, seconds = await self._watched()
        left = dict(self._under_way)
        self._under_way.clear()
        for index, shot in left.items():
            if shot.is_connected:
                shot.drop()
            else:
                self._tasks[index].cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        ended = [self._ended[index] for index in sorted(self._ended)]
        return StreamRecording(ended, stalls, cpu_seconds, seconds, self._most, self._stopped_at, len(left))

    async def _send_all(self) -> None:
        async for index in when_due(self._due, self._started):
            shot = _Shot(self, index, self._requests[index])
            self._under_way[index] = shot
            self._most = max(self._most, len(self._under_way))
            self._tasks[index] = asyncio.create_task(self._shoot(shot))
        await asyncio.wait(self._tasks.values())

    async def _shoot(self, shot: _Shot) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await asyncio.get_running_loop().create_connection(lambda: shot, *self._where)
                await shot.over.wait()
        except TimeoutError:
            shot.failed("timeout")
            await shot.over.wait()
        except OSError as error:
            shot.failed(error.strerror or "no connection")

    def ended(self, index: int, sent: float, answer: Answer, failure: str, complaint: str) -> None:
        """Record the end of a request, if it is its first."""
        if self._under_way.pop(index, None) is None:
            return
        usage = answer.usage or _Usage()
        self._ended[index] = Streamed(
            self._due[index],
            sent,
            answer.first,
            answer.last,
            tuple(answer.gaps),
            usage.prompt_tokens,
            usage.completion_tokens or answer.chunks,
            failure,
            complaint,
        )


class _Shot(asyncio.Protocol):
    """One request in progress."""

    def __init__(self, generator: StreamGenerator, index: int, request: bytes) -> None:
        self.over = asyncio.Event()
        self._generator = generator
        self._index = index
        self._request = request
        self._sent = generator.now()
        self._answer = Answer()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.WriteTransport | None = None
        self._body = b""

    @property
    def is_connected(self) -> bool:
        """Whether it has a connection, so that the end of that ends it."""
        return self._transport is not None

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        self._transport.write(self._request)
        if self.over.is_set():
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.failed(f"no HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        # A body without a length ends with the connection.
        if exc is None and self._answer.complete:
            self.on_message_complete()
        else:
            self.failed("connection lost")
        self.over.set()

    # Called by the parser

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() == OK:
            self._answer.feed(body, self._generator.now())
        if len(self._body) < COMPLAINT:
            self._body += body[:COMPLAINT]

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != OK:
            self.failed(str(status))
        elif self._answer.error:
            self.failed("error in the stream")
        elif not self._answer.complete or not self._answer.first:
            self.failed("no complete stream of events")
        else:
            self._end("", "")

    # Called by both

    def failed(self, why: str) -> None:
        """Record a failure, unless it ended before."""
        said = self._answer.error or ("" if self._answer.first else self._body.decode("utf-8", "replace"))
        self._end(why, " ".join(said.split()))

    def drop(self) -> None:
        """Close the connection at once; `over` is set when it is."""
        if self._transport is None:
            self.over.set()
        else:
            self._transport.abort()

    def _end(self, failure: str, complaint: str) -> None:
        self._generator.ended(self._index, self._sent, self._answer, failure, complaint)
        self.drop()
