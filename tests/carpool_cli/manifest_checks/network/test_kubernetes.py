"""NetworkPolicies on plain objects; tests/cluster/test_preflight.py has them on a real API server."""

from __future__ import annotations

import pytest
from model_in_shop import all_of, around, codes, patched, plain, pod, subject

from carpool_cli.kubectl.preflight import checks
from carpool_cli.kubectl.preflight.dry_run import Dry
from carpool_cli.manifest_checks.findings import Effect
from carpool_cli.manifest_checks.objects import Peer

BREAKS, CLOSED = "NetworkPolicyByNumber", "AdminPortClosed"
OPERATOR = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "carpool-system"}},
    "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
}
ADMIN = {"ports": [{"port": 14090}]}


def ports(*numbers, **rule):
    return {"ports": [{"port": number} for number in numbers], **rule}


def policy(*rules, name="p", **spec):
    return {"metadata": {"name": name}, "spec": {"podSelector": {}, "ingress": list(rules), **spec}}


def egress(*rules, name="e", namespace="callers", pods=None):
    spec = {"podSelector": pods or {}, "policyTypes": ["Egress"], "egress": list(rules)}
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


def pods_of(namespace, **labels):
    of = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    return {"namespaceSelector": of, "podSelector": {"matchLabels": labels}}


