"""What an autoscaler's manifest says: an HPA (`autoscaling/v2`), or KEDA's ScaledObject, which makes an HPA.

What is not simulated is refused with the field's name. A field that is only left out would make a forecast wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from carpool_cli.autoscaling.controller import (
    COOLDOWN,
    CPU,
    DOWN,
    LOAD,
    REQUESTS,
    UP,
    Autoscaler,
    Behavior,
    Policy,
    Rules,
    Select,
    Unit,
)
from carpool_operator.cluster.autoscalers import quantity

if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import StrEnum
    from typing import TypeVar

    Name = TypeVar("Name", bound=StrEnum)

HPA_FIELDS = ("scaleTargetRef", "minReplicas", "maxReplicas", "metrics", "behavior")
# A fallback is for a metric that can't be read; the polling interval is for the first replica, where nothing pushes.
SCALED_OBJECT_FIELDS = (
    "scaleTargetRef", "minReplicaCount", "maxReplicaCount", "cooldownPeriod", "pollingInterval", "triggers", "advanced",
    "fallback",
)  # fmt: skip
ADVANCED_FIELDS = ("horizontalPodAutoscalerConfig", "restoreToOriginalReplicaCount")
HPA_CONFIG_FIELDS = ("behavior", "name")
BEHAVIOR_FIELDS = ("scaleUp", "scaleDown")
RULES_FIELDS = ("stabilizationWindowSeconds", "policies", "selectPolicy", "tolerance")
POLICY_FIELDS = ("type", "value", "periodSeconds")
TRIGGER_FIELDS = ("type", "metadata", "metricType", "name", "authenticationRef")

WAKES = "external-push"
"""Trigger of what holds requests for replicas that do not run, and starts the first one."""

ADD_ON = "examples/autoscaling/keda-http.yaml"


class AutoscalerError(ValueError):
    """A manifest that is no autoscaler, or says what can't be simulated; names the field, and what to write."""


def read(document: Mapping[str, Any]) -> Autoscaler:
    """Read an HPA (autoscaling/v2) or a KEDA ScaledObject.

    Raises ``AutoscalerError``.
    """
    kind, spec = document.get("kind"), _fields(document.get("spec"), "spec")
    if kind == "HorizontalPodAutoscaler":
        return _hpa(spec)
    if kind == "ScaledObject":
        return _scaled_object(spec)
    raise AutoscalerError(f"kind {kind!r} is no HorizontalPodAutoscaler (autoscaling/v2) and no ScaledObject (KEDA)")


def _hpa(spec: Mapping[str, Any]) -> Autoscaler:
    _known(spec, HPA_FIELDS, "spec")
    metric, target = _one([_hpa_metric(each) for each in _list(spec, "metrics", "spec")])
    least = spec.get("minReplicas", 1)
    if not least:
        raise AutoscalerError(
            f"spec.minReplicas: 0 is of an alpha feature: write 1, or scale to zero by KEDA, e.g. {ADD_ON}"
        )
    return Autoscaler(
        metric=metric,
        target=target,
        least=least,
        most=spec["maxReplicas"],
        behavior=_behavior(spec, "spec"),
    )


def _scaled_object(spec: Mapping[str, Any]) -> Autoscaler:
    _known(spec, SCALED_OBJECT_FIELDS, "spec")
    triggers = _list(spec, "triggers", "spec")
    metric, target = _one([_trigger(each) for each in triggers if each.get("type") != WAKES])
    least = spec.get("minReplicaCount", 0)
    if not least and not any(each.get("type") == WAKES for each in triggers):
        raise AutoscalerError(
            "spec.minReplicaCount: 0, or none, needs a trigger that starts the first replica: no pod says anything "
            f"while none runs. Write 1, or add `{WAKES}` of KEDA's HTTP add-on, as in {ADD_ON}"
        )
    advanced = _fields(spec.get("advanced"), "spec.advanced")
    _known(advanced, ADVANCED_FIELDS, "spec.advanced")
    where = "spec.advanced.horizontalPodAutoscalerConfig"
    config = _fields(advanced.get("horizontalPodAutoscalerConfig"), where)
    _known(config, HPA_CONFIG_FIELDS, where)
    return Autoscaler(
        metric=metric,
        target=target,
        least=least,
        most=spec.get("maxReplicaCount", 100),
        behavior=_behavior(config, where),
        cooldown=float(spec.get("cooldownPeriod", COOLDOWN)),
    )


