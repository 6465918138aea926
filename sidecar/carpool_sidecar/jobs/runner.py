"""Runs jobs: takes tasks from the store while there is headroom, and stores their outcomes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import time
from typing import TYPE_CHECKING

from carpool_sidecar.jobs.flights import DataPort, Flights
from carpool_sidecar.jobs.headroom import Headroom

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from carpool_sidecar.config.settings import Jobs, SidecarConfig
    from carpool_sidecar.http1.server.server import Server
    from carpool_sidecar.jobs.backlog import Backlog
    from carpool_sidecar.jobs.headroom import Seen
    from carpool_sidecar.jobs.storage.writer import Writer

LOOK = 0.05
"""Seconds between two checks of the device while jobs wait for it."""

SWEEP = 30.0
"""Seconds between two sweeps for what may be deleted."""


class Runner:
    """Starts tasks while there is headroom. ``look`` returns the counts so far."""

    def __init__(
        self,
        config: SidecarConfig,
        settings: Jobs,
        writer: Writer,
        backlog: Backlog,
        *,
        look: Callable[[], Seen],
        ready: Callable[[], bool],
        credential: bytes | None,
        log: logging.Logger,
    ) -> None:
        self.headroom = Headroom(settings.max_in_flight)
        self._port = DataPort(settings, config.bodies, credential)
        self.flights = Flights(self._port, self.headroom, idempotent=config.policy.idempotent, wake=self.wake)
        self.configure(config)
        self._writer, self._backlog = writer, backlog
        self._look, self._ready, self._log = look, ready, log
        self._clock = asyncio.get_running_loop().time
        self.stopping = False
        """Whether no more tasks are started."""
        self._closing = False
        self._wanted = asyncio.Event()

    def configure(self, config: SidecarConfig) -> None:
        """Take another version of the configuration."""
        self.flights.idempotent = config.policy.idempotent
        self.headroom.allowed = 1 - config.policy.slo.percentiles[-1][0]

    async def listen(self, server: Server) -> None:
        """Open a connection to the data port."""
        await self._port.open(server)

    def wake(self) -> None:
        """Wake the loop: there may be something to run."""
        self._wanted.set()

    async def run(self) -> None:
        """Take and send tasks until `close`."""
        swept, more = self._clock() - SWEEP, True
        sweeping = False
        while not self._closing or self.flights.outcomes:
            now = self._clock()
            if (sweeping or now - swept >= SWEEP) and not self._closing:
                sweeping, swept = await self._sweep(), now
            self.headroom.update(self._look(), now)
            room = 0 if self.stopping or not self._ready() else self.headroom.room(len(self.flights), now)
            self._wanted.clear()
            if self.flights.outcomes or (room and more):
                more = await self._turn(room)
                continue
            # Waiting tasks may begin as soon as the device has time. If none waits, a new one wakes the loop.
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK if self._backlog.waits or sweeping else SWEEP):
                    await self._wanted.wait()
            more = True

    def stop(self) -> None:
        """Start no more tasks; those under way go on."""
        self.stopping = True

    async def close(self) -> None:
        """Abort tasks under way, and store the answers received.

        The next process finds the aborted ones running, and reports them.
        """
        self.stop()
        self.flights.aborting = True
        await self._port.close()
        self._closing = True
        self.wake()

    async def _turn(self, room: int) -> bool:
        """Store the outcomes, claim the next tasks and send them; return whether there may be more."""
        flights = self.flights
        outcomes, flights.outcomes = flights.outcomes, []
        try:
            rest = flights.rest()
            tasks = await self._writer.do(lambda: self._backlog.exchange(outcomes, room, rest, time()))
        except Exception:  # noqa: BLE001 - a full disk, mostly: nothing is lost while this process lives
            flights.outcomes = outcomes + flights.outcomes
            self._log.exception("jobs.path can't be written; no job is started until it can")
            if self._closing:
                flights.outcomes = []  # the next process finds them running, and reports them
            else:
                await asyncio.sleep(1.0)
            return False
        for task in tasks:
            flights.start(task)
        return bool(tasks) or not room

    async def _sweep(self) -> bool:
        """Delete what was kept long enough; return whether there is more."""
        try:
            return await self._writer.do(lambda: self._backlog.sweep(time()))
        except Exception:  # noqa: BLE001 - likewise
            self._log.exception("jobs.path can't be swept")
            return False
