"""Arrivals, rows and noise that forecasts are played with: always the same, and at exactly the requested rate.

The rate of 4,000 drawn arrivals is off by 1.6 % (Poisson) or 3 % (gaps with a CV of 2). Near the capacity that decides
whether the SLO is met, and with equal seeds every forecast has the same error. So arrivals are scaled to the rate.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from random import Random

from msgspec.structs import replace

from carpool.learning import arrivals

SEED = 20
"""Every forecast of every decision has the same arrivals, so that candidates do not differ by chance."""

NOISELESS = 0.01
"""Coefficient of variation of batch times below which they are played without noise."""


def times(
    process: arrivals.Fitted, count: int, factor: float = 1.0, sample: int = 0, parts: int = 0, *, exact: bool = True
) -> list[float]:
    """List about ``count`` arrivals, in seconds, at ``factor`` times the load; ``sample``: which of many such lists.

    ``parts``: how many of them are parts of one long list: their rates differ by chance, and the rate of all is
    exact. With gaps of a CV of 4, 4,000 arrivals are 6 % faster or slower; those misses also limit the capacity.
    Not ``exact``: each list's rate differs by chance, as a tail over many samples has to include that.
    """
    rate, begin = process.rate * factor, 0.0
    # Scaled to one arrival per unit; bursts last as many seconds.
    more = {"lasting": process.lasting * rate} if isinstance(process, arrivals.Modulated) else {}
    run = _unit(replace(process, rate=1.0, **more), count * max(parts, 1), 0 if parts else sample, exact)
    if parts:
        begin = run[sample * count - 1] if sample else 0.0
        run = run[sample * count : (sample + 1) * count]
    return [(time - begin) / rate for time in run]


@lru_cache(maxsize=32)
def draws(noise: float, sample: int = 0) -> tuple[float, ...]:
    """Multipliers of batch times: gamma with a mean of exactly 1 and the given coefficient of variation."""
    if noise < NOISELESS:
        return (1.0,)
    rng = _random(sample)
    drawn = [rng.gammavariate(noise**-2, 1.0) for _ in range(997)]  # a prime, so that draws don't fall in step
    mean = sum(drawn) / len(drawn)
    # Begun elsewhere: with gaps of the same spread, each batch would otherwise take as long as the gap before it. From
    # this place, misses and latencies are the nearest to the mean of many draws (decision 64).
    return tuple(each / mean for each in drawn[600:] + drawn[:600])


@lru_cache(maxsize=16)
def rows(shares: tuple[float, ...], count: int, sample: int) -> tuple[int, ...]:
    """Draw the rows of ``count`` requests; ``shares``: of those with 2**(k-1) < rows <= 2**k, by k."""
    rng = _random(sample, "rows")
    classes = rng.choices(range(len(shares)), shares, k=count)
    return tuple(rng.randint(2**each // 2 + 1, 2**each) for each in classes)


def _random(sample: int, purpose: str = "") -> Random:
    """Return numbers of their own for every purpose: with the gaps' numbers, large requests would follow long gaps."""
    return Random(f"{SEED} {sample} {purpose}".rstrip() if sample or purpose else SEED)


@lru_cache(maxsize=48)
def _unit(process: arrivals.Fitted, count: int, sample: int, exact: bool) -> array[float]:
    """Return arrivals at one a second: a thousand policies share them; an array takes a quarter of a tuple's memory."""
    found = arrivals.first(process, count, _random(sample))
    scale = count / found[-1] if exact else 1.0
    return array("d", [time * scale for time in found])
