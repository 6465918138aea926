"""The tuner's last decisions, and what their forecasts say, for people and metrics."""

from __future__ import annotations

from collections import deque
from time import time
from typing import TYPE_CHECKING

from msgspec import Struct

from carpool.exchange.decision import Decision
from carpool_sidecar.tuning.replica_load import Utilization

if TYPE_CHECKING:
    import logging

    from carpool.exchange.decision import Forecasted, Reason

KEPT = 50
"""Decisions that are remembered."""


class Explained(Struct):
    """A decision for display. ``times``: how often in a row it was taken, with the same reason."""

    model: str
    at: float
    """Seconds since the epoch, of the latest."""
    decision: Decision
    times: int = 1


class Decisions:
    """Decisions as they come. A repeated one that changes nothing is kept once, with how often it came.

    A ramp, that is a change in steps, takes minutes. Its first step and its last are logged and kept.
    """

    def __init__(self, log: logging.Logger) -> None:
        self.recent: deque[Explained] = deque(maxlen=KEPT)
        """The last ones, the newest last."""
        self.counts: dict[tuple[str, str], int] = {}
        """Their number by action and reason."""
        self.alarms: dict[str, str] = {}
        """By model: how answers differ from the forecast, while they do."""
        self.utilization: dict[str, Utilization] = {}
        """By model, from its last forecast."""
        self._ramps: dict[str, Reason] = {}
        """By model: why its ramp began, while it goes on."""
        self._log = log

    def add(self, model: str, decision: Decision) -> None:
        """Take the next decision on a model."""
        if decision.predicted is not None:
            expected, target = decision.predicted, decision.target_utilization
            self.utilization[model] = Utilization(expected.utilization, target, expected.lowest_utilization)
        self._compare(model, decision)
        key = ("Change" if decision.change else "Keep", decision.reason.value)
        self.counts[key] = self.counts.get(key, 0) + 1
        if self._goes_on(model, decision):
            return
        if decision.change:
            self._log_change(model, decision)
        last = self._last(model)
        if (
            last is not None
            and not decision.change
            and not last.decision.change
            and last.decision.reason is decision.reason
        ):
            last.decision, last.at = decision, time()
            last.times += 1
        else:
            self.recent.append(Explained(model, time(), decision))

    def predicted(self, model: str) -> Forecasted | None:
        """Return the forecast of the last decision on a model."""
        last = self._last(model)
        return None if last is None else last.decision.predicted

    def forget(self, model: str | None = None) -> None:
        """Drop what belongs to the present model, or to all: another model, server, policy or tuner process follows."""
        for known in (self.alarms, self.utilization, self._ramps):
            for name in [*known] if model is None else [model]:
                known.pop(name, None)

    def _last(self, model: str) -> Explained | None:
        return next((each for each in reversed(self.recent) if each.model == model), None)

    def _goes_on(self, model: str, decision: Decision) -> bool:
        """Whether this is a further step of a ramp; a step for another reason begins a ramp of its own."""
        before = self._ramps.get(model)
        if decision.change and decision.capped_by == "step":
            self._ramps[model] = decision.reason
            return decision.reason is before
        # Between steps nothing changes, because the next one waits or there is no data to decide on.
        if decision.change or (decision.uncapped is not None and decision.capped_by != "step"):
            self._ramps.pop(model, None)
        return False

    def _log_change(self, model: str, decision: Decision) -> None:
        facts = {"model": model, "reason": decision.reason.value, "detail": decision.message}
        if decision.capped_by == "step" and decision.uncapped is not None:
            facts["target"] = decision.uncapped.describe()
        self._log.info("parameters changed", extra=facts)

    def _compare(self, model: str, decision: Decision) -> None:
        """Log when the forecast begins to be off, and when it is right again."""
        before = self.alarms.pop(model, None)
        if decision.alarm:
            self.alarms[model] = decision.alarm
        if decision.alarm and before is None:
            self._log.warning("the forecast differs from the answers", extra={"model": model, "detail": decision.alarm})
        elif before is not None and not decision.alarm:
            self._log.info("the forecast matches the answers again", extra={"model": model})
