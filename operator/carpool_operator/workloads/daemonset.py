"""DaemonSet: pods name it themselves; its status has the desired number."""

from __future__ import annotations

from msgspec import Struct, field

from carpool_operator.workloads.kind import Json, Kind, State, controlled_by, reference
from carpool_operator.workloads.metadata import Meta, Selector, Template, UpdateStrategy


class _Spec(Struct, frozen=True):
    selector: Selector = Selector()
    template: Template = Template()
    strategy: UpdateStrategy = field(default=UpdateStrategy(), name="updateStrategy")


class _Status(Struct, frozen=True, rename="camel"):
    observed_generation: int = 0
    desired_number_scheduled: int = 0
    updated_number_scheduled: int = 0


class Raw(Struct, frozen=True):
    """A DaemonSet as the server writes it."""

    metadata: Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


def state(raw: Raw) -> State:
    """Read one. It rolls while some node has no pod of the newest template, unless users delete its pods."""
    spec, status = raw.spec, raw.status
    wanted, held_back = status.desired_number_scheduled, spec.strategy.held_back
    behind = status.updated_number_scheduled < wanted and not held_back
    rolling = status.observed_generation < raw.metadata.generation or behind
    return State(spec.template.annotations, str(spec.selector), wanted, rolling, held_back=held_back)


def owner(_: Json, by: Json) -> str | None:
    """Return the DaemonSet that the pod names."""
    return by["name"] if controlled_by(by, "apps", "DaemonSet") else None


KIND = Kind(
    name="DaemonSet",
    group="apps",
    version="v1",
    plural="daemonsets",
    short=("ds",),
    raw=Raw,
    state=state,
    owner=owner,
    maker=("DaemonSet", "{name}"),
    made=lambda name: ({}, reference("apps/v1", "DaemonSet", name)),
    revision="controller-revision-hash",
    templates=("spec.template",),
    annotating=True,
    remark="With `updateStrategy: OnDelete` its pods get their sidecars when you delete them.",
)
