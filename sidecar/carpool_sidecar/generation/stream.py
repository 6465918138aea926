"""One forwarded request to a language model: bytes are passed on at once, and examined afterwards."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import msgspec

from carpool.generation.requests import Reason
from carpool_sidecar.dispatch.answers import retry_after
from carpool_sidecar.generation.answer_reader import AnswerReader
from carpool_sidecar.generation.answers import ERROR, Ending
from carpool_sidecar.generation.progress import StreamProgress
from carpool_sidecar.generation.requests import Api, Asked
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

    __slots__ = ("_done", "_overdue", "_watcher", "answer", "asked", "endpoint", "progress", "streams", "ticket")

    ticket: Request

    def __init__(self, exchange: Exchange, pool: Pool, timeout: float, watcher: Watcher, endpoint: Endpoint) -> None:
        super().__init__(exchange, pool, timeout)
        self._watcher = watcher
        self._overdue: asyncio.TimerHandle | None = None
        self._done = True  # nobody counts it
        self.endpoint = endpoint
        self.asked = Asked("", endpoint.streams is True, None, 0, None, flexible=False)
        self.streams = False
        """Whether the answer is requested, or arrives, token by token."""
        self.progress = StreamProgress()
        self.answer = AnswerReader()

    @property
    def exchange(self) -> Exchange:
        """The request and its answer."""
        return self._exchange

    @property
    def sent_on(self) -> bool:
        """Whether the request was sent to the engine."""
        return self._call is not None

    def arrived(self, ticket: Request, per_event: float, deadline: float | None) -> None:
        """Start to count the request.

        ``per_event``: assumed tokens of an event. ``deadline`` in seconds from now, if the caller named one.
        """
        self.ticket = ticket
        self.progress = StreamProgress(ticket.choices, per_event)
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
        answer = self.answer
        answer.begin(status, headers, self.endpoint.api, several=self.asked.choices > 1)
        if not answer.succeeded:
            return
        # The request has served: a prompt of 100 KB is not held for as long as the answer takes.
        self._exchange.body = b""
        self._exchange.refund(self._exchange.buffered)
        self._watcher.begun(self)
        self._watcher.shows(self, streams=answer.in_events)

    def _passed(self, chunk: bytes) -> None:
        answer, progress = self.answer, self.progress
        before = answer.choices_ended or 0
        count = answer.add(chunk)
        if not answer.in_events:
            if self.ticket.choices > 1:
                answer.keep(chunk)
            return
        if count:
            progress.events += count
            self._watcher.tokens(self, count)
        elif not progress.events and answer.begins(chunk):
            self._watcher.begins(self)
        for _ in range((answer.choices_ended or 0) - before):
            self._watcher.choice_ended(self)

    def _ended(self) -> None:
        answer = self.answer
        if self._done or not answer.succeeded:
            self._leave(str(answer.status))
            return
        said = answer.ending()
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
