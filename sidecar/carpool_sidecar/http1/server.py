"""Listening sockets and the connections they accept."""

from __future__ import annotations

import asyncio
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Any

from carpool_sidecar.http1.connection import Connection
from carpool_sidecar.http1.limits import ServerLimits
from carpool_sidecar.http1.memory import Budget
from carpool_sidecar.http1.timing import NEVER, Ticker, Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from carpool_sidecar.http1.exchange import Application


# Connections looked at in one pass of the loop: less than a millisecond.
_AT_ONCE = 1024


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
    ) -> None:
        self.app = app
        self.limits = limits or ServerLimits()
        self.clock = clock or asyncio.get_running_loop().time
        self.budget = budget or Budget(self.limits.max_buffered_bytes)
        self.turns = turns or Turns(self.limits.turn, self.clock)
        self.draining = False
        self.waited_for = False  # somebody waits for the last answer
        self._connections: set[Connection] = set()
        self._sweep: Iterator[Connection] | None = None  # through the connections, at this tick
        self._dispensable: list[Connection] = []  # when last looked; the most dispensable is the last
        self._none_dispensable_until = -NEVER
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
    def buffered_bytes(self) -> int:
        """Bytes held of request bodies and of buffered answers, and of what clients do not read."""
        return self.budget.held

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
        """Count a new connection in; return whether there was room for it, or could be made."""
        self._connections.add(connection)
        self._ticker.start()
        return len(self._connections) <= self.limits.max_connections or self._dispense_with_one(connection)

    def closed(self, connection: Connection) -> None:
        """Count a connection out."""
        self._connections.discard(connection)
        self._idle.set()

    def became_idle(self) -> None:
        """Look again whether all is answered."""
        self._idle.set()

    # Rooms that are full

    def _dispense_with_one(self, newcomer: Connection) -> bool:
        """Cut the client that has asked nothing for longest; return whether there was one.

        All are looked at once for many newcomers: at 16,384 connections that takes 10 ms.
        """
        now = self.clock()
        for _ in range(2):
            while self._dispensable:
                connection = self._dispensable.pop()
                if connection in self._connections and connection.patience_used(now) is not None:
                    connection.abort()
                    return True
            if now < self._none_dispensable_until:
                return False
            shares = (
                (-share, id(one), one)
                for one in self._connections
                if one is not newcomer and (share := one.patience_used(now)) is not None
            )
            worst = nsmallest(1 + len(self._connections) // 16, shares)
            self._dispensable = [one for _, _, one in reversed(worst)]
            if not worst:
                self._none_dispensable_until = now + self.limits.tick
        return False

    def _make_room(self, now: float) -> None:
        """Give up the client that holds most without moving, if somebody found no room since the last tick."""
        if not self.budget.short and self.budget.held <= self.budget.limit:
            return
        self.budget.short = False
        patience = self.limits.patience
        most, holder = max(
            ((held, one) for one in self._connections if (held := one.holds_back(now, patience))),
            key=lambda pair: pair[0],
            default=(0, None),
        )
        if holder is not None and most:
            holder.make_room()

    def _expire(self, now: float) -> bool:
        if self._sweep is None:
            self._sweep = iter(tuple(self._connections))
            self._go_through(now)
        return bool(self._connections)

    def _go_through(self, now: float) -> None:
        """Let the next connections look at their deadlines; the others have their turn in the next pass of the loop."""
        assert self._sweep is not None  # noqa: S101 - for the type checker
        looked_at = 0
        for connection in islice(self._sweep, _AT_ONCE):
            looked_at += 1
            if connection in self._connections:
                connection.expire(now)
        if looked_at == _AT_ONCE:
            asyncio.get_running_loop().call_soon(self._go_through, now)
        else:
            self._sweep = None
            self._make_room(now)
