"""First batches of each size, which may be slow: kernels are chosen or compiled for a shape when it first comes."""

from __future__ import annotations

from math import inf

from carpool.batching.counters import MAX_SIZES
from carpool.batching.requests import Batch, Estimate, time_of

SLOW = 3.0
"""A first batch is slow if it takes so many times the upper time of its size."""


class FirstBatches:
    """The batch sizes of one model that were served before."""

    __slots__ = ("_excess", "_judged", "_slow", "seen")

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()
        """(bucket, rows)."""
        self._judged = self._slow = 0
        """First batches whose time was forecast, and those of them that were ``SLOW``."""
        self._excess = 0.0
        """Seconds by which these exceeded it."""

    def sent(self, batch: Batch) -> None:
        """Mark a batch as cold if it is the first of its size."""
        size = (batch.bucket, batch.rows)
        if size not in self.seen and len(self.seen) < MAX_SIZES:
            self.seen.add(size)
            batch.cold = True

    def ended(self, batch: Batch, estimate: Estimate | None, now: float) -> float:
        """Learn how long a cold batch took; return the seconds over its forecast, 0 if it was not ``SLOW``."""
        if estimate is None:
            return 0.0
        estimate = estimate.of(batch.bucket)
        # A batch that began before anything was measured is judged by what was measured since.
        finish = batch.finish if batch.finish < inf else batch.dispatched + time_of(estimate.times, batch.rows)
        slow = now - finish > (SLOW - 1) * time_of(estimate.upper, batch.rows)
        self._judged += 1
        self._slow += slow
        excess = now - finish if slow else 0.0
        self._excess += excess
        return excess

    @property
    def slow(self) -> bool:
        """Whether first batches of a size are slow more often than not."""
        return self._slow > 1 and 2 * self._slow > self._judged

    def excess(self, bucket: int, rows: int) -> float:
        """Return by how many seconds a batch is expected to exceed the time of its size, as the first of it."""
        is_first = (bucket, rows) not in self.seen and len(self.seen) < MAX_SIZES
        return self._excess / self._slow if self.slow and is_first else 0.0

    def known_size(self, bucket: int, rows: int) -> int:
        """Return the largest size up to ``rows`` that was served before or is in the series 1, 2, 3, 4, 6, 8, 12, ...

        The series is half octaves: a dozen first batches up to 64 rows instead of 64. At most a third of a batch then
        waits for the next one, and that third has waited least.
        """
        octave = 1 << (rows.bit_length() - 1)
        step = octave + octave // 2 if rows >= octave + octave // 2 else octave
        return next((size for size in range(rows, step, -1) if (bucket, size) in self.seen), step)
