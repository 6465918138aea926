"""One timer for many deadlines.

A connection's deadlines are plain numbers; moving one is an assignment. A ticker compares them with the clock a few
times a second, so a timeout is kept to within one tick, and no request arms or cancels a timer of its own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NEVER = float("inf")


class Ticker:
    """Calls `tick(now)` every `interval` seconds from `start` on, until it returns False. Then `start` again."""

    def __init__(self, interval: float, tick: Callable[[float], bool], clock: Callable[[], float]) -> None:
        self._interval = interval
        self._tick = tick
        self._clock = clock
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to tick, unless it does already."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._interval, self._run)

    def stop(self) -> None:
        """Tick no more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _run(self) -> None:
        self._handle = None
        if self._tick(self._clock()):
            self.start()
