"""The end of a sidecar: no accepted request is lost."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from carpool_sidecar.admin.health import INTERVAL

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Coroutine

    from carpool_sidecar.admin.health import Health
    from carpool_sidecar.config import settings
    from carpool_sidecar.dispatch.driver import Driver
    from carpool_sidecar.http1.server.server import Server
    from carpool_sidecar.jobs.desk import Desk

OUTLIVED = 2.0
"""Seconds after a drain from which a model that still answers counts as staying: two health checks."""


class Shutdown:
    """Drains the data port, once. ``spawn`` runs work in the background until the sidecar closes."""

    def __init__(
        self,
        data: Server,
        driver: Driver,
        jobs: Desk | None,
        health: Health,
        log: logging.Logger,
        spawn: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        self.outlived = asyncio.Event()
        """Set when a drain is over and the model still runs: it then needs a sidecar that serves."""
        self._data, self._driver, self._jobs, self._health = data, driver, jobs, health
        self._log, self._spawn = log, spawn
        self._drained: asyncio.Task[None] | None = None

    async def drain(self, times: settings.Shutdown) -> None:
        """Report unready, accept requests while load balancers catch up, then finish; later calls wait too."""
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_task(self._drain(times))
        await asyncio.shield(self._drained)

    async def _drain(self, times: settings.Shutdown) -> None:
        # 1. No new callers are sent here, and connections close after their answer.
        self._data.drain()
        if self._jobs is not None:
            self._jobs.drain()
        self._log.info("draining", extra={"accepting_seconds": float(times.lame), "limit_seconds": float(times.limit)})
        batcher = self._driver.batcher
        try:
            async with asyncio.timeout(times.limit):
                await asyncio.sleep(times.lame)
                # 2. Accepted requests get an answer; none is held for others any more.
                self._data.stop_accepting()
                self._driver.do(batcher.drain(monotonic()))
                self._data.close_idle()
                await self._data.wait_idle()
        except TimeoutError:
            self._log.warning("the drain took too long", extra={"unanswered": self._data.busy})
        # 3. Any further request is refused.
        batcher.close()
        self._log.info("drained")
        self._spawn(self._outlive())

    async def _outlive(self) -> None:
        # The kubelet also calls a preStop hook before it restarts one container whose liveness probe fails. When a pod
        # ends, the model may also answer for a while; then no request is left that could be lost by ending early.
        await asyncio.sleep(OUTLIVED)
        while not self._health.ready:  # noqa: ASYNC110 - which is looked at as often
            await asyncio.sleep(INTERVAL)
        self.outlived.set()
