"""StatefulSet: pods name it themselves."""

from __future__ import annotations

from msgspec import Struct

from carpool_operator.workloads.kind import Json, Kind, State, controlled_by, reference
from carpool_operator.workloads.metadata import Meta, Selector, Template


class _Spec(Struct, frozen=True):
    selector: Selector = Selector()
    template: Template = Template()
    replicas: int = 1


class _Status(Struct, frozen=True, rename="camel"):
    observed_generation: int = 0
    current_revision: str = ""
    update_revision: str = ""


class Raw(Struct, frozen=True):
    """A StatefulSet as the server writes it."""

    metadata: Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


def state(raw: Raw) -> State:
    """Read one. It rolls while its revisions differ."""
    spec, status = raw.spec, raw.status
    rolling = status.observed_generation < raw.metadata.generation or status.current_revision != status.update_revision
    return State(spec.template.annotations, str(spec.selector), spec.replicas, rolling)


def owner(_: Json, by: Json) -> str | None:
    """Return the StatefulSet that the pod names."""
    return by["name"] if controlled_by(by, "apps", "StatefulSet") else None


KIND = Kind(
    name="StatefulSet",
    group="apps",
    version="v1",
    plural="statefulsets",
    short=("sts",),
    raw=Raw,
    state=state,
    owner=owner,
    maker=("StatefulSet", "{name}"),
    made=lambda name: ({}, reference("apps/v1", "StatefulSet", name)),
    revision="controller-revision-hash",
    templates=("spec.template",),
    annotating=True,
    remark="With `updateStrategy: OnDelete` its pods get their sidecars when you delete them.",
)
