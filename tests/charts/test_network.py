"""What the chart's NetworkPolicies open and close. Policies add up: each can only open what another closed."""

from __future__ import annotations

import pytest

PORTS = (1, 53, 443, 8000, 8080, 8443, 14080, 14089, 14090, 14091, 65535)
HOME, TEAM = "carpool-system", "team-a"

OPERATOR = {
    "namespace": HOME,
    "labels": {"app.kubernetes.io/name": "carpool", "app.kubernetes.io/instance": "carpool",
               "app.kubernetes.io/component": "operator"},
}  # fmt: skip
CALLER = {"namespace": TEAM, "labels": {"app": "caller"}}
STRANGER = {"namespace": "elsewhere", "labels": {"app": "stranger"}}
SCRAPER = {"namespace": "monitoring", "labels": {"app": "prometheus"}}
MODEL = {"namespace": TEAM, "labels": {"app": "resnet", "carpool.dev/injected": "true"}}

DENY_ALL = {
    "kind": "NetworkPolicy",
    "metadata": {"namespace": TEAM},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
}
"""What a tenant writes who lets nobody in."""
SCRAPERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def selects(selector, labels):
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def is_peer(peer, source, namespace):
    if "ipBlock" in peer:
        return False  # pods only, here
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": source["namespace"]}):
            return False
    elif source["namespace"] != namespace:
        return False
    return selects(peer.get("podSelector", {}), source["labels"])


def covers(ports, port):
    return not ports or any(
        each.get("protocol", "TCP") == "TCP"
        and ("port" not in each or each["port"] <= port <= each.get("endPort", each["port"]))
        for each in ports
    )


def reaches(policies, source, target, port):
    """Whether a pod may connect to a TCP port of another, as the API documents it."""
    isolating = [
        each
        for each in policies
        if each["kind"] == "NetworkPolicy"
        and each["metadata"]["namespace"] == target["namespace"]
        and selects(each["spec"]["podSelector"], target["labels"])
    ]
    return not isolating or any(
        covers(rule.get("ports"), port)
        and (not rule.get("from") or any(is_peer(peer, source, target["namespace"]) for peer in rule["from"]))
        for each in isolating
        for rule in each["spec"].get("ingress", ())
    )


def render(helm, callers):
    values = {"scrapers": SCRAPERS, "sidecarNamespaces": [{"name": TEAM, "callers": callers}]}
    return [each for each in helm.render({"networkPolicy": values}) if each["kind"] == "NetworkPolicy"]


def test_what_a_tenant_closed_stays_closed(helm):
    policies = [*render(helm, []), DENY_ALL]
    opened = {
        (source["namespace"], port)
        for source in (OPERATOR, CALLER, STRANGER, SCRAPER)
        for port in PORTS
        if reaches(policies, source, MODEL, port)
    }
    assert opened == {(HOME, 14090), ("monitoring", 14090)}


@pytest.mark.parametrize("port", [port for port in PORTS if port != 14090])
def test_callers_are_those_that_the_values_name(helm, port):
    policies = render(helm, [{"podSelector": {"matchLabels": {"app": "caller"}}}])
    assert reaches(policies, CALLER, MODEL, port)
    assert not reaches(policies, STRANGER, MODEL, port)
    assert not reaches(policies, CALLER, MODEL, 14090)


@pytest.mark.parametrize("admin", [1024, 65535])
def test_ranges_beside_an_admin_port_at_either_end_exist(helm, admin):
    values = {"sidecarNamespaces": [{"name": TEAM, "callers": [{"podSelector": {}}]}]}
    objects = helm.render({"networkPolicy": values, "sidecar": {"ports": {"admin": admin}}})
    (policy,) = [each for each in objects if each["metadata"]["name"] == "carpool-sidecar-admin"]
    ranges = [(each["port"], each["endPort"]) for each in policy["spec"]["ingress"][1]["ports"]]
    assert ranges == [each for each in ((1, admin - 1), (admin + 1, 65535)) if each[0] <= each[1]]


def test_pods_without_a_sidecar_and_other_namespaces_are_left_alone(helm):
    policies = render(helm, [])
    assert reaches(policies, STRANGER, {"namespace": TEAM, "labels": {"app": "web"}}, 8000)
    assert reaches(policies, STRANGER, MODEL | {"namespace": "team-b"}, 8000)


def test_the_webhook_is_for_api_servers_where_they_are_known(helm):
    peers = [{"ipBlock": {"cidr": "10.0.0.0/28"}}]
    for given, expected in (([], None), (peers, peers)):
        objects = helm.render({"networkPolicy": {"apiServers": given}})
        (policy,) = [
            each
            for each in objects
            if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "carpool-injector"
        ]
        (rule,) = [rule for rule in policy["spec"]["ingress"] if rule["ports"][0]["port"] == "webhook"]
        assert rule.get("from") == expected


def test_egress_is_what_is_needed(helm):
    values = {"egress": {"enabled": True, "rules": [{"ports": [{"port": 9090}]}]}}
    policies = {
        each["metadata"]["name"]: each["spec"]
        for each in helm.render({"networkPolicy": values, "watchNamespaces": ["team-a"]})
        if each["kind"] == "NetworkPolicy"
    }
    for spec in policies.values():
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        assert [port["port"] for rule in spec["egress"][:2] for port in rule["ports"]] == [53, 53, 443, 6443]
    assert len(policies["carpool-injector"]["egress"]) == 2
    (sidecars, prometheus) = policies["carpool-operator"]["egress"][2:]
    assert sidecars["to"][0]["podSelector"] == {"matchLabels": {"carpool.dev/injected": "true"}}
    assert sidecars["to"][0]["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a"]
    assert prometheus == {"ports": [{"port": 9090}]}
