"""One target: metrics in, documents out. The tuner chooses parameters; this decides which pods get them and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool.exchange.decision import Reason
from carpool.policy.spec import FallbackBehavior, TuningMode
from carpool_operator.delivery.documents import EVERY, Publisher, Upgrade
from carpool_operator.tuning.canary import able, choose
from carpool_operator.tuning.evidence import Evidence, add_up
from carpool_operator.tuning.happenings import Happenings
from carpool_operator.tuning.measurements import Measurements
from carpool_operator.tuning.models import MOST_MODELS, OTHER, Models
from carpool_operator.tuning.target_load import autoscaler_of, for_autoscaler
from carpool_operator.tuning.trials import Trials
from carpool_operator.tuning.trust import Trust, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.exchange.change import Change
    from carpool.exchange.decision import Decision
    from carpool.policy.spec import BatchingPolicy
    from carpool_operator.api.model import Document, Pod, Target, View
    from carpool_operator.api.spec import PolicySpec
    from carpool_operator.tuning.evidence import Gathered, Sample
    from carpool_operator.tuning.happenings import Happening
    from carpool_operator.tuning.learning import Learned


class Steering:
    """The pods of one target under one policy."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.evidence = Evidence(str(target))
        self.trust = Trust()
        self.measurements = Measurements()
        self.models = Models()
        self.publisher = Publisher(target)
        self._happenings = Happenings()
        self.trials = Trials(target, self.models, self.publisher, self._happenings)
        self._upgrade = Upgrade()

    @property
    def awaits_first_reading(self) -> bool:
        """Whether this continues another operator's work, without any reading yet."""
        return self.models.restored is not None and not self.evidence.heard

    def restore(self, change: Change) -> None:
        """Continue from the ConfigMap's content."""
        self.publisher.restore(change)
        self.models.restore(change)
        self._upgrade = Upgrade(change)

    def step(
        self, view: View, spec: PolicySpec, *, wanted: bool, met: bool | None
    ) -> tuple[list[Document], list[Happening]]:
        """Use the readings and decide.

        ``wanted``: whether the pods should have documents at all. ``met``: the SLO's last reported state, for models
        that are new here.
        """
        now, pods = view.now, view.pods.get(self.target, ())
        self._happenings.begin()
        policy = spec.policy()
        if autoscaler_of(view.workloads.get(self.target)):
            policy = for_autoscaler(policy)
        # Without a pause: what sidecars run stays then, first calls included.
        part = self._upgrade.part(policy, view.policy, self.publisher.change, pods, named=self.models.are_named)
        if view.policy.paused:
            policy = replace(policy, tuning=replace(policy.tuning, mode=TuningMode.HOLD))
        # 1. The policy, and the pods to learn from.
        for name in self.models.follow(now, policy, met, self.evidence):
            message = "the policy's bounds or SLO moved it"
            self._happenings.note("Applied", name, "PolicyChanged", message, self.models[name])
        self.trials.forget()
        self._happenings.forget(self.models)
        change = self.publisher.change
        if change is not None and (change.policy != part or policy.tuning.mode is not TuningMode.APPLY):
            self.trials.call_back()
        if self.evidence.turn(pods):
            self.models.learn_anew()
            self.trials.call_back()
        # 2. Evidence.
        gathered = self.evidence.gather(now, pods, view.readings, spec.metrics.stale_seconds)
        for seen in self.evidence.pods.values():
            self.publisher.notice(seen.generation)
        self.measurements.observe(view, self.target, spec.slo, gathered.samples)
        if not wanted:
            # Decisions that can't be published are not made: later they would rest on old evidence.
            for learned in self.models.values():
                learned.seen_at = max(learned.seen_at, self.evidence.newest)
            return [], []
        self._take_back(now, policy, gathered)
        self.models.learn_replaced(gathered, self.evidence.pods)
        if self._sees(now, spec, gathered, frozen=policy.tuning.mode is not TuningMode.APPLY):
            self._decide(view, spec, policy, pods, gathered.samples)
        # 3. Documents.
        return self._publish(view, policy, part)

    def _take_back(self, now: float, policy: BatchingPolicy, gathered: Gathered) -> None:
        """Apply the sidecars' own rollbacks: parameters that one sidecar rejected must not run on others."""
        change = self.publisher.change
        for uid, rolled in gathered.rolled_back:
            message = f"a sidecar undid {rolled.rejected.describe()}: {rolled.reason}"
            if self.trials.rolled_back(now, uid, rolled.generation, message):
                continue
            seen = self.evidence.pods[uid]
            if change is None or seen.generation != change.generation:
                continue
            learned = self.models.get(rolled.model)
            if learned is None:
                learned = self.models.meet(now, policy, rolled.model, None, change.parameters.get(EVERY))
            if learned.parameters == rolled.rejected:
                learned.tuner.rejected(rolled.rejected, rolled.back_to)
                learned.parameters = learned.tuner.parameters
                self.publisher.owed = True
                self._happenings.note("RolledBack", rolled.model, "SidecarRolledBack", message, learned)

    def _sees(self, now: float, spec: PolicySpec, gathered: Gathered, *, frozen: bool) -> bool:
        """Return whether there is evidence to decide on, and fall back if there was none for too long."""
        turn = self.trust.take(now, spec, gathered, self.evidence.newest, frozen=frozen)
        why = "" if self.trust.blind is None else self.trust.blind.message
        if turn is Turn.RECOVERED:
            self._happenings.note(
                "Recovered", EVERY, "Recovered", "there are measurements again, and tuning continues", None
            )
        elif turn is Turn.LOST:
            self.trials.call_back()
            if spec.fallback.behavior is FallbackBehavior.HOLD_LAST:
                self._happenings.note("FellBack", EVERY, Reason.METRICS_STALE, f"{why}; the last parameters stay", None)
            else:
                message = f"{why}; back to the baseline"
                self._happenings.note("FellBack", EVERY, Reason.METRICS_STALE, message, None, None, spec.baseline)
                for learned in self.models.values():
                    learned.adopt(spec.baseline)
        return turn in {Turn.SEEING, Turn.RECOVERED}

    def _decide(
        self, view: View, spec: PolicySpec, policy: BatchingPolicy, pods: Sequence[Pod], samples: list[Sample]
    ) -> None:
        """Pass every model's evidence to its tuner, and the canaries' evidence to the trial."""
        change, canaries = self.publisher.change, self.trials.canaries
        if change is None:
            return
        usable = [sample for sample in samples if not sample.stalled]
        base = [each for each in usable if each.generation == change.generation and each.uid not in canaries]
        sums = add_up(base)
        # After a change of the SLO, pods count by the old one until they run the next document.
        is_judged = change.policy is not None and change.policy.slo == policy.slo
        possible = able(pods, self.evidence.hash)
        ended = self.trials.judge(view.now, possible, usable, sums)
        every = sums if len(base) == len(usable) else add_up(usable)
        few = choose(possible, spec.canary.percent) if spec.canary.enabled else []
        for name, total in sums.items():
            learned = self.models.get(name)
            if learned is None:
                if not total.stats.arrivals or name == OTHER or len(self.models) >= MOST_MODELS:
                    continue
                learned = self.models.meet(view.now, policy, name, None, change.parameters.get(name))
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
            self.trials.outlive(name, decision)
            if decision.change:
                self._turn(view, spec, name, learned, decision, few)
            elif decision.reason is Reason.RECOMMEND_ONLY:
                self._happenings.recommend(view.now, name, learned, decision)

    def _turn(
        self, view: View, spec: PolicySpec, name: str, learned: Learned, decision: Decision, canaries: list[str]
    ) -> None:
        """Decide which pods get the tuner's decision: all, these canaries, or none yet."""
        if decision.parameters == learned.parameters:
            return
        if self.trials.comes_first(view, spec, name, learned, decision, canaries):
            return
        if self.trials.current is not None and self.trials.current.model == name:
            self.trials.call_back()
        learned.parameters, learned.decided = decision.parameters, True
        self._happenings.note("Applied", name, decision.reason, decision.message, learned, decision)

    def _publish(
        self, view: View, policy: BatchingPolicy, part: BatchingPolicy
    ) -> tuple[list[Document], list[Happening]]:
        """Return the documents to send now, and what happened, with their generations."""
        publisher, trial = self.publisher, self.trials.current
        every = policy.start()
        wanted = {EVERY: every, **{name: learned.parameters for name, learned in self.models.items()}}
        named = self.models.named(every)
        documents = []
        before = publisher.change
        publisher.keys = view.keys
        if publisher.is_due(view.now, view.wall) or not publisher.says(part, wanted, named):
            documents.append(publisher.publish(view.now, view.wall, part, named))
            if before is None:
                message = f"{every.describe()}: the policy's baseline"
                self._happenings.note("Applied", EVERY, "Baseline", message, None, None, every)
        change = publisher.change
        assert change is not None  # noqa: S101 - the first step publishes
        self.models.published(before, change)
        if trial is not None and publisher.trial is None:
            parameters = {**change.parameters, trial.model: trial.parameters}
            documents.append(publisher.publish_trial(view.now, view.wall, part, parameters, trial.pods))
        tried = publisher.trial or change
        happenings = self._happenings.published(change.generation, tried.generation)
        return documents or publisher.repeats(view.now, self.evidence.pods, self.trials.canaries), happenings
