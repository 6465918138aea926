"""Whether the target is met: a sequential test of miss fractions, never an interpolated percentile."""

from __future__ import annotations

import math

ALARM = math.log(200.0)
"""Evidence (log likelihood ratio) at which misses are called too many, or the target met."""

MOST_AT_ONCE = 3.0
MOST_AFTER_THAT = 1.5
"""Most evidence that one interval adds, since misses come in clusters (one slow batch makes all its requests late); and
less after an interval with misses, if one burst may reach into both."""

OBVIOUS = 0.10
"""Miss fraction of one interval that needs no second one, where it is evidence enough and of this many requests:"""
OBVIOUS_REQUESTS = 50


class _Bursts:
    """How many misses come at once, from intervals that were no evidence against the target.

    It is the index of dispersion of their counts, neighbours included, since a burst does not end with an interval: 1
    if misses come one by one, however many an interval has. Misses with one cause are one piece of evidence: a
    likelihood ratio is divided by the index (quasi-likelihood; Wedderburn, Biometrika 1974).
    """

    def __init__(self) -> None:
        self._passed = [0, 0, 0, 0]
        """Intervals, their misses, squares of these, products of neighbours."""
        self._pending = [0, 0, 0, 0]
        """The same for a burst that is not over."""
        self._last = 0

    def add(self, misses: int, *, over: bool) -> None:
        """Count an interval; ``over``: it is no longer evidence against the target."""
        for at, term in enumerate((1, misses, misses * misses, misses * self._last)):
            self._pending[at] += term
        self._last = misses
        if over:
            self._passed = [sum(pair) for pair in zip(self._passed, self._pending, strict=True)]
            self._pending = [0, 0, 0, 0]

    @property
    def together(self) -> float:
        """Misses that are one event, at least 1."""
        intervals, misses, squares, products = self._passed
        if not misses:
            return 1.0
        return max(1.0, (squares + 2 * products) / misses - 3 * misses / intervals)


class MissTest:
    """Page's cumulative sum test of ``good`` against ``bad``, two fractions of requests that miss.

    Evidence for ``good`` does not accumulate, so a change shows as soon as after a restart. With 0.5 %
    against 2 % a miss adds 1.39 and a hit subtracts 0.015: at 2 % of 1,000 requests/s the alarm comes in
    the second interval, or with ``bursts`` in the third.
    """

    def __init__(self, quantile: float = 0.99, *, bursts: bool = False) -> None:
        """Test whether a percentile's target is met: half of the allowed misses against twice the allowed misses.

        For a p99 0.5 % against 2 %, for a p50 25 % against 62.5 %: at most halfway from the allowed share to 1.

        ``bursts``: whether misses come in bursts that may reach into the next interval, which is less evidence then.
        That is so for one tuner's half-second intervals, not for counts over several replicas. The number of requests
        that miss together is learned from past bursts.
        """
        good = (1 - quantile) / 2
        self.bad = bad = min(4 * good, (1 + good) / 2)
        self._bursts = _Bursts() if bursts else None
        self._miss = math.log(bad / good)
        self._hit = math.log((1 - bad) / (1 - good))
        self.restart()

    def restart(self) -> None:
        """Restart: the parameters or the load changed."""
        self._evidence = 0.0
        self._proof = 0.0
        self._goes_on = False
        self._bursts = self._bursts and _Bursts()
        self.requests = 0
        self.misses = 0

    def observe(self, hits: int, misses: int, together: int = 1) -> bool:
        """Add one interval; return whether there are now too many misses.

        ``together``: requests that one slow batch makes late. Misses that two such batches explain are never obvious.
        """
        self.requests += hits + misses
        self.misses += misses
        gained = misses * self._miss + hits * self._hit
        # If the target was met until now, a single interval may be a burst.
        proven = self._bursts is not None and self.is_met and not self._evidence
        obvious = hits + misses >= OBVIOUS_REQUESTS and misses >= max(OBVIOUS * (hits + misses), 2 * together)
        self._proof = max(0.0, self._proof - gained)
        if self._bursts is not None:
            gained /= self._bursts.together
        if obvious and not proven and gained >= ALARM:
            self._evidence = ALARM
        else:
            most = MOST_AFTER_THAT if self._goes_on else MOST_AT_ONCE
            self._evidence = max(0.0, self._evidence + min(gained, most))
        if self._bursts is not None:
            self._goes_on = misses > 0
            self._bursts.add(misses, over=self._evidence == 0.0)
        return self.alarmed

    @property
    def alarmed(self) -> bool:
        """Whether the evidence shows too many misses."""
        return self._evidence >= ALARM

    @property
    def is_met(self) -> bool:
        """Whether the target is met, equally surely: 350 requests without a miss, or about 650 with 0.5 % misses."""
        return self._proof >= ALARM
