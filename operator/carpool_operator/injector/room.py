"""Room for a sidecar: what the LimitRanges and ResourceQuotas of a namespace leave to one more container.

Admission of ours comes before theirs. A sidecar that they have no room for would have the whole pod refused, so it is
fitted in, or left out.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool.policy.durations import Quantity
from carpool_operator.api import annotations as names
from carpool_operator.injector.reasons import Reason, Skipped
from carpool_operator.injector.resources import (
    MEASURED,
    MIN_CPU,
    MIN_MEMORY,
    Resources,
    amount,
    amount_text,
    total,
    with_sidecar,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Json = dict[str, Any]

DEMANDED = 2
"""Where a quota demands a CPU limit: times the request. A container at its limit stops for tens of milliseconds."""

_LEAST = {"cpu": MIN_CPU, "memory": int(MIN_MEMORY)}
_ANNOTATION = {
    ("requests", "cpu"): names.CPU,
    ("limits", "cpu"): names.CPU_LIMIT,
    ("requests", "memory"): names.MEMORY_REQUEST,
    ("limits", "memory"): names.MEMORY,
}


class Surroundings(NamedTuple):
    """What is known of a namespace: its annotations, LimitRanges and ResourceQuotas, as the API server has them.

    ``labels``: likewise; ``None`` where it could not be read.
    """

    annotations: Mapping[str, str] = {}
    limit_ranges: tuple[Json, ...] = ()
    quotas: tuple[Json, ...] = ()
    labels: Mapping[str, str] | None = {}


UNKNOWN = Surroundings()
"""Of a namespace that nobody reads, as without a cluster, and of one that has none of them."""
UNREAD = Surroundings(labels=None)
"""Of one that could not be read."""


def fitted(spec: Mapping[str, Any], wanted: Resources, around: Surroundings) -> Resources:
    """Return what of ``wanted`` a sidecar may have in this pod; the same where all of it fits.

    Raises ``Skipped`` where there is too little room. The pod alone is not judged: it is admitted, or refused, as it
    was before.
    """
    given = wanted
    quotas = [quota for quota in around.quotas if counts(quota, spec)]
    # 1. A limit that somebody demands of every container
    if given.cpu_limit is None and any("limits.cpu" in hard(quota) for quota in quotas):
        given = given._replace(cpu_limit=DEMANDED * given.cpu)
    # 2. What a container may have
    for name, item in _items(around, "Container"):
        _check_devices(name, item)
        for resource in MEASURED:
            given = _changed(given, resource, *_in_container(*_pair(given, resource), item, resource))
            _enough(given, wanted, resource, f"LimitRange {name} leaves it")
    # 3. What a pod may have
    for name, item in _items(around, "Pod"):
        for resource in MEASURED:
            given = _in_pod(spec, given, item, resource)
            _enough(given, wanted, resource, f"with its other containers, LimitRange {name} leaves it")
            _check_ratio(spec, given, item, resource, name)
    # 4. What the namespace may have
    for quota in quotas:
        _check_class(spec, quota)
        _check_quota(spec, given, quota)
    return given


def _pair(given: Resources, resource: str) -> tuple[int, int | None]:
    return (given.cpu, given.cpu_limit) if resource == "cpu" else (int(given.memory_request), int(given.memory))


def _changed(given: Resources, resource: str, request: int, limit: int | None) -> Resources:
    if resource == "cpu":
        return given._replace(cpu=request, cpu_limit=limit)
    assert limit is not None  # noqa: S101 - for the type checker: memory always has one
    return given._replace(memory_request=Quantity(request), memory=Quantity(limit))


def _bound(item: Json, name: str, resource: str) -> int | None:
    found = (item.get(name) or {}).get(resource)
    return None if found is None else amount(found, resource)


def _ratio(item: Json, resource: str) -> Fraction | None:
    found = (item.get("maxLimitRequestRatio") or {}).get(resource)
    return None if found is None else Fraction(amount(found, "cpu"), 1000)


def _in_container(request: int, limit: int | None, item: Json, resource: str) -> tuple[int, int | None]:
    """Return a request and a limit that a LimitRange of type Container allows."""
    default, most, least = (_bound(item, name, resource) for name in ("default", "max", "min"))
    ratio = _ratio(item, resource)
    if limit is None and (default is not None or most is not None or ratio is not None):
        # Without one the API server would write its default, which may be less than the request.
        limit = max(request, default or 0, int(request * ratio) if ratio is not None else 0)
    if least is not None:
        request = max(request, least)
        limit = None if limit is None else max(limit, least)
    if limit is not None:
        limit = limit if most is None else min(limit, most)
        request = min(request, limit)
        if ratio is not None:
            request = max(request, math.ceil(limit / ratio))
    return request, limit


def _check_devices(name: str, item: Json) -> None:
    """Look whether a sidecar, which asks for no device, would be given some, or refused for want of one.

    A maximum without a default is the default.
    """
    given = {**(item.get("max") or {}), **(item.get("min") or {})}
    for kind in ("default", "defaultRequest"):
        given |= item.get(kind) or {}
    for resource, count in given.items():
        if ("/" in resource or resource.startswith("hugepages-")) and amount(count, resource):
            raise Skipped(
                Reason.NO_ROOM,
                f"LimitRange {name} gives each container {count} of {resource}, a sidecar too: let its default be "
                f'{resource}: "0", and take a minimum out',
            )


def _in_pod(spec: Mapping[str, Any], given: Resources, item: Json, resource: str) -> Resources:
    """Return resources with which the pod's sums are at most the maximum of a LimitRange of type Pod."""
    most = _bound(item, "max", resource)
    if most is None:
        return given
    request, limit = _pair(given, resource)
    over = {kind: total(with_sidecar(spec, given), kind, resource) - most for kind in ("requests", "limits")}
    if limit is not None:
        limit -= max(0, over["limits"])
    request -= max(0, over["requests"])
    return _changed(given, resource, request if limit is None else min(request, limit), limit)


