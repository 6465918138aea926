"""Services that lead past the sidecar, and the commands that put it right."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from carpool_operator.api import annotations as names
from carpool_operator.api.injection import injection_of
from carpool_operator.injector.decide import annotations_of
from carpool_operator.workloads import registry

if TYPE_CHECKING:
    from carpool_operator.injector.decide import Json


class Bypass(NamedTuple):
    """A Service's port that leads to the model by number, and the shell command after which it doesn't.

    ``name``: the ``targetPort`` that leads to the sidecar. ``named``: whether the model's port has that name yet.
    """

    port: int
    command: str
    name: str
    named: bool


class PortName(NamedTuple):
    """A name that leads to the model without a sidecar, and to the sidecar with one.

    ``given``: whether the model's port has it yet; ``first``: else the shell commands that give it, with ``&&`` behind.
    """

    name: str
    given: bool
    first: str


def port_name(pod: Json, namespace: str) -> PortName:
    """Return a name for the model's port, of an injected pod: what goes by it loses nothing while pods roll."""
    status = injection_of(annotations_of(pod))
    model: Json = next((each for each in pod["spec"]["containers"] if each["name"] == status.container), {})
    handed: Json = next((each for each in model.get("ports") or [] if each["containerPort"] == status.data_port), {})
    if handed.get("name"):
        return PortName(handed["name"], given=True, first="")
    # First the name, in the workload; its pods roll. What goes by it follows when all have it.
    name = "http"
    kind, _, owner = annotations_of(pod).get(names.TARGET, "").partition("/")
    workload = registry.resource(kind, owner)
    container = {"name": status.container, "ports": [{"containerPort": status.port, "name": name}]}
    template = {"spec": {"template": {"spec": {"containers": [container]}}}}
    named = f"kubectl -n {namespace} patch {workload} -p '{_compact(template)}'"
    rolled = f"kubectl -n {namespace} rollout status {workload}"
    return PortName(name, given=False, first=f"{named} && {rolled} && ")


def bypasses(service: Json, pod: Json) -> list[Bypass]:
    """Return the ports of a Service that lead past an injected pod's sidecar; none where it doesn't select the pod.

    The fix is a name, which leads to the right port with and without a sidecar: nothing is lost while pods roll.
    A headless Service's callers choose the port themselves: what it says is only a hint to them.
    """
    spec = service["spec"]
    selector = spec.get("selector") or {}
    labels = pod["metadata"].get("labels") or {}
    status = injection_of(annotations_of(pod))
    if not selector or not selector.items() <= labels.items() or status.port is None or status.capture:
        return []
    namespace, of = service["metadata"].get("namespace", "default"), service["metadata"]["name"]
    found = []
    for index, port in enumerate(spec.get("ports") or []):
        if port.get("targetPort", port["port"]) != status.port:
            continue
        name = port_name(pod, namespace)
        change = [{"op": "replace", "path": f"/spec/ports/{index}/targetPort", "value": name.name}]
        command = f"{name.first}kubectl -n {namespace} patch service {of} --type=json -p '{_compact(change)}'"
        found.append(Bypass(port["port"], command, name.name, name.given))
    return found


def _compact(plain: object) -> str:
    return json.dumps(plain, separators=(",", ":"))
