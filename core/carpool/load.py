"""The present load, steady enough to decide by: it moves when the evidence says so, not with every second's chance."""

from __future__ import annotations

import math
from collections import deque

from carpool.arrivals import Gamma, Poisson, WindowCounts

RECENT = 1.0
"""Seconds over which a sudden change is looked for."""

MEMORY = 30.0
"""Seconds over which a steady load is measured."""

ENOUGH_WINDOWS = 50
"""Windows (5 s) from which their spread is believed."""

SURPRISE = 4.0
"""Standard errors between the recent rate and the believed one that make it a change: 1 in 16,000 by chance."""


class Load:
    """Arrivals per second and their spread, believed until clearly contradicted.

    ``tolerance``: relative deviation below which the believed rate stays as it is, and so does what is decided by it.
    """

    def __init__(self, tolerance: float = 0.1) -> None:
        self._tolerance = tolerance
        self._counts: deque[tuple[float, WindowCounts]] = deque()
        self._believed: Poisson | Gamma | None = None
        self._rows = 1.0
        self._straddles = False

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

    def observe(self, seconds: float, arrivals: int, squared: int, windows: int, rows: int) -> bool:
        """Add what was counted in the last ``seconds``; return whether the believed load changed."""
        if seconds <= 0:
            return False
        if arrivals:
            self._rows += (rows / arrivals - self._rows) * min(1.0, arrivals / 300)
        if self._straddles:
            # What was remembered reaches over the jump: as a mean it is neither load, and as a spread it is both.
            self._counts.clear()
            self._straddles = False
            self._counts.append((seconds, WindowCounts(windows, arrivals, squared)))
            self._believe()
            return True
        self._counts.append((seconds, WindowCounts(windows, arrivals, squared)))
        if self._believed is not None and self._jumped():
            self._forget_before(RECENT)
            self._believe()
            self._straddles = True
            return True
        self._forget_before(MEMORY)
        before = self.rate
        rate, error = self._measured()
        moved = abs(rate - before) > max(self._tolerance / 2 * before, 2 * error)
        if self._believed is None or moved:
            self._believe()
            return self.rate != before
        return False

    def _forget_before(self, seconds: float) -> None:
        total = sum(length for length, _ in self._counts)
        while len(self._counts) > 1 and total - self._counts[0][0] >= seconds:
            total -= self._counts.popleft()[0]

    def _measured(self) -> tuple[float, float]:
        """Rate over all that is remembered, and its standard error (at least one arrival's)."""
        seconds = sum(length for length, _ in self._counts)
        arrivals = sum(counts.arrivals for _, counts in self._counts)
        return arrivals / seconds, math.sqrt(max(arrivals * self._spread(), 1.0)) / seconds

    def _spread(self) -> float:
        """Variance over mean of counts as believed: what is measured over a jump would hide the jump."""
        return max(1.0, self._believed.cv**2) if isinstance(self._believed, Gamma) else 1.0

    def _total(self) -> WindowCounts:
        total = WindowCounts(0, 0, 0)
        for _, counts in self._counts:
            total += counts
        return total

    def _jumped(self) -> bool:
        seconds = 0.0
        arrivals = 0
        for length, counts in reversed(self._counts):
            seconds += length
            arrivals += counts.arrivals
            if seconds >= RECENT:
                break
        expected = self.rate * seconds
        off = abs(arrivals - expected)
        return off > self._tolerance * expected and off > SURPRISE * math.sqrt(max(expected, 1.0) * self._spread())

    def _believe(self) -> None:
        rate, _ = self._measured()
        if rate <= 0:
            self._believed = None
            return
        # The squares need some seconds of windows before they say more than chance; until then the old spread holds.
        total = self._total()
        process = total.process() if total.windows >= ENOUGH_WINDOWS and total.arrivals else self._believed
        self._believed = Gamma(rate, process.cv) if isinstance(process, Gamma) else Poisson(rate)
