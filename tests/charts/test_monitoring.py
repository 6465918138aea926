"""Alerts and dashboard ask for metrics that exist, by labels that these have, in words that Prometheus understands."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from chart import CHART
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from carpool_cli.planning import history
from carpool_operator.injector.decide import InjectorSettings
from carpool_operator.reporting.metrics import OF_POLICIES, OperatorMetrics
from carpool_operator.tuning.sources import scrapes
from carpool_operator.webhook.server import Injector
from carpool_sidecar.admin.metrics import METRICS, PREFIX

ALERTS = CHART / "monitoring" / "alerts.yaml"
DASHBOARD = json.loads((CHART / "monitoring" / "dashboard.json").read_text("utf-8"))
_ALL = [rule for group in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"] for rule in group["rules"]]
RULES = [rule for rule in _ALL if "alert" in rule]
RECORDED = {rule["record"]: rule["expr"] for rule in _ALL if "record" in rule}
PANELS = DASHBOARD["panels"]

SERIES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}
SCRAPED = {"namespace", "pod", "target"}
"""Labels that the chart's PodMonitors add to every series."""

CLUSTER_SIDE = Injector(InjectorSettings(image="", version="")).registry._names_to_collectors
CLUSTER_SIDE |= OperatorMetrics()._registry._names_to_collectors
OF_POLICY = {metric.name: {*metric.labels, "namespace", "pod"} for metric in OF_POLICIES}

KNOWN = {
    PREFIX + metric.name + suffix: {*metric.labels, *SCRAPED, *(["le"] if suffix == "_bucket" else [])}
    for metric in METRICS
    for suffix in SERIES[metric.kind]
}
KNOWN |= {
    name: {*collector._labelnames, "namespace", "pod"}
    for name, collector in CLUSTER_SIDE.items()
    if name.startswith(PREFIX)
} | OF_POLICY

# What is recorded has the labels that it is summed by.
KNOWN |= {name: {"namespace", "target", "model"} for name in RECORDED}

EXPRESSIONS = {f"alert {rule['alert']}": rule["expr"] for rule in RULES}
EXPRESSIONS |= {f"record {name}": expression for name, expression in RECORDED.items()}
EXPRESSIONS |= {
    f"panel {panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]
}
EXPRESSIONS |= {f"annotation {each['name']}": each["expr"] for each in DASHBOARD["annotations"]["list"]}
EXPRESSIONS |= {
    f"variable {variable['name']}": found[1]
    for variable in DASHBOARD["templating"]["list"]
    if (found := re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]))
}


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_metrics_and_labels_exist(expression):
    used = re.findall(r"\b(carpool[_:][\w:]+)(?:\{(.*?)\})?", expression)
    assert used
    for name, matchers in used:
        assert name in KNOWN, name
        assert set(re.findall(r"(\w+)[=!]", matchers)) <= KNOWN[name], f"{name}{{{matchers}}}"
    grouped = set(", ".join(re.findall(r"\b(?:by|on) \((.*?)\)", expression)).split(", ")) - {""}
    assert grouped <= set.union(*(KNOWN[name] for name, _ in used))


