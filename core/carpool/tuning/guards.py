"""What speaks against the setting in force, or against forecasts: unforeseen misses, failed settings."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from carpool.batching.counters import LATE
from carpool.batching.requests import Refused
from carpool.forecasting.accuracy import PAUSED, ForecastCheck
from carpool.learning.miss_test import MissTest
from carpool.tuning.safety_margin import Caution

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool.batching.counters import ModelStats
    from carpool.exchange.decision import Observation
    from carpool.forecasting.refinement import Expected
    from carpool.policy.parameters import Parameters

TOO_LATE = (LATE, Refused.LATE, Refused.EXPIRED, Refused.QUEUE_FULL)
"""Misses that other parameters might have avoided; failures and cancellations are not."""

BROKEN = 10.0
"""Seconds for which who would be late is refused after the SLO was seen not to be kept, whatever was forecast."""


def late_of(stats: ModelStats) -> int:
    """Return how many requests were too late, by the setting's doing or not."""
    return sum(stats.misses.get(reason, 0) for reason in TOO_LATE)


class Guards:
    """A sequential test of misses, a check of the forecast, and what was tried and left since load or model moved."""

    def __init__(self, quantile: float) -> None:
        """Begin with nothing against anything; ``quantile``: the SLO's."""
        self.caution = Caution()
        self.check = ForecastCheck()
        self.failed: list[Parameters] = []
        """Settings in which more requests were late than forecast."""
        self.tried: list[Parameters] = []
        """Settings that were left, for whatever reason."""
        self.before: list[Parameters] = []
        """What was in force before the present parameters, if anything: no try leads back to it."""
        self._misses = MissTest.of(quantile, spells=True)
        self._broken_at = -inf

    def follow(self, quantile: float, now: float) -> None:
        """Go by another SLO."""
        self._misses = MissTest.of(quantile, spells=True)
        self.check.forget(now)

    def begin_epoch(self) -> None:
        """Forget what was tried: load or model moved, and what was found wanting may be right now."""
        self.tried = []
        self.failed = []
        self.caution.reset()
        self._misses.restart()

    def changed(self, now: float) -> None:
        """Begin to count anew: other parameters are in force."""
        self._misses.restart()
        self.check.changed(now)

    def observe_misses(self, now: float, stats: ModelStats, max_batch: int) -> bool:
        """Count answers of a setting that is forecast to keep the SLO; return whether it clearly doesn't."""
        broken = self._misses.observe(stats.hits, late_of(stats), max_batch)
        if broken:
            self._broken_at = now
            if self.caution.most:
                self._misses.restart()
        return broken

    def was_broken(self, now: float) -> bool:
        """Whether the SLO was seen not to be kept just now."""
        return now - self._broken_at < BROKEN

    def check_forecast(
        self, observation: Observation, *, model_moved: bool, disturbed: bool, expected: Callable[[], Expected | None]
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
        return check.observe(now, observation.seconds / observation.replicas, observation.stats.durations, expected)

    @property
    def is_forecast_low(self) -> bool:
        """Whether answers take longer than forecast, so that no forecast says what a wait would do."""
        return self.check.alarm is not None and self.check.alarm.slow

    def forgives(self, now: float) -> bool:
        """Whether it is time to plan less carefully."""
        return self.caution.is_over(now)

    def fail(self, parameters: Parameters, now: float) -> None:
        """Plan more carefully, and don't come back here: misses were seen that were not forecast."""
        self.failed.append(parameters)
        self.caution.more(now)
        self._misses.restart()

    def forgive(self, now: float) -> None:
        """Plan a step less carefully: what made requests late may be gone, and another load may never come."""
        self.caution.less(now)
        self.failed = self.failed[:-1]
        self.tried = []
