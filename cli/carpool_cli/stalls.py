"""Pauses of this host: while nothing ran, nothing was measured, and what follows is catching up."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from types import TracebackType

PERIOD = 0.005
THRESHOLD = 0.02
"""Seconds a 5 ms sleep may be late. Scheduling and Python's own switching take a few ms; 20 is the host."""


class Stall(NamedTuple):
    """Between ``start`` and ``stop`` (seconds of the monotonic clock) this process did not run."""

    start: float
    stop: float


class StallWatcher:
    """Notices, from a thread of its own, when a short sleep took long. Use as a context manager."""

    def __init__(self) -> None:
        self.stalls: list[Stall] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watcher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def woke(self, slept: float, now: float) -> None:
        """Note a sleep of ``PERIOD`` that began at ``slept`` and ended at ``now``."""
        if now - slept > PERIOD + THRESHOLD:
            self.stalls.append(Stall(slept + PERIOD, now))

    def _watch(self) -> None:
        slept = time.monotonic()
        while not self._stop.wait(PERIOD):
            now = time.monotonic()
            self.woke(slept, now)
            slept = now
