"""The present load, steady enough to decide by: it moves when the evidence says so, not with every second's chance."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.learning.arrivals import Fitted, Poisson, WindowCounts, fitted

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

RECENT = 1.0
LONGEST_STRETCH = 32.0
"""Seconds over which a change is looked for: the least, and the most, for what the arrivals' spread hides that long."""

MEMORY = 30.0
"""Seconds over which a steady load is measured."""

LONGEST_MEMORY = 300.0
ENOUGH_ARRIVALS = 30
"""Arrivals for which more than ``MEMORY`` is remembered, up to so many seconds: a rate by 30 is off by 18 %."""

PRECISE = 2000.0
LONG_MEMORY = 120.0
"""Arrivals of independent callers for which more than ``MEMORY`` is remembered, up to so many seconds: a rate measured
by them is off by 2 %. Of callers who come together it takes as many times more as their counts spread more."""

SURPRISE = 4.5
"""Standard errors between the recent rate and the believed one that make it a jump: 1 in 150,000 by chance."""

FINER = 0.01
"""Share of the believed rate by which a better measured one replaces it: near the capacity a few percent decide which
batch carries the load."""

ENOUGH_INTERVALS = 10
"""Intervals from which what they differ by is believed."""

UNMEASURED = 4.0
"""Dispersion that arrivals may have for all that is known before: gaps with a CV of 2."""

ANOTHER_SPREAD = 2.0
"""Factor between dispersions of intervals: a forecast moves by more than chance makes of 30 s."""

ENOUGH_WINDOWS = 50
"""Windows (5 s) from which their spread is believed."""

THIN = 0.25
"""Arrivals per window (2.5 a second) below which a spread is neither seen nor kept: it was of another load."""


class _Interval(NamedTuple):
    lasted: float
    """Seconds on the clock."""
    seconds: float
    """Seconds of all replicas together."""
    counts: WindowCounts

    @property
    def rate(self) -> float:
        """Arrivals per second."""
        return self.counts.arrivals / self.seconds


