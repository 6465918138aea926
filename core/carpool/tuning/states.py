"""Which state the tuner is in: the first of these that applies. The diagram is in docs/tuning.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool.exchange.decision import State
from carpool.policy.spec import ShedAt

if TYPE_CHECKING:
    from carpool.policy.parameters import Parameters
    from carpool.tuning.belief import Belief
    from carpool.tuning.exploration import Exploration
    from carpool.tuning.guards import Guards
    from carpool.tuning.requirements import Requirements
    from carpool.tuning.search import Choice


def state_of(
    parameters: Parameters,
    requirements: Requirements,
    belief: Belief,
    choice: Choice | None,
    guards: Guards,
    exploration: Exploration,
    *,
    sheds: bool,
) -> State:
    """Return it; ``choice``: of the last search; ``sheds``: whether requests that would be late are refused."""
    if requirements.held:
        return State.HELD
    if belief.in_force is None or (choice is None and not parameters.pass_through):
        return State.LEARNING
    if choice is not None and not choice.best.holds_now:
        return State.OVERLOADED
    if sheds and requirements.policy.admission.shed_at is ShedAt.AUTOMATIC:
        return State.SHEDDING
    if guards.failed:
        return State.ROLLED_BACK
    if exploration.is_under_way:
        return State.EXPLORING
    return State.PASS_THROUGH if parameters.pass_through else State.STEADY
