from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from specs import right

from carpool.exchange.change import Change, encode, read_change
from carpool.policy.parameters import Parameters
from carpool.policy.plain import PolicyError
from carpool.policy.spec import BatchingPolicy
from carpool_operator.api.spec import MAX_MODELS, MetricsSource, read_policy, written

PUBLISHED = {
    "targetRefs": [{"group": "apps", "kind": "Deployment", "name": "resnet", "container": "server"}],
    "slo": {"latency": {"p99": "50ms"}},
    "metrics": {"source": "Sidecar", "staleAfter": "30s"},
}


def spec(**fields):
    return {"spec": {"targetRefs": [{"name": "resnet"}], "slo": {"latency": {"p99": "50ms"}}, **fields}}


SCRAPED = {"url": "https://prometheus:9090"}
KEY = {"name": "a", "key": "b"}
OAUTH2 = {"tokenUrl": "https://sso/token", "clientId": KEY, "clientSecret": KEY}


def prometheus(**fields):
    return spec(metrics={"source": "Prometheus", "prometheus": {**SCRAPED, **fields}})


@pytest.mark.parametrize(
    ("metrics", "seconds"),
    [
        ({}, 30),
        ({"staleAfter": "5s"}, 5),
        ({"source": "Prometheus", "prometheus": SCRAPED}, 60),
        ({"source": "Prometheus", "prometheus": {**SCRAPED, "interval": "1m"}}, 240),
        ({"source": "Prometheus", "staleAfter": "90s", "prometheus": {**SCRAPED, "interval": "1m"}}, 90),
    ],
)
def test_evidence_is_stale_after_four_scrapes_unless_set(metrics, seconds):
    assert read_policy(spec(metrics=metrics)).metrics.stale_seconds == seconds


def test_the_published_example_is_read():
    read = read_policy({"spec": PUBLISHED})
    assert read.target_refs[0].container == "server"
    assert read.slo.due == 0.05
    assert read.metrics.source is MetricsSource.SIDECAR


def test_of_a_target_its_name_is_enough():
    (target,) = read_policy(spec()).target_refs
    assert (target.group, target.kind) == ("apps", "Deployment")


@pytest.mark.parametrize(
    ("resource", "field", "says"),
    [
        ({}, "spec", "object"),
        (spec(targetRefs=[]), "spec.targetRefs", ">= 1"),
        (spec(targetRefs=[{"name": "a"}, {"name": "a"}]), "spec.targetRefs[1]", "Deployment 'a' is named twice"),
        (spec(targetRefs=[{"name": "a", "kind": "Job"}]), "spec.targetRefs[0].kind", "StatefulSet"),
        (spec(targetRefs=[{"name": "a", "kind": "Rollout"}]), "spec.targetRefs[0].group", "group argoproj.io"),
        (spec(targetSelector={}), "spec.targetSelector", "name a label"),
        (
            spec(targetSelector={"kind": "Rollout", "matchLabels": {"a": "b"}}),
            "spec.targetSelector.group",
            "argoproj.io",
        ),
        (
            spec(targetSelector={"matchExpressions": [{"key": "a", "operator": "In"}]}),
            "spec.targetSelector.matchExpressions[0].values",
            "need values",
        ),
        (
            spec(targetSelector={"matchLabels": {"a b": "c"}}),
            "spec.targetSelector.matchLabels",
            "'a b' is no label: write name or prefix/name",
        ),
        (spec(targetSelector={"matchLabels": {"a": "c d"}}), "spec.targetSelector.matchLabels[...]", "matching regex"),
        (
            spec(targetSelector={"matchExpressions": [{"key": "-a", "operator": "Exists"}]}),
            "spec.targetSelector.matchExpressions[0].key",
            "matching regex",
        ),
        (spec(slo={"latency": {}}), "spec.slo.latency", "at least one"),
        (spec(models=[{"name": str(i)} for i in range(MAX_MODELS + 1)]), "spec.models", "at most 64"),
        (spec(bounds={"maxWait": {"max": "60ms"}}), "spec.bounds.maxWait.max", "not below the SLO"),
        (spec(metrics={"staleAfter": "0s"}), "spec.metrics.staleAfter", "longer than 0s"),
        (spec(metrics={"source": "Prometheus"}), "spec.metrics.prometheus", "name its url"),
        (spec(metrics={"prometheus": {"url": "http://x"}}), "spec.metrics.prometheus", "source Prometheus"),
        (prometheus(url="prometheus:9090"), "spec.metrics.prometheus.url", "https?"),
        (prometheus(interval="0s"), "spec.metrics.prometheus.interval", "longer than 0s"),
        (
            spec(metrics={"source": "Prometheus", "staleAfter": "30s", "prometheus": {**SCRAPED, "interval": "30s"}}),
            "spec.metrics.staleAfter",
            "30s is not longer than prometheus.interval 30s",
        ),
        (prometheus(auth={}), "spec.metrics.prometheus.auth", "one of bearer, basic and oauth2"),
        (prometheus(auth={"bearer": KEY, "oauth2": OAUTH2}), "spec.metrics.prometheus.auth", "one of bearer"),
        (
            prometheus(auth={"oauth2": {**OAUTH2, "ca": {}}}),
            "spec.metrics.prometheus.auth.oauth2.ca",
            "one of secret and configMap",
        ),
        (
            prometheus(auth={"oauth2": {**OAUTH2, "tokenUrl": "http://x", "ca": {"secret": KEY}}}),
            "spec.metrics.prometheus.auth.oauth2.ca",
            "is for an https tokenUrl",
        ),
        (prometheus(headers=[{"name": "X-A"}]), "spec.metrics.prometheus.headers[0]", "one of value and secret"),
        (
            prometheus(headers=[{"name": "X-A", "value": "1"}, {"name": "Host", "value": "x"}]),
            "spec.metrics.prometheus.headers[1].name",
            "Host is set by the operator",
        ),
        (prometheus(matchers=[{"label": "a-b", "value": ""}]), "spec.metrics.prometheus.matchers[0].label", "regex"),
        (prometheus(url="http://x", tls={}), "spec.metrics.prometheus.tls", "https"),
        (prometheus(tls={"ca": {}}), "spec.metrics.prometheus.tls.ca", "one of secret and configMap"),
        (
            prometheus(tls={"ca": {"secret": {"name": "a", "key": "b"}}, "insecureSkipVerify": True}),
            "spec.metrics.prometheus.tls.insecureSkipVerify",
            "drop one",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_by_the_field_s_name(resource, field, says):
    with pytest.raises(PolicyError, match=field.replace("[", r"\[")) as raised:
        read_policy(resource)
    assert raised.value.field == field
    assert says in str(raised.value)
    assert str(raised.value).startswith(f"{field}: ")


@given(right)
def test_what_is_read_is_written_so_that_it_reads_the_same(plain):
    read = read_policy({"spec": plain})
    assert read_policy({"spec": written(read)}) == read


def test_a_baseline_that_nobody_wrote_is_not_written():
    bounds = {"maxBatch": {"max": 8}}
    assert "baseline" not in written(read_policy(spec(bounds=bounds)))
    assert written(read_policy(spec(baseline={"maxBatch": 8})))["baseline"]["maxBatch"] == 8


def test_a_sidecar_is_sent_its_part_alone():
    read = read_policy({"spec": PUBLISHED})
    part = read.policy()
    assert type(part) is BatchingPolicy
    change = Change(
        target="default/Deployment/resnet", generation=1, expires=1.0, policy=part, parameters={"*": Parameters()}
    )
    assert read_change(msgspec.json.decode(encode(change))) == change