def test_series_of_batch_times_can_be_dropped_and_nothing_else_goes(helm):
    page = (CHART.parents[1] / "docs" / "install.md").read_text("utf-8")
    (values,) = re.findall(r"^<!-- chart values: series.yaml -->\n```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monitors = [each for each in helm.render(yaml.safe_load(values)) if each["kind"] == "PodMonitor"]
    by_name = {each["metadata"]["name"]: each["spec"]["podMetricsEndpoints"][0] for each in monitors}
    (rule,) = by_name["carpool-sidecars"]["metricRelabelings"]
    assert "metricRelabelings" not in by_name["carpool"]
    assert (rule["action"], rule["sourceLabels"]) == ("drop", ["__name__"])
    dropped = {name for name in KNOWN if re.fullmatch(rule["regex"], name)}
    assert dropped == {*history.CELLS} == {*scrapes.CELLS}
    used = {name for expression in EXPRESSIONS.values() for name in re.findall(r"carpool[_:][\w:]+", expression)}
    assert not used & dropped


def relabelled(job, found):
    """The labels that a job of Prometheus gives to a target that it found; ``None`` where it drops it."""
    labels = {}
    for rule in job["relabel_configs"]:
        value = ";".join(found.get(name, "") for name in rule["source_labels"])
        if rule.get("action") == "keep":
            if not re.fullmatch(rule["regex"], value):
                return None
        else:
            labels[rule["target_label"]] = value
    return labels


@pytest.mark.parametrize("shards", [1, 2])
def test_what_the_page_scrapes_without_the_prometheus_operator_is_what_the_alerts_need(helm, shards):
    page = (CHART.parents[1] / "docs" / "install.md").read_text("utf-8")
    (text,) = re.findall(r"^```yaml\n(scrape_configs:.*?)^```$", page, re.MULTILINE | re.DOTALL)
    sidecars, own = yaml.safe_load(text)["scrape_configs"]
    model = {
        "__meta_kubernetes_namespace": "shop", "__meta_kubernetes_pod_name": "resnet-0",
        "__meta_kubernetes_pod_label_carpool_dev_injected": "true",
        "__meta_kubernetes_pod_annotation_carpool_dev_target": "Deployment/resnet",
        "__meta_kubernetes_pod_container_port_name": "carpool-admin",
    }  # fmt: skip
    assert relabelled(sidecars, model) == {"namespace": "shop", "pod": "resnet-0", "target": "Deployment/resnet"}
    assert relabelled(own, model) is None
    scraped = set()
    deployments = [each for each in helm.render({"operator": {"shards": shards}}) if each["kind"] == "Deployment"]
    for each in deployments:
        template, name = each["spec"]["template"], each["metadata"]["name"]
        assert each["metadata"]["namespace"] in own["kubernetes_sd_configs"][0]["namespaces"]["names"]
        found = {"__meta_kubernetes_namespace": each["metadata"]["namespace"], "__meta_kubernetes_pod_name": name}
        for label, value in template["metadata"]["labels"].items():
            found["__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label)] = value
        for port in template["spec"]["containers"][0]["ports"]:
            target = found | {"__meta_kubernetes_pod_container_port_name": port["name"]}
            assert relabelled(sidecars, target) is None
            if (labels := relabelled(own, target)) is not None:
                assert labels == {"namespace": "carpool-system", "pod": name}
                scraped.add((name, port["name"]))
    assert scraped == {(each["metadata"]["name"], "http") for each in deployments}


@pytest.fixture(scope="module")
def promtool(program):
    found = program("promtool")
    return lambda *arguments: subprocess.run(  # noqa: S603 - Prometheus's own, by our arguments
        [found, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_prometheus_understands_the_alerts(promtool):
    done = promtool("check", "rules", ALERTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should_and_only_then(promtool):
    done = promtool("test", "rules", Path(__file__).parent / "alerts_test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried():
    tests = yaml.safe_load((Path(__file__).parent / "alerts_test.yaml").read_text("utf-8"))["tests"]
    fired = {
        re.search('alertname="(.*?)"', case["expr"]).group(1)
        for test in tests
        for case in test["promql_expr_test"]
        if case["exp_samples"]
    }
    assert fired == {rule["alert"] for rule in RULES}


def test_the_dashboard_shows_the_slo_and_the_decisions():
    (latency,) = [panel for panel in PANELS if panel["title"] == "Latency"]
    assert "carpool_slo_target_seconds" in {
        name for each in latency["targets"] for name in re.findall(r"carpool_\w+", each["expr"])
    }
    (decisions,) = [each for each in DASHBOARD["annotations"]["list"] if each["name"] == "Decisions"]
    assert "carpool_policy_last_decision_timestamp_seconds" in decisions["expr"]


def test_colours_go_by_the_error_budget():
    """How many misses are many, the policy's quantile says: 2 % are fine for a p90, and far too many for a p99."""
    coloured = [panel for panel in PANELS if "thresholds" in panel["fieldConfig"]["defaults"]]
    assert {panel["title"] for panel in coloured} == {
        "Error budget: how fast it burns", "Token streams: how fast the error budget burns",
    }  # fmt: skip
    assert all(
        ":ratio_rate" in target["expr"] and "/" in target["expr"] for panel in coloured for target in panel["targets"]
    )


def test_the_dashboard_counts_pods_as_the_leaders_of_all_shards_do(promtool, tmp_path):
    (panel,) = [panel for panel in PANELS if panel["title"] == "Operator: pods"]
    leaders = {"0-old": 0, "0": 1, "1": 1}
    pods = {"0-old": 58, "0": 60, "1": 40}
    series = {f'carpool_operator_leader{{namespace="c", pod="{pod}"}}': leads for pod, leads in leaders.items()}
    for name in ('objects{kind="pods", ', "pods_acknowledged{", "pods_missed{"):
        series |= {f'carpool_operator_{name}namespace="c", pod="{pod}"}}': count for pod, count in pods.items()}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": f"{value}x5"} for name, value in series.items()],
        "promql_expr_test": [
            {"expr": target["expr"], "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": 100}]}
            for target in panel["targets"]
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    done = promtool("test", "rules", tmp_path / "test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_understands_the_dashboard(promtool, tmp_path):
    # As rules, for that is what promtool reads. Grafana fills in what begins with $.
    rules = [
        {"record": f"a{number}", "expr": re.sub(r"\$\w+", "1m", expression)}
        for number, expression in enumerate(EXPRESSIONS.values())
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = promtool("check", "rules", tmp_path / "rules.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule):
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"].keys() == {"summary", "description"}


OF_ANNOTATIONS = {"step", "textFormat", "titleFormat", "useValueForTime"}
"""What Grafana's data source for Prometheus reads of an annotation, and Grafana's schemas leave to it."""


def unknown(written, known, path=""):
    """What Grafana's schemas have no place for, as paths: what they don't know is lost where they are read with it."""
    if isinstance(written, dict):
        gone = {f"{path}.{key}" for key in written if key not in known}
        return gone.union(*(unknown(written[key], known[key], f"{path}.{key}") for key in written if key in known))
    if isinstance(written, list):
        assert len(written) == len(known), path
        return set().union(*(unknown(*pair, f"{path}[]") for pair in zip(written, known, strict=True)))
    assert written == known, path
    return set()


def test_grafana_s_schemas_know_every_field_of_the_dashboard():
    register_default_plugins()  # each kind of panel has options of its own

    def lost(dashboard):
        read = Dashboard.from_json(dashboard)
        return unknown(dashboard, json.loads(JSONEncoder(sort_keys=True).encode(read)))

    assert lost(DASHBOARD) == {f".annotations.list[].{each}" for each in OF_ANNOTATIONS}
    wrong = json.loads(json.dumps(DASHBOARD))
    wrong["panels"][0]["fieldConfig"]["defaults"]["units"] = "s"
    wrong["panels"][1]["targets"][0]["query"] = "up"
    assert {".panels[].fieldConfig.defaults.units", ".panels[].targets[].query"} <= lost(wrong)


def test_panels_have_their_own_place():
    taken = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_the_chart_carries_them_unchanged(helm):
    values = {"prometheusRule": {"enabled": True}, "dashboard": {"enabled": True}}
    objects = {each["kind"]: each for each in helm.render({"monitoring": values})}
    assert objects["PrometheusRule"]["spec"] == yaml.safe_load(ALERTS.read_text("utf-8"))
    assert json.loads(objects["ConfigMap"]["data"]["carpool.json"]) == DASHBOARD
