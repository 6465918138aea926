"""Whether an SLO is kept, with hysteresis: one bad second is no alarm, and one good one no all-clear."""

from __future__ import annotations

from carpool.misses import MissTest


class Promise:
    """Says ``kept`` once the evidence is strong, either way, and stays with it until it is strong the other way.

    A sequential test both ways, of half of the misses that the ``quantile`` allows against twice as many: so a fleet
    that misses about as many as it may changes its verdict seldom.
    """

    def __init__(self, quantile: float, kept: bool | None = None) -> None:
        self.kept = kept
        """``None`` while nobody can tell."""
        self._test = MissTest.of(quantile)

    def observe(self, hits: int, misses: int) -> None:
        """Add an interval's answers."""
        if self._test.observe(hits, misses):
            self.kept = False
            self._test.restart()
        elif self._test.kept:
            self.kept = True
