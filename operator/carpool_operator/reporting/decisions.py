"""The decisions in a status: what is applied and recommended, the last decision, and the history.

A status that differs is written, so nothing here changes with time alone. Figures change only with decisions, and a
lasting state is reported only after a while.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from carpool.exchange.decision import Reason
from carpool.policy.durations import format_seconds
from carpool_operator.api.status import (
    MAX_HISTORY,
    Applied,
    HistoryEntry,
    LastDecision,
    NoCapacity,
    Recommendation,
    Status,
    TargetModel,
    TargetStatus,
    TrialStatus,
)
from carpool_operator.delivery.documents import EVERY
from carpool_operator.tuning.learning import alone_too_slow, predicted
from carpool_operator.tuning.target_load import autoscaler_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from carpool.policy.parameters import Parameters
    from carpool_operator.api.model import Target, View
    from carpool_operator.api.status import CapacityStatus, Condition, TokenStreamsStatus
    from carpool_operator.reporting.conditions import Delivery
    from carpool_operator.tuning.happenings import Happening
    from carpool_operator.tuning.learning import Learned
    from carpool_operator.tuning.steering import Steering

LASTING = 60.0
"""Seconds after which a lasting state, without any action, is reported."""

BUSIER = 2.0
"""How many times the load another model must have before the status describes it."""

DONE = frozenset({"Applied", "Promoted", "RolledBack", "FellBack"})
"""Actions in the history."""


def timestamp(wall: float) -> str:
    """Write seconds since the epoch as RFC 3339, UTC, whole seconds."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class _Lasting:
    """Whether something has been the same for ``LASTING`` seconds."""

    def __init__(self) -> None:
        self._what: object = None
        self._since = 0.0

    def for_long(self, what: object, now: float) -> bool:
        if what != self._what:
            self._what, self._since = what, now
        return now - self._since >= LASTING


class _Main(NamedTuple):
    """The model that a status describes."""

    steering: Steering
    name: str
    learned: Learned


class Reporter:
    """Keeps what was reported, starting with the status ``before``."""

    def __init__(self, before: Status) -> None:
        self._reported = before
        self._history = before.history
        self._last = before.last_decision
        self._recommendation = before.recommendation
        self._main: tuple[str, str] | None = None
        if before.applied is not None:
            self._main = (before.applied.target, before.applied.model)
        self._state = _Lasting()
        self._next = _Lasting()

    def record(self, view: View, steerings: Sequence[Steering], happened: Sequence[tuple[Target, Happening]]) -> None:
        """Record what was done, and the present state."""
        at = timestamp(view.wall)
        for target, happening in happened:
            if happening.action in DONE and happening.parameters is not None:
                entry = HistoryEntry(
                    generation=happening.generation,
                    at=at,
                    target=target.local,
                    model=happening.model,
                    parameters=happening.parameters,
                    reason=happening.reason,
                )
                self._history = (entry, *self._history)[:MAX_HISTORY]
            if happening.action != "Recovered":
                self._last = LastDecision(
                    action=happening.action,
                    reason=happening.reason,
                    message=happening.message,
                    model=happening.model,
                    target=target.local,
                    at=at,
                    observed=happening.observed,
                    predicted=happening.predicted,
                    alternative=happening.alternative,
                )
        main = self._busiest(steerings)
        self._hold(view, steerings, main, at)
        self._recommend(view.now, main)

    def _busiest(self, steerings: Sequence[Steering]) -> _Main | None:
        """Choose the model that the status describes, without alternating between two that are equally busy."""
        every = [_Main(steering, name, each) for steering in steerings for name, each in steering.models.items()]
        if not every:
            return None
        best = max(every, key=lambda each: each.learned.rate)
        known = next((each for each in every if (each.steering.target.local, each.name) == self._main), None)
        if known is not None and best.learned.rate <= BUSIER * known.learned.rate:
            return known
        self._main = (best.steering.target.local, best.name)
        return best

    def _hold(self, view: View, steerings: Sequence[Steering], main: _Main | None, at: str) -> None:
        """Report why nothing is done, once what was reported last has been over for a while."""
        blind = next((each for each in steerings if each.trust.blind is not None), None)
        decision = None if main is None else main.learned.decision
        target, model, reason, message = None, EVERY, "", ""
        if blind is not None and blind.trust.blind is not None:
            target, reason, message = blind.target, str(blind.trust.blind.reason), blind.trust.blind.message
        elif main is not None and decision is not None and not decision.change:
            target, model = main.steering.target, main.name
            reason, message = str(decision.reason), decision.message
            if view.policy.paused:
                reason, message = "Paused", "tuning is paused, and parameters stay"
        if target is None:
            return
        last, where = self._last, target.local
        held = None if last is None else (last.action, last.reason, last.model, last.target)
        said = held == ("Held", reason, model, where)
        # What was reported may be over although no other reason lasts: two that alternate replace it as well.
        over = self._state.for_long(None if said else last, view.now)
        if said or reason == Reason.RECOMMEND_ONLY or (last is not None and not over):
            return
        self._last = LastDecision(
            action="Held",
            reason=reason,
            message=message,
            model=model,
            target=where,
            at=at,
            observed=None if main is None else main.learned.observed(),
            predicted=None if decision is None else predicted(decision.predicted),
            alternative="" if decision is None else decision.alternative,
        )

    def _recommend(self, now: float, main: _Main | None) -> None:
        """Report the recommendation: at once if the tuner only recommends, after a while if a change is prevented."""
        wanted = None if main is None else _recommendation(main)
        decision = None if main is None else main.learned.decision
        only = decision is not None and decision.reason is Reason.RECOMMEND_ONLY
        last = self._recommendation
        if _essence(wanted) == _essence(last):
            self._next.for_long(None, now)
        elif self._next.for_long(_essence(wanted), now) or (last is None and only):
            self._recommendation = wanted

    def status(
        self,
        view: View,
        steerings: Sequence[Steering],
        delivered: Mapping[Target, Delivery],
        conditions: tuple[Condition, ...],
        generation: int,
    ) -> Status:
        """Build the status."""
        return Status(
            observed_generation=generation,
            conditions=conditions,
            applied=self._applied(steerings),
            recommendation=self._recommendation,
            last_decision=self._last,
            targets=tuple(_target(view, steering, delivered.get(steering.target)) for steering in steerings),
            history=self._history,
            capacity=tuple(said for steering in steerings if (said := _capacity(view.now, steering)) is not None),
            no_capacity=tuple(never for steering in steerings if (never := _no_capacity(steering)) is not None),
            token_streams=tuple(
                streams for steering in steerings if (streams := _streams(view.now, steering)) is not None
            ),
        )

    def _applied(self, steerings: Sequence[Steering]) -> Applied | None:
        main = self._busiest(steerings)
        if main is not None:
            return _as_applied(main.steering, main.name, main.learned.generation, main.learned.in_force)
        for steering in steerings:
            change = steering.publisher.change
            if change is not None and EVERY in change.parameters:
                return _as_applied(steering, EVERY, steering.models.every_since, change.parameters[EVERY])
        return None


