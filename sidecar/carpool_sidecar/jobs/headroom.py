"""How many jobs may be under way: as many as interactive requests leave room for, and as each path accepts.

Pure; ``now`` in seconds.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

from carpool_sidecar.jobs.records import Rest

if TYPE_CHECKING:
    from collections.abc import Iterable

SHARE = 0.8
"""Share of the time that the device may be busy when jobs begin. The rest keeps interactive requests from waiting."""

MEMORY = 1.0
"""Seconds over which the device's busy time is measured."""

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
"""Seconds without new jobs after a refusal; doubled with each in a row."""

FIRST_GROWTH, GROWTH = 1.5, 1.02
"""Per good second: at first from 1 to 16 in 7 s; then doubled in 35 s."""


class Seen(NamedTuple):
    """Counts so far. ``busy``: the device's seconds; ``met``, ``missed``: interactive requests by SLO."""

    busy: float
    met: int = 0
    missed: int = 0


class Headroom:
    """Stops jobs while the device is busy, and reduces them while interactive requests miss the SLO.

    Only a path that refuses is paused. ``most``: jobs under way at once. ``allowed``: the share of interactive requests
    that may miss.
    """

    def __init__(self, most: int, allowed: float = 0.01) -> None:
        self.allowed = allowed
        self.share = 0.0
        """Share of the last second or so for which the device was busy."""
        self._most = most
        self._refusing: dict[str, Refusing] = {}
        self._misses = Pause()
        self._limit = 1.0
        self._growth = FIRST_GROWTH
        self._seen: tuple[Seen, float] | None = None
        self._judged: tuple[Seen, float] | None = None

    @property
    def limit(self) -> int:
        """Jobs that may be under way now."""
        return int(self._limit)

    def update(self, seen: Seen, now: float) -> None:
        """Take the counts up to ``now``."""
        self._judge(seen, now)
        if self._seen is None:
            self._seen = (seen, now)
            return
        before, at = self._seen
        elapsed = now - at
        if elapsed < MEMORY / 20:
            return  # too short for a measurement
        fresh = min(1.0, max(0.0, seen.busy - before.busy) / elapsed)
        weight = min(1.0, elapsed / MEMORY)
        self.share += weight * (fresh - self.share)
        self._seen = (seen, now)

    def _judge(self, seen: Seen, now: float) -> None:
        """Check once a second whether interactive requests met the SLO."""
        if self._judged is None:
            self._judged = (seen, now)
        before, at = self._judged
        if now - at < MEMORY:
            return
        self._judged = (seen, now)
        self._refusing = {path: one for path, one in self._refusing.items() if not one.recovered(self._most, now)}
        met, missed = seen.met - before.met, seen.missed - before.missed
        if missed <= self.allowed * (met + missed):
            if self._misses.over(now):
                self._limit = min(float(self._most), self._limit * self._growth)
                self._misses.relax()
        elif self._limit > 1:
            self._limit = max(1.0, self._limit / 2)
            self._growth = GROWTH
        else:
            self._misses.begin(now)

    def room(self, under_way: int, now: float) -> int:
        """Return how many jobs may begin now."""
        if self.share > SHARE or not self._misses.over(now):
            return 0
        return max(0, self.limit - under_way)

    def rest(self, under_way: Iterable[str], now: float) -> Rest:
        """Return how many may begin on paths that refused; ``under_way``: the path of each job."""
        left = {path: one.room(now) for path, one in self._refusing.items()}
        if left:
            for path in under_way:
                if path in left:
                    left[path] -= 1
        return Rest(left)

    def answered(self, path: str) -> None:
        """Note an answer from the model."""
        if path in self._refusing:
            self._refusing[path].pause.relax()

    def refused(self, path: str, retry_after: float, now: float) -> None:
        """Note that the model, or its queue, had no room; requests that were sent together are one refusal."""
        one = self._refusing.setdefault(path, Refusing(self._limit))
        one.refused(retry_after if retry_after > 1 else 0.0, now)


class Refusing:
    """A path that refused: how many may be under way, halved with each refusal, and none during a pause."""

    def __init__(self, limit: float) -> None:
        self.pause = Pause()
        self._limit = limit

    def room(self, now: float) -> int:
        """Return how many may be under way."""
        return int(self._limit) if self.pause.over(now) else 0

    def refused(self, least: float, now: float) -> None:
        """Pause for at least so many seconds, unless there is a pause already."""
        if self.pause.over(now):
            self._limit = max(1.0, self._limit / 2)
            self.pause.begin(now, least)

    def recovered(self, most: int, now: float) -> bool:
        """Grow after a second without a pause; return whether there is nothing to remember any more."""
        if self.pause.over(now):
            self._limit = min(float(most), self._limit * GROWTH)
        # With `most` 1 the limit is reached at once, but the length of the next pause must still be remembered.
        return self._limit >= most and self.pause.over(now - LONGEST_PAUSE)


class Pause:
    """A time without new jobs: twice as long each time, until `relax`."""

    def __init__(self) -> None:
        self._next = FIRST_PAUSE
        self._until = -inf

    def over(self, now: float) -> bool:
        """Whether no pause is in force."""
        return now >= self._until

    def begin(self, now: float, least: float = 0.0) -> None:
        """Begin a pause of at least ``least`` seconds."""
        self._until = now + min(LONGEST_PAUSE, max(self._next, least))
        self._next = min(LONGEST_PAUSE, 2 * self._next)

    def relax(self) -> None:
        """Make the next pause short again, after success."""
        self._next = FIRST_PAUSE
