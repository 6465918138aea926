"""The open connections of a server: their deadlines, and which one is cut where there is no room for another."""

from __future__ import annotations

import asyncio
from heapq import heappush, heappushpop
from itertools import islice
from typing import TYPE_CHECKING

from carpool_sidecar.http1.timing import NEVER, Ticker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from carpool_sidecar.http1.limits import ServerLimits
    from carpool_sidecar.http1.memory import Budget
    from carpool_sidecar.http1.server.connection import Connection

# Connections looked at in one pass of the loop: a millisecond at most.
_AT_ONCE = 256
# Share of the connections allowed from which on it is noted which ones could be dispensed with.
_CROWDED = 7 / 8


class Connections:
    """The open connections of a server. Their deadlines are looked at with every tick."""

    def __init__(self, limits: ServerLimits, clock: Callable[[], float], budget: Budget) -> None:
        self._limits = limits
        self._clock = clock
        self._budget = budget
        self._open: set[Connection] = set()
        self._sweep: Iterator[Connection] | None = None  # through the connections, at this tick
        # Clients that ask nothing, with the share of patience they have used: as of the last sweep, the worst last, and
        # as far as this one has come. Only noted where connections are scarce.
        self._dispensable: list[tuple[float, int, Connection]] = []
        self._seen: list[tuple[float, int, Connection]] = []
        self._none_dispensable_until = -NEVER
        self._ticker = Ticker(limits.tick, self.expire, clock)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._open)

    def __iter__(self) -> Iterator[Connection]:
        """Go through them; a loop that closes some needs a copy."""
        return iter(self._open)

    def add(self, connection: Connection) -> bool:
        """Count a new connection in; return whether there was room for it, or could be made."""
        has_room = len(self._open) < self._limits.max_connections or self._dispense_with_one()
        self._open.add(connection)
        self._ticker.start()
        return has_room

    def discard(self, connection: Connection) -> None:
        """Count a connection out."""
        self._open.discard(connection)

    # Deadlines

    def expire(self, now: float) -> bool:
        """Let the connections look at their deadlines; return whether there are any."""
        if self._sweep is None:
            self._sweep = iter(tuple(self._open))
            self._go_through(now)
        return bool(self._open)

    def _go_through(self, now: float) -> None:
        """Let the next connections look at their deadlines; the others have their turn in the next pass of the loop."""
        assert self._sweep is not None  # noqa: S101 - for the type checker
        count = len(self._open)
        crowded = count > _CROWDED * self._limits.max_connections
        looked_at = 0
        for connection in islice(self._sweep, _AT_ONCE):
            looked_at += 1
            if connection not in self._open:
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

    # Rooms that are full

    def _dispense_with_one(self) -> bool:
        """Cut the client that has asked nothing for longest; return whether there was one."""
        now = self._clock()
        looked = now < self._none_dispensable_until
        while True:
            while self._dispensable:
                share, _, connection = self._dispensable.pop()
                used = connection.patience_used(now) if connection in self._open else None
                if used is not None and used >= share:  # it has not asked since
                    connection.abort()
                    return True
            if not self._seen and self._sweep is None and not looked:
                looked = True
                self.expire(now)
            elif self._seen:
                self._dispensable, self._seen = sorted(self._seen), []
            else:
                break
        if self._sweep is None:
            self._none_dispensable_until = now + self._limits.tick
        return False

    def _make_room(self, now: float) -> None:
        """Cut the stalled client that uses most memory, if a request found no room since the last tick."""
        if not self._budget.short and self._budget.held <= self._budget.limit:
            return
        self._budget.short = False
        patience = self._limits.patience
        most, holder = max(
            ((held, one) for one in self._open if (held := one.holds_back(now, patience))),
            key=lambda pair: pair[0],
            default=(0, None),
        )
        if holder is not None and most:
            holder.make_room()
