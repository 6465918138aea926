"""Who gets a sidecar, and in front of what: pure functions of the pod."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from msgspec import Struct

from carpool.policy.durations import Quantity
from carpool.policy.spec import BatchingPolicy
from carpool_operator.api import annotations as names
from carpool_operator.api.model import Target
from carpool_operator.injector.reasons import Reason, Skip
from carpool_operator.workloads import registry

if TYPE_CHECKING:
    from collections.abc import Iterator

Json: TypeAlias = dict[str, Any]
"""An object of the Kubernetes API, as JSON has it."""

SIDECAR = "carpool"
"""The sidecar's container."""
VOLUME = "carpool-change"
"""Where the operator's durable word is mounted."""
DATA_PORT, ADMIN_PORT = 15080, 15090
"""The sidecar's. Requests come by the first; the operator, probes and the drain by the second."""

MIN_MEMORY = Quantity(128 * 2**20)
"""Less is no room for the process, its tuner and one request."""

# What a port's name says of it, as service meshes read names: <protocol>[-<suffix>].
_OTHER_PROTOCOLS = re.compile(r"(grpc|http2|h2c?|https|tls|mongo|redis|mysql|metrics|prometheus|prom)(-.*)?$")
_CPU = re.compile(r"[0-9]{1,6}m?|[0-9]{1,3}\.[0-9]{1,3}")


class Settings(Struct, frozen=True, kw_only=True):
    """What holds for every sidecar of a cluster.

    ``public_key``: the operator's, 64 hex digits; ``None`` where it is not known. ``policy``: what sidecars tune
    themselves to, where no operator does. ``user``: numeric, or ``None`` where the platform assigns one.
    """

    image: str
    version: str
    pull_policy: str | None = None
    public_key: str | None = None
    policy: BatchingPolicy | None = None
    user: int | None = 65532
    cpu: str = "500m"
    memory: Quantity = Quantity(512 * 2**20)


class Inject(NamedTuple):
    """A sidecar, and in front of what.

    ``container``: the model's. ``port``: the one that it serves on, and ``declared`` its index in the container's
    ``ports`` or ``None``. ``cpu`` and ``memory`` are the sidecar's.
    """

    target: Target | None
    container: str
    port: int
    declared: int | None
    cpu: str
    memory: Quantity


class _Skipped(Exception):  # noqa: N818 - control flow inside this file, no error
    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.skip = Skip(reason, message)


def decide(pod: Json, target: Target | None, settings: Settings, *, asked: bool = False) -> Inject | Skip:
    """Decide on a pod, or a pod template, as it was admitted.

    ``target``: the workload that it belongs to. ``asked``: somebody asked for it by hand; only a template that forbids
    it is left alone.
    """
    try:
        return _decide(pod, target, settings, asked=asked)
    except _Skipped as skipped:
        return skipped.skip


def _decide(pod: Json, target: Target | None, settings: Settings, *, asked: bool) -> Inject:
    spec = pod["spec"]
    written = annotations_of(pod)
    # 1. Is one wanted, and is it there already?
    wanted = written.get(names.INJECT)
    if wanted == names.FORBIDDEN:
        raise _Skipped(Reason.DISABLED, f'{names.INJECT} is "false"')
    if wanted is None and not asked:
        raise _Skipped(Reason.NOT_OPTED_IN, f"no annotation {names.INJECT}")
    if wanted not in {None, names.ASKED, names.PROPAGATED}:
        raise _Skipped(Reason.BAD_ANNOTATION, f'{names.INJECT} is {wanted!r}: write "true" or "false"')
    containers: list[Json] = spec["containers"]
    everyone = [*(spec.get("initContainers") or []), *containers]
    if any(each["name"] == SIDECAR for each in everyone):
        raise _Skipped(Reason.ALREADY_INJECTED, f"a container named {SIDECAR} is in the pod")
    # 2. Can one be here at all?
    if spec.get("hostNetwork"):
        raise _Skipped(Reason.HOST_NETWORK, "the pod uses the node's network: set hostNetwork: false")
    if "windows" in {(spec.get("os") or {}).get("name"), (spec.get("nodeSelector") or {}).get("kubernetes.io/os")}:
        raise _Skipped(Reason.WINDOWS, "the pod is for Windows; the sidecar is for Linux")
    if any(volume["name"] == VOLUME for volume in spec.get("volumes") or []):
        raise _Skipped(Reason.NAME_TAKEN, f"the pod has a volume named {VOLUME}: rename it")
    for each in everyone:
        for port in each.get("ports") or []:
            if port["containerPort"] in {DATA_PORT, ADMIN_PORT}:
                raise _Skipped(
                    Reason.PORT_TAKEN,
                    f"container {each['name']} uses port {port['containerPort']}, the sidecar's: move it to another",
                )
    # 3. Would anybody tune it?
    if settings.policy is None:
        if target is None:
            raise _Skipped(
                Reason.UNKNOWN_OWNER,
                "the pod belongs to no workload that a policy can name: run the model as a Deployment, "
                "or give its template a sidecar that tunes itself, with carpool inject --slo-p99",
            )
        if settings.public_key is None:
            raise _Skipped(
                Reason.NO_PUBLIC_KEY,
                "the operator's public key is not known yet: see that the operator runs, then restart the workload",
            )
    # 4. In front of what?
    model = _model_container(containers, written.get(names.CONTAINER))
    port, declared = _model_port(model, written.get(names.PORT))
    if port in {DATA_PORT, ADMIN_PORT}:
        raise _Skipped(Reason.PORT_TAKEN, f"the model serves on {port}, the sidecar's: move it to another")
    if (why := _other_protocol(model, port, declared)) is not None:
        raise _Skipped(
            Reason.NOT_HTTP, f"port {port} of {model['name']} {why}: name one for HTTP/1.1 with {names.PORT}"
        )
    return Inject(target, model["name"], port, declared, *_resources(written, settings))


