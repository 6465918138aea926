"""Arrival processes, and what additive counters show of them.

A process is a value; ``times(rng)`` walks it from time 0 with the caller's own generator, so that equal seeds give the
same arrivals (common random numbers) and nothing here holds state.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from carpool.batching.counters import WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from random import Random


class Process(Protocol):
    """Something that sends requests."""

    @property
    def rate(self) -> float:
        """Mean arrivals per second."""

    def times(self, rng: Random) -> Iterator[float]:
        """Arrival times in seconds from 0, non-decreasing; endless unless the process is a recording."""


class Poisson(Struct, frozen=True):
    """Independent callers: exponential gaps at ``rate`` per second (> 0)."""

    rate: float

    @property
    def dispersion(self) -> float:
        """Variance over mean of how many come in any time."""
        return 1.0

    def times(self, rng: Random) -> Iterator[float]:
        """Walk the process."""
        now, draw, rate = 0.0, rng.expovariate, self.rate
        while True:
            now += draw(rate)
            yield now


class Gamma(Struct, frozen=True):
    """A renewal process with gamma gaps: ``cv`` 1 is Poisson, below is smoother, above is burstier (> 0)."""

    rate: float
    cv: float

    @property
    def dispersion(self) -> float:
        """Variance over mean of how many come in a long time (Cox, Renewal Theory, 4.5)."""
        return self.cv**2

    def times(self, rng: Random) -> Iterator[float]:
        """Walk the process."""
        shape = 1 / self.cv**2
        now, draw, scale = 0.0, rng.gammavariate, 1 / (self.rate * shape)
        while True:
            now += draw(shape, scale)
            yield now


def until(process: Process, seconds: float, rng: Random) -> list[float]:
    """List the arrivals of a process before ``seconds``."""
    found = []
    for time in process.times(rng):
        if time >= seconds:
            break
        found.append(time)
    return found


def first(process: Process, count: int, rng: Random) -> list[float]:
    """List the first ``count`` arrivals of a process, fewer when a recording ends."""
    return [time for time, _ in zip(process.times(rng), range(count), strict=False)]


class WindowCounts(Struct, frozen=True):
    """Arrivals counted in ``windows`` windows of ``window`` seconds, with the sum of the squared counts: additive."""

    windows: int
    arrivals: int
    squared: int
    window: float = WINDOW

    @classmethod
    def of(cls, times: Iterable[float], seconds: float, window: float = WINDOW) -> WindowCounts:
        """Count times in [0, seconds); a last, unfinished window is left out."""
        counts = [0] * int(seconds / window + 1e-9)
        for time in times:
            index = int(time / window)
            if index < len(counts):
                counts[index] += 1
        return cls(len(counts), sum(counts), sum(count * count for count in counts), window)

    def __add__(self, other: WindowCounts) -> WindowCounts:
        return WindowCounts(
            self.windows + other.windows, self.arrivals + other.arrivals, self.squared + other.squared, self.window
        )

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
    def dispersion_error(self) -> float:
        """Standard error of ``dispersion``, were the arrivals Poisson: sqrt(2 / (n - 1)), plus 1/mean for rare ones."""
        if self.windows < 2 or not self.arrivals:
            return math.inf
        return math.sqrt((2 + self.windows / self.arrivals) / (self.windows - 1))

    @property
    def looks_poisson(self) -> bool:
        """Whether the counts give no reason to doubt that arrivals are Poisson (two standard errors)."""
        return abs(self.dispersion - 1) <= 2 * self.dispersion_error

    @property
    def cv(self) -> float:
        """Coefficient of variation of the gaps, were this a gamma renewal process.

        In long windows the dispersion tends to cv^2; in a window of m mean arrivals an equilibrium renewal process has
        dispersion cv^2 + (1/6 + cv^4/2 - s/3)/m + o(1/m), s the third central moment of a gap over its mean cubed
        (Cox, Renewal Theory, 4.5); for gamma gaps s = 2 cv^4, which leaves cv^2 + (1 - cv^4)/(6m). That is solved for
        cv. It has no root where bursts outlast the window: cv^2 is then at least 3m, and 3m is the answer, a lower
        bound. One arrival a window or fewer is no evidence, and the dispersion itself is used.
        """
        mean = self.arrivals / self.windows if self.windows else 0.0
        if mean <= 1:
            return math.sqrt(self.dispersion)
        # x - x^2/6m + 1/6m = dispersion, the smaller root.
        under = 9 * mean * mean - 6 * mean * self.dispersion + 1
        return math.sqrt(max(3 * mean - math.sqrt(max(under, 0.0)), 0.0))

    def process(self) -> Poisson | Gamma:
        """Return the simplest process that fits: Poisson unless the counts clearly say otherwise; needs arrivals."""
        # Gaps more regular than cv 0.1 or wilder than 10 make no difference to a queue that a forecast could resolve.
        return Poisson(self.rate) if self.looks_poisson else Gamma(self.rate, min(max(self.cv, 0.1), 10.0))
