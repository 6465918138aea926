"""StatefulSet: pods name it themselves."""

from __future__ import annotations

from msgspec import Struct, field

from carpool_operator.workloads.kind import Json, Kind, State, controlled_by, reference
from carpool_operator.workloads.metadata import Meta, RollingUpdate, Selector, Template, UpdateStrategy


class _UpdateStrategy(UpdateStrategy, frozen=True, rename="camel"):
    rolling_update: RollingUpdate = RollingUpdate()


class _Spec(Struct, frozen=True):
    selector: Selector = Selector()
    template: Template = Template()
    replicas: int = 1
    strategy: _UpdateStrategy = field(default=_UpdateStrategy(), name="updateStrategy")


class _Status(Struct, frozen=True, rename="camel"):
    observed_generation: int = 0
    current_revision: str = ""
    update_revision: str = ""
    updated_replicas: int = 0


class Raw(Struct, frozen=True):
    """A StatefulSet as the server writes it."""

    metadata: Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


def state(raw: Raw) -> State:
    """Read one. It rolls until all pods from its partition on have the newest template.

    Its revisions then still differ with a partition, and with ``OnDelete`` for good.
    """
    spec, status, strategy = raw.spec, raw.status, raw.spec.strategy
    changed = status.current_revision != status.update_revision
    behind = changed and status.updated_replicas < spec.replicas - strategy.rolling_update.partition
    seen = status.observed_generation >= raw.metadata.generation
    held_back = strategy.held_back or (strategy.rolling_update.held_back if changed else "")
    rolling = not seen or (behind and not strategy.held_back)
    return State(spec.template.annotations, str(spec.selector), spec.replicas, rolling, held_back=held_back)


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
