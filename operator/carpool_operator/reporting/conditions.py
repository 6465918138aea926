"""The conditions of a policy: what is true, or else why not, and the command that fixes it. Pure checks in order.

The first check that fails determines the message. Messages stay the same while nothing changes: a status is written
when it differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from carpool.policy.durations import format_seconds
from carpool_operator.api.annotations import (
    ASKED,
    CONTAINER,
    CPU,
    CPU_LIMIT,
    FORBIDDEN,
    INJECT,
    MEMORY,
    PROPAGATED,
    STATUS,
)
from carpool_operator.api.annotations import asks as asks_itself
from carpool_operator.api.model import LONGEST_NOTE
from carpool_operator.api.spec import MAX_SELECTED
from carpool_operator.api.status import (
    ANNOTATION_INVALID,
    DEFECTS,
    SERVICE_BYPASSED,
    Condition,
    ConditionStatus,
    ConditionType,
)
from carpool_operator.tuning.assignment import conflicts
from carpool_operator.tuning.learning import alone_too_slow
from carpool_operator.workloads.registry import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from carpool.policy.spec import SLO
    from carpool_operator.api.model import Policy, Target, View, Workload
    from carpool_operator.api.spec import PolicySpec
    from carpool_operator.tuning.steering import Steering

GRACE = 30.0
"""Seconds that a pod may take to run a new document before the condition reports it."""

NAMES = 5
"""Most names in a message; the rest is a number."""

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


class Finding(NamedTuple):
    """The result of a check."""

    status: ConditionStatus
    reason: str
    message: str = ""


def asks(workload: Workload) -> bool:
    """Whether a workload's pods should have sidecars: from the webhook, or from ``carpool inject``."""
    written = workload.template_annotations
    return written.get(INJECT) in {ASKED, PROPAGATED} or STATUS in written


def accepted(policy: Policy, targets: Sequence[Target], view: View) -> Finding:
    """Whether the spec is valid, names what exists, and no other policy owns its targets."""
    if policy.spec is None:
        return Finding(FALSE, "Invalid", policy.error)
    lost = conflicts(policy, targets, view.owners)
    if lost:
        return Finding(FALSE, "Conflicted", lost)
    if len(view.selected) > MAX_SELECTED:
        return Finding(
            FALSE,
            "TooManyTargets",
            f"targetSelector selects more than {MAX_SELECTED} workloads; the first {MAX_SELECTED} by name are "
            "tuned: narrow it, or write a second policy",
        )
    selector = policy.spec.target_selector
    if selector is not None and not targets:
        return Finding(
            FALSE,
            "TargetNotFound",
            f"targetSelector selects no {selector.kind} in namespace {policy.namespace}, apart from those with "
            f'{INJECT}: "{FORBIDDEN}": label one, or correct it '
            f"(kubectl -n {policy.namespace} get {BY_NAME[selector.kind].plural} --show-labels)",
        )
    absent = [target for target in targets if target not in view.workloads]
    if absent:
        named = ", ".join(f"{target.kind} {target.name}" for target in absent)
        return Finding(
            FALSE,
            "TargetNotFound",
            f"there is no {named} in namespace {policy.namespace}: create it, or correct targetRefs "
            f"(kubectl -n {policy.namespace} get {','.join(sorted({BY_NAME[each.kind].plural for each in absent}))})",
        )
    invalid = _messages(view, targets, ANNOTATION_INVALID)
    if invalid:
        said = _joined(invalid)
        end = "" if said.endswith(("?", ".")) else "."
        kept = f"{end} Until then the policy stays as it was before" if policy.annotated else ""
        return Finding(TRUE, ANNOTATION_INVALID, f"{said}{kept}")
    return Finding(TRUE, "Accepted")


def _messages(view: View, targets: Iterable[Target], reason: str) -> list[str]:
    return [
        event.message for target in targets for event in view.workload_events.get(target, ()) if event.reason == reason
    ]


def _joined(messages: Sequence[str]) -> str:
    """Join messages up to a length: an annotation may have any length, a status may not."""
    shown = "; ".join(message[:LONGEST_NOTE] for message in messages[:NAMES])
    return shown if len(messages) <= NAMES else f"{shown}; and {len(messages) - NAMES} more like these"


class Delivery(NamedTuple):
    """How many pods have a target's document."""

    injected: int
    acknowledged: int
    behind: list[str]
    """Names of pods that run an older one."""
    late: list[str]
    """Those that are behind for longer than ``GRACE``."""


