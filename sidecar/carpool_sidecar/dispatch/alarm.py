"""One timer for whatever is to be done next."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

RESOLUTION = 0.001
"""Seconds: what uvloop's timers are whole numbers of. A timer rounded down to none would turn the loop in vain."""


class Alarm:
    """Calls ``ring`` at the earliest time it was set to; ``clock`` gives monotonic seconds.

    A timer that is early finds nothing due and is set anew: cheaper than moving it with every request.
    """

    __slots__ = ("_clock", "_loop", "_ring", "_timer", "at")

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.at = inf

    def set(self, wake: float) -> None:
        """Ring at that time, which is earlier than the one before."""
        self.stop()
        self.at = wake
        self._timer = self._loop.call_later(max(wake - self._clock(), RESOLUTION), self._wake)

    def stop(self) -> None:
        """Let go of the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _wake(self) -> None:
        self._timer = None
        self.at = inf
        self._ring()
