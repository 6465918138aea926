"""The tuner's state: the first one that applies. The diagram is in docs/tuning.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool.exchange.decision import State
from carpool.policy.spec import ShedAt

if TYPE_CHECKING:
    from carpool.policy.parameters import Parameters
    from carpool.tuning.plan import Plan
    from carpool.tuning.requirements import Requirements


def state_of(
    parameters: Parameters, requirements: Requirements, plan: Plan, *, known: bool, sheds: bool, cautious: bool,
    explores: bool,
) -> State:  # fmt: skip
    """Return the state.

    ``known``: whether batch latency is; ``sheds``: whether there is a backlog;
    ``cautious``: whether forecasts are made with a margin; ``explores``: whether the setting in force is explored.
    """
    choice = plan.choice
    if requirements.held:
        return State.HELD
    if not known or (choice is None and not parameters.pass_through):
        return State.LEARNING
    if choice is not None and not choice.efficient.holds_now:
        return State.OVERLOADED
    if sheds and requirements.policy.admission.shed_at is not ShedAt.DEADLINE:
        return State.SHEDDING
    if cautious:
        return State.ROLLED_BACK
    if explores:
        return State.EXPLORING
    return State.PASS_THROUGH if parameters.pass_through else State.STEADY
