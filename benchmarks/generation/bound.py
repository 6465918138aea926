"""An upper bound of goodput: no rule meets both targets for more requests, whatever it knows beforehand.

A step of the engine takes t = a + b B + c K + d P: B sequences decode, K tokens are cached, P prompt tokens are
computed. At most M sequences share it. So a request with p prompt tokens, and n output tokens after the first, takes at
least

    d p + n (a / M + b) + c (n p + n (n - 1) / 2)

seconds of the engine, preempted or not. The engine has as many seconds as pass between the arrival of the first request
and the time at which the last one has to end. The most requests are the cheapest ones that fit. This holds for any
part of the time, so the bound is the least sum over any division of it.

It is a loose one: it takes all steps to be full, and prompts to delay nobody. Steps of measured tables are no line, and
have no bound.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import inf, sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from carpool.generation.profiles import Linear
from generation.world import OWN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from generation.world import World

PIECES = 12
"""Into which time may be divided, beside where the load or the engine changes."""

AFTER = (0.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0)
"""Seconds after a piece of time in which its requests may end; those that may end later are given away."""


class Work(NamedTuple):
    """Requests by arrival: when they come, the seconds of the engine that they take, and when they have to end."""

    arrival: NDArray[np.float64]
    cost: NDArray[np.float64]
    end: NDArray[np.float64]

    def within(self, start: float, stop: float) -> Work:
        """Return those that arrive in a span of time."""
        first, last = np.searchsorted(self.arrival, (start, stop))
        return Work(*(part[first:last] for part in self))


def most(world: World) -> float | None:
    """Return requests per second of the scenario's own that can meet both targets; None where steps are no line."""
    if not isinstance(world.profile.step, Linear):
        return None
    work, cuts = work_of(world, world.profile.step), moments(world)
    least = [0.0]
    for j in range(1, len(cuts)):
        least.append(min(least[i] + piece(world, work, cuts[i], cuts[j]) for i in range(j)))
    return least[-1] / world.scenario.seconds


def work_of(world: World, step: Linear) -> Work:
    """Return the scenario's own requests, without those whose client leaves before an engine without load answers."""
    slo, found = world.scenario.slo, []
    shared = step.base / world.profile.max_running + step.sequence
    for request, output_tokens, cancel in world.arrivals():
        prompt, decoded = request.prompt_tokens, output_tokens - 1
        if request.tenant != OWN or cancel < request.arrival + 0.5 * decoded * step.base:  # of steps that may vary
            continue
        held = decoded * prompt + decoded * (decoded - 1) / 2
        cost = step.prompt_token * prompt + shared * decoded + step.kv_token * held
        found.append((request.arrival, cost, request.arrival + slo.ttft + decoded * slo.tpot))
    return Work(*np.array(found, float).T)


def moments(world: World) -> list[float]:
    """Return where time may be divided."""
    scenario = world.scenario
    even = [scenario.seconds * i / PIECES for i in range(PIECES)]
    changes = [*accumulate(seconds for seconds, _ in scenario.phases), *(at for at, _ in scenario.slowdowns)]
    return sorted({*even, *(at for at in changes if 0 < at < scenario.seconds), scenario.seconds})


def piece(world: World, work: Work, start: float, stop: float) -> int:
    """Return the most requests of those that arrive in a span of time."""
    own = work.within(start, stop)
    found = len(own.arrival)
    for after in AFTER:
        inside = np.sort(own.cost[own.end <= stop + after])
        fit = int(np.searchsorted(np.cumsum(inside), engine_seconds(world, start, stop + after), side="right"))
        found = min(found, len(own.arrival) - len(inside) + fit)
    return found


def engine_seconds(world: World, start: float, stop: float) -> float:
    """Return a span of time in seconds of the engine at its usual speed."""
    scenario = world.scenario
    changes = [(0.0, 1.0), *scenario.slowdowns, (inf, 1.0)]
    spans = [(max(start, at), min(stop, end), factor) for (at, factor), (end, _) in pairwise(changes)]
    still = sum(max(0.0, min(stop, at + length) - max(start, at)) for at, length in scenario.stalls)
    seconds = max(0.0, sum(max(0.0, end - begin) / factor for begin, end, factor in spans) - still)
    # Where steps vary, many are as long as they should be in the mean: four standard errors of one per TPOT, at least.
    return seconds + 4 * scenario.noise * sqrt(seconds * scenario.tpot)
