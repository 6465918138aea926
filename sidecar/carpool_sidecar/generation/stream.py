"""One forwarded request to a language model: bytes are passed on at once, and examined afterwards."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import msgspec

from carpool.generation.requests import Reason
from carpool_sidecar.dispatch.answers import retry_after
from carpool_sidecar.generation.answers import ERROR, LONGEST_WHOLE, Ending, Ends, Events, ending, longest
from carpool_sidecar.generation.requests import Api, Asked
from carpool_sidecar.http1.messages import find
from carpool_sidecar.http1.relay.forward import Forwarding

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool.generation.requests import Request
    from carpool_sidecar.generation.requests import Endpoint
    from carpool_sidecar.http1.client.errors import UpstreamError
    from carpool_sidecar.http1.client.pool import Pool
    from carpool_sidecar.http1.messages import Headers
    from carpool_sidecar.http1.server.exchange import Exchange

REFUSALS = {
    Reason.TTFT: (429, "ttft", "the first token would come too late: send fewer requests at a time, or add replicas"),
    Reason.QUEUE_FULL: (429, "queue-full", "the queue is full: raise generation.maxQueuedTokens, or add replicas"),
    Reason.DEADLINE: (503, "deadline", "the deadline can't be met: send fewer requests at a time, or add replicas"),
}
"""Status, machine-readable reason and text of each refusal of the gate."""

EXPIRED = (504, "deadline", "the deadline passed before the answer was complete")

CANCELLED, FAILED, OVERDUE = "cancelled", "failed", "deadline"
"""Ends of a request, in addition to those that the engine reports."""

BROKEN = {f"upstream-{kind}" for kind in ("refused", "connect", "reset", "timeout", "protocol", "too-large")}
"""Error texts of the engine."""

TOO_LATE = {OVERDUE, *(word for _, word, _ in REFUSALS.values())}
"""Failures that other requests may have caused."""


class Watcher(Protocol):
    """Admits streams and counts them."""

    def arrive(self, stream: Stream) -> None:
        """Add a request whose body has arrived; it is admitted or refused, now or later."""

    def begun(self, stream: Stream) -> None:
        """Note that a successful answer has begun."""

    def shows(self, stream: Stream, *, streams: bool) -> None:
        """Note whether an answer shows its tokens one by one."""

    def begins(self, stream: Stream) -> None:
        """Note that an answer begins with an event without text."""

    def tokens(self, stream: Stream, events: int) -> None:
        """Count events with tokens."""

    def choice_ended(self, stream: Stream) -> None:
        """Note the end of one of several choices."""

    def left(self, stream: Stream, how: str, said: Ending | None) -> None:
        """Count a request that ended. ``said``: the engine's figures at the end of a complete answer."""

    def fault(self) -> None:
        """Count an error in reading a stream; its bytes are still passed on."""


