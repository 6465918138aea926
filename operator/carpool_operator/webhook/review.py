"""An AdmissionReview and its answer: the request is always allowed, patched or not."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from carpool_operator.api import annotations as names
from carpool_operator.api.model import Target
from carpool_operator.injector.decide import annotations_of, decide, is_self_tuned, self_tuned, target_of
from carpool_operator.injector.jsonpatch import diff
from carpool_operator.injector.patch import patch, skipped
from carpool_operator.injector.propagate import asks, propagate
from carpool_operator.injector.quotas import UNKNOWN
from carpool_operator.injector.reasons import Reason, Skip
from carpool_operator.workloads import registry

if TYPE_CHECKING:
    from carpool_operator.injector.decide import InjectorSettings, Json
    from carpool_operator.injector.quotas import Surroundings
    from carpool_operator.workloads.kind import Kind

MAX_ANNOTATIONS = 256 * 2**10
"""Bytes of an object's annotations, names and values; the API server rejects objects with more."""
MAX_WARNING = 250
"""Most characters of a warning; kubectl shows no more than 256."""


class Answer(NamedTuple):
    """The answer: ``result`` for the metric, ``of`` for the log; ``changed``: the same object if nothing changed."""

    result: str
    of: str
    changed: Json
    warnings: tuple[str, ...] = ()


def judge(request: Json, settings: InjectorSettings, drain_key: str, *, around: Surroundings = UNKNOWN) -> Answer:
    """Decide on an admitted object: a Pod gets its sidecar, a workload's template its annotation.

    ``around``: the namespace's annotations and limits.
    """
    thing, namespace = request["object"], request.get("namespace", "")
    kind = registry.BY_NAME.get(request["kind"]["kind"])
    if kind is not None:
        return _workload(kind, thing, request.get("oldObject"), namespace, settings, around)
    metadata = thing["metadata"]
    of = f"pod {namespace}/{metadata.get('name') or metadata.get('generateName', '')}"
    decision = decide(thing, target_of(thing, namespace), settings, around=around)
    if not isinstance(decision, Skip):
        changed = patch(thing, decision, settings, drain_key, around=around)
        if _fits(changed):
            return Answer("Injected", of, changed)
        decision = Skip(Reason.NO_ROOM, "with a sidecar, the pod's annotations would be over 256 KiB: shorten them")
    if not decision.is_annotated or annotations_of(thing).get(names.SKIPPED) == str(decision):
        return Answer(decision.reason, of, thing)
    changed = skipped(thing, str(decision))
    return Answer(decision.reason, f"{of}: {decision.message}", changed if _fits(changed) else thing)


def respond(request: Json, answer: Answer) -> Json:
    """Return the AdmissionReview that answers a request."""
    response: Json = {"uid": request["uid"], "allowed": True}
    if operations := list(diff(request["object"], answer.changed)):
        response["patchType"] = "JSONPatch"
        response["patch"] = b64encode(msgspec.json.encode(operations)).decode()
    if answer.warnings:
        response["warnings"] = [warning[:MAX_WARNING] for warning in answer.warnings]
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def _fits(thing: Json) -> bool:
    """Whether an API server accepts an object's annotations."""
    return (
        sum(len(name.encode()) + len(value.encode()) for name, value in annotations_of(thing).items())
        <= MAX_ANNOTATIONS
    )


def _workload(
    kind: Kind, workload: Json, before: Json | None, namespace: str, settings: InjectorSettings, around: Surroundings
) -> Answer:
    name = workload["metadata"].get("name") or workload["metadata"].get("generateName", "")
    changed = propagate(kind, workload, before)
    template = kind.pod(changed)
    # Warn the user at once with the message that the operator and the pods will report.
    problems = [
        *names.read(kind.name, name, annotations_of(workload)).problems,
        *names.misplaced({} if template is None else annotations_of(template)),
    ]
    if asks(workload) and template is not None and is_self_tuned(template):
        problems.append(str(self_tuned(namespace, kind.resource(name))))
    result = "Unchanged"
    if changed is not workload:
        result = "Propagated" if asks(workload) else "TakenOut"
    if result == "Propagated" and template is not None:
        decision = decide(template, Target(namespace, kind.name, name), settings, around=around)
        if isinstance(decision, Skip) and decision.is_annotated:
            problems.append(f"its pods will have no sidecar: {decision}")
    return Answer(
        result, f"{kind.name.lower()} {namespace}/{name}", changed, tuple(f"carpool: {problem}" for problem in problems)
    )
