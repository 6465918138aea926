"""How much shorter than promised the target is taken to be in forecasts, after misses that were not forecast."""

from __future__ import annotations

from math import inf

CAUTION = 0.9
"""Factor on the SLO's target in forecasts, for every time misses were seen that were not forecast."""

LEAST_CAUTION = 0.5
"""Factor from which more caution would only cost goodput: what makes requests late then, no parameters can help."""

FORGIVEN_AFTER = 300.0
"""Seconds without such misses after which one step of caution is taken back; doubled whenever that was too soon."""


class Caution:
    """The factor on the target, and since when there was no reason for more. Times in seconds."""

    __slots__ = ("_calm_since", "_forgiven", "_forgiven_after", "factor")

    def __init__(self) -> None:
        self.factor = 1.0
        self._calm_since = -inf
        self._forgiven_after = FORGIVEN_AFTER
        self._forgiven = False

    @property
    def none(self) -> bool:
        """Whether forecasts are believed as they are."""
        return self.factor == 1

    @property
    def most(self) -> bool:
        """Whether more would help nobody."""
        return self.factor <= LEAST_CAUTION

    def reset(self) -> None:
        """Believe forecasts again: load or model are others."""
        self.factor = 1.0
        self._forgiven_after = FORGIVEN_AFTER
        self._forgiven = False

    def more(self, now: float) -> None:
        """Plan a step more carefully."""
        self.factor = max(self.factor * CAUTION, LEAST_CAUTION)
        self._calm_since = now
        if self._forgiven:
            self._forgiven_after *= 2
            self._forgiven = False

    def is_over(self, now: float) -> bool:
        """Whether a step may be taken back: what made requests late may be gone, and another load may never come."""
        return self.factor < 1 and now - self._calm_since >= self._forgiven_after

    def less(self, now: float) -> None:
        """Take a step back."""
        self.factor = min(self.factor / CAUTION, 1.0)
        self._calm_since = now
        self._forgiven = True
