"""Service meshes beside a sidecar: which of the pod's ports they capture, and how they changed its probes.

The admin port stays out of the mesh: the kubelet, the operator and Prometheus call it, and may be outside the mesh. The
data port is treated as the model's port was.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool_operator.injector.ports import port_number

if TYPE_CHECKING:
    from collections.abc import Mapping

Json = dict[str, Any]


ISTIO, LINKERD = "istio", "linkerd"


class _Mesh(NamedTuple):
    """``excluded``: annotation with the ports that are not captured; ``follows``: those with ports to be treated alike.

    ``proxy``: its container. ``ways``: ways to join it. Each is a list of labels and annotations, of pods and of
    Namespaces, with the values by which a pod is or will be in the mesh; any value where none is listed. The first that
    is set decides: a pod can opt out of its Namespace's. ``setup``: the init container that captures, and the flag with
    its excluded ports, for a mesh injected earlier.
    """

    name: str
    proxy: str
    ways: tuple[Mapping[str, frozenset[str]], ...]
    excluded: str
    follows: tuple[str, ...]
    setup: str
    flags: tuple[str, ...]
    of_namespace: bool


MESHES = (
    _Mesh(
        ISTIO,
        "istio-proxy",
        (
            # pkg/kube/inject/inject.go: a YAML boolean; for pods, the label comes before the annotation.
            {
                "sidecar.istio.io/inject": frozenset({"true", "yes", "y", "on"}),
                "istio-injection": frozenset({"enabled"}),
                "istio.io/rev": frozenset(),
            },
            {"istio.io/dataplane-mode": frozenset({"ambient"})},
        ),
        "traffic.sidecar.istio.io/excludeInboundPorts",
        ("traffic.sidecar.istio.io/includeInboundPorts",),
        "istio-init",
        ("-d",),
        of_namespace=False,
    ),
    _Mesh(
        LINKERD,
        "linkerd-proxy",
        ({"linkerd.io/inject": frozenset({"enabled", "ingress"})},),
        "config.linkerd.io/skip-inbound-ports",
        ("config.linkerd.io/opaque-ports",),
        "linkerd-init",
        ("--inbound-ports-to-ignore",),
        of_namespace=True,
    ),
    # With these two the kubelet probes a pod's containers on separate ports; not native sidecars.
    _Mesh(
        "kuma",
        "kuma-sidecar",
        ({"kuma.io/sidecar-injection": frozenset({"enabled", "true"})},),
        "traffic.kuma.io/exclude-inbound-ports",
        (),
        "kuma-init",
        ("--exclude-inbound-ports",),
        of_namespace=False,
    ),
    _Mesh(
        "consul",
        "consul-dataplane",
        ({"consul.hashicorp.com/connect-inject": frozenset({"true", "t", "1"})},),
        "consul.hashicorp.com/transparent-proxy-exclude-inbound-ports",
        (),
        "consul-connect-inject-init",
        (),
        of_namespace=False,
    ),
)

PROXIES = frozenset(mesh.proxy for mesh in MESHES)
"""The meshes' containers."""

_PROBERS = "ISTIO_KUBE_APP_PROBERS"


def annotated(
    written: Mapping[str, str], of_namespace: Mapping[str, str], model: int, data: int, admin: int
) -> dict[str, str]:
    """Return a pod's annotations, with the sidecar's ports added to those that meshes read.

    Linkerd's annotation on a pod replaces the one on its namespace, so ours starts with the namespace's value.
    """
    changed = dict(written)
    for mesh in MESHES:
        inherited = of_namespace if mesh.of_namespace else {}
        for name in (mesh.excluded, *mesh.follows):
            listed = written.get(name, inherited.get(name, ""))
            ports = _ports(listed)
            more = [data] if _lists(ports, model) else []
            if name == mesh.excluded:
                more.append(admin)
            if more := [port for port in more if not _lists(ports, port)]:
                changed[name] = ",".join([*ports, *map(str, more)])
    return changed


def meshes_of(pod: Json, labels: Mapping[str, str], of_namespace: Mapping[str, str]) -> list[str]:
    """Return the meshes that capture a pod's connections; ``labels`` and ``of_namespace``: the Namespace's."""
    metadata, spec = pod.get("metadata") or {}, pod["spec"]
    containers = {each["name"] for each in (*(spec.get("initContainers") or []), *spec["containers"])}
    said = {**of_namespace, **labels, **(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
    return [mesh.name for mesh in MESHES if mesh.proxy in containers or any(_leads_in(way, said) for way in mesh.ways)]


def _leads_in(way: Mapping[str, frozenset[str]], said: Mapping[str, str]) -> bool:
    """Whether the first label or annotation that is set says yes; an empty one is skipped."""
    decisive = next((name for name in way if said.get(name)), None)
    return decisive is not None and (not way[decisive] or said[decisive].lower() in way[decisive])


def exclude(spec: Json, admin: int) -> None:
    """Exclude the admin port from the capture of a mesh that was injected before."""
    for container in spec.get("initContainers") or []:
        for mesh in MESHES:
            arguments = container.get("args") or []
            if container["name"] != mesh.setup:
                continue
            for flag in mesh.flags:
                if flag in arguments[:-1]:
                    place = arguments.index(flag) + 1
                    ports = _ports(str(arguments[place]))
                    if not _lists(ports, admin):
                        arguments[place] = ",".join([*ports, str(admin)])


def original_probe(spec: Json, container: str, handler: Json) -> Json:
    """Return the kubelet's probe as it was before Istio redirected it to its agent; the same probe if it didn't."""
    path = handler.get("path", "")
    if not path.startswith(f"/app-health/{container}/"):
        return handler
    for each in (*spec["containers"], *(spec.get("initContainers") or [])):
        for variable in each.get("env") or []:
            if variable["name"] == _PROBERS:
                try:
                    found = json.loads(variable.get("value", ""))[path]["httpGet"]
                except (ValueError, KeyError, TypeError):
                    return handler
                return found if isinstance(found, dict) else handler
    return handler


def _ports(listed: str) -> list[str]:
    return [port for each in listed.split(",") if (port := each.strip())]


def _lists(ports: list[str], port: int) -> bool:
    """Whether a port is among those listed, as a number or inside a range."""
    for each in ports:
        first, _, last = each.partition("-")
        lower, upper = port_number(first), port_number(last or first)
        if lower is not None and upper is not None and lower <= port <= upper:
            return True
    return False
