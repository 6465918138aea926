"""The move from the setting in force towards the chosen one: what is done now, and why, or why it waits. Pure."""

from __future__ import annotations

from math import hypot, sqrt
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.exchange.decision import Reason
from carpool.learning.change_detection import width
from carpool.policy.durations import Duration, format_seconds, whole_microseconds
from carpool.policy.parameters import Parameters
from carpool.tuning import messages
from carpool.tuning.objective import FASTER, LEAST, Aim, Choice, is_better

if TYPE_CHECKING:
    from carpool.forecasting.forecaster import Assessment, Forecaster
    from carpool.tuning.history import History
    from carpool.tuning.requirements import Requirements

NEGLIGIBLE = 0.001
"""Difference of forecast miss fractions below which one step is no riskier than another."""

WORTH = 0.02
"""Relative gain for which parameters change even if it is uncertain: the change itself measures it."""

UNSURE = 0.1
"""A gain must exceed this share of the width of the batch latency's confidence interval."""

WIDE = 3.92
"""Standard errors from one end of a 95 % interval to the other."""


class Scene(NamedTuple):
    """The input of a move's decision."""

    requirements: Requirements
    aim: Aim
    forecaster: Forecaster
    choice: Choice
    current: Assessment
    """The setting in force."""
    history: History
    left: frozenset[Parameters]
    """Settings left since load or model changed: returning to one needs a better reason."""
    backlogged: bool
    """Whether more requests wait than can be served in time."""
    forecast_low: bool
    """Whether answers take longer than forecast."""
    explored: Parameters | None
    """The setting worth exploring."""
    explores: bool
    """Whether the setting in force is explored; ``ended``: whether it was, until now."""
    ended: bool

    @property
    def loses(self) -> bool:
        """Whether the SLO is missed now, by forecast or by the backlog."""
        return not self.current.holds_now or self.backlogged

    @property
    def is_early(self) -> bool:
        """Whether it is too early for a riskier step."""
        riskier = self.requirements.policy.tuning.riskier
        return self.history.since_change < riskier.after or self.history.requests < riskier.min_requests

    def is_riskier(self, step: Assessment) -> bool:
        """Whether more requests may be late than now. If the SLO is missed already, no step is riskier."""
        return not self.loses and step.risk > self.current.risk + NEGLIGIBLE


class Move(NamedTuple):
    """The result: ``step`` is put in force; ``None``: nothing changes, but ``waiting`` may be next."""

    reason: Reason
    message: str
    target: Assessment
    """The setting to approach."""
    step: Assessment | None = None
    capped_by: str = ""
    """Why the step is not the target, or waits; ``""``: neither."""
    tentative: bool = False
    """Whether one replica should have it first."""
    explores: bool = False
    """Whether the step, or the setting in force, is explored."""
    waiting: Parameters | None = None


def is_worth(target: Assessment, current: Assessment) -> bool:
    """Whether the saving of device time is enough for a change."""
    service = target.situation.service
    size, present = target.parameters.max_batch, current.parameters.max_batch
    doubt = width(service, size)
    if is_better(target, current, max(WORTH, UNSURE * doubt)):
        return True
    if not (current.holds_ahead and target.holds_ahead):
        return False
    # With equal sizes the error of batch latency is the same for both.
    error = 0.0 if size == present else hypot(doubt, width(service, present)) / WIDE
    # Settings have the same noise, but their batches differ: 500 with a CV of 50 % leave an error of 2 %.
    batches = target.now.requests * target.situation.rows / target.now.mean_batch
    return is_better(target, current, max(LEAST, hypot(error, service.noise / sqrt(batches))))


def is_faster(aim: Aim, target: Assessment, current: Assessment) -> bool:
    """Whether a setting chosen for its latency is worth a change."""
    keeps = current.holds_ahead and aim.keeps_target(current, aim.slack)
    return not keeps or aim.latency(target) < (1 - FASTER) * aim.latency(current)


def is_gain(aim: Aim, choice: Choice, current: Assessment) -> bool:
    """Whether the chosen setting is worth a change from the one in force."""
    target = choice.target
    if choice.takes_all or current.parameters.pass_through != target.parameters.pass_through:
        return True
    return is_faster(aim, target, current) if choice.is_fast else is_worth(target, current)


