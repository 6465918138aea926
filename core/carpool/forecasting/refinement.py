"""How sure a p99 is: pooled over sections of a run, or of many, with the interval that chance leaves it.

Latencies of one run depend on each other, a busy spell makes hundreds late at once, so that their number tells little.
Sections of many are nearly independent: how much their shares beyond the pooled quantile differ gives the error of the
mean share, and the quantiles at both ends of that share's interval bound the quantile itself (Heidelberger and Lewis,
"Quantile estimation in dependent sequences", Operations Research 32, 1984; sections: Asmussen and Glynn, Stochastic
Simulation, 2007, III.5). That holds where latencies have gaps as well.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from carpool.forecasting.queueing import Forecast

SECTIONS = 8
"""Sections that each run is cut into: of 4,000 requests, each has five beyond the p99."""

MOST_SECTIONS = 32
"""From which on neighbours are merged: more of them would tell little more (Schmeiser, "Batch size effects", Operations
Research 30, 1982: 10 to 30), need more memory, and the longer they are the less they depend on each other."""

FINENESS = math.log(1.005)
"""Width of the classes that latencies are counted in, as a difference of logarithms: 0.25 % off at most."""

WITHIN = 0.02
"""Half of the 95 % interval that the p99 told of a configuration in force has, relative to it, where that many tell:"""

ENOUGH_RUNS = 4
"""From which on an interval is believed to be as narrow as it looks: told by eight sections it is off by a quarter, and
who stops as soon as it is narrow stops where it is too narrow (Glynn and Whitt, "The asymptotic validity of sequential
stopping rules for stochastic simulations", Annals of Applied Probability 2, 1992)."""

MOST_TOLD = 512_000
"""Requests that it is told from at most, a search's worth with every decision: bursts and noise leave a p99 from 4,000
requests 10 to 25 % off at high load, and ranking candidates, who all meet the same, needs no better."""

INSTANT = 1e-9
"""Seconds that are none: what a very noisy model's draws may come to."""

CONFIDENT = 1.96
"""Standard errors on either side of an interval that is missed once in twenty times."""

SLOW = 1.2
"""Factor on the forecast from which answers are too slow for it to be right."""

QUICK = 2.0
"""Factor by which the median has to be below the forecast. Quicker answers harm nobody, and may have a harmless reason:
the largest batch that fits into the server's memory is smaller than the parameters say."""

OWN = 0.002
"""Seconds that the sidecar itself may take for a request, of which forecasts know nothing."""


class Spread(NamedTuple):
    """A share of requests, and how surely a stretch of so many of them shows it."""

    share: float
    deviation: float
    """Standard deviation of the share of one stretch."""
    requests: float
    """In a stretch, on average."""


class Settling:
    """A quantile over more and more requests."""

    __slots__ = ("_q", "_runs", "_sections", "doubt", "value")

    def __init__(self, q: float = 0.99) -> None:
        self._q = q
        self._runs = 0
        self._sections: list[Counter[int]] = []
        self.value = math.inf
        """Seconds; ``inf`` of nothing."""
        self.doubt = math.inf
        """Half of its 95 % interval, relative to it."""

    def add(self, latencies: Sequence[float]) -> None:
        """Add a run's latencies (seconds), in order of arrival."""
        self._runs += 1
        classes = [math.floor(math.log(max(latency, INSTANT)) / FINENESS) for latency in latencies]
        size = -(-len(classes) // SECTIONS)
        self._sections += [Counter(classes[first : first + size]) for first in range(0, len(classes), size or 1)]
        while len(self._sections) > MOST_SECTIONS:
            pairs = zip(self._sections[::2], [*self._sections[1::2], Counter()], strict=False)
            self._sections = [one + other for one, other in pairs]
        self._judge()

    def quantile(self, q: float) -> float:
        """Return a quantile (seconds) of all that was added."""
        descending = sorted((item for section in self._sections for item in section.items()), reverse=True)
        beyond, most = 0, (1 - q) * sum(count for _, count in descending)
        for each, count in descending:
            beyond += count
            if beyond > most:
                return math.exp((each + 0.5) * FINENESS)
        return math.inf

    def beyond(self, seconds: float) -> Spread:
        """Return the share of latencies beyond a time, and how much that differs between sections."""
        least = math.floor(math.log(max(seconds, INSTANT)) / FINENESS)
        sections = [section for section in self._sections if section]
        shares = [_count(section, least) / section.total() for section in sections]
        requests = sum(section.total() for section in sections) / max(len(sections), 1)
        return Spread(fmean(shares), stdev(shares), requests) if len(shares) > 1 else Spread(0.0, math.inf, requests)

    def is_known(self, within: float) -> bool:
        """Whether it is: half of its 95 % interval at most so large, relative to it, by enough runs to believe that."""
        return self._runs >= ENOUGH_RUNS and self.doubt <= within

    def _judge(self) -> None:
        sections = self._sections
        total: Counter[int] = Counter()
        for section in sections:
            total.update(section)
        number = total.total()
        if not number:
            return
        descending = sorted(total, reverse=True)
        beyond = list(accumulate(total[each] for each in descending))

        def reached(share: float) -> int:
            """Return the class beyond whose lower end so large a share of all lies."""
            return next(
                (each for each, more in zip(descending, beyond, strict=True) if more > share * number), descending[-1]
            )

        share = 1 - self._q
        quantile = reached(share)
        self.value = math.exp((quantile + 0.5) * FINENESS)
        if len(sections) < 2:
            return
        # Of many equal latencies at the quantile, those belong beyond it or not, whichever comes nearer to the share.
        least = min((quantile, quantile + 1), key=lambda edge: abs(_count(total, edge) / number - share))
        mean = _count(total, least) / number
        freedom = len(sections) - 1
        # Of a ratio, by residuals: sections need not be equally long, since who is refused has no latency.
        squares = sum((_count(section, least) - mean * section.total()) ** 2 for section in sections)
        error = math.sqrt(squares * len(sections) / freedom) / number
        # Student's t by its expansion (Abramowitz and Stegun, 26.7.5).
        error *= CONFIDENT + (CONFIDENT**3 + CONFIDENT) / (4 * freedom)
        low, high = reached(share + error), reached(share - error)
        self.doubt = math.expm1((high - low) * FINENESS) / 2


class Bound(NamedTuple):
    """A quantile of the forecast, and what shows that it is wrong."""

    quantile: float
    forecast: float
    """Seconds."""
    limit: float
    """Seconds; too many answers beyond it (too few, where it is below ``forecast``) show that the forecast is off."""
    expected: Spread
    """Answers beyond the limit, were the forecast right."""
    lasting: float
    """Share of the intervals that have to show it."""


class Expected(NamedTuple):
    """What answers show where the forecast is right."""

    bounds: tuple[Bound, ...]

    @classmethod
    def of(cls, played: Settling) -> Expected:
        """Take it from what was played: the median may be off to either side, the tail only matters where it is slow.

        A slow median shows in most intervals of half a second, a slow tail in one of three.
        """
        p50, p99 = played.quantile(0.5), played.quantile(0.99)
        limits = (
            (0.5, p50, SLOW * p50 + OWN, 0.75),
            (0.99, p99, SLOW * p99 + OWN, 0.33),
            (0.5, p50, p50 / QUICK, 0.75),
        )
        return cls(tuple(Bound(q, value, limit, played.beyond(limit), share) for q, value, limit, share in limits))


class Telling:
    """A forecast whose tail is told from more requests than a search plays through: lot after lot, until it settles.

    The queue is empty when a lot begins: with 4,000 requests a lot, that puts p99s of the proof off by 1 %.
    """

    def __init__(self, searched: Forecast, play: Callable[[int, Settling], Forecast]) -> None:
        """Begin with what the search found; ``play`` plays a lot by its number, and adds its latencies."""
        self._play = play
        self._settling: Settling | None = Settling()
        self._misses: list[float] = []
        self._expected: Expected | None = None
        self.told = searched

    @property
    def settled(self) -> bool:
        """Whether more requests would tell no more, or too little."""
        return self._settling is None

    @property
    def expected(self) -> Expected | None:
        """What answers should show where this is right; ``None`` before several lots were played."""
        if self._settling is not None and len(self._misses) >= ENOUGH_RUNS:
            self._expected = Expected.of(self._settling)
        return self._expected

    def settle(self) -> None:
        """Play one lot more; the first is the search's own."""
        settling, misses = self._settling, self._misses
        if settling is None:
            return
        lot = self._play(len(misses), settling)
        misses.append(lot.miss_fraction)
        requests = len(misses) * lot.requests
        if len(misses) > 1:
            self.told = replace(
                self.told, p99=settling.value, miss_fraction=sum(misses) / len(misses), requests=requests
            )
        # Where hardly anybody is served, as good as nobody has a latency.
        if settling.is_known(WITHIN) or requests + lot.requests > MOST_TOLD or settling.value == math.inf:
            self._expected = Expected.of(settling) if settling.value < math.inf else None
            self._settling, self._misses = None, []


def _count(section: Counter[int], least: int) -> int:
    """Count latencies from a class on."""
    return sum(count for each, count in section.items() if each >= least)
