"""Copies a workload's annotation to its pod template at admission, and removes it again with it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from carpool_operator.api import annotations as names
from carpool_operator.injector.decide import annotations_of, has_sidecar
from carpool_operator.workloads.kind import at

if TYPE_CHECKING:
    from carpool_operator.injector.decide import Json
    from carpool_operator.workloads.kind import Kind


def asks(workload: Json) -> bool:
    """Whether a workload's own annotations ask for a sidecar, with valid values or not.

    A value that becomes invalid takes no sidecar out: its pods would roll because of a typo.
    """
    return names.asks(annotations_of(workload))


def propagate(kind: Kind, workload: Json, before: Json | None = None) -> Json:
    """Return the workload as it should be: the same object if nothing changes. ``before``: as it is in the cluster.

    Pods roll for their sidecars once an annotation that asks for them is valid. If they have them already, they keep
    them: who replaces the whole object does not write the template's annotation.
    Users' annotations in the template stay; only the value added at admission is removed.
    """
    path = kind.template(workload)
    if path is None or not kind.annotating:
        return workload
    there = (at(workload, path) or {}).get(names.INJECT)
    if asks(workload):
        had = before is not None and (at(before, path) or {}).get(names.INJECT) == names.PROPAGATED
        valid = had or names.asks_validly(annotations_of(workload))
        if there is not None or not valid or _is_injected(kind.pod(workload)):
            return workload
        changed = copy.deepcopy(workload)
        _put(changed, path, {**(at(changed, path) or {}), names.INJECT: names.PROPAGATED})
        return changed
    if there != names.PROPAGATED:
        return workload
    changed = copy.deepcopy(workload)
    annotations = at(changed, path)
    del annotations[names.INJECT]
    if not annotations:
        del at(changed, path[:-1])[path[-1]]
    return changed


def _is_injected(template: Json | None) -> bool:
    """Whether ``carpool inject`` added a sidecar to a template: an annotation would roll its pods for nothing."""
    return template is not None and names.STATUS in annotations_of(template) and has_sidecar(template)


def _put(thing: Json, path: tuple[str, ...], value: Json) -> None:
    """Set a value at a path, and create missing or null parents."""
    *steps, last = path
    for step in steps:
        thing[step] = thing.get(step) or {}
        thing = thing[step]
    thing[last] = value
