"""Is the promise kept? A sequential test of miss fractions, never an interpolated percentile."""

from __future__ import annotations

import math
from typing import Self

ALARM = math.log(200.0)
"""Evidence (log likelihood ratio) at which misses are called too many, or the promise kept."""

MOST_AT_ONCE = 3.0
MOST_AFTER_THAT = 1.5
"""Evidence one interval may add: misses come in clusters (one slow batch makes all its riders late); and after one that
has some too, where one busy spell may reach into both."""

OBVIOUS = 0.10
"""Miss fraction of one interval that needs no second one, where it is evidence enough and of this many requests:"""
OBVIOUS_REQUESTS = 50


class MissTest:
    """Page's cumulative sum test of ``good`` against ``bad``, two fractions of requests that miss.

    Evidence for ``good`` cannot be saved up, so a change shows as soon as a fresh start would show it. With 0.5 %
    against 2 % a miss adds 1.39 and a hit takes 0.015: at 2 % of 1,000 requests/s the alarm comes in
    the second interval, or the third where spells are reckoned with.
    """

    @classmethod
    def of(cls, quantile: float, *, spells: bool = False) -> Self:
        """Make a test of whether a percentile's target is kept: half of what it allows, against twice that.

        For a p99 0.5 % against 2 %, for a p50 25 % against 62.5 %: beyond the allowed, half of what is left at most.
        """
        good = (1 - quantile) / 2
        return cls(good=good, bad=min(4 * good, (1 + good) / 2), spells=spells)

    def __init__(self, good: float = 0.005, bad: float = 0.02, *, spells: bool = False) -> None:
        """``spells``: whether one busy spell may reach into two intervals, the second of which tells less then.

        So it is with half a second of one tuner's requests each; not with what several replicas are judged by.
        """
        if not 0 < good < bad < 1:
            raise ValueError(f"needs 0 < good < bad < 1, not {good} and {bad}")
        self.bad = bad
        self._spells = spells
        self._miss = math.log(bad / good)
        self._hit = math.log((1 - bad) / (1 - good))
        self._evidence = 0.0
        self._proof = 0.0
        self._goes_on = False
        self.requests = 0
        self.misses = 0

    def observe(self, hits: int, misses: int, together: int = 1) -> bool:
        """Add one interval; return whether misses are too many by now.

        ``together``: requests that one slow batch makes late. What two of them explain is never obvious.
        """
        self.requests += hits + misses
        self.misses += misses
        gained = misses * self._miss + hits * self._hit
        self._proof = max(0.0, self._proof - gained)
        obvious = hits + misses >= OBVIOUS_REQUESTS and misses >= max(OBVIOUS * (hits + misses), 2 * together)
        if obvious and gained >= ALARM:
            self._evidence = ALARM
        else:
            most = MOST_AFTER_THAT if self._goes_on else MOST_AT_ONCE
            self._evidence = max(0.0, self._evidence + min(gained, most))
        self._goes_on = self._spells and misses > 0
        return self.alarmed

    @property
    def alarmed(self) -> bool:
        """Whether misses are too many by the evidence so far."""
        return self._evidence >= ALARM

    @property
    def kept(self) -> bool:
        """Whether the promise is kept, as surely: 350 requests without a miss, or about 650 of which 0.5 % miss."""
        return self._proof >= ALARM

    def restart(self) -> None:
        """Begin anew: other parameters, or another load."""
        self._evidence = 0.0
        self._proof = 0.0
        self._goes_on = False
        self.requests = 0
        self.misses = 0
