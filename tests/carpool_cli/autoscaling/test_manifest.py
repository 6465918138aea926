from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from carpool_cli.autoscaling.controller import (
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
from carpool_cli.autoscaling.manifest import AutoscalerError, read

EXAMPLES = Path(__file__).parents[3] / "examples/autoscaling"
USE = {"type": "Utilization", "averageUtilization": 60}
CPU_METRIC = {"type": "Resource", "resource": {"name": "cpu", "target": USE}}
MEMORY_METRIC = {"type": "Resource", "resource": {"name": "memory", "target": USE}}
ENDPOINT = {"type": "metrics-api", "metadata": {"targetValue": "0.9", "valueLocation": "load"}}
PUSH = {"type": "external-push", "metadata": {"scalerAddress": "scaler:9090", "interceptorRoute": "resnet"}}


def hpa(metric=CPU_METRIC, **spec):
    return {"kind": "HorizontalPodAutoscaler", "spec": {"maxReplicas": 8, "metrics": [metric], **spec}}


def scaled(*triggers, **spec):
    return {"kind": "ScaledObject", "spec": {"minReplicaCount": 1, "triggers": [*triggers], **spec}}


def behaving(**rules):
    return hpa(behavior=rules)


def test_hpas_are_read_with_the_controllers_defaults():
    found = read(behaving(scaleDown={"stabilizationWindowSeconds": 60}))
    behavior = Behavior(up=UP, down=Rules(60.0, DOWN.policies))
    assert found == Autoscaler(metrics=(Metric(CPU, 60.0),), least=1, most=8, behavior=behavior)
    pods = {"type": "Pods", "pods": {"metric": {"name": "requests_per_second"}, "target": {"averageValue": "2k"}}}
    assert read(hpa(pods)) == Autoscaler(metrics=(Metric(REQUESTS, 2000.0),), least=1, most=8)
    container = {"name": "cpu", "container": "model", "target": USE}
    assert read(hpa({"type": "ContainerResource", "containerResource": container})).metrics[0].name == CPU


@pytest.mark.parametrize("spec", [{}, {"metrics": []}, {"metrics": None}])
def test_an_hpa_without_metrics_scales_at_80_percent_of_cpu(spec):
    found = read({"kind": "HorizontalPodAutoscaler", "spec": {"maxReplicas": 8, **spec}})
    assert found.metrics == (Metric(CPU, 80.0),)


def test_a_behavior_is_read_in_full():
    policies = [
        {"type": "Pods", "value": 2, "periodSeconds": 60},
        {"type": "Percent", "value": 50, "periodSeconds": 30},
    ]
    rules = {"policies": policies, "selectPolicy": "Min", "tolerance": "50m"}
    found = read(behaving(scaleUp=rules, scaleDown={"selectPolicy": "Disabled"})).behavior
    read_as = (Policy(Unit.PODS, 2, 60.0), Policy(Unit.PERCENT, 50, 30.0))
    assert found == Behavior(
        up=Rules(0.0, read_as, Select.MIN, 0.05), down=Rules(300.0, DOWN.policies, Select.DISABLED)
    )
    config = {"advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": rules}}}}
    assert read(scaled(ENDPOINT, **config)).behavior.up == found.up


def test_scaled_objects_are_read_too():
    assert read(scaled(ENDPOINT, maxReplicaCount=4)) == Autoscaler(metrics=(Metric(LOAD, 0.9),), least=1, most=4)
    query = {"type": "prometheus", "metadata": {"threshold": "50", "query": "sum(rate(carpool_arrivals_total[1m]))"}}
    assert read(scaled(query)).metrics[0].name == REQUESTS


def prometheus(query, threshold="300"):
    return {"type": "prometheus", "metadata": {"query": query, "threshold": threshold}}


