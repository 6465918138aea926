"""Which sizes and numbers in flight are within reach: what evidence speaks for, whatever the load."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from carpool.learning.latency_model import WORTHWHILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.learning.latency_model import ServiceTime
    from carpool.policy.parameters import Limits, Parameters


SIZES: tuple[int, ...] = (1, *(size for n in range(1, 16) for size in (2**n, 3 * 2 ** (n - 1))), 2**16)
"""Batch sizes tried, up to the most that a bound may be: half-octave steps, between which device time per row differs
by a few percent."""

WAITS = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
"""Waits tried, as shares of the longest allowed."""


def spoken_for(service: ServiceTime, limits: Limits) -> int:
    """Return the largest size within bounds that what was measured speaks for, within twice the largest measured.

    One of those usually tried: where t(b) is flat, 46 rows have 4 % less capacity than 48, too little to be tried for.
    """
    most = min(limits.max_batch, 2 * service.largest_measured)
    return max(size for size in (*SIZES, limits.max_batch) if size <= most)


def sizes_within(values: tuple[int, ...], low: int, high: int, *, also: int) -> list[int]:
    """List the values within bounds, the bounds themselves, and one more, ascending."""
    return sorted({low, high, *(value for value in values if low <= value <= high), min(max(also, low), high)})


def productive(service: ServiceTime, reach: int) -> int:
    """Return the largest size up to ``reach`` whose rows aren't clearly dearer than those of a smaller batch."""
    cheapest, largest = math.inf, 1
    for rows in range(1, reach + 1):
        if service.lower(rows) / rows <= cheapest:
            largest = rows
        cheapest = min(cheapest, service.per_row(rows))
    return largest


def smallest_cheap(service: ServiceTime, sizes: Sequence[int]) -> int:
    """Return the smallest size whose rows cost less than those of the next, and hardly more than the cheapest."""
    costs = [service.per_row(size) for size in sizes]
    enough = WORTHWHILE * min(costs)
    larger = zip(sizes, costs, [*costs[1:], math.inf], strict=True)
    return next(size for size, mine, right in larger if mine <= min(right, enough))


def flights_worth(service: ServiceTime, limits: Limits, current: Parameters, *, hoped: bool = True) -> list[int]:
    """Numbers of batches in flight worth trying: what the device computes at once; more while nobody knows.

    Twice and four times the most ever seen: an overloaded device with many executors is reached in few steps. Not
    ``hoped``: no more than the executors known.
    """
    most = service.largest_in_flight
    wanted = {1, service.executors, current.max_in_flight} if hoped else {1, service.executors}
    if hoped and service.executors >= most:
        wanted |= {2 * most, 4 * most}
    return sorted({min(max(flights, limits.min_in_flight), limits.max_in_flight) for flights in wanted})