def delivery(steering: Steering, view: View) -> Delivery:
    """Count the pods that run what they should."""
    publisher, canaries = steering.publisher, steering.trials.canaries
    pods = [pod for pod in view.pods.get(steering.target, ()) if not pod.deleting]
    behind, late = [], []
    for pod in pods:
        seen, wanted = steering.evidence.pods.get(pod.uid), publisher.wanted(pod.uid, canaries)
        if wanted is None or seen is None or seen.running != wanted.generation:
            behind.append(pod.name)
            since = max(publisher.changed_at, seen.since if seen is not None else view.now)
            if view.now - since > GRACE:
                late.append(pod.name)
    return Delivery(len(pods), len(pods) - len(behind), behind, late)


def programmed(steering: Steering, view: View, delivered: Delivery, *, before: bool) -> Finding:
    """Whether every pod of a target runs what is published for it; ``before``: the previous result."""
    target, workload = steering.target, view.workloads[steering.target]
    what, where = f"{target.kind} {target.name}", f"kubectl -n {target.namespace}"
    resource = BY_NAME[target.kind].resource(target.name)
    if not asks(workload) and steering.measurements.engines.pods:
        return Finding(TRUE, "RecommendOnly", f"{what} has no sidecars: limits for its engines are recommended")
    if not asks(workload):
        return Finding(FALSE, "NotInjected", f"{what} has no sidecars: {_inject(workload, where)}")
    if workload.refused:
        return Finding(FALSE, "PodsRefused", f"{what}: {_room(workload, where)}")
    missed = view.missed.get(target, ())
    skipped = [pod for pod in missed if pod.skipped]
    if skipped:
        # A restart alone would have the same result: the injector's message says what to change.
        why = skipped[0].skipped
        alike = [pod.name for pod in skipped if pod.skipped == why]
        return Finding(FALSE, "Skipped", f"{names(alike)} of {what} can't have a sidecar: {why}")
    if missed:
        listed = names([pod.name for pod in missed])
        # Where something keeps the newest template from pods, a restart does not give them a sidecar.
        fix = workload.held_back or _restart(workload)
        return Finding(FALSE, "Missed", f"{listed} of {what} started without a sidecar: {fix}")
    wrong = _elsewhere(workload, view, where) or _undelivered(steering, view, delivered, where)
    if wrong is not None:
        return wrong
    if not delivered.injected:
        if workload.replicas == 0:
            return Finding(TRUE, "ScaledToZero", f"{what} has no pods")
        return Finding(UNKNOWN, "NoPods", f"{what} has no pod with a sidecar yet: {where} describe {resource}")
    if delivered.behind and not before:
        return Finding(UNKNOWN, "Pending", f"{what}: the first configuration is on its way")
    bypassed = _messages(view, [target], SERVICE_BYPASSED)
    if bypassed:
        return Finding(TRUE, SERVICE_BYPASSED, _joined(bypassed))
    return Finding(TRUE, "Programmed")


def _undelivered(steering: Steering, view: View, delivered: Delivery, where: str) -> Finding | None:
    """Report pods that reject the newest document, can't use it, or have not said in time that it runs."""
    target, workload = steering.target, view.workloads[steering.target]
    what = f"{target.kind} {target.name}"
    # A starting pod finds the document in its ConfigMap; a document published right now has not been rejected yet.
    expected = view.pods.get(target, ()) if steering.publisher.changed_at < view.now else ()
    pods = {pod.uid: pod.name for pod in expected if pod.ready}
    refused = {pods[uid]: error for uid, error in view.refused.items() if uid in pods and pods[uid] in delivered.behind}
    if refused:
        name, error = min(refused.items())
        return Finding(
            FALSE,
            "PushRefused",
            f"{names(sorted(refused))} of {what} did not take the configuration ({error}); it is tried again. A pod "
            f"that starts anew reads it from its ConfigMap: "
            f"{_restart(workload) if len(refused) > 1 else f'{where} delete pod {name}'}",
        )
    unread = {
        seen.name: seen.change_error
        for seen in steering.evidence.pods.values()
        if seen.change_error and seen.name in delivered.behind
    }
    if unread:
        name, error = min(unread.items())
        return Finding(
            FALSE,
            "ChangeRefused",
            f"{names(sorted(unread))} of {what} cannot use the configuration in its ConfigMap ({error}): "
            f"{where} logs {name} -c carpool",
        )
    if delivered.late:
        name = delivered.late[0]
        error = next((seen.error for seen in steering.evidence.pods.values() if seen.name == name), "")
        why = f" ({name} can't be read: {error})" if error else ""
        return Finding(
            FALSE,
            "Pending",
            f"{names(delivered.late)} of {what} did not say that the newest configuration runs{why}: "
            f"{where} logs {name} -c carpool",
        )
    return None


