"""Room for a sidecar: how much the LimitRanges and ResourceQuotas of a namespace allow for one more container.

Our admission runs before theirs. A sidecar that exceeds them would make them reject the whole pod, so it is fitted in,
or left out.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool_operator.api import annotations as names
from carpool_operator.injector.reasons import Reason, Skipped
from carpool_operator.injector.resources import (
    MIN_CPU,
    MIN_MEMORY,
    OF_CLASS,
    STORAGE,
    Amounts,
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
"""CPU limit where a quota requires one, as a multiple of the request. A container at its limit stops for tens of
milliseconds."""

_LEAST = {"cpu": MIN_CPU, "memory": int(MIN_MEMORY), "ephemeral-storage": int(STORAGE)}
_ANNOTATION = {
    ("requests", "cpu"): names.CPU,
    ("limits", "cpu"): names.CPU_LIMIT,
    ("requests", "memory"): names.MEMORY_REQUEST,
    ("limits", "memory"): names.MEMORY,
}


class Surroundings(NamedTuple):
    """A namespace's annotations, LimitRanges and ResourceQuotas, in the API server's format.

    ``labels``: its labels; ``None`` where it could not be read.
    """

    annotations: Mapping[str, str] = {}
    limit_ranges: tuple[Json, ...] = ()
    quotas: tuple[Json, ...] = ()
    labels: Mapping[str, str] | None = {}


UNKNOWN = Surroundings()
"""A namespace that is not read, as without a cluster, or one that has none of them."""
UNREAD = Surroundings(labels=None)
"""A namespace that could not be read."""


def fitted(spec: Mapping[str, Any], wanted: Resources, around: Surroundings) -> Resources:
    """Return the part of ``wanted`` that a sidecar may have in this pod; the same if all of it fits.

    Raises ``Skipped`` where there is too little room. The pod's own resources are not checked: it is admitted, or
    rejected, as before.
    """
    wanted = given = _with_storage(wanted, around)
    asked = wanted.named()
    quotas = [quota for quota in around.quotas if counts(quota, spec)]
    # 1. A limit that every container must have
    if given.cpu_limit is None and any("limits.cpu" in hard(quota) for quota in quotas):
        given = given._replace(cpu_limit=DEMANDED * given.cpu)
    # 2. What a container may use
    for name, item in _items(around, "Container"):
        _check_devices(name, item)
        for resource, amounts in given.named().items():
            left = _in_container(amounts, item, resource)
            _enough(left, asked[resource], resource, f"LimitRange {name} leaves it")
            given = given.changed(resource, left)
    # 3. What a pod may use
    for name, item in _items(around, "Pod"):
        for resource, amounts in given.named().items():
            left = _in_pod(spec, given, amounts, item, resource)
            _enough(left, asked[resource], resource, f"with its other containers, LimitRange {name} leaves it")
            given = given.changed(resource, left)
            _check_ratio(spec, given, item, resource, name)
    _check_all(spec, given, around)
    # 4. What the namespace may use
    for quota in quotas:
        _check_class(spec, quota)
        _check_quota(spec, given, quota)
    return given


def _with_storage(given: Resources, around: Surroundings) -> Resources:
    """Set ephemeral storage if a LimitRange would give the sidecar as much as a model gets.

    A quota does not require it: it counts what is set.
    """
    bounds = {
        bound
        for _, item in _items(around, "Container")
        for bound in ("default", "defaultRequest", "max", "maxLimitRequestRatio", "min")
        if "ephemeral-storage" in (item.get(bound) or {})
    }
    if not bounds:
        return given
    # The kubelet limits a pod to the sum of the limits that are set: if the model has none, a sidecar's limit would
    # apply to the model. Defaults of requests and minimums set no limit.
    limit = None if bounds <= {"defaultRequest", "min"} else STORAGE
    return given._replace(storage=Amounts(STORAGE, limit))


def _bound(item: Json, name: str, resource: str) -> int | None:
    found = (item.get(name) or {}).get(resource)
    return None if found is None else amount(found, resource)


def _ratio(item: Json, resource: str) -> Fraction | None:
    found = (item.get("maxLimitRequestRatio") or {}).get(resource)
    return None if found is None else Fraction(amount(found, "cpu"), 1000)


def _in_container(amounts: Amounts, item: Json, resource: str) -> Amounts:
    """Return a request and a limit that a LimitRange of type Container allows."""
    request, limit = amounts
    default, most, least = (_bound(item, name, resource) for name in ("default", "max", "min"))
    ratio = _ratio(item, resource)
    if limit is None and (default is not None or most is not None or ratio is not None):
        # Without one the API server would set its default, which may be less than the request.
        limit = max(request, default or 0, int(request * ratio) if ratio is not None else 0)
    if least is not None:
        request = max(request, least)
        limit = None if limit is None else max(limit, least)
    if limit is not None:
        limit = limit if most is None else min(limit, most)
        request = min(request, limit)
        if ratio is not None:
            request = max(request, math.ceil(limit / ratio))
    return Amounts(request, limit)


def _check_devices(name: str, item: Json) -> None:
    """Check whether a sidecar, which asks for no device, would get some, or be rejected for lack of one.

    A maximum without a default also sets the default.
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


