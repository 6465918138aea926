"""One exchange of the jobs' interface, and its errors."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING

import msgspec

from carpool_sidecar.http1.server.intake import BUFFERS_FULL
from carpool_sidecar.jobs.records import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from carpool_sidecar.http1.server.exchange import Exchange

JSON = [(b"content-type", b"application/json")]

_RETRY = [(b"retry-after", b"5")]


class Aside:
    """The context of an exchange about jobs that is not itself a job."""


class Handling(Aside):
    """An exchange's context: ``work`` answers it."""

    def __init__(
        self, exchange: Exchange, work: Callable[[Exchange], Coroutine[None, None, None]], *, openai: bool
    ) -> None:
        """``openai``: errors have the form that OpenAI's clients read."""
        self._exchange = exchange
        self._work = work
        self._openai = openai
        self._task: asyncio.Task[None] | None = None

    def request(self) -> None:
        """Begin: the request is complete."""
        self._task = asyncio.get_running_loop().create_task(self._answer())

    def cancel(self) -> None:
        """Give up: the client is gone. Work already handed to the store is still done."""
        if self._task is not None:
            self._task.cancel()

    async def _answer(self) -> None:
        try:
            await self._work(self._exchange)
        except Refused as refused:
            self.refuse(refused)
        except Exception:
            logging.getLogger("carpool").exception("a request about jobs failed")
            self.refuse(Refused(503, "jobs-store", "jobs.path can't be read or written; the sidecar's log says why"))

    def refuse(self, refused: Refused) -> None:
        """Answer with an error, or abort an answer that has begun."""
        exchange = self._exchange
        if exchange.started:
            exchange.abort()
            return
        headers = _RETRY if refused.status in {429, 503} else []
        if refused.methods:
            headers = [(b"allow", refused.methods.encode())]
        if self._openai:
            kind = "invalid_request_error" if refused.status < 500 else "server_error"
            error = {"message": str(refused), "type": kind, "param": None, "code": refused.reason}
            body = msgspec.json.encode({"error": error, "reason": refused.reason})
            exchange.respond(refused.status, [*headers, *JSON], body)
        else:
            exchange.fail(refused.status, refused.reason, str(refused), headers)


def respond(exchange: Exchange, status: int, plain: object, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Answer with JSON."""
    exchange.respond(status, [*(headers or []), *JSON], msgspec.json.encode(plain) + b"\n")


def no_room(what: str) -> Refused:
    """Return the refusal of what the budget for bodies has no room for."""
    return Refused(503, BUFFERS_FULL, f"bodies.maxBuffered has no room for {what}: try again later, or raise it")


class JobsPage:
    """The requested part of a list: ``?limit=20&after=ID``."""

    def __init__(self, query: bytes) -> None:
        from urllib.parse import parse_qs  # noqa: PLC0415 - only lists need it

        given = parse_qs(query.decode("latin-1"))
        text = given.get("limit", ["20"])[-1]
        if not re.fullmatch("[1-9][0-9]?|100", text):
            raise Refused(400, "jobs-malformed", f"limit={text[:20]!r}: write a number from 1 to 100")
        self.limit = int(text)
        self.after = given.get("after", [None])[-1]


class Gauge:
    """Backpressure of an answer that is sent in pieces."""

    def __init__(self) -> None:
        self._free = asyncio.Event()
        self._free.set()

    def pause_writing(self) -> None:
        """Pause the writer."""
        self._free.clear()

    def resume_writing(self) -> None:
        """Resume the writer."""
        self._free.set()

    async def wait(self) -> None:
        """Wait until the client takes more."""
        await self._free.wait()
