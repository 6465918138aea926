"""Listening sockets and the connections they accept."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from carpool_sidecar.http1.limits import ServerLimits
from carpool_sidecar.http1.memory import Budget
from carpool_sidecar.http1.server.connection import Connection
from carpool_sidecar.http1.server.connections import Connections
from carpool_sidecar.http1.sockets import ANYWHERE, everywhere
from carpool_sidecar.http1.timing import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool_sidecar.http1.server.application import Application
    from carpool_sidecar.http1.server.exchange import Exchange


class Server:
    """Serves an application over HTTP/1.1 on any number of sockets of the running loop.

    `clock` gives monotonic seconds; by default the loop's. uvloop's own clock has whole milliseconds and stands still
    within one turn of the loop: pass `time.monotonic` where shorter times matter. `budget` and `turns` are its own
    unless they are given: what shares the memory and the thread of one data path shares these.
    """

    def __init__(
        self,
        app: Application,
        limits: ServerLimits | None = None,
        clock: Callable[[], float] | None = None,
        *,
        budget: Budget | None = None,
        turns: Turns | None = None,
        passage: Callable[[Exchange], None] | None = None,
    ) -> None:
        self.app = app
        self.passage = passage
        """Takes a connection that begins with something else than HTTP/1.1; None: it is answered with an error."""
        self.limits = limits or ServerLimits()
        self.clock = clock or asyncio.get_running_loop().time
        self.budget = budget or Budget(self.limits.max_buffered_bytes)
        self.turns = turns or Turns(self.limits.turn, self.clock)
        self.draining = False
        self.waited_for = False  # somebody waits for the last answer
        self._connections = Connections(self.limits, self.clock, self.budget)
        # Any: the sockets of asyncio's are a tuple, those of uvloop's a list.
        self._listeners: list[Any] = []
        self._idle = asyncio.Event()

    async def listen(self, host: str, port: int, *, reuse_port: bool = False, backlog: int = 1024) -> None:
        """Accept connections on a TCP address; port 0 lets the system choose (see `addresses`).

        The host `*` is every address, of IPv4 and of IPv6 where the system has that.
        """
        loop = asyncio.get_running_loop()
        if host == ANYWHERE:
            for listening in everywhere(port):
                self._listeners.append(await loop.create_server(self.protocol, sock=listening, backlog=backlog))
            return
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
    def buffered_bytes(self) -> int:
        """Bytes held of request bodies and of buffered answers, and of what clients do not read."""
        return self.budget.held

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    @property
    def busy(self) -> int:
        """How many connections read or answer a request, or have not sent all of an answer."""
        return sum(not (connection.idle and connection.is_flushed) for connection in self._connections)

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
        """Close the connections that wait for their next request."""
        for connection in tuple(self._connections):
            if connection.idle:
                connection.close()

    async def wait_idle(self) -> None:
        """Return once no connection has a request that is not answered, or an answer that is not sent."""
        self.waited_for = True
        while self.busy:
            self._idle.clear()
            # Transports don't report when they have sent their last byte, so this polls.
            with suppress(TimeoutError):
                async with asyncio.timeout(self.limits.tick):
                    await self._idle.wait()
        self.waited_for = False

    def abort(self) -> None:
        """Cut every connection, with all requests in progress."""
        for connection in tuple(self._connections):
            connection.abort()

    # Called by the connections

    def opened(self, connection: Connection) -> bool:
        """Count a new connection in; return whether there was room for it, or could be made."""
        return self._connections.add(connection)

    def closed(self, connection: Connection) -> None:
        """Count a connection out."""
        self._connections.discard(connection)
        self._idle.set()

    def became_idle(self) -> None:
        """Look again whether all is answered."""
        self._idle.set()
