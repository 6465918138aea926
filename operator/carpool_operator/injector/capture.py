"""Port capture: the pod's own kernel leads connections to the model's port to the sidecar, so no caller has to change.

An init container asks the kernel for that (``carpool_sidecar.capture``). It may do no harm: where the API server would
refuse it, or it would be in somebody's way, the pod gets its sidecar without it, and a note says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from carpool_operator.api import annotations as names
from carpool_operator.injector.containers import handlers
from carpool_operator.injector.meshes import meshes_of
from carpool_operator.injector.reasons import Note, Reason, Skipped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from carpool_operator.injector.resources import Resources
    from carpool_operator.injector.room import Surroundings

Json = dict[str, Any]

CONTAINER = "carpool-capture"

ENFORCED = "pod-security.kubernetes.io/enforce"
"""Label of a Namespace: the Pod Security Standard that its pods are held to."""
ADMITS = {None, "privileged"}
"""Standards that admit NET_ADMIN."""


def is_wanted(of_pod: Mapping[str, str]) -> bool:
    """Whether a pod asks for it. Raises ``Skipped``."""
    value = of_pod.get(names.CAPTURE, "false")
    if value not in {"true", "false"}:
        raise Skipped(Reason.BAD_ANNOTATION, f'{names.CAPTURE} is {value!r}: write "true" or "false"')
    return value == "true"


def hindrance(
    pod: Json, model: Json, port: int, declared: int | None, user: int | None, around: Surroundings
) -> Note | None:
    """Return why a pod can't have it; ``None`` where it can. Raises ``Skipped``.

    ``user``: of sidecars; ``None`` where the platform assigns one, as OpenShift does. It admits no user 0 either.
    """
    spec = pod["spec"]
    if any(each["name"] == CONTAINER for each in (*(spec.get("initContainers") or []), *spec["containers"])):
        raise Skipped(Reason.NAME_TAKEN, f"the pod has a container named {CONTAINER}: rename it")
    if around.labels is None or around.labels.get(ENFORCED) not in ADMITS or user is None:
        return Note.CAPTURE_FORBIDDEN
    if meshes_of(pod, around.labels, around.annotations):
        return Note.CAPTURE_IN_MESH
    name = None if declared is None else model["ports"][declared].get("name")
    if any(kind == "tcpSocket" and handler["port"] in {port, name} for kind, handler in handlers(model)):
        return Note.CAPTURE_TCP_PROBE
    return None


def container(image: str, pull_policy: str | None, port: int, to: int, resources: Resources) -> Json:
    """Return the init container: one capability, for as long as one command takes.

    ``resources``: what the sidecar asks for, which fits and adds nothing, since this has ended when the sidecar starts.
    """
    made = {
        "name": CONTAINER,
        "image": image,
        "command": ["carpool-capture"],
        # A kernel that can't do it leaves all as it was.
        "args": ["--optional", f"{port}={to}"],
        "resources": resources.written(),
        "securityContext": {
            # Capabilities of a container are for its user 0 alone.
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
