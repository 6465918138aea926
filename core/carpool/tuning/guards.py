"""Evidence against the setting in force, or against forecasts: misses that were not forecast, slow answers."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from carpool.batching.counters import LATE, ModelStats
from carpool.batching.requests import Refused
from carpool.forecasting.accuracy import PAUSED, ForecastCheck
from carpool.learning.miss_test import MissTest

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool.exchange.decision import Observation

TOO_LATE = (LATE, Refused.LATE, Refused.EXPIRED, Refused.QUEUE_FULL)
"""Misses that other parameters might have avoided; failures and cancellations are not."""

TIGHTER = 0.9
"""Factor on the SLO's target in forecasts, applied each time there are misses that were not forecast."""

TIGHT, TIGHTEST = 0.5, 0.25
"""Range of the factor's lower limit: the target met without a wait. Parameters do not cause misses beyond that."""

FORGIVEN_AFTER = 300.0
"""Seconds without such misses after which one step is undone; doubled whenever that was too soon."""


def late_of(stats: ModelStats) -> int:
    """Return how many requests were too late, for any reason."""
    return sum(stats.misses.get(reason, 0) for reason in TOO_LATE)


class SafetyMargin:
    """How much shorter the target is in forecasts than in the SLO. Times in seconds."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._before: list[float] = []  # the factor before each step
        self._calm_since = -inf
        self._forgiven_after = FORGIVEN_AFTER
        self._forgiven = False

    def more(self, now: float, forecast: float = 1.0, unheld: float = 1.0) -> bool:
        """Take a step, if possible; forecasts, as shares of the target, with and without a wait."""
        if stricter := self.factor > (least := min(max(unheld, TIGHTEST), TIGHT)):
            self._before.append(self.factor)
            self.factor = max(min(self.factor, forecast) * TIGHTER, least)
        self._calm_since = now
        if self._forgiven:
            self._forgiven_after *= 2
            self._forgiven = False
        return stricter

    def is_over(self, now: float) -> bool:
        """Whether a step may be undone: the cause of the misses may be gone, even if the load never changes."""
        return self.factor < 1 and now - self._calm_since >= self._forgiven_after

    def less(self, now: float) -> None:
        """Undo a step."""
        self.factor = self._before.pop()
        self._calm_since = now
        self._forgiven = True


class Guards:
    """A sequential test of misses, a check of the forecast, and the safety margin that follows from them."""

    def __init__(self, quantile: float) -> None:
        """Begin without evidence; ``quantile``: the SLO's."""
        self.margin = SafetyMargin()
        self.check = ForecastCheck()
        self._misses = MissTest(quantile, bursts=True)

    def follow(self, quantile: float, now: float) -> None:
        """Follow another SLO."""
        self._misses = MissTest(quantile, bursts=True)
        self.check.forget(now)

    def begin_epoch(self) -> None:
        """Restart: load or model changed, and a setting that missed the SLO may meet it now."""
        self.margin = SafetyMargin()
        self._misses.restart()

    def changed(self, now: float) -> None:
        """Restart the counts: other parameters are in force."""
        self._misses.restart()
        self.check.changed(now)

    def observe_misses(self, stats: ModelStats, max_batch: int) -> bool:
        """Count answers of a setting that is forecast to meet the SLO; return whether it clearly misses it."""
        if missed := self._misses.observe(stats.hits, late_of(stats), max_batch):
            self._misses.restart()
        return missed

    def check_forecast(
        self, observation: Observation, *, model_moved: bool, disturbed: bool, expected_p99: Callable[[], float | None]
    ) -> bool:
        """Compare answers with their forecast; return whether an alarm began or ended.

        ``disturbed``: whether the setting in force, or the load, differs from the forecast's.
        """
        now, check = observation.now, self.check
        if model_moved:
            check.forget(now)
        if disturbed:
            check.changed(now)
        if observation.stats.stalled or observation.paused > PAUSED * observation.seconds:
            check.paused(now)
        return check.observe(now, observation.seconds / observation.replicas, observation.stats.durations, expected_p99)
