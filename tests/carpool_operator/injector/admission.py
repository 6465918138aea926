"""What an API server looks at in a pod, by its rules rather than by ours: validation, LimitRanger, quota."""

from __future__ import annotations

import re
from decimal import Decimal

MEASURED = ("cpu", "memory", "ephemeral-storage")
DEMANDED = ("cpu", "memory")
"""What every container has to name where a quota counts it; the rest is counted where it is named."""
FACTORS = {"": 1, "m": Decimal("0.001"), "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}


def number(text):
    """Read a quantity."""
    digits, unit = re.fullmatch(r"([0-9.]+)(m|Ki|Mi|Gi|k|M|G)?", str(text)).groups()
    return Decimal(digits) * FACTORS[unit or ""]


def everyone(spec):
    return [*spec.get("initContainers", []), *spec["containers"]]


def get(resources, kind, name):
    found = (resources.get(kind) or {}).get(name)
    return None if found is None else number(found)


def defaulted(resources, limit_ranges=()):
    """Return a container's resources as the API server completes them: LimitRanges first, then limits as requests."""
    limits, requests = dict(resources.get("limits") or {}), dict(resources.get("requests") or {})
    for one in limit_ranges:
        for item in one["spec"]["limits"]:
            if item["type"] != "Container":
                continue
            most = item.get("max", {})
            default = {**most, **item.get("default", {})}
            default_request = {**default, **item.get("min", {}), **item.get("defaultRequest", {})}
            for name, value in default.items():
                limits.setdefault(name, value)
            for name, value in default_request.items():
                requests.setdefault(name, value if name not in (resources.get("limits") or {}) else limits[name])
    return {"limits": limits, "requests": {**limits, **requests}}


def total(spec, kind, name):
    if name in (spec.get("resources", {}).get(kind) or {}):
        return number(spec["resources"][kind][name])
    running = sum(get(each["resources"], kind, name) or 0 for each in spec["containers"])
    sidecars, peak = Decimal(0), Decimal(0)
    for each in spec.get("initContainers", []):
        own = get(each["resources"], kind, name) or 0
        if each.get("restartPolicy") == "Always":
            sidecars += own
            peak = max(peak, sidecars)
        else:
            peak = max(peak, sidecars + own)
    return max(peak, running + sidecars)


def refusal(pod, around):
    """Say why an API server would refuse a pod; ``None``: it would not."""
    limit_ranges = around.limit_ranges
    spec = {**pod["spec"]}
    for members in ("initContainers", "containers"):
        spec[members] = [
            {**each, "resources": defaulted(each.get("resources") or {}, limit_ranges)}
            for each in spec.get(members, [])
        ]
    return invalid(spec) or out_of_range(spec, limit_ranges) or over_quota(spec, around.quotas)


def invalid(spec):
    names = [each["name"] for each in everyone(spec)]
    if len(set(names)) != len(names):
        return "two containers of one name"
    volumes = [each["name"] for each in spec.get("volumes", [])]
    if len(set(volumes)) != len(volumes):
        return "two volumes of one name"
    host_ports = []
    for each in everyone(spec):
        ports = each.get("ports", [])
        named = [port["name"] for port in ports if "name" in port]
        if len(set(named)) != len(named) or not all(re.fullmatch("(?=.*[a-z])[a-z0-9-]{1,15}", one) for one in named):
            return f"port names of {each['name']}"
        if not all(0 < port["containerPort"] < 65536 for port in ports):
            return "port out of range"
        host_ports += [(port["hostPort"], port.get("protocol", "TCP")) for port in ports if "hostPort" in port]
        mounts = [mount["name"] for mount in each.get("volumeMounts", [])]
        if not set(mounts) <= set(volumes):
            return "a volume that is not there"
        for name in MEASURED:
            limit, request = (get(each["resources"], kind, name) for kind in ("limits", "requests"))
            if limit is not None and request > limit:
                return f"{name} request of {each['name']} over its limit"
            most = get(spec.get("resources", {}), "limits", name)
            if most is not None and limit is not None and limit > most:
                return f"{name} limit of {each['name']} over the pod's"
        hook = each.get("lifecycle", {}).get("preStop")
        if hook is not None and len(hook) != 1:
            return "a hook with two handlers"
    if len(set(host_ports)) != len(host_ports):
        return "a host port twice"
    without = {key: value for key, value in spec.items() if key != "resources"}
    of_pod = spec.get("resources", {}).get("requests") or {}
    for name in of_pod.keys() & set(MEASURED):
        if total(without, "requests", name) > number(of_pod[name]):
            return f"{name} requests over the pod's"
    return None


def out_of_range(spec, limit_ranges):
    for one in limit_ranges:
        for item in one["spec"]["limits"]:
            if item["type"] == "Container":
                for each in everyone(spec):
                    for name in MEASURED:
                        pair = [get(each["resources"], kind, name) for kind in ("requests", "limits")]
                        if why := beyond(item, name, *pair):
                            return f"{each['name']}: {why}"
            else:
                for name in MEASURED:
                    pair = [total(spec, kind, name) or None for kind in ("requests", "limits")]
                    if why := beyond(item, name, *pair):
                        return f"pod: {why}"
    return None


def beyond(item, name, request, limit):
    if name in item.get("min", {}):
        least = number(item["min"][name])
        if request is None or request < least or (limit is not None and limit < least):
            return f"{name} below the minimum"
    if name in item.get("max", {}):
        most = number(item["max"][name])
        if limit is None or limit > most or (request is not None and request > most):
            return f"{name} above the maximum"
    if name in item.get("maxLimitRequestRatio", {}):
        ratio = number(item["maxLimitRequestRatio"][name])
        if not request or not limit or limit > ratio * request:
            return f"{name} above the ratio"
    return None


def over_quota(spec, quotas):
    for quota in quotas:
        if quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"):
            continue
        hard, used = quota["status"]["hard"], quota["status"]["used"]
        for key in hard:
            kind, _, name = key.rpartition(".")
            if name not in MEASURED:
                continue
            kind = kind or "requests"
            if name in DEMANDED and any(get(each["resources"], kind, name) is None for each in everyone(spec)):
                return f"{key} has to be named"
            if number(used.get(key, 0)) + total(spec, kind, name) > number(hard[key]):
                return f"{key} exceeded"
    return None
