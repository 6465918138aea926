"""Pauses of this host, detected by a thread that sleeps and measures when it wakes late.

Shared machines pause, and a container over its CPU quota is stopped. Times measured meanwhile are not the model's.
It is a thread, not a timer of the loop, since a loop that is only busy also wakes late.
"""

from __future__ import annotations

import threading
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL: Final = 0.02
"""Seconds between two wake-ups: 50 a second cost 0.1 % of a core."""

THRESHOLD: Final = 0.02
"""Seconds of lateness that count as a pause; waiting for Python's lock takes 5 ms, seldom 10."""


class Stall(NamedTuple):
    """When the watcher should have woken, and when it did; monotonic seconds."""

    start: float
    end: float


class StallWatcher:
    """Records the pauses. The thread only calls ``woke``; all other methods are queries."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.total = 0.0
        """Seconds paused so far."""
        self.count = 0
        self._clock = clock
        self._last = clock()
        self._recent: deque[Stall] = deque(maxlen=256)
        self._ended = threading.Event()
        # Not `_thread`: machine code is made by way of C, where that becomes a keyword.
        self._sleeper = threading.Thread(target=self._run, name="stalls", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._last = self._clock()
        self._sleeper.start()

    def stop(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._sleeper.join()

    def woke(self, now: float) -> None:
        """Record a wake-up that was due ``INTERVAL`` after the last one."""
        expected = self._last + INTERVAL
        if now - expected > THRESHOLD:
            self._recent.append(Stall(expected, now))
            self.total += now - expected
            self.count += 1
        self._last = now

    @property
    def recent(self) -> tuple[Stall, ...]:
        """The last pauses, at most 256, oldest first."""
        return tuple(self._recent)

    def overlaps(self, start: float, end: float) -> bool:
        """Whether this host paused between two times, including a pause that has not ended for the watcher."""
        if end - self._last > INTERVAL + THRESHOLD:
            return True
        recent = self._recent
        return bool(recent) and recent[-1].end >= start and any(s.start < end and s.end > start for s in tuple(recent))

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL):
            self.woke(self._clock())
