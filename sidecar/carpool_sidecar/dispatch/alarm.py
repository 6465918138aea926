"""One timer for the next thing that is due."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

RESOLUTION = 0.001
"""Resolution of uvloop's timers, in seconds. A delay rounded down to zero would wake the loop too early, in vain."""


class Alarm:
    """Calls ``ring`` at the earliest time that was set; ``clock`` returns monotonic seconds.

    If it rings too early, ``ring`` finds nothing due and sets it again. That is cheaper than moving it per request.
    """

    __slots__ = ("_clock", "_loop", "_ring", "_timer", "at")

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.at = inf

    def set(self, wake: float) -> None:
        """Ring at ``wake``, which is earlier than the time set before."""
        self.stop()
        self.at = wake
        self._timer = self._loop.call_later(max(wake - self._clock(), RESOLUTION), self._wake)

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _wake(self) -> None:
        self._timer = None
        self.at = inf
        self._ring()
