"""Turns one model's parameters by what is observed of it.

Every observation is learned from (``belief``), and held against what was forecast (``guards``). Where there is news the
best setting is searched anew (``planner``), and a step towards it is taken as far as the rules allow (``moves``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool.batching.counters import COLD
from carpool.exchange.decision import Decision, Reason
from carpool.learning.batchable_share import explained
from carpool.policy.spec import Objective, PassThroughMode, ShedAt
from carpool.tuning import objective
from carpool.tuning.assessment import KEPT
from carpool.tuning.belief import Belief
from carpool.tuning.exploration import Exploration, below
from carpool.tuning.guards import Guards, late_of
from carpool.tuning.history import History
from carpool.tuning.moves import Move, move
from carpool.tuning.planner import Planner
from carpool.tuning.requirements import Requirements

if TYPE_CHECKING:
    from carpool.exchange.decision import Observation
    from carpool.forecasting.accuracy import Alarm
    from carpool.learning.latency_model import LatencyLearner, ServiceTime
    from carpool.learning.load import Load
    from carpool.policy.parameters import Parameters
    from carpool.policy.spec import BatchingPolicy, Model
    from carpool.tuning.assessment import Assessment
    from carpool.tuning.belief import Moved

INTERVAL = 0.5
"""Seconds between observations: two of them tell a jump of the load, three a change of the model."""


class Tuner:
    """Turns one model's parameters by what is observed every ``INTERVAL``."""

    def __init__(
        self,
        policy: BatchingPolicy,
        model: Model | None = None,
        parameters: Parameters | None = None,
        *,
        load: Load | None = None,
        learner: LatencyLearner | None = None,
    ) -> None:
        """Start from ``parameters``, or the policy's baseline within its limits.

        ``load`` and ``learner``: what load and t(b) are to be known from, where not from observations alone.
        """
        self._belief = Belief(load, learner)
        self._requirements = Requirements.of(policy, model)
        self._belief.load.tolerance = policy.tuning.tolerance_percent / 100
        self.parameters = self._requirements.limits.clamp(parameters or policy.baseline)
        self._history = History()
        self._guards = Guards(self._requirements.quantile)
        self._exploration = Exploration()
        self._planner = Planner(self._requirements, self._belief, self._guards, self._exploration, self._history)
        self._shed = False
        self._queued_rows = 0

    def follow(self, policy: BatchingPolicy, model: Model | None = None) -> None:
        """Go by another policy from here on, from the present parameters within its limits.

        What was learned of load and t(b) stays; what was tried under the old one may be tried again.
        """
        self._requirements = Requirements.of(policy, model)
        self._belief.load.tolerance = policy.tuning.tolerance_percent / 100
        self.parameters = self._requirements.limits.clamp(self.parameters)
        self._planner.follow(self._requirements)
        self._guards.follow(self._requirements.quantile, self._history.now)
        if self._belief.in_force is not None:
            self._belief.discard_tables()  # the Batcher's may be longer or shorter now
            self._begin_epoch()

    def adopt(self, parameters: Parameters) -> None:
        """Go on from parameters that somebody else put in force."""
        parameters = self._requirements.limits.clamp(parameters)
        if parameters == self.parameters:
            return
        self._planner.choice = None
        self._put_in_force(parameters)

    def rejected(self, parameters: Parameters, back_to: Parameters) -> None:
        """Go on from ``back_to``: with ``parameters`` more requests were late than forecast, and they were taken back.

        They are avoided as if it had been seen here, and forecasts are made with as much more care.
        """
        if parameters not in self._guards.failed:
            self._guards.fail(parameters, self._history.now)
        self.adopt(back_to)

    def step(self, observation: Observation) -> Decision:
        """Take an observation and decide."""
        decision = self._step(observation)
        sheds = self._backlogged() or self._guards.was_broken(self._history.now)
        state = self._planner.state(self.parameters, sheds=sheds)
        decision = replace(decision, share=self._belief.sharing.share, state=state)
        assessor = self._planner.assessor
        holds = assessor is None or assessor.holds(self._requirements.limits.max_wait)
        return _explained(decision, self._guards.check.alarm, holds=holds)

    def _step(self, observation: Observation) -> Decision:
        history, belief, stats = self._history, self._belief, observation.stats
        history.observe(observation.now, stats.arrivals)
        backlogged, self._queued_rows = self._backlogged(), observation.queued_rows
        # 1. Evidence that is none.
        if observation.seconds <= 0:
            return self._keep(Reason.METRICS_STALE, "no time has passed since the last observation")
        if observation.stalled:
            self._guards.check.changed(observation.now)
            return self._keep(Reason.HOST_STALLED, "this host paused; what was measured meanwhile is not used")
        # 2. Learn.
        moved = belief.observe(observation)
        self._planner.share_device(observation.others_busy / observation.seconds)
        history.requests += stats.arrivals
        service = belief.service
        if service is None:
            if history.is_quiet_from_the_start:
                return self._keep(Reason.NO_TRAFFIC, history.silence)
            return self._keep(Reason.TOO_FEW_SAMPLES, "no batch has been measured yet")
        if belief.load.process is None or history.is_silent:
            belief.put_in_force(self._requirements.limits.max_batch)
            return self._idle(service)
        if any(moved) or belief.is_another():
            self._begin_epoch()
        # 3. Is what was forecast contradicted?
        expelled = self.parameters.pass_through and not observation.passing
        alarmed, tried, checked = self._contradicted(observation, moved, backlogged=backlogged, expelled=expelled)
        # 4. Search anew where there is news.
        forgives = not alarmed and self._guards.forgives(history.now)
        news = (
            self._exploration.hope_ends(history.now)
            or self._planner.is_outdated
            or any((*moved, checked, alarmed, forgives, tried))
            or belief.is_news
        )
        if news:
            belief.put_in_force(self._requirements.limits.max_batch)
            if alarmed:
                self._guards.fail(self.parameters, history.now)
            elif forgives:
                self._guards.forgive(history.now)
            self._planner.search(self.parameters, backlogged=self._backlogged())
        elif self._exploration.is_affordable():
            self._planner.look_for_tries(moving=False)
        # 5. Move.
        decision = self._move(alarmed=alarmed, expelled=expelled)
        if self._planner.assessor is not None:
            # What is in force is told of more surely with every decision that needs no search.
            if not news:
                self._planner.assessor.assess(self.parameters, KEPT).settle()
            self._planner.assessor.rest()
        return decision

    def _contradicted(
        self, observation: Observation, moved: Moved, *, backlogged: bool, expelled: bool
    ) -> tuple[bool, bool, bool]:
        """Hold answers against what was forecast for the setting in force, not against what was late before it.

        Returns whether too many were late, whether a try just ended, and whether an alarm began or ended.
        """
        now, stats, guards, exploration = observation.now, observation.stats, self._guards, self._exploration
        requirements = self._requirements
        exploration.earn(requirements.budget, stats.hits, late_of(stats), observation.replicas, self._belief.load.rate)
        current = self._planner.current(self.parameters)
        promised = current is not None and current.holds_ahead
        asked = promised and not backlogged and not requirements.held
        broken = asked and guards.observe_misses(now, stats, self.parameters.max_batch)
        if broken:
            exploration.tries.stop()
        tried = exploration.tries.observe(now, stats)
        disturbed = moved.load or moved.share or moved.limit or tried or exploration.tries.trying or expelled
        checked = guards.check_forecast(
            observation,
            model_moved=moved.model,
            disturbed=disturbed or COLD in stats.misses,
            expected=lambda: None if self._shed else self._planner.expected(self.parameters),
        )
        return broken and not guards.caution.most, tried, checked

    def _begin_epoch(self) -> None:
        """Forget what was tried: the load or the model moved."""
        self._exploration.begin_epoch(another_model=self._belief.begin_epoch())
        self._guards.begin_epoch()

    def _idle(self, service: ServiceTime) -> Decision:
        """Step aside where nobody comes: who does after all has no company to wait for."""
        requirements, silence = self._requirements, self._history.silence
        keeps = requirements.held or requirements.passing is PassThroughMode.NEVER or self.parameters.pass_through
        if keeps or not self._history.is_silent:
            return self._keep(Reason.NO_TRAFFIC, silence)
        passing = objective.passing(self.parameters, service, requirements.limits)
        message = f"{self.parameters.describe()} to {passing.describe()}: {silence}"
        if requirements.recommends:
            return replace(self._decision(Reason.RECOMMEND_ONLY, message), parameters=passing)
        self._put_in_force(passing)
        return replace(self._decision(Reason.PASSES_THROUGH, message), change=True)

    # ------------------------------------------------------------------------------------------------- movement

    def _move(self, *, alarmed: bool, expelled: bool) -> Decision:
        """Do what the rules allow."""
        scene = self._planner.scene(self.parameters, backlogged=self._backlogged())
        if scene is None:
            return self._keep(Reason.TOO_FEW_SAMPLES, "nothing to decide by yet")
        if self._requirements.held:
            self._shed = not scene.current.holds_now
            return self._keep(Reason.HELD, "the policy's mode is Hold, or the parameters are fixed", scene.current)
        # This near the capacity a few late ones make all behind them late.
        target = self._exploration.brighter or scene.target
        self._shed = not scene.current.holds_ahead and not target.holds_ahead
        chosen = move(scene, alarmed=alarmed, expelled=expelled)
        if chosen.tries is not None:
            self._exploration.begin(
                chosen.tries, below(scene.assessor.situation.service, chosen.tries), self._history.now
            )
        if chosen.resumes:
            self._history.changed_at = self._history.now
            return replace(self._decision(chosen.reason, chosen.message, chosen.target, chosen.target), change=True)
        if chosen.step is None:
            return self._keep(chosen.reason, chosen.message, chosen.target, chosen.capped_by)
        return self._change(chosen, chosen.step)

    def _change(self, chosen: Move, step: Assessment) -> Decision:
        message = f"{self.parameters.describe()} to {step.parameters.describe()}: {chosen.message}"
        if self._requirements.recommends:
            decision = self._decision(Reason.RECOMMEND_ONLY, message, step, chosen.target, chosen.capped_by)
            return replace(decision, tentative=chosen.tentative)
        self._guards.tried.append(self.parameters)
        self._put_in_force(step.parameters, is_try=chosen.tries is not None)
        decision = self._decision(chosen.reason, message, step, chosen.target, chosen.capped_by)
        return replace(decision, change=True, tentative=chosen.tentative)

    def _put_in_force(self, parameters: Parameters, *, is_try: bool = False) -> None:
        self._guards.before = [self.parameters]
        self.parameters = parameters
        self._exploration.is_in_force = is_try
        self._history.changed()
        self._guards.changed(self._history.now)

    def _keep(self, reason: Reason, message: str, target: Assessment | None = None, capped_by: str = "") -> Decision:
        current = self._planner.current(self.parameters) if target is not None else None
        decision = self._decision(reason, message, current, target, capped_by)
        return replace(decision, parameters=self.parameters)

    def _decision(
        self,
        reason: Reason,
        message: str,
        step: Assessment | None = None,
        target: Assessment | None = None,
        capped_by: str = "",
    ) -> Decision:
        aim = self._planner.aim
        return Decision(
            parameters=step.parameters if step is not None else self.parameters,
            change=False,
            reason=reason,
            message=message,
            uncapped=target.parameters if target is not None else None,
            capped_by=capped_by,
            predicted=self._planner.forecasted(step) if step is not None else None,
            shed_slo=self._sheds_late(),
            estimate=self._belief.planned(self.parameters),
            at=self._history.now,
            rate=self._belief.load.rate,
            target_utilization=aim.target if aim.objective is Objective.BALANCED else 0.0,
            alternative=self._planner.alternative(self.parameters) if step is not None else "",
        )

    def _sheds_late(self) -> bool:
        """Whether who would be late for the SLO is refused."""
        mode = self._requirements.policy.admission.shed_at
        if mode is ShedAt.AUTOMATIC:
            return self._shed or self._backlogged() or self._guards.was_broken(self._history.now)
        return mode is ShedAt.SLO

    def _backlogged(self) -> bool:
        """Whether more waits than can be served in time: all who come behind it would be late."""
        capacity = self._belief.capacity(self.parameters)
        return capacity is not None and self._queued_rows > capacity * self._requirements.target


def _explained(decision: Decision, alarm: Alarm | None, *, holds: bool) -> Decision:
    """Say what keeps requests from being batched, and whether the forecast is wrong.

    ``holds``: whether requests are held for company at all.
    """
    decision = replace(decision, alarm=alarm.message if alarm is not None else "")
    if alarm is not None and decision.reason in {Reason.CONVERGED, Reason.FORECAST_OFF, Reason.HELD}:
        return replace(decision, reason=Reason.FORECAST_OFF, message=f"{decision.message}; {alarm.message}")
    plain = decision.reason in {Reason.CONVERGED, Reason.PASSES_THROUGH, Reason.SAVES_DEVICE_TIME}
    if plain and not holds:
        return replace(decision, reason=Reason.NO_COMPANY, message=f"{decision.message}; {explained(decision.share)}")
    return decision
