"""The last minute with requests, by model: its observation and its forecast.

When a load has stopped, counters stand still and the tuner decides about no load. People who look then
need the figures from before.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from carpool.batching.counters import DURATION_BOUNDS, ModelStats, Stats
from carpool.exchange.decision import Forecasted

if TYPE_CHECKING:
    from collections.abc import Callable

SPAN = 60.0
"""Least seconds that are kept, if requests came for as long."""

STEP = 20.0
"""Seconds between two snapshots: the span is 60 to 80 s long, of at most 5 snapshots."""


NOTHING = ModelStats(durations=[0] * (len(DURATION_BOUNDS) + 1))
"""A model's counters at the start."""


class Busy(Struct, frozen=True, rename="camel"):
    """One model's last busy minute."""

    at: float
    """When it ended, seconds since the epoch."""
    seconds: float
    stats: ModelStats
    """Its counts, without the cells by server concurrency."""
    predicted: Forecasted | None
    """The forecast that was in force at its end."""


class Mark(NamedTuple):
    """A snapshot; ``at`` in seconds of the counting clock."""

    at: float
    stats: ModelStats


class Track:
    """One model's snapshots: ``marks`` begin where the minute does, ``last`` is where it ends."""

    __slots__ = ("ended", "last", "marks", "predicted")

    def __init__(self, start: Mark) -> None:
        self.marks = deque([start])
        self.last = start
        self.ended = 0.0
        self.predicted: Forecasted | None = None


class BusyMinutes:
    """Takes snapshots of counters; ``last`` returns the last busy minute of each model."""

    def __init__(self, at: float) -> None:
        self._looked = at
        self._tracks: dict[str, Track] = {}

    def look(self, stats: Stats, now: float, predicted: Callable[[str], Forecasted | None]) -> None:
        """Take a snapshot; ``now`` in seconds since the epoch."""
        for name, counted in stats.models.items():
            track = self._tracks.get(name)
            seen = Mark(self._looked, NOTHING) if track is None else track.last
            if _ended(counted) == _ended(seen.stats):
                continue
            if track is None or counted.arrivals < seen.stats.arrivals:
                track = self._tracks[name] = Track(Mark(self._looked, NOTHING))
            elif stats.at - track.last.at > SPAN:
                # It was quiet since: the minute begins at the previous snapshot.
                track.marks = deque([Mark(self._looked, track.last.stats)])
            elif stats.at - track.marks[-1].at >= STEP:
                track.marks.append(track.last)
            while len(track.marks) > 1 and stats.at - track.marks[1].at >= SPAN:
                track.marks.popleft()
            track.last = Mark(stats.at, replace(counted, cells=[cell for cell in counted.cells if not cell[3]]))
            track.ended = now
            track.predicted = predicted(name) or track.predicted
        for name in self._tracks.keys() - stats.models.keys():
            del self._tracks[name]
        self._looked = stats.at

    def last(self) -> dict[str, Busy]:
        """Return the last busy minute of each model that ever had a request."""
        return {name: _between(track) for name, track in self._tracks.items()}


def _ended(stats: ModelStats) -> tuple[int, int, int]:
    """Return what grows as long as requests come or end; of failed ones only the misses show that they ended."""
    return stats.arrivals, stats.served, sum(stats.misses.values())


def _between(track: Track) -> Busy:
    start, end = track.marks[0], track.last
    counted = Stats(end.at, models={"": end.stats}).since(Stats(start.at, models={"": start.stats}))
    return Busy(track.ended, end.at - start.at, counted.models[""], track.predicted)
