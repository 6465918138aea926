"""The trials of one target: riskier or explored parameters run on its canaries first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from carpool.exchange.decision import Reason
from carpool.tuning.exploration import LASTS
from carpool_operator.tuning.canary import Answers, CanaryTest, Patience, Verdict
from carpool_operator.tuning.evidence import add_up

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from carpool.exchange.decision import Decision
    from carpool.policy.parameters import Parameters
    from carpool_operator.api.model import Target, View
    from carpool_operator.api.spec import PolicySpec
    from carpool_operator.delivery.documents import Publisher
    from carpool_operator.tuning.evidence import Sample, Sum
    from carpool_operator.tuning.happenings import Happenings
    from carpool_operator.tuning.learning import Learned
    from carpool_operator.tuning.models import Models

OUTLIVED = 2.0
"""Ratio of the load when a trial began to the present load, from which another step may replace the trial."""


@dataclass(frozen=True)
class Trial:
    """A trial of one model's parameters on some of the pods."""

    model: str
    decision: Decision
    """The decision that began the trial."""
    pods: frozenset[str]
    """UIDs."""
    since: float
    wall: float
    """Start of the trial, in seconds since the epoch."""
    test: CanaryTest
    beyond: int
    """Rows of the largest well measured batch below the explored size."""

    @property
    def parameters(self) -> Parameters:
        """The trial's parameters."""
        return self.decision.parameters


class Trials:
    """Begins and ends trials, one at a time.

    The end of a trial sets the parameters of its model, is noted, and owes all pods a newer document.
    """

    def __init__(self, target: Target, models: Models, publisher: Publisher, happenings: Happenings) -> None:
        self.current: Trial | None = None
        self._target = target
        self._models = models
        self._publisher = publisher
        self._happenings = happenings
        self._patience = Patience()
        self._proven: tuple[str, Parameters] | None = None
        """Explored by canaries until this pass, and measured: if chosen now, it may go to all pods."""

    @property
    def canaries(self) -> frozenset[str]:
        """UIDs of the pods of the present trial."""
        return frozenset() if self.current is None else self.current.pods

    def comes_first(
        self, view: View, spec: PolicySpec, name: str, learned: Learned, decision: Decision, canaries: list[str]
    ) -> bool:
        """Whether a decision has to wait for a trial on ``canaries``, and begin it.

        It begins later if another one is under way, or has failed too recently.
        """
        # After a trial whose canaries were lost all but one pod may be unready for a moment: that one must not take the
        # risk.
        waits = self.current is not None or not self._patience.over(view.now)
        is_proven = self._proven == (name, decision.parameters) and decision.reason is not Reason.EXPLORES
        if not decision.tentative or is_proven or not spec.canary.enabled or not (canaries or waits):
            return False
        learned.adopt(learned.parameters)  # until it is proven
        if not waits:
            self.current = Trial(
                name,
                decision,
                frozenset(canaries),
                since=view.now,
                wall=view.wall,
                test=CanaryTest(spec.slo.percentiles[-1][0], spec.canary.min_requests),
                beyond=learned.measured_below(decision.parameters.max_batch),
            )
            few = "1 pod" if len(canaries) == 1 else f"{len(canaries)} pods"
            message = f"{few} of {len(view.pods[self._target])} first: {decision.message}"
            self._happenings.note("Trying", name, decision.reason, message, learned, decision, decision.parameters)
        return True

    def judge(self, now: float, able: Collection[str], samples: Sequence[Sample], others: dict[str, Sum]) -> str | None:
        """Observe the trial and end it when it is time; returns the model of an ended one.

        ``able``: UIDs of the pods that could be canaries. ``samples``: of all pods. ``others``: without the canaries.
        """
        self._proven = None
        trial, tried = self.current, self._publisher.trial
        if trial is None or tried is None:
            return None
        canaries = add_up(each for each in samples if each.uid in trial.pods and each.generation == tried.generation)
        learned = self._models[trial.model]
        if trial.pods.isdisjoint(able) or len(able) < 2:
            self._fail(now, trial, "CanaryReturned", "its canaries are gone")
            return trial.model
        trial.test.observe(_answers(canaries.get(trial.model)), _answers(others.get(trial.model)))
        verdict, message = trial.test.verdict(now - trial.since)
        if verdict is Verdict.CONTINUE:
            return None
        message = f"{trial.parameters.describe()}: {message}"
        if verdict is Verdict.PROMOTE and trial.decision.reason is Reason.EXPLORES:
            # Once it is measured, the tuner decides whether all pods should run it.
            is_measured = learned.has_measured(trial.parameters, trial.beyond)
            if is_measured or now - trial.since >= LASTS:
                self._end_exploration(trial, message, is_measured=is_measured)
            return None
        if verdict is Verdict.PROMOTE:
            self.current = None
            self._patience.succeeded()
            learned.adopt(trial.parameters)
            self._happenings.note("Promoted", trial.model, "CanaryPromoted", message, learned, trial.decision)
        elif verdict is Verdict.ROLL_BACK:
            self._fail(now, trial, "CanaryRolledBack", message, rejected=trial.parameters)
        else:
            self._fail(now, trial, "CanaryReturned", message)
        return trial.model

    def _end_exploration(self, trial: Trial, message: str, *, is_measured: bool) -> None:
        """End the exploration: canaries return to the common parameters, and the tuner uses what they measured."""
        self._patience.succeeded()
        self.call_back()
        if is_measured:
            self._proven = trial.model, trial.parameters
        showed = "" if is_measured else f"; no batch showed what they take in {LASTS:.0f} s"
        learned = self._models[trial.model]
        self._happenings.note("Measured", trial.model, "CanaryMeasured", message + showed, learned)

    def outlive(self, name: str, decision: Decision) -> None:
        """End a trial whose load is gone, if another step is wanted now: few requests would prove nothing.

        If requests should pass through one by one, any fall suffices: the lower the load, the longer a switch would
        wait for the trial. A rising load needs no such rule: the new parameters go to all pods at once.
        """
        trial = self.current
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
            self.call_back()
            fell = f"the load they were for fell from {began:.3g} to {rate:.3g} requests/s and pod"
            message = f"{trial.parameters.describe()}: {fell}"
            self._happenings.note("RolledBack", name, "CanaryReturned", message, self._models[name])

    def rolled_back(self, now: float, uid: str, generation: int, message: str) -> bool:
        """Whether a sidecar's own rollback of a document is one of the trial's parameters; then the trial ends."""
        trial, tried = self.current, self._publisher.trial
        if trial is None or tried is None or uid not in trial.pods or generation != tried.generation:
            return False
        self._fail(now, trial, "SidecarRolledBack", message, rejected=trial.parameters)
        return True

    def _fail(self, now: float, trial: Trial, reason: str, message: str, *, rejected: Parameters | None = None) -> None:
        """End a trial whose parameters don't go to all pods; ``rejected``: those that are at fault."""
        learned = self._models[trial.model]
        learned.go_back(rejected)
        self._patience.failed(now)
        self.call_back()
        self._happenings.note("RolledBack", trial.model, reason, message, learned)

    def forget(self) -> None:
        """Call back a trial of a model that was forgotten: no pod has reported it for long."""
        if self.current is not None and self.current.model not in self._models:
            self.call_back()

    def call_back(self) -> None:
        """End a trial without a result: publish the common parameters again, newer than the canaries'."""
        if self.current is not None:
            self.current = None
            self._publisher.owed = True


def _answers(total: Sum | None) -> Answers | None:
    return None if total is None else Answers(total.stats.hits, total.stats.missed)
