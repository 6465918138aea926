from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
import yaml
from times import Quick

from carpool_operator.api.model import Target
from carpool_operator.cluster import watching
from carpool_operator.cluster.autoscalers import HPAS, METRICS, SCALED_OBJECTS, RawHpa, RawScaledObject, query
from carpool_operator.cluster.fleet import Fleet, watch_of
from carpool_operator.cluster.kinds import KINDS

HPA, SCALED_OBJECT = ("autoscaling/v2", HPAS), ("keda.sh/v1alpha1", SCALED_OBJECTS)
WEB = Target("ns", "Deployment", "web")
NAMED = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"}


def metric(name, kind="External", target="900m"):
    source = {"metric": {"name": name}, "target": {"type": "AverageValue", "averageValue": target}}
    return {"type": kind, kind.lower(): source}


def hpa(*metrics, to=NAMED, name="web", **fields):
    return {
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {"scaleTargetRef": to, "metrics": [*metrics]},
        **fields,
    }


def scaled(*triggers, to=NAMED, name="web"):
    spec = {"scaleTargetRef": to, "triggers": [{"type": kind, "metadata": said} for kind, said in triggers]}
    return {"metadata": {"name": name, "namespace": "ns"}, "spec": spec}


def prometheus(query, threshold="0.9"):
    return "prometheus", {"serverAddress": "http://prometheus", "query": query, "threshold": threshold}


def endpoint(url, value="load", target="0.9"):
    return "metrics-api", {"url": url, "valueLocation": value, "targetValue": target}


def of(raw, plain):
    kind = KINDS[HPAS if raw is RawHpa else SCALED_OBJECTS]
    return kind.kept.keep(kind.kept.one.decode(msgspec.json.encode(plain)))


CPU = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 60}}}


@pytest.mark.parametrize("name", sorted(METRICS))
def test_an_hpa_that_names_our_load_is_seen(name):
    found = of(RawHpa, hpa(CPU, metric(name)))
    assert (found.target, str(found)) == (WEB, "HorizontalPodAutoscaler/web")


@pytest.mark.parametrize(
    "plain",
    [
        hpa(CPU),
        hpa(metric("requests_per_second")),
        hpa(metric("carpool_load_of_somebody_else")),
        hpa(metric("s0-prometheus"), name="keda-hpa-web"),
        hpa(metric("carpool_load"), to={**NAMED, "kind": "Widget"}),
        hpa(metric("carpool_load"), to={**NAMED, "apiVersion": "example.com/v1"}),
        {"metadata": {"name": "odd", "namespace": "ns"}, "spec": {"metrics": "none", "scaleTargetRef": [1]}},
        {"metadata": {"name": "odd", "namespace": "ns"}},
    ],
    ids=["cpu", "other metric", "longer name", "keda's", "other kind", "other group", "odd", "empty"],
)
def test_an_hpa_that_follows_something_else_is_not(plain):
    assert of(RawHpa, plain) is None


@pytest.mark.parametrize(
    "trigger",
    [
        prometheus('sum(carpool_load_ratio{pod=~"web-.*"})'),
        prometheus("carpool_target_load_replicas"),
        prometheus("max(carpool_target_needed_replicas_upper)"),
        prometheus('sum({__name__="carpool_load_ratio", pod=~"web-.*"})'),
        prometheus('sum({"carpool_load_ratio", pod=~"web-.*"})'),
        prometheus("100 * sum(carpool_load_ratio)", "90"),
        endpoint("http://web-admin.ns.svc.cluster.local:14090/capacity"),
    ],
)
def test_a_scaled_object_that_reads_our_load_is_seen(trigger):
    found = of(RawScaledObject, scaled(("cron", {}), trigger, to={"name": "web"}))
    assert (found.target, str(found)) == (WEB, "ScaledObject/web")


@pytest.mark.parametrize(
    ("plain", "full"),
    [
        (hpa(CPU, metric("carpool_load", target="700m")), 0.7),
        (hpa(metric("carpool_load_ratio", "Pods", "1")), 1.0),
        (hpa(metric("carpool_target_needed_replicas", target="1")), None),
        (hpa(metric("carpool_load", target="-1")), None),
        (hpa(metric("carpool_load", target={"many": 1})), None),
        (scaled(prometheus("sum(carpool_load_ratio)", "0.75")), 0.75),
        (scaled(prometheus("carpool_target_needed_replicas", "1")), None),
        (hpa(metric("carpool_target_needed_replicas_upper", target="1")), None),
        (scaled(prometheus("max(carpool_target_needed_replicas_upper)", "1")), None),
        # Percent, tenths, or what an adapter makes of it: no load of one replica.
        (hpa(metric("carpool_load", target="90")), None),
        (scaled(prometheus("100 * sum(carpool_load_ratio)", "90")), None),
        (scaled(prometheus("sum(carpool_load_ratio)/0.7", "1")), None),
        (scaled(prometheus("sum(carpool_load_ratio) - 1", "0.9")), None),
        # Signs in labels, in times and in comments compute nothing.
        (
            scaled(
                prometheus('sum(avg_over_time(carpool_load_ratio{pod=~"web-.*", zone!="a/b"}[1m:5s])) # a+b', "0.8")
            ),
            0.8,
        ),
        (scaled(prometheus("sum(carpool_load_ratio) or vector(0)", "0.8")), 0.8),
        (scaled(endpoint("http://web:14090/capacity", target="800m")), 0.8),
        (scaled(endpoint("http://web:14090/capacity", target="nan")), None),
    ],
)
def test_the_load_at_which_it_takes_a_replica_for_full_is_read(plain, full):
    named = {**plain, "spec": {**plain["spec"], "scaleTargetRef": NAMED}}
    assert of(RawHpa if "metrics" in plain["spec"] else RawScaledObject, named).full == full


