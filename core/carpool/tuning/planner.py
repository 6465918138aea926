"""The search for the best setting in a situation: what it is searched in, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool.exchange.decision import Forecasted
from carpool.learning.batchable_share import NONE
from carpool.policy.durations import Duration
from carpool.policy.spec import PassThroughMode
from carpool.tuning import objective
from carpool.tuning.assessment import KEPT, Assessment, Assessor, Situation
from carpool.tuning.exploration import brighter
from carpool.tuning.moves import Scene
from carpool.tuning.search import Choice, choose
from carpool.tuning.states import state_of
from carpool.tuning.steps import WORTH, is_clearly_worth, pass_or_batch

if TYPE_CHECKING:
    from carpool.exchange.decision import State
    from carpool.forecasting.refinement import Expected
    from carpool.policy.parameters import Limits, Parameters
    from carpool.tuning.belief import Belief
    from carpool.tuning.exploration import Exploration
    from carpool.tuning.guards import Guards
    from carpool.tuning.history import History
    from carpool.tuning.requirements import Requirements

WORTH_A_STALL = 0.1
"""Relative saving of device time for which a size never used is turned to, where the first batch of each makes others
late: kernels are chosen or compiled for it then."""


class Planner:
    """Searches, by what is believed and within what guards allow; keeps what was found."""

    def __init__(
        self, requirements: Requirements, belief: Belief, guards: Guards, exploration: Exploration, history: History
    ) -> None:
        """Begin without a plan."""
        self._requirements = requirements
        self._belief = belief
        self._guards = guards
        self._exploration = exploration
        self._history = history
        self.aim = objective.Aim.of(requirements.policy)
        self.assessor: Assessor | None = None
        """Of the last search; it forecasts any setting."""
        self.choice: Choice | None = None
        """``None``: to be searched anew."""
        self.fast: Assessment | None = None
        """The setting with the least latency that keeps the utilization target; ``None``: there is none, or the
        objective is device time."""

    def follow(self, requirements: Requirements) -> None:
        """Go by other requirements, without a plan."""
        self._requirements = requirements
        self.assessor = None
        self.choice = None

    def share_device(self, others: float) -> None:
        """Reckon with ``others`` who use the device for such a share of the time."""
        self.aim = objective.Aim.of(self._requirements.policy, others)

    @property
    def is_outdated(self) -> bool:
        """Whether there is no plan, or it is for another load."""
        assessor = self.assessor
        return self.choice is None or assessor is None or self._belief.load.process != assessor.situation.process

    def current(self, parameters: Parameters) -> Assessment | None:
        """Return the forecasts of what is in force; ``None`` before the first search."""
        return self.assessor.assess(parameters, KEPT) if self.assessor is not None else None

    def expected(self, parameters: Parameters) -> Expected | None:
        """Return what answers should show; ``None`` where the forecast says itself that it is worth little."""
        current = self.current(parameters)
        return current.expected if current is not None and current.holds_now else None

    def state(self, parameters: Parameters, *, sheds: bool) -> State:
        """Return what is being done; ``sheds``: whether requests that would be late are refused."""
        return state_of(
            parameters, self._requirements, self._belief, self.choice, self._guards, self._exploration, sheds=sheds
        )

    def _reach(self, size: int) -> Limits:
        """Return where to look for candidates; ``size``: ``max_batch`` in force."""
        limits, belief = self._requirements.limits, self._belief
        if belief.sharing.share <= NONE:
            # No size differs from another, and company may come again.
            limits = replace(limits, min_batch=size, max_batch=size)
        elif (largest := belief.size_limit.largest) is not None:
            # Larger batches are not made now: nothing is to be gained by a larger maximum, nor to be learned.
            most = max(min(largest, limits.max_batch), limits.min_batch)
            limits = replace(limits, max_batch=most)
        return replace(limits, max_wait=limits.min_wait) if self._guards.is_forecast_low else limits

    def _situation(self, parameters: Parameters) -> Situation | None:
        belief, requirements = self._belief, self._requirements
        process, service = belief.load.process, belief.learner.mixed()
        if process is None or service is None:
            return None
        return Situation(
            process=process,
            service=service,
            target=requirements.target * self._guards.caution.factor,
            budget=requirements.budget,
            limits=self._reach(parameters.max_batch),
            rows=max(1, round(belief.load.rows)),
            quantiles=requirements.quantiles,
            share=belief.sharing.share,
            largest=belief.size_limit.largest,
        )

    def search(self, parameters: Parameters, *, backlogged: bool) -> None:
        """Search anew, from what is in force."""
        situation = self._situation(parameters)
        if situation is None:
            return
        self.assessor = assessor = Assessor(situation)
        current = assessor.assess(parameters, KEPT)
        if self._requirements.held:
            self.choice = Choice(best=current, current=current)
            return
        # Where the SLO is not kept something has to be done, and what was left before is no answer.
        failed, tried = self._guards.failed, self._guards.tried
        avoid = failed if current.holds_now else failed + tried
        unused = WORTH_A_STALL if self._belief.cold else 0.0
        choice = choose(assessor, parameters, avoid=avoid, unused=unused)
        if not choice.best.holds_now:
            # Beyond the capacity requests are late whatever is set: that speaks against nothing that was tried.
            choice = choose(assessor, parameters)
        self.choice = choice = replace(
            choice, best=self._with_size_in_force(assessor, choice.best, parameters.max_batch)
        )
        self.fast = objective.fastest(assessor, self.aim, choice, self._requirements.passing, failed)
        scene = self._scene(assessor, choice, parameters, backlogged=backlogged)
        leaves = scene.target.parameters != parameters and scene.is_worth(scene.target, is_clearly_worth)
        self._exploration.brighter = self._hope_for(scene) if leaves else None
        self.look_for_tries(moving=self._exploration.is_due(self._belief.load.rate, leaves=leaves))

    def _with_size_in_force(self, assessor: Assessor, best: Assessment, present: int) -> Assessment:
        """Return ``best`` with the ``max_batch`` in force where smaller batches than either are made for now.

        The limit passes with what it came from; the maximum would then have to be raised again, step by step.
        """
        largest = self._belief.size_limit.largest
        if largest is None or not best.parameters.max_batch >= assessor.situation.limits.max_batch < present:
            return best
        return assessor.assess(replace(best.parameters, max_batch=present))

    def _hope_for(self, scene: Scene) -> Assessment | None:
        """Return what is to be turned to in place of the target, for what few batches leave open of t(b)."""
        target, best, avoid = scene.target, scene.choice.best, {*self._guards.failed, *self._guards.tried}
        if not scene.current.holds_now or self._guards.check.alarm is not None or self.fast is not None:
            return None
        if target is best:
            found = brighter(scene.assessor, target, target, WORTH, avoid)
            return found if found is not None and scene.is_worth(found, is_clearly_worth) else None
        if scene.current.parameters.pass_through or self._requirements.passing is PassThroughMode.ALWAYS:
            return None
        return self._exploration.hope_beside_passing(scene.assessor, best, target, avoid, self._history.now)

    def look_for_tries(self, *, moving: bool) -> None:
        """Ask which size never measured is worth a try, for as much as may be lost by it."""
        guards, exploration, choice = self._guards, self._exploration, self.choice
        exploration.give_up_looking()
        if self.assessor is None or choice is None or self._requirements.held or guards.check.alarm is not None:
            return
        if self.fast is not None:
            return  # while the device has room, another size has nothing to save that anybody needs
        # After misses that were not forecast no forecast says what may be dared, nor where first batches are slow.
        if (guards.caution.none and not self._belief.cold) or not choice.best.holds_now:
            avoid = [*guards.failed, *guards.before]
            exploration.look(self.assessor, choice, avoid, moving=moving, now=self._history.now)

    def scene(self, parameters: Parameters, *, backlogged: bool) -> Scene | None:
        """Return all that a move is decided by; ``None`` without a plan."""
        if self.assessor is None or self.choice is None:
            return None
        return self._scene(self.assessor, self.choice, parameters, backlogged=backlogged)

    def _scene(self, assessor: Assessor, choice: Choice, parameters: Parameters, *, backlogged: bool) -> Scene:
        choice = replace(choice, current=assessor.assess(parameters, KEPT))
        return Scene(
            requirements=self._requirements,
            aim=self.aim,
            assessor=assessor,
            choice=choice,
            target=self.fast or pass_or_batch(assessor, choice, self._requirements.passing),
            is_fast=self.fast is not None,
            guards=self._guards,
            exploration=self._exploration,
            history=self._history,
            backlogged=backlogged,
            cold=self._belief.cold,
        )

    def forecasted(self, step: Assessment) -> Forecasted:
        """Return what is expected of a setting."""
        told = step.told
        return Forecasted(
            p50=told.p50,
            p99=told.p99,
            p99_ahead=step.ahead.p99,
            miss_fraction=told.miss_fraction,
            goodput=told.goodput,
            device_time=told.device_time,
            mean_batch=told.mean_batch,
            mean=told.mean,
            utilization=self.aim.utilization(step),
        )

    def alternative(self, parameters: Parameters) -> str:
        """Say what another objective than the one ``parameters`` were chosen for would do at this load."""
        assessor, choice = self.assessor, self.choice
        if assessor is None or choice is None:
            return ""
        current = assessor.assess(parameters, KEPT)
        shortest = Duration(self._requirements.limits.min_wait)
        unheld = replace(choice.best.parameters, max_wait=shortest, pass_through=False)
        return objective.alternative(self.aim, current, choice.best, assessor.assess(unheld))
