"""Forwarded requests, which are never batched, by path: how many, how long they took, and whether in time."""

from __future__ import annotations

from bisect import bisect_left

from carpool.batching.counters import DURATION_BOUNDS
from carpool.exchange.report import NOT_FOUND, OTHER

MOST = 32
"""Most paths counted separately; callers can invent paths."""

LONGEST = 128
"""Most bytes of a path that is counted separately."""

ABSENT = frozenset({404, 405})
"""Statuses of paths that the upstream does not serve: these are counted together."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods that are counted separately if paths are not; callers can invent methods, too."""


class Counts:
    """One path's counters; they only grow."""

    __slots__ = ("durations", "hits", "seconds", "statuses")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        """Answers by status."""
        self.hits = 0
        """Answers with success within the SLO's time."""
        self.durations = [0] * (len(DURATION_BOUNDS) + 1)
        """Of answers with success, as ``seconds`` is."""
        self.seconds = 0.0

    @property
    def requests(self) -> int:
        """All answers."""
        return sum(self.statuses.values())


class Forwarded:
    """Counts by method and path."""

    def __init__(self) -> None:
        self.paths: dict[tuple[str, str], Counts] = {}
        self._apart = 0

    def count(self, method: bytes, path: bytes, status: int, seconds: float, due: float) -> None:
        """Count an answer that took ``seconds`` from the request's last byte; ``due``: the SLO's seconds."""
        key = (method.decode("latin-1"), path.decode("latin-1"))
        counts = self.paths.get(key)
        if counts is None:
            if status in ABSENT:
                key = (key[0] if key[0] in METHODS else "", NOT_FOUND)
            elif self._apart >= MOST or len(path) > LONGEST or len(method) > LONGEST:
                key = ("", OTHER)
            else:
                self._apart += 1
            counts = self.paths.setdefault(key, Counts())
        counts.statuses[status] = counts.statuses.get(status, 0) + 1
        if 200 <= status < 300:
            counts.hits += seconds <= due
            counts.durations[bisect_left(DURATION_BOUNDS, seconds)] += 1
            counts.seconds += seconds
