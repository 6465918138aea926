"""One timer for many deadlines, and fair shares of the loop's thread.

A connection's deadlines are plain numbers; moving one is an assignment. A ticker compares them with the clock a few
times a second. So timeouts are precise to one tick, and no request sets or cancels a timer of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

NEVER: Final = float("inf")


class Ticker:
    """Calls `tick(now)` every `interval` seconds after `start`, until it returns False; then `start` it again."""

    def __init__(self, interval: float, tick: Callable[[float], bool], clock: Callable[[], float]) -> None:
        self._interval = interval
        self._tick = tick
        self._clock = clock
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to tick, unless it ticks already."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._interval, self._run)

    def stop(self) -> None:
        """Stop ticking."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _run(self) -> None:
        self._handle = None
        if self._tick(self._clock()):
            self.start()


BULK: Final = 64 * 1024
"""After a read of so many bytes the socket probably holds more: the loop would read on, up to 8 MiB in one pass."""


class Turns:
    """Shares the loop's thread among connections that have more than one step of work.

    Each does one step whenever the loop calls it. Further steps of all connections together get `length` seconds in one
    pass of the loop; the rest wait for the next pass, first come, first served.
    """

    def __init__(self, length: float, clock: Callable[[], float]) -> None:
        self._length = length
        self._clock = clock
        self._until = NEVER  # not NEVER: when this pass's turn is over
        self._waiting: deque[Callable[[], None]] = deque()
        self._called = False

    def over(self) -> bool:
        """Whether the caller has to `wait` before its next step."""
        now = self._clock()
        if self._until == NEVER:
            self._until = now + self._length
            self._call()
        return now >= self._until

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` in a later pass."""
        self._waiting.append(go_on)
        self._call()

    def _call(self) -> None:
        if not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._called = False
        self._until = NEVER
        for _ in range(len(self._waiting)):
            self._waiting.popleft()()
            if self.over():
                break
        if self._waiting:
            self._call()
