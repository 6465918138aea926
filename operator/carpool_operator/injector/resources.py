"""Resources of sidecars and pods: CPU in thousandths of a core, memory and storage in bytes."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool.policy.durations import Quantity
from carpool_operator.api import annotations as names
from carpool_operator.injector.reasons import Reason, Skipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MIN_CPU, MIN_MEMORY = 50, Quantity(128 * 2**20)
"""With less there is no room for the process, its tuner and one request."""

STORAGE = Quantity(64 * 2**20)
"""Ephemeral storage, if it has to be set: for logs. The kubelet keeps five files of 10 MiB of them.

A sidecar writes nothing else: its root file system is read-only, bodies stay in memory, its volume is a ConfigMap.
"""

OF_CLASS = ("cpu", "memory")
"""Resources that determine a pod's quality of service, and that a quota may require of every container."""

_CPU = re.compile(r"[0-9]{1,6}m?|[0-9]{1,3}\.[0-9]{1,3}")
# Bounded digits: parsing an exponent of seven digits would take this thread 8 s.
_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40}))(?:([eE][+-]?[0-9]{1,2})|([KMGTPE]i|[numkMGTPE]))?"
)
_UNITS = {
    **{unit: Fraction(1024) ** power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
    **{unit: Fraction(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{unit: Fraction(1, 1000**power) for power, unit in enumerate("mun", 1)},
}


class Written(NamedTuple):
    """Annotations about a sidecar: the pod's own, and its namespace's for the others."""

    values: Mapping[str, str]
    defaults: frozenset[str] = frozenset()
    """Names of those that are the namespace's."""

    @classmethod
    def of(cls, pod: Mapping[str, str], namespace: Mapping[str, str]) -> Written:
        """Join the annotations of a pod and of its namespace."""
        defaults = {name: value for name, value in namespace.items() if name in names.OF_SIDECAR and name not in pod}
        return cls({**defaults, **pod}, frozenset(defaults))

    def place(self, name: str) -> str:
        """Return an annotation's name for a message, with where it is if that is not the pod template."""
        return f"{name} on the Namespace" if name in self.defaults else name

    def yields(self, name: str, other: str) -> bool:
        """Whether one gives way to another that it contradicts: a default does, to the pod's own."""
        return name in self.defaults and other in self.values and other not in self.defaults


class Amounts(NamedTuple):
    """Amounts of one resource; ``limit`` is ``None`` where there is none."""

    request: int
    limit: int | None

    @property
    def most(self) -> int:
        """The limit, or the request where there is no limit."""
        return self.request if self.limit is None else self.limit


class Resources(NamedTuple):
    """A sidecar's resources. ``cpu`` and ``cpu_limit`` in thousandths of a core, ``None`` where there is no limit.

    ``storage``: ephemeral storage, bytes; ``None`` where it is not set.
    """

    cpu: int
    cpu_limit: int | None
    memory_request: Quantity
    memory: Quantity
    storage: Amounts | None = None

    def named(self) -> dict[str, Amounts]:
        """Return the amounts that are set, by resource."""
        found = {"cpu": Amounts(self.cpu, self.cpu_limit), "memory": Amounts(self.memory_request, self.memory)}
        return found if self.storage is None else {**found, "ephemeral-storage": self.storage}

    def changed(self, resource: str, amounts: Amounts) -> Resources:
        """Return the same with other amounts of one resource."""
        if resource == "cpu":
            return self._replace(cpu=amounts.request, cpu_limit=amounts.limit)
        if resource == "memory":
            return self._replace(memory_request=Quantity(amounts.request), memory=Quantity(amounts.most))
        return self._replace(storage=amounts)

    def written(self) -> dict[str, dict[str, str]]:
        """Return ``resources`` of the container, in the API's format."""
        named = self.named()
        return {
            "requests": {name: amount_text(each.request, name) for name, each in named.items()},
            "limits": {name: amount_text(each.limit, name) for name, each in named.items() if each.limit is not None},
        }

    def guaranteed(self) -> Resources:
        """Return the same with limits of CPU and memory that equal the requests."""
        return self._replace(cpu_limit=self.cpu, memory_request=self.memory)


def cpu_text(milli: int) -> str:
    """Format thousandths of a core as Kubernetes does: ``500m``, ``2``."""
    return f"{milli}m" if milli % 1000 else str(milli // 1000)


def parse_cpu(name: str, text: str) -> int:
    """Parse an annotation's CPU, in thousandths of a core. Raises ``Skipped``."""
    if not _CPU.fullmatch(text) or not float(text.rstrip("m")):
        raise Skipped(Reason.BAD_ANNOTATION, f"{name} is {text!r}: write e.g. 500m or 2")
    return int(text[:-1]) if text.endswith("m") else round(float(text) * 1000)


def parse_memory(name: str, text: str, least: Quantity) -> Quantity:
    """Parse an annotation's size. Raises ``Skipped``."""
    try:
        memory = Quantity.parse(text)
    except ValueError as error:
        raise Skipped(Reason.BAD_ANNOTATION, f"{name}: {error}") from None
    if memory < least:
        raise Skipped(Reason.BAD_ANNOTATION, f"{name} is {memory}: {least} is the least")
    return memory


def of_sidecar(written: Written, default: Resources) -> Resources:
    """Return a sidecar's resources from annotations, and ``default`` for what they leave out. Raises ``Skipped``."""
    values, place = written.values, written.place
    cpu, limit = default.cpu, default.cpu_limit
    if names.CPU in values:
        cpu = parse_cpu(place(names.CPU), values[names.CPU])
    if names.CPU_LIMIT in values:
        limit = parse_cpu(place(names.CPU_LIMIT), values[names.CPU_LIMIT])
        if limit < cpu and not written.yields(names.CPU_LIMIT, names.CPU):
            text = f"{place(names.CPU_LIMIT)} is {cpu_text(limit)}, less than the request, {cpu_text(cpu)}: raise it"
            raise Skipped(Reason.BAD_ANNOTATION, f"{text}, or lower {place(names.CPU)}")
    memory, request = default.memory, default.memory_request
    if names.MEMORY in values:
        memory = parse_memory(place(names.MEMORY), values[names.MEMORY], MIN_MEMORY)
        request = Quantity(memory * default.memory_request // default.memory)
    if names.MEMORY_REQUEST in values:
        request = parse_memory(place(names.MEMORY_REQUEST), values[names.MEMORY_REQUEST], Quantity(1))
        if request > memory and not written.yields(names.MEMORY_REQUEST, names.MEMORY):
            text = f"{place(names.MEMORY_REQUEST)} is {request}, more than the limit, {memory}: lower it"
            raise Skipped(Reason.BAD_ANNOTATION, f"{text}, or raise {place(names.MEMORY)}")
    # A default yields to what a user wrote: with a limit of 1 on the Namespace, a pod that requests 2 has a limit of 2.
    return Resources(cpu, None if limit is None else max(limit, cpu), min(request, memory), memory)


# ------------------------------------------------------------------------------------------------- of a pod


def amount(text: str | float, resource: str) -> int:
    """Parse a quantity as the API server does: thousandths of a core, or bytes; fractions are rounded up.

    Raises ``ValueError``.
    """
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{text!r} is no quantity")
    number, exponent, unit = found.groups()
    value = Fraction(f"{number.rstrip('.')}{exponent or ''}") * _UNITS.get(unit, Fraction(1))
    return math.ceil(value * 1000 if resource == "cpu" else value)


def amount_text(value: int, resource: str) -> str:
    """Format an amount."""
    return cpu_text(value) if resource == "cpu" else str(Quantity(value))


def of_container(container: Mapping[str, Any], kind: str, resource: str) -> int | None:
    """Return a container's request or limit: ``None`` where it is not set. Requests default to limits."""
    resources = container.get("resources") or {}
    found = (resources.get(kind) or {}).get(resource)
    if found is None and kind == "requests":
        found = (resources.get("limits") or {}).get(resource)
    return None if found is None else amount(found, resource)


def total(spec: Mapping[str, Any], kind: str, resource: str) -> int:
    """Return what a pod requests, or its limit, as schedulers and quotas count it.

    Containers run together with the native sidecars; an init container runs with the native sidecars before it.
    """
    written = (spec.get("resources") or {}).get(kind) or {}
    overhead = amount((spec.get("overhead") or {}).get(resource, 0), resource)
    if resource in written:
        return amount(written[resource], resource) + overhead
    always = most = 0
    for container in spec.get("initContainers") or []:
        own = of_container(container, kind, resource) or 0
        if container.get("restartPolicy") == "Always":
            always += own
            most = max(most, always)
        else:
            most = max(most, always + own)
    running = sum(of_container(each, kind, resource) or 0 for each in spec["containers"])
    return max(most, running + always) + overhead


def is_guaranteed(spec: Mapping[str, Any]) -> bool:
    """Whether a pod's quality of service is Guaranteed: requests equal limits, of the pod or of all containers."""
    of_pod = spec.get("resources") or {}
    for resources in [of_pod] if _speaks(of_pod) else [each.get("resources") or {} for each in everyone(spec)]:
        limits, own = (_named(resources.get(kind)) for kind in ("limits", "requests"))
        requests = {**limits, **own}
        if any(name not in limits or amount(limits[name], name) != amount(requests[name], name) for name in OF_CLASS):
            return False
    return True


def _named(amounts: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the amounts that are set: a template may contain null for a removed one."""
    return {name: value for name, value in (amounts or {}).items() if value is not None}


def raised(of_pod: Mapping[str, Any], sidecar: Resources) -> dict[str, Any]:
    """Return the pod-level ``resources`` with the sidecar's share added; resources that are not named there stay so.

    Under a CPU limit of the pod, a sidecar without its own limit counts with its request.
    """
    changed = dict(of_pod)
    for kind in ("requests", "limits"):
        there = of_pod.get(kind) or {}
        more = {
            name: amount_text(amount(there[name], name) + (own.request if kind == "requests" else own.most), name)
            for name, own in sidecar.named().items()
            if name in there
        }
        if more:
            changed[kind] = {**there, **more}
    return changed


def with_sidecar(spec: Mapping[str, Any], sidecar: Resources) -> dict[str, Any]:
    """Return the parts of the pod, with its sidecar, that ``total`` reads."""
    container = {"restartPolicy": "Always", "resources": sidecar.written()}
    changed = {**spec, "initContainers": [*(spec.get("initContainers") or []), container]}
    if spec.get("resources"):
        changed["resources"] = raised(spec["resources"], sidecar)
    return changed


def _speaks(of_pod: Mapping[str, Any]) -> bool:
    return any(name in (of_pod.get(kind) or {}) for kind in ("requests", "limits") for name in OF_CLASS)


def everyone(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all containers of a pod, those that run before the others included."""
    yield from spec.get("initContainers") or []
    yield from spec["containers"]
