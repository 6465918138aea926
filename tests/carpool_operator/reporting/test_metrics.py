from __future__ import annotations

from carpool_operator.api.model import Policy
from carpool_operator.api.spec import read_policy
from carpool_operator.reporting.metrics import METRICS, OperatorMetrics


def test_what_is_counted_is_served():
    metrics = OperatorMetrics()
    metrics.count("decisions", "Held", "TooFewSamples")
    metrics.count("pass_cpu_seconds", by=0.25)
    metrics.set("objects", 3, "pods")
    metrics.observe("pass_seconds", 0.02)
    metrics.before_scrape.append(lambda: metrics.set("leader", 1))

    text = metrics.text().decode()

    assert 'carpool_operator_decisions_total{action="Held",reason="TooFewSamples"} 1.0' in text
    assert "carpool_operator_pass_cpu_seconds_total 0.25" in text
    assert 'carpool_operator_objects{kind="pods"} 3.0' in text
    assert 'carpool_operator_pass_seconds_bucket{le="0.03"} 1.0' in text
    assert "carpool_operator_leader 1.0" in text
    assert "process_resident_memory_bytes" in text


def test_names_and_texts_are_in_order():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.text and not metric.text.endswith(".") for metric in METRICS)


def test_policies_say_what_their_targets_need_and_how_busy_they_are():
    capacity = {
        "target": "Deployment/resnet", "load": 2.4, "replicas": 3, "replicasUpper": 4, "serving": 2,
        "utilization": 0.8, "lowestUtilization": 0.5, "requestsPerSecond": 100.0,
    }  # fmt: skip
    policy = Policy(
        namespace="shop", name="resnet", uid="u", generation=1, created=0.0, spec=None, error="",
        status={"capacity": [capacity]},
    )  # fmt: skip
    metrics = OperatorMetrics()
    metrics.read_policies(lambda: [policy])

    text = metrics.text().decode()

    labels = '{kind="Deployment",policy="resnet",policy_namespace="shop",target="resnet"}'
    for name, value in (
        ("load_replicas", 2.4), ("needed_replicas", 3.0), ("needed_replicas_upper", 4.0), ("serving_replicas", 2.0),
        ("utilization_ratio", 0.8), ("lowest_utilization_ratio", 0.5), ("requests_per_second", 100.0),
    ):  # fmt: skip
        assert f"carpool_target_{name}{labels} {value}" in text
    assert "carpool_target_tokens_per_second{" not in text


def test_policies_say_their_slo_conditions_and_last_decision():
    status = {
        "conditions": [
            {"type": "SLOMet", "status": "False", "reason": "Missed", "message": "much"},
            {"type": "Ready", "status": "True", "reason": "Ready"},
        ],
        "lastDecision": {"action": "Applied", "reason": "LessDeviceTime", "at": "2026-01-01T00:00:00Z"},
    }
    spec = read_policy({"spec": {"targetRefs": [{"name": "a"}], "slo": {"latency": {"p50": "5ms", "p99": "50ms"}}}})
    common = {"namespace": "shop", "uid": "u", "generation": 1, "created": 0.0}
    known = [
        Policy(**common, name="resnet", spec=spec, error="", status=status),
        Policy(**common, name="new", spec=None, error="wrong", status={}),
    ]
    metrics = OperatorMetrics()
    metrics.read_policies(lambda: known)

    text = metrics.text().decode()

    of = 'policy="resnet",policy_namespace="shop"'
    assert f'carpool_policy_condition{{condition="SLOMet",{of},reason="Missed",status="False"}} 1.0' in text
    assert f'carpool_policy_condition{{condition="Ready",{of},reason="Ready",status="True"}} 1.0' in text
    assert f'carpool_policy_slo_seconds{{{of},quantile="0.99"}} 0.05' in text
    assert f'carpool_policy_slo_seconds{{{of},quantile="0.5"}} 0.005' in text
    at = 'carpool_policy_last_decision_timestamp_seconds{action="Applied",'
    assert f'{at}{of},reason="LessDeviceTime"}} 1.767' in text
    assert 'policy="new"' not in text
    known.clear()
    assert "resnet" not in metrics.text().decode()
