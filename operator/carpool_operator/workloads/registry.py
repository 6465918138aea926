"""All kinds of workloads. To add one, add a file beside this, and a line in ``KINDS``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from carpool_operator.workloads import (
    daemonset,
    deployment,
    inferenceservice,
    leaderworkerset,
    rayservice,
    replicaset,
    rollout,
    statefulset,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from carpool_operator.workloads.kind import Json, Kind
    from carpool_operator.workloads.metadata import Meta

KINDS: tuple[Kind, ...] = (
    inferenceservice.KIND,
    leaderworkerset.KIND,
    rayservice.KIND,
    rollout.KIND,
    deployment.KIND,
    statefulset.KIND,
    daemonset.KIND,
    replicaset.KIND,
)
"""Kinds that create other workloads come first: a pod belongs to the first kind that recognizes it."""

BY_NAME: Mapping[str, Kind] = {kind.name: kind for kind in KINDS}
"""By the value of ``kind``."""

DEFAULT = deployment.KIND
"""Used where none is named."""

NAMES: Mapping[str, Kind] = {
    name: kind
    for kind in KINDS
    for plain in (kind.name.lower(), kind.plural, *kind.short)
    for name in (plain, *([] if plain in kind.short else [f"{plain}.{kind.group}"]))
}
"""Names that kubectl accepts."""


class Of(NamedTuple):
    """A workload by kind and name."""

    kind: str
    name: str


def owner(pod: Mapping[str, Any]) -> Of | None:
    """Return the workload that a pod, or its metadata alone under ``metadata``, belongs to; ``None`` if unknown."""
    metadata = pod.get("metadata") or {}
    labels: Json = metadata.get("labels") or {}
    none: Json = {}
    reference = next((each for each in metadata.get("ownerReferences") or [] if each.get("controller")), none)
    for kind in KINDS:
        name = kind.owner(labels, reference)
        if name is not None:
            return Of(kind.name, name) if name else None
    return None


def is_part(meta: Meta) -> bool:
    """Whether another registered workload created this one, so that it does not count itself."""
    controller = meta.controller
    if controller is None or controller.kind not in BY_NAME:
        return False
    return controller.api_version.partition("/")[0] in {"", BY_NAME[controller.kind].group}


def resource(kind: str, name: str) -> str:
    """Return kubectl's name for a workload; an unknown kind is treated as built in."""
    return BY_NAME[kind].resource(name) if kind in BY_NAME else f"{kind.lower()}/{name}"
