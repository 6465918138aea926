"""Listening sockets and the connections they accept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from carpool_sidecar.http1.connection import Connection
from carpool_sidecar.http1.limits import ServerLimits
from carpool_sidecar.http1.timing import Ticker

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_sidecar.http1.exchange import Application


class Server:
    """Serves an application over HTTP/1.1 on any number of sockets of the running loop.

    `clock` gives monotonic seconds; by default the loop's. uvloop's own clock has whole milliseconds and stands still
    within one turn of the loop: pass `time.monotonic` where shorter times matter.
    """

    def __init__(
        self, app: Application, limits: ServerLimits | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self.app = app
        self.limits = limits or ServerLimits()
        self.clock = clock or asyncio.get_running_loop().time
        self.draining = False
        self.waited_for = False  # somebody waits for the last answer
        self.buffered_bytes = 0
        """Bytes held of request bodies: of those that are not complete yet, and of those not answered yet."""
        self._connections: set[Connection] = set()
        self._listeners: list[asyncio.Server] = []
        self._idle = asyncio.Event()
        self._ticker = Ticker(self.limits.tick, self._expire, self.clock)

    async def listen(self, host: str, port: int, *, reuse_port: bool = False, backlog: int = 1024) -> None:
        """Accept connections on a TCP address; port 0 lets the system choose (see `addresses`)."""
        loop = asyncio.get_running_loop()
        self._listeners.append(
            await loop.create_server(self.protocol, host, port, reuse_port=reuse_port, backlog=backlog)
        )

    async def listen_unix(self, path: str, *, backlog: int = 1024) -> None:
        """Accept connections on a Unix socket."""
        loop = asyncio.get_running_loop()
        self._listeners.append(await loop.create_unix_server(self.protocol, path, backlog=backlog))

    def protocol(self) -> Connection:
        """Return the protocol of a new connection, for sockets accepted elsewhere."""
        return Connection(self)

    @property
    def addresses(self) -> list[Any]:
        """The addresses listened on: (host, port, ...) for TCP, a path for a Unix socket."""
        return [listening.getsockname() for listener in self._listeners for listening in listener.sockets]

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    @property
    def busy(self) -> int:
        """How many connections read or answer a request."""
        return sum(not connection.idle for connection in self._connections)

    # The steps of a graceful end, in this order

    def drain(self) -> None:
        """Go on serving, but let each connection end with its next answer (`Connection: close`)."""
        self.draining = True

    def stop_accepting(self) -> None:
        """Take no new connections."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def close_idle(self) -> None:
        """Close the connections that wait for a next request."""
        for connection in tuple(self._connections):
            if connection.idle:
                connection.close()

    async def wait_idle(self) -> None:
        """Return once no connection has a request that is not answered."""
        self.waited_for = True
        while self.busy:
            self._idle.clear()
            await self._idle.wait()
        self.waited_for = False

    def abort(self) -> None:
        """Cut every connection, whatever is under way."""
        for connection in tuple(self._connections):
            connection.abort()

    # Called by the connections

    def opened(self, connection: Connection) -> bool:
        """Count a new connection in; return whether there was room for it."""
        self._connections.add(connection)
        self._ticker.start()
        return len(self._connections) <= self.limits.max_connections

    def closed(self, connection: Connection) -> None:
        """Count a connection out."""
        self._connections.discard(connection)
        self._idle.set()

    def became_idle(self) -> None:
        """Look again whether all is answered."""
        self._idle.set()

    def _expire(self, now: float) -> bool:
        for connection in tuple(self._connections):
            connection.expire(now)
        return bool(self._connections)