@pytest.mark.parametrize(
    ("entries", "spec", "breaks"),
    [
        ([{"port": 9000}], {}, True),
        ([{"port": 9000, "protocol": "TCP"}, {"port": 443}], {}, True),
        ([{"port": 8000, "endPort": 9999}], {}, True),
        ([{"port": 8000, "endPort": 16000}], {}, False),
        ([{"port": 9000}, {"port": 14080}], {}, False),
        ([{"port": "http"}], {}, False),
        ([{}], {}, False),
        ([], {}, False),
        ([{"port": 443}], {}, False),
        ([{"port": 9000, "protocol": "UDP"}], {}, False),
        ([{"port": 9000}], {"policyTypes": ["Egress"]}, False),
        ([{"port": 9000}], {"podSelector": {"matchLabels": {"app": "other"}}}, False),
        ([{"port": 9000}], {"podSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}}, True),
        ([{"port": 9000}], {"podSelector": {"matchLabels": {"app": "web"}}}, True),
    ],
)
def test_a_policy_is_compared_by_number(entries, spec, breaks):
    near = around(policies=[policy({"ports": entries} if entries else {}, ADMIN, **spec)])
    assert codes(near) == ([BREAKS] if breaks else [])


def test_a_policy_of_another_namespace_selects_no_pod_here():
    elsewhere = policy(ports(9000))
    elsewhere["metadata"]["namespace"] = "other"
    assert codes(around(policies=[elsewhere])) == []


@pytest.mark.parametrize(
    ("callers", "admitted", "breaks"),
    [
        ([], [], False),
        ([pods_of("team", app="a")], [], False),
        ([pods_of("team", app="a")], [pods_of("team", app="a")], False),
        ([pods_of("team", app="a")], [pods_of("team")], False),
        ([pods_of("team", app="a")], [{"namespaceSelector": {}}], False),
        ([{"podSelector": {"matchLabels": {"app": "a"}}}], [pods_of("shop")], False),
        ([{"ipBlock": {"cidr": "10.1.0.0/16"}}], [{"ipBlock": {"cidr": "10.0.0.0/8"}}], False),
        ([], [pods_of("team")], True),
        ([pods_of("team")], [pods_of("team", app="a")], True),
        ([pods_of("team"), pods_of("other")], [pods_of("team")], True),
        ([{"podSelector": {}}], [pods_of("team")], True),
        ([{"ipBlock": {"cidr": "10.0.0.0/8"}}], [{"ipBlock": {"cidr": "10.1.0.0/16"}}], True),
        ([{"ipBlock": {"cidr": "10.0.0.0/8"}}], [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/24"]}}], True),
        ([pods_of("team")], [{"ipBlock": {"cidr": "0.0.0.0/0"}}], True),
    ],
)
def test_all_rules_are_judged_together(callers, admitted, breaks):
    """Another rule, of the same policy or another one, may admit the sidecar's port to the same callers."""
    first, second = ports(9000, **{"from": callers}), ports(14080, **{"from": admitted})
    expected = [BREAKS] if breaks else []
    assert codes(around(policies=[policy(first, second, ADMIN)])) == expected
    assert codes(around(policies=[policy(first, ADMIN), policy(second, name="q")])) == expected


def test_the_command_adds_a_port_to_the_rule():
    (finding,) = all_of(around(policies=[policy(ADMIN, ports(9000))]))
    assert finding.effect is Effect.BREAKS
    assert finding.fix.startswith("kubectl -n shop patch ")
    resource, *change = patched(finding.fix)
    assert resource == ["networkpolicy", "p"]
    assert change == ["add", "/spec/ingress/1/ports/-", {"port": 14080, "protocol": "TCP"}]


def test_a_policy_for_pods_with_a_sidecar_may_close_what_was_open():
    """As the chart's own does, with no callers, in a namespace without other policies."""
    injected = pod()
    injected["metadata"]["labels"]["carpool.dev/injected"] = "true"
    own = policy(ADMIN, name="carpool-sidecar-admin", podSelector={"matchLabels": {"carpool.dev/injected": "true"}})

    def found(*policies):
        return checks.all_of(subject(), Dry(plain()), Dry(injected), around(policies=policies))

    (finding,) = found(own)
    assert (finding.code, finding.effect) == (BREAKS, Effect.BREAKS)
    assert patched(finding.fix)[1:] == ("add", "/spec/ingress/-", {"ports": [{"port": 14080, "protocol": "TCP"}]})
    assert found(own, policy(ports(9000, 14080))) == []
    assert found(own, policy(ports("http"), podSelector={"matchLabels": {"carpool.dev/injected": "true"}})) == []


# ------------------------------------------------------------------------------------------------- callers' egress


@pytest.mark.parametrize(
    ("rules", "breaks"),
    [
        ([ports(9000)], True),
        ([ports(9000, to=[pods_of("shop", app="web")])], True),
        ([ports(9000, to=[{"namespaceSelector": {"matchLabels": {"team": "a"}}}])], True),
        ([ports(9000, to=[{"ipBlock": {"cidr": "10.0.0.0/8"}}])], True),
        ([ports(9000), ports(53, 443)], True),
        ([ports("http")], False),
        ([{}], False),
        ([ports(443)], False),
        ([ports(9000, to=[pods_of("shop", app="other")])], False),
        ([ports(9000, to=[{"podSelector": {}}])], False),
        ([ports(9000, to=[{"namespaceSelector": {"matchLabels": {"team": "b"}}}])], False),
        ([ports(9000), ports(14080)], False),
        ([ports(9000), ports(14080, to=[pods_of("shop")])], False),
        ([ports(9000), {"to": [pods_of("shop", app="web")]}], False),
        ([ports(9000), ports(14080, to=[pods_of("other")])], True),
        ([ports(9000), ports(14080, to=[{"ipBlock": {"cidr": "10.0.0.0/8"}}])], True),
    ],
)
def test_callers_whose_egress_is_by_number_are_cut_off(rules, breaks):
    shop = {"metadata": {"name": "shop", "labels": {"team": "a"}}}
    assert codes(around(shop, policies=[egress(*rules)])) == ([BREAKS] if breaks else [])


def running(*addresses):
    return [{"metadata": {}, "spec": {}, "status": {"podIPs": [{"ip": each}]}} for each in addresses]


@pytest.mark.parametrize(
    ("block", "pods", "effects"),
    [
        ({"cidr": "203.0.113.7/32"}, running("10.2.0.7"), []),
        ({"cidr": "203.0.113.7/32"}, running(), [Effect.NOTE]),
        ({"cidr": "203.0.113.7/32"}, None, [Effect.NOTE]),
        ({"cidr": "10.0.0.0/8"}, running("10.2.0.7"), [Effect.BREAKS]),
        ({"cidr": "10.1.0.0/16"}, running("10.2.0.7", "10.1.0.7"), [Effect.BREAKS]),
        ({"cidr": "10.0.0.0/8", "except": ["10.2.0.0/16"]}, running("10.2.0.7"), []),
        ({"cidr": "0.0.0.0/0"}, running(), [Effect.BREAKS]),
        ({"cidr": "0.0.0.0/0"}, running("10.2.0.7"), [Effect.BREAKS]),
    ],
)
def test_egress_to_addresses_is_for_the_pods_that_have_them(block, pods, effects):
    near = around(policies=[egress(ports(9000, to=[{"ipBlock": block}]))])
    found = checks.all_of(subject(), Dry(plain()), Dry(pod()), near, pods)
    assert [each.effect for each in found] == effects


def test_another_rule_has_to_hold_for_pods_of_any_address():
    """The pod that runs is in 10.1.0.0/24, and the next one may not be."""
    near = around(
        policies=[
            egress(
                ports(9000, to=[{"ipBlock": {"cidr": "10.0.0.0/8"}}]),
                ports(14080, to=[{"ipBlock": {"cidr": "10.1.0.0/24"}}]),
            )
        ]
    )
    (finding,) = checks.all_of(subject(), Dry(plain()), Dry(pod()), near, running("10.1.0.7"))
    assert finding.effect is Effect.BREAKS


def test_another_policy_of_the_same_callers_may_admit_the_sidecar():
    by_number = egress(ports(9000), pods={"matchLabels": {"app": "a"}})
    for pods, namespace, breaks in (
        ({"matchLabels": {"app": "a"}}, "callers", False),
        ({}, "callers", False),
        ({"matchLabels": {"app": "b"}}, "callers", True),
        ({}, "others", True),
    ):
        more = egress(ports(14080), name="f", pods=pods, namespace=namespace)
        assert codes(around(policies=[by_number, more])) == ([BREAKS] if breaks else [])


def test_the_command_is_for_the_namespace_of_the_callers():
    (finding,) = all_of(around(policies=[egress(ports(443), ports(9000))]))
    assert finding.effect is Effect.BREAKS
    assert finding.fix.startswith("kubectl -n callers patch networkpolicy e ")
    assert patched(finding.fix)[1:] == ("add", "/spec/egress/1/ports/-", {"port": 14080, "protocol": "TCP"})


# ------------------------------------------------------------------------------------------------- the admin port


@pytest.mark.parametrize(
    ("rules", "closed"),
    [
        ([], True),
        ([ports("http")], True),
        ([ports("http", 14090, **{"from": [pods_of("team")]})], True),
        ([{"from": [{"podSelector": {}}]}], True),
        ([ports(14090, **{"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]})], True),
        ([{}], False),
        ([ports("http"), ADMIN], False),
        ([ports("http"), ports(14090, **{"from": [OPERATOR]})], False),
        ([ports("http"), {"from": [{"namespaceSelector": {}}]}], False),
        ([ports(14090, **{"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]})], False),
    ],
)
def test_the_operator_needs_the_admin_port(rules, closed):
    assert codes(around(policies=[policy(*rules)])) == ([CLOSED] if closed else [])


def test_policies_that_do_not_select_the_pod_close_nothing():
    other = policy(podSelector={"matchLabels": {"app": "other"}})
    outgoing = {"metadata": {"name": "e"}, "spec": {"podSelector": {}, "policyTypes": ["Egress"]}}
    assert codes(around(policies=[other, outgoing])) == []


def test_the_operator_is_where_it_runs():
    home = {"kubernetes.io/metadata.name": "platform", "team": "infra"}
    operator = Peer(home, {"app.kubernetes.io/component": "operator"}, ("10.2.0.7", "fd00::7"))
    for peer, closed in (
        (OPERATOR, True),
        ({"namespaceSelector": {"matchLabels": {"team": "infra"}}}, False),
        ({"ipBlock": {"cidr": "10.2.0.0/16"}}, False),
        ({"ipBlock": {"cidr": "10.2.0.0/16", "except": ["10.2.0.0/24"]}}, True),
    ):
        near = around(policies=[policy(ports(14090, **{"from": [peer]}))], operators=[operator])
        assert codes(near) == ([CLOSED] if closed else [])


@pytest.mark.parametrize(("rules", "path"), [([ports("http")], "/spec/ingress/-"), ([], "/spec/ingress")])
def test_the_command_opens_the_admin_port_to_the_operator_alone(rules, path):
    closing = policy(*rules)
    (finding,) = all_of(around(policies=[closing]))

    assert finding.effect is Effect.NO_BATCHING
    assert "{name: shop, callers: []} to the chart's value networkPolicy.sidecarNamespaces" in finding.fix
    resource, operation, where, value = patched(finding.fix)
    assert (resource, operation, where) == (["networkpolicy", "p"], "add", path)
    (rule,) = value if path == "/spec/ingress" else [value]
    assert rule["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "carpool-system"}
    closing["spec"]["ingress"] = [*rules, rule]
    assert codes(around(policies=[closing])) == []


def test_both_are_said_where_a_policy_admits_the_model_by_number_alone():
    assert codes(around(policies=[policy(ports(9000))])) == [BREAKS, CLOSED]