def _inject(workload: Workload, where: str) -> str:
    """Return the command that adds sidecars to a workload."""
    target, own = workload.target, workload.annotations
    kind = BY_NAME[target.kind]
    if workload.template_annotations.get(INJECT) == FORBIDDEN or own.get(INJECT) == FORBIDDEN:
        return f'{INJECT} says "{FORBIDDEN}": take that annotation out'
    if kind.annotating and not asks_itself(own):
        return f"{where} annotate {kind.resource(target.name)} {INJECT}={ASKED}"
    if kind.annotating and not kind.built_in:
        # A restart may write another object than this.
        return f"{where} annotate {kind.resource(target.name)} {INJECT}={ASKED} --overwrite"
    if kind.annotating:
        # Annotated while the webhook was not available: any write makes the webhook copy the annotation.
        return f"it was annotated while the injector was not available: {_restart(workload)}"
    return kind.annotate_pods(target.namespace, target.name, {INJECT: ASKED})


def _room(workload: Workload, where: str) -> str:
    """Return why the API server rejects a workload's pods, and the fix."""
    target, why = workload.target, f"the API server refuses its pods ({workload.refused})"
    if any(word in workload.refused for word in ("quota", "limit", "maximum", "minimum", "ratio")):
        without = BY_NAME[target.kind].annotate_pods(target.namespace, target.name, {INJECT: FORBIDDEN})
        return (
            f"{why}: make room, or let the sidecar ask for less with {CPU}, {CPU_LIMIT} and {MEMORY} on the pod "
            f"template or the Namespace; without it: {without}"
        )
    return f"{why}: {where} get events --field-selector type=Warning"


def _restart(workload: Workload) -> str:
    """Return the command that recreates the pods."""
    target = workload.target
    return BY_NAME[target.kind].restarted(target.namespace, target.name, workload.selector)


def _elsewhere(workload: Workload, view: View, where: str) -> Finding | None:
    """Report sidecars that serve another container than the one that the policy names."""
    target, spec = workload.target, view.policy.spec
    refs = () if spec is None else spec.target_refs
    wanted = next((ref.container for ref in refs if (ref.kind, ref.name) == (target.kind, target.name)), None)
    pods = [pod for pod in view.pods.get(target, ()) if not pod.deleting]
    before = sorted({pod.container for pod in pods} - {wanted, ""})
    if wanted is None or not before:
        return None
    what = f"the sidecars of {target.kind} {target.name} stand before container {names(before)}, not {wanted}"
    if workload.template_annotations.get(CONTAINER) == wanted:
        look = f"{where} get {BY_NAME[target.kind].resource(target.name)} --watch"
        return Finding(FALSE, "WrongContainer", f"{what}, where those of new pods will stand: {look}")
    how = BY_NAME[target.kind].annotate_pods(target.namespace, target.name, {CONTAINER: wanted})
    return Finding(FALSE, "WrongContainer", f"{what}: {how}")


def metrics_available(steering: Steering, view: View, stale_after: float) -> Finding:
    """Whether there are metrics to decide on."""
    blind, namespace = steering.trust.blind, steering.target.namespace
    what = f"{steering.target.kind} {steering.target.name}"
    # `minReplicas: 0` of an InferenceService says how few pods there may be, not that there are none.
    running = any(not pod.deleting for pod in view.pods.get(steering.target, ()))
    if not view.workloads[steering.target].replicas and not running:
        return Finding(TRUE, "ScaledToZero", f"{what} has no pods: there is nothing to read")
    engines = steering.measurements.engines
    if engines.pods and view.now - engines.seen_at <= stale_after:
        return Finding(TRUE, "Available")
    if engines.pods:
        name, why = min(engines.errors.items(), default=("", "nothing new was read"))
        return Finding(FALSE, "MetricsStale", f"{what}: {name}: {why}" if name else f"{what}: {why}")
    if blind is not None and blind.reason == "NoPodsReady":
        return Finding(UNKNOWN, blind.reason, f"{what}: {blind.message}")
    if not steering.evidence.heard and view.now - steering.trust.good_at <= stale_after:
        return Finding(UNKNOWN, "NotReadYet", f"{what}: its pods have not been read yet")
    if view.now - steering.trust.good_at <= stale_after:
        name, note = min(
            ((seen.name, seen.note) for seen in steering.evidence.pods.values() if seen.note), default=("", "")
        )
        return Finding(
            TRUE, "Available", f"{what}: token streams are left out, of {name} at least: {note}" if note else ""
        )
    if blind is None:
        return Finding(FALSE, "MetricsStale", f"{what}: nothing new was read for {format_seconds(stale_after)}")
    return Finding(
        FALSE,
        blind.reason,
        f"{what}: {blind.message}. Nothing is changed meanwhile; "
        f"kubectl -n {namespace} get pods -l carpool.dev/injected shows whether they run",
    )


