"""Arrival processes, and what additive counters tell of them.

A process is a value; ``times(rng)`` walks it from time 0 with the caller's own generator, so that equal seeds give the
same arrivals (common random numbers) and nothing here holds state.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct

from carpool.batching.counters import WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
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


class OnOff(Struct, frozen=True):
    """Bursts: Poisson at ``rate_on``, then at ``rate_off``, each phase exponential with the given mean seconds."""

    rate_on: float
    mean_on: float
    mean_off: float
    rate_off: float = 0.0

    @property
    def rate(self) -> float:
        """Mean arrivals per second over both phases."""
        return (self.rate_on * self.mean_on + self.rate_off * self.mean_off) / (self.mean_on + self.mean_off)

    @property
    def dispersion(self) -> float:
        """Variance over mean of how many come in a long time (Cox and Isham, Point Processes, 1980, 3.3)."""
        share = self.mean_on / (self.mean_on + self.mean_off)
        variance = (self.rate_on - self.rate_off) ** 2 * share * (1 - share)
        correlated = self.mean_off * share
        return 1 + 2 * variance * correlated / self.rate

    def scaled(self, factor: float) -> OnOff:
        """Return more callers, ``factor`` times as many in each phase; the phases last as long."""
        return OnOff(self.rate_on * factor, self.mean_on, self.mean_off, self.rate_off * factor)

    def times(self, rng: Random) -> Iterator[float]:
        """Walk the process, starting at the beginning of a burst."""
        start = 0.0
        while True:
            for rate, mean in ((self.rate_on, self.mean_on), (self.rate_off, self.mean_off)):
                end = start + rng.expovariate(1 / mean)
                yield from _poisson(rate, start, end, rng)
                start = end


class Schedule(Struct, frozen=True):
    """Load that rises and falls in steps: Poisson at each (seconds, rate) in turn, over and over."""

    steps: tuple[tuple[float, float], ...]

    @property
    def rate(self) -> float:
        """Mean arrivals per second over one round."""
        return sum(seconds * rate for seconds, rate in self.steps) / sum(seconds for seconds, _ in self.steps)

    def times(self, rng: Random) -> Iterator[float]:
        """Walk the process."""
        start = 0.0
        while True:
            for seconds, rate in self.steps:
                yield from _poisson(rate, start, start + seconds, rng)
                start += seconds


class Diurnal(Struct, frozen=True):
    """A day and a night: Poisson at ``rate * (1 + swing * sin)`` with the given period in seconds, 0 <= swing <= 1."""

    rate: float
    swing: float
    period: float = 86_400.0

    def times(self, rng: Random) -> Iterator[float]:
        """Walk the process, starting at the mean and rising."""
        # Thinning (Lewis and Shedler 1979): candidates at the peak rate, each kept with probability rate(t) / peak.
        peak = self.rate * (1 + self.swing)
        now = 0.0
        while True:
            now += rng.expovariate(peak)
            if rng.random() * (1 + self.swing) <= 1 + self.swing * math.sin(2 * math.pi * now / self.period):
                yield now


class Trace(Struct, frozen=True):
    """Recorded arrivals, played once. ``factor`` is how much their clock was stretched: below 1 is faster than life."""

    recorded: tuple[float, ...]
    factor: float = 1.0

    @classmethod
    def at_rate(cls, times: Sequence[float], rate: float) -> Trace:
        """Rescale recorded times (seconds, ascending, at least two, not all equal) to a mean rate.

        Burstiness in units of the mean gap is kept; everything slower (a day, a deploy) is squeezed with it.
        """
        factor = (len(times) - 1) / (times[-1] - times[0]) / rate
        return cls(tuple(scaled(times, factor)), factor)

    @property
    def rate(self) -> float:
        """Mean arrivals per second of the rescaled recording."""
        return (len(self.recorded) - 1) / (self.recorded[-1] - self.recorded[0])

    def times(self, rng: Random) -> Iterator[float]:  # noqa: ARG002 - a recording is no matter of chance
        """Play the recording."""
        return iter(self.recorded)


def scaled(times: Sequence[float], factor: float) -> list[float]:
    """Stretch times by ``factor`` around the first one, which becomes 0."""
    first = times[0]
    return [(time - first) * factor for time in times]


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


class Draw(Protocol):
    """A distribution over positive whole numbers: rows of a request, tokens of a text."""

    def draw(self, rng: Random) -> int:
        """One value."""


class Fixed(Struct, frozen=True):
    """Always the same."""

    value: int = 1

    def draw(self, rng: Random) -> int:  # noqa: ARG002 - no matter of chance
        """One value."""
        return self.value


class Choice(Struct, frozen=True):
    """One of ``values``, in proportion to ``weights`` (as many, not all zero)."""

    values: tuple[int, ...]
    weights: tuple[float, ...]

    def draw(self, rng: Random) -> int:
        """One value."""
        upto = tuple(accumulate(self.weights))
        # The last value also takes a draw that rounds up to the total.
        return self.values[min(bisect_right(upto, rng.random() * upto[-1]), len(upto) - 1)]


class HeavyTailed(Struct, frozen=True):
    """Log-normal lengths, as texts are: half below ``median``, ``sigma`` the spread of the logarithm, capped."""

    median: float
    sigma: float = 1.0
    largest: int = 4096

    def draw(self, rng: Random) -> int:
        """One value."""
        return min(max(round(self.median * math.exp(rng.gauss(0.0, self.sigma))), 1), self.largest)


class Request(NamedTuple):
    """One arrival: when (seconds), how many rows, how long each row is."""

    time: float
    rows: int
    length: int


def requests(
    times: Iterable[float], rng: Random, *, rows: Draw | None = None, lengths: Draw | None = None
) -> Iterator[Request]:
    """Give each arrival its rows and length, 1 where no distribution is given."""
    rows, lengths = rows or Fixed(), lengths or Fixed()
    for time in times:
        yield Request(time, rows.draw(rng), lengths.draw(rng))


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
        """Variance over mean of the counts: 1 for Poisson, more for bursts. 1 while there is nothing to tell by."""
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
        bound. One arrival a window or fewer can't tell, and the dispersion itself is used.
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


class TokenTrace(Struct, frozen=True):
    """A recorded trace of text requests: seconds from the first arrival, tokens in, tokens out; equally long."""

    times: tuple[float, ...]
    context: tuple[int, ...]
    generated: tuple[int, ...]


def azure_llm_2023(lines: Iterable[str]) -> TokenTrace:
    """Read the Azure LLM inference trace of 2023: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

    Timestamps are ``2023-11-16 18:15:46.6805900``. Raises ``ValueError`` naming the line that does not read so.
    """
    rows = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("TIMESTAMP"):
            continue
        try:
            stamp, context, generated = text.split(",")
            rows.append((_seconds(stamp), int(context), int(generated)))
        except ValueError:
            raise ValueError(
                f"line {number}: {text[:80]!r} is not 'YYYY-MM-DD HH:MM:SS.fff,context tokens,generated tokens'"
            ) from None
    rows.sort()
    start = rows[0][0] if rows else 0.0
    return TokenTrace(
        tuple(row[0] - start for row in rows), tuple(row[1] for row in rows), tuple(row[2] for row in rows)
    )


def _seconds(stamp: str) -> float:
    """Seconds from the epoch of the civil calendar (days since March of year 0, Hinnant's algorithm)."""
    date, clock = stamp.split(" ")
    year, month, day = (int(part) for part in date.split("-"))
    hour, minute, second = clock.split(":")
    # March first: the leap day then ends the year, and 153 days a five-month cycle count the rest.
    year, month = (year, month - 3) if month > 2 else (year - 1, month + 9)
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5 + day - 1
    return days * 86_400.0 + int(hour) * 3600 + int(minute) * 60 + float(second)


def _poisson(rate: float, start: float, end: float, rng: Random) -> Iterator[float]:
    """Poisson arrivals in [start, end); none at rate 0."""
    if rate <= 0:
        return
    now = start + rng.expovariate(rate)
    while now < end:
        yield now
        now += rng.expovariate(rate)
