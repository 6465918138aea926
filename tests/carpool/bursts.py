"""Arrivals whose rate changes, for tests of what learns from them."""

from __future__ import annotations

from typing import NamedTuple


def _poisson(rate, start, end, rng):
    now = start + rng.expovariate(rate) if rate > 0 else end
    while now < end:
        yield now
        now += rng.expovariate(rate)


class OnOff(NamedTuple):
    """Poisson at ``rate_on``, then at ``rate_off``, each phase exponential with the given mean seconds."""

    rate_on: float
    mean_on: float
    mean_off: float
    rate_off: float = 0.0

    def times(self, rng):
        """Walk the process, starting at the beginning of a burst."""
        start = 0.0
        while True:
            for rate, mean in ((self.rate_on, self.mean_on), (self.rate_off, self.mean_off)):
                end = start + rng.expovariate(1 / mean)
                yield from _poisson(rate, start, end, rng)
                start = end


class Schedule(NamedTuple):
    """Poisson at each (seconds, rate) in turn, over and over."""

    steps: tuple[tuple[float, float], ...]

    def times(self, rng):
        """Walk the process."""
        start = 0.0
        while True:
            for seconds, rate in self.steps:
                yield from _poisson(rate, start, start + seconds, rng)
                start += seconds