@pytest.mark.parametrize(
    "trigger",
    [
        prometheus("sum(rate(http_requests_total[1m]))"),
        prometheus("my_carpool_load"),
        prometheus("carpool_load_seconds"),
        prometheus("web:carpool_load"),
        prometheus('sum(rate(http_requests_total{dashboard="carpool_load"}[1m]))'),
        endpoint("http://web:14090/capacity", "utilization"),
        endpoint("http://web:14090/queue"),
        ("kafka", {"query": "carpool_load"}),
    ],
)
def test_a_scaled_object_that_reads_something_else_is_not(trigger):
    assert of(RawScaledObject, scaled(trigger)) is None


@pytest.mark.parametrize(
    ("text", "computes"),
    [
        ('sum({__name__=~"carpool_load_ratio"})', False),
        ('label_replace(carpool_load_ratio, "a", "$1-x", "b", "(.*)")', False),
        ('sum by("a-b") (carpool_load_ratio)', False),
        ("100 * carpool_load_ratio", True),
    ],
)
def test_what_a_query_names_and_whether_it_computes(text, computes):
    found = query(text)
    assert "carpool_load_ratio" in found.names
    assert found.computes == computes


def test_a_long_query_is_read_once():
    # Each letter was looked at again for every one before it: minutes for what an object may hold.
    assert query("a" * 200_000 + "[" * 20_000).names == {"a" * 200_000}


def test_what_is_no_url_is_nobody_s_load():
    plain = scaled(endpoint("http://[svc/capacity"))
    assert of(RawScaledObject, plain) is None


@pytest.mark.parametrize("name", ["hpa.yaml", "keda-prometheus.yaml", "keda-metrics-api.yaml", "keda-http.yaml"])
def test_the_examples_are_seen(name):
    text = (Path(__file__).parents[3] / "examples" / "autoscaling" / name).read_text("utf-8")
    documents = [
        each for each in yaml.safe_load_all(text) if each["kind"] in {"HorizontalPodAutoscaler", "ScaledObject"}
    ]
    assert documents
    for plain in documents:
        assert of(RawHpa if plain["kind"] == "HorizontalPodAutoscaler" else RawScaledObject, plain) is not None


def names(fleet):
    return {target: str(each) for target, each in fleet.autoscalers().items()}


def test_an_autoscaler_of_a_deployment_that_kserve_created_follows_the_inference_service():
    fleet = Fleet(lambda: 1.0)
    meta = {"namespace": "ns", "uid": "u", "resourceVersion": "1", "creationTimestamp": "2026-11-21T12:00:00Z"}
    service = {"metadata": {**meta, "name": "bert"}, "spec": {"predictor": {}}}
    deployment = {**NAMED, "name": "bert-predictor"}
    scaler = {"metadata": {**meta, "name": "bert"}, "spec": hpa(metric("carpool_load"), to=deployment)["spec"]}
    for kind in ("inferenceservices", HPAS):
        fleet.coverage.found(kind)
    fleet.handle_event(HPAS, False, scaler)
    assert names(fleet) == {Target("ns", "Deployment", "bert-predictor"): "HorizontalPodAutoscaler/bert"}
    fleet.handle_event("inferenceservices", False, service)
    assert names(fleet) == {Target("ns", "InferenceService", "bert"): "HorizontalPodAutoscaler/bert"}
    # One that KServe did not create is a workload of its own.
    fleet.handle_event("deployments", False, {"metadata": {**meta, "name": "bert-predictor"}})
    assert names(fleet) == {Target("ns", "Deployment", "bert-predictor"): "HorizontalPodAutoscaler/bert"}


async def test_they_are_followed_and_a_cluster_may_be_without_keda(api, monkeypatch, caplog):
    monkeypatch.setattr(watching, "RARELY", 1e-3)
    fleet, kube, loop = Fleet(lambda: 1.0), api.kube(), asyncio.get_running_loop()
    watches = [
        watch_of(kube, fleet, kind, None, loop, log=logging.getLogger("test"), random=Quick())
        for kind in (HPAS, SCALED_OBJECTS)
    ]
    api.put(*HPA, hpa(metric("carpool_load")))
    for each in watches:
        each.start()
    await api.until(lambda: names(fleet) == {WEB: "HorizontalPodAutoscaler/web"})
    # KEDA comes, and is heard of.
    api.absent.discard(SCALED_OBJECTS)
    api.put(*SCALED_OBJECT, scaled(endpoint("http://db:14090/capacity"), to={"kind": "StatefulSet", "name": "db"}))
    await api.until(lambda: len(fleet.autoscalers()) == 2)
    assert names(fleet)[Target("ns", "StatefulSet", "db")] == "ScaledObject/web"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    # It follows something else now; the other one is deleted.
    api.put(*HPA, hpa(CPU))
    api.remove(*SCALED_OBJECT, "web")
    await api.until(lambda: fleet.autoscalers() == {})
    for each in watches:
        each.stop()
    api.end_watches()
    kube.close()
