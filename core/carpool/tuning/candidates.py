"""Which settings are compared: batch sizes supported by measurements, waits, and numbers of batches in flight."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING

from carpool.policy.parameters import Limits, Parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from carpool.forecasting.forecaster import Assessment, Forecaster
    from carpool.learning.latency_model import ServiceTime

SIZES: tuple[int, ...] = (1, *(size for n in range(1, 16) for size in (2**n, 3 * 2 ** (n - 1))), 2**16)
"""Batch sizes compared, up to the most that a bound may be: half-octave steps, between which device time per row
differs by a few percent."""

WAITS = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
"""Waits compared, as shares of the longest allowed."""


def largest_reliable(service: ServiceTime, limits: Limits) -> int:
    """Return the largest size within bounds and within twice the largest measured.

    It is one of ``SIZES``: where batch latency is flat, 46 rows have 4 % less capacity than 48.
    """
    most = min(limits.max_batch, 2 * service.largest_measured)
    return max(size for size in (*SIZES, limits.max_batch) if size <= most)


def productive_sizes(
    service: ServiceTime, limits: Limits, *, also: int, least: Callable[[int], float] | None = None
) -> list[int]:
    """List sizes, ascending, up to the largest reliable one, whose rows do not clearly cost more than in smaller.

    ``least``: the least seconds of a batch by its rows; the lower confidence if not given.
    """
    least = least or service.lower
    cheapest, largest = math.inf, 1
    for rows in range(1, largest_reliable(service, limits) + 1):
        if least(rows) / rows <= cheapest:
            largest = rows
        cheapest = min(cheapest, service.per_row(rows))
    low, high = limits.min_batch, max(largest, limits.min_batch)
    return sorted({low, high, *(size for size in SIZES if low <= size <= high), min(max(also, low), high)})


def known_flights(service: ServiceTime, limits: Limits, times: int = 1) -> int:
    """Return how many batches in flight use all of the known server concurrency.

    ``times`` as many if that is several and a higher one is not refuted: more in flight will show it.
    """
    known = service.executors_for(times * service.executors) if service.executors > 1 else 1
    return min(max(known, limits.min_in_flight), limits.max_in_flight)


class Grid:
    """Settings of given sizes with one number of batches in flight. Pure but for the forecasts it asks for."""

    def __init__(
        self, forecaster: Forecaster, sizes: Sequence[int], flights: int, avoid: Collection[Parameters] = ()
    ) -> None:
        self._forecaster = forecaster
        self._sizes = sizes
        self._waits = forecaster.situation.limits.waits(WAITS)
        self._flights = flights
        self._avoid = avoid

    def at(self, size: int, wait: int) -> Assessment:
        """Assess a size with the wait of an index."""
        return self._forecaster.assess(Parameters(size, self._waits[wait], self._flights))

    def unheld(self) -> list[Assessment]:
        """Assess all sizes with the shortest wait."""
        return [one for size in self._sizes if (one := self.at(size, 0)).parameters not in self._avoid]

    def held(self, size: int) -> list[Assessment]:
        """Assess a size with all waits."""
        return [one for wait, _ in enumerate(self._waits) if (one := self.at(size, wait)).parameters not in self._avoid]

    def with_headroom(self) -> list[Assessment]:
        """Assess for each size the longest wait that meets the SLO now and at 1.25 times the load.

        The smaller the batch, the longer that wait. Shorter waits take more device time; so a size needs no closer
        look if its longest wait costs more than the best so far.
        """
        found: list[Assessment] = []
        longest, last = 0, len(self._waits) - 1
        for size in reversed(self._sizes):
            least = min((one.device_time for one in found), default=math.inf)
            if self._is_hopeless(size, least) or self.at(size, last).first.device_time >= least:
                continue
            if not self._is_too_long(size, last):
                longest = last
            elif not self._is_too_long(size, longest):
                longest = bisect_left(range(last), True, longest + 1, key=partial(self._is_too_long, size)) - 1
            else:
                continue
            found.append(self._without_vain_wait(size, longest))
        return found

    def _is_too_long(self, size: int, wait: int) -> bool:
        one = self.at(size, wait)
        return one.parameters in self._avoid or not one.holds_ahead

    def _is_hopeless(self, size: int, least: float) -> bool:
        """Whether no wait makes a size as cheap as ``least`` seconds per request, or able to carry the load."""
        situation = self._forecaster.situation
        service, rows = situation.service, situation.rows
        at_once = min(service.executors, self._flights)
        cheapest = rows * min(service.per_row(each) for each in self._sizes if each <= size)
        return cheapest >= least * at_once or cheapest * situation.process.rate >= at_once

    def _without_vain_wait(self, size: int, wait: int) -> Assessment:
        """Return the shortest wait with as little device time as a given one: a longer one saves nothing more."""
        best = self.at(size, wait)
        enough = (1 + VAIN) * best.device_time

        def is_vain(shorter: int) -> bool:
            return not self._is_too_long(size, shorter) and self.at(size, shorter).device_time <= enough

        return self.at(size, bisect_left(range(wait), True, key=is_vain))


VAIN = 0.0005
"""Relative saving of device time that does not justify a longer wait."""
