"""From the setting in force towards the one chosen: what is done now, and why, or what it waits for. Pure."""

from __future__ import annotations

from math import hypot, sqrt
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.exchange.decision import Reason
from carpool.learning.change_detection import width
from carpool.policy.durations import Duration, format_seconds, whole_microseconds
from carpool.policy.parameters import Parameters
from carpool.tuning import messages
from carpool.tuning.objective import FASTER, SLACK, is_better

if TYPE_CHECKING:
    from carpool.forecasting.forecaster import Assessment, Forecaster
    from carpool.tuning.history import History
    from carpool.tuning.objective import Aim, Choice
    from carpool.tuning.requirements import Requirements

NEGLIGIBLE = 0.001
"""Difference of forecast miss fractions below which one step is no riskier than another."""

WORTH = 0.02
"""Relative gain for which parameters are changed whatever is uncertain of it: the change itself measures it."""

LEAST = 0.003
"""Relative saving of device time below which nothing is changed, however sure it is: a change is a message to every
replica."""

UNSURE = 0.1
"""Share of the width of a batch latency's confidence interval that a gain has to exceed."""

WIDE = 3.92
"""Standard errors from one end of a 95 % interval to the other."""


class Scene(NamedTuple):
    """All that a move is decided by."""

    requirements: Requirements
    aim: Aim
    forecaster: Forecaster
    choice: Choice
    current: Assessment
    """What is in force."""
    history: History
    left: frozenset[Parameters]
    """Settings that were left since load or model changed: the way back needs a better reason."""
    backlogged: bool
    """Whether more waits than can be served in time."""
    forecast_low: bool
    """Whether answers take longer than forecast."""
    explored: Parameters | None
    """What is worth exploring."""
    explores: bool
    """Whether the setting in force is explored; ``ended``: whether it was, until now."""
    ended: bool

    @property
    def loses(self) -> bool:
        """Whether the SLO is missed as it is, by forecast or by what waits."""
        return not self.current.holds_now or self.backlogged

    @property
    def is_early(self) -> bool:
        """Whether it is too early for a riskier step."""
        riskier = self.requirements.policy.tuning.riskier
        return self.history.since_change < riskier.after or self.history.requests < riskier.min_requests

    def is_riskier(self, step: Assessment) -> bool:
        """Whether more may be late than now. A setting that misses the SLO has nothing to lose."""
        return not self.loses and step.risk > self.current.risk + NEGLIGIBLE


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
    explores: bool = False
    """Whether the step, or what is in force, is to be explored."""


def is_worth(target: Assessment, current: Assessment) -> bool:
    """Whether a setting with less device time is enough of a gain to change anything for it."""
    service = target.situation.service
    size, present = target.parameters.max_batch, current.parameters.max_batch
    doubt = width(service, size)
    if is_better(target, current, max(WORTH, UNSURE * doubt)):
        return True
    if not (current.holds_ahead and target.holds_ahead):
        return False
    # Of equal sizes, what is uncertain of batch latency is the same for both.
    error = 0.0 if size == present else hypot(doubt, width(service, present)) / WIDE
    # Settings meet the same noise, but their batches differ: 500 that spread by a half leave 2 % open.
    batches = target.now.requests * target.situation.rows / target.now.mean_batch
    return is_better(target, current, max(LEAST, hypot(error, service.noise / sqrt(batches))))


def is_faster(aim: Aim, target: Assessment, current: Assessment) -> bool:
    """Whether a setting chosen for its latency is worth a change."""
    if not current.holds_ahead or not aim.keeps_target(current, SLACK):
        return True
    return aim.latency(target) < (1 - FASTER) * aim.latency(current)


def is_gain(aim: Aim, choice: Choice, current: Assessment) -> bool:
    """Whether the chosen setting is worth a change from the one in force."""
    target = choice.target
    if current.parameters.pass_through != target.parameters.pass_through:
        return True
    return is_faster(aim, target, current) if choice.is_fast else is_worth(target, current)


def move(scene: Scene, *, alarmed: bool, expelled: bool) -> Move:
    """Go towards the chosen setting as far as the rules allow.

    ``alarmed``: more requests were late than forecast; ``expelled``: a backlog ended pass-through.
    """
    target, parameters = scene.choice.target, scene.current.parameters
    if scene.explores:
        return Move(Reason.EXPLORES, "what this setting takes is being measured", target, capped_by="evidence")
    # 1. What restores the SLO comes first.
    rescue = scene.loses and target.holds_now and target.parameters != parameters
    if scene.forecast_low and not alarmed and not rescue:
        return _unheld(scene, target)
    # 2. Then what only running it can show. From pass-through nothing would show what batches take.
    if scene.explored is not None and not rescue and not scene.requirements.recommends:
        explored = scene.forecaster.assess(scene.explored)
        if not (scene.is_early and scene.is_riskier(explored)):
            message = "it may gain, and has to run to be measured"
            tentative = not scene.loses
            return Move(Reason.EXPLORES, message, target, explored, "evidence", tentative=tentative, explores=True)
    # 3. Then what is better.
    if target.parameters == parameters and expelled:
        if scene.history.since_change < scene.requirements.policy.tuning.riskier.after:
            return Move(Reason.WITHIN_STABILIZATION_WINDOW, "a backlog ended pass-through", target)
        return Move(Reason.PASSES_THROUGH, "the backlog that ended pass-through is gone", target, target)
    if target.parameters == parameters or not (alarmed or is_gain(scene.aim, scene.choice, scene.current)):
        return Move(Reason.CONVERGED, "no candidate is clearly better", target)
    return _step(scene, alarmed=alarmed)


def _unheld(scene: Scene, target: Assessment) -> Move:
    """Hold no request while the forecast is too low: nothing says what a wait would do."""
    parameters = scene.current.parameters
    shortest = Duration(scene.requirements.limits.min_wait)
    if parameters.max_wait <= shortest:
        return Move(Reason.FORECAST_OFF, "the forecast is off", target)
    unheld = scene.forecaster.assess(replace(parameters, max_wait=shortest))
    return Move(Reason.FORECAST_OFF, "no request is held while the forecast is off", unheld, unheld)


def _step(scene: Scene, *, alarmed: bool) -> Move:
    """Take one step towards the target, if it is time for it."""
    current, target = scene.current, scene.choice.target
    tuning, history = scene.requirements.policy.tuning, scene.history
    service = target.situation.service
    step, capped_by = target, ""
    # 1. How far?
    if scene.is_riskier(target):
        nearer = toward(current.parameters, target.parameters, tuning.riskier.max_factor, service.largest_measured)
        if nearer != target.parameters:
            step, capped_by = scene.forecaster.assess(nearer), "step"
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
    if step.parameters in scene.left and target.holds_now and not (alarmed or scene.ended):
        message = f"{named} was in force at this load, and was left"
        return Move(Reason.WOULD_FLIP, message, target, capped_by="evidence")
    reason, message = messages.why(scene.aim, scene.choice, current, step if capped_by else target)
    if alarmed and reason is not Reason.RESTORES_SLO:
        reason, message = Reason.MISSES_CONFIRMED, f"more requests were late than forecast; {message}"
    is_new = step.parameters.max_batch > service.largest_measured and not step.parameters.pass_through
    return Move(reason, message, target, step, capped_by, tentative=is_riskier or (is_new and not scene.loses))


def toward(current: Parameters, target: Parameters, factor: float, largest: int) -> Parameters:
    """Go from ``current`` towards ``target``: per step at most ``factor``, or one row, or one millisecond more.

    ``largest`` is the largest batch measured; growth stops at twice that. Downwards a step may be of any size.
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
