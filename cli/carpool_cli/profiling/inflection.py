"""The batch size beyond which larger ones gain little, as far as sizes were measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.learning.latency_model import ServiceTime

WORTHWHILE = 1.05
"""A batch whose cost per row is at most this times the lowest counts as equally good."""


def inflection(curve: ServiceTime, max_rows: int | None = None) -> int:
    """Return the fewest rows within 5 % of the lowest device time per row.

    Searched up to ``max_rows``, or up to the largest measured size.
    """
    costs = [curve.per_row(rows) for rows in range(1, (max_rows or curve.largest_measured) + 1)]
    best = min(costs)
    return next(rows for rows, cost in enumerate(costs, 1) if cost <= WORTHWHILE * best)


def may_gain_more(curve: ServiceTime) -> bool:
    """Whether sizes beyond the largest measured one may cost less per row, by more than 5 %.

    At the curve's last slope the cost per row falls towards that slope: 64 rows in 11.6 ms at 0.155 ms for each more
    cost 0.181 ms a row now, and at most 14 % less in larger batches.
    """
    largest = curve.largest_measured
    is_cheapest = curve.per_row(largest) <= WORTHWHILE * curve.per_row(inflection(curve))
    return is_cheapest and curve.per_row(largest) > WORTHWHILE * curve.tail_slope
