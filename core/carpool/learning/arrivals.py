"""Arrival processes, and how they are fitted to additive counters.

A process is a value; ``times(rng)`` draws it from time 0 with the caller's own generator, so that equal seeds give the
same arrivals (common random numbers) and nothing here holds state.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate, pairwise, repeat, takewhile
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from msgspec import Struct

from carpool.batching.counters import WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from random import Random

CORRELATED = 1.3
"""If the dispersion over longer times is so many times that over a window, bursts last longer than a window."""

DRAWN = 24
"""Rates of a ``Modulated`` process that come in all their shares."""

LONGEST, MOST = 1.0, 200.0
"""Most seconds, and arrivals, that a rate lasts: 4,000 requests then have 20 rates. Longer ones are another load."""


class Poisson(Struct, frozen=True):
    """Independent callers: exponential gaps at ``rate`` per second (> 0)."""

    rate: float
    dispersion: ClassVar[float] = 1.0
    """Variance over mean of the number of arrivals in any time."""

    def times(self, rng: Random) -> Iterator[float]:
        """Walk the process."""
        return accumulate(rng.expovariate(self.rate) for _ in repeat(None))


class Gamma(Struct, frozen=True):
    """A renewal process with gamma gaps: ``cv`` 1 is Poisson, below is smoother, above is burstier (> 0)."""

    rate: float
    cv: float

    @property
    def dispersion(self) -> float:
        """Variance over mean of the number of arrivals in a long time (Cox, Renewal Theory, 4.5)."""
        return self.cv**2

    def times(self, rng: Random) -> Iterator[float]:
        """Walk the process."""
        shape = 1 / self.cv**2
        scale = 1 / (self.rate * shape)
        return accumulate(rng.gammavariate(shape, scale) for _ in repeat(None))


class Modulated(Struct, frozen=True):
    """Independent callers at one of two rates, drawn again now and then: a Markov-modulated Poisson process.

    It models bursts that last (Fischer and Meier-Hellstern 1993). The higher rate has a third of the time, or less if
    the lower rate would otherwise fall below zero.
    """

    rate: float
    """Mean of both rates, per second (> 0)."""
    cv: float
    """Standard deviation of the rate over its mean, above 0 and at most the root of ``DRAWN - 1``."""
    lasting: float
    """Mean seconds until the rate is drawn again (> 0)."""

    @property
    def dispersion(self) -> float:
        """Variance over mean of the number of arrivals in a long time."""
        return 1 + 2 * self.rate * self.lasting * self.cv**2

    def times(self, rng: Random) -> Iterator[float]:
        """Yield arrivals: every ``DRAWN`` rates have equally many higher ones, so that short samples differ less."""
        high = min(DRAWN // 3, int(DRAWN / (1 + self.cv**2)))
        odds = math.sqrt(high / (DRAWN - high))
        rates = [1 + self.cv / odds] * high + [1 - self.cv * odds] * (DRAWN - high)
        begin = 0.0
        while True:
            rng.shuffle(rates)
            for rate in rates:
                end = begin + rng.expovariate(1 / self.lasting)
                now = begin
                while rate > 0 and (now := now + rng.expovariate(self.rate * rate)) < end:
                    yield now
                begin = end


Fitted: TypeAlias = Poisson | Gamma | Modulated
"""The processes that counts can be fitted with."""


def until(process: Fitted, seconds: float, rng: Random) -> list[float]:
    """List the arrivals of a process before ``seconds``."""
    return list(takewhile(lambda time: time < seconds, process.times(rng)))


def first(process: Fitted, count: int, rng: Random) -> list[float]:
    """List the first ``count`` arrivals of a process, fewer when a recording ends."""
    return [time for time, _ in zip(process.times(rng), range(count), strict=False)]


class WindowCounts(Struct, frozen=True):
    """Arrivals counted in ``windows`` windows of ``window`` seconds, with the sum of the squared counts: additive."""

    windows: int
    arrivals: int
    squared: int
    window: float = WINDOW
    gaps_squared: float = 0.0
    """Sum of the squared seconds between arrivals; 0: not counted."""

    @classmethod
    def of(cls, times: Iterable[float], seconds: float, window: float = WINDOW) -> WindowCounts:
        """Count times in [0, seconds); a last, unfinished window is left out."""
        windows = int(seconds / window + 1e-9)
        inside = [time for time in times if time < windows * window]
        squared = sum(count * count for count in Counter(int(time / window) for time in inside).values())
        return cls(windows, len(inside), squared, window, sum((b - a) ** 2 for a, b in pairwise(inside)))

    def __add__(self, other: WindowCounts) -> WindowCounts:
        return WindowCounts(
            self.windows + other.windows, self.arrivals + other.arrivals, self.squared + other.squared, self.window,
            self.gaps_squared + other.gaps_squared,
        )  # fmt: skip

    @property
    def rate(self) -> float:
        """Arrivals per second, 0 without windows."""
        return self.arrivals / (self.windows * self.window) if self.windows else 0.0

    @property
    def dispersion(self) -> float:
        """Variance over mean of the counts: 1 for Poisson, more for bursts. 1 while there is no evidence."""
        if self.windows < 2 or not self.arrivals:
            return 1.0
        mean = self.arrivals / self.windows
        variance = (self.squared - self.windows * mean * mean) / (self.windows - 1)
        return max(variance, 0.0) / mean

    @property
    def looks_poisson(self) -> bool:
        """Whether the counts agree with Poisson arrivals, within two standard errors."""
        if self.windows < 2 or not self.arrivals:
            return True
        return abs(self.dispersion - 1) <= 2 * math.sqrt((2 + self.windows / self.arrivals) / (self.windows - 1))

    @property
    def cv(self) -> float | None:
        """Coefficient of variation of gamma gaps; ``None``: gaps do not explain the counts, or were not counted.

        In a window of m mean arrivals a gamma renewal process has a dispersion between cv^2 and cv^2 + (1 - cv^4)/6m
        (Cox, Renewal Theory, 4.5); beyond a cv^2 of 3m that shows nothing. Three standard errors are allowed: the
        relative variance of cv^2 from n gaps is 2 (1 + cv^2)/n (delta method), that of a dispersion from w windows 2/w.
        """
        if not self.gaps_squared or not self.windows:
            return None
        squared = max(self.gaps_squared * self.rate**2 / self.arrivals - 1, 0.0)
        mean = self.arrivals / self.windows
        low, high = sorted((squared, squared + (1 - squared**2) / (6 * mean)))
        error = 3 * math.sqrt(2 * (1 + squared) / self.arrivals + 2 / self.windows)
        explained = low * (1 - error) <= self.dispersion <= high * (1 + error)
        return math.sqrt(squared) if explained and squared <= 3 * mean else None


def fitted(rate: float, short: WindowCounts, spread: float = 1.0, seconds: float = 0.0) -> Fitted:
    """Return the simplest process that fits: Poisson unless the counts clearly contradict it.

    ``spread``: variance over mean of the counts of longer intervals, of ``seconds`` each. If it is clearly
    more than over windows, and the gaps do not explain these, bursts last longer than a window.
    """
    if short.looks_poisson:
        return Poisson(rate)
    cv = short.cv
    lasting = _modulated(rate, short, spread, seconds) if cv is None else None
    # A cv below 0.1 or above 10 changes a queue by less than a forecast can resolve.
    return lasting or Gamma(rate, min(max(math.sqrt(short.dispersion) if cv is None else cv, 0.1), 10.0))


def _modulated(rate: float, short: WindowCounts, spread: float, seconds: float) -> Modulated | None:
    """Return a process whose bursts last longer than a window, or ``None``.

    If a rate lasts for T seconds in the mean, counts of w seconds have the dispersion
    1 + 2 rate cv^2 T (1 - (1 - exp(-w/T)) T/w). Two values of w give T, and then cv.
    """
    window, excess = short.window, short.dispersion - 1
    ratio, most = (spread - 1) / excess if excess > 0 else 0.0, min(MOST / rate, LONGEST)

    def share(w: float, lasts: float) -> float:
        return 1 + math.expm1(-w / lasts) * lasts / w

    if seconds < 2 * window or ratio < CORRELATED or window > 2 * most:
        return None
    low, high = window / 4, most
    while high - low > low / 100:
        middle = (low + high) / 2
        low, high = (middle, high) if share(seconds, middle) < ratio * share(window, middle) else (low, middle)
    squared = excess / (2 * rate * high * share(window, high))
    return Modulated(rate, math.sqrt(min(squared, DRAWN - 1)), high)
