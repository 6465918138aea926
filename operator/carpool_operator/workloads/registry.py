"""All kinds of workloads. A new one is a file beside this, and a line in ``KINDS``."""

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
"""Those first whose pods belong to workloads that they made: a pod belongs to the first kind that knows it."""

BY_NAME: Mapping[str, Kind] = {kind.name: kind for kind in KINDS}
"""By what ``kind`` says."""

DEFAULT = deployment.KIND
"""Meant where none is named."""

NAMES: Mapping[str, Kind] = {
    name: kind
    for kind in KINDS
    for plain in (kind.name.lower(), kind.plural, *kind.short)
    for name in (plain, *([] if plain in kind.short else [f"{plain}.{kind.group}"]))
}
"""As kubectl lets one name them."""


class Of(NamedTuple):
    """A workload by kind and name."""

    kind: str
    name: str


def owner(pod: Mapping[str, Any]) -> Of | None:
    """Return the workload that a pod, or its metadata alone under ``metadata``, belongs to; ``None`` for none known."""
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
    """Whether a workload was made by another that is in the registry, and so is none by itself."""
    controller = meta.controller
    if controller is None or controller.kind not in BY_NAME:
        return False
    return controller.api_version.partition("/")[0] in {"", BY_NAME[controller.kind].group}


def resource(kind: str, name: str) -> str:
    """Return how kubectl names a workload; of a kind that is not known, as if it were built in."""
    return BY_NAME[kind].resource(name) if kind in BY_NAME else f"{kind.lower()}/{name}"
