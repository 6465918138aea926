"""Runs jobs: tasks from the store are sent through the sidecar's own data port, like any caller's request.

So batching, the gate for token streams, limits, deadlines and metrics apply to jobs as to all others. They have the
lowest priority (``x-carpool-priority: batch``).
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from time import time
from typing import TYPE_CHECKING

from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.limits import ClientLimits
from carpool_sidecar.http1.messages import content_length, encode_request_head, find, forwardable
from carpool_sidecar.http1.timing import NEVER
from carpool_sidecar.jobs.headroom import Headroom
from carpool_sidecar.jobs.records import Answer, Outcome, Place, Task
from carpool_sidecar.protocols.headers import PRIORITY

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from carpool_sidecar.config.settings import SidecarConfig
    from carpool_sidecar.http1.client.calls import Call, UpstreamError
    from carpool_sidecar.http1.messages import Headers
    from carpool_sidecar.http1.server.server import Server
    from carpool_sidecar.jobs.headroom import Seen
    from carpool_sidecar.jobs.records import Rest
    from carpool_sidecar.jobs.storage.batches import Batches
    from carpool_sidecar.jobs.storage.jobs import JobStore
    from carpool_sidecar.jobs.storage.writer import Writer

LOOK = 0.05
"""Seconds between two checks of the device while jobs wait for it."""

SWEEP = 30.0
"""Seconds between two sweeps for what may be deleted."""

NOT_NOW = frozenset({429, 503})
"""Statuses of a request that was not accepted: it returns to the queue, and this was no attempt."""

UNCERTAIN = frozenset({502, 504})
"""Statuses after which the model may have computed it."""


class Flight:
    """One task under way."""

    __slots__ = ("_runner", "call", "task", "timer")

    def __init__(self, runner: Runner, task: Task) -> None:
        self._runner = runner
        self.task = task
        self.call: Call | None = None
        self.timer: asyncio.TimerHandle | None = None

    def answered(self, status: int, headers: Headers, body: bytes | memoryview) -> None:
        """Take the answer: the model's, or a refusal."""
        self._runner.landed(self, Answer(status, [*forwardable(headers)], bytes(body)))

    def failed(self, error: UpstreamError) -> None:
        """Handle a broken connection to the sidecar itself, as when it ends."""
        self._runner.lost(self, error)

    def stop(self) -> None:
        """End the request, if it is still under way: its connection closes, and the model's with it."""
        if self.timer is not None:
            self.timer.cancel()
        if self.call is not None:
            self.call.cancel()


