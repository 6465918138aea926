"""Policies of a cluster, and messages about them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import Struct, field

from carpool.policy.plain import PolicyError, from_plain
from carpool_cli.kubectl.cluster import PAUSED, Cluster, ForbiddenError, NoKindError, NotFoundError, alive, read_object
from carpool_operator.api import annotations as asked
from carpool_operator.api.status import DEFECTS, Condition, ConditionStatus, ConditionType, Status
from carpool_operator.workloads import registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from carpool_operator.workloads.kind import Kind


class Metadata(Struct, frozen=True, rename="camel"):
    """The needed part of an object's metadata."""

    name: str
    namespace: str
    generation: int = 0
    creation_timestamp: str = ""
    annotations: dict[str, str] = field(default_factory=dict)


class Policy(Struct, frozen=True):
    """One BatchingPolicy. The spec is unparsed: the server has checked it."""

    metadata: Metadata
    spec: dict[str, Any]
    status: Status
    raw: dict[str, Any]

    @property
    def paused(self) -> bool:
        """Whether its parameters must not change."""
        return PAUSED in self.metadata.annotations

    @property
    def mode(self) -> str:
        """The operator's mode for it, in a word."""
        return "Paused" if self.paused else str(self.spec.get("tuning", {}).get("mode", "Apply"))

    @property
    def slo(self) -> str:
        """The SLO: ``p99 50ms``; for token streams ``ttft p99 2s``."""
        slo = self.spec.get("slo", {})
        latency = slo.get("latency", {})
        parts = [f"{name} {latency[name]}" for name in ("p50", "p90", "p95", "p99", "p999") if name in latency]
        parts += [f"{name} p99 {slo[name]['p99']}" for name in ("ttft", "tpot") if name in slo]
        return ", ".join(parts)

    @property
    def targets(self) -> list[tuple[str, str]]:
        """Kind and name of the workloads that it tunes."""
        return [(ref.get("kind", registry.DEFAULT.name), ref["name"]) for ref in self.spec.get("targetRefs", [])]

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return a condition, if it exists."""
        return next((each for each in self.status.conditions if each.type == kind), None)


def read(raw: dict[str, Any]) -> Policy:
    """Parse a policy from the server.

    Raises ``click.ClickException`` if another version of the operator wrote it.
    """
    try:
        metadata = msgspec.convert(raw.get("metadata"), Metadata)
        status = from_plain(raw.get("status", {}), Status, what="status")
    except (msgspec.ValidationError, PolicyError) as error:
        raise click.ClickException(
            f"this kubectl-carpool can't read what the operator wrote ({error}): use the one of the operator's "
            "version, or -o yaml"
        ) from None
    return Policy(metadata, raw.get("spec", {}), status, raw)


def find(cluster: Cluster, name: str) -> Policy:
    """Return a policy by its name, or by a workload that it tunes: ``deployment/resnet``.

    Raises ``click.ClickException`` if there is none, or if several tune that workload.
    """
    prefix, slash, workload = name.partition("/")
    if not slash:
        return read(cluster.get(name))
    known = registry.NAMES.get(prefix.lower())
    if known is None:
        raise click.ClickException(f"{name!r}: write a policy's name, or what it tunes as deployment/NAME")
    kind = known.name
    policies = [read(raw) for raw in cluster.list()]
    found = [policy for policy in policies if (kind, workload) in policy.targets]
    accepted = [policy for policy in found if _is(policy, ConditionType.ACCEPTED)]
    if len(found) > 1 and len(accepted) == 1:
        return accepted[0]
    if len(found) > 1:
        names = ", ".join(policy.metadata.name for policy in found)
        raise click.ClickException(f"{kind} {workload} is tuned by {names}: name one of these")
    if not found:
        raise click.ClickException(f"no BatchingPolicy tunes {kind} {workload}: {_why_none(cluster, known, workload)}")
    return found[0]


def _why_none(cluster: Cluster, kind: Kind, workload: str) -> str:
    """Return why a workload has no policy: it is missing, its annotations are missing or wrong, or no operator runs."""
    resource = kind.resource(workload)
    try:
        metadata = read_object(cluster.run("get", resource, "--output=json")).get("metadata", {})
    except NotFoundError:
        return f"there is none here: kubectl get {resource.partition('/')[0]} -A shows all"
    except (ForbiddenError, NoKindError):
        metadata = {}  # the user may be allowed to read only policies
    wish = asked.read(kind.name, workload, metadata.get("annotations") or {})
    if wish.problems:
        return "; ".join(wish.problems)
    if wish.spec is not None:
        return f"it has the annotations, so check that the operator {RUNS}"
    return f"kubectl annotate {resource} carpool.dev/slo-p99=50ms{cluster.flags()}{_left(cluster, kind, workload)}"


def _left(cluster: Cluster, kind: Kind, workload: str) -> str:
    """Return what the pods of a workload without a policy do; ``""``: none has a sidecar."""
    try:
        pods = list(alive(cluster.items("pods", f"--selector={asked.INJECTED}=true")))
    except (ForbiddenError, NoKindError):
        return ""
    of = f"{kind.name}/{workload}"
    names = [
        pod["metadata"]["name"] for pod in pods if (pod["metadata"].get("annotations") or {}).get(asked.TARGET) == of
    ]
    if not names:
        return ""
    resource, flags = kind.resource(workload), cluster.flags()
    selecting = "{selector}" in kind.restart
    restart = f"delete pod {' '.join(names)}" if selecting else kind.restart.format(resource=resource, name=workload)
    return (
        f". Sidecars in its pods: {len(names)}. Seconds after a policy is deleted the operator makes them pass every "
        f"request through. If it could not (kubectl events --for {resource}{flags}), they still run the last policy's "
        f"parameters: kubectl {restart}{flags}"
    )


RUNS = "runs (kubectl get pods -A -l app.kubernetes.io/part-of=carpool) and watches this namespace"
"""What to check if the operator has written no status."""


def _is(policy: Policy, kind: ConditionType) -> bool:
    condition = policy.condition(kind)
    return condition is not None and condition.status is ConditionStatus.TRUE


def is_ready(policy: Policy) -> bool:
    """Whether everything works, by a status for the present spec."""
    return policy.status.observed_generation == policy.metadata.generation and _is(policy, ConditionType.READY)


def problems(policy: Policy) -> Iterator[str]:
    """Return the problems and their fixes, a line each."""
    status, meta = policy.status, policy.metadata
    if status.observed_generation is None:
        yield f"the operator has not reported yet: check that it {RUNS}"
        return
    if status.observed_generation < meta.generation:
        yield "the operator has not seen the last edit of the spec yet; what follows is about the previous one"
    failing = {each.type: each for each in status.conditions if each.status is not ConditionStatus.TRUE}
    ready, slo = failing.pop(ConditionType.READY, None), failing.pop(ConditionType.SLO_MET, None)
    # Unknown conditions mostly result from a false one. Ready only repeats the others.
    broken = [each for each in failing.values() if each.status is ConditionStatus.FALSE]
    reported = broken or list(failing.values()) or ([] if ready is None else [ready])
    if slo is not None and slo.status is ConditionStatus.FALSE:
        reported.append(slo)
    for each in reported:
        verb = "is unknown" if each.status is ConditionStatus.UNKNOWN else "is not true"
        yield f"{each.type} {verb}: {each.reason}{': ' if each.message else ''}{each.message}"
    for each in status.conditions:
        if each.type != ConditionType.READY and each.type not in failing and each.reason in DEFECTS:
            yield f"{each.reason}: {each.message}"


def ago(written: str, now: datetime) -> str:
    """Return how long ago a Kubernetes time was: ``40s``, ``12m``, ``3h``, ``5d``; an invalid time stays as it is."""
    try:
        seconds = int((now - datetime.fromisoformat(written).astimezone(UTC)).total_seconds())
    except ValueError:
        return written
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{max(seconds, 0)}s"