def _described(slo: SLO) -> str:
    """Describe the SLO."""
    named = [(name, target) for name, target in (("TTFT", slo.ttft), ("TPOT", slo.tpot)) if target is not None]
    parts = [f"{name} p99 within {format_seconds(float(target.p99))}" for name, target in named]
    if slo.latency is not None:
        quantile, seconds = slo.percentiles[-1]
        parts.insert(0, f"p{100 * quantile:g} within {format_seconds(seconds)}".replace("99.9", "999"))
    return ", ".join(parts)


def slo_met(steerings: Sequence[Steering], policy: Policy, spec: PolicySpec, before: Finding | None) -> Finding:
    """Whether the SLO is met, by sequential tests with hysteresis: never by one interval's percentile."""
    models = {
        f"{steering.target.name} {name}".strip(): learned
        for steering in steerings
        for name, learned in steering.models.items()
    }
    verdicts = {name: learned.slo_status.met for name, learned in models.items()}
    streamed = {f"{each.target.name} token streams": each.measurements.streams.slo_status.met for each in steerings}
    verdicts |= {name: met for name, met in streamed.items() if met is not None}
    slo = _described(spec.slo)
    lower = "slo.latency" if spec.slo.latency is not None else "slo.ttft or slo.tpot"
    missed = sorted(name for name, met in verdicts.items() if met is False)
    if missed:
        alone = {
            name: takes
            for name, learned in models.items()
            if learned.slo_status.met is False and (takes := learned.too_slow_alone) is not None
        }
        advice = f"Add replicas or raise {lower}"
        if alone:
            slow = [f"{name}: {alone_too_slow(takes)}" for name, takes in sorted(alone.items())]
            advice = f"{names(slow)}. More replicas do not help there: raise {lower}, or use a faster model or device"
            if len(alone) < len(missed):
                advice += ". For the others, add replicas"
        return Finding(
            FALSE,
            "Missed",
            f"{slo} is missed for {names(missed)}: more requests miss than allowed. {advice}; "
            f"why: kubectl carpool explain {policy.name} -n {policy.namespace}",
        )
    if any(verdicts.values()):
        return Finding(TRUE, "Met", slo)
    if before is not None and before.status is not UNKNOWN and not verdicts:
        return before
    return Finding(UNKNOWN, "TooFewRequests", "too few requests were answered yet for a decision")


def ready(findings: Mapping[ConditionType, Finding], *, paused: bool) -> Finding:
    """Whether all conditions but SLOMet are true."""
    parts = [findings[kind] for kind in _PARTS]
    for finding in parts:
        if finding.status is not TRUE:
            return Finding(FALSE, finding.reason, finding.message)
    if paused:
        return Finding(TRUE, "Paused", "tuning is paused, and parameters stay: kubectl carpool resume continues it")
    return next((finding for finding in parts if finding.reason in DEFECTS), Finding(TRUE, "Ready"))


_PARTS = (ConditionType.ACCEPTED, ConditionType.PROGRAMMED, ConditionType.METRICS_AVAILABLE)


def worst(findings: Sequence[Finding], otherwise: Finding) -> Finding:
    """Combine the findings of several targets: the worst status, with all messages of that status."""
    groups = [[finding for finding in findings if finding.status is status] for status in (FALSE, UNKNOWN)]
    for bad in (*groups, [finding for finding in findings if finding.reason in DEFECTS]):
        if bad:
            same = [finding.message for finding in bad if finding.reason == bad[0].reason]
            return bad[0]._replace(message="; ".join(same))
    return findings[0] if findings else otherwise


def conditions(
    findings: Mapping[ConditionType, Finding], before: Sequence[Condition], generation: int, at: str
) -> tuple[Condition, ...]:
    """Write findings as conditions; the transition time stays while the status does."""
    known = {condition.type: condition for condition in before}
    written = []
    for kind, finding in findings.items():
        last = known.get(kind)
        stays = last is not None and last.status is finding.status
        written.append(
            Condition(
                type=str(kind),
                status=finding.status,
                reason=finding.reason,
                message=finding.message,
                last_transition_time=last.last_transition_time if stays and last is not None else at,
                observed_generation=generation,
            )
        )
    return tuple(written)


def names(listed: Sequence[str]) -> str:
    """List names, up to a limit."""
    shown = ", ".join(listed[:NAMES])
    return shown if len(listed) <= NAMES else f"{shown} and {len(listed) - NAMES} more"
