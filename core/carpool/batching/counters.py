"""Additive counters: the tuner learns from nothing else.

They sum over replicas, survive scraping and restarts of their readers, and are exported to Prometheus. The hot
path counts once, here; everything else reads snapshots and differences of snapshots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import zip_longest
from typing import Final, NamedTuple

from carpool.batching.requests import Refused
from carpool.policy.plain import MutableCamel

WINDOW: Final = 0.1
"""Seconds of one arrival-count window: long against a service time, short against a change of load."""

SUPPOSED: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Server concurrencies that service times are counted for; finer steps would not change a decision."""

DURATION_BOUNDS: Final = tuple(0.0005 * 2 ** (step / 4) for step in range(65))
"""Upper bounds (seconds) of the duration histogram: 0.5 ms to 32 s, a factor of 1.19 apart."""

ROW_BOUNDS: Final = tuple(2**power for power in range(16))
"""Upper bounds of the histogram of rows per request: 1, 2, 4, ... 32,768."""

RECENT_ARRIVALS = 4096

LONGEST_GAP: Final = 10.0
"""Seconds from which a gap between arrivals is not counted: it was a pause, and would outweigh all others."""

MAX_KINDS, MAX_SIZES = 2048, 16_384
"""Kinds of batches (256 sizes at 8 in flight make 2,048) and sizes that are distinguished. Callers whose requests are
not batched choose the size, and each kind is up to 42 lines of a scrape."""

EXCUSED = 10.0
"""A cold batch explains late requests for at most so many times the seconds by which it was late."""


class Sample(NamedTuple):
    """Batches of one kind: what distinguishes the kind, how many there were, their seconds and squared seconds."""

    bucket: int
    """Length bucket, 0 where lengths do not matter."""
    rows: int
    in_flight: int
    """Batches in flight when it was dispatched, itself included."""
    executors: int
    """0: seconds from dispatch to completion. e < in_flight: seconds from when it would have begun at a server
    concurrency of e, first come, first served. At the true e these are the batch's own times, which vary little.
    in_flight: seconds from dispatch, of batches that were answered before one dispatched earlier."""
    batches: float
    busy: float
    busy_squared: float


class Cell:
    """The sums of a ``Sample``, as they are counted."""

    __slots__ = ("batches", "busy", "busy_squared")

    def __init__(self) -> None:
        self.batches = 0
        self.busy = 0.0
        self.busy_squared = 0.0

    def add(self, seconds: float) -> None:
        """Count a batch."""
        self.batches += 1
        self.busy += seconds
        self.busy_squared += seconds * seconds


ALL = -1
"""Default for sidecars of older versions, which do not count it: every arrival."""


class ModelStats(MutableCamel, rename="camel"):
    """A snapshot (or a difference of two, or a sum over replicas) of one model's counters."""

    arrivals: int = 0
    batchable: int = ALL
    """Arrivals whose key was that of a recent arrival: these could share a batch. At most ``arrivals``."""
    arrivals_squared: int = 0
    """Sum over finished windows of the squared arrival count."""
    windows: int = 0
    gaps_squared: float = 0.0
    """Sum of the squared seconds between arrivals. 0: not counted, as by sidecars of older versions."""
    rows: int = 0
    dispatched: int = 0
    """Requests sent to the upstream (a split request counts once)."""
    queue_seconds: float = 0.0
    served: int = 0
    """Requests answered with success: a model that refuses everything at once is not fast."""
    hits: int = 0
    misses: "dict[str, int]" = {}  # noqa: RUF012, UP037 - msgspec copies it; the quotes: see `Frozen`
    """By reason: late, cold, failed, rejected, cancelled, or a refusal's reason."""
    cells: "list[tuple[int, int, int, int, int, float, float]]" = []  # noqa: RUF012, UP037
    """As ``Sample``."""
    limited: int = 0
    """Batches composed while fewer than ``max_batch`` rows were allowed, by a size limit or for poisoned requests."""
    limited_rows: int = 0
    """Sum of the rows that those batches were allowed."""
    cold: int = 0
    stalled: int = 0
    bisections: int = 0
    durations: "list[int]" = []  # noqa: RUF012, UP037
    """These by duration; one more entry than ``DURATION_BOUNDS``, the last beyond them all."""
    request_rows: "list[int]" = []  # noqa: RUF012, UP037
    """Arrivals by rows; one more entry than ``ROW_BOUNDS``. Empty: not counted, as by sidecars of older versions."""

    def __post_init__(self) -> None:
        """Fill in what older sidecars do not count."""
        if self.batchable == ALL:
            self.batchable = self.arrivals

    @property
    def missed(self) -> int:
        """Requests that missed the SLO, except those that the caller is responsible for."""
        return sum(count for reason, count in self.misses.items() if reason not in CALLERS)

    def samples(self) -> list[Sample]:
        """Service times of batches, by kind."""
        return [Sample(*cell) for cell in self.cells]

    def quantile(self, q: float) -> float | None:
        """Seconds that a share ``q`` of the successful answers took, to 19 %; ``None``: there was none."""
        rank, seen = q * sum(self.durations), 0
        for bound, count in zip(DURATION_BOUNDS, self.durations, strict=False):
            if count and seen + count >= rank:
                return bound * 2 ** (-0.25 * (1 - (rank - seen) / count))
            seen += count
        return DURATION_BOUNDS[-1] if any(self.durations) else None


