"""From the setting in force towards the one chosen: what is done now, and why, or what it waits for. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.exchange.decision import Reason
from carpool.policy.durations import Duration, format_seconds
from carpool.tuning import objective
from carpool.tuning.steps import is_worth, toward, why

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool.tuning.assessment import Assessment, Assessor
    from carpool.tuning.exploration import Exploration
    from carpool.tuning.guards import Guards
    from carpool.tuning.history import History
    from carpool.tuning.objective import Aim
    from carpool.tuning.requirements import Requirements
    from carpool.tuning.search import Choice

NEGLIGIBLE = 0.001
"""Difference of forecast miss fractions below which one step is no riskier than another."""


class Move(NamedTuple):
    """What is done: ``step`` is put in force; ``None``: all stays as it is."""

    reason: Reason
    message: str
    target: Assessment
    """What is gone towards."""
    step: Assessment | None = None
    capped_by: str = ""
    """What keeps the step from being the target; ``""``: nothing."""
    tentative: bool = False
    """Whether one replica had better try it first."""
    tries: int | None = None
    """The size that it is to tell of, where that was never measured."""
    resumes: bool = False
    """Whether pass-through, which a backlog ended, is put in force again."""


class Scene(NamedTuple):
    """All that a move is decided by."""

    requirements: Requirements
    aim: Aim
    assessor: Assessor
    choice: Choice
    """Of the search; its ``current`` is what is in force."""
    target: Assessment
    """What is best for all that is known."""
    is_fast: bool
    """Whether that was chosen for its latency."""
    guards: Guards
    exploration: Exploration
    history: History
    backlogged: bool
    cold: bool
    """Whether the first batch of a size makes requests late."""

    @property
    def current(self) -> Assessment:
        """What is in force."""
        return self.choice.current

    @property
    def loses(self) -> bool:
        """Whether the SLO is not kept as it is, by forecast or by what waits."""
        return not self.current.holds_now or self.backlogged

    @property
    def is_early(self) -> bool:
        """Whether it is too early for a riskier step."""
        riskier = self.requirements.policy.tuning.riskier
        return self.history.since_change < riskier.after or self.history.requests < riskier.min_requests

    def is_riskier(self, step: Assessment) -> bool:
        """Whether more may be late than now. Who does not keep the SLO as it is has nothing to lose."""
        if self.loses:
            return False
        return self.assessor.risk(step.parameters) > self.assessor.risk(self.current.parameters) + NEGLIGIBLE

    def is_worth(self, target: Assessment, enough: Callable[[Assessment, Assessment], bool] = is_worth) -> bool:
        """Whether the target is ``enough`` of a gain to change anything for it."""
        current, passes = self.current, target.parameters.pass_through
        if self.cold and passes and target.situation.rows not in target.situation.service.sizes:
            return False
        if current.parameters.pass_through != passes:
            return True
        waits = current.parameters.max_wait
        if self.is_fast and target is self.target:
            return objective.is_gain(self.aim, target, current)
        if target.parameters.max_wait < waits and not self.assessor.holds(waits):
            return True
        return enough(target, current)


def move(scene: Scene, *, alarmed: bool, expelled: bool) -> Move:
    """Go towards the best configuration as far as the rules allow.

    ``alarmed``: more requests were late than forecast; ``expelled``: a backlog ended pass-through.
    """
    target, parameters = scene.exploration.brighter or scene.target, scene.current.parameters
    if scene.exploration.tries.trying:
        return Move(Reason.EXPLORES, "a batch size never measured is being tried", target, capped_by="evidence")
    # What restores the SLO comes first.
    rescue = scene.loses and target.holds_now and target.parameters != parameters
    if scene.guards.is_forecast_low and not alarmed and not rescue:
        return _unheld(scene, target)
    # Before requests pass one by one too: from there on nothing tells what company would cost.
    if not rescue and (tried := _try(scene, target)) is not None:
        return tried
    if target.parameters == parameters and expelled:
        if scene.history.since_change < scene.requirements.policy.tuning.riskier.after:
            return Move(Reason.WITHIN_STABILIZATION_WINDOW, "a backlog ended pass-through", target)
        message = "the backlog that ended pass-through is gone"
        return Move(Reason.PASSES_THROUGH, message, target, resumes=True)
    if target.parameters == parameters or not (alarmed or scene.is_worth(target)):
        return Move(Reason.CONVERGED, "no configuration within reach is clearly better", target)
    return _step(scene, target, alarmed=alarmed)


def _unheld(scene: Scene, target: Assessment) -> Move:
    """Hold nothing: no forecast says what is better, or what a wait does."""
    shortest, parameters = scene.requirements.limits.min_wait, scene.current.parameters
    if parameters.max_wait <= shortest:
        return Move(Reason.FORECAST_OFF, "nothing is changed while the forecast is off", target)
    unheld = scene.assessor.assess(replace(parameters, max_wait=Duration(shortest)))
    return Move(Reason.FORECAST_OFF, "nothing is held while the forecast is off", unheld, step=unheld)


def _try(scene: Scene, target: Assessment) -> Move | None:
    """Try a size never measured, if one is worth it and it is time for it."""
    exploration, current = scene.exploration, scene.current
    if exploration.bold is None or current.parameters.pass_through or scene.requirements.recommends:
        return None
    bold = scene.assessor.assess(exploration.bold)
    if scene.is_early and scene.is_riskier(bold):
        return None
    message = "it may cost little or nothing, and what a batch of that size takes only trying tells"
    size = bold.parameters.max_batch
    if bold.parameters == current.parameters:
        return Move(Reason.EXPLORES, message, target, capped_by="evidence", tries=size)
    return Move(Reason.EXPLORES, message, bold, bold, "evidence", tentative=not scene.loses, tries=size)


def _step(scene: Scene, target: Assessment, *, alarmed: bool) -> Move:
    """Take one step, if it is time for it."""
    current, tuning, history = scene.current, scene.requirements.policy.tuning, scene.history
    service = scene.assessor.situation.service
    step, capped_by = target, ""
    # 1. How far?
    if scene.is_riskier(target):
        nearer = toward(current.parameters, target.parameters, tuning.riskier.max_factor, service.largest_measured)
        if nearer != target.parameters:
            step, capped_by = scene.assessor.assess(nearer), "step"
    is_riskier = scene.is_riskier(step)
    # 2. Not yet?
    named = step.parameters.describe()
    if is_riskier and scene.is_early:
        message = (
            f"{named} is next; riskier steps wait for {format_seconds(tuning.riskier.after)} and "
            f"{tuning.riskier.min_requests} requests (now {format_seconds(history.since_change)} and "
            f"{history.requests})"
        )
        return Move(Reason.WITHIN_STABILIZATION_WINDOW, message, target, capped_by="step")
    # 3. Not again?
    guards = scene.guards
    again = step.parameters in guards.failed or (step.parameters in guards.tried and not alarmed)
    if again and target.holds_now and not scene.exploration.is_in_force:
        return Move(Reason.WOULD_FLIP, f"{named} was tried at this load and left", target, capped_by="evidence")
    reason, message = _why(scene, target, step if capped_by else target, alarmed=alarmed)
    # Where requests seldom meet, that more may be in flight than ever were makes no difference.
    is_new = (
        step.parameters.max_batch > service.largest_measured
        or step.parameters.max_in_flight > service.largest_in_flight
    )
    passes = scene.is_fast and step is scene.target and step.parameters.pass_through
    tentative = is_riskier or (is_new and not scene.loses and not passes)
    return Move(reason, message, target, step, capped_by, tentative=tentative)


def _why(scene: Scene, target: Assessment, step: Assessment, *, alarmed: bool) -> tuple[Reason, str]:
    """Say what a step is for."""
    if target is not scene.target:
        best = scene.target.parameters.describe()
        reason, message = Reason.EXPLORES, f"as good as {best} for all that is known; only running it tells if better"
    elif scene.is_fast:
        reason, message = objective.why(scene.aim, scene.current, step)
    else:
        reason, message = why(scene.choice, step)
    if alarmed and reason is not Reason.RESTORES_SLO:
        return Reason.MISSES_CONFIRMED, f"more requests were late than forecast; {message}"
    return reason, message
