"""Connections with other protocols than HTTP/1.1: each is passed through unchanged over its own connection."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from carpool_sidecar.http1.client.errors import UpstreamError

if TYPE_CHECKING:
    from carpool_sidecar.http1.client.pool import Pool
    from carpool_sidecar.http1.server.exchange import Exchange


class Passage:
    """One such connection to the upstream. It is cut if the upstream can't be reached."""

    __slots__ = ("_exchange", "_pool", "_task", "_timeout")

    def __init__(self, exchange: Exchange, pool: Pool, timeout: float) -> None:
        self._exchange = exchange
        self._pool = pool
        self._timeout = timeout
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Ask for a connection; until it is open, no further data of the client are read."""
        if self._exchange.await_switch():
            self._task = asyncio.get_running_loop().create_task(self._connect())
        else:
            self._exchange.abort()

    def request(self) -> None:
        """Do nothing: no request is parsed."""

    def cancel(self) -> None:
        """Cancel the attempt to connect."""
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
