"""Connections that speak something else than HTTP/1.1: passed through as they are, to a connection of their own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from carpool_sidecar.http1.client.calls import UpstreamError

if TYPE_CHECKING:
    from carpool_sidecar.http1.client.pool import Pool
    from carpool_sidecar.http1.server.exchange import Exchange


class Passage:
    """One such connection on its way to the upstream. Where that can't be reached, it is cut."""

    __slots__ = ("_exchange", "_pool", "_task", "_timeout")

    def __init__(self, exchange: Exchange, pool: Pool, timeout: float) -> None:
        self._exchange = exchange
        self._pool = pool
        self._timeout = timeout
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Ask for a connection; until it is there, the client has to wait with more than it has sent."""
        if self._exchange.await_switch():
            self._task = asyncio.get_running_loop().create_task(self._connect())
        else:
            self._exchange.abort()

    def request(self) -> None:
        """Nothing of it is read."""

    def cancel(self) -> None:
        """Give up."""
        if self._task is not None:
            self._task.cancel()

    async def _connect(self) -> None:
        try:
            link = await self._pool.tunnel(patience=self._timeout)
        except UpstreamError as error:
            self._exchange.status = error.status
            self._exchange.abort()
        else:
            self._exchange.splice(link)
