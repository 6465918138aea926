"""Fixes for pods that get no sidecar, or get one without port capture: commands where one suffices."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from carpool_cli.kubectl.preflight.dry_run import asking, judged, surroundings
from carpool_cli.manifest_checks.findings import compact
from carpool_operator.api import annotations as names
from carpool_operator.injector.capture import ENFORCED
from carpool_operator.injector.containers import (
    DEFAULT_CONTAINER,
    candidates,
    handlers,
    model_container,
    other_protocol,
)
from carpool_operator.injector.decide import annotations_of
from carpool_operator.injector.reasons import NOTES, REASONS, Note, Reason, Skip, Skipped

if TYPE_CHECKING:
    from carpool_cli.manifest_checks.objects import Around, Json, Subject

LEAST = {names.CPU: "100m", names.MEMORY: "128Mi"}
"""Least resources of a sidecar."""

_OTHERS = {names.DATA_PORT: 24080, names.ADMIN_PORT: 24090}
"""Other ports for a sidecar, if its default ones are taken."""

_PORT_ARGUMENT = re.compile(r"--(?:http[-_])?port[= ]([0-9]{2,5})\b")


def smaller(subject: Subject) -> str:
    """Return the command that reduces the sidecar's requests."""
    return f"{subject.annotate_pods(LEAST)} asks for the least; or raise the limit that is named"


def of_refusal(subject: Subject, refused: str) -> str:
    """Return how to make room for a sidecar that the server rejects."""
    if re.search(r"quota|LimitRange|maximum|minimum|ratio", refused):
        return smaller(subject)
    # Gatekeeper's and Kyverno's libraries have such policies; by default a sidecar has no CPU limit.
    if re.search(r"cpu.*limit|limit.*cpu", refused, re.IGNORECASE):
        return f"{subject.annotate_pods({names.CPU_LIMIT: '1'})} gives the sidecar a CPU limit"
    if re.search(r"image|registr|repositor", refused, re.IGNORECASE):
        return "set the chart's sidecar.image.repository to a registry that the message allows"
    return "change what the message names; the sidecar itself meets the Pod Security Standard `restricted`"


def of_reason(subject: Subject, reason: str, message: str, pod: Json, near: Around) -> str:
    """Return how a pod can get its sidecar. ``message``: the injector's, with the reason."""
    match reason:
        case Reason.HOST_NETWORK if subject.kind.templates == ("spec.template",):
            patch = compact({"spec": {"template": {"spec": {"hostNetwork": False}}}})
            return f"{subject.kubectl} patch {subject.resource}{subject.kind.merge} -p '{patch}'"
        case Reason.NO_ROOM:
            return _room(subject, pod, near)
        case Reason.AMBIGUOUS_CONTAINER | Reason.UNKNOWN_CONTAINER:
            return _container(subject, pod)
        case Reason.NO_PORT | Reason.UNKNOWN_PORT | Reason.NOT_TCP | Reason.NOT_HTTP:
            return _port(subject, reason, pod, near)
        case Reason.PORT_TAKEN:
            return _other_ports(subject, message, pod)
    return REASONS[Reason(reason)].fix if reason in set(Reason) else "see docs/reference/injection.md"


def of_capture(subject: Subject, note: Note) -> str:
    """Return how to get the model's port captured, or how to do without."""
    without = f"{subject.annotate_pods({names.CAPTURE: 'false'})} does without capture"
    match note:
        case Note.CAPTURE_FORBIDDEN:
            return f"kubectl label namespace {subject.namespace} {ENFORCED}=privileged --overwrite; or {without}"
        case Note.CAPTURE_IN_MESH:
            return f"{without}: let Services name the port then"
    return f"{subject.kubectl} edit {subject.resource}: {NOTES[note].fix}"


def _room(subject: Subject, pod: Json, near: Around) -> str:
    """Return how to make room for a sidecar: a smaller one, unless the injector would leave that out, too."""
    left_out = judged(asking(pod, LEAST), surroundings(near), subject.namespace)
    if isinstance(left_out, Skip) and left_out.reason is Reason.NO_ROOM:
        return "do what the message says: the smallest sidecar has no room either"
    return smaller(subject)


def _container(subject: Subject, pod: Json) -> str:
    possible = candidates(pod["spec"], annotations_of(pod).get(DEFAULT_CONTAINER))
    # A container that serves mostly names its ports.
    first, *others = [each["name"] for each in sorted(possible, key=lambda each: not each.get("ports"))]
    command = subject.annotate_pods({names.CONTAINER: first})
    return f"{command}; or, if the model is in another, write {' or '.join(others)} there" if others else command


def _port(subject: Subject, reason: str, pod: Json, near: Around) -> str:
    written = annotations_of(pod)
    try:
        model = model_container(pod["spec"], written.get(names.CONTAINER), written.get(DEFAULT_CONTAINER))
    except Skipped:
        return REASONS[Reason(reason)].fix
    ports = [
        each["containerPort"]
        for index, each in enumerate(model.get("ports") or [])
        if each.get("protocol", "TCP") == "TCP" and other_protocol(model, each["containerPort"], index) is None
    ]
    if reason == Reason.NO_PORT:
        ports = _guesses(pod, model, near)
    if not ports:
        edit = f"{subject.kubectl} edit {subject.resource}"
        return f"{edit}: {REASONS[Reason(reason)].fix}"
    first, *others = [str(each) for each in ports]
    another = f"; or write {' or '.join(others)} there" if others else ""
    return f"{subject.annotate_pods({names.PORT: first})}{another}; it has to be the port on which it serves HTTP/1.1"


def _guesses(pod: Json, model: Json, near: Around) -> list[int]:
    """Return likely ports of a container that names none: those of its probes, Services and arguments."""
    labels = pod["metadata"].get("labels") or {}
    probed = [handler["port"] for _, handler in handlers(model) if other_protocol(model, handler["port"], None) is None]
    leading = [
        port.get("targetPort", port["port"])
        for service in near.services
        if (selector := service["spec"].get("selector")) and selector.items() <= labels.items()
        for port in service["spec"].get("ports") or []
    ]
    arguments = " ".join([*(model.get("command") or []), *(model.get("args") or [])])
    passed = [int(each) for each in _PORT_ARGUMENT.findall(arguments)]
    return list(dict.fromkeys(each for each in (*probed, *leading, *passed) if isinstance(each, int)))


def _other_ports(subject: Subject, message: str, pod: Json) -> str:
    everyone = [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]
    used = {port["containerPort"] for each in everyone for port in each.get("ports") or []}
    taken = [name for name in _OTHERS if name in message] or list(_OTHERS)
    return subject.annotate_pods({name: str(_free(_OTHERS[name], used)) for name in taken})


def _free(port: int, used: set[int]) -> int:
    while port in used:
        port += 1000
    return port
