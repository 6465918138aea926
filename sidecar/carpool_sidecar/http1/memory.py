"""Memory for bodies: one budget for all of it, and large buffers that never need a second copy."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from carpool_sidecar.http1.messages import Buffer

HUGE_PAGE = 2 * 1024 * 1024
"""Bytes of a huge page of x86-64, and of arm64 with pages of 4 KiB."""


class Budget:
    """Counts the bytes of request bodies and buffered answers in memory, and refuses more than its limit.

    `held` exceeds `limit` only by bytes that can't be refused: those that wait in a transport because the other side
    does not read. `short` is set when `take` was refused.
    """

    __slots__ = ("held", "limit", "short")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.held = 0
        self.short = False

    def take(self, extra: int) -> bool:
        """Count `extra` more bytes as held, if there is room; return whether there was."""
        if self.held + extra > self.limit:
            self.short = True
            return False
        self.held += extra
        return True

    def give(self, count: int) -> None:
        """Return `count` bytes to the budget."""
        self.held -= count


class Region(mmap.mmap):
    """Memory in which one large body is collected.

    It grows by moving pages, not bytes, and returns to the system when it is freed. So a body is in memory once, and
    the process keeps no unused memory. The heap does neither: joining pieces takes the body's size twice, and freed
    pieces leave holes.
    """

    filled = 0
    _budget: Budget | None = None

    def __new__(cls, capacity: int) -> Self:
        """Reserve addresses for `capacity` bytes; the system assigns memory as they are filled.

        Raises OSError if the system refuses.
        """
        region = super().__new__(cls, -1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A page fault costs 0.6 us in a virtual machine. 16 MiB in pages of 4 KiB take 10 ms, in huge ones 0.9.
            region.madvise(mmap.MADV_HUGEPAGE)
        return region

    @property
    def held(self) -> int:
        """Bytes of memory in use: the filled part, in whole huge pages."""
        return min(len(self), -(-self.filled // HUGE_PAGE) * HUGE_PAGE)

    def add(self, piece: Buffer, total: int | None) -> None:
        """Append a piece; `total` is the size that the body will have, if it is known. Raises OSError."""
        size = self.filled + len(piece)
        if size > len(self):
            # Addresses cost nothing, so doubling them wastes no memory.
            self.resize(2 * size if total is None else min(2 * size, total))
        self.filled += self.write(piece)

    def finish(self) -> memoryview:
        """Return what was collected."""
        self.resize(self.filled)
        return memoryview(self).toreadonly()

    def count(self, budget: Budget) -> None:
        """Count this region in a budget until it is freed."""
        self._budget = budget
        budget.held += self.filled

    def __del__(self) -> None:
        """Return its bytes to the budget."""
        if self._budget is not None:
            self._budget.give(self.filled)


def counts_itself(piece: Buffer) -> bool:
    """Whether this is a piece of a large body, which a budget counts for as long as any piece of it lives."""
    return type(piece) is memoryview and type(piece.obj) is Region


def count_while_alive(body: Buffer, budget: Budget) -> None:
    """Count a large body in a budget until its last piece is freed."""
    region = body.obj if isinstance(body, memoryview) else None
    assert isinstance(region, Region)  # noqa: S101 - for the type checker: see `counts_itself`
    region.count(budget)
