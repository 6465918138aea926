"""Port capture: the pod's kernel redirects connections to the model's port to the sidecar; callers need no change.

An init container asks the kernel for that (``carpool_sidecar.capture``). It must do no harm: if the API server would
reject it, or it would conflict with a mesh, the pod gets its sidecar without it, and a note says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from carpool_operator.api import annotations as names
from carpool_operator.injector.containers import handlers
from carpool_operator.injector.meshes import meshes_of
from carpool_operator.injector.reasons import Note, Reason, Skipped

if TYPE_CHECKING:
    from carpool_operator.injector.quotas import Surroundings
    from carpool_operator.injector.resources import Resources, Written

Json = dict[str, Any]

CONTAINER = "carpool-capture"

ENFORCED = "pod-security.kubernetes.io/enforce"
"""Label of a Namespace: the Pod Security Standard that it enforces."""
ADMITS = {None, "privileged"}
"""Standards that allow NET_ADMIN."""


def is_wanted(written: Written) -> bool:
    """Whether a pod asks for it. Raises ``Skipped``."""
    value = written.values.get(names.CAPTURE, "false")
    if value not in {"true", "false"}:
        name = written.place(names.CAPTURE)
        raise Skipped(Reason.BAD_ANNOTATION, f'{name} is {value!r}: write "true" or "false"')
    return value == "true"


def hindrance(pod: Json, port: int, user: int | None, around: Surroundings) -> Note | None:
    """Return why a pod can't have it for the model's ``port``; ``None`` where it can. Raises ``Skipped``.

    ``user``: of sidecars; ``None`` where the platform assigns one, as OpenShift does. Such a platform does not allow
    user 0 either.
    """
    spec = pod["spec"]
    containers = (*(spec.get("initContainers") or []), *spec["containers"])
    if any(each["name"] == CONTAINER for each in containers):
        raise Skipped(Reason.NAME_TAKEN, f"the pod has a container named {CONTAINER}: rename it")
    if around.labels is None or around.labels.get(ENFORCED) not in ADMITS or user is None:
        return Note.CAPTURE_FORBIDDEN
    if meshes_of(pod, around.labels, around.annotations):
        return Note.CAPTURE_IN_MESH
    if any(_connects(each, port) for each in containers):
        return Note.CAPTURE_TCP_PROBE
    return None


def _connects(container: Json, port: int) -> bool:
    """Whether a container has a ``tcpSocket`` probe of a port of the pod. All its containers share one address."""
    ports = container.get("ports") or []
    names_of_it = {each.get("name") for each in ports if each["containerPort"] == port}
    called = (handler["port"] for kind, handler in handlers(container) if kind == "tcpSocket")
    return any(each == port or each in names_of_it for each in called)


def container(image: str, pull_policy: str | None, port: int, to: int, resources: Resources) -> Json:
    """Return the init container: one capability, only while one command runs.

    ``resources``: the sidecar's requests. They fit and add nothing, since this container ends before the sidecar
    starts.
    """
    made = {
        "name": CONTAINER,
        "image": image,
        "command": ["carpool-capture"],
        # A kernel without support leaves everything unchanged.
        "args": ["--optional", f"{port}={to}"],
        "resources": resources.written(),
        "securityContext": {
            # A container's capabilities apply only to its user 0.
            "runAsUser": 0,
            "runAsGroup": 0,
            "runAsNonRoot": False,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if pull_policy is not None:
        made["imagePullPolicy"] = pull_policy
    return made
