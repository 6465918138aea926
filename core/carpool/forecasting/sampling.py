"""Arrivals and noise that forecasts are played with: always the same, and at the very rate that is asked for.

4,000 arrivals of a process come at its rate give or take 1.6 % (Poisson) or 3 % (gaps with a CV of 2): as much as
decides whether the SLO is kept near the capacity, and with equal seeds the same error in every forecast. So the last of
them is put where it belongs.
"""

from __future__ import annotations

from functools import lru_cache
from random import Random

from msgspec.structs import replace

from carpool.learning import arrivals

SEED = 20
"""Every forecast of every decision meets the same arrivals, so that candidates differ by what they are."""

NOISELESS = 0.01
"""Coefficient of variation of service times below which they are played without noise."""


def times(process: arrivals.Poisson | arrivals.Gamma, count: int, factor: float = 1.0, lot: int = 0) -> list[float]:
    """List about ``count`` arrivals, in seconds; ``lot``: which of many such lists.

    At ``factor`` times the load they come closer.
    """
    rate = process.rate * factor
    return [time / rate for time in _unit(replace(process, rate=1.0), count, lot)]


def drawn(process: arrivals.Poisson | arrivals.Gamma, count: int, lot: int) -> list[float]:
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
