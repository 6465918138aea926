"""Services that bypass the sidecar, and the commands that fix them."""

from __future__ import annotations

import json
from itertools import chain, count
from typing import TYPE_CHECKING, NamedTuple

from carpool_operator.api import annotations as names
from carpool_operator.api.injection import injection_of
from carpool_operator.injector.decide import annotations_of
from carpool_operator.workloads import registry

if TYPE_CHECKING:
    from carpool_operator.injector.decide import Json
    from carpool_operator.workloads.kind import Kind


NAMES = ("http", "http-model", "http-carpool")
"""Names for a model's port that has none, the first free one; meshes read the protocol from the beginning. A port's
name has at most 15 characters."""


class Bypass(NamedTuple):
    """A Service's port that leads to the model, and the shell command that leads it to the sidecar.

    ``name``: the ``targetPort`` that leads to the sidecar. ``named``: whether the model's port already has that name.
    ``by``: ``number``, or another ``name`` of that port.
    """

    port: int
    command: str
    name: str
    named: bool
    by: str


class PortName(NamedTuple):
    """A port name that leads to the model without a sidecar, and to the sidecar with one.

    ``given``: whether the model's port already has it; ``first``: else the shell commands that add it, ending with
    ``&&`` or words.
    """

    name: str
    given: bool
    first: str


def port_name(pod: Json, namespace: str, manifest: Json | None = None) -> PortName:
    """Return a name for an injected pod's model port: callers that use it lose no request during a rollout.

    ``manifest``: its workload's, where it is known.
    """
    status = injection_of(annotations_of(pod))
    model: Json = next((each for each in pod["spec"]["containers"] if each["name"] == status.container), {})
    handed: Json = next((each for each in model.get("ports") or [] if each["containerPort"] == status.data_port), {})
    if handed.get("name"):
        return PortName(handed["name"], given=True, first="")
    # First the name, in the workload, which rolls its pods. References to it follow when all pods have it.
    name = _free_name(pod)
    port = {"containerPort": status.port, "name": name}
    kind, _, owner = annotations_of(pod).get(names.TARGET, "").partition("/")
    workload, of = registry.resource(kind, owner), registry.BY_NAME.get(kind)
    if of is not None and not of.built_in:
        return PortName(
            name, given=False, first=_named_elsewhere(of, namespace, owner, status.container, port, manifest)
        )
    container = {"name": status.container, "ports": [port]}
    template = {"spec": {"template": {"spec": {"containers": [container]}}}}
    named = f"kubectl -n {namespace} patch {workload} -p '{_compact(template)}'"
    rolled = f"kubectl -n {namespace} rollout status {workload}"
    return PortName(name, given=False, first=f"{named} && {rolled} && ")


def _free_name(pod: Json) -> str:
    """Return a name that none of a pod's ports has.

    The API server refuses a name twice in one container. Of two containers with one name, Services find the first.
    """
    used = {port.get("name") for port in _declared(pod)}
    return next(name for name in chain(NAMES, map("http-{}".format, count(2))) if name not in used)


def _named_elsewhere(kind: Kind, namespace: str, owner: str, container: str, port: Json, manifest: Json | None) -> str:
    """Return how to name a port in a workload kind of another project.

    Strategic merges and `kubectl rollout status` are for built-in kinds only. A JSON patch uses list positions, which
    the manifest shows; its ``test`` operation fails if these changed since.
    """
    edit, then = f"kubectl -n {namespace} edit {kind.resource(owner)}", "; when its pods have rolled, "
    found = None if manifest is None else kind.container(manifest, container)
    if found is None:
        return f"name port {port['containerPort']} of container {container} {port['name']} in it: {edit}{then}"
    place, there = found
    path, listed = "/" + "/".join(place), there.get("ports") or []
    index = next((index for index, each in enumerate(listed) if each["containerPort"] == port["containerPort"]), None)
    changes = [{"op": "test", "path": f"{path}/name", "value": there["name"]}] if "name" in there else []
    if index is not None:
        where = f"{path}/ports/{index}"
        changes.append({"op": "test", "path": f"{where}/containerPort", "value": port["containerPort"]})
        changes.append({"op": "add", "path": f"{where}/name", "value": port["name"]})
    elif listed:
        changes.append({"op": "add", "path": f"{path}/ports/-", "value": port})
    else:
        changes.append({"op": "add", "path": f"{path}/ports", "value": [port]})
    return f"kubectl -n {namespace} patch {kind.resource(owner)} --type=json -p '{_compact(changes)}'{then}"


def named_ports(pod: Json) -> dict[str, int]:
    """Return a pod's named TCP ports, as Services find them: of two with one name the first."""
    found: dict[str, int] = {}
    for port in _declared(pod):
        if port.get("name") and port.get("protocol", "TCP") == "TCP":
            found.setdefault(port["name"], port["containerPort"])
    return found


def _declared(pod: Json) -> list[Json]:
    """Return the ports that a pod's containers declare, those of init containers last."""
    everyone = (*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or []))
    return [port for container in everyone for port in container.get("ports") or []]


def bypasses(service: Json, pod: Json, manifest: Json | None = None) -> list[Bypass]:
    """Return the ports of a Service that bypass an injected pod's sidecar; none if it doesn't select the pod.

    The fix is a port name. It leads to the right port with and without a sidecar, so no request is lost during a
    rollout. A headless Service's callers choose the port themselves: its port is only a hint to them. ``manifest``: the
    workload's, where it is known.
    """
    spec = service["spec"]
    selector = spec.get("selector") or {}
    labels = pod["metadata"].get("labels") or {}
    status = injection_of(annotations_of(pod))
    if not selector or not selector.items() <= labels.items() or status.port is None or status.capture:
        return []
    named = named_ports(pod)
    namespace, of = service["metadata"].get("namespace", "default"), service["metadata"]["name"]
    found = []
    for index, port in enumerate(spec.get("ports") or []):
        target = port.get("targetPort", port["port"])
        if port.get("protocol", "TCP") != "TCP":  # the sidecar passes other protocols to the model
            continue
        if named.get(target, target) != status.port:
            continue
        name = port_name(pod, namespace, manifest)
        change = [{"op": "replace", "path": f"/spec/ports/{index}/targetPort", "value": name.name}]
        command = f"{name.first}kubectl -n {namespace} patch service {of} --type=json -p '{_compact(change)}'"
        by = f"name {target}" if target in named else "number"
        found.append(Bypass(port["port"], command, name.name, name.given, by))
    return found


def _compact(plain: object) -> str:
    return json.dumps(plain, separators=(",", ":"))
