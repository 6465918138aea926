"""Reads an autoscaler's manifest: an HPA (`autoscaling/v2`), or KEDA's ScaledObject, which creates an HPA.

Fields that are not simulated are rejected by name: ignoring one would make the forecast wrong.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

from carpool_cli.autoscaling.controller import (
    COOLDOWN,
    CPU,
    DOWN,
    LOAD,
    NEEDED,
    REQUESTS,
    UP,
    Autoscaler,
    Behavior,
    Metric,
    Policy,
    Rules,
    Select,
    Unit,
)
from carpool_operator.cluster import autoscalers
from carpool_operator.cluster.autoscalers import quantity

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from enum import StrEnum

    Name = TypeVar("Name", bound=StrEnum)

API_VERSIONS = {"HorizontalPodAutoscaler": "autoscaling/v2", "ScaledObject": "keda.sh/v1alpha1"}

CPU_PERCENT = 80.0
"""Target of an HPA that names no metric: the API server writes it in."""

HPA_FIELDS = ("scaleTargetRef", "minReplicas", "maxReplicas", "metrics", "behavior")
# A fallback is for an unreadable metric; the polling interval is for the first replica, without a push.
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

OF_TARGETS = frozenset(name for name in autoscalers.METRICS if name.startswith("carpool_target_"))
"""The operator's metrics: one series for a workload, so that an average of them is their sum."""
OF_ONE = frozenset({"avg", "max", "min"})
NO_SUMS = frozenset({
    "count", "count_values", "group", "stddev", "stdvar", "quantile", "topk", "bottomk", "histogram_quantile",
    "increase", "delta", "deriv", "predict_linear", "sum_over_time", "count_over_time",
})  # fmt: skip
"""PromQL's words whose result is no sum over pods. KEDA divides it by the threshold: an average over pods
keeps it at one replica."""

WAKES = "external-push"
"""Trigger that holds requests while no replica runs, and starts the first one."""

ADD_ON = "examples/autoscaling/keda-http.yaml"


class AutoscalerError(ValueError):
    """Not an autoscaler's manifest, or one that can't be simulated; names the field, and what to write."""


def read(document: Mapping[str, Any]) -> Autoscaler:
    """Read an HPA (autoscaling/v2) or a KEDA ScaledObject.

    Raises ``AutoscalerError``, and ``KeyError`` with the name of a missing field.
    """
    kinds = {"HorizontalPodAutoscaler": _hpa, "ScaledObject": _scaled_object}
    kind = str(document.get("kind"))
    if kind not in kinds:
        raise AutoscalerError(
            f"kind {kind!r} is no HorizontalPodAutoscaler (autoscaling/v2) and no ScaledObject (KEDA)"
        )
    version = document.get("apiVersion", API_VERSIONS[kind])
    if version != API_VERSIONS[kind]:
        raise AutoscalerError(f"apiVersion {version!r} can't be simulated: write it as {API_VERSIONS[kind]}")
    found = kinds[kind](_fields(document.get("spec"), "spec"))
    if found.least > found.most:
        raise AutoscalerError(f"it has {found.most} replicas at most, and {found.least} at least")
    return found


def _hpa(spec: Mapping[str, Any]) -> Autoscaler:
    _known(spec, HPA_FIELDS, "spec")
    metrics = tuple(_hpa_metric(each) for each in _list(spec, "metrics", "spec"))
    least = _whole(spec.get("minReplicas", 1), "spec.minReplicas", 0)
    if not least:
        raise AutoscalerError(
            f"spec.minReplicas: 0 is of an alpha feature: write 1, or scale to zero by KEDA, e.g. {ADD_ON}"
        )
    return Autoscaler(
        metrics=metrics or (Metric(CPU, CPU_PERCENT),),
        least=least,
        most=_whole(spec["maxReplicas"], "spec.maxReplicas", 1),
        behavior=_behavior(spec, "spec"),
    )


def _scaled_object(spec: Mapping[str, Any]) -> Autoscaler:
    _known(spec, SCALED_OBJECT_FIELDS, "spec")
    triggers = _list(spec, "triggers", "spec")
    metrics = tuple(_trigger(each) for each in triggers if each.get("type") != WAKES)
    if not metrics:
        only = f" {WAKES} only starts the first one" if triggers else ""
        raise AutoscalerError(f"spec.triggers: none says how many replicas to run: name one that does.{only}")
    least = _whole(spec.get("minReplicaCount", 0), "spec.minReplicaCount", 0)
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
        metrics=metrics,
        least=least,
        most=_whole(spec.get("maxReplicaCount", 100), "spec.maxReplicaCount", 1),
        behavior=_behavior(config, where),
        cooldown=float(_whole(spec.get("cooldownPeriod", round(COOLDOWN)), "spec.cooldownPeriod", 0)),
    )


def _hpa_metric(metric: Mapping[str, Any]) -> Metric:
    kind = str(metric.get("type"))
    name = kind[:1].lower() + kind[1:]
    where = f"spec.metrics.{name}"
    part = _fields(metric.get(name), where)
    target, where = _fields(part.get("target"), f"{where}.target"), f"{where}.target"
    if kind in {"Resource", "ContainerResource"} and part.get("name") == "cpu" and "averageUtilization" in target:
        return Metric(CPU, _number(target["averageUtilization"], f"{where}.averageUtilization"))
    if kind in {"External", "Pods"} and "averageValue" in target:
        named = str(_fields(part.get("metric"), f"spec.metrics.{name}.metric").get("name"))
        return Metric(_named(named, {named}), _number(target["averageValue"], f"{where}.averageValue"))
    named = (
        part.get("name") or _fields(part.get("metric"), f"spec.metrics.{name}.metric").get("name") or "without a name"
    )
    raise AutoscalerError(
        f"metric {kind} {named} can't be simulated: averageUtilization of cpu, and averageValue of External or Pods "
        "can. Leave it out in a copy of the manifest, if the others ask for more replicas"
    )