class Stats(MutableCamel, rename="camel"):
    """A snapshot of one upstream's counters."""

    at: float
    """When it was taken, seconds of the counting process's monotonic clock."""
    device_busy: float = 0.0
    """Wall seconds with at least one batch in flight."""
    models: "dict[str, ModelStats]" = {}  # noqa: RUF012, UP037
    queued_rows: int = 0
    """Rows waiting at that moment."""

    def since(self, earlier: Stats) -> Stats:
        """Return what was counted after ``earlier``.

        A counter that went backwards was reset: the result is then everything counted since the reset.
        """
        models = {}
        for name, now in self.models.items():
            before = earlier.models.get(name)
            # A busy restart can overtake one counter between two snapshots, seldom all of them.
            reset = before is None or any(getattr(now, each) < getattr(before, each) for each in _SUMMED)
            models[name] = now if before is None or reset else _difference(now, before)
        busy = self.device_busy - earlier.device_busy
        return Stats(self.at, busy if busy >= 0 else self.device_busy, models, self.queued_rows)

    def others(self, model: str) -> tuple[float, float]:
        """Return of all models but one the seconds of their batches, and of the device's wall time in proportion."""
        work = {name: sum(cell[5] for cell in each.cells if not cell[3]) for name, each in self.models.items()}
        others, whole = sum(work.values()) - work.get(model, 0.0), sum(work.values())
        return others, self.device_busy * others / whole if whole else 0.0


LATE: Final = "late"
COLD: Final = "cold"
"""Late, or refused as late, behind a slow first batch of its size: not caused by the parameters."""
FAILED: Final = "failed"
REJECTED: Final = "rejected"
CANCELLED: Final = "cancelled"
CALLERS = frozenset({REJECTED, CANCELLED})
"""Outcomes that the caller caused: they are not SLO misses."""


def combine(parts: list[ModelStats]) -> ModelStats:
    """Sum over replicas or models."""
    total = ModelStats(durations=[0] * (len(DURATION_BOUNDS) + 1))
    cells: dict[tuple[int, int, int, int], tuple[int, float, float]] = {}
    for part in parts:
        for name in _SUMMED:
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for reason, count in part.misses.items():
            total.misses[reason] = total.misses.get(reason, 0) + count
        total.durations = [a + b for a, b in zip_longest(total.durations, part.durations, fillvalue=0)]
        total.request_rows = [a + b for a, b in zip_longest(total.request_rows, part.request_rows, fillvalue=0)]
        for cell in part.cells:
            sums = cells.get(cell[:4], (0, 0.0, 0.0))
            cells[cell[:4]] = sums[0] + cell[4], sums[1] + cell[5], sums[2] + cell[6]
    total.cells = [(*kind, *sums) for kind, sums in cells.items()]
    return total


_SUMMED = (
    "arrivals", "batchable", "arrivals_squared", "windows", "gaps_squared", "rows", "dispatched", "queue_seconds",
    "served", "hits", "limited", "limited_rows", "cold", "stalled", "bisections",
)  # fmt: skip


def _difference(now: ModelStats, before: ModelStats) -> ModelStats:
    result = ModelStats(**{name: getattr(now, name) - getattr(before, name) for name in _SUMMED})
    result.misses = {
        reason: delta for reason, count in now.misses.items() if (delta := count - before.misses.get(reason, 0))
    }
    result.durations = [a - b for a, b in zip(now.durations, before.durations, strict=True)]
    if len(now.request_rows) == len(before.request_rows):
        result.request_rows = [a - b for a, b in zip(now.request_rows, before.request_rows, strict=True)]
    earlier = {cell[:4]: cell[4:] for cell in before.cells}
    for cell in now.cells:
        n, busy, squared = earlier.get(cell[:4], (0, 0.0, 0.0))
        if cell[4] > n:
            result.cells.append((*cell[:4], cell[4] - n, cell[5] - busy, cell[6] - squared))
    return result


