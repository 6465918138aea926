"""What speaks against the setting in force, or against forecasts: misses that were not forecast, slow answers."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from carpool.batching.counters import LATE
from carpool.batching.requests import Refused
from carpool.forecasting.accuracy import PAUSED, ForecastCheck
from carpool.learning.miss_test import MissTest

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool.batching.counters import ModelStats
    from carpool.exchange.decision import Observation

TOO_LATE = (LATE, Refused.LATE, Refused.EXPIRED, Refused.QUEUE_FULL)
"""Misses that other parameters might have avoided; failures and cancellations are not."""

BROKEN = 10.0
"""Seconds for which requests that would be late are refused after the SLO was seen to be missed."""

TIGHTER = 0.9
"""Factor on the SLO's target in forecasts, for every time that misses were seen which were not forecast."""

TIGHT, TIGHTEST = 0.5, 0.25
"""Between these the factor ends: at what is kept without a wait. No parameters help against what comes then."""

FORGIVEN_AFTER = 300.0
"""Seconds without such misses after which one step is taken back; doubled whenever that was too soon."""


def late_of(stats: ModelStats) -> int:
    """Return how many requests were too late, whatever made them so."""
    return sum(stats.misses.get(reason, 0) for reason in TOO_LATE)


class SafetyMargin:
    """How much shorter than promised the target is taken to be in forecasts. Times in seconds."""

    __slots__ = ("_before", "_calm_since", "_forgiven", "_forgiven_after", "factor")

    def __init__(self) -> None:
        self.factor = 1.0
        self._before: list[float] = []  # factors that were left, one for each step
        self._calm_since = -inf
        self._forgiven_after = FORGIVEN_AFTER
        self._forgiven = False

    def more(self, now: float, forecast: float = 1.0, unheld: float = 1.0) -> bool:
        """Plan a step more carefully, if possible; forecasts, as shares of the target, with and without a wait."""
        if stricter := self.factor > (least := min(max(unheld, TIGHTEST), TIGHT)):
            self._before.append(self.factor)
            self.factor = max(min(self.factor, forecast) * TIGHTER, least)
        self._calm_since = now
        if self._forgiven:
            self._forgiven_after *= 2
            self._forgiven = False
        return stricter

    def is_over(self, now: float) -> bool:
        """Whether a step may be taken back: what made requests late may be gone, and the load may never change."""
        return self.factor < 1 and now - self._calm_since >= self._forgiven_after

    def less(self, now: float) -> None:
        """Take a step back."""
        self.factor = self._before.pop()
        self._calm_since = now
        self._forgiven = True


class Guards:
    """A sequential test of misses, a check of the forecast, and the margin that they call for."""

    def __init__(self, quantile: float) -> None:
        """Begin with nothing against anything; ``quantile``: the SLO's."""
        self.margin = SafetyMargin()
        self.check = ForecastCheck()
        self._misses = MissTest(quantile, bursts=True)
        self._broken_at = -inf

    def follow(self, quantile: float, now: float) -> None:
        """Go by another SLO."""
        self._misses = MissTest(quantile, bursts=True)
        self.check.forget(now)

    def begin_epoch(self) -> None:
        """Begin anew: load or model changed, and what missed the SLO may meet it now."""
        self.margin = SafetyMargin()
        self._misses.restart()

    def changed(self, now: float) -> None:
        """Begin to count anew: other parameters are in force."""
        self._misses.restart()
        self.check.changed(now)

    def observe_misses(self, now: float, stats: ModelStats, max_batch: int) -> bool:
        """Count answers of a setting that is forecast to meet the SLO; return whether it clearly doesn't."""
        missed = self._misses.observe(stats.hits, late_of(stats), max_batch)
        if missed:
            self._broken_at = now
            self._misses.restart()
        return missed

    def was_broken(self, now: float) -> bool:
        """Whether the SLO was seen to be missed just now."""
        return now - self._broken_at < BROKEN

    def check_forecast(
        self, observation: Observation, *, model_moved: bool, disturbed: bool, expected_p99: Callable[[], float | None]
    ) -> bool:
        """Compare answers with their forecast; return whether an alarm began or ended.

        ``disturbed``: whether what is in force, or the load, is not what the forecast was made for.
        """
        now, check = observation.now, self.check
        if model_moved:
            check.forget(now)
        if disturbed:
            check.changed(now)
        if observation.stats.stalled or observation.paused > PAUSED * observation.seconds:
            check.paused(now)
        return check.observe(now, observation.seconds / observation.replicas, observation.stats.durations, expected_p99)
