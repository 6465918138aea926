"""Which container is the model's, and which of its ports speaks HTTP/1.1."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from carpool_operator.api import annotations as names
from carpool_operator.injector.meshes import PROXIES
from carpool_operator.injector.ports import port_number
from carpool_operator.injector.reasons import Reason, Skipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Json = dict[str, Any]

DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"

QUEUE_PROXY = "queue-proxy"
"""Knative's proxy; it calls the model itself."""

HELPERS = frozenset({
    *PROXIES, QUEUE_PROXY, "envoy", "consul-dataplane", "kuma-sidecar", "daprd", "vault-agent", "datadog-agent",
    "agent", "fluent-bit", "fluentd", "filebeat", "otc-container", "cloud-sql-proxy", "linkerd-debug",
})  # fmt: skip
"""Containers that other programs add to pods, by their names."""

_DEVICE = re.compile(r"(nvidia|amd|gpu\.intel)\.com/.+|habana\.ai/.+|google\.com/tpu|aws\.amazon\.com/neuron.*")
_PORTS = frozenset({80, 3000, 5000, 8000, 8080, 8085, 8501, 8888, 9000, 9001, 11434, 30000})
"""Default ports of model servers: TGI, BentoML, MLflow, Triton and vLLM and Ray, KServe and MLServer, TorchServe,
TensorFlow Serving, OpenVINO, Seldon, Ollama, SGLang."""
_PORT_NAMES = re.compile(r"(http|http1|rest|web|api|predict\w*|infer\w*|serve|serving|model)(-.*)?")
_CONTAINERS = re.compile(
    r"kserve-container|(triton|tritonserver|vllm|tgi|text-generation-inference|tei|mlserver|torchserve|tensorflow-serving"
    r"|tf-?serving|ovms|ollama|sglang|bentoml|model|server|predictor|inference)(-.*)?"
)

# The protocol in a port's name, as service meshes read names: <protocol>[-<suffix>].
_OTHER_PROTOCOLS = re.compile(
    r"(grpc(-web)?|http2|h2c?|https|tls|mongo|redis|mysql|udp|metrics|prometheus|prom|admin|debug|health\w*)(-.*)?"
    r"|.*-(metrics|prom|grpc)"
)


def model_container(spec: Json, wanted: str | None, default: str | None) -> Json:
    """Return the model's container: the one named by annotation, else the only candidate.

    Raises ``Skipped`` if there is none, or several.
    """
    containers: list[Json] = spec["containers"]
    known = ", ".join(each["name"] for each in containers)
    if wanted is not None:
        for each in containers:
            if each["name"] == wanted:
                return each
        raise Skipped(Reason.UNKNOWN_CONTAINER, f"{names.CONTAINER} is {wanted!r}, the pod's containers are: {known}")
    possible = candidates(spec, default)
    if len(possible) == 1:
        return possible[0]
    if not possible:
        raise ValueError("a pod has at least one container")
    raise Skipped(
        Reason.AMBIGUOUS_CONTAINER,
        f"the model may be in {_listed([each['name'] for each in possible])}: "
        f"name its container with {names.CONTAINER} in the pod template",
    )


def candidates(spec: Json, default: str | None) -> list[Json]:
    """Return the containers that may be the model's, if no annotation names it.

    1. Those that ask for a GPU, whatever their names; all where none does.
    2. Without those that other programs add.
    3. The one that kubectl takes by default.
    4. Those with a known name, or a port that has a known number or name.
    """
    containers: list[Json] = spec["containers"]
    found = [each for each in containers if _asks_for_device(each)] or containers
    found = [each for each in found if each["name"] not in HELPERS] or found
    if len(found) > 1:
        found = [each for each in found if each["name"] == default] or found
    if len(found) > 1:
        found = [each for each in found if _is_familiar(each)] or found
    return found