def _recommendation(main: _Main) -> Recommendation | None:
    learned, trial = main.learned, main.steering.trials.current
    decision = learned.decision
    if decision is None:
        return None
    if trial is not None and trial.model == main.name:
        parameters, capped_by = trial.parameters, "canary"
    elif decision.reason is Reason.RECOMMEND_ONLY:
        parameters, capped_by = decision.parameters, decision.capped_by or "mode"
    elif decision.waiting is not None:
        parameters, capped_by = decision.waiting, decision.capped_by
    else:
        return None
    if parameters == learned.in_force:
        return None
    return Recommendation(
        target=main.steering.target.local,
        model=main.name,
        parameters=parameters,
        uncapped=decision.uncapped,
        capped_by=capped_by,
        predicted=predicted(decision.recommended),
    )


def _essence(recommendation: Recommendation | None) -> tuple[object, ...] | None:
    """Return the part of a recommendation whose change makes it new; its forecast is not part of it."""
    if recommendation is None:
        return None
    return (
        recommendation.target,
        recommendation.model,
        recommendation.parameters,
        recommendation.uncapped,
        recommendation.capped_by,
    )


def _as_applied(steering: Steering, model: str, generation: int, parameters: Parameters) -> Applied:
    passing = parameters.pass_through
    return Applied(
        generation=generation,
        # A generation is the time of its publication, in milliseconds.
        at=timestamp(generation / 1000),
        target=steering.target.local,
        model=model,
        parameters=parameters,
        batch="pass" if passing else str(parameters.max_batch),
        wait="pass" if passing else format_seconds(parameters.max_wait),
    )


def _target(view: View, steering: Steering, delivered: Delivery | None) -> TargetStatus:
    target, change, tried = steering.target, steering.publisher.change, steering.publisher.trial
    trial, workload = steering.trials.current, view.workloads.get(target)
    models = [
        TargetModel(
            name=name,
            generation=learned.generation,
            parameters=learned.in_force,
            trial=None
            if trial is None or tried is None or trial.model != name
            else TrialStatus(
                generation=tried.generation,
                parameters=trial.parameters,
                pods=tuple(sorted(pod.name for pod in view.pods.get(target, ()) if pod.uid in trial.pods)),
                since=timestamp(trial.wall),
            ),
        )
        for name, learned in sorted(steering.models.items())
    ]
    if not models and change is not None and EVERY in change.parameters:
        models = [TargetModel(name=EVERY, generation=steering.models.every_since, parameters=change.parameters[EVERY])]
    return TargetStatus(
        kind=target.kind,
        name=target.name,
        replicas=0 if workload is None else workload.replicas,
        injected=0 if delivered is None else delivered.injected,
        acknowledged=0 if delivered is None else delivered.acknowledged,
        missed=tuple(pod.name for pod in view.missed.get(target, ())),
        models=tuple(models),
        autoscaler=autoscaler_of(workload),
    )


def _streams(now: float, steering: Steering) -> TokenStreamsStatus | None:
    measured = steering.measurements
    return measured.streams.status(now, steering.target.local, measured.engines.limits())


def _capacity(now: float, steering: Steering) -> CapacityStatus | None:
    cold_start = steering.measurements.cold_starts.seconds
    return steering.measurements.load.status(now, steering.target.local, _lowest(steering), cold_start)


def _no_capacity(steering: Steering) -> NoCapacity | None:
    name = steering.measurements.load.unmet
    if name is None:
        return None
    learned = steering.models.get(name)
    alone = None if learned is None else learned.too_slow_alone
    why = "no load is forecast to meet the SLO" if alone is None else alone_too_slow(alone)
    return NoCapacity(target=steering.target.local, model=name, reason=why)


def _lowest(steering: Steering) -> float | None:
    """Return the lowest utilization that is forecast for the busiest model of a target."""
    decisions = [learned.decision for learned in steering.models.values() if learned.decision is not None]
    busiest = max(decisions, key=lambda decision: decision.rate, default=None)
    return None if busiest is None or busiest.predicted is None else busiest.predicted.lowest_utilization
