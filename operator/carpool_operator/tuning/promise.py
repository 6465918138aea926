"""Whether an SLO is kept, with hysteresis: one bad second is no alarm, and one good one no all-clear."""

from __future__ import annotations

from math import inf

from carpool.learning.miss_test import MissTest

CALM = 300.0
"""Seconds without another alarm before a broken promise may count as kept: at the very limit both tests speak up in
turn, every 40 s of 100 requests/s."""


class Promise:
    """Says ``kept`` once the evidence is strong, either way, and stays with it until it is strong the other way.

    A sequential test both ways, of half of the misses that the ``quantile`` allows against twice as many: so a fleet
    that misses about as many as it may changes its verdict seldom.
    """

    def __init__(self, quantile: float, kept: bool | None = None) -> None:
        self.kept = kept
        """``None`` while nobody can tell."""
        self._test = MissTest(quantile)
        self._alarmed_at = -inf

    def observe(self, now: float, hits: int, misses: int) -> None:
        """Add an interval's answers."""
        if self._test.observe(hits, misses):
            self.kept = False
            self._alarmed_at = now
            self._test.restart()
        elif self._test.is_met and now - self._alarmed_at >= CALM:
            self.kept = True