class Counters:
    """One model's counters as the hot path increments them. What is counted only grows."""

    __slots__ = (
        "_window", "_window_arrivals", "arrivals", "arrivals_squared", "batchable", "bisections", "cells", "cold",
        "dispatched", "durations", "excess", "excess_until", "gaps_squared", "hits", "limited", "limited_rows",
        "misses", "queue_seconds", "recent", "request_rows", "rows", "served", "stalled", "windows",
    )  # fmt: skip

    def __init__(self) -> None:
        self.arrivals = self.batchable = self.arrivals_squared = self.windows = 0
        self.rows = self.dispatched = self.served = self.hits = 0
        self.limited = self.limited_rows = self.cold = self.stalled = self.bisections = 0
        self.gaps_squared = self.queue_seconds = 0.0
        self.misses: dict[str, int] = {}
        self.cells: dict[tuple[int, int, int], list[Cell]] = {}
        self.durations = [0] * (len(DURATION_BOUNDS) + 1)
        self.request_rows = [0] * (len(ROW_BOUNDS) + 1)
        self.recent: deque[tuple[float, int]] = deque(maxlen=RECENT_ARRIVALS)
        self.excess = 0.0
        """Seconds by which first batches of their size took longer than forecast, until the backlog behind them is
        served; meaningless from ``excess_until`` on."""
        self.excess_until = 0.0
        self._window = -1
        self._window_arrivals = 0

    def arrived(self, now: float, rows: int, batchable: bool = True) -> None:
        """Count an arrival, admitted or not; ``batchable``: whether it could share a batch with a recent one."""
        window = int(now / WINDOW)
        if window != self._window:
            self._close_window(window)
        self._window_arrivals += 1
        self.arrivals += 1
        self.batchable += batchable
        self.rows += rows
        # 3 or 4 rows: entry 2, up to 2**2.
        self.request_rows[min((rows - 1).bit_length(), len(ROW_BOUNDS)) if rows > 1 else 0] += 1
        if self.recent and (gap := now - self.recent[-1][0]) < LONGEST_GAP:
            self.gaps_squared += gap * gap
        self.recent.append((now, rows))

    def answered(self, arrived: float, due: float, now: float, ok: bool, failure: str = FAILED) -> None:
        """Count an answer whose last byte left at ``now``: a hit if in time; ``failure``: of one that is no success."""
        self.served += ok
        self.durations[bisect_left(DURATION_BOUNDS, now - arrived)] += ok
        if ok and now <= due:
            self.hits += 1
        elif ok:
            self.missed(COLD if now < self.excess_until and now - self.excess <= due else LATE)
        else:
            self.missed(failure)

    def exceeded(self, seconds: float, now: float) -> None:
        """Note that a first batch of its size has just ended, ``seconds`` later than forecast."""
        # At 90 % utilization a backlog of c seconds is served in 9 c more.
        self.excess = seconds + (self.excess if now < self.excess_until else 0.0)
        self.excess_until = now + EXCUSED * self.excess

    def missed(self, reason: str) -> None:
        """Count a request that ended without a good answer in time."""
        self.misses[reason] = self.misses.get(reason, 0) + 1

    def refused(self, reason: str, now: float) -> None:
        """Count a refusal; the parameters are not to blame when a request would be late behind a cold batch."""
        self.missed(COLD if reason == Refused.LATE and now < self.excess_until else reason)

    def cells_of(self, bucket: int, rows: int, in_flight: int) -> list[Cell]:
        """Return a kind's cells: as observed, of those that overtook, as ``SUPPOSED``; none beyond ``MAX_KINDS``."""
        kind = bucket, rows, in_flight
        found = self.cells.get(kind)
        if found is None and len(self.cells) < MAX_KINDS:
            found = self.cells[kind] = [Cell() for _ in range(2 + bisect_left(SUPPOSED, in_flight))]
        return found or []

    def snapshot(self, now: float) -> ModelStats:
        """Copy the counters; the squares do not include the unfinished window."""
        window = int(now / WINDOW)
        if window != self._window:
            self._close_window(window)
        return ModelStats(
            **{name: getattr(self, name) for name in _SUMMED},
            misses=dict(self.misses),
            durations=list(self.durations),
            request_rows=list(self.request_rows),
            cells=[
                (*kind, executors, cell.batches, cell.busy, cell.busy_squared)
                for kind, cells in self.cells.items()
                for executors, cell in zip((0, kind[2], *SUPPOSED), cells, strict=False)
                if cell.batches
            ],
        )

    def _close_window(self, window: int) -> None:
        if self._window >= 0:
            self.arrivals_squared += self._window_arrivals**2
            self.windows += window - self._window
        self._window, self._window_arrivals = window, 0
