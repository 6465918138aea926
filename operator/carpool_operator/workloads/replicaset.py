"""ReplicaSet without an owner. Its pods never roll: users delete them after a change."""

from __future__ import annotations

from msgspec import Struct, field

from carpool_operator.workloads.kind import Json, Kind, State, controlled_by, reference
from carpool_operator.workloads.metadata import Condition, Meta, Selector, Template, refused


class _Spec(Struct, frozen=True):
    selector: Selector = Selector()
    template: Template = Template()
    replicas: int = 1


class _Status(Struct, frozen=True, rename="camel"):
    observed_generation: int = 0
    conditions: list[Condition] = field(default_factory=list)


class Raw(Struct, frozen=True):
    """A ReplicaSet as the server writes it."""

    metadata: Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


def state(raw: Raw) -> State:
    """Read one."""
    spec = raw.spec
    rolling = raw.status.observed_generation < raw.metadata.generation
    return State(spec.template.annotations, str(spec.selector), spec.replicas, rolling, refused(raw.status.conditions))


def owner(labels: Json, by: Json) -> str | None:
    """Return the ReplicaSet that the pod names, unless a label has the hash of a workload that may own it."""
    made = "pod-template-hash" in labels or "rollouts-pod-template-hash" in labels
    return by["name"] if controlled_by(by, "apps", "ReplicaSet") and not made else None


KIND = Kind(
    name="ReplicaSet",
    group="apps",
    version="v1",
    plural="replicasets",
    short=("rs",),
    raw=Raw,
    state=state,
    owner=owner,
    made=lambda name: ({}, reference("apps/v1", "ReplicaSet", name)),
    # It has one template at a time, and no pod names its template.
    revision="pod-template-hash",
    templates=("spec.template",),
    annotating=False,
    restart="delete pods --selector='{selector}'",
    remark="Those that no Deployment or Rollout made. Its pods never roll: delete them after a change.",
)