class Load:
    """Arrivals per second (of a replica, where there are several) and their spread, believed until contradicted.

    ``tolerance``: relative change of the rate since a change was last reported that is not reported. What is believed
    may get more precise meanwhile.
    """

    def __init__(self, tolerance: float = 0.1) -> None:
        self.tolerance = tolerance
        self._intervals: deque[_Interval] = deque()
        self._local: deque[_Interval] = deque()
        self._believed: Fitted | None = None
        self._reported = 0.0
        """Rate when a change was last reported."""
        self._evidence = 0
        """Arrivals behind what is believed."""
        self._rows = 1.0
        self._straddles = False
        self._dispersion = UNMEASURED
        """Variance over mean of the counts of intervals, as it was when it was last measured."""

    @property
    def rate(self) -> float:
        """Requests per second, as believed; 0 before any."""
        return self._believed.rate if self._believed is not None else 0.0

    @property
    def process(self) -> Fitted | None:
        """The arrival process to forecast with; ``None`` without arrivals."""
        return self._believed

    @property
    def measured(self) -> Fitted | None:
        """The process by all that is remembered: what is believed may be the spread of the first few seconds."""
        return self._process(self.rate, self._local) if self._believed is not None else None

    @property
    def rows(self) -> float:
        """Mean rows per request."""
        return self._rows

    def observe(self, seconds: float, arrivals: int, squared: int, windows: int, rows: int, replicas: int = 1) -> bool:
        """Add what was counted in the last ``seconds``, those of all ``replicas`` together; return whether it changed.

        Several replicas show the same in less time; how long it is remembered goes by the clock.
        """
        if seconds <= 0:
            return False
        lasted = seconds / replicas
        if arrivals:
            self._rows += (rows / arrivals - self._rows) * min(1.0, arrivals / 300)
        interval = _Interval(lasted, seconds, WindowCounts(windows, arrivals, squared))
        if self._straddles:
            # What was remembered reaches over the jump: as a mean it is neither load, and as a spread it is both.
            self._intervals.clear()
            self._local.clear()
        self._local.append(interval)
        precise = PRECISE * (self._believed or Poisson(0.0)).dispersion, LONG_MEMORY
        _forget(self._local, MEMORY, precise)
        self._intervals.append(interval)
        if self._straddles:
            self._straddles = False
            return self._believe()
        _forget(self._intervals, MEMORY, precise, (ENOUGH_ARRIVALS, LONGEST_MEMORY))
        if self._believed is None:
            return self._believe()
        since = self._jumped()
        if since:
            _forget(self._intervals, since)
            _forget(self._local, since)
            self._straddles = since < 2 * max(RECENT, lasted)
            return self._believe()
        if self._spread_moved():
            return self._believe()
        rate, error = self._measured()
        # Twice the evidence replaces a first guess; after that only a contradiction does.
        doubled = _arrivals(self._intervals) >= 2 * self._evidence
        if abs(rate - self.rate) > max(FINER * self.rate, 0.0 if doubled else 3 * error):
            drifted = abs(rate - self._reported) > self.tolerance / 2 * self._reported
            return self._believe(report=drifted)
        return False

    def _spread_moved(self) -> bool:
        """Whether arrivals spread clearly more or less than is believed, at whatever rate.

        As before the last second: the first half second of twice the load would pass for a burst, and with bursts
        believed in the jump would pass for one of them.
        """
        believed = self._dispersion
        measured = self._between(self._earlier())
        return max(measured / believed, believed / measured) > ANOTHER_SPREAD

    def _measured(self) -> tuple[float, float]:
        """Rate over all that is remembered, and its standard error (at least one arrival's)."""
        seconds, arrivals = sum(interval.seconds for interval in self._intervals), _arrivals(self._intervals)
        return arrivals / seconds, math.sqrt(max(arrivals * self._spread(), 1.0)) / seconds

    def _spread(self) -> float:
        """Variance over mean of counts, as before the last second: what is measured over a jump would hide the jump."""
        lasting = (self._believed or Poisson(0.0)).dispersion
        return max(self._between(self._earlier(), neighbours=True), lasting)

    def _earlier(self) -> list[_Interval]:
        """List what is remembered without the last second."""
        lasted = 0.0
        before = list(self._local)
        while before and lasted < RECENT:
            lasted += before.pop().lasted
        return before

    def _between(self, intervals: Sequence[_Interval], *, neighbours: bool = False) -> float:
        """Variance over mean of the counts of whole intervals, at least 1; the last one where they are few.

        ``neighbours``: by what neighbours differ by, so that a rate that moved between two of them adds little. The
        mean squared difference of successive values is twice their variance (von Neumann 1941). It leaves out what
        outlasts an interval, which the process that is believed in has.
        """
        seconds, arrivals = sum(interval.seconds for interval in intervals), _arrivals(intervals)
        if len(intervals) < ENOUGH_INTERVALS or not arrivals:
            return self._dispersion
        rate = arrivals / seconds
        if neighbours:
            squares = sum(
                (one.rate - other.rate) ** 2 / (1 / one.seconds + 1 / other.seconds)
                for one, other in pairwise(intervals)
            )
        else:
            squares = sum((each.rate - rate) ** 2 * each.seconds for each in intervals)
        return max(squares / (len(intervals) - 1) / rate, 1.0)

    def _jumped(self) -> float:
        """Return for how many of the last seconds the load was clearly another; 0 where it was not.

        Looked for over stretches of twice the length each: what the arrivals' spread hides in one shows in the next.
        """
        spread = self._spread()
        lasted = seconds = 0.0
        arrivals, stretch = 0, RECENT
        for interval in reversed(self._intervals):
            lasted += interval.lasted
            seconds += interval.seconds
            arrivals += interval.counts.arrivals
            if lasted < stretch:
                continue
            expected = self.rate * seconds
            off = arrivals - expected
            # Bernstein's bound: of few, many more than expected are more likely than of many. What is believed was
            # measured by so many as well, and errs as they do.
            variance = (max(expected, 1.0) + max(off, 0.0) / 3) * (1 + expected / max(self._evidence, 1)) * spread
            # In an hour there are half as many of twice the length, so a chance twice as large is as rare.
            surprise = SURPRISE**2 - 2 * math.log(lasted / RECENT)
            if abs(off) > self.tolerance * expected and off * off > surprise * variance:
                return lasted
            if lasted >= LONGEST_STRETCH:
                break
            while stretch <= lasted:
                stretch *= 2
        return 0.0

    def _believe(self, *, report: bool = True) -> bool:
        """Believe what is remembered; return whether that is another load, not the same measured better."""
        before = self._believed
        self._evidence = _arrivals(self._intervals)
        rate, _ = self._measured()
        evidence = self._earlier()
        if _windows(evidence).windows < ENOUGH_WINDOWS:
            evidence = list(self._local)
        windows = _windows(evidence)
        if len(evidence) >= ENOUGH_INTERVALS or windows.windows < ENOUGH_WINDOWS:
            self._dispersion = self._between(evidence)
        else:
            # Of long intervals there are never many; then their windows are the evidence.
            self._dispersion = max(windows.dispersion, 1.0)
        self._believed = self._process(rate, evidence) if rate > 0 else None
        changed = self._believed != before and (report or type(self._believed) is not type(before))
        if changed:
            self._reported = self.rate
        return changed

    def _process(self, rate: float, intervals: Sequence[_Interval]) -> Fitted:
        """Return the simplest process that fits the counts of windows."""
        total = _windows(intervals)
        if total.windows >= ENOUGH_WINDOWS and total.arrivals < THIN * total.windows:
            return Poisson(rate)
        if total.windows < ENOUGH_WINDOWS or total.arrivals < total.windows:
            return at_rate(self._believed, rate)
        # Of several replicas, who get their share of the same bursts, sums spread more than each one's counts.
        single = len(intervals) >= ENOUGH_INTERVALS and all(each.seconds == each.lasted for each in intervals)
        return fitted(rate, total, self._between(intervals), fmean(each.seconds for each in intervals) * single)


def at_rate(process: Fitted | None, rate: float) -> Fitted:
    """Return the same spread at another rate."""
    return Poisson(rate) if process is None else replace(process, rate=rate)


def _windows(intervals: Collection[_Interval]) -> WindowCounts:
    """Sum up the windows of intervals that have several: what spreads within one interval is seen in no other."""
    return sum((each.counts for each in intervals if each.counts.windows > 1), WindowCounts(0, 0, 0))


def _arrivals(intervals: Collection[_Interval]) -> int:
    return sum(interval.counts.arrivals for interval in intervals)


def _forget(intervals: deque[_Interval], seconds: float, *wanted: tuple[float, float]) -> None:
    """Keep the last intervals that together last ``seconds``, and more up to each number of arrivals and of seconds."""
    total = sum(interval.lasted for interval in intervals)
    left = _arrivals(intervals)
    while len(intervals) > 1:
        total -= intervals[0].lasted
        left -= intervals[0].counts.arrivals
        if total < seconds or any(left < arrivals and total < longest for arrivals, longest in wanted):
            break
        intervals.popleft()
