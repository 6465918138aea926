"""The server that matters judges specs as the types do, by rules that name the field."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from minicluster.client import ApiError
from minicluster.waiting import eventually

from carpool.policy.plain import PolicyError
from carpool_operator.api import cel, crd
from carpool_operator.api.spec import API_VERSION, KIND, read_policy, written

sys.path.insert(0, str(Path(__file__).parents[1] / "carpool_operator"))

from specs import near

EXAMPLES = Path(__file__).parents[2] / "examples" / "policies"
BASE = {"targetRefs": [{"name": "resnet"}], "slo": {"latency": {"p50": "20ms", "p99": "50ms"}}}
SECRET = {"name": "prometheus", "key": "token"}


def policy(spec, name="resnet"):
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}


def changed(path, value, spec=BASE):
    """The spec with a field set, or taken out by None."""
    spec = copy.deepcopy(spec)
    *way, last = path.split(".")
    inner = spec
    for step in way:
        inner = inner.setdefault(step, {})
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return spec


OAUTH2 = {"tokenUrl": "https://sso/token", "clientId": SECRET, "clientSecret": SECRET}


def scraped(**fields):
    return {"source": "Prometheus", "prometheus": {"url": "https://prometheus:9090", **fields}}


@pytest.fixture(scope="module")
def server(api):
    """The API with the CRD, as `kubectl apply` leaves it."""
    api.apply(crd.resource())
    api.until_served(crd.resource()["metadata"]["name"])
    return api


def refusal(server, namespace, spec):
    """What the server says of a spec, and with what fields; nothing where it takes it."""
    try:
        server.create(policy(spec), namespace, dryRun="All", fieldValidation="Strict")
    except ApiError as error:
        return str(error)
    return ""


GOLD = {"priority": "gold", "ttft": {"p99": "1s"}}

# Each: the field, a value that is refused, one beside it that is not, where the server says so, and what.
RULES = [
    ("slo", {}, {"latency": {"p90": "50ms"}}, "spec.slo", "name a latency"),
    ("slo", {"tpot": {"p99": "50ms"}}, {"ttft": {"p99": "2s"}, "tpot": {"p99": "50ms"}}, "spec.slo", "tpot needs ttft"),
    ("slo.ttft", {"p99": "0s"}, {"p99": "2s"}, "spec.slo.ttft.p99", "must be longer than 0s"),
    ("slo", {"latency": {"p99": "1s"}, "classes": [GOLD]}, {"ttft": {"p99": "2s"}, "classes": [GOLD]}, "spec.slo",
     "classes need ttft"),
    ("slo", {"ttft": {"p99": "2s"}, "classes": [GOLD, GOLD]}, {"ttft": {"p99": "2s"}, "classes": [GOLD]}, "spec.slo",
     "a class is named twice"),
    ("slo", {"ttft": {"p99": "2s"}, "classes": [{"priority": "gold"}]}, {"ttft": {"p99": "2s"}, "classes": [GOLD]},
     "spec.slo.classes[0]", "name ttft or tpot"),
    ("slo", {"ttft": {"p99": "2s"}, "classes": [{**GOLD, "priority": "batch"}]},
     {"ttft": {"p99": "2s"}, "classes": [GOLD]}, "spec.slo.classes[0].priority", "batch has no targets"),
    *(
        ("generation", bounds, {"kvBudgetPercent": 80, "order": "FCFS"}, "spec.generation", "needs slo.ttft")
        for bounds in ({"maxRunning": 4}, {"kvBudgetPercent": 90}, {"kvTokens": 9}, {"order": "ShortestPromptFirst"},
                       {"tenants": {"header": "x-tenant"}}, {"maxQueuedTokens": 9})
    ),
    ("slo", {"latency": {"p99": "1s"}}, {"ttft": {"p99": "2s"}}, "spec.generation", "needs slo.ttft",
     changed("generation", {"maxRunning": 4}, {**BASE, "slo": {"ttft": {"p99": "2s"}}})),
    ("slo.latency", {}, {"p999": "50ms"}, "spec.slo.latency", "name at least one of p50, p90, p95, p99, p999"),
    *(
        ("slo.latency", {low: "51ms", high: "50ms"}, {low: "50ms", high: "50ms"}, f"spec.slo.latency.{low}",
         f"{low} (51ms) is longer than {high} (50ms): lower it or raise {high}")
        for index, low in enumerate(cel.PERCENTILES) for high in cel.PERCENTILES[index + 1:]
    ),
    *(
        ("slo.latency", {name: "0s"}, {name: "1ms"}, f"spec.slo.latency.{name}", "must be longer than 0s")
        for name in cel.PERCENTILES
    ),
    ("bounds.maxBatch", {"min": 9, "max": 8}, {"min": 8, "max": 8}, "spec.bounds.maxBatch", "min exceeds max"),
    ("bounds.maxInFlight", {"min": 3, "max": 2}, {"min": 2, "max": 2}, "spec.bounds.maxInFlight", "min exceeds max"),
    ("bounds.maxWait", {"min": "3ms", "max": "2ms"}, {"min": "0s", "max": "2ms"}, "spec.bounds.maxWait",
     "min 3ms exceeds max 2ms"),
    ("bounds.maxWait.min", "50ms", "49ms", "spec.bounds.maxWait.min", "50ms is not below the SLO of 50ms"),
    ("bounds.maxWait.max", "1m", "49ms", "spec.bounds.maxWait.max", "1m is not below the SLO of 50ms"),
    *(
        (f"bounds.maxWait.{end}", slo[high], "9ms", f"spec.bounds.maxWait.{end}", f"not below the SLO of {slo[high]}",
         {**BASE, "slo": {"latency": slo}})
        for end in ("min", "max")
        for slo, high in (({"p50": "10ms"}, "p50"), ({"p50": "10ms", "p90": "20ms"}, "p90"),
                          ({"p90": "10ms", "p95": "20ms"}, "p95"), ({"p95": "10ms", "p999": "1s"}, "p999"))
    ),
    ("models", [{"name": "a"}, {"name": "a"}], [{"name": "a"}, {"name": "b"}], "spec.models[1]", "Duplicate value"),
    ("models", [{"name": "a", "bounds": {"maxBatch": {"min": 2, "max": 1}}}],
     [{"name": "a", "bounds": {"maxBatch": {"min": 1, "max": 1}}}], "spec.models[0].bounds.maxBatch",
     "min exceeds max"),
    *(
        ("models", [{"name": "a", "bounds": {"maxWait": {end: "50ms"}}}],
         [{"name": "a", "bounds": {"maxWait": {end: "49ms"}}}], "spec.models",
         f"a model's bounds.maxWait.{end} is not below the SLO")
        for end in ("min", "max")
    ),
    *(
        ("models", [{"name": "a", "bounds": {field: {end: wrong}}}], [{"name": "a", "bounds": {field: {end: fits}}}],
         "spec.models", f"a model's bounds.{field} has one end, which the policy's other end contradicts: name both",
         changed(f"bounds.{field}", {other: fits}))
        for field, end, other, wrong, fits in (
            ("maxBatch", "min", "max", 9, 8), ("maxBatch", "max", "min", 7, 8),
            ("maxInFlight", "min", "max", 3, 2), ("maxInFlight", "max", "min", 1, 2),
            ("maxWait", "min", "max", "3ms", "2ms"), ("maxWait", "max", "min", "1ms", "2ms"),
        )
    ),
    ("baseline.maxBatch", 65, 64, "spec.baseline.maxBatch", "lies outside bounds.maxBatch, 1 to 64 unless set"),
    ("baseline.maxInFlight", 33, 32, "spec.baseline.maxInFlight", "lies outside bounds.maxInFlight, 1 to 32"),
    ("baseline.maxWait", "26ms", "25ms", "spec.baseline.maxWait", "26ms lies outside bounds.maxWait"),
    ("baseline.maxBatch", 7, 8, "spec.baseline.maxBatch", "lies outside", changed("bounds.maxBatch", {"min": 8})),
    ("baseline.maxBatch", 99, 100, "spec.baseline.maxBatch", "lies outside", changed("bounds.maxBatch", {"min": 100})),
    ("baseline.maxBatch", 129, 128, "spec.baseline.maxBatch", "lies outside", changed("bounds.maxBatch", {"max": 128})),
    ("baseline.maxInFlight", 3, 2, "spec.baseline.maxInFlight", "lies outside",
     changed("bounds.maxInFlight", {"max": 2})),
    ("baseline.maxWait", "1ms", "2ms", "spec.baseline.maxWait", "1ms lies outside",
     changed("bounds.maxWait", {"min": "2ms"})),
    ("baseline.maxWait", "31ms", "30ms", "spec.baseline.maxWait", "31ms lies outside",
     changed("bounds.maxWait", {"min": "30ms"})),
    ("baseline.maxWait", "41ms", "40ms", "spec.baseline.maxWait", "41ms lies outside",
     changed("bounds.maxWait", {"max": "40ms"})),
    ("admission.timeout", "0s", "1ms", "spec.admission.timeout", "must be longer than 0s"),
    ("metrics.staleAfter", "0s", "1ms", "spec.metrics.staleAfter", "must be longer than 0s"),
    ("metrics", {"prometheus": {"url": "http://x"}}, {}, "spec.metrics.prometheus", "is for source Prometheus"),
    ("metrics", {"source": "Prometheus"}, scraped(), "spec.metrics.prometheus", "name its url"),
    ("metrics", {**scraped(interval="30s"), "staleAfter": "30s"}, {**scraped(interval="29s"), "staleAfter": "30s"},
     "spec.metrics.staleAfter", "30s is not longer than prometheus.interval 30s"),
    ("metrics", scraped(auth={"oauth2": {**OAUTH2, "tokenUrl": "http://x", "ca": {"secret": SECRET}}}),
     scraped(auth={"oauth2": {**OAUTH2, "ca": {"secret": SECRET}}}), "spec.metrics.prometheus.auth.oauth2.ca",
     "is for an https tokenUrl"),
    ("metrics", scraped(headers=[{"name": "hOst", "value": "a"}]), scraped(headers=[{"name": "X-Host", "value": "a"}]),
     "spec.metrics.prometheus.headers[0].name", "hOst is set by the operator"),
    ("metrics", scraped(headers=[{"name": "X-A"}]), scraped(headers=[{"name": "X-A", "secret": SECRET}]),
     "spec.metrics.prometheus.headers[0]", "name one of value and secret"),
    ("metrics", scraped(interval="0s"), scraped(interval="1ms"), "spec.metrics.prometheus.interval",
     "must be longer than 0s"),
    ("metrics", scraped(auth={}), scraped(auth={"bearer": SECRET}), "spec.metrics.prometheus.auth",
     "name one of bearer, basic and oauth2"),
    ("metrics", scraped(auth={"bearer": SECRET, "basic": {"username": SECRET, "password": SECRET}}),
     scraped(auth={"basic": {"username": SECRET, "password": SECRET}}), "spec.metrics.prometheus.auth",
     "name one of bearer, basic and oauth2"),
    ("metrics", scraped(url="http://x", tls={}), scraped(url="https://x", tls={}), "spec.metrics.prometheus.tls",
     "is for an https url"),
    ("metrics", scraped(tls={"ca": {}}), scraped(tls={"ca": {"configMap": SECRET}}), "spec.metrics.prometheus.tls.ca",
     "name one of secret and configMap"),
    ("metrics", scraped(tls={"ca": {"secret": SECRET}, "insecureSkipVerify": True}),
     scraped(tls={"ca": {"secret": SECRET}, "insecureSkipVerify": False}),
     "spec.metrics.prometheus.tls.insecureSkipVerify", "drop one"),
    ("targetRefs", None, [{"name": "a"}], "spec", "name targetRefs or targetSelector"),
    ("targetRefs", [{"name": "a", "kind": "Rollout"}], [{"name": "a", "kind": "Rollout", "group": "argoproj.io"}],
     "spec.targetRefs[0].group", "Rollout is of the group argoproj.io: write that"),
    ("targetSelector", {"group": "ray.io", "matchLabels": {"a": "b"}}, {"matchLabels": {"a": "b"}},
     "spec.targetSelector.group", "Deployment is of the group apps: write that"),
    ("targetSelector", {"matchLabels": {"a b": "c"}}, {"matchLabels": {"a.b/c_d": "c"}},
     "spec.targetSelector.matchLabels", "one of the keys is no label"),
    ("targetSelector", {"matchLabels": {"a": "c d"}}, {"matchLabels": {"a": ""}},
     "spec.targetSelector.matchLabels.a", "should match"),
    ("targetSelector", {"matchExpressions": [{"key": "a b", "operator": "Exists"}]},
     {"matchExpressions": [{"key": "a/b", "operator": "Exists"}]}, "spec.targetSelector.matchExpressions[0].key",
     "should match"),
    ("targetSelector", {}, {"matchExpressions": [{"key": "a", "operator": "Exists"}]}, "spec.targetSelector",
     "name a label: one without any would select every workload"),
    ("targetSelector", {"matchExpressions": [{"key": "a", "operator": "In"}]},
     {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]},
     "spec.targetSelector.matchExpressions[0].values", "In and NotIn need values"),
    # What the types alone say
    ("targetRefs", [], [{"name": "a"}], "spec.targetRefs", "at least 1 items"),
    ("targetRefs", [{"name": "a"}, {"name": "a"}], [{"name": "a"}, {"name": "a", "kind": "StatefulSet"}],
     "spec.targetRefs[1]", "Duplicate value"),
    ("targetRefs", [{"name": "a", "kind": "Job"}], [{"name": "a", "kind": "StatefulSet"}], "spec.targetRefs[0].kind",
     'supported values: "DaemonSet", "Deployment", '),
    ("slo.latency.p99", "50 ms", "50ms", "spec.slo.latency.p99", "should match"),
    ("slo.latency.p99", "1d", "1h1m1s1ms", "spec.slo.latency.p99", "should match"),
    ("slo.latency.p99", "123456ms", "99999ms", "spec.slo.latency.p99", "should match"),
    ("slo.latency.p99", "50us", "99999h99999h99999h99999h", "spec.slo.latency.p99", "should match"),
    ("tuning.mode", "apply", "Hold", "spec.tuning.mode", '"Apply", "Recommend", "Hold"'),
    ("tuning.riskier.maxFactor", 1, 1.1, "spec.tuning.riskier.maxFactor", "greater than 1"),
    ("admission.maxQueuedBytes", "1.5Gi", 1024, "spec.admission.maxQueuedBytes", "should match"),
    ("canary.percent", 51, 50, "spec.canary.percent", "less than or equal to 50"),
    ("models", [{"name": str(i)} for i in range(65)], [{"name": str(i)} for i in range(64)], "spec.models",
     "at most 64 items"),
    ("batchAcross", ["content-length"], ["authorization"], "spec.batchAcross",
     "names a header that says how a body is to be read"),
    ("bounds.maxBach", {"max": 8}, None, 'unknown field "spec.bounds.maxBach"', ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "wrong", "fits", "where", "why", "spec"),
    [(*each, BASE)[:6] for each in RULES],
    ids=[f"{index}-{each[0]}" for index, each in enumerate(RULES)],
)
def test_what_contradicts_itself_is_refused_by_name_and_its_neighbour_is_not(
    server, namespace_of_all, path, wrong, fits, where, why, spec
):
    said = refusal(server, namespace_of_all, changed(path, wrong, spec))
    assert where in said
    assert why in said
    assert refused(changed(path, wrong, spec))
    neighbour = spec if fits is None else changed(path, fits, spec)
    assert refusal(server, namespace_of_all, neighbour) == ""
    assert refused(neighbour) == ""


@pytest.fixture(scope="module")
def namespace_of_all(server):
    """One for the many specs that are only shown to the server."""
    server.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "specs"}})
    yield "specs"
    server.delete("namespaces", "specs")


def test_every_rule_is_among_them(server, namespace_of_all):
    said = "\n".join(
        refusal(server, namespace_of_all, changed(path, wrong, *spec)) for path, wrong, _, _, _, *spec in RULES
    )
    for rules in cel.RULES.values():
        for rule in rules:
            words = ".+".join(re.escape(part) for part in rule.message.split("{}"))
            assert re.search(f"{re.escape(rule.path)}: Invalid value: {words}", said), rule


def refused(spec):
    """What the types say of a spec; nothing where they take it."""
    try:
        read_policy({"spec": spec})
    except PolicyError as error:
        return str(error)
    return ""


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(near())
def test_server_and_types_agree(server, namespace_of_all, spec):
    wrong = refused(spec)
    assert bool(refusal(server, namespace_of_all, spec)) == bool(wrong)
    # What is written for a person is taken, too.
    assert wrong or refusal(server, namespace_of_all, written(read_policy({"spec": spec}))) == ""


def test_defaults_are_filled_in_and_what_is_stored_reads_the_same(server, namespace):
    server.create(policy(BASE), namespace)
    stored = server.get(KIND, "resnet", namespace)
    assert stored["spec"]["tuning"]["mode"] == "Apply"
    assert stored["spec"]["targetRefs"] == [{"group": "apps", "kind": "Deployment", "name": "resnet"}]
    assert stored["spec"]["metrics"] == {"source": "Sidecar"}
    assert "bounds" not in stored["spec"]
    assert read_policy(stored) == read_policy({"spec": BASE})


def test_the_status_is_written_apart(server, namespace):
    server.create(policy(BASE) | {"status": {"observedGeneration": 7}}, namespace)
    assert "status" not in server.get(KIND, "resnet", namespace)
    server.patch(KIND, "resnet", namespace, sub="status", body={"status": {"observedGeneration": 1}, "spec": {}})
    stored = server.get(KIND, "resnet", namespace)
    assert stored["status"] == {"observedGeneration": 1}
    assert stored["metadata"]["generation"] == 1
    with pytest.raises(ApiError, match=r"status\.conditions\[0\]\.reason"):
        server.patch(KIND, "resnet", namespace, sub="status", body={"status": {"conditions": [
            {"type": "Ready", "status": "True", "reason": "", "lastTransitionTime": "2026-11-21T17:16:00Z"}
        ]}})  # fmt: skip


def test_kubectl_lists_what_matters(server, namespace, kubectl):
    server.create(policy(BASE), namespace)
    time = "2026-11-21T17:16:00Z"
    status = {
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "AllWell", "lastTransitionTime": time},
            {"type": "SLOMet", "status": "Unknown", "reason": "NoTraffic", "lastTransitionTime": time},
        ],
        "applied": {"generation": 1, "at": time, "target": "Deployment/resnet", "model": "*", "batch": "8",
                    "wait": "1.25ms", "parameters": {"maxBatch": 8, "maxWait": "1ms250us", "maxInFlight": 1}},
    }  # fmt: skip
    server.patch(KIND, "resnet", namespace, sub="status", body={"status": status})
    head, row = kubectl("get", "bp").splitlines()
    assert head.split() == ["NAME", "MODE", "BATCH", "WAIT", "P99", "SLO", "READY", "REASON", "AGE"]
    assert row.split()[:-1] == ["resnet", "Apply", "8", "1.25ms", "50ms", "Unknown", "True", "AllWell"]
    assert "resnet" in kubectl("get", "carpool")


def test_kubectl_explains_every_field(server, kubectl):
    def explained():
        # What the server serves, and how it is written, kubectl reads in ways of its own, which know of a CRD a moment
        # later. This reads the first of them anew, past kubectl's cache.
        kubectl("api-resources", "--api-group", "carpool.dev")
        return kubectl("explain", "bp.spec.slo.latency")

    said = eventually(explained)
    assert "99 % within this." in said
    assert "enum: Apply, Recommend, Hold" in kubectl("explain", "bp.spec.tuning")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_taken(server, kubectl, path):
    kubectl("create", "--validate=strict", "-f", str(path))
    read_policy(next(each for each in yaml.safe_load_all(path.read_text("utf-8")) if each["kind"] == KIND))