@pytest.mark.parametrize(
    ("query", "metric"),
    [
        ('sum(carpool_load_ratio{pod=~"web-.*"})', LOAD),
        ("sum(avg_over_time(carpool_load_ratio[5m])) or vector(0)", LOAD),
        ('max(carpool_target_load_replicas{target="requests"})', LOAD),
        ('max(carpool_target_needed_replicas{target="web"})', NEEDED),
        ("max(carpool_target_needed_replicas_upper)", NEEDED),
        ('sum(rate(istio_requests_total{destination_workload="web"}[1m]))', REQUESTS),
        ('sum(rate(http_requests_total{service="image-upload"}[1m]))', REQUESTS),
        ("sum(workload_requests_per_second)", REQUESTS),
    ],
)
def test_a_query_is_of_the_metric_that_it_names(query, metric):
    assert read(scaled(prometheus(query))).metrics[0].name == metric


def pods(name, value):
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": {"averageValue": value}}}


def test_several_metrics_are_read_in_order():
    load = pods("carpool_load", "900m")
    assert read(hpa(metrics=[CPU_METRIC, load])).metrics == (Metric(CPU, 60.0), Metric(LOAD, 0.9))
    cpu = {"type": "cpu", "metricType": "Utilization", "metadata": {"value": "60"}}
    found = read(scaled(PUSH, cpu, ENDPOINT))
    assert found.metrics == (Metric(CPU, 60.0), Metric(LOAD, 0.9)), "what starts the first replica is no metric"


def test_null_is_the_default():
    behavior = {"scaleDown": {"stabilizationWindowSeconds": None, "policies": None, "tolerance": None}, "scaleUp": None}
    given = hpa(pods("carpool_load", "900m"), minReplicas=None, behavior=behavior)
    assert read(given) == Autoscaler(metrics=(Metric(LOAD, 0.9),), least=1, most=8, behavior=Behavior())
    given = scaled(ENDPOINT, PUSH, minReplicaCount=None, maxReplicaCount=None, cooldownPeriod=None, advanced=None)
    assert read(given) == Autoscaler(metrics=(Metric(LOAD, 0.9),), least=0, most=100)


def test_none_runs_only_where_something_starts_the_first():
    found = read(scaled(ENDPOINT, PUSH, minReplicaCount=0, cooldownPeriod=120))
    assert (found.least, found.cooldown) == (0, 120.0)
    with pytest.raises(AutoscalerError, match="minReplicaCount: 0, or none, needs a trigger"):
        read({"kind": "ScaledObject", "spec": {"triggers": [ENDPOINT]}})


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_can_be_simulated(path):
    kinds = {"HorizontalPodAutoscaler", "ScaledObject"}
    for document in yaml.safe_load_all(path.read_text("utf-8")):
        if document.get("kind") in kinds:
            found = read(document)
            assert (found.metrics, found.most) == ((Metric(LOAD, 0.9),), 8)


