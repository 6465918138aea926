"""Deployment: pods name its ReplicaSet, which is named after it and the template's hash."""

from __future__ import annotations

from msgspec import Struct, field

from carpool_operator.workloads.kind import Json, Kind, State, controlled_by, reference
from carpool_operator.workloads.metadata import Condition, Meta, Selector, Template, refused


class _Spec(Struct, frozen=True):
    selector: Selector = Selector()
    template: Template = Template()
    replicas: int = 1
    paused: bool = False


class _Status(Struct, frozen=True, rename="camel"):
    observed_generation: int = 0
    replicas: int = 0
    updated_replicas: int = 0
    conditions: list[Condition] = field(default_factory=list)


class Raw(Struct, frozen=True):
    """A Deployment as the server writes it."""

    metadata: Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


def state(raw: Raw) -> State:
    """Read one. It rolls while pods of the old template are there, or some of the new one are not, unless paused."""
    spec, status = raw.spec, raw.status
    behind = status.updated_replicas < max(spec.replicas, status.replicas)
    rolling = status.observed_generation < raw.metadata.generation or (behind and not spec.paused)
    held_back = "its rollout is paused: resume it" if spec.paused else ""
    no_room = refused(status.conditions)
    return State(spec.template.annotations, str(spec.selector), spec.replicas, rolling, no_room, held_back)


def owner(labels: Json, by: Json) -> str | None:
    """Return the ReplicaSet's name without the hash."""
    suffix = f"-{labels.get('pod-template-hash')}"
    name = str(by.get("name", ""))
    return name.removesuffix(suffix) if controlled_by(by, "apps", "ReplicaSet") and name.endswith(suffix) else None


KIND = Kind(
    name="Deployment",
    group="apps",
    version="v1",
    plural="deployments",
    short=("deploy",),
    raw=Raw,
    state=state,
    owner=owner,
    made=lambda name: ({"pod-template-hash": "0"}, reference("apps/v1", "ReplicaSet", f"{name}-0")),
    revision="pod-template-hash",
    templates=("spec.template",),
    annotating=True,
)
