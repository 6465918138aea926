"""Tasks under way: each is one request to the sidecar's own data port, until its answer, its end in time, or a cancel.

So batching, the gate for token streams, limits, deadlines and metrics apply to jobs as to all others. They have the
lowest priority (``x-carpool-priority: batch``).
"""

from __future__ import annotations

import asyncio
import secrets
from time import time
from typing import TYPE_CHECKING

from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.limits import ClientLimits
from carpool_sidecar.http1.messages import content_length, encode_request_head, find, forwardable
from carpool_sidecar.http1.timing import NEVER
from carpool_sidecar.jobs.records import Answer, Outcome
from carpool_sidecar.protocols.headers import PRIORITY

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_sidecar.config.settings import Bodies, Jobs
    from carpool_sidecar.http1.client.calls import Call
    from carpool_sidecar.http1.client.errors import UpstreamError
    from carpool_sidecar.http1.messages import Headers
    from carpool_sidecar.http1.server.server import Server
    from carpool_sidecar.jobs.headroom import Headroom
    from carpool_sidecar.jobs.records import Place, Rest, Task

NOT_NOW = frozenset({429, 503})
"""Statuses of a request that was not accepted: it returns to the queue, and this was no attempt."""

UNCERTAIN = frozenset({502, 504})
"""Statuses after which the model may have computed it."""


class DataPort:
    """The connection to the data port: a socket without a file, visible only in this pod."""

    def __init__(self, settings: Jobs, bodies: Bodies, credential: bytes | None) -> None:
        self._settings, self._bodies, self._credential = settings, bodies, credential
        self._pool: Pool | None = None

    async def open(self, server: Server) -> None:
        """Let the server listen on the socket, and prepare to send."""
        path = f"\0carpool-{secrets.token_hex(16)}"
        await server.listen_unix(path)
        self._pool = Pool(
            path=path,
            max_connections=self._settings.max_in_flight,
            limits=ClientLimits(max_body_bytes=int(self._bodies.largest_answer)),
            budget=server.budget,
        )

    def send(self, flight: Flight, left: float) -> Call:
        """Send a task that has ``left`` seconds."""
        assert self._pool is not None  # noqa: S101 - for the type checker: it is opened first
        call = flight.task.call
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in call.headers]
        if self._credential is not None:
            headers.append((b"authorization", self._credential))
        if call.body or call.method not in {"GET", "DELETE"}:
            headers.append(content_length(len(call.body)))
        # The flight's timer ends it. The header's deadline is one millisecond later and keeps late requests out of
        # batches.
        milliseconds = b"%d" % (left * 1000 + 1)
        headers += [(b"host", b"localhost"), (PRIORITY, b"batch"), (b"x-request-timeout-ms", milliseconds)]
        head = encode_request_head(call.method.encode(), call.target.encode(), headers)
        # Until then the model may take any time: the data port enforces `upstream.timeout`.
        return self._pool.send(head, call.body, flight, timeout=NEVER)

    async def close(self) -> None:
        """Abort all that is under way."""
        if self._pool is not None:
            await self._pool.close()


class Flight:
    """One task under way."""

    __slots__ = ("_flights", "call", "task", "timer")

    def __init__(self, flights: Flights, task: Task) -> None:
        self._flights = flights
        self.task = task
        self.call: Call | None = None
        self.timer: asyncio.TimerHandle | None = None

    def answered(self, status: int, headers: Headers, body: bytes | memoryview) -> None:
        """Take the answer: the model's, or a refusal."""
        self._flights.landed(self, Answer(status, [*forwardable(headers)], bytes(body)))

    def failed(self, error: UpstreamError) -> None:
        """Handle a broken connection to the sidecar itself, as when it ends."""
        self._flights.lost(self, error)

    def stop(self) -> None:
        """End the request, if it is still under way: its connection closes, and the model's with it."""
        if self.timer is not None:
            self.timer.cancel()
        if self.call is not None:
            self.call.cancel()


class Flights:
    """All tasks under way, and the outcomes of those that ended. ``wake`` is called when one has ended."""

    def __init__(self, port: DataPort, headroom: Headroom, *, idempotent: bool, wake: Callable[[], None]) -> None:
        self.idempotent = idempotent
        self.aborting = False
        """Whether this process ends: lost tasks are left to the next one."""
        self.outcomes: list[Outcome] = []
        """Outcomes that are not stored yet."""
        self._port, self._headroom, self._wake = port, headroom, wake
        self._clock = asyncio.get_running_loop().time
        self._under_way: dict[int | Place, Flight] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def start(self, task: Task) -> None:
        """Send a task."""
        left = max(0.0, task.expires - time())
        flight = self._under_way[task.of] = Flight(self, task)
        expired = Outcome(task.of, None, "expired")
        flight.timer = asyncio.get_running_loop().call_later(left, self._ended, flight, expired)
        flight.call = self._port.send(flight, left)

    def cancel(self, of: int | Place) -> None:
        """Give up a task that is under way."""
        self._drop(of)
        self._wake()

    def rest(self) -> Rest:
        """Return how many may begin on paths that refused."""
        return self._headroom.rest((flight.task.call.path for flight in self._under_way.values()), self._clock())

    # Called by flights

    def landed(self, flight: Flight, answer: Answer) -> None:
        """Take an answer."""
        now = self._clock()
        status, of = answer.status, flight.task.of
        if status in NOT_NOW:
            after = find(answer.headers, b"retry-after") or b""
            self._headroom.refused(flight.task.call.path, float(after) if after.isdigit() else 0.0, now)
            self._ended(flight, Outcome(of, answer, f"status-{status}", again=True, reached=False))
            return
        self._headroom.answered(flight.task.call.path)
        uncertain = status in UNCERTAIN
        reason = None if 200 <= status < 300 else f"status-{status}"
        self._ended(flight, Outcome(of, answer, reason, again=uncertain and self.idempotent))

    def lost(self, flight: Flight, error: UpstreamError) -> None:
        """Handle a missing answer."""
        if error.kind == "too-large":
            self._ended(flight, Outcome(flight.task.of, None, "too-large"))
        elif self.aborting:
            self._drop(flight.task.of)  # as if the process had been killed: the next one recovers it
        elif error.kind in {"refused", "connect"}:
            self._headroom.refused(flight.task.call.path, 0.0, self._clock())
            self._ended(flight, Outcome(flight.task.of, None, "connection-refused", again=True, reached=False))
        else:
            self._ended(flight, Outcome(flight.task.of, None, f"connection-{error.kind}", again=self.idempotent))

    def _ended(self, flight: Flight, outcome: Outcome) -> None:
        if self._drop(flight.task.of):
            self.outcomes.append(outcome)
            self._wake()

    def _drop(self, of: int | Place) -> bool:
        """Remove a task from those under way; return whether it was one."""
        flight = self._under_way.pop(of, None)
        if flight is not None:
            flight.stop()
        return flight is not None
