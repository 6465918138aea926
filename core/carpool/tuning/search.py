"""The best configuration within reach: which sizes, waits and numbers in flight are forecast, and in what order."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from carpool.policy.durations import Duration, whole_microseconds
from carpool.policy.parameters import Parameters
from carpool.tuning.assessment import FINE, HEADROOM, KEPT, Assessment, Assessor
from carpool.tuning.candidate_range import (
    SIZES,
    WAITS,
    flights_worth,
    productive,
    sizes_within,
    smallest_cheap,
    spoken_for,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from carpool.learning.latency_model import ServiceTime


LEAST = 0.003
"""Relative saving of device time below which nothing is changed, however sure it is: a change is a message to every
replica, and a setting that comes from a forecast of 4,000 requests is not better known than that."""


class Choice(Struct, frozen=True):
    """The best configuration within reach, next to the present one."""

    best: Assessment
    current: Assessment
    sizes: tuple[int, ...] = ()
    """Batch sizes that it was chosen from."""


def choose(assessor: Assessor, current: Parameters, avoid: Collection[Parameters] = (), unused: float = 0.0) -> Choice:
    """Find the best configuration within bounds and evidence, ``avoid`` left out.

    ``unused``: share of device time that a size never measured has to save, where the present configuration holds now.

    Sizes go up to twice the largest measured, and not beyond where rows clearly cost more in company. Each is tried
    with the longest wait that keeps the SLO at ``HEADROOM`` times the load. Where none does, every second wait is tried
    at the largest size and at those whose rows are cheapest. From the best of these the search walks to neighbours
    while they are better: device time falls with size and wait until due times turn it, so the walk is short.
    """
    situation = assessor.situation
    limits, service = situation.limits, situation.service
    reach = max(productive(service, spoken_for(service, limits)), limits.min_batch)
    sizes = sizes_within(SIZES, limits.min_batch, reach, also=current.max_batch)
    present = assessor.assess(current, KEPT)
    best = _search(assessor, sizes, current, avoid)
    if unused and present.holds_now and best is not None and best.parameters.max_batch not in service.sizes:
        used = [size for size in sizes if size in service.sizes]
        if used and best.device_time > (1 - unused) * present.device_time:
            best = _search(assessor, used, current, avoid)
    if best is not None and present.holds_now and not _is_bearable(assessor, best):
        best = _sober(assessor, sizes, current, avoid, best.parameters.max_in_flight)
    return Choice(best=best or assessor.assess(current), current=present, sizes=tuple(sizes))


def _sober(
    assessor: Assessor, sizes: Sequence[int], current: Parameters, avoid: Collection[Parameters], flights: int
) -> Assessment | None:
    """Find the best for the executors that are known, with ``flights`` in flight if that may be better and is bearable.

    Two executors make single rows look best, of which one can't serve half: who turns to them in that hope has made
    hundreds late before it is found vain.
    """
    situation = assessor.situation
    known = flights_worth(situation.service, situation.limits, current, hoped=False)
    best = _search(assessor, sizes, current, avoid, known)
    if best is None:
        return None
    hoped = assessor.assess(replace(best.parameters, max_in_flight=flights))
    tries = hoped.parameters not in avoid and is_better(hoped, best, LEAST) and _is_bearable(assessor, hoped)
    return hoped if tries else best


def _is_bearable(assessor: Assessor, best: Assessment) -> bool:
    """Whether a configuration keeps the SLO though the executors that it hopes for are not there."""
    situation, flights = assessor.situation, best.parameters.max_in_flight
    if situation.service.executors_for(flights) == situation.service.executors:
        return True
    sober = replace(situation, service=replace(situation.service, largest_in_flight=flights + 1))
    return Assessor(sober).assess(best.parameters).holds_now


class _Grid:
    """Sizes and waits to choose from, ascending, and where in it there is room for more load."""

    def __init__(self, assessor: Assessor, sizes: Sequence[int], avoid: Collection[Parameters]) -> None:
        self._assessor = assessor
        self._avoid = avoid
        limits, service = assessor.situation.limits, assessor.situation.service
        self.sizes = sizes
        shares = (share * limits.max_wait for share in WAITS)
        self.waits = sorted({whole_microseconds(max(limits.min_wait, wait)) for wait in shares})
        self._cheapest = list(accumulate((assessor.situation.rows * service.per_row(size) for size in sizes), min))
        """Executor time of a request in batches of up to so many rows, were they all as large as pays."""

    def at(self, places: Iterable[tuple[int, int]], flights: int) -> list[Assessment]:
        """Assess places, as (index of the size, index of the wait); those outside and those to be avoided are none."""
        sizes, waits = self.sizes, self.waits
        inside = [(sizes[i], waits[j]) for i, j in places if 0 <= i < len(sizes) and 0 <= j < len(waits)]
        points = [Parameters(max_batch=i, max_wait=Duration(j), max_in_flight=flights) for i, j in inside]
        return [self._assessor.assess(point) for point in points if point not in self._avoid]

    def around(self, here: Assessment) -> list[Assessment]:
        """Assess the neighbours."""
        i, j = self.sizes.index(here.parameters.max_batch), self.waits.index(here.parameters.max_wait)
        neighbours = ((i + di, j + dj) for di, dj in ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, 1), (-1, -1)))
        return self.at(neighbours, here.parameters.max_in_flight)

    def at_size(self, size: int, flights: int) -> list[Assessment]:
        """Assess every second wait of a size."""
        return self.at([(self.sizes.index(size), wait) for wait in range(0, len(self.waits), 2)], flights)

    def frontier(self, flights: int) -> list[Assessment]:
        """Take of each size the longest wait that has room: the smaller the batch, the longer that is.

        Shorter waits, and smaller batches with the same one, take more device time where t(b) has no valleys. So a size
        whose longest wait looks dearer than what was found is none to look for room in; nor is one at which there are
        too few executors for the load, however full its batches are.
        """
        situation, cheapest = self._assessor.situation, self._cheapest
        at_once, loaded = min(situation.service.executors_for(flights), flights), HEADROOM * situation.process.rate
        found: list[Assessment] = []
        longest, last = 0, len(self.waits) - 1
        for i in reversed(range(len(self.sizes))):
            least = min((one.device_time for one in found), default=math.inf)
            if cheapest[i] >= least * at_once or cheapest[i] * loaded >= at_once:
                continue
            if all(one.looks >= least for one in self.at([(i, last)], flights)):
                continue
            if self._roomy(i, last, flights):
                longest = last
            elif not self._roomy(i, longest, flights):
                continue
            too_long = last
            while too_long - longest > 1:
                middle = (longest + too_long) // 2
                if self._roomy(i, middle, flights):
                    longest = middle
                else:
                    too_long = middle
            found += self.at([(i, longest)], flights)
        return found

    def _roomy(self, i: int, j: int, flights: int) -> bool:
        return any(one.holds_ahead for one in self.at([(i, j)], flights))


def _search(
    assessor: Assessor,
    sizes: Sequence[int],
    current: Parameters,
    avoid: Collection[Parameters],
    in_flight: Sequence[int] | None = None,
) -> Assessment | None:
    """Find the best of some sizes, ascending, with any wait; ``None``: all are avoided.

    ``in_flight``: numbers in flight to look among; ``None``: all that are worth it.
    """
    limits, service = assessor.situation.limits, assessor.situation.service
    grid = _Grid(assessor, sizes, avoid)
    numbers = in_flight or flights_worth(service, limits, current)
    starts = [(flights, room) for flights in numbers if (room := grid.frontier(flights))]
    if not starts:
        begins = _begins(service, sizes)
        starts = [(flights, grid.at_size(size, flights)) for flights in numbers for size in begins]
    # Where some number in flight keeps the SLO, those that don't are not searched for the most they could do.
    holding = [(flights, start) for flights, start in starts if any(one.holds_now for one in start)]
    restores = not assessor.assess(current, KEPT).holds_ahead
    best: Assessment | None = None
    for flights, start in holding or starts:
        # Margin is restored by what is known, where that does; what more in flight may save is tried from there.
        if restores and best is not None and best.holds_ahead and flights > service.executors:
            break
        step = here = _best(start)
        while step is not None:
            here = step
            step = _best(grid.around(here), than=here, share=0.001)
        if here is not None and (best is None or is_better(here, best, 0.005)):
            best = here
    return best


def _begins(service: ServiceTime, sizes: Sequence[int]) -> list[int]:
    """List the sizes from which the search begins where none has room.

    Device time a row has valleys, at a tile's size, out of which no walk leads: the deepest is one of them. By what is
    believed, and by what is sure: of sizes hardly measured the luckiest looks cheapest. And so is the first that is
    nearly as deep: smaller batches take less time, which may be what holds a higher load.
    """
    believed = min(sizes, key=lambda size: (service.per_row(size), size))
    sure = min(sizes, key=lambda size: (service.upper(size) / size, size))
    return sorted({sizes[-1], believed, sure, smallest_cheap(service, sizes)})


def _best(candidates: list[Assessment], than: Assessment | None = None, share: float = 0.0) -> Assessment | None:
    """Return who ranks first, if that ``is_better`` than another, with as few forecasts as that takes."""
    aim = than.device_time * (1 - share) if than is not None and than.rank[0] == 0 else math.inf
    for one in sorted(candidates, key=lambda one: one.looks):
        if one.looks >= aim:
            return None
        if one.holds_now and one.holds_ahead:
            return one
    if aim < math.inf:
        return None
    holding = [one for one in candidates if one.holds_now]
    first = min(holding or candidates, key=lambda one: one.rank, default=None)
    return first if first is None or than is None or is_better(first, than, share) else None


def is_better(one: Assessment, other: Assessment, share: float) -> bool:
    """Whether ``one`` is better than ``other`` by more than ``share`` of what they differ in."""
    if one.rank[0] != other.rank[0]:
        return one.rank[0] < other.rank[0]
    least = FINE / 4 if one.rank[0] else 0.0
    for mine, theirs in zip(one.rank[1:], other.rank[1:], strict=True):
        if mine < theirs - share * max(theirs, least):
            return True
        if mine > theirs:
            return False
    return False
