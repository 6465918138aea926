"""The pods in ``pods/*.yaml``: as clusters have them, each with what is to become of it.

``pod``: what is admitted, but for its owner and the annotation that asks. ``namespace``: what is around it, if
anything. ``expect``: ``container`` and ``port``, with ``notes`` (by default none), ``has`` (values by place) and
``config`` (a part of the sidecar's); or ``skipped`` with a part of the ``fix``.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from carpool_operator.injector.quotas import Surroundings

Json = dict[str, Any]

OWNER = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web", "uid": "u", "controller": True}


class Case(NamedTuple):
    """One pod."""

    name: str
    pod: Json
    around: Surroundings
    expect: Json


def cases() -> list[Case]:
    """Return all pods, each asking for a sidecar unless it says otherwise."""
    found = []
    for path in sorted((Path(__file__).parent / "pods").glob("*.yaml")):
        for each in yaml.safe_load_all(path.read_text()):
            pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(each["pod"])}
            metadata = pod["metadata"] = {"name": "web-0", "ownerReferences": [OWNER], **pod.get("metadata", {})}
            metadata["annotations"] = {"carpool.dev/inject": "true", **metadata.get("annotations", {})}
            around = each.get("namespace", {})
            surroundings = Surroundings(
                around.get("annotations", {}), tuple(around.get("limitRanges", ())), tuple(around.get("quotas", ()))
            )
            found.append(Case(each["name"], pod, surroundings, each["expect"]))
    return found


def at(thing: Any, steps: list[Any]) -> Any:
    """Return what is at a place; members of lists by name or by position."""
    for step in steps:
        if isinstance(thing, list) and isinstance(step, str):
            thing = next(each for each in thing if each["name"] == step)
        else:
            thing = thing[step]
    return thing