def annotations_of(thing: Json) -> dict[str, str]:
    """Return an object's or a template's annotations."""
    found: dict[str, str] = (thing.get("metadata") or {}).get("annotations") or {}
    return found


def target_of(pod: Json, namespace: str) -> Target | None:
    """Return the workload that a pod belongs to, if it is one that a policy can name."""
    of = registry.owner(pod)
    return None if of is None else Target(namespace, *of)


def handlers(container: Json) -> Iterator[tuple[str, Json]]:
    """Yield what the kubelet calls in a container: ``httpGet``, ``tcpSocket`` and ``grpc`` of its probes and hooks."""
    probes = [container.get(name) for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    lifecycle = container.get("lifecycle") or {}
    for owner in (*probes, lifecycle.get("postStart"), lifecycle.get("preStop")):
        for kind in ("httpGet", "tcpSocket", "grpc"):
            if owner and owner.get(kind):
                yield kind, owner[kind]


def _model_container(containers: list[Json], wanted: str | None) -> Json:
    if wanted is None:
        return next((each for each in containers if each.get("ports")), containers[0])
    for each in containers:
        if each["name"] == wanted:
            return each
    known = ", ".join(each["name"] for each in containers)
    raise _Skipped(Reason.UNKNOWN_CONTAINER, f"{names.CONTAINER} is {wanted!r}, the pod's containers are: {known}")


def _model_port(container: Json, wanted: str | None) -> tuple[int, int | None]:
    """Return the port and its index in ``ports``."""
    ports: list[Json] = container.get("ports") or []
    listed = ", ".join(port.get("name") or str(port["containerPort"]) for port in ports) or "none"
    # 1. The one named
    if wanted is not None:
        for index, port in enumerate(ports):
            if wanted in {port.get("name"), str(port["containerPort"])} and port.get("protocol", "TCP") == "TCP":
                return port["containerPort"], index
        if any(wanted in {port.get("name"), str(port["containerPort"])} for port in ports):
            raise _Skipped(Reason.NOT_TCP, f"port {wanted} of {container['name']} is not TCP")
        if not wanted.isascii() or not wanted.isdigit():
            raise _Skipped(
                Reason.UNKNOWN_PORT, f"{names.PORT} is {wanted!r}, the ports of {container['name']}: {listed}"
            )
        if not 1 <= int(wanted) <= 65535:
            raise _Skipped(Reason.BAD_ANNOTATION, f"{names.PORT} is {wanted!r}: write a port's name or number")
        return int(wanted), None
    # 2. The first that may speak HTTP/1.1
    if not ports:
        raise _Skipped(
            Reason.NO_PORT,
            f"container {container['name']} names no port: add the one that it serves on to its ports, "
            f"or annotate the template with {names.PORT}",
        )
    tcp = [(index, port) for index, port in enumerate(ports) if port.get("protocol", "TCP") == "TCP"]
    if not tcp:
        raise _Skipped(Reason.NOT_TCP, f"no port of {container['name']} is TCP: {listed}")
    for index, port in tcp:
        if not _OTHER_PROTOCOLS.match(port.get("name") or ""):
            return port["containerPort"], index
    raise _Skipped(
        Reason.NOT_HTTP,
        f"no port of {container['name']} is for HTTP/1.1, by their names: {listed}; "
        f"name the one that is with {names.PORT}",
    )


def _other_protocol(container: Json, port: int, declared: int | None) -> str | None:
    """Say what a probe shows that a port speaks, if not HTTP/1.1."""
    name = None if declared is None else container["ports"][declared].get("name")
    for kind, handler in handlers(container):
        if handler["port"] in {port, name}:
            if kind == "grpc":
                return "speaks gRPC, by its probe"
            if handler.get("scheme") == "HTTPS":
                return "speaks TLS, by its probe"
    return None


def _resources(written: dict[str, str], settings: Settings) -> tuple[str, Quantity]:
    cpu = written.get(names.CPU, settings.cpu)
    if not _CPU.fullmatch(cpu) or not float(cpu.rstrip("m")):
        raise _Skipped(Reason.BAD_ANNOTATION, f"{names.CPU} is {cpu!r}: write e.g. 500m or 2")
    try:
        memory = Quantity.parse(written.get(names.MEMORY, str(settings.memory)))
    except ValueError as error:
        raise _Skipped(Reason.BAD_ANNOTATION, f"{names.MEMORY}: {error}") from None
    if memory < MIN_MEMORY:
        raise _Skipped(Reason.BAD_ANNOTATION, f"{names.MEMORY} is {memory}: {MIN_MEMORY} is the least")
    return cpu, memory
