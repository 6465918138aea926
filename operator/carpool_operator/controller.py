"""One policy: steers its targets, and puts its status together.

Call ``restore`` with the content of a target's ConfigMap before the first ``step`` that includes the target; then call
``step`` once per pass. ``change`` returns what the ConfigMap should hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool.policy.plain import PolicyError, from_plain
from carpool_operator.api.model import Event, Outcome, Policy, Target
from carpool_operator.api.spec import written
from carpool_operator.api.status import ConditionStatus, ConditionType, Status
from carpool_operator.reporting.conditions import (
    UNKNOWN,
    Finding,
    accepted,
    asks,
    conditions,
    delivery,
    metrics_available,
    programmed,
    ready,
    slo_met,
    worst,
)
from carpool_operator.reporting.decisions import Reporter, timestamp
from carpool_operator.tuning.assignment import targets_of
from carpool_operator.tuning.steering import Steering
from carpool_operator.tuning.target_load import autoscaler_of, for_autoscaler

if TYPE_CHECKING:
    from carpool.exchange.change import Change
    from carpool_operator.api.model import Document, View
    from carpool_operator.api.spec import PolicySpec
    from carpool_operator.api.status import Condition
    from carpool_operator.reporting.conditions import Delivery
    from carpool_operator.tuning.happenings import Happening

NOTHING = Finding(UNKNOWN, "NoTargets", "none of its targets exists and belongs to it")


class Controller:
    """Decides for one policy. Pure: time and all input are arguments, actions are returned."""

    def __init__(self) -> None:
        self._steerings: dict[Target, Steering] = {}
        self._reporter: Reporter | None = None
        self._conditions: tuple[Condition, ...] = ()
        self._before: Status | None = None
        self._delivered: dict[Target, Delivery] = {}
        self._autoscalers: dict[Target, str] = {}
        """Autoscalers that follow the load of targets, as last reported."""

    def restore(self, target: Target, change: Change) -> None:
        """Continue from a target's ConfigMap: from another operator, or from this one before a restart."""
        self._steerings[target] = Steering(target)
        self._steerings[target].restore(change)

    def change(self, target: Target) -> Change | None:
        """Return the change that a target's ConfigMap should hold; ``None`` while nothing was published."""
        steering = self._steerings.get(target)
        return None if steering is None else steering.publisher.change

    def step(self, view: View) -> Outcome:
        """Evaluate the policy's view and decide."""
        policy = view.policy
        if self._reporter is None or self._before is None:
            self._before = _read(policy)
            self._reporter = Reporter(self._before)
            self._conditions = self._before.conditions
            for said in self._before.targets:
                target = Target(policy.namespace, said.kind, said.name)
                self._autoscalers[target] = said.autoscaler
                steering = self._steerings.get(target)
                if steering is not None:
                    steering.models.recall(said.models)
                    self._recall_measured(steering)
        spec = policy.spec
        if spec is None:
            return self._unread(view)
        # 1. Existing workloads, and those that belong to the policy
        targets = targets_of(policy.namespace, spec, view.selected)
        owned = [target for target in targets if view.owners[target].uid == policy.uid]
        self._steerings = {target: self._steerings.get(target) or self._begun(target) for target in owned}
        # 2. Steer
        documents: list[Document] = []
        happened: list[tuple[Target, Happening]] = []
        met = self._met()
        for target, steering in self._steerings.items():
            workload = view.workloads.get(target)
            wanted = workload is not None and (asks(workload) or bool(view.pods.get(target)))
            sent, happenings = steering.step(view, spec, wanted=wanted, met=met)
            documents += sent
            happened += [(target, each) for each in happenings]
        # 3. Report the result
        events = [_event(target, happening) for target, happening in happened]
        if not documents and not happened and self._awaits(view, spec):
            return Outcome(documents, policy.status, events)
        events += [*self._autoscaled(view, spec), *self._conclude(view, spec)]
        steerings = list(self._steerings.values())
        self._reporter.record(view, steerings, happened)
        status = self._reporter.status(view, steerings, self._delivered, self._conditions, policy.generation)
        return Outcome(documents, written(status), events)

    def _begun(self, target: Target) -> Steering:
        """Start steering a target whose ConfigMap is unknown; engines without sidecars have none."""
        steering = Steering(target)
        self._recall_measured(steering)
        return steering

    def _recall_measured(self, steering: Steering) -> None:
        """Restore a target's token streams and load from a status."""
        before, local = self._before or Status(), steering.target.local
        for streams in before.token_streams:
            if streams.target == local:
                steering.measurements.streams.recall(streams)
                steering.measurements.engines.recall(streams.recommended)
        for load in before.capacity:
            if load.target == local:
                steering.measurements.load.recall(load)

    def _unread(self, view: View) -> Outcome:
        """Report why a spec cannot be read; the running parameters and the previous status stay."""
        policy = view.policy
        finding = accepted(policy, (), view)
        findings = {
            ConditionType.ACCEPTED: finding,
            **{
                kind: _found(self._conditions, kind) or NOTHING
                for kind in (ConditionType.PROGRAMMED, ConditionType.METRICS_AVAILABLE, ConditionType.SLO_MET)
            },
        }
        findings[ConditionType.READY] = ready(findings, paused=False)
        events = self._say(view, findings)
        status = _read(policy)
        changes = {"observed_generation": policy.generation, "conditions": self._conditions}
        kept = {name: getattr(status, name) for name in status.__struct_fields__}
        return Outcome([], written(Status(**{**kept, **changes})), events)

    def _awaits(self, view: View, spec: PolicySpec) -> bool:
        """Whether this continues another operator's work, and has too few readings yet to report anything else."""
        if not view.policy.status or view.policy.status.get("observedGeneration") != view.policy.generation:
            return False
        return any(
            steering.awaits_first_reading
            and bool(view.pods.get(target))
            and view.now - steering.trust.good_at <= spec.metrics.stale_seconds
            for target, steering in self._steerings.items()
        )

    def _met(self) -> bool | None:
        said = _found(self._conditions, ConditionType.SLO_MET)
        return None if said is None or said.status is UNKNOWN else said.status is ConditionStatus.TRUE

    def _autoscaled(self, view: View, spec: PolicySpec) -> list[Event]:
        """Report where an autoscaler began or stopped following the load: it changes the choice of parameters."""
        events = []
        now = {target: autoscaler_of(view.workloads.get(target)) for target in self._steerings}
        for target, follows in now.items():
            if follows == self._autoscalers.get(target, ""):
                continue
            chosen = for_autoscaler(spec.policy()).objective
            what = f"its load is followed ({follows})" if follows else "no autoscaler follows its load any more"
            objective = chosen if follows else spec.policy().objective
            message = f"{target.kind} {target.name}: {what}; objective {objective}"
            events.append(Event(warning=False, reason="Autoscaled" if follows else "NotAutoscaled", message=message))
        self._autoscalers = now
        return events

    def _conclude(self, view: View, spec: PolicySpec) -> list[Event]:
        """Evaluate the conditions, and return events for those that changed."""
        policy = view.policy
        there = [steering for target, steering in self._steerings.items() if target in view.workloads]
        said = _found(self._conditions, ConditionType.PROGRAMMED)
        before = said is not None and said.status is ConditionStatus.TRUE
        self._delivered = {steering.target: delivery(steering, view) for steering in there}
        stale_after = spec.metrics.stale_seconds
        findings = {
            ConditionType.ACCEPTED: accepted(policy, targets_of(policy.namespace, spec, view.selected), view),
            ConditionType.PROGRAMMED: worst(
                [programmed(each, view, self._delivered[each.target], before=before) for each in there], NOTHING
            ),
            ConditionType.METRICS_AVAILABLE: worst(
                [
                    metrics_available(each, view, stale_after)
                    for each in there
                    if asks(view.workloads[each.target])
                    or self._delivered[each.target].injected
                    or each.measurements.engines.pods
                ],
                NOTHING,
            ),
            ConditionType.SLO_MET: slo_met(there, policy, spec, _found(self._conditions, ConditionType.SLO_MET))
            if there
            else NOTHING,
        }
        findings[ConditionType.READY] = ready(findings, paused=policy.paused)
        return self._say(view, findings)

    def _say(self, view: View, findings: dict[ConditionType, Finding]) -> list[Event]:
        """Write findings as conditions; record an event for each that became false, or changed its reason."""
        before = {condition.type: condition for condition in self._conditions}
        self._conditions = conditions(findings, self._conditions, view.policy.generation, timestamp(view.wall))
        return [
            Event(warning=True, reason=each.reason, message=each.message)
            for each in self._conditions
            if each.type != ConditionType.READY
            and each.status is ConditionStatus.FALSE
            and ((last := before.get(each.type)) is None or (last.status, last.reason) != (each.status, each.reason))
        ]


def _read(policy: Policy) -> Status:
    """Return the previous status of a policy; an empty one where it cannot be read."""
    try:
        return from_plain(policy.status, Status, what="status")
    except PolicyError:
        return Status()


def _found(said: tuple[Condition, ...], kind: ConditionType) -> Finding | None:
    condition = next((each for each in said if each.type == kind), None)
    return None if condition is None else Finding(condition.status, condition.reason, condition.message)


WARNINGS = frozenset({"RolledBack", "FellBack"})
EVENTS = {"Applied": "ParametersChanged", "Trying": "CanaryStarted", "FellBack": "FellBack"}
"""Reasons of events by action; for other actions, the decision's reason is used."""


def _event(target: Target, happening: Happening) -> Event:
    about = f"{target.kind} {target.name}"
    model = "" if happening.model in {"", "*"} else f", model {happening.model}"
    return Event(
        warning=happening.action in WARNINGS,
        reason=EVENTS.get(happening.action, happening.reason),
        message=f"{about}{model}: {happening.message}",
    )