def _in_pod(spec: Mapping[str, Any], given: Resources, amounts: Amounts, item: Json, resource: str) -> Amounts:
    """Return a request and a limit with which the pod's sums are within a LimitRange of type Pod."""
    request, limit = amounts
    least, most = (_bound(item, name, resource) for name in ("min", "max"))
    sums = {kind: total(with_sidecar(spec, given), kind, resource) for kind in ("requests", "limits")}
    # The sum of limits may be the sidecar's alone: without any limit, a pod has no minimum to meet.
    if least is not None and limit is not None:
        limit += max(0, least - sums["limits"])
    if most is not None:
        limit = None if limit is None else limit - max(0, sums["limits"] - most)
        request -= max(0, sums["requests"] - most)
    return Amounts(request if limit is None else min(request, limit), limit)


def _check_all(spec: Mapping[str, Any], given: Resources, around: Surroundings) -> None:
    """Check whether all LimitRanges allow the result: one may require more than another leaves."""
    for resource, amounts in given.named().items():
        for name, item in (*_items(around, "Container"), *_items(around, "Pod")):
            is_pod = item["type"] == "Pod"
            allowed = (
                _in_pod(spec, given, amounts, item, resource) if is_pod else _in_container(amounts, item, resource)
            )
            if allowed != amounts:
                raise Skipped(
                    Reason.NO_ROOM,
                    f"no {resource} for a sidecar fits LimitRange {name} and all others: raise a maximum, or lower a "
                    "minimum",
                )


def _check_ratio(spec: Mapping[str, Any], given: Resources, item: Json, resource: str, name: str) -> None:
    ratio, whole = _ratio(item, resource), with_sidecar(spec, given)
    if ratio is not None and total(whole, "limits", resource) > ratio * total(whole, "requests", resource):
        raise Skipped(
            Reason.NO_ROOM,
            f"LimitRange {name} allows a pod {resource} limits of at most {float(ratio):g} times its requests, and "
            f"with a sidecar it exceeds them: raise {_ANNOTATION.get(('requests', resource), 'that ratio')}",
        )


def _enough(left: Amounts, asked: Amounts, resource: str, why: str) -> None:
    """Check that the remaining resources suffice to run; a user may have asked for less."""
    least = min(_LEAST[resource], asked.most)
    if left.most < least or left.request <= 0:
        raise Skipped(
            Reason.NO_ROOM,
            f"a sidecar needs {amount_text(least, resource)} of {resource}; {why} "
            f"{amount_text(max(0, left.most), resource)}: raise that maximum",
        )


def _check_class(spec: Mapping[str, Any], quota: Json) -> None:
    """Check whether a quota counts the pod only with its sidecar: it may be full, or require what no container has."""
    classes = {each["scopeName"] for each in _scopes(quota)}
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    if "NotBestEffort" not in classes or any(_has_class(each) for each in (spec, *containers)):
        return
    limits, used = hard(quota), (quota.get("status") or {}).get("used") or {}
    for key in ("pods", "count/pods"):
        if key in limits and amount(used.get(key, 0), key) >= amount(limits[key], key):
            raise Skipped(
                Reason.NO_ROOM,
                f"ResourceQuota {quota['metadata']['name']} has no room for one more pod that is not BestEffort, as "
                f"this one would no longer be: raise its {key}",
            )
    demanded = sorted(key for key in limits if key.rpartition(".")[2] in OF_CLASS)
    if demanded:
        raise Skipped(
            Reason.NO_ROOM,
            f"ResourceQuota {quota['metadata']['name']} demands {demanded[0]} of every container of a pod that is not "
            "BestEffort, as this one would no longer be: name the resources of its containers",
        )


def _has_class(owner: Mapping[str, Any]) -> bool:
    """Whether one of the pod's containers, or the pod itself, makes it more than BestEffort."""
    resources = owner.get("resources") or {}
    asked = [(resources.get(kind) or {}).get(name) for kind in ("requests", "limits") for name in OF_CLASS]
    return any(found is not None and amount(found, "cpu") > 0 for found in asked)


def _check_quota(spec: Mapping[str, Any], given: Resources, quota: Json) -> None:
    limits, used = hard(quota), (quota.get("status") or {}).get("used") or {}
    whole, named = with_sidecar(spec, given), given.named()
    for key, kind, resource in measured(limits):
        if resource not in named:
            continue
        free = amount(limits[key], resource) - amount(used.get(key, 0), resource)
        needed = total(whole, kind, resource)
        if needed > free:
            less = f", or lower {_ANNOTATION[kind, resource]}" if (kind, resource) in _ANNOTATION else ""
            raise Skipped(
                Reason.NO_ROOM,
                f"ResourceQuota {quota['metadata']['name']} has {amount_text(max(0, free), resource)} of {key} left, "
                f"and the pod with a sidecar needs {amount_text(needed, resource)}: raise the quota{less}",
            )


def measured(limits: Json) -> Iterator[tuple[str, str, str]]:
    """Yield a quota's limits of CPU, memory and storage: the key, requests or limits, and the resource."""
    for key in limits:
        kind, _, resource = key.rpartition(".")
        if resource in {*OF_CLASS, "ephemeral-storage"} and kind in {"", "requests", "limits"}:
            yield key, kind or "requests", resource


def hard(quota: Json) -> Json:
    """Return the resources that a quota limits, and the limits."""
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
    """Return the scopes that a pod has to match to be counted."""
    of_quota = quota.get("spec") or {}
    required: list[Json] = [{"scopeName": scope, "operator": "Exists"} for scope in of_quota.get("scopes") or []]
    return required + ((of_quota.get("scopeSelector") or {}).get("matchExpressions") or [])


def _in_scope(scope: Json, priority: str, *, ends: bool) -> bool:
    """Whether a pod matches a scope; unknown scopes match."""
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