class Stream(Forwarding):
    """A request that was read whole, and its answer, in a stream or whole.

    Nothing here changes what is forwarded: a fault in looking at it only ends the looking.
    """

    __slots__ = (
        "_done",
        "_events",
        "_overdue",
        "_watcher",
        "_whole",
        "asked",
        "choices",
        "endpoint",
        "ends",
        "events",
        "first_at",
        "headers",
        "last_at",
        "openings",
        "per_event",
        "status",
        "steps",
        "streams",
        "ticket",
    )

    ticket: Request

    def __init__(self, exchange: Exchange, pool: Pool, timeout: float, watcher: Watcher, endpoint: Endpoint) -> None:
        super().__init__(exchange, pool, timeout)
        self._watcher = watcher
        self._events: Events | None = None  # of an answer that comes in events
        self._overdue: asyncio.TimerHandle | None = None
        self._done = True  # nobody counts it
        self._whole = bytearray()  # of an answer that comes whole, with several choices
        self.endpoint = endpoint
        self.asked = Asked("", endpoint.streams is True, None, 0, None, flexible=False)
        self.streams = False
        """Whether the answer is requested, or arrives, token by token."""
        self.per_event = 1.0
        """Assumed tokens of an event."""
        self.events = 0
        """Events with a token so far."""
        self.choices = 1
        """Choices of a stream that have not ended; the last one is kept."""
        self.openings = 1
        """First tokens that have not arrived: one for each choice."""
        self.steps = 0.0
        """Events after the first, per choice: those of the longest choice."""
        self.first_at: float | None = None
        self.last_at = 0.0
        self.status = 0
        self.headers: Headers = ()
        self.ends = Ends()
        """The answer's first and last bytes."""

    @property
    def exchange(self) -> Exchange:
        """The request and its answer."""
        return self._exchange

    @property
    def sent_on(self) -> bool:
        """Whether the request was sent to the engine."""
        return self._call is not None

    @property
    def choices_ended(self) -> int | None:
        """Choices of a stream that have ended, if it has several; None if that is not visible."""
        return None if self._events is None else self._events.ends

    @property
    def longest(self) -> float:
        """The longest choice of an answer that came whole, over the mean of its choices; 1 if that is not visible."""
        return longest(self._whole, self.ticket.choices) if self._whole else 1.0

    @property
    def output_tokens(self) -> float:
        """Tokens so far, as far as they are visible."""
        return self.events * self.per_event

    def arrived(self, ticket: Request, deadline: float | None) -> None:
        """Start to count the request; ``deadline`` in seconds from now, if the caller named one."""
        self.ticket = ticket
        self.choices = self.openings = ticket.choices
        self.streams = self.asked.streams
        self._done = False
        if deadline is not None:
            self._overdue = asyncio.get_running_loop().call_later(max(0.0, deadline), self._expire)

    # Called by the application

    def request(self) -> None:
        """Ask the gate to admit the request."""
        try:
            self._watcher.arrive(self)
        except Exception:  # noqa: BLE001 - whatever it is, the request is good
            self._watcher.fault()
            self._leave(FAILED)
            if self._call is None and not self._exchange.ended:
                super().request()

    def cancel(self) -> None:
        """Stop: the client has disconnected. The engine's connection closes, so that it stops computing."""
        self._leave(CANCELLED)
        super().cancel()

    def sent(self) -> None:
        """Note that the answer is complete, the engine's or a refusal."""
        self._leave(str(self._exchange.status))

    # Called by the gate

    def admitted(self) -> None:
        """Send the request to the engine."""
        super().request()

    def refused(self, reason: Reason, seconds: float) -> None:
        """Answer with an error; no byte was sent before."""
        status, word, text = REFUSALS[reason]
        self._leave(word)
        self._error(status, word, text, [retry_after(seconds)])

    # Called with the engine's answer

    def answered(self, status: int, headers: Headers, body: bytes | memoryview) -> None:
        """Pass on an answer that arrived in one piece."""
        self._look(self._begun, status, headers)
        self._look(self._passed, bytes(body))
        self._look(self._ended)
        super().answered(status, headers, body)

    def head(self, status: int, headers: Headers) -> None:
        """Pass on the beginning of an answer."""
        super().head(status, headers)
        self._look(self._begun, status, headers)

    def data(self, chunk: bytes) -> None:
        """Pass on a piece of the answer, then read it."""
        self._exchange.write(chunk)
        if not self._done:
            self._look(self._passed, chunk)

    def end(self) -> None:
        """Pass on the end of the answer."""
        self._look(self._ended)
        super().end()

    def failed(self, error: UpstreamError) -> None:
        """Answer with an error; or cut the connection if an incomplete answer was already sent."""
        self._leave(FAILED)
        if self._exchange.started:
            super().failed(error)
        else:
            headers = [retry_after(1.0)] if error.kind in {"busy", "buffers-full"} else []
            self._error(error.status, error.reason, str(error), headers)

    # Looking

    def _look(self, look: Callable[..., None], *facts: object) -> None:
        try:
            look(*facts)
        except Exception:  # noqa: BLE001 - as above
            self._watcher.fault()
            self._leave(FAILED)

    def _begun(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        if not 200 <= status < 300:
            return
        # The request has served: a prompt of 100 KB is not held for as long as the answer takes.
        self._exchange.body = b""
        self._exchange.refund(self._exchange.buffered)
        kind = find(headers, b"content-type") or b""
        readable = find(headers, b"content-encoding") in {None, b"identity"}
        if readable and kind.lower().startswith(b"text/event-stream"):
            self._events = Events(self.endpoint.api, several=self.asked.choices > 1)
        self._watcher.begun(self)
        self._watcher.shows(self, streams=self._events is not None)

    def _passed(self, chunk: bytes) -> None:
        self.ends.add(chunk)
        if self._events is None:
            if self.ticket.choices > 1 and self.ends.size <= LONGEST_WHOLE:
                self._whole += chunk
            return
        before = self._events.ends
        if count := self._events.feed(chunk):
            self.events += count
            self._watcher.tokens(self, count)
        elif not self.events and self._events.begins(chunk):
            self._watcher.begins(self)
        for _ in range(self._events.ends - before):
            self._watcher.choice_ended(self)

    def _ended(self) -> None:
        if self._done or not 200 <= self.status < 300:
            self._leave(str(self.status))
            return
        said = ending(self.ends.text(), self.headers)
        if said.reason == ERROR:
            self._leave(FAILED)
        else:
            self._leave(said.reason or "other", said)

    def _leave(self, how: str, said: Ending | None = None) -> None:
        """Count the end, once; ``said``: the engine's figures at the end of a complete answer."""
        if self._done:
            return
        self._done = True
        if self._overdue is not None:
            self._overdue.cancel()
        try:
            self._watcher.left(self, how, said)
        except Exception:  # noqa: BLE001 - as above
            self._watcher.fault()

    def _expire(self) -> None:
        """Stop: the caller's deadline has passed."""
        if self._done:
            return
        started = self._exchange.started
        self._leave(OVERDUE)
        super().cancel()
        if started:
            self._exchange.abort()
        else:
            self._error(*EXPIRED, [])

    def _error(self, status: int, word: str, text: str, headers: Headers) -> None:
        """Answer with an error in the form that clients of the API expect."""
        broken = word in BROKEN
        if self.endpoint.api in {Api.OPENAI, Api.RESPONSES}:
            error = {"message": text, "type": "server_error" if broken else "overloaded", "param": None, "code": word}
            body = {"error": error, "reason": word}
            kind = (b"content-type", b"application/json")
            self._exchange.respond(status, [*headers, kind], msgspec.json.encode(body))
        elif self.endpoint.api is Api.MESSAGES:
            full = "rate_limit_error" if status == 429 else "overloaded_error"
            error = {"type": "api_error" if broken else full, "message": text}
            kind = (b"content-type", b"application/json")
            body = {"type": "error", "error": error, "reason": word}
            self._exchange.respond(status, [*headers, kind], msgspec.json.encode(body))
        else:
            self._exchange.fail(status, word, text, headers)
