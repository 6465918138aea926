"""Arrivals and noise that forecasts are played with: always the same, and at the very rate that is asked for.

4,000 arrivals of a process come at its rate give or take 1.6 % (Poisson), 3 % (gaps with a CV of 2), or 15 % (bursts
of 0.3 s, lulls of 0.6 s): as much as decides whether the SLO is kept near the capacity, and with equal seeds the same
error in every forecast. So the last of them is put where it belongs, and bursts and lulls are drawn from equal parts of
their distribution (stratified sampling: Asmussen and Glynn, Stochastic Simulation, 2007, V.7).
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import chain
from random import Random

from msgspec.structs import replace

from carpool.learning import arrivals

SEED = 20
"""Every forecast of every decision meets the same arrivals, so that candidates differ by what they are."""

NOISELESS = 0.01
"""Coefficient of variation of service times below which they are played without noise."""


def times(
    process: arrivals.Poisson | arrivals.Gamma | arrivals.OnOff, count: int, factor: float = 1.0, lot: int = 0
) -> list[float]:
    """List about ``count`` arrivals, in seconds; ``lot``: which of many such lists.

    At ``factor`` times the load they come closer; in bursts they are as many times more, while phases last as long.
    """
    if isinstance(process, arrivals.OnOff):
        return _bursts(process, count, factor, lot)
    rate = process.rate * factor
    return [time / rate for time in _unit(replace(process, rate=1.0), count, lot)]


def drawn(process: arrivals.Poisson | arrivals.Gamma | arrivals.OnOff, count: int, lot: int) -> list[float]:
    """List ``count`` arrivals as they come, now more and now fewer: over many lots a tail has to have that as well."""
    return list(arrivals.first(process, count, _random(lot)))


def draws(noise: float, lot: int = 0) -> list[float] | None:
    """Multipliers of service times: gamma with mean 1 and the given coefficient of variation; ``None`` without."""
    if noise < NOISELESS:
        return None
    rng = _random(lot)
    shape = noise**-2
    return [rng.gammavariate(shape, 1 / shape) for _ in range(997)]  # a prime, so that draws don't fall in step


def _random(lot: int) -> Random:
    return Random(f"{SEED} {lot}" if lot else SEED)


@lru_cache(maxsize=16)
def _unit(process: arrivals.Poisson | arrivals.Gamma, count: int, lot: int) -> tuple[float, ...]:
    """Arrivals at one a second, to be put closer: the same for every search."""
    found = arrivals.first(process, count, _random(lot))
    scale = count / found[-1]
    return tuple(time * scale for time in found)


def _bursts(process: arrivals.OnOff, count: int, factor: float, lot: int) -> list[float]:
    """Play whole rounds of a burst and a lull, from a burst's beginning, with as many arrivals as belong there."""
    rounds = max(round(count / (process.rate * (process.mean_on + process.mean_off))), 1)
    rng = _random(lot)
    phases = chain.from_iterable(
        ((process.rate_on * factor, on), (process.rate_off * factor, off))
        for on, off in zip(_strata(process.mean_on, rounds, rng), _strata(process.mean_off, rounds, rng), strict=True)
    )
    number = max(round(rounds * (process.mean_on + process.mean_off) * process.rate * factor), 1)
    # A unit Poisson process, its clock running at the rate of each phase.
    unit = _unit(arrivals.Poisson(1.0), number, lot)
    found: list[float] = []
    start = begun = 0.0
    for rate, lasts in phases:
        ends = begun + rate * lasts
        while len(found) < number and unit[len(found)] <= ends:
            found.append(start + (unit[len(found)] - begun) / rate)
        start, begun = start + lasts, ends
    # The last may be left over by a rounding.
    return found + [start] * (number - len(found))


def _strata(mean: float, count: int, rng: Random) -> list[float]:
    """Exponential durations, one from the middle of each of ``count`` equal parts, in any order, with that mean."""
    found = [-math.log((number + 0.5) / count) for number in range(count)]
    scale = mean * count / math.fsum(found)
    rng.shuffle(found)
    return [value * scale for value in found]
