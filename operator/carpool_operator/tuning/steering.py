"""One target: metrics in, documents out. The tuner chooses parameters; this decides which pods get them and when."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.exchange.decision import Reason
from carpool.policy.spec import FallbackBehavior, TuningMode
from carpool.tuning.exploration import LASTS
from carpool_operator.delivery.documents import EVERY, Publisher, leaves_unsaid, sidecar_policy, without_modes
from carpool_operator.tuning.canary import Answers, Patience, Trial, Verdict, choose
from carpool_operator.tuning.cold_start import ColdStarts
from carpool_operator.tuning.engines import FleetEngines
from carpool_operator.tuning.evidence import Evidence, add_up
from carpool_operator.tuning.learning import Learned, predicted
from carpool_operator.tuning.target_load import TargetLoad, autoscaler_of, for_autoscaler, full_of
from carpool_operator.tuning.token_streams import FleetStreams
from carpool_operator.tuning.trust import Trust, Turn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from carpool.exchange.change import Change
    from carpool.exchange.decision import Decision
    from carpool.policy.parameters import Parameters
    from carpool.policy.spec import BatchingPolicy
    from carpool_operator.api.model import Document, Pod, Target, View
    from carpool_operator.api.spec import PolicySpec
    from carpool_operator.api.status import Figures, TargetModel
    from carpool_operator.tuning.evidence import Gathered, Sample, Sum

OTHER = "<other>"
"""Name under which a sidecar counts models beyond those it distinguishes: not a model, so not tuned."""

MOST_MODELS = 64
"""Models of a target that are tuned: callers choose the names. Models beyond that use the parameters of ``*``."""

FORGOTTEN_AFTER = 600.0
"""Seconds after which a model that no pod reports any more is forgotten."""

PASS_AGAIN = 60.0
"""Seconds between documents that only end the effect of a backlog on pass-through: each is a write for all pods."""

RECOMMEND_AGAIN = 60.0
"""Seconds between two recommendations."""

OUTLIVED = 2.0
"""Ratio of the load when a trial began to the present load, from which another step may replace the trial."""


class Happening(NamedTuple):
    """A decision for one model of the target."""

    action: str
    """Applied, Recommended, Trying, Promoted, Measured, RolledBack, FellBack or Recovered."""
    model: str
    reason: str
    message: str
    parameters: Parameters | None = None
    """Parameters that are applied, stay, or are tried; ``None`` where the models differ."""
    observed: Figures | None = None
    predicted: Figures | None = None
    alternative: str = ""
    """Forecast for another objective."""
    generation: int = 0
    """Generation of its document; 0: there is none."""


class Steering:
    """The pods of one target under one policy."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.evidence = Evidence(str(target))
        self.publisher = Publisher(target)
        self.models: dict[str, Learned] = {}
        self.trial: Trial | None = None
        self.trust = Trust()
        self.load = TargetLoad()
        self.cold_starts = ColdStarts()
        self.streams = FleetStreams()
        self.engines = FleetEngines()
        """Engines without a sidecar."""
        self.every_since = 0
        """Generation that introduced the parameters of models that are not named."""
        self._restored: Change | None = None
        self._uncompared: Change | None = None
        """The restored change, until it was compared with the policy."""
        self._unsaid: int | None = None
        """Generation of the policy whose modes an older operator's documents lack, while the documents continue to
        leave them out."""
        self._recalled: dict[str, int] = {}
        """Models in a status, and the generations that introduced their parameters."""
        self._patience = Patience()
        self._proven: tuple[str, Parameters] | None = None
        """Explored by canaries until this pass, and measured: if chosen now, it may go to all pods."""
        self._owed = False
        """Whether a document is due even without new content."""
        self._passed_at = -inf
        self._recommended: dict[str, tuple[float, Parameters]] = {}
        self._happenings: list[Happening] = []

    @property
    def canaries(self) -> frozenset[str]:
        """UIDs of the pods of a trial."""
        return frozenset() if self.trial is None else self.trial.pods

    @property
    def awaits_first_reading(self) -> bool:
        """Whether this continues another operator's work, without any reading yet."""
        return self._restored is not None and not self.evidence.heard

    def restore(self, change: Change) -> None:
        """Continue from the ConfigMap's content."""
        self.publisher.restore(change)
        self._restored = self._uncompared = change
        self.every_since = change.generation

    def recall(self, models: Iterable[TargetModel]) -> None:
        """Continue with the models of a status: documents don't name those that use the parameters of all."""
        self._recalled = {model.name: model.generation for model in models}

    def step(
        self, view: View, spec: PolicySpec, *, wanted: bool, met: bool | None
    ) -> tuple[list[Document], list[Happening]]:
        """Use the readings and decide.

        ``wanted``: whether the pods should have documents at all. ``met``: the SLO's last reported state, for models
        that are new here.
        """
        now, pods = view.now, view.pods.get(self.target, ())
        self._happenings = []
        policy = spec.policy()
        if autoscaler_of(view.workloads.get(self.target)):
            policy = for_autoscaler(policy)
        part = self._sidecar_policy(policy, view)  # without a pause: what sidecars run stays then, first calls included
        if view.policy.paused:
            policy = replace(policy, tuning=replace(policy.tuning, mode=TuningMode.HOLD))
        # 1. The policy, and the pods to learn from.
        self._follow(now, policy, part, met)
        if self.evidence.turn(pods):
            for learned in self.models.values():
                learned.forget()
            self._call_back()
        # 2. Evidence.
        gathered = self.evidence.gather(now, pods, view.readings, spec.metrics.stale_seconds)
        for seen in self.evidence.pods.values():
            self.publisher.notice(seen.generation)
        self.cold_starts.observe(pods)
        ready = {pod.uid for pod in pods if pod.ready and not pod.deleting}
        samples = gathered.samples
        if (engines := view.engines.get(self.target)) is not None:
            samples = [*samples, *self.engines.observe(now, engines, spec.slo)]
        ready |= self.engines.pods
        self.load.observe(now, samples, ready, full_of(view.workloads.get(self.target)))
        streamed = [(each.uid, each.seconds, each.streams) for each in samples if each.streams is not None]
        self.streams.observe(now, streamed, ready)
        if not wanted:
            # Decisions that can't be published are not made: later they would rest on old evidence.
            for learned in self.models.values():
                learned.seen_at = max(learned.seen_at, self.evidence.newest)
            return [], []
        self._take_back(now, policy, gathered)
        self._forget_replaced(gathered)
        if self._sees(now, spec, gathered, frozen=policy.tuning.mode is not TuningMode.APPLY):
            self._decide(view, spec, policy, pods, gathered.samples)
        # 3. Documents.
        return self._publish(view, spec, policy, part), self._happenings

    # ------------------------------------------------------------------------------------------------- policy

    def _sidecar_policy(self, policy: BatchingPolicy, view: View) -> BatchingPolicy:
        """Return the part of a policy that sidecars get.

        An upgrade of the operator must change nothing that runs. First calls go on under documents without modes.
        passThrough: Never would end them, at one call at a time; in older sidecars Hold would, too. So Never is left
        out until all models are named, Hold until all sidecars are current. Editing the policy includes both at once.
        """
        part, generation = sidecar_policy(policy), view.policy.generation
        before, self._uncompared = self._uncompared, None
        unedited = view.policy.status.get("observedGeneration") == generation
        if before is not None and unedited and leaves_unsaid(before.policy, part):
            self._unsaid = generation
        named = bool(self.models) and all(learned.decided for learned in self.models.values())
        if named or self._unsaid != generation:
            self._unsaid = None
            return part
        pods, change = view.pods.get(self.target, ()), self.publisher.change
        of_today = bool(pods) and all(pod.current for pod in pods)
        said = change is not None and change.policy is not None and change.policy.tuning == part.tuning
        return without_modes(part, hold=not (of_today or said))

    def _follow(self, now: float, policy: BatchingPolicy, part: BatchingPolicy, met: bool | None) -> None:
        known = {model.name: model for model in policy.models}
        if self._restored is not None and not self.evidence.heard and not self.models:
            restored = self._restored.parameters
            for name in {**restored, **self._recalled}:
                generation = self._recalled.get(name, self._restored.generation)
                if name == EVERY:
                    self.every_since = generation
                else:
                    learned = self._meet(now, policy, name, met, restored.get(name, restored.get(EVERY)))
                    learned.generation, learned.decided = generation, name in restored
        # By the pods' readings, not by the clock: while no pod exists or can be read, nothing is forgotten.
        newest = self.evidence.newest
        for name in [name for name, each in self.models.items() if newest - each.seen_at > FORGOTTEN_AFTER]:
            del self.models[name]
        for name, learned in self.models.items():
            before = learned.parameters
            learned.follow(policy, known.get(name))
            if learned.parameters != before:
                self._happened("Applied", name, "PolicyChanged", "the policy's bounds or SLO moved it", learned)
        change = self.publisher.change
        if change is not None and (change.policy != part or policy.tuning.mode is not TuningMode.APPLY):
            self._call_back()

    def _meet(
        self, now: float, policy: BatchingPolicy, name: str, met: bool | None, parameters: Parameters | None = None
    ) -> Learned:
        known = next((model for model in policy.models if model.name == name), None)
        learned = self.models[name] = Learned(now, policy, known, parameters or policy.baseline, met=met)
        return learned

    def _forget_replaced(self, gathered: Gathered) -> None:
        """Learn a model anew once most pods report that it was replaced; one restarted model server is not enough."""
        for uid, name in gathered.replaced:
            learned = self.models.get(name)
            if learned is not None:
                learned.replaced.add(uid)
                if 2 * len(learned.replaced & self.evidence.pods.keys()) > gathered.expected:
                    learned.forget()

    # ------------------------------------------------------------------------------------------------- evidence

    def _sees(self, now: float, spec: PolicySpec, gathered: Gathered, *, frozen: bool) -> bool:
        """Return whether there is evidence to decide on, and fall back if there was none for too long."""
        turn = self.trust.take(now, spec, gathered, self.evidence.newest, frozen=frozen)
        why = "" if self.trust.blind is None else self.trust.blind.message
        if turn is Turn.RECOVERED:
            self._happened("Recovered", EVERY, "Recovered", "there are measurements again, and tuning continues", None)
        elif turn is Turn.LOST:
            self._call_back()
            if spec.fallback.behavior is FallbackBehavior.HOLD_LAST:
                self._happened("FellBack", EVERY, Reason.METRICS_STALE, f"{why}; the last parameters stay", None)
            else:
                message = f"{why}; back to the baseline"
                self._happened("FellBack", EVERY, Reason.METRICS_STALE, message, None, None, spec.baseline)
                for learned in self.models.values():
                    learned.adopt(spec.baseline)
        return turn in {Turn.SEEING, Turn.RECOVERED}

    def _take_back(self, now: float, policy: BatchingPolicy, gathered: Gathered) -> None:
        """Apply the sidecars' own rollbacks: parameters that one sidecar rejected must not run on others."""
        change = self.publisher.change
        for uid, rolled in gathered.rolled_back:
            message = f"a sidecar undid {rolled.rejected.describe()}: {rolled.reason}"
            trial, tried = self.trial, self.publisher.trial
            if trial is not None and tried is not None and uid in trial.pods and rolled.generation == tried.generation:
                self._reject(now, trial, "SidecarRolledBack", message)
                continue
            seen = self.evidence.pods[uid]
            if change is None or seen.generation != change.generation:
                continue
            learned = self.models.get(rolled.model) or self._meet(
                now, policy, rolled.model, None, change.parameters.get(EVERY)
            )
            if learned.parameters == rolled.rejected:
                learned.tuner.rejected(rolled.rejected, rolled.back_to)
                learned.parameters = learned.tuner.parameters
                self._owed = True
                self._happened("RolledBack", rolled.model, "SidecarRolledBack", message, learned)

    # ------------------------------------------------------------------------------------------------- decisions

    def _decide(
        self, view: View, spec: PolicySpec, policy: BatchingPolicy, pods: Sequence[Pod], samples: list[Sample]
    ) -> None:
        """Pass every model's evidence to its tuner, and the canaries' evidence to the trial."""
        change, tried = self.publisher.change, self.publisher.trial
        if change is None:
            return
        self._proven = None
        usable = [sample for sample in samples if not sample.stalled]
        base = [each for each in usable if each.generation == change.generation and each.uid not in self.canaries]
        sums = add_up(base)
        # After a change of the SLO, pods count by the old one until they run the next document.
        is_judged = change.policy is not None and change.policy.slo == policy.slo
        ended: str | None = None
        if self.trial is not None and tried is not None:
            canaries = [s for s in usable if s.uid in self.canaries and s.generation == tried.generation]
            ended = self._judge(view.now, self.trial, pods, add_up(canaries), sums)
        every = sums if len(base) == len(usable) else add_up(usable)
        few = choose(pods, self.evidence.hash, spec.canary.percent) if spec.canary.enabled else []
        for name, total in sums.items():
            learned = self.models.get(name)
            if learned is None:
                if not total.stats.arrivals or name == OTHER or len(self.models) >= MOST_MODELS:
                    continue
                learned = self._meet(view.now, policy, name, None, change.parameters.get(name))
            if name == ended:
                continue  # its counts belong to the ended trial
            decision = learned.step(
                view.now,
                total,
                every[name].stats,
                canaries=len(few),
                hurried=view.hurried,
                is_judged=is_judged,
            )
            self._outlive(name, decision)
            if decision.change:
                self._turn(view, spec, name, learned, decision, few)
            elif decision.reason is Reason.RECOMMEND_ONLY:
                self._recommend(view.now, name, learned, decision)

    def _turn(
        self, view: View, spec: PolicySpec, name: str, learned: Learned, decision: Decision, canaries: list[str]
    ) -> None:
        """Decide which pods get the tuner's decision: all, these canaries, or none yet."""
        parameters = decision.parameters
        if parameters == learned.parameters:
            if view.now - self._passed_at >= PASS_AGAIN:
                self._passed_at = view.now
                self._owed = True
            return
        # After a trial whose canaries were lost all but one pod may be unready for a moment: that one must not take the
        # risk.
        waits = self.trial is not None or not self._patience.over(view.now)
        is_proven = self._proven == (name, parameters) and decision.reason is not Reason.EXPLORES
        if decision.tentative and not is_proven and spec.canary.enabled and (canaries or waits):
            learned.adopt(learned.parameters)  # until it is proven
            if waits:
                return
            self.trial = Trial(
                name,
                decision,
                canaries,
                since=view.now,
                wall=view.wall,
                quantile=spec.slo.percentiles[-1][0],
                min_requests=spec.canary.min_requests,
                beyond=learned.measured_below(parameters.max_batch),
            )
            message = f"{_pods(len(canaries))} of {len(view.pods[self.target])} first: {decision.message}"
            self._happened("Trying", name, decision.reason, message, learned, decision, parameters)
            return
        if self.trial is not None and self.trial.model == name:
            self._call_back()
        learned.parameters, learned.decided = parameters, True
        self._happened("Applied", name, decision.reason, decision.message, learned, decision)

    def _recommend(self, now: float, name: str, learned: Learned, decision: Decision) -> None:
        at, before = self._recommended.get(name, (-inf, None))
        if decision.parameters != before and now - at >= RECOMMEND_AGAIN:
            self._recommended[name] = (now, decision.parameters)
            self._happened(
                "Recommended", name, decision.reason, decision.message, learned, decision, decision.parameters
            )

    # ------------------------------------------------------------------------------------------------- canaries

    def _judge(
        self, now: float, trial: Trial, pods: Sequence[Pod], canaries: dict[str, Sum], others: dict[str, Sum]
    ) -> str | None:
        """Observe a trial and end it when it is time; returns the model of an ended one."""
        there = {pod.uid for pod in pods if pod.ready and not pod.deleting and pod.template_hash == self.evidence.hash}
        learned = self.models[trial.model]
        if not trial.pods & there or len(there) < 2:
            self._return(now, trial, "its canaries are gone")
            return trial.model
        trial.observe(_answers(canaries.get(trial.model)), _answers(others.get(trial.model)))
        verdict, message = trial.verdict(now)
        if verdict is Verdict.CONTINUE:
            return None
        explores = trial.decision.reason is Reason.EXPLORES
        message = f"{trial.parameters.describe()}: {message}"
        if verdict is Verdict.PROMOTE and explores:
            # Once it is measured, the tuner decides whether all pods should run it.
            is_measured = learned.has_measured(trial.parameters, trial.beyond)
            if is_measured or now - trial.since >= LASTS:
                self._end_exploration(trial, message, is_measured=is_measured)
            return None
        if verdict is Verdict.PROMOTE:
            self.trial = None
            self._patience.succeeded()
            learned.adopt(trial.parameters)
            self._happened("Promoted", trial.model, "CanaryPromoted", message, learned, trial.decision)
        elif verdict is Verdict.ROLL_BACK:
            self._reject(now, trial, "CanaryRolledBack", message)
        else:
            self._return(now, trial, message)
        return trial.model

    def _end_exploration(self, trial: Trial, message: str, *, is_measured: bool) -> None:
        """End the exploration: canaries return to the common parameters, and the tuner uses what they measured."""
        self._patience.succeeded()
        self._call_back()
        if is_measured:
            self._proven = trial.model, trial.parameters
        showed = "" if is_measured else f"; no batch showed what they take in {LASTS:.0f} s"
        self._happened("Measured", trial.model, "CanaryMeasured", message + showed, self.models[trial.model])

    def _outlive(self, name: str, decision: Decision) -> None:
        """End a trial whose load is gone, if another step is wanted now: few requests would prove nothing.

        If requests should pass through one by one, any fall suffices: the lower the load, the longer a switch would
        wait for the trial. A rising load needs no such rule: the new parameters go to all pods at once.
        """
        trial = self.trial
        if trial is None or trial.model != name:
            return
        began, rate = trial.decision.rate, decision.rate
        wanted = decision.parameters if decision.change else decision.uncapped
        if trial.parameters.pass_through:
            alike = wanted is None or wanted.pass_through
        else:
            alike = wanted is not None and wanted in {trial.parameters, trial.decision.uncapped}
        passes = wanted is not None and wanted.pass_through
        if not alike and rate < (began if passes else began / OUTLIVED):
            self._call_back()
            fell = f"the load they were for fell from {began:.3g} to {rate:.3g} requests/s and pod"
            message = f"{trial.parameters.describe()}: {fell}"
            self._happened("RolledBack", name, "CanaryReturned", message, self.models[name])

    def _reject(self, now: float, trial: Trial, reason: str, message: str) -> None:
        learned = self.models[trial.model]
        learned.go_back(trial.parameters)
        self._patience.failed(now)
        self._call_back()
        self._happened("RolledBack", trial.model, reason, message, learned)

    def _return(self, now: float, trial: Trial, message: str) -> None:
        self.models[trial.model].go_back()
        self._patience.failed(now)
        self._call_back()
        self._happened("RolledBack", trial.model, "CanaryReturned", message, self.models[trial.model])

    def _call_back(self) -> None:
        """End a trial without a result: publish the common parameters again, newer than the canaries'."""
        if self.trial is not None:
            self.trial = None
            self._owed = True

    # ------------------------------------------------------------------------------------------------- documents

    def _publish(self, view: View, spec: PolicySpec, policy: BatchingPolicy, part: BatchingPolicy) -> list[Document]:
        publisher = self.publisher
        every = policy.limits().clamp(spec.baseline)
        wanted = {name: learned.parameters for name, learned in self.models.items()}
        documents = []
        before = publisher.change
        publisher.keys = view.keys
        due = publisher.is_due(view.now, view.wall)
        named = {
            name: parameters for name, parameters in wanted.items() if parameters != every or self.models[name].decided
        }
        if self._owed or due or not publisher.says(part, {EVERY: every, **wanted}, named):
            documents.append(publisher.publish(view.now, view.wall, part, {EVERY: every, **named}))
            self._owed = False
            if before is None or before.parameters.get(EVERY) != every:
                self.every_since = documents[0].change.generation
            if before is None:
                message = f"{every.describe()}: the policy's baseline"
                self._happened("Applied", EVERY, "Baseline", message, None, None, every)
        change = publisher.change
        assert change is not None  # noqa: S101 - the first step publishes
        for name, learned in self.models.items():
            if before is not None and before.parameters.get(name, before.parameters.get(EVERY)) != learned.parameters:
                learned.generation = change.generation
            learned.generation = learned.generation or self.every_since
        if self.trial is not None and publisher.trial is None:
            parameters = {**change.parameters, self.trial.model: self.trial.parameters}
            documents.append(publisher.publish_trial(view.now, view.wall, part, parameters, self.trial.pods))
        self._happenings = [
            each._replace(
                generation=publisher.trial.generation
                if each.action == "Trying" and publisher.trial is not None
                else change.generation
            )
            for each in self._happenings
        ]
        return documents or publisher.repeats(view.now, self.evidence.pods, self.canaries)

    def _happened(
        self,
        action: str,
        model: str,
        reason: str,
        message: str,
        learned: Learned | None,
        decision: Decision | None = None,
        parameters: Parameters | None = None,
    ) -> None:
        if parameters is None and learned is not None:
            parameters = learned.parameters
        self._happenings.append(
            Happening(
                action=action,
                model=model,
                reason=str(reason),
                message=message,
                parameters=parameters,
                observed=None if learned is None else learned.observed(),
                predicted=None if decision is None else predicted(decision.predicted),
                alternative="" if decision is None else decision.alternative,
            )
        )


def _answers(total: Sum | None) -> Answers | None:
    return None if total is None else Answers(total.stats.hits, total.stats.missed)


def _pods(count: int) -> str:
    return "1 pod" if count == 1 else f"{count} pods"