def _check_ratio(spec: Mapping[str, Any], given: Resources, item: Json, resource: str, name: str) -> None:
    ratio, whole = _ratio(item, resource), with_sidecar(spec, given)
    if ratio is not None and total(whole, "limits", resource) > ratio * total(whole, "requests", resource):
        raise Skipped(
            Reason.NO_ROOM,
            f"LimitRange {name} allows a pod {resource} limits of at most {float(ratio):g} times its requests, and "
            f"with a sidecar it exceeds them: raise {_ANNOTATION['requests', resource]}",
        )


def _enough(given: Resources, wanted: Resources, resource: str, why: str) -> None:
    """Check that what is left is enough to run; a person may have asked for less."""
    request, limit = _pair(given, resource)
    asked, asked_limit = _pair(wanted, resource)
    left = request if limit is None else limit
    least = min(_LEAST[resource], asked if asked_limit is None else asked_limit)
    if left < least or request <= 0:
        raise Skipped(
            Reason.NO_ROOM,
            f"a sidecar needs {amount_text(least, resource)} of {resource}; {why} "
            f"{amount_text(max(0, left), resource)}: raise that maximum",
        )


def _check_class(spec: Mapping[str, Any], quota: Json) -> None:
    """Look whether a quota counts the pod only with its sidecar: then it demands of each container what none has."""
    classes = {each["scopeName"] for each in _scopes(quota)}
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    if "NotBestEffort" not in classes or any(_has_resources(each) for each in (spec, *containers)):
        return
    demanded = sorted(key for key in hard(quota) if key.rpartition(".")[2] in MEASURED)
    if demanded:
        raise Skipped(
            Reason.NO_ROOM,
            f"ResourceQuota {quota['metadata']['name']} demands {demanded[0]} of every container of a pod that is not "
            "BestEffort, as this one would no longer be: name the resources of its containers",
        )


def _has_resources(owner: Mapping[str, Any]) -> bool:
    resources = owner.get("resources") or {}
    return any(resources.get(kind) for kind in ("requests", "limits"))


def _check_quota(spec: Mapping[str, Any], given: Resources, quota: Json) -> None:
    limits, used = hard(quota), (quota.get("status") or {}).get("used") or {}
    whole = with_sidecar(spec, given)
    for key, kind, resource in measured(limits):
        free = amount(limits[key], resource) - amount(used.get(key, 0), resource)
        needed = total(whole, kind, resource)
        if needed > free:
            raise Skipped(
                Reason.NO_ROOM,
                f"ResourceQuota {quota['metadata']['name']} has {amount_text(max(0, free), resource)} of {key} left, "
                f"and the pod with a sidecar needs {amount_text(needed, resource)}: raise the quota, or lower "
                f"{_ANNOTATION[kind, resource]}",
            )


def measured(limits: Json) -> Iterator[tuple[str, str, str]]:
    """Yield what a quota limits of CPU and memory: its key, requests or limits, and the resource."""
    for key in limits:
        kind, _, resource = key.rpartition(".")
        if resource in MEASURED and kind in {"", "requests", "limits"}:
            yield key, kind or "requests", resource


def hard(quota: Json) -> Json:
    """Return what a quota limits, and to how much."""
    found: Json = (quota.get("status") or {}).get("hard") or (quota.get("spec") or {}).get("hard") or {}
    return found


def _items(around: Surroundings, kind: str) -> Iterator[tuple[str, Json]]:
    for limit_range in around.limit_ranges:
        for item in (limit_range.get("spec") or {}).get("limits") or []:
            if item.get("type") == kind:
                yield limit_range["metadata"]["name"], item


def counts(quota: Json, spec: Mapping[str, Any]) -> bool:
    """Whether a quota counts a pod with a sidecar, which is never of the class BestEffort."""
    ends, priority = spec.get("activeDeadlineSeconds") is not None, spec.get("priorityClassName") or ""
    return all(_in_scope(each, priority, ends=ends) for each in _scopes(quota))


def _scopes(quota: Json) -> list[Json]:
    """Return the scopes that a pod has to be in to be counted."""
    of_quota = quota.get("spec") or {}
    required: list[Json] = [{"scopeName": scope, "operator": "Exists"} for scope in of_quota.get("scopes") or []]
    return required + ((of_quota.get("scopeSelector") or {}).get("matchExpressions") or [])


def _in_scope(scope: Json, priority: str, *, ends: bool) -> bool:
    """Whether a pod is in a scope; in one that is not known here it is."""
    values: list[str] = scope.get("values") or []
    match scope.get("scopeName"), scope.get("operator"):
        case "BestEffort", _:
            return False
        case "Terminating", _:
            return ends
        case "NotTerminating", _:
            return not ends
        case "PriorityClass", "In":
            return priority in values
        case "PriorityClass", "NotIn":
            return priority not in values
        case "PriorityClass", "Exists":
            return bool(priority)
        case "PriorityClass", "DoesNotExist":
            return not priority
    return True