class Runner:
    """Starts tasks while there is headroom. ``look`` returns the counts so far."""

    def __init__(
        self,
        config: SidecarConfig,
        writer: Writer,
        store: JobStore,
        batches: Batches,
        *,
        look: Callable[[], Seen],
        ready: Callable[[], bool],
        credential: bytes | None,
        log: logging.Logger,
    ) -> None:
        assert config.jobs is not None  # noqa: S101 - for the type checker: there is no runner without
        self.headroom = Headroom(config.jobs.max_in_flight)
        self.configure(config)
        self.stopping = False
        """Whether no more tasks are started."""
        self.flights: dict[int | Place, Flight] = {}
        self._settings, self._bodies = config.jobs, config.bodies
        self._writer, self._store, self._batches = writer, store, batches
        self._look, self._ready, self._credential, self._log = look, ready, credential, log
        self._clock = asyncio.get_running_loop().time
        self._outcomes: list[Outcome] = []
        self._places = 0
        """Tasks started since batches last had their share."""
        self._closing = False
        self._wanted = asyncio.Event()
        self._pool: Pool | None = None

    def configure(self, config: SidecarConfig) -> None:
        """Take another version of the configuration."""
        self.idempotent = config.policy.idempotent
        self.headroom.allowed = 1 - config.policy.slo.percentiles[-1][0]

    async def listen(self, server: Server) -> None:
        """Open a connection to the data port: a socket without a file, visible only in this pod."""
        path = f"\0carpool-{secrets.token_hex(16)}"
        await server.listen_unix(path)
        self._pool = Pool(
            path=path,
            max_connections=self._settings.max_in_flight,
            limits=ClientLimits(max_body_bytes=int(self._bodies.largest_answer)),
            budget=server.budget,
        )

    def wake(self) -> None:
        """Wake the loop: there may be something to run."""
        self._wanted.set()

    def cancel(self, of: int | Place) -> None:
        """Give up a task that is under way."""
        self._drop(of)
        self.wake()

    async def run(self) -> None:
        """Take and send tasks until `close`."""
        swept, more = self._clock() - SWEEP, True
        sweeping = False
        while not self._closing or self._outcomes:
            now = self._clock()
            if (sweeping or now - swept >= SWEEP) and not self._closing:
                sweeping, swept = await self._sweep(), now
            self.headroom.update(self._look(), now)
            room = 0 if self.stopping or not self._ready() else self.headroom.room(len(self.flights), now)
            self._wanted.clear()
            if self._outcomes or (room and more):
                more = await self._turn(room)
                continue
            # Waiting tasks may begin as soon as the device has time. If none waits, a new one wakes the loop.
            waits = self._store.totals["queued"] or self._store.totals["lines"]
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK if waits or sweeping else SWEEP):
                    await self._wanted.wait()
            more = True

    async def close(self) -> None:
        """Abort tasks under way, and store the answers received.

        The next process finds the aborted ones running, and reports them.
        """
        self.stopping = True
        if self._pool is not None:
            await self._pool.close()
        self._closing = True
        self.wake()

    # ------------------------------------------------------------------------------------------------- outcomes

    def landed(self, flight: Flight, answer: Answer) -> None:
        """Take an answer."""
        now = self._clock()
        status, of = answer.status, flight.task.of
        if status in NOT_NOW:
            after = find(answer.headers, b"retry-after") or b""
            self.headroom.refused(flight.task.call.path, float(after) if after.isdigit() else 0.0, now)
            self._ended(flight, Outcome(of, answer, f"status-{status}", again=True, reached=False))
            return
        self.headroom.answered(flight.task.call.path)
        uncertain = status in UNCERTAIN
        reason = None if 200 <= status < 300 else f"status-{status}"
        self._ended(flight, Outcome(of, answer, reason, again=uncertain and self.idempotent))

    def lost(self, flight: Flight, error: UpstreamError) -> None:
        """Handle a missing answer."""
        if error.kind == "too-large":
            self._ended(flight, Outcome(flight.task.of, None, "too-large"))
        elif self.stopping:
            self._drop(flight.task.of)  # as if the process had been killed: the next one recovers it
        elif error.kind in {"refused", "connect"}:
            self.headroom.refused(flight.task.call.path, 0.0, self._clock())
            self._ended(flight, Outcome(flight.task.of, None, "connection-refused", again=True, reached=False))
        else:
            self._ended(flight, Outcome(flight.task.of, None, f"connection-{error.kind}", again=self.idempotent))

    def _ended(self, flight: Flight, outcome: Outcome) -> None:
        if self._drop(flight.task.of):
            self._outcomes.append(outcome)
            self.wake()

    def _drop(self, of: int | Place) -> bool:
        """Remove a task from those under way; return whether it was one."""
        flight = self.flights.pop(of, None)
        if flight is not None:
            flight.stop()
        return flight is not None

    # ------------------------------------------------------------------------------------------------- the store

    async def _turn(self, room: int) -> bool:
        """Store the answers, claim the next tasks and send them; return whether there may be more."""
        outcomes, self._outcomes = self._outcomes, []
        try:
            rest = self.headroom.rest((flight.task.call.path for flight in self.flights.values()), self._clock())
            tasks = await self._writer.do(lambda: self._exchange(outcomes, room, rest, time()))
        except Exception:  # noqa: BLE001 - a full disk, mostly: nothing is lost while this process lives
            self._outcomes = outcomes + self._outcomes
            self._log.exception("jobs.path can't be written; no job is started until it can")
            if self._closing:
                self._outcomes = []  # the next process finds them running, and reports them
            else:
                await asyncio.sleep(1.0)
            return False
        for task in tasks:
            self._send(task)
        return bool(tasks) or not room

    def _exchange(self, outcomes: list[Outcome], room: int, rest: Rest, now: float) -> list[Task]:
        for outcome in outcomes:
            (self._batches if isinstance(outcome.of, Place) else self._store).finish(outcome, now)
        if not room or self._store.totals["bytes"] >= int(self._settings.max_bytes):
            return []
        # Jobs leave batches one place in four.
        self._places += room
        share = min(room, self._places // 4)
        self._places -= 4 * share
        tasks = self._batches.claim(share, now, rest) if share else []
        tasks += self._store.claim(room - len(tasks), now, rest)
        if len(tasks) < room:
            tasks += self._batches.claim(room - len(tasks), now, rest)
        return tasks

    async def _sweep(self) -> bool:
        """Delete what was kept long enough; return whether there is more."""
        try:
            return await self._writer.do(lambda: self._store.sweep(time()) | self._batches.sweep(time()))
        except Exception:  # noqa: BLE001 - likewise
            self._log.exception("jobs.path can't be swept")
            return False

    def _send(self, task: Task) -> None:
        assert self._pool is not None  # noqa: S101 - for the type checker: it listens first
        call = task.call
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in call.headers]
        if self._credential is not None:
            headers.append((b"authorization", self._credential))
        if call.body or call.method not in {"GET", "DELETE"}:
            headers.append(content_length(len(call.body)))
        # The timer ends it. The header's deadline is one millisecond later and keeps late requests out of batches.
        left = max(0.0, task.expires - time())
        milliseconds = b"%d" % (left * 1000 + 1)
        headers += [(b"host", b"localhost"), (PRIORITY, b"batch"), (b"x-request-timeout-ms", milliseconds)]
        head = encode_request_head(call.method.encode(), call.target.encode(), headers)
        flight = self.flights[task.of] = Flight(self, task)
        expired = Outcome(task.of, None, "expired")
        flight.timer = asyncio.get_running_loop().call_later(left, self._ended, flight, expired)
        # Until then the model may take any time: the data port enforces `upstream.timeout`.
        flight.call = self._pool.send(head, call.body, flight, timeout=NEVER)
