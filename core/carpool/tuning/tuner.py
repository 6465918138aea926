"""The tuner's memory: what it has learned, what it tried, and when. One per model; decides as ``assessment`` says."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool.batching.counters import COLD, LATE
from carpool.batching.requests import PROBES, Refused
from carpool.exchange.decision import Decision, Forecasted, Observation, Reason
from carpool.forecasting.accuracy import PAUSED, ForecastCheck
from carpool.forecasting.queueing import stability
from carpool.learning.batchable_share import NONE, Sharing, explained
from carpool.learning.change_detection import is_another, is_news
from carpool.learning.latency_model import LatencyLearner
from carpool.learning.load import Load
from carpool.learning.miss_test import MissTest
from carpool.learning.size_limit import SizeLimit
from carpool.policy.durations import Duration, format_seconds
from carpool.policy.spec import Objective, PassThroughMode, ShedAt, TuningMode
from carpool.tuning import objective
from carpool.tuning.assessment import KEPT, Assessment, Assessor, Situation
from carpool.tuning.exploration import LASTS, RISE, Dares, Probe, below, bolder, brighter, to_probe
from carpool.tuning.safety_margin import Caution
from carpool.tuning.search import Choice, choose
from carpool.tuning.steps import WORTH, gain, is_clearly_worth, is_worth, toward, why, without_vain_wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool.batching.requests import Estimate
    from carpool.forecasting.refinement import Expected
    from carpool.learning.latency_model import ServiceTime
    from carpool.policy.parameters import Limits, Parameters
    from carpool.policy.spec import BatchingPolicy, Model

INTERVAL = 0.5
"""Seconds between observations: two of them tell a jump of the load, three a change of the model."""

SILENCE = 30.0
"""Seconds without an arrival after which the load is taken to be none."""

ENTER_PASS_THROUGH = 0.05
LEAVE_PASS_THROUGH = 0.08
"""Saving of device time by batching below which requests pass through, and above which they stop to however unsure."""

NEGLIGIBLE = 0.001
"""Difference of forecast miss fractions below which one step is no riskier than another."""

MOSTLY_ALONE = 1.2
"""Mean batch, in requests, up to which what passes through is forecast to."""

WORTH_A_STALL = 0.1
"""Relative saving of device time for which a size never used is turned to, where the first batch of each makes others
late: kernels are chosen or compiled for it then."""

SPARED = 300.0
"""Seconds' worth of misses that the SLO allows, and were not made, that are kept for tries."""

BROKEN = 10.0
"""Seconds for which who would be late is refused after the SLO was seen not to be kept, whatever was forecast."""