def _trigger(trigger: Mapping[str, Any]) -> Metric:
    _known(trigger, TRIGGER_FIELDS, "spec.triggers")
    metadata, kind = _fields(trigger.get("metadata"), "spec.triggers.metadata"), trigger.get("type")
    wanted = "Utilization" if kind == "cpu" else "AverageValue"
    if trigger.get("metricType", wanted) != wanted:
        raise AutoscalerError(f"spec.triggers: metricType {trigger['metricType']} can't be simulated: {wanted} can")
    if kind == "cpu":
        return Metric(CPU, _number(metadata["value"], "spec.triggers.metadata.value"))
    if kind == "prometheus":
        text = str(metadata.get("query")).strip()
        asked = autoscalers.query(text)
        if asked.computes:
            raise AutoscalerError(f"query {text!r}: arithmetic can't be simulated: write it into the threshold")
        one_series = not asked.names.isdisjoint(OF_TARGETS)
        if others := sorted(asked.names & (NO_SUMS if one_series else NO_SUMS | OF_ONE)):
            raise AutoscalerError(
                f"query {text!r}: {others[0]} can't be simulated: write the sum over all pods, such as "
                "sum(carpool_load_ratio{...}) or sum(rate(...))"
            )
        return Metric(_named(text, asked.names), _number(metadata["threshold"], "spec.triggers.metadata.threshold"))
    if kind == "metrics-api":
        field = str(metadata.get("valueLocation"))
        name = LOAD if field == autoscalers.FIELD else _named(field, {field})
        return Metric(name, _number(metadata["targetValue"], "spec.triggers.metadata.targetValue"))
    raise AutoscalerError(
        f"trigger {kind!r} can't be simulated: cpu, prometheus and metrics-api can. Leave it out in a copy of the "
        "manifest, if the others ask for more replicas"
    )


def _named(text: str, names: Collection[str]) -> str:
    """Return the metric among ``names`` that ``text`` reads."""
    if not autoscalers.NEEDED.isdisjoint(names):
        return NEEDED
    if not autoscalers.LOADS.isdisjoint(names):
        return LOAD
    if any("request" in name or "arrivals" in name for name in names):
        return REQUESTS
    raise AutoscalerError(
        f"metric {text!r} can't be simulated: use cpu, a metric of Carpool ({', '.join(sorted(autoscalers.METRICS))}), "
        "or a rate of requests (a name with `request` or `arrivals`)"
    )


def _behavior(within: Mapping[str, Any], where: str) -> Behavior | None:
    """Read the rules, and fill in defaults as the API server does; ``None``: no rules, with other defaults."""
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
        window=float(
            _whole(
                given.get("stabilizationWindowSeconds", round(default.window)), f"{where}.stabilizationWindowSeconds", 0
            )
        ),
        policies=tuple(policies) or default.policies,
        select=_choice(Select, given.get("selectPolicy", default.select), f"{where}.selectPolicy"),
        tolerance=_number(given.get("tolerance", default.tolerance), f"{where}.tolerance", zero=True),
    )


def _policy(given: Mapping[str, Any], where: str) -> Policy:
    _known(given, POLICY_FIELDS, where)
    value, seconds = (_whole(given[name], f"{where}.{name}", 1) for name in ("value", "periodSeconds"))
    return Policy(_choice(Unit, given["type"], f"{where}.type"), value, float(seconds))


def _choice(names: type[Name], given: str, where: str) -> Name:
    try:
        return names(given)
    except ValueError:
        raise AutoscalerError(f"{where}: {given!r} is none of {', '.join(names)}") from None


def _whole(given: object, where: str, least: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise AutoscalerError(f"{where}: {given!r} is no whole number from {least}")
    return given


def _number(given: object, where: str, *, zero: bool = False) -> float:
    """Read a quantity above 0; ``zero``: 0 is allowed."""
    try:
        found = quantity(str(given))
    except ValueError:
        found = -1.0
    if not isfinite(found) or found < 0 or (found == 0 and not zero):
        raise AutoscalerError(f"{where}: {given!r} is no number {'from' if zero else 'above'} 0")
    return found


def _fields(given: object, where: str) -> Mapping[str, Any]:
    """Return the fields that have a value: the API server treats null as a missing field."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise AutoscalerError(f"{where} has no fields")
    return {str(name): value for name, value in given.items() if value is not None}


def _list(within: Mapping[str, Any], name: str, where: str) -> list[Mapping[str, Any]]:
    given = within.get(name) or []
    if not isinstance(given, list):
        raise AutoscalerError(f"{where}.{name} is no list")
    return [_fields(each, f"{where}.{name}") for each in given]


def _known(given: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    if others := sorted(given.keys() - set(names)):
        raise AutoscalerError(
            f"{where}.{others[0]} can't be simulated: take it out of a copy of the manifest; {', '.join(names)} can"
        )
