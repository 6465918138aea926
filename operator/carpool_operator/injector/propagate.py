"""A workload's annotation in its pod template: put there at admission, and taken out again with it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from carpool_operator.api import annotations as names
from carpool_operator.injector.decide import annotations_of
from carpool_operator.workloads.kind import at

if TYPE_CHECKING:
    from carpool_operator.injector.decide import Json
    from carpool_operator.workloads.kind import Kind


def asks(workload: Json) -> bool:
    """Whether a workload's own annotations ask for a sidecar; their values are the operator's to judge.

    By presence alone: putting a typo right rolls no pods.
    """
    return names.asks(annotations_of(workload))


def propagate(kind: Kind, workload: Json) -> Json:
    """Return the workload as it should be: the same object where nothing is to be done.

    What a person wrote in the template stays; only the value put there at admission is taken out.
    """
    path = kind.template(workload)
    if path is None or not kind.annotating:
        return workload
    there = (at(workload, path) or {}).get(names.INJECT)
    if asks(workload):
        if there is not None:
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


def _put(thing: Json, path: tuple[str, ...], value: Json) -> None:
    """Put a value at a path, and what it lies in, too, where that is missing or null."""
    *steps, last = path
    for step in steps:
        thing[step] = thing.get(step) or {}
        thing = thing[step]
    thing[last] = value
