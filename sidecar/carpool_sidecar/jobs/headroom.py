"""How many jobs may be under way: what interactive requests leave, and no more. Pure; ``now`` in seconds."""

from __future__ import annotations

from math import inf

SHARE = 0.8
"""Of the time, for which the device may be busy while jobs begin. The rest keeps interactive requests from waiting."""

MEMORY = 1.0
"""Seconds over which the device's busy time is looked at."""

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
"""Seconds without new jobs after a refusal; doubled with each in a row."""


class Headroom:
    """Grows by one with each round of answers, halves with each refusal, and stops while the device is busy.

    ``most``: under way at once. `update` takes the device's busy seconds so far.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = 1.0
        self._pause = FIRST_PAUSE
        self._resume_at = -inf
        self._share = 0.0
        self._seen: tuple[float, float] | None = None

    @property
    def share(self) -> float:
        """Share of the last second or so for which the device was busy."""
        return self._share

    @property
    def limit(self) -> int:
        """Jobs that may be under way now."""
        return int(self._limit)

    def update(self, busy: float, now: float) -> None:
        """Take the device's busy seconds up to ``now``."""
        if self._seen is None:
            self._seen = (busy, now)
            return
        before, at = self._seen
        elapsed = now - at
        if elapsed < MEMORY / 20:
            return  # too short to say anything
        fresh = min(1.0, max(0.0, busy - before) / elapsed)
        weight = min(1.0, elapsed / MEMORY)
        self._share += weight * (fresh - self._share)
        self._seen = (busy, now)

    def room(self, under_way: int, now: float) -> int:
        """Return how many jobs may begin now."""
        if now < self._resume_at or self._share > SHARE:
            return 0
        return max(0, self.limit - under_way)

    def answered(self) -> None:
        """Note an answer of the model's."""
        self._limit = min(float(self._most), self._limit + 1 / self._limit)
        self._pause = FIRST_PAUSE

    def refused(self, retry_after: float, now: float) -> None:
        """Note that the model, or its queue, had no room; requests that were sent together are one refusal."""
        if now < self._resume_at:
            return
        self._limit = max(1.0, self._limit / 2)
        self._resume_at = now + min(LONGEST_PAUSE, max(self._pause, retry_after if retry_after > 1 else 0.0))
        self._pause = min(LONGEST_PAUSE, 2 * self._pause)
