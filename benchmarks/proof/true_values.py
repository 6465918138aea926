"""Carpool with true values, in scenarios where it misses a goal: shows whether learning is the cause.

With the true batch latencies, Carpool knows what every rival knows. With the true load as well, it knows what the
oracle knows, except for how arrivals spread. If it still misses the goal, the cause is its rule, or chance in the one
stretch that was measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool.learning.latency_model import LatencyLearner, ServiceTime
from carpool.learning.load import Load, at_rate
from proof.ourselves import Carpool
from proof.rows import TOLD_ALL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from carpool.batching.counters import Sample
    from carpool.learning.arrivals import WindowCounts
    from proof.world import Knowledge, Maker, Stretch


def maker(course: Sequence[Stretch], name: str) -> Maker:
    """Return Carpool as a contender on a course; ``name``: one of ``rows.TOLD``."""
    return lambda known, _: Carpool(
        known, learner=Times(known, course), load=Rates(course, known.replicas) if name == TOLD_ALL else None
    )


class Times(LatencyLearner):
    """The true batch latencies and server concurrency on every stretch of a course. Shares of lengths are counted."""

    def __init__(self, known: Knowledge, course: Sequence[Stretch]) -> None:
        """Take the true values from ``known``; the course begins at 0 s."""
        super().__init__()
        curves: dict[int | None, ServiceTime] = {None: known.service, **known.buckets}
        # More in flight than are computed at once count as measured, so nothing is expected of them.
        self._true = {
            bucket: replace(curve, executors=known.executors, largest_in_flight=known.executors + 1)
            for bucket, curve in curves.items()
        }
        self._device = _Course(course)
        self._curves = self._true

    def observe(self, now: float, samples: Iterable[Sample]) -> float:
        """Count samples; return how many times as long the device takes as at the last call."""
        before, after = self._device.at.device, self._device.go(now).device
        if after != before:
            self._curves = {bucket: curve.scaled(after) for bucket, curve in self._true.items()}
        super().observe(now, samples)
        return after / before

    def estimate(self, bucket: int | None = None) -> ServiceTime:
        """Return the true curve of a length bucket, or of the mix."""
        return self._curves.get(bucket, self._curves[None])


class Rates(Load):
    """The true rate on every stretch of a course; how arrivals spread is learned."""

    def __init__(self, course: Sequence[Stretch], replicas: int) -> None:
        """Take the rates of the course, for all ``replicas`` together; the course begins at 0 s."""
        super().__init__()
        self._course = _Course(course)
        self._replicas = replicas
        self._seen = Load()
        self._now = 0.0

    @property
    def rate(self) -> float:
        """Requests per second of a replica; 0 before any."""
        return self._course.at.rate / self._replicas if self._seen.process is not None else 0.0

    def observe(self, seconds: float, counts: WindowCounts, rows: int, replicas: int = 1) -> bool:
        """Add what was counted, as ``Load`` does; return whether the load changed."""
        before = self.process
        self._now += seconds / replicas
        self._seen.tolerance = self.tolerance
        self._seen.observe(seconds, counts, rows, replicas)
        self._course.go(self._now)
        # The spread that was observed, at the true rate.
        self.process = at_rate(self._seen.process, self.rate) if self._seen.process is not None else None
        self.rows = self._seen.rows
        return self.process != before


class _Course:
    """The present stretch of a course."""

    def __init__(self, course: Sequence[Stretch]) -> None:
        self._left = list(course)
        self.at = self._left.pop(0)
        self._ends = self.at.seconds

    def go(self, now: float) -> Stretch:
        """Return the stretch that ``now`` lies in, or the last."""
        while self._left and now >= self._ends:
            self.at = self._left.pop(0)
            self._ends += self.at.seconds
        return self.at