def move(scene: Scene, *, alarmed: bool) -> Move:
    """Go towards the chosen setting as far as the rules allow; ``alarmed``: more were late than forecast."""
    target, parameters = scene.choice.target, scene.current.parameters
    if scene.explores:
        message = "the batch latency of this setting is being measured"
        return Move(Reason.EXPLORES, message, target, capped_by="evidence")
    # 1. Restoring the SLO comes first.
    rescue = scene.loses and target.holds_now and target.parameters != parameters
    if scene.forecast_low and not alarmed and not scene.loses:
        return _unheld(scene, target)
    # 2. Then exploration. Pass-through alone would never show batch latency.
    if scene.explored is not None and not rescue and not scene.requirements.recommends:
        explored = scene.forecaster.assess(scene.explored)
        if not (scene.is_early and scene.is_riskier(explored)):
            text = "it may gain; only running it shows its latency"
            return Move(Reason.EXPLORES, text, target, explored, "evidence", tentative=not scene.loses, explores=True)
    # 3. Then a better setting.
    if target.parameters == parameters or not (alarmed or is_gain(scene.aim, scene.choice, scene.current)):
        return Move(Reason.CONVERGED, messages.out_of_reach(target) or "no candidate is clearly better", target)
    return _step(scene, alarmed=alarmed)


def _unheld(scene: Scene, target: Assessment) -> Move:
    """Hold no request while the forecast is too low: the effect of a wait is unknown."""
    parameters = scene.current.parameters
    shortest = Duration(scene.requirements.limits.min_wait)
    if parameters.max_wait <= shortest:
        return Move(Reason.FORECAST_OFF, "the forecast is off", target)
    unheld = scene.forecaster.assess(replace(parameters, max_wait=shortest))
    return Move(Reason.FORECAST_OFF, "no request is held while the forecast is off", unheld, unheld)


def _step(scene: Scene, *, alarmed: bool) -> Move:
    """Take one step towards the target, if it is time for it."""
    current, target = scene.current, scene.choice.target
    riskier, history = scene.requirements.policy.tuning.riskier, scene.history
    service = target.situation.service
    step, capped_by = target, ""
    # 1. How far?
    if scene.is_riskier(target):
        nearer = toward(current.parameters, target.parameters, riskier.max_factor, service.largest_measured)
        if nearer != target.parameters:
            step, capped_by = scene.forecaster.assess(nearer), "step"
    is_riskier = scene.is_riskier(step)
    # 2. Not yet?
    named = step.parameters.describe()
    if is_riskier and scene.is_early:
        message = (
            f"{named} is next; riskier steps wait for {format_seconds(riskier.after)} and {riskier.min_requests} "
            f"requests (now {format_seconds(history.since_change)} and {history.requests})"
        )
        return Move(Reason.WITHIN_STABILIZATION_WINDOW, message, target, capped_by="step", waiting=step.parameters)
    # 3. Not again?
    if step.parameters in scene.left and target.holds_now and not (alarmed or scene.ended):
        message = f"{named} was in force at this load, and was left"
        return Move(Reason.WOULD_FLIP, message, target, capped_by="evidence", waiting=step.parameters)
    reason, message = messages.why(scene.aim, scene.choice, current, step if capped_by else target)
    if alarmed and reason is not Reason.RESTORES_SLO:
        reason, message = Reason.MISSES_CONFIRMED, f"more requests were late than forecast; {message}"
    is_new = step.parameters.max_batch > service.largest_measured and not step.parameters.pass_through
    return Move(reason, message, target, step, capped_by, tentative=is_riskier or (is_new and not scene.loses))


def toward(current: Parameters, target: Parameters, factor: float, largest: int) -> Parameters:
    """Go from ``current`` towards ``target``: per step at most ``factor``, or one row, or one millisecond more.

    ``largest`` is the largest measured batch; growth stops at twice that. A step down may have any size.
    """
    size = min(target.max_batch, max(int(current.max_batch * factor), current.max_batch + 1))
    size = min(size, max(2 * largest, current.max_batch))
    wait = min(target.max_wait, max(current.max_wait * factor, current.max_wait + 0.001))
    flights = min(target.max_in_flight, max(int(current.max_in_flight * factor), current.max_in_flight + 1))
    return Parameters(
        max_batch=size,
        max_wait=Duration(whole_microseconds(wait)),
        max_in_flight=flights,
        pass_through=target.pass_through,
    )
