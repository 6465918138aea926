"""Where growing a batch stops paying."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.learning.latency_model import ServiceTime

WORTHWHILE = 1.05
"""A batch whose rows cost at most this times the cheapest is as good as the cheapest."""


def inflection(curve: ServiceTime, max_rows: int | None = None) -> int:
    """Return the fewest rows within 5 % of the least device time a row.

    Searched up to ``max_rows``, or as far as measured.
    """
    costs = [curve.per_row(rows) for rows in range(1, (max_rows or curve.largest_measured) + 1)]
    best = min(costs)
    return next(rows for rows, cost in enumerate(costs, 1) if cost <= WORTHWHILE * best)
