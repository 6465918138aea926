"""Endpoints for the kubelet and Prometheus: /livez, /readyz, /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from carpool_operator.reporting.metrics import OperatorMetrics


class Health:
    """Serves the three. A check returns the problem, ``""`` for none."""

    def __init__(self, metrics: OperatorMetrics, *, live: Callable[[], str], ready: Callable[[], str]) -> None:
        self.port = 0
        """The port it listens on, once started."""
        self._metrics = metrics
        application = web.Application()
        application.add_routes(
            [
                web.get("/livez", _probe(live)),
                web.get("/readyz", _probe(ready)),
                web.get("/metrics", self._scrape),
            ]
        )
        # A log line per request, every few seconds, would be useless.
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)

    async def start(self, host: str | None, port: int) -> None:
        """Start listening.

        Raises ``OSError`` if the port is not available.
        """
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    async def _scrape(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"content-type": "text/plain; version=1.0.0"})


def _probe(check: Callable[[], str]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def probe(_: web.Request) -> web.Response:
        wrong = check()
        return web.Response(status=503 if wrong else 200, text=f"{wrong or 'ok'}\n")

    return probe