def _one(found: list[tuple[str, float]]) -> tuple[str, float]:
    if len(found) != 1:
        raise AutoscalerError(f"it scales by {len(found)} metrics: one can be simulated")
    return found[0]


_NAMES = "cpu, Carpool's load (a name with `load`), or a rate of requests (a name with `request` or `arrivals`)"


def _hpa_metric(metric: Mapping[str, Any]) -> tuple[str, float]:
    kind = str(metric.get("type"))
    part = metric.get(kind[:1].lower() + kind[1:]) or {}
    target = part.get("target") or {}
    if kind in {"Resource", "ContainerResource"} and part.get("name") == "cpu" and "averageUtilization" in target:
        return CPU, float(target["averageUtilization"])
    if kind in {"External", "Pods"} and "averageValue" in target:
        return _named(str((part.get("metric") or {}).get("name"))), quantity(str(target["averageValue"]))
    raise AutoscalerError(f"metric {kind} can't be simulated: it needs averageUtilization of cpu, or averageValue")


def _trigger(trigger: Mapping[str, Any]) -> tuple[str, float]:
    _known(trigger, TRIGGER_FIELDS, "spec.triggers")
    metadata, kind = trigger.get("metadata") or {}, trigger.get("type")
    wanted = "Utilization" if kind == "cpu" else "AverageValue"
    if trigger.get("metricType", wanted) != wanted:
        raise AutoscalerError(f"spec.triggers: metricType {trigger['metricType']} can't be simulated: {wanted} can")
    if kind == "cpu":
        return CPU, float(metadata["value"])
    if kind == "prometheus":
        return _named(str(metadata.get("query"))), float(metadata["threshold"])
    if kind == "metrics-api":
        return _named(str(metadata.get("valueLocation"))), float(metadata["targetValue"])
    raise AutoscalerError(f"trigger {kind!r} can't be simulated: cpu, prometheus and metrics-api can")


def _named(name: str) -> str:
    if "load" in name:
        return LOAD
    if "request" in name or "arrivals" in name:
        return REQUESTS
    raise AutoscalerError(f"metric {name!r} can't be simulated: use {_NAMES}")


def _behavior(within: Mapping[str, Any], where: str) -> Behavior | None:
    """Read the rules, and fill in defaults as the API server does; ``None``: there are none, which is another thing."""
    if within.get("behavior") is None:
        return None
    where += ".behavior"
    given = _fields(within["behavior"], where)
    _known(given, BEHAVIOR_FIELDS, where)
    return Behavior(_rules(given, "scaleUp", where, UP), _rules(given, "scaleDown", where, DOWN))


def _rules(behavior: Mapping[str, Any], name: str, where: str, default: Rules) -> Rules:
    where = f"{where}.{name}"
    given = _fields(behavior.get(name), where)
    _known(given, RULES_FIELDS, where)
    policies = [_policy(each, f"{where}.policies") for each in _list(given, "policies", where)]
    if "policies" in given and not policies:
        raise AutoscalerError(f"{where}.policies: Kubernetes wants one or more; leave it out for the defaults")
    return Rules(
        window=float(given.get("stabilizationWindowSeconds", default.window)),
        policies=tuple(policies) or default.policies,
        select=_choice(Select, given.get("selectPolicy", default.select), f"{where}.selectPolicy"),
        tolerance=quantity(str(given.get("tolerance", default.tolerance))),
    )


def _policy(given: Mapping[str, Any], where: str) -> Policy:
    _known(given, POLICY_FIELDS, where)
    return Policy(_choice(Unit, given["type"], f"{where}.type"), int(given["value"]), float(given["periodSeconds"]))


def _choice(names: type[Name], given: str, where: str) -> Name:
    try:
        return names(given)
    except ValueError:
        raise AutoscalerError(f"{where}: {given!r} is none of {', '.join(names)}") from None


def _fields(given: object, where: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise AutoscalerError(f"{where} has no fields")
    return given


def _list(within: Mapping[str, Any], name: str, where: str) -> list[Mapping[str, Any]]:
    given = within.get(name) or []
    if not isinstance(given, list):
        raise AutoscalerError(f"{where}.{name} is no list")
    return [_fields(each, f"{where}.{name}") for each in given]


def _known(given: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    if others := sorted(given.keys() - set(names)):
        raise AutoscalerError(f"{where}.{others[0]} can't be simulated: take it out of a copy of the manifest")
