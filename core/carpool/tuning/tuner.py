"""Tunes one model's parameters from observations of it.

The tuner learns from every observation (``belief``) and compares it with the forecast (``guards``). When something
changed, it chooses the best setting again (``objective``) and looks for settings that could be better
(``exploration``). It takes a step as far as the rules allow (``moves``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool.batching.counters import COLD
from carpool.exchange.decision import Decision, Observation, Reason
from carpool.policy.spec import BatchingPolicy, Model, Objective, PassThroughMode, ShedAt
from carpool.tuning import messages
from carpool.tuning.belief import Belief, Moved
from carpool.tuning.exploration import Exploration
from carpool.tuning.guards import Guards, late_of
from carpool.tuning.history import History
from carpool.tuning.moves import Move, Scene, move
from carpool.tuning.objective import Aim, passing
from carpool.tuning.plan import Plan
from carpool.tuning.requirements import Requirements
from carpool.tuning.states import state_of

if TYPE_CHECKING:
    from carpool.forecasting.forecaster import Assessment
    from carpool.policy.parameters import Parameters

INTERVAL = 0.5
"""Seconds between observations: two of them show a jump of the load, three a change of the model."""


class Tuner:
    """Tunes one model's parameters from an observation every ``INTERVAL``."""

    def __init__(
        self, policy: BatchingPolicy, model: Model | None = None, parameters: Parameters | None = None
    ) -> None:
        """Start from ``parameters``, or the policy's baseline within its limits."""
        self._requirements = Requirements.of(policy, model)
        self.belief = Belief()
        self.belief.load.tolerance = policy.tuning.tolerance_percent / 100
        self.parameters = self._requirements.clamp(parameters or policy.start(model))
        self._history = History()
        self._guards = Guards(self._requirements.quantile)
        self._exploration = Exploration()
        self.plan = Plan(self._requirements, self.belief, self._guards, self._exploration)
        self._left: set[Parameters] = set()
        """Settings left since load or model changed."""
        self._queued_rows = 0

    def follow(self, policy: BatchingPolicy, model: Model | None = None) -> None:
        """Follow another policy from now on, starting with the present parameters within its limits.

        The estimates of load and batch latency stay; settings explored under the old policy may be explored again.
        """
        self._requirements = Requirements.of(policy, model)
        self.belief.load.tolerance = policy.tuning.tolerance_percent / 100
        self.parameters = self._requirements.clamp(self.parameters)
        self.plan = Plan(self._requirements, self.belief, self._guards, self._exploration)
        self._guards.follow(self._requirements.quantile, self._history.now)
        if self.belief.in_force is not None:
            self.belief.in_force = None  # the tables are made again: the Batcher's may be longer or shorter now
            self._begin_epoch()

    def adopt(self, parameters: Parameters) -> None:
        """Continue from parameters that were put in force from outside."""
        if (parameters := self._requirements.clamp(parameters)) != self.parameters:
            self.plan.adopted(parameters, explored=self._exploration.is_under_way)
            self._exploration.interrupt(self._history.now)
            self._put_in_force(parameters)

    def rejected(self, parameters: Parameters, back_to: Parameters) -> None:
        """Continue from ``back_to``: with ``parameters`` too many requests were late, so they were rolled back.

        If they were forecast to meet the SLO, the safety margin grows, as if the misses had been observed here.
        """
        if parameters not in self._left:
            self._left.add(parameters)
            if (forecast := self.plan.assess(parameters)) is not None and forecast.holds_ahead:
                self._guards.margin.more(self._history.now, *self.plan.promised(parameters))
            self.plan.choice = None
        self.adopt(back_to)

    def step(self, observation: Observation, *, refine: bool = True) -> Decision:
        """Take an observation and decide; ``refine``: whether there is time to refine forecasts."""
        decision = self._step(observation, refine=refine)
        state = state_of(
            self.parameters,
            self._requirements,
            self.plan,
            known=self.belief.in_force is not None,
            sheds=decision.shed_slo and self._backlogged(),
            cautious=self._guards.margin.factor < 1,
            explores=self._exploration.is_under_way,
        )
        decision = replace(decision, share=self.belief.sharing.share, state=state)
        holds = self.plan.holds(self._requirements.limits.max_wait)
        return messages.explained(decision, self._guards.check.alarm, holds=holds)

    def _step(self, observation: Observation, *, refine: bool) -> Decision:
        history, belief, stats, policy = self._history, self.belief, observation.stats, self._requirements.policy
        history.observe(observation.now, stats.arrivals)
        backlogged, self._queued_rows = self._backlogged(), observation.queued_rows
        # 1. Ignore observations that are no evidence.
        if observation.seconds <= 0:
            return self._keep(Reason.METRICS_STALE, "no time has passed since the last observation")
        if observation.stalled:
            self._guards.check.changed(observation.now)
            return self._keep(Reason.HOST_STALLED, "this host paused; what was measured meanwhile is not used")
        # 2. Learn.
        moved = belief.observe(observation)
        self.plan.aim = Aim.of(policy, belief.load.error)
        history.requests += stats.arrivals
        if belief.service is None:
            if history.is_silent:
                return self._keep(Reason.NO_TRAFFIC, history.silence)
            return self._keep(Reason.TOO_FEW_SAMPLES, "no batch has been measured yet")
        if belief.load.process is None or history.is_silent or observation.growing:
            belief.put_in_force(self._requirements.limits.max_batch)
            self.plan.choice = None  # the choice for an earlier load is void
            growing = "requests wait, and the next answers show what larger batches take"
            return self._keep(Reason.TOO_FEW_SAMPLES, growing) if observation.growing else self._idle()
        if any(moved) or belief.is_another_model():
            self._begin_epoch()
        # 3. Is the forecast contradicted?
        alarmed, ended, checked = self._contradicted(observation, moved, backlogged=backlogged)
        # 4. Choose again if something changed.
        if forgives := self._guards.margin.is_over(history.now):
            self._guards.margin.less(history.now)
            self._left.clear()
        changed = any((*moved, checked, alarmed, forgives, ended, belief.has_changed)) or self.plan.is_outdated
        if changed:
            belief.put_in_force(self._requirements.limits.max_batch)
            self.plan.make(self.parameters, self._left, history.now)
        # 5. Move.
        decision = self._move(alarmed=alarmed, ended=ended)
        self.plan.rest(self.parameters, refine=refine and not changed)
        return decision

    def _contradicted(self, observation: Observation, moved: Moved, *, backlogged: bool) -> tuple[bool, bool, bool]:
        """Compare answers with the forecast of the setting in force; requests late before it do not count.

        Returns whether too many were late, whether an exploration just ended, and whether an alarm began or ended.
        """
        now, stats, guards, exploration = observation.now, observation.stats, self._guards, self._exploration
        requirements, service, late = self._requirements, self.belief.service, late_of(observation.stats)
        exploration.earn(requirements.budget, stats.hits, late, observation.explorers, self.belief.load.rate)
        current = self.plan.assess(self.parameters)
        promised = current is not None and current.holds_ahead and not backlogged and not requirements.held
        broken = promised and guards.observe_misses(stats, self.parameters.max_batch)
        alarmed = broken and guards.margin.more(now, *self.plan.promised(self.parameters))
        if broken:
            exploration.stop()
        misses = self.plan.choice is not None and not self.plan.choice.efficient.holds_now
        spent = late / observation.replicas
        ended = service is not None and exploration.observe(now, stats, spent, service, misses=misses)
        disturbed = moved.load or moved.share or moved.limit or ended or exploration.is_under_way
        checked = guards.check_forecast(
            observation,
            model_moved=moved.model,
            disturbed=disturbed or COLD in stats.misses,
            expected_p99=lambda: current.refinement.expected_p99 if current is not None and current.holds_now else None,
        )
        return alarmed, ended, checked

    def _begin_epoch(self) -> None:
        """Forget the settings that were left: the load or the model changed."""
        self._exploration.stop(forgets=self.belief.begin_epoch())
        self._left.clear()
        self._guards.begin_epoch()

    def _idle(self) -> Decision:
        """Pass requests through while none comes: the next one has no other to wait for."""
        requirements, silence, service = self._requirements, self._history.silence, self.belief.service
        never = requirements.policy.pass_through.mode is PassThroughMode.NEVER
        if never or requirements.held or self.parameters.pass_through or service is None or not self._history.is_silent:
            return self._keep(Reason.NO_TRAFFIC, silence)
        through = passing(self.parameters, service, requirements.limits)
        message = f"{self.parameters.describe()} to {through.describe()}: {silence}"
        if requirements.recommends:
            return replace(self._decision(Reason.RECOMMEND_ONLY, message), parameters=through)
        self._put_in_force(through)
        return replace(self._decision(Reason.PASSES_THROUGH, message), change=True, decided=True)

    # ------------------------------------------------------------------------------------------------- movement

    def _move(self, *, alarmed: bool, ended: bool) -> Decision:
        """Move as far as the rules allow."""
        plan, requirements, exploration = self.plan, self._requirements, self._exploration
        if plan.forecaster is None or plan.choice is None:
            return self._keep(Reason.TOO_FEW_SAMPLES, "only single requests were measured so far, and they are in time")
        current = plan.forecaster.assess(self.parameters)
        if requirements.held:
            return self._keep(Reason.HELD, "the policy's mode is Hold, or the parameters are fixed", current)
        scene = Scene(
            requirements, plan.aim, plan.forecaster, plan.choice, current, self._history, frozenset(self._left),
            backlogged=self._backlogged(), forecast_low=bool(self._guards.check.alarm), ended=ended,
            explored=exploration.candidate, explores=exploration.is_under_way,
        )  # fmt: skip
        chosen = move(scene, alarmed=alarmed)
        if chosen.step is None:
            kept = self._keep(chosen.reason, chosen.message, chosen.target, chosen.capped_by)
            decided = not chosen.capped_by and not requirements.recommends
            return replace(kept, decided=decided, waiting=chosen.waiting)
        if chosen.explores and (service := self.belief.service) is not None:
            exploration.begin(chosen.step.parameters, self.parameters, service, self._history.now)
        return self._change(chosen, chosen.step)

    def _change(self, chosen: Move, step: Assessment) -> Decision:
        message = f"{self.parameters.describe()} to {step.parameters.describe()}: {chosen.message}"
        if self._requirements.recommends:
            decision = self._decision(Reason.RECOMMEND_ONLY, message, step, chosen.target, chosen.capped_by)
            current = self.plan.forecasted(step.forecaster.assess(self.parameters))
            return replace(decision, tentative=chosen.tentative, predicted=current, recommended=decision.predicted)
        if step.parameters.max_batch <= step.situation.service.largest_measured:
            self._left.add(self.parameters)  # left for a size never measured, it was not found worse: it may come back
        self._put_in_force(step.parameters)
        decision = self._decision(chosen.reason, message, step, chosen.target, chosen.capped_by)
        return replace(decision, change=True, decided=True, tentative=chosen.tentative)

    def _put_in_force(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._left.discard(parameters)
        self._history.changed()
        self._guards.changed(self._history.now)

    def _keep(self, reason: Reason, message: str, target: Assessment | None = None, capped_by: str = "") -> Decision:
        current = self.plan.assess(self.parameters) if target is not None else None
        return self._decision(reason, message, current, target, capped_by)

    def _decision(
        self,
        reason: Reason,
        message: str,
        step: Assessment | None = None,
        target: Assessment | None = None,
        capped_by: str = "",
    ) -> Decision:
        plan, aim = self.plan, self.plan.aim
        return Decision(
            parameters=step.parameters if step is not None else self.parameters,
            change=False,
            reason=reason,
            message=message,
            uncapped=target.parameters if target is not None else None,
            capped_by=capped_by,
            predicted=plan.forecasted(step) if step is not None else None,
            shed_slo=self._sheds_late(),
            estimate=self.belief.planned(self.parameters, self._requirements.target, self._exploration.measured),
            at=self._history.now,
            rate=self.belief.load.rate,
            target_utilization=aim.target if aim.objective is Objective.BALANCED else 0.0,
            alternative=plan.alternative(self.parameters) if step is not None else "",
        )

    def _sheds_late(self) -> bool:
        """Whether requests that would miss the SLO are refused: where device time is scarce."""
        mode = self._requirements.policy.admission.shed_at
        if mode is ShedAt.AUTOMATIC:
            return not self._requirements.recommends and (self.plan.is_scarce(self.parameters) or self._backlogged())
        return mode is ShedAt.SLO

    def _backlogged(self) -> bool:
        """Whether more requests wait than can be served in time: all later ones would be late."""
        capacity = self.belief.capacity(self.parameters)
        return capacity is not None and self._queued_rows > capacity * self._requirements.target
