"""Whether an SLO is met, with hysteresis: one bad second is not a violation, and one good second does not end one."""

from __future__ import annotations

from math import inf

from carpool.learning.miss_test import MissTest

CALM = 300.0
"""Seconds without another violation before a missed SLO may count as met again: exactly at the limit both tests
alternate, every 40 s at 100 requests/s."""


class SloStatus:
    """Sets ``met`` on strong evidence for or against, and keeps it until there is strong evidence for the opposite.

    A sequential test in both directions: half of the misses that the ``quantile`` allows against twice as many. So the
    result rarely changes for a fleet that misses about as many as allowed.
    """

    def __init__(self, quantile: float, met: bool | None = None) -> None:
        self.met = met
        """``None`` while unknown."""
        self._test = MissTest(quantile)
        self._alarmed_at = -inf

    def observe(self, now: float, hits: int, misses: int) -> None:
        """Add an interval's answers."""
        if self._test.observe(hits, misses):
            self.met = False
            self._alarmed_at = now
            self._test.restart()
        elif self._test.is_met and now - self._alarmed_at >= CALM:
            self.met = True