POLICY = {"type": "Pods", "value": 2, "periodSeconds": 60}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"kind": "Deployment"}, "no HorizontalPodAutoscaler"),
        (hpa({"type": "Object"}), "Object without a name can't be simulated"),
        (
            hpa(metrics=[MEMORY_METRIC, CPU_METRIC]),
            "metric Resource memory can't be .* Leave it out in a copy",
        ),
        # KEDA divides what the query gives by the threshold: with these it stays at one replica, or asks for 60 times.
        (scaled(prometheus("avg(carpool_load_ratio)")), "avg can't be simulated: write the sum"),
        (scaled(prometheus("max by (pod) (carpool_load_ratio)")), "max can't be simulated"),
        (scaled(prometheus("count(carpool_target_load_replicas)")), "count can't be simulated"),
        (scaled(prometheus("sum(increase(carpool_arrivals_total[1m]))")), "increase can't be simulated"),
        (
            scaled(prometheus("histogram_quantile(0.9, rate(http_request_duration_seconds_bucket[1m]))")),
            "histogram_quantile can't be",
        ),
        (hpa({"type": "Pods", "pods": {"metric": {"name": "x"}, "target": {"averageValue": "1"}}}), "'x' can't be"),
        ({**hpa(), "apiVersion": "autoscaling/v1"}, "autoscaling/v1' can't be simulated: write it as autoscaling/v2"),
        ({**scaled(ENDPOINT), "apiVersion": "keda.sh/v2"}, "write it as keda.sh/v1alpha1"),
        (scaled(), "triggers: none says how many replicas to run: name one that does.$"),
        (scaled(PUSH), "name one that does. external-push only starts the first one"),
        (hpa(minReplicas=0), "spec.minReplicas: 0"),
        (hpa(sinceWhen=1), "spec.sinceWhen can't be"),
        (hpa(behavior=[]), "spec.behavior has no fields"),
        (behaving(scaleSideways={}), "spec.behavior.scaleSideways can't be .*; scaleUp, scaleDown can"),
        (behaving(scaleUp={"delay": 1}), "spec.behavior.scaleUp.delay can't be"),
        (behaving(scaleUp={"policies": POLICY}), "spec.behavior.scaleUp.policies is no list"),
        (behaving(scaleUp={"policies": []}), "spec.behavior.scaleUp.policies: "),
        (
            behaving(scaleUp={"policies": [{**POLICY, "type": "Rows"}]}),
            "policies.type: 'Rows' is none of Pods, Percent",
        ),
        (behaving(scaleUp={"policies": [{**POLICY, "jitter": 1}]}), "scaleUp.policies.jitter can't be"),
        (behaving(scaleDown={"selectPolicy": "Mean"}), "scaleDown.selectPolicy: 'Mean' is none of Max, Min, Disabled"),
        (hpa(maxReplicas="40"), "spec.maxReplicas: '40' is no whole number from 1"),
        (hpa(maxReplicas=True), "spec.maxReplicas: True is no whole"),
        (hpa(minReplicas=9), "8 replicas at most, and 9 at least"),
        (hpa(pods("carpool_load", "0")), "averageValue: '0' is no number above 0"),
        (hpa(pods("carpool_load", "1x")), "averageValue: '1x' is no number above 0"),
        (hpa({**CPU_METRIC, "resource": {"name": "cpu", "target": {"averageUtilization": -60}}}), "-60 is no number"),
        (hpa({**CPU_METRIC, "resource": "cpu"}), "spec.metrics.resource has no fields"),
        (behaving(scaleDown={"stabilizationWindowSeconds": -1}), "stabilizationWindowSeconds: -1 is no whole"),
        (behaving(scaleDown={"tolerance": "-1"}), "scaleDown.tolerance: '-1' is no number from 0"),
        (behaving(scaleUp={"policies": [{**POLICY, "periodSeconds": 0}]}), "policies.periodSeconds: 0 is no whole"),
        (behaving(scaleUp={"policies": [{**POLICY, "value": "4"}]}), "policies.value: '4' is no whole"),
        (behaving(scaleUp={"policies": ["Pods"]}), "policies has no fields"),
        ({"kind": "HorizontalPodAutoscaler", "spec": {"sinceWhen": 1, 2: 3}}, "spec.2 can't be"),
        (scaled(prometheus("sum(carpool_load_ratio)", "nan")), "threshold: 'nan' is no number"),
        (scaled(prometheus("100 * sum(carpool_load_ratio)", "90")), "arithmetic can't be simulated"),
        (scaled(prometheus("sum(image_downloads)")), "'sum.image_downloads.' can't be simulated: use .* carpool_load"),
        (scaled({**ENDPOINT, "metadata": {**ENDPOINT["metadata"], "valueLocation": "payload"}}), "'payload' can't"),
        (scaled({"type": "cpu", "metadata": "60"}), "spec.triggers.metadata has no fields"),
        (scaled(ENDPOINT, cooldownPeriod="5m"), "spec.cooldownPeriod: '5m' is no whole number from 0"),
        (scaled({"type": "kafka"}), "'kafka' can't be .* Leave it out in a copy"),
        (scaled(ENDPOINT, idleReplicaCount=0), "spec.idleReplicaCount can't be"),
        (scaled(ENDPOINT, advanced={"scalingModifiers": {}}), "spec.advanced.scalingModifiers can't be"),
        (scaled({**ENDPOINT, "metricType": "Value"}), "metricType Value can't be"),
        (scaled({**ENDPOINT, "useCachedMetrics": True}), "spec.triggers.useCachedMetrics can't be"),
    ],
)
def test_what_can_not_be_simulated_is_named(document, words):
    with pytest.raises(AutoscalerError, match=words):
        read(document)
