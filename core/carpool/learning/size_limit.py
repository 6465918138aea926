"""Rows that a batch may have now, if the Batcher allows fewer than ``max_batch``.

It does so while requests make their batches fail (``isolation``), and if the upstream refuses large batches. A
forecast with ``max_batch`` rows would then claim a capacity that the model does not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.batching.counters import ModelStats

HALF_LIFE = 3.0
"""Seconds in which counts lose half of their weight. The limit doubles and halves while failing requests come."""

MOSTLY = 0.5
"""Share of batches that must be limited: below it, a forecast is mostly about the others."""

MOVED = 1.5
"""Factor between two limits that needs another search."""


class SizeLimit:
    """The limit that most batches have, from counters. Every second counts alike, however many batches it had."""

    def __init__(self) -> None:
        self._share = 0.0
        self._mean = 0.0
        self.largest: int | None = None
        """Rows; ``None``: most batches are not limited."""

    def observe(self, seconds: float, stats: ModelStats) -> bool:
        """Add the counts of the last ``seconds`` on the clock; return whether the limit changed."""
        batches = max(sum(cell[4] for cell in stats.cells if not cell[3]), stats.limited)
        if not batches or not (stats.limited or self._share):
            return False
        keep = 0.5 ** (seconds / HALF_LIFE)
        if stats.limited:
            mean = stats.limited_rows / stats.limited
            self._mean = keep * self._mean + (1 - keep) * mean if self._share else mean
        self._share = keep * self._share + (1 - keep) * stats.limited / batches
        before = self.largest
        if self._share <= MOSTLY:
            self.largest = None
        elif before is None or not before / MOVED < self._mean < before * MOVED:
            self.largest = max(round(self._mean), 1)
        return self.largest != before
