"""Listening sockets and the connections they accept."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from heapq import heappush, heappushpop
from itertools import islice
from typing import TYPE_CHECKING, Any

from carpool_sidecar.http1.limits import ServerLimits
from carpool_sidecar.http1.memory import Budget
from carpool_sidecar.http1.server.connection import Connection
from carpool_sidecar.http1.sockets import ANYWHERE, everywhere
from carpool_sidecar.http1.timing import NEVER, Ticker, Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from carpool_sidecar.http1.server.application import Application
    from carpool_sidecar.http1.server.exchange import Exchange


# Connections looked at in one pass of the loop: a millisecond at most.
_AT_ONCE = 256
# Share of the connections allowed from which on it is noted which ones could be dispensed with.
_CROWDED = 7 / 8


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
        self._connections: set[Connection] = set()
        self._sweep: Iterator[Connection] | None = None  # through the connections, at this tick
        # Clients that ask nothing, with the share of patience they have used: as of the last sweep, the worst last, and
        # as far as this one has come. Only noted where connections are scarce.
        self._dispensable: list[tuple[float, int, Connection]] = []
        self._seen: list[tuple[float, int, Connection]] = []
        self._none_dispensable_until = -NEVER
        # Any: the sockets of asyncio's are a tuple, those of uvloop's a list.
        self._listeners: list[Any] = []
        self._idle = asyncio.Event()
        self._ticker = Ticker(self.limits.tick, self._expire, self.clock)

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
        has_room = len(self._connections) < self.limits.max_connections or self._dispense_with_one()
        self._connections.add(connection)
        self._ticker.start()
        return has_room

    def closed(self, connection: Connection) -> None:
        """Count a connection out."""
        self._connections.discard(connection)
        self._idle.set()

    def became_idle(self) -> None:
        """Look again whether all is answered."""
        self._idle.set()

    # Rooms that are full

    def _dispense_with_one(self) -> bool:
        """Cut the client that has asked nothing for longest; return whether there was one."""
        now = self.clock()
        looked = now < self._none_dispensable_until
        while True:
            while self._dispensable:
                share, _, connection = self._dispensable.pop()
                used = connection.patience_used(now) if connection in self._connections else None
                if used is not None and used >= share:  # it has not asked since
                    connection.abort()
                    return True
            if not self._seen and self._sweep is None and not looked:
                looked = True
                self._expire(now)
            elif self._seen:
                self._dispensable, self._seen = sorted(self._seen), []
            else:
                break
        if self._sweep is None:
            self._none_dispensable_until = now + self.limits.tick
        return False

    def _make_room(self, now: float) -> None:
        """Cut the stalled client that uses most memory, if a request found no room since the last tick."""
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
        count = len(self._connections)
        crowded = count > _CROWDED * self.limits.max_connections
        looked_at = 0
        for connection in islice(self._sweep, _AT_ONCE):
            looked_at += 1
            if connection not in self._connections:
                continue
            connection.expire(now)
            if crowded and (share := connection.patience_used(now)) is not None:
                (heappushpop if len(self._seen) > count // 8 else heappush)(
                    self._seen, (share, id(connection), connection)
                )
        if looked_at == _AT_ONCE:
            asyncio.get_running_loop().call_soon(self._go_through, now)
            return
        self._sweep = None
        self._dispensable, self._seen = sorted(self._seen), []
        self._make_room(now)
