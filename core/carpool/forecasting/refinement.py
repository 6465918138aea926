"""Refines a forecast's tail with more requests: under bursts, a search's 4,000 leave the p99 up to 25 % off."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.forecasting.forecast import Forecast

FINENESS = math.log(1.005)
"""Width of the classes that latencies are counted in, as a difference of logarithms: 0.25 % off at most."""

INSTANT = 1e-9
"""Seconds below which all latencies are one class."""

ENOUGH = 8
"""Samples from which their differences give the confidence interval of the p99."""

MOST = 128
"""Samples played at most."""

WITHIN = 0.02
"""Half of the 95 % interval of the p99, relative to it, at which no more are played."""

BELIEVED = 4
"""Samples from which answers are compared with the forecast."""


class Refinement:
    """Latencies pooled over samples of arrivals, each played from an empty queue."""

    __slots__ = ("_counts", "_tails", "misses", "requests")

    def __init__(self) -> None:
        # Takes hardly any memory: an operator has forty thousand of these, and nearly all stay empty.
        self._counts: tuple[array[int], ...] = ()
        """Classes of latencies, ascending, and the count of each."""
        self._tails: tuple[float, ...] = ()
        """The p99 of each sample."""
        self.misses: tuple[float, ...] = ()
        """The share of requests that missed, by sample."""
        self.requests = 0

    def add(self, latencies: Sequence[float], miss_fraction: float, requests: int) -> None:
        """Add a sample's latencies (seconds)."""
        self.misses += (miss_fraction,)
        self.requests += requests
        if latencies:
            counts = Counter(dict(zip(*self._counts, strict=True)) if self._counts else None)
            ascending = sorted(latencies)
            begin = 0
            while begin < len(ascending):
                # One logarithm per class: one per latency would cost more than the search.
                each = math.floor(math.log(max(ascending[begin], INSTANT)) / FINENESS)
                end = bisect_left(ascending, math.exp((each + 1) * FINENESS), begin + 1)
                counts[each] += end - begin
                begin = end
            self._counts = tuple(array("i", each) for each in zip(*sorted(counts.items()), strict=True))
            self._tails += (ascending[max(math.ceil(0.99 * len(ascending)) - 1, 0)],)

    @property
    def samples(self) -> int:
        """Number of samples added."""
        return len(self.misses)

    @property
    def is_done(self) -> bool:
        """Whether more samples would change little: half of the p99's interval is within ``WITHIN``."""
        if self.samples < ENOUGH:
            return False
        return self.samples >= MOST or len(self._tails) < 2 or self.doubt <= WITHIN

    @property
    def doubt(self) -> float:
        """Half of the 95 % interval of the p99, relative to it, from the differences of samples."""
        return 1.96 * stdev(self._tails) / math.sqrt(len(self._tails)) / fmean(self._tails)

    def quantile(self, q: float) -> float:
        """Return a quantile (seconds) of all latencies; ``inf`` without any."""
        classes, counts = self._counts or ((), ())
        beyond, most = 0, (1 - q) * sum(counts)
        for each, count in zip(reversed(classes), reversed(counts), strict=True):
            beyond += count
            if beyond > most:
                return math.exp((each + 0.5) * FINENESS)
        return math.inf

    def refined(self, searched: Forecast) -> Forecast:
        """Return a forecast with its tail and misses from all samples; unchanged while there is only one."""
        if self.samples < 2:
            return searched
        misses = sum(self.misses) / self.samples
        return replace(searched, p99=self.quantile(0.99), miss_fraction=misses, requests=self.requests)

    @property
    def expected_p99(self) -> float | None:
        """The p99 to compare answers with, in seconds; ``None`` with too few samples, or without answers."""
        return self.quantile(0.99) if self.samples >= BELIEVED and self._counts else None