TOO_LATE = (LATE, Refused.LATE, Refused.EXPIRED, Refused.QUEUE_FULL)
"""Misses that other parameters might have avoided; failures and cancellations are not."""


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
        self._load = load or Load()
        self._load.tolerance = policy.tuning.tolerance_percent / 100
        self._learner = learner or LatencyLearner()
        self._obey(policy, model)
        self.parameters = self._limits.clamp(parameters or policy.baseline)
        self._sharing = Sharing()
        self._size_limit = SizeLimit()
        self._check = ForecastCheck()
        self._service: ServiceTime | None = None
        self._estimate: Estimate | None = None
        self._choice: Choice | None = None
        self._assessor: Assessor | None = None
        self._changed_at = -inf
        self._started_at: float | None = None
        self._requests_since = 0
        self._last_arrival = -inf
        self._seen_at = -inf
        self._caution = Caution()
        self._spare = 0.0
        """Requests of a replica that were not late and might have been: what a try may cost."""
        self._offered = 0.0
        """As many when one was last looked for."""
        self._shed = False
        self._broken_at = -inf
        self._aim = objective.Aim.of(policy)
        self._fast: Assessment | None = None
        """The setting with the least latency that keeps the utilization target; ``None``: there is none, or the
        objective is device time."""
        self._brighter: Assessment | None = None
        """What is turned to in place of the best: as good for all that is known, and less of it is."""
        self._hopes_until = inf
        """When it is no more in place of pass-through; ``inf``: not begun; ``-inf``: over, until load or t(b) move."""
        self._probe: Probe | None = None
        """Of the present parameters; ``None``: to be looked for."""
        self._bold: Parameters | None = None
        self._dares = Dares()
        self._dared_at = inf
        self._cold = False
        """Whether the first batch of a size was seen to make requests late."""
        self._dared = False
        """Whether the present parameters are a try, which is left again whatever was tried before."""
        self._queued_rows = 0
        self._tried: list[Parameters] = []
        self._tried_with: ServiceTime | None = None
        self._failed: list[Parameters] = []
        self._before: list[Parameters] = []
        """What was in force before the present parameters, if anything: no try leads back to it."""
        self._left: set[Parameters] = set()
        """What was in force before, at whatever load, since policy or t(b) was another: no small gain leads back."""

    def _obey(self, policy: BatchingPolicy, model: Model | None) -> None:
        self._policy = policy
        self._limits: Limits = policy.limits(model)
        quantile, self._target = policy.slo.percentiles[-1]
        self._budget = (1 - quantile) / 2
        self._quantiles = policy.slo.percentiles[:-1]
        self._held = policy.tuning.mode is TuningMode.HOLD
        self._misses = MissTest.of(quantile, spells=True)

    def follow(self, policy: BatchingPolicy, model: Model | None = None) -> None:
        """Go by another policy from here on, from the present parameters within its limits.

        What was learned of load and t(b) stays; what was tried under the old one may be tried again.
        """
        self._obey(policy, model)
        self.parameters = self._limits.clamp(self.parameters)
        self._load.tolerance = policy.tuning.tolerance_percent / 100
        self._choice = None
        self._assessor = None
        self._check.forget(self._seen_at)
        self._left.clear()
        known, self._service = self._service, None  # the Batcher's tables may be longer or shorter now
        if known is not None:
            self._new_epoch(known)

    def step(self, observation: Observation) -> Decision:
        """Take an observation and decide."""
        return self._explained(self._step(observation))

    def _step(self, observation: Observation) -> Decision:
        now, stats = observation.now, observation.stats
        self._seen_at = now
        if self._started_at is None:
            self._started_at = self._changed_at = now
        backlogged, self._queued_rows = self._backlogged(), observation.queued_rows
        if stats.arrivals:
            self._last_arrival = now
        # 1. Guards: evidence that is none.
        if observation.seconds <= 0:
            return self._keep(now, Reason.METRICS_STALE, "no time has passed since the last observation")
        if observation.stalled:
            self._check.changed(now)
            return self._keep(now, Reason.HOST_STALLED, "this host paused; what was measured meanwhile is not used")
        # 2. Learn.
        load_moved = self._load.observe(
            observation.seconds,
            stats.arrivals,
            stats.arrivals_squared,
            stats.windows,
            stats.rows,
            observation.replicas,
        )
        share_moved = self._sharing.observe(observation.seconds / observation.replicas, stats.arrivals, stats.batchable)
        self._aim = objective.Aim.of(self._policy, observation.others_busy / observation.seconds)
        limit_moved = self._size_limit.observe(observation.seconds / observation.replicas, stats)
        self._cold = self._cold or COLD in stats.misses
        model_moved = self._learner.observe(now, stats.by_key()) != 1.0
        self._requests_since += stats.arrivals
        service = self._learner.estimate()
        if service is None:
            if now - max(self._last_arrival, self._started_at) > SILENCE:
                return self._keep(now, Reason.NO_TRAFFIC, self._silence(now))
            return self._keep(now, Reason.TOO_FEW_SAMPLES, "no batch has been measured yet")
        if self._load.process is None or now - self._last_arrival > SILENCE:
            self._install(service)
            return self._idle(now, service)
        if model_moved:
            self._left.clear()
        if load_moved or model_moved or share_moved or limit_moved or is_another(service, self._tried_with):
            self._new_epoch(service)
        # Misses contradict the forecast that was made for these parameters, not what was late before them.
        late = sum(stats.misses.get(reason, 0) for reason in TOO_LATE)
        self._spare += (2 * self._budget * (stats.hits + late) - late) / observation.replicas
        self._spare = min(max(self._spare, 0.0), 2 * self._budget * SPARED * self._load.rate)
        promised = self._assessor is not None and self._assessor.assess(self.parameters, KEPT).holds_ahead
        asked = promised and not backlogged and not self._held
        broken = asked and self._misses.observe(stats.hits, late, self.parameters.max_batch)
        if broken:
            self._broken_at = now
        alarmed = broken and not self._caution.most
        if broken and not alarmed:
            self._misses.restart()
        if broken:
            self._dares.stop()
        told = self._dares.observe(now, stats)
        expelled = self.parameters.pass_through and not observation.passing
        if model_moved:
            self._check.forget(now)
        probing = self._probe is not None and self._probe.rows
        if (
            load_moved
            or share_moved
            or limit_moved
            or told
            or self._dares.trying
            or probing
            or expelled
            or COLD in stats.misses
        ):
            self._check.changed(now)
        if stats.stalled or observation.paused > PAUSED * observation.seconds:
            self._check.paused(now)
        lasted = observation.seconds / observation.replicas
        checked = self._check.observe(now, lasted, stats.durations, self._expected)
        # 3. Search anew where there is news.
        probe_told = self._probe is not None and self._probe.told(service)
        if self._probe is not None and probe_told:
            self._dares.told(self._probe.rows)
        forgives = not alarmed and self._caution.is_over(now)
        better_told = self._assessor is None or self._load.process != self._assessor.situation.process
        hoped = now >= self._hopes_until > -inf
        if hoped:
            self._hopes_until = -inf
        news = (
            better_told
            or hoped
            or model_moved
            or share_moved
            or limit_moved
            or checked
            or alarmed
            or forgives
            or told
            or self._choice is None
            or is_news(service, self._service)
        )
        if news:
            self._install(service)
            if alarmed:
                self._fail(self.parameters)
            elif forgives:
                self._forgive(now)
            self._search()
        elif self._spare >= 2 * max(self._offered, 1.0) and not self._dares.trying:
            self._look_for_tries(moving=False)
        elif probe_told or (self._probe is not None and self._probe.overdrawn(self._spare)):
            self._probe = None
        # 4. Move.
        decision = self._move(now, alarmed=alarmed, expelled=expelled)
        if not decision.change:
            decision = self._probing(decision)
        if self._assessor is not None:
            # What is in force is told of more surely with every decision that needs no search.
            if not news:
                self._assessor.assess(self.parameters, KEPT).settle()
            self._assessor.rest()
        return decision

    def adopt(self, parameters: Parameters) -> None:
        """Go on from parameters that somebody else put in force."""
        parameters = self._limits.clamp(parameters)
        if parameters == self.parameters:
            return
        self.parameters = parameters
        self._probe = None
        self._dared = False
        self._choice = None
        self._changed_at = self._seen_at
        self._requests_since = 0
        self._misses.restart()
        self._check.changed(self._seen_at)

    def rejected(self, parameters: Parameters, back_to: Parameters) -> None:
        """Go on from ``back_to``: with ``parameters`` more requests were late than forecast, and they were taken back.

        They are avoided as if it had been seen here, and forecasts are made with as much more care.
        """
        if parameters not in self._failed:
            self._fail(parameters)
        self.adopt(back_to)

    def _idle(self, now: float, service: ServiceTime) -> Decision:
        """Step aside where nobody comes: who does after all has no company to wait for."""
        mode, silence = self._policy.pass_through.mode, self._silence(now)
        if (
            self._held
            or mode is PassThroughMode.NEVER
            or self.parameters.pass_through
            or now - self._last_arrival <= SILENCE
        ):
            return self._keep(now, Reason.NO_TRAFFIC, silence)
        passing = objective.passing(self.parameters, service, self._limits)
        message = f"{self.parameters.describe()} to {passing.describe()}: {silence}"
        if self._policy.tuning.mode is TuningMode.RECOMMEND:
            return replace(self._decision(now, None, Reason.RECOMMEND_ONLY, message, None, ""), parameters=passing)
        self._turn(now, passing)
        return replace(self._decision(now, None, Reason.PASSES_THROUGH, message, None, ""), change=True)

    def _silence(self, now: float) -> str:
        since = max(self._last_arrival, self._started_at or now)
        return f"no request for {format_seconds(round(now - since, 1))}"

    def _explained(self, decision: Decision) -> Decision:
        """Say what keeps requests from being batched, and whether the forecast is wrong."""
        alarm, share = self._check.alarm, self._sharing.share
        decision = replace(decision, share=share, alarm=alarm.message if alarm is not None else "")
        plain = decision.reason in {Reason.CONVERGED, Reason.PASSES_THROUGH, Reason.SAVES_DEVICE_TIME}
        if alarm is not None and decision.reason in {Reason.CONVERGED, Reason.FORECAST_OFF, Reason.HELD}:
            return replace(decision, reason=Reason.FORECAST_OFF, message=f"{decision.message}; {alarm.message}")
        if plain and not self._holds(self._limits.max_wait):
            return replace(decision, reason=Reason.NO_COMPANY, message=f"{decision.message}; {explained(share)}")
        return decision

    # ------------------------------------------------------------------------------------------------- evidence

    def _install(self, service: ServiceTime | None) -> None:
        """Make tables of t(b) for the Batcher."""
        if service is None or service is self._service:
            return
        self._service = service
        self._estimate = self._learner.believed(self._limits.max_batch)

    def _believed(self) -> Estimate | None:
        """Return what the Batcher is to plan with under the present parameters."""
        service, estimate = self._service, self._estimate
        if service is None or estimate is None:
            return None
        executors = service.executors_for(self.parameters.max_in_flight)
        # A size below all that was measured is turned to in the hope that it takes so much less.
        if self.parameters.max_batch < service.sizes[0]:
            estimate = estimate.hopeful(service.sizes[0])
        return replace(
            estimate.computed(executors, hoped=executors - service.executors),
            probed=self._probe.rows if self._probe else 0,
        )

    def _new_epoch(self, service: ServiceTime) -> None:
        """Forget what was tried: the load or the model moved, and what was found wanting may be right now."""
        self._tried = []
        self._failed = []
        self._hopes_until = inf
        self._dares.stop()
        if is_another(service, self._tried_with):
            self._dares.forget()
            self._left.clear()
        self._tried_with = service
        self._caution.reset()
        self._misses.restart()

    def _fail(self, parameters: Parameters) -> None:
        """Plan more carefully, and don't come back here: misses were seen that were not forecast."""
        self._failed.append(parameters)
        self._caution.more(self._seen_at)
        self._misses.restart()

    def _forgive(self, now: float) -> None:
        """Plan a step less carefully: what made requests late may be gone, and another load may never come."""
        self._caution.less(now)
        self._failed = self._failed[:-1]
        self._tried = []

    @property
    def _mistaken(self) -> bool:
        """Whether answers take longer than forecast, so that no forecast says what a wait would do."""
        return self._check.alarm is not None and self._check.alarm.slow

    @property
    def _reach(self) -> Limits:
        """Where to look for candidates."""
        limits, size = self._limits, self.parameters.max_batch
        if self._sharing.share <= NONE:
            # No size differs from another, and company may come again.
            limits = replace(limits, min_batch=size, max_batch=size)
        elif (largest := self._size_limit.largest) is not None:
            # Larger batches are not made now: nothing is to be gained by a larger maximum, nor to be learned.
            most = max(min(largest, limits.max_batch), limits.min_batch)
            limits = replace(limits, max_batch=most)
        return replace(limits, max_wait=limits.min_wait) if self._mistaken else limits

    def _holds(self, wait: float) -> bool:
        """Whether the Batcher holds requests for so many seconds, as far as their keys go."""
        return self._assessor is None or self._assessor.holds(wait)

    def _expected(self) -> Expected | None:
        """Return what answers should show; ``None`` where the forecast says itself that it is worth little."""
        if self._assessor is None:
            return None
        current = self._assessor.assess(self.parameters, KEPT)
        return current.expected if current.holds_now and not self._shed else None

    def _search(self) -> None:
        process, service = self._load.process, self._learner.mixed()
        if process is None or service is None:
            return
        situation = Situation(
            process=process,
            service=service,
            target=self._target * self._caution.factor,
            budget=self._budget,
            limits=self._reach,
            rows=max(1, round(self._load.rows)),
            quantiles=self._quantiles,
            share=self._sharing.share,
            largest=self._size_limit.largest,
        )
        self._assessor = Assessor(situation)
        # Where the SLO is not kept something has to be done, and what was left before is no answer.
        current = self._assessor.assess(self.parameters, KEPT)
        if self._held:
            self._choice = Choice(best=current, current=current)
            return
        kept = current.holds_now
        self._choice = choose(
            self._assessor,
            self.parameters,
            avoid=self._failed if kept else self._failed + self._tried,
            unused=WORTH_A_STALL if self._cold else 0.0,
        )
        if not self._choice.best.holds_now:
            # Beyond the capacity requests are late whatever is set: that speaks against nothing that was tried.
            self._choice = choose(self._assessor, self.parameters)
        self._choice = replace(self._choice, best=self._with_size_in_force(self._assessor, self._choice.best))
        mode = self._policy.pass_through.mode
        self._fast = objective.fastest(self._assessor, self._aim, self._choice, mode, self._failed)
        target = self._target_of(self._assessor, self._choice)
        leaves = target.parameters != self.parameters and self._worth(self._choice.current, target, is_clearly_worth)
        self._brighter = self._hope_for(self._assessor, self._choice, target) if leaves else None
        moving = leaves or self._load.rate >= RISE * self._dared_at
        if moving:
            self._dared_at = self._load.rate
        self._look_for_tries(moving=moving)

    def _with_size_in_force(self, assessor: Assessor, best: Assessment) -> Assessment:
        """Return ``best`` with the ``max_batch`` in force where smaller batches than either are made for now.

        The limit passes with what it came from; the maximum would then have to be raised again, step by step.
        """
        largest, present = self._size_limit.largest, self.parameters.max_batch
        if largest is None or not best.parameters.max_batch >= assessor.situation.limits.max_batch < present:
            return best
        return assessor.assess(replace(best.parameters, max_batch=present))

    def _hope_for(self, assessor: Assessor, choice: Choice, target: Assessment) -> Assessment | None:
        """Return what is to be turned to in place of the target, for what few batches leave open of t(b)."""
        current, avoid = choice.current, {*self._failed, *self._tried, *self._left}
        if not current.holds_now or self._check.alarm is not None or self._fast is not None:
            return None
        if target is choice.best:
            found = brighter(assessor, target, target, WORTH, avoid)
            return found if found is not None and self._worth(current, found, is_clearly_worth) else None
        if self.parameters.pass_through or self._policy.pass_through.mode is PassThroughMode.ALWAYS:
            return None
        if self._hopes_until == -inf:
            return None
        # From there on nothing tells what company would cost. But a wait that saves nothing is not for long.
        found = brighter(assessor, choice.best, target, ENTER_PASS_THROUGH, avoid)
        if found is not None:
            self._hopes_until = min(self._hopes_until, self._seen_at + LASTS)
        return found

    def _look_for_tries(self, *, moving: bool) -> None:
        """Ask which size never measured is worth a try, for as much as may be lost by it."""
        assessor, choice = self._assessor, self._choice
        self._bold, self._offered, self._probe = None, self._spare, None
        if assessor is None or choice is None or self._held or self._check.alarm is not None:
            return
        if self._fast is not None:
            return  # while the device has room, another size has nothing to save that anybody needs
        # After misses that were not forecast no forecast says what may be dared, nor where first batches are slow.
        if (self._caution.none and not self._cold) or not choice.best.holds_now:
            self._bold = bolder(
                assessor,
                choice,
                [*self._failed, *self._before],
                moving=moving,
                spare=self._spare,
                may=lambda size: self._dares.may(size, self._seen_at),
            )

    def _probing(self, decision: Decision) -> Decision:
        """Have single batches tell of another size, where parameters stay."""
        assessor, probe = self._assessor, self._probe
        if probe is None and assessor is not None:
            current = assessor.assess(self.parameters, KEPT)
            applies = not self._held and self._policy.tuning.mode is TuningMode.APPLY and not self._dares.trying
            applies = applies and self._check.alarm is None and self._fast is None
            # Nor where a size makes others late the first time, or more are late than was forecast.
            sound = (not self._cold and self._caution.none) or not current.holds_now
            at_all = applies and sound and not self.parameters.pass_through
            probe = self._probe = to_probe(assessor, current, self._spare, self._dares.tells) if at_all else Probe()
        if probe is None or not probe.rows:
            return decision
        message = f"{decision.message}; one batch in {PROBES} is of {probe.rows} rows, to tell what they take"
        return replace(decision, message=message, estimate=self._believed())

    # ------------------------------------------------------------------------------------------------- movement

    def _move(self, now: float, *, alarmed: bool, expelled: bool) -> Decision:
        """Go towards the best configuration as far as the rules allow."""
        assessor, choice = self._assessor, self._choice
        if assessor is None or choice is None:
            return self._keep(now, Reason.TOO_FEW_SAMPLES, "nothing to decide by yet")
        current = assessor.assess(self.parameters, KEPT)
        if self._held:
            self._shed = not current.holds_now
            return self._keep(now, Reason.HELD, "the policy's mode is Hold, or the parameters are fixed", current)
        choice = replace(choice, current=current)
        target = self._target_of(assessor, choice)
        known, target = target, self._brighter or target
        # This near the capacity a few late ones make all behind them late.
        self._shed = not current.holds_ahead and not target.holds_ahead
        since = now - self._changed_at
        riskier = self._policy.tuning.riskier
        early = since < riskier.after or self._requests_since < riskier.min_requests
        if self._dares.trying:
            message = "a batch size never measured is being tried"
            return self._keep(now, Reason.EXPLORES, message, target, capped_by="evidence")
        bold = assessor.assess(self._bold) if self._bold is not None else None
        # What restores the SLO comes first.
        rescue = self._loses(current) and target.holds_now and target.parameters != self.parameters
        if self._mistaken and not alarmed and not rescue:
            # No forecast says what is better, or what a wait does.
            if self.parameters.max_wait <= self._limits.min_wait:
                return self._keep(now, Reason.FORECAST_OFF, "nothing is changed while the forecast is off", target)
            unheld = assessor.assess(replace(self.parameters, max_wait=Duration(self._limits.min_wait)))
            message = "nothing is held while the forecast is off"
            return self._change(now, unheld, unheld, Reason.FORECAST_OFF, message, "")
        # Before requests pass one by one too: from there on nothing tells what company would cost.
        if (
            bold is not None
            and not rescue
            and not self.parameters.pass_through
            and not (early if self._is_riskier(assessor, current, bold) else since < self._policy.tuning.safer.after)
            and self._policy.tuning.mode is TuningMode.APPLY
        ):
            self._bold = None
            size = bold.parameters.max_batch
            self._dares.begin(size, below(assessor.situation.service, size), now)
            message = "it may cost little or nothing, and what a batch of that size takes only trying tells"
            if bold.parameters == self.parameters:
                return self._keep(now, Reason.EXPLORES, message, target, capped_by="evidence")
            decision = self._change(now, bold, bold, Reason.EXPLORES, message, "evidence")
            self._dared = True
            return replace(decision, tentative=not self._loses(current))
        if target.parameters == self.parameters:
            if expelled:
                return self._again(now, target)
            return self._keep(now, Reason.CONVERGED, "no configuration within reach is clearly better", target)
        if not alarmed and not self._worth(current, target):
            return self._keep(now, Reason.CONVERGED, "no configuration within reach is clearly better", target)
        # 1. One step of it.
        service = assessor.situation.service
        step = target
        capped_by = ""
        if self._is_riskier(assessor, current, target):
            parameters = toward(self.parameters, target.parameters, riskier.max_factor, service.largest_measured)
            if parameters != target.parameters:
                step, capped_by = assessor.assess(parameters), "step"
        is_riskier = self._is_riskier(assessor, current, step)
        # 2. Not yet?
        if is_riskier and early:
            message = (
                f"{step.parameters.describe()} is next; riskier steps wait for {format_seconds(riskier.after)} and "
                f"{riskier.min_requests} requests (now {format_seconds(since)} and {self._requests_since})"
            )
            return self._keep(now, Reason.WITHIN_STABILIZATION_WINDOW, message, target, capped_by="step")
        if not is_riskier and since < self._policy.tuning.safer.after:
            message = f"{step.parameters.describe()} is next; safer steps wait for {self._policy.tuning.safer.after}"
            return self._keep(now, Reason.WITHIN_STABILIZATION_WINDOW, message, target, capped_by="step")
        # 3. Not again?
        again = step.parameters in self._failed or (step.parameters in self._tried and not alarmed)
        if again and target.holds_now and not self._dared:
            message = f"{step.parameters.describe()} was tried at this load and left"
            return self._keep(now, Reason.WOULD_FLIP, message, target, capped_by="evidence")
        if target is self._fast:
            reason, message = objective.why(self._aim, current, step)
        else:
            reason, message = why(choice, step if capped_by else target)
        if target is not known:
            reason = Reason.EXPLORES
            message = f"as good as {known.parameters.describe()} for all that is known; only running it tells if better"
        if alarmed and reason is not Reason.RESTORES_SLO:
            reason, message = Reason.MISSES_CONFIRMED, f"more requests were late than forecast; {message}"
        # Where requests seldom meet, that more may be in flight than ever were makes no difference.
        explores = (
            not self._loses(current)
            and not (step is self._fast and step.parameters.pass_through)
            and (
                step.parameters.max_batch > service.largest_measured
                or step.parameters.max_in_flight > service.largest_in_flight
            )
        )
        return replace(self._change(now, step, target, reason, message, capped_by), tentative=is_riskier or explores)

    def _target_of(self, assessor: Assessor, choice: Choice) -> Assessment:
        """Best configuration with pass-through considered."""
        mode = self._policy.pass_through.mode
        if self._fast is not None:
            return self._fast
        if mode is PassThroughMode.NEVER:
            return without_vain_wait(assessor, choice.current, choice.best)
        passing = assessor.assess(
            objective.passing(choice.best.parameters, assessor.situation.service, self._limits),
            KEPT if self.parameters.pass_through else 1.0,
        )
        if mode is PassThroughMode.ALWAYS:
            return passing
        best = without_vain_wait(assessor, choice.current, choice.best)
        if not passing.holds_ahead or assessor.passing_load() > objective.PASSING_LOAD:
            return best
        saving = assessor.saving(choice.best, passing)
        enough = ENTER_PASS_THROUGH
        if self.parameters.pass_through and enough <= saving < LEAVE_PASS_THROUGH:
            # Which of the two is in force may depend on the past only as far as chance leaves it open.
            enough += gain(choice.best, passing).error
        if saving >= enough:
            return best
        # Where a backlog soon ends it, what was forecast is merging without a wait, and no passing through.
        rows = assessor.situation.rows
        return passing if passing.now.mean_batch <= MOSTLY_ALONE * rows else best

    def _is_riskier(self, assessor: Assessor, current: Assessment, step: Assessment) -> bool:
        """Whether more may be late than now. Who does not keep the SLO as it is has nothing to lose."""
        if self._loses(current):
            return False
        return assessor.risk(step.parameters) > assessor.risk(current.parameters) + NEGLIGIBLE

    def _loses(self, current: Assessment) -> bool:
        """Whether the SLO is not kept as it is, by forecast or by what waits."""
        return not current.holds_now or self._backlogged()

    def _worth(
        self, current: Assessment, target: Assessment, enough: Callable[[Assessment, Assessment], bool] = is_worth
    ) -> bool:
        """Whether the target is ``enough`` of a gain to change anything for it."""
        service, passes = target.situation.service, target.parameters.pass_through
        if self._cold and passes and target.situation.rows not in service.sizes:
            return False
        if current.parameters.pass_through != passes:
            return True
        waits = current.parameters.max_wait
        if target is self._fast:
            return objective.is_gain(self._aim, target, current)
        if target.parameters.max_wait < waits and not self._holds(waits):
            return True
        return (is_clearly_worth if target.parameters in self._left else enough)(target, current)

    def _change(
        self, now: float, step: Assessment, target: Assessment, reason: Reason, message: str, capped_by: str
    ) -> Decision:
        message = f"{self.parameters.describe()} to {step.parameters.describe()}: {message}"
        if self._policy.tuning.mode is TuningMode.RECOMMEND:
            return self._decision(now, step, Reason.RECOMMEND_ONLY, message, target, capped_by)
        self._tried.append(self.parameters)
        self._left.add(self.parameters)
        self._turn(now, step.parameters)
        return replace(self._decision(now, step, reason, message, target, capped_by), change=True)

    def _turn(self, now: float, parameters: Parameters) -> None:
        self._before = [self.parameters]
        self.parameters = parameters
        self._probe = None
        self._dared = False
        self._changed_at = now
        self._requests_since = 0
        self._misses.restart()
        self._check.changed(now)

    def _again(self, now: float, target: Assessment) -> Decision:
        """Pass through again after a backlog ended it, no sooner than a riskier step may come."""
        if now - self._changed_at < self._policy.tuning.riskier.after:
            return self._keep(now, Reason.WITHIN_STABILIZATION_WINDOW, "a backlog ended pass-through", target)
        self._changed_at = now
        message = "the backlog that ended pass-through is gone"
        return replace(self._decision(now, target, Reason.PASSES_THROUGH, message, target, ""), change=True)

    def _keep(
        self, now: float, reason: Reason, message: str, target: Assessment | None = None, capped_by: str = ""
    ) -> Decision:
        current = None
        if target is not None and self._assessor is not None:
            current = self._assessor.assess(self.parameters, KEPT)
        return replace(
            self._decision(now, current, reason, message, target, capped_by), parameters=self.parameters, change=False
        )

    def _decision(
        self,
        now: float,
        step: Assessment | None,
        reason: Reason,
        message: str,
        target: Assessment | None,
        capped_by: str,
    ) -> Decision:
        predicted = None
        if step is not None:
            told = step.told
            predicted = Forecasted(
                p50=told.p50,
                p99=told.p99,
                p99_ahead=step.ahead.p99,
                miss_fraction=told.miss_fraction,
                goodput=told.goodput,
                device_time=told.device_time,
                mean_batch=told.mean_batch,
                mean=told.mean,
                utilization=self._aim.utilization(step),
            )
        return Decision(
            parameters=step.parameters if step is not None else self.parameters,
            change=False,
            reason=reason,
            message=message,
            uncapped=target.parameters if target is not None else None,
            capped_by=capped_by,
            predicted=predicted,
            shed_slo=self._shed_slo(),
            estimate=self._believed(),
            at=now,
            rate=self._load.rate,
            target_utilization=self._aim.target if self._aim.objective is Objective.BALANCED else 0.0,
            alternative=self._alternative() if predicted is not None else "",
        )

    def _alternative(self) -> str:
        """Say what another objective would do at this load."""
        assessor, choice = self._assessor, self._choice
        if assessor is None or choice is None:
            return ""
        current = assessor.assess(self.parameters, KEPT)
        unheld = replace(choice.best.parameters, max_wait=Duration(self._limits.min_wait), pass_through=False)
        return objective.alternative(self._aim, current, choice.best, assessor.assess(unheld))

    def _shed_slo(self) -> bool:
        mode = self._policy.admission.shed_at
        if mode is ShedAt.AUTOMATIC:
            return self._shed or self._backlogged() or self._seen_at - self._broken_at < BROKEN
        return mode is ShedAt.SLO

    def _backlogged(self) -> bool:
        """Whether more waits than can be served in time: all who come behind it would be late."""
        service, parameters = self._service, self.parameters
        if service is None:
            return False
        executors = min(service.executors_for(parameters.max_in_flight), parameters.max_in_flight)
        per_second = stability(0.0, service, parameters.max_batch, executors)
        return self._queued_rows > per_second.capacity * self._target
