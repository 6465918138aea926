"""The present load, steady enough to decide by: it moves when the evidence says so, not with every second's chance."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from carpool.arrivals import Gamma, Poisson, WindowCounts

RECENT = 1.0
"""Seconds over which a sudden change is looked for."""

MEMORY = 30.0
"""Seconds over which a steady load is measured, and jumps are remembered."""

LONGEST_MEMORY = 300.0
ENOUGH_ARRIVALS = 30
"""Arrivals for which more than ``MEMORY`` is remembered, up to so many seconds: a rate told by 30 is off by 18 %."""

SURPRISE = 4.0
"""Standard errors between the recent rate and the believed one that make it a jump: 1 in 16,000 by chance."""

RESTLESS = 3
"""Jumps within ``MEMORY`` from which they are taken for the load's nature, not for changes of it."""

ALIKE = 1.3
"""Variance of all windows over that within intervals up to which intervals are alike."""

ANOTHER_SPREAD = 1.5
"""Factor between coefficients of variation: a forecast moves by more than chance makes of 30 s."""

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


class Load:
    """Arrivals per second (of a replica, where there are several) and their spread, believed until contradicted.

    ``tolerance``: relative deviation below which the believed rate stays as it is, and so does what is decided by it.
    """

    def __init__(self, tolerance: float = 0.1) -> None:
        self.tolerance = tolerance
        self._intervals: deque[_Interval] = deque()
        self._local: deque[_Interval] = deque()
        self._believed: Poisson | Gamma | None = None
        self._evidence = 0
        """Arrivals behind what is believed."""
        self._rows = 1.0
        self._straddles = False
        self._clock = 0.0
        self._jumps: deque[float] = deque()
        self._restless = False
        self._bursts = 1.0
        """Variance over mean of the counts of whole intervals, of a load that never rests."""

    @property
    def rate(self) -> float:
        """Requests per second, as believed; 0 before any."""
        return self._believed.rate if self._believed is not None else 0.0

    @property
    def process(self) -> Poisson | Gamma | None:
        """The arrival process to forecast with; ``None`` without arrivals."""
        return self._believed

    @property
    def rows(self) -> float:
        """Mean rows per request."""
        return self._rows

    def observe(self, seconds: float, arrivals: int, squared: int, windows: int, rows: int, replicas: int = 1) -> bool:
        """Add what was counted in the last ``seconds``, those of all ``replicas`` together; return whether it is news.

        Several replicas tell the same in less time; how long it is remembered goes by the clock.
        """
        if seconds <= 0:
            return False
        lasted = seconds / replicas
        self._clock += lasted
        if arrivals:
            self._rows += (rows / arrivals - self._rows) * min(1.0, arrivals / 300)
        interval = _Interval(lasted, seconds, WindowCounts(windows, arrivals, squared))
        self._local.append(interval)
        _forget(self._local, MEMORY)
        while self._jumps and self._jumps[0] < self._clock - MEMORY:
            self._jumps.popleft()
        if self._straddles:
            # What was remembered reaches over the jump: as a mean it is neither load, and as a spread it is both.
            self._intervals.clear()
            self._straddles = False
            self._intervals.append(interval)
            return self._believe()
        self._intervals.append(interval)
        _forget(self._intervals, MEMORY, ENOUGH_ARRIVALS)
        if self._believed is None:
            return self._believe()
        if self._jumped():
            self._jumps.append(self._clock)
            if len(self._jumps) < RESTLESS:
                _forget(self._intervals, RECENT)
                self._straddles = True
                return self._believe()
        rate, error = self._measured()
        # Twice the evidence replaces a first guess; after that only a contradiction does.
        doubled = self._total() >= 2 * self._evidence
        if abs(rate - self.rate) > max(self.tolerance / 2 * self.rate, 0.0 if doubled else 3 * error):
            return self._believe()
        if self._spread_moved():
            return self._believe()
        return False

    def _spread_moved(self) -> bool:
        """Whether gaps spread clearly more or less than is believed, at whatever rate."""
        believed = self._believed.cv if isinstance(self._believed, Gamma) else 1.0
        measured = self._cv() or 1.0
        return max(measured / believed, believed / measured) > ANOTHER_SPREAD

    def _total(self) -> int:
        return sum(interval.counts.arrivals for interval in self._intervals)

    def _measured(self) -> tuple[float, float]:
        """Rate over all that is remembered, and its standard error (at least one arrival's)."""
        seconds = sum(interval.seconds for interval in self._intervals)
        arrivals = self._total()
        return arrivals / seconds, math.sqrt(max(arrivals * self._spread(), 1.0)) / seconds

    def _spread(self) -> float:
        """Variance over mean of counts, as believed: what is measured over a jump would hide the jump."""
        spread = max(1.0, self._believed.cv**2) if isinstance(self._believed, Gamma) else 1.0
        return max(spread, self._bursts) if self._restless else spread

    def _jumped(self) -> bool:
        lasted = seconds = 0.0
        arrivals = 0
        for interval in reversed(self._intervals):
            lasted += interval.lasted
            seconds += interval.seconds
            arrivals += interval.counts.arrivals
            if lasted >= RECENT:
                break
        expected = self.rate * seconds
        off = arrivals - expected
        # Bernstein's bound: of few, many more than expected are more likely than of many.
        variance = max(expected, 1.0) * self._spread() + max(off, 0.0) / 3
        return abs(off) > self.tolerance * expected and off * off > SURPRISE**2 * variance

    def _believe(self) -> bool:
        """Believe what is remembered; return whether that changes anything."""
        before = self._believed
        self._evidence = self._total()
        rate, _ = self._measured()
        if rate <= 0:
            self._believed = None
        else:
            cv = self._cv()
            self._believed = Poisson(rate) if cv is None else Gamma(rate, cv)
        return self._believed != before

    def _cv(self) -> float | None:
        """Coefficient of variation of the gaps where it is clearly not Poisson's, else ``None``.

        Squares about each interval's own mean don't see a change of load between intervals. Where the load never rests,
        changes are what it is, and the squares about the common mean count.
        """
        parts = [interval.counts for interval in self._local if interval.counts.windows > 1]
        windows = sum(counts.windows for counts in parts)
        arrivals = sum(counts.arrivals for counts in parts)
        if windows >= ENOUGH_WINDOWS and arrivals < THIN * windows:
            return None
        if windows < ENOUGH_WINDOWS or arrivals < windows:
            return self._believed.cv if isinstance(self._believed, Gamma) else None
        # Put the squares about the intervals' means around the common mean, at the freedom they have.
        about = sum(counts.squared - counts.arrivals**2 / counts.windows for counts in parts)
        variance = max(about, 0.0) / (windows - len(parts))
        total = WindowCounts(windows, arrivals, sum(counts.squared for counts in parts))
        # Once it is known to be restless its jumps surprise no more: it is until its intervals differ no more.
        self._restless = len(self._jumps) >= RESTLESS or (
            self._restless and total.dispersion > ALIKE * variance * windows / arrivals
        )
        if self._restless:
            mean = arrivals / len(parts)
            between = sum((counts.arrivals - mean) ** 2 for counts in parts) / (len(parts) - 1)
            self._bursts = between / mean
        else:
            total = WindowCounts(windows, arrivals, round(variance * (windows - 1) + arrivals**2 / windows))
        return None if total.looks_poisson else min(max(total.cv, 0.1), 10.0)


def _forget(intervals: deque[_Interval], seconds: float, arrivals: int = 0) -> None:
    """Keep the last intervals that together last ``seconds`` and have ``arrivals``, within ``LONGEST_MEMORY``."""
    total = sum(interval.lasted for interval in intervals)
    left = sum(interval.counts.arrivals for interval in intervals)
    while len(intervals) > 1:
        total -= intervals[0].lasted
        left -= intervals[0].counts.arrivals
        if total < seconds or (left < arrivals and total < LONGEST_MEMORY):
            break
        intervals.popleft()
