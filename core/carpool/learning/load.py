"""The present load, steady enough for decisions: it changes on evidence, not with every second's chance."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.learning.arrivals import CORRELATED, Fitted, Poisson, WindowCounts, fitted

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

RECENT = 1.0
LONGEST_STRETCH = 32.0
"""Shortest and longest stretch, in seconds, in which a change is searched: bursts hide small changes in short ones."""

MEMORY = 30.0
"""Seconds over which a steady load is measured."""

LONGEST_MEMORY = 300.0
ENOUGH_ARRIVALS = 30
"""Arrivals up to which more than ``MEMORY`` is remembered, for so many seconds: a rate of 30 is off by 18 %."""

PRECISE = 2000.0
LONG_MEMORY = 120.0
"""The same for a rate that is off by 2 %, with independent callers. Bursts need more arrivals, in proportion to
the dispersion of their counts."""

SURPRISE = 4.5
"""Standard errors between the recent rate and the estimated one that show a jump: 1 in 150,000 by chance."""

FINER = 0.01
"""A better measured rate replaces the estimate if it differs by this share: near the capacity a few percent decide
which batch size carries the load."""

ENOUGH_REQUESTS = 1000
"""Requests over which rows per request are averaged."""

ENOUGH_INTERVALS = 10
"""Intervals from which their dispersion is used."""

UNMEASURED = 4.0
"""Dispersion assumed before it is measured: gaps with a CV of 2."""

ANOTHER_SPREAD = 2.0
"""Factor between dispersions of intervals that counts as a change: more than 30 s differ by chance."""

ENOUGH_WINDOWS = 50
"""Windows (5 s) from which their dispersion is used."""

THIN = 0.25
"""Arrivals per window (2.5 a second) below which a dispersion is neither measured nor kept: it was another load's."""


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
    """Arrivals per second (per replica, if there are several) and their dispersion, kept until contradicted.

    ``tolerance``: relative change of the rate since the last reported change that is not reported. The estimate
    may get more precise meanwhile.
    """

    def __init__(self, tolerance: float = 0.1) -> None:
        self.tolerance = tolerance
        self._intervals: deque[_Interval] = deque()
        self._local: deque[_Interval] = deque()
        self.process: Fitted | None = None
        """The arrival process to forecast with; ``None`` without arrivals."""
        self._reported = 0.0
        """Rate when a change was last reported."""
        self._evidence = 0
        """Arrivals that the estimate was measured with."""
        self.rows = 1.0
        """Mean rows per request."""
        self._requests = 0
        """Requests that it was averaged over."""
        self._straddles = False
        self._dispersion = UNMEASURED
        """Variance over mean of the counts of intervals, when it was last measured."""

    @property
    def rate(self) -> float:
        """Estimated requests per second; 0 before any."""
        return self.process.rate if self.process is not None else 0.0

    @property
    def error(self) -> float:
        """Relative standard error of the rate, of independent callers, up to ``MEMORY`` after a jump; later 0."""
        lasted = sum(interval.lasted for interval in self._intervals)
        return 1 / math.sqrt(max(self._evidence, _arrivals(self._intervals), 1)) if lasted < MEMORY else 0.0

    @property
    def measured(self) -> Fitted | None:
        """The process fitted to all remembered counts: the estimate may still be from the first few seconds."""
        return self._process(self.rate, self._local) if self.process is not None else None

    def observe(self, seconds: float, counts: WindowCounts, rows: int, replicas: int = 1) -> bool:
        """Add the counts of the last ``seconds``, summed over all ``replicas``; return whether the load changed.

        Several replicas show the same in less time; counts are forgotten by clock time.
        """
        if seconds <= 0:
            return False
        lasted, arrivals = seconds / replicas, counts.arrivals
        if arrivals:
            self._requests = min(self._requests + arrivals, ENOUGH_REQUESTS)
            self.rows += (rows / arrivals - self.rows) * min(arrivals / self._requests, 1.0)
        straddled, self._straddles = self._straddles, False
        if straddled:
            # The remembered counts span the jump: their mean is neither load, and their dispersion includes the jump.
            self._intervals.clear()
            self._local.clear()
        interval = _Interval(lasted, seconds, counts)
        self._local.append(interval)
        self._intervals.append(interval)
        precise = PRECISE * (self.process or Poisson(0.0)).dispersion, LONG_MEMORY
        _forget(self._local, MEMORY, precise)
        _forget(self._intervals, MEMORY, precise, (ENOUGH_ARRIVALS, LONGEST_MEMORY))
        if straddled or self.process is None:
            return self._believe()
        if since := self._jumped():
            _forget(self._intervals, since)
            _forget(self._local, since)
            self._straddles = since < 2 * max(RECENT, lasted)
        if since or self._spread_moved():
            return self._believe()
        rate, error = self._measured()
        # Twice the evidence replaces a first guess; after that only a contradiction does.
        doubled = _arrivals(self._intervals) >= 2 * self._evidence
        if abs(rate - self.rate) > max(FINER * self.rate, 0.0 if doubled else 3 * error):
            drifted = abs(rate - self._reported) > self.tolerance / 2 * self._reported
            return self._believe(report=drifted)
        return False

    def _spread_moved(self) -> bool:
        """Whether the dispersion is clearly higher or lower than estimated, at any rate.

        Without the last second: the first half second of twice the load would look like a burst, and once bursts are
        assumed, the jump would look like one of them.
        """
        believed = self._dispersion
        measured = self._between(self._earlier())
        return max(measured / believed, believed / measured) > ANOTHER_SPREAD

    def _measured(self) -> tuple[float, float]:
        """Return the rate over all remembered counts, and its standard error (at least one arrival's)."""
        seconds, arrivals = sum(interval.seconds for interval in self._intervals), _arrivals(self._intervals)
        return arrivals / seconds, math.sqrt(max(arrivals * self._spread(), 1.0)) / seconds

    def _spread(self) -> float:
        """Return variance over mean of counts without the last second, which would hide a jump."""
        lasting = (self.process or Poisson(0.0)).dispersion
        return max(self._between(self._earlier(), neighbours=True), lasting)

    def _earlier(self) -> list[_Interval]:
        """List the remembered intervals without the last second."""
        lasted = 0.0
        before = list(self._local)
        while before and lasted < RECENT:
            lasted += before.pop().lasted
        return before

    def _between(self, intervals: Sequence[_Interval], *, neighbours: bool = False) -> float:
        """Return variance over mean of the counts of whole intervals, at least 1; if they are few, the last value.

        ``neighbours``: from differences of neighbours, so that one change of the rate adds little. The
        mean squared difference of successive values is twice their variance (von Neumann 1941). It leaves out bursts
        that outlast an interval, which the estimated process includes.
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
        """Return for how many of the last seconds the load was clearly another; 0: it was not.

        Each stretch tested is twice as long as the one before: a change that bursts hide in one shows in the next.
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
            # Bernstein's bound: a large relative excess is more likely with few arrivals. The estimated rate also
            # has an error, that of the arrivals it was measured with.
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
        """Take the remembered counts as the estimate; return whether the load changed, not only its precision."""
        before = self.process
        self._evidence = _arrivals(self._intervals)
        rate, _ = self._measured()
        evidence = self._earlier()
        if _windows(evidence).windows < ENOUGH_WINDOWS:
            evidence = list(self._local)
        windows = _windows(evidence)
        if len(evidence) >= ENOUGH_INTERVALS or windows.windows < ENOUGH_WINDOWS:
            self._dispersion = self._between(evidence)
        else:
            # There are never many long intervals; then their windows are the evidence.
            self._dispersion = max(windows.dispersion, 1.0)
        self.process = self._process(rate, evidence) if rate > 0 else None
        # Chance is fitted by a Poisson process or, now and then, by gaps of a CV of 0.98.
        low, high = sorted(one.dispersion if one is not None else 0.0 for one in (self.process, before))
        changed = self.process != before and (report or high > CORRELATED * low)
        if changed:
            self._reported = self.rate
        return changed

    def _process(self, rate: float, intervals: Sequence[_Interval]) -> Fitted:
        """Return the simplest process that fits the counts of windows."""
        total = _windows(intervals)
        if total.windows >= ENOUGH_WINDOWS and total.arrivals < THIN * total.windows:
            return Poisson(rate)
        if total.windows < ENOUGH_WINDOWS or total.arrivals < total.windows:
            return at_rate(self.process, rate)
        # Several replicas share the same bursts: their sums have a higher dispersion than each one's counts.
        single = len(intervals) >= ENOUGH_INTERVALS and all(each.seconds == each.lasted for each in intervals)
        return fitted(rate, total, self._between(intervals), fmean(each.seconds for each in intervals) * single)


def at_rate(process: Fitted | None, rate: float) -> Fitted:
    """Return the same spread at another rate."""
    return Poisson(rate) if process is None else replace(process, rate=rate)


def _windows(intervals: Collection[_Interval]) -> WindowCounts:
    """Sum up the windows of intervals that have several: only these show the dispersion within an interval."""
    return sum((each.counts for each in intervals if each.counts.windows > 1), WindowCounts(0, 0, 0))


def _arrivals(intervals: Collection[_Interval]) -> int:
    return sum(interval.counts.arrivals for interval in intervals)


def _forget(intervals: deque[_Interval], seconds: float, *wanted: tuple[float, float]) -> None:
    """Keep the last ``seconds`` of intervals; keep more until each (arrivals, seconds) of ``wanted`` is reached."""
    total = sum(interval.lasted for interval in intervals)
    left = _arrivals(intervals)
    while len(intervals) > 1:
        total -= intervals[0].lasted
        left -= intervals[0].counts.arrivals
        if total < seconds or any(left < arrivals and total < longest for arrivals, longest in wanted):
            break
        intervals.popleft()
