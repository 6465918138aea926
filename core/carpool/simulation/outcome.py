"""The outcome of a simulation: how each request ended, and summaries of any interval."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from enum import StrEnum
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

if TYPE_CHECKING:
    from carpool.batching.counters import Stats
    from carpool.batching.requests import Estimate
    from carpool.policy.parameters import Parameters


class Setting(NamedTuple):
    """What may change while a simulation runs: a tuner's decision and its estimate."""

    parameters: Parameters
    estimate: Estimate | None = None
    shed_slo: bool = False
    decided: bool = True


class End(StrEnum):
    """How a request ended."""

    PENDING = "pending"
    HIT = "hit"
    LATE = "late"
    """Answered, after its due time."""
    SHED = "shed"
    """Refused because it would have been late."""
    QUEUE_FULL = "queue-full"
    EXPIRED = "expired"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDS = tuple(End)
"""A request's end is stored as its index in this tuple."""


class Summary(Struct, frozen=True):
    """Sums over the requests that arrived in [start, stop)."""

    start: float
    stop: float
    ends: dict[End, int]
    p50: float
    p99: float
    """Of the answers; 0 without any. Refusals count in ``miss_fraction``."""
    device_busy: float
    """Seconds of device time taken by the batches dispatched in the same interval, over all replicas."""
    executor_busy: float
    """Seconds that these batches were computed, summed over the server's concurrent batches."""
    batches: int
    rows: int
    """Rows in those batches, whatever their outcome."""

    @property
    def arrivals(self) -> int:
        """Requests that arrived."""
        return sum(self.ends.values())

    @property
    def hits(self) -> int:
        """Good answers by their due time."""
        return self.ends.get(End.HIT, 0)

    @property
    def misses(self) -> dict[End, int]:
        """Requests that were no hits, by reason."""
        return {end: number for end, number in self.ends.items() if end is not End.HIT}

    @property
    def miss_fraction(self) -> float:
        """Share of misses among the requests whose callers stayed; 0 where there were none."""
        stayed = self.arrivals - self.ends.get(End.CANCELLED, 0)
        return 1 - self.hits / stayed if stayed else 0.0

    @property
    def goodput(self) -> float:
        """Hits per second; 0 for an interval of no length."""
        return self.hits / (self.stop - self.start) if self.stop > self.start else 0.0

    @property
    def answers(self) -> int:
        """Good answers, in time or late."""
        return self.hits + self.ends.get(End.LATE, 0)

    @property
    def device_time(self) -> float:
        """Device seconds per good answer; ``inf`` where there were none."""
        return self.device_busy / self.answers if self.answers else inf

    @property
    def mean_batch(self) -> float:
        """Rows per batch; 0 without batches."""
        return self.rows / self.batches if self.batches else 0.0


class Outcome:
    """The outcome of a run, by request in order of arrival, and by batch in order of dispatch."""

    def __init__(self, times: list[float], seconds: float, parameters: Parameters) -> None:
        self.times = times
        """Arrivals, seconds."""
        self.seconds = seconds
        """For how long requests arrived; all of them ended, perhaps later."""
        self.latencies = array("d", [inf]) * len(times)
        """Seconds from arrival to good answer; ``inf``: none."""
        self.ends = bytearray(len(times))
        """Index into ``End``'s members."""
        self.batch_dispatched = array("d")
        self.batch_busy = array("d")
        """Device time that the batch added: its service time without the overlap with batches already in flight."""
        self.batch_seconds = array("d")
        """Service times of the batches."""
        self.batch_rows = array("l")
        self.changes: list[tuple[float, int, Setting]] = [(0.0, 0, Setting(parameters))]
        """(when, replica, setting): the parameters at the start, then each change."""
        self.final: list[Stats] = []
        """Each replica's counters at the end."""

    def summary(self, start: float = 0.0, stop: float | None = None) -> Summary:
        """Sum up the requests that arrived in [start, stop), by default all of them."""
        stop = self.seconds if stop is None else stop
        low, high = bisect_left(self.times, start), bisect_left(self.times, stop)
        first, last = bisect_left(self.batch_dispatched, start), bisect_left(self.batch_dispatched, stop)
        if stop >= self.seconds:
            high, last = len(self.times), len(self.batch_dispatched)
        answered = sorted(latency for latency in self.latencies[low:high] if latency < inf)
        return Summary(
            start=start,
            stop=stop,
            ends={ENDS[code]: number for code, number in sorted(Counter(self.ends[low:high]).items())},
            p50=_quantile(answered, 0.5),
            p99=_quantile(answered, 0.99),
            device_busy=sum(self.batch_busy[first:last]),
            executor_busy=sum(self.batch_seconds[first:last]),
            batches=last - first,
            rows=sum(self.batch_rows[first:last]),
        )


def _quantile(ascending: list[float], q: float) -> float:
    """Return the smallest value that a share ``q`` does not exceed; 0 of nothing."""
    return ascending[max(ceil(q * len(ascending)) - 1, 0)] if ascending else 0.0