def model_port(container: Json, wanted: str | None) -> tuple[int, int | None]:
    """Return the port and its index in ``ports``, ``None`` if it is not listed there. Raises ``Skipped``."""
    ports: list[Json] = container.get("ports") or []
    listed = ", ".join(port.get("name") or str(port["containerPort"]) for port in ports) or "none"
    # 1. The named one
    if wanted is not None:
        return _named_port(container, ports, listed, wanted)
    # 2. The first that may speak HTTP/1.1, known ports first
    if not ports:
        raise Skipped(
            Reason.NO_PORT,
            f"container {container['name']} names no port: add the one that it serves on to its ports, "
            f"or annotate the template with {names.PORT}",
        )
    if not any(_is_tcp(port) for port in ports):
        raise Skipped(Reason.NOT_TCP, f"no port of {container['name']} is TCP: {listed}")
    for index, port in sorted(enumerate(ports), key=lambda each: not _is_known(each[1])):
        if _may_be_http(port) and other_protocol(container, port["containerPort"], index) is None:
            return port["containerPort"], index
    raise Skipped(
        Reason.NOT_HTTP,
        f"no port of {container['name']} is for HTTP/1.1, by their names and probes: {listed}; "
        f"name the one that is with {names.PORT}",
    )


def other_protocol(container: Json, port: int, declared: int | None) -> str | None:
    """Return the port's protocol according to its probes, if it is not HTTP/1.1."""
    name = None if declared is None else container["ports"][declared].get("name")
    for kind, handler in handlers(container):
        if handler["port"] == port or (name is not None and handler["port"] == name):
            if kind == "grpc":
                return "speaks gRPC, by its probe"
            if handler.get("scheme") == "HTTPS":
                return "speaks TLS, by its probe"
    return None


def handlers(container: Json) -> Iterator[tuple[str, Json]]:
    """Yield the kubelet's calls to a container: ``httpGet``, ``tcpSocket`` and ``grpc`` of its probes and hooks."""
    probes = [container.get(name) for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    lifecycle = container.get("lifecycle") or {}
    for owner in (*probes, lifecycle.get("postStart"), lifecycle.get("preStop")):
        for kind in ("httpGet", "tcpSocket", "grpc"):
            if owner and owner.get(kind):
                yield kind, owner[kind]


def _named_port(container: Json, ports: Sequence[Json], listed: str, wanted: str) -> tuple[int, int | None]:
    number = port_number(wanted)
    named = [
        (index, port)
        for index, port in enumerate(ports)
        if wanted == port.get("name") or number == port["containerPort"]
    ]
    for index, port in named:
        if _is_tcp(port):
            return port["containerPort"], index
    if named:
        raise Skipped(Reason.NOT_TCP, f"port {wanted} of {container['name']} is not TCP")
    if number is not None and 1 <= number <= 65535:
        return number, None
    if wanted.isdecimal():
        raise Skipped(Reason.BAD_ANNOTATION, f"{names.PORT} is {wanted!r}: write a port's name or number")
    raise Skipped(Reason.UNKNOWN_PORT, f"{names.PORT} is {wanted!r}, the ports of {container['name']}: {listed}")


def _asks_for_device(container: Json) -> bool:
    resources = container.get("resources") or {}
    asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    return bool(resources.get("claims")) or any(
        _DEVICE.fullmatch(name) and str(count) != "0" for name, count in asked.items()
    )


def _is_familiar(container: Json) -> bool:
    return _CONTAINERS.fullmatch(container["name"]) is not None or any(map(_is_known, container.get("ports") or []))


def _is_known(port: Json) -> bool:
    known = port["containerPort"] in _PORTS or _PORT_NAMES.fullmatch(port.get("name") or "") is not None
    return known and _may_be_http(port)


def _is_tcp(port: Json) -> bool:
    return bool(port.get("protocol", "TCP") == "TCP")


def _may_be_http(port: Json) -> bool:
    return _is_tcp(port) and _OTHER_PROTOCOLS.fullmatch(port.get("name") or "") is None


def _listed(found: Sequence[str]) -> str:
    return " or ".join(found) if len(found) < 3 else f"{', '.join(found[:-1])} or {found[-1]}"
