"""Cilium's policies on plain objects: Cilium does not run in the tests."""

from __future__ import annotations

from functools import reduce

import pytest
from model_in_shop import all_of, around, codes, patched

from carpool_cli.manifest_checks.findings import Effect

BREAKS, CLOSED = "NetworkPolicyByNumber", "AdminPortClosed"
WEB = {"matchLabels": {"app": "web"}}
OPERATOR = {
    "matchLabels": {
        "k8s:io.kubernetes.pod.namespace": "carpool-system",
        "k8s:app.kubernetes.io/component": "operator",
    }
}


def ports(*numbers, **rule):
    return {"toPorts": [{"ports": [{"port": str(number), "protocol": "TCP"} for number in numbers]}], **rule}


def policy(*rules, name="c", namespace="shop", **spec):
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    kind = "CiliumNetworkPolicy" if namespace else "CiliumClusterwideNetworkPolicy"
    said = {"endpointSelector": {}, **({"ingress": list(rules)} if rules else {}), **spec}
    return {"apiVersion": "cilium.io/v2", "kind": kind, "metadata": metadata, "spec": said}


ADMIN = ports(14090)
OPEN = {"fromEndpoints": [{"matchExpressions": [{"key": "k8s:io.kubernetes.pod.namespace", "operator": "Exists"}]}]}


@pytest.mark.parametrize(
    ("rule", "breaks"),
    [
        (ports(9000), True),
        (ports(443, 9000), True),
        (ports(9000, fromEndpoints=[{}]), True),
        ({"toPorts": [{"ports": [{"port": "8000", "endPort": 9999, "protocol": "TCP"}]}]}, True),
        ({"toPorts": [{"ports": [{"port": "9000", "protocol": "ANY"}]}]}, True),
        ({"toPorts": [{"ports": [{"port": "9000"}], "rules": {"http": [{"path": "/v2/.*"}]}}]}, True),
        ({"toPorts": [{"ports": [{"port": "8000", "endPort": 16000, "protocol": "TCP"}]}]}, False),
        ({"toPorts": [{"ports": [{"port": "0", "protocol": "ANY"}]}]}, False),
        ({"toPorts": [{"ports": [{"port": "9000", "protocol": "UDP"}]}]}, False),
        (ports(9000, 14080), False),
        (ports("http"), False),
        (ports(443), False),
        ({"fromEntities": ["all"]}, False),
        (OPEN, False),
        ({}, False),
    ],
)
def test_a_policy_is_compared_by_number(rule, breaks):
    assert codes(around(cilium=[policy(rule, ADMIN)])) == ([BREAKS] if breaks else [])


@pytest.mark.parametrize(
    ("selector", "namespace", "selects"),
    [
        ({}, "shop", True),
        (WEB, "shop", True),
        ({"matchLabels": {"k8s:app": "web"}}, "shop", True),
        ({"matchLabels": {"any:app": "web"}}, "shop", True),
        ({"matchLabels": {"reserved:app": "web"}}, "shop", False),
        ({"matchLabels": {"app": "other"}}, "shop", False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["web"]}]}, "shop", True),
        ({}, "other", False),
        ({"matchLabels": {"k8s:io.kubernetes.pod.namespace": "shop"}}, "other", False),
        ({}, "", True),
        ({"matchLabels": {"io.kubernetes.pod.namespace": "shop", "app": "web"}}, "", True),
        ({"matchLabels": {"io.kubernetes.pod.namespace": "other"}}, "", False),
        ({"matchLabels": {"io.cilium.k8s.namespace.labels.team": "a"}}, "", True),
        ({"matchLabels": {"io.cilium.k8s.namespace.labels.team": "b"}}, "", False),
    ],
)
def test_a_policy_is_for_the_pods_that_it_selects(selector, namespace, selects):
    shop = {"metadata": {"name": "shop", "labels": {"team": "a"}}}
    near = around(shop, cilium=[policy(ports(9000), ADMIN, namespace=namespace, endpointSelector=selector)])
    assert codes(near) == ([BREAKS] if selects else [])


def test_a_policy_of_nodes_is_for_no_pod():
    of_nodes = policy(ports(9000), namespace="")
    of_nodes["spec"]["nodeSelector"] = of_nodes["spec"].pop("endpointSelector")
    assert codes(around(cilium=[of_nodes])) == []


def test_one_that_adds_and_does_not_close_breaks_nothing():
    adding = policy(ports(9000), enableDefaultDeny={"ingress": False})
    assert codes(around(cilium=[adding])) == []
    assert codes(around(cilium=[adding, policy(ADMIN, name="closing")])) == [BREAKS]


FRONT, BACK = {"matchLabels": {"app": "front"}}, {"matchLabels": {"app": "front", "tier": "b"}}


@pytest.mark.parametrize(
    ("callers", "admitted", "breaks"),
    [
        ({}, {}, False),
        ({"fromEndpoints": [FRONT]}, {}, False),
        ({"fromEndpoints": [FRONT]}, {"fromEndpoints": [FRONT]}, False),
        ({"fromEndpoints": [BACK]}, {"fromEndpoints": [FRONT]}, False),
        ({"fromEndpoints": [FRONT]}, {"fromEntities": ["cluster"]}, False),
        ({"fromCIDR": ["10.0.0.0/8"]}, {"fromCIDR": ["10.0.0.0/8", "11.0.0.0/8"]}, False),
        ({"fromEndpoints": [FRONT]}, {"fromEndpoints": [BACK]}, True),
        ({"fromEntities": ["world"]}, {"fromEntities": ["cluster"]}, True),
        ({"fromEndpoints": [FRONT], "fromEntities": ["world"]}, {"fromEndpoints": [FRONT]}, True),
        ({}, {"fromEndpoints": [FRONT]}, True),
    ],
)
def test_all_rules_are_judged_together(callers, admitted, breaks):
    first, second = ports(9000, **callers), ports(14080, **admitted)
    expected = [BREAKS] if breaks else []
    assert codes(around(cilium=[policy(first, second, ADMIN)])) == expected
    assert codes(around(cilium=[policy(first, ADMIN), policy(second, name="d")])) == expected


def test_network_policies_count_too_and_the_other_way_round():
    by_number = {"metadata": {"name": "p"}, "spec": {"podSelector": {}, "ingress": [{"ports": [{"port": 9000}]}]}}
    for_all = {"metadata": {"name": "q"}, "spec": {"podSelector": {}, "ingress": [{"ports": [{"port": 14080}]}]}}
    assert codes(around(policies=[by_number], cilium=[policy(ports(14080), ADMIN)])) == []
    assert codes(around(policies=[for_all], cilium=[policy(ports(9000), ADMIN)])) == []
    assert codes(around(policies=[by_number], cilium=[policy(ports(14080, fromEndpoints=[FRONT]), ADMIN)])) == [BREAKS]


@pytest.mark.parametrize(
    ("denied", "breaks"),
    [
        ([ports(9000)], True),
        ([ports(9000, fromEndpoints=[FRONT])], True),
        ([ports(9000), ports(14080)], False),
        ([ports(9000, fromEndpoints=[FRONT]), ports(14080, fromEndpoints=[FRONT])], False),
        ([{"fromEndpoints": [FRONT]}], False),
        ([ports(443)], False),
    ],
)
def test_what_is_kept_out_by_number_would_get_in(denied, breaks):
    near = around(cilium=[policy(OPEN, ingressDeny=denied)])
    found = all_of(near)
    assert [each.code for each in found] == ([BREAKS] if breaks else [])
    assert all("would get in" in each.message for each in found)


def test_the_command_adds_a_port_where_the_other_is():
    (finding,) = all_of(around(cilium=[policy(ADMIN, ports(9000))]))
    assert finding.effect is Effect.BREAKS
    assert finding.fix.startswith("kubectl -n shop patch ciliumnetworkpolicies.cilium.io c ")
    assert patched(finding.fix)[1:] == (
        "add", "/spec/ingress/1/toPorts/0/ports/-", {"port": "14080", "protocol": "TCP"},
    )  # fmt: skip

    several = policy(namespace="")
    several["specs"] = [
        several.pop("spec"),
        {"endpointSelector": WEB, "ingress": [ADMIN, ports(9000, 14080)], "ingressDeny": [ports(9000)]},
    ]
    (finding,) = all_of(around(cilium=[several]))
    assert finding.fix.startswith("kubectl patch ciliumclusterwidenetworkpolicies.cilium.io c ")
    assert patched(finding.fix)[2] == "/specs/1/ingressDeny/0/toPorts/0/ports/-"


# ------------------------------------------------------------------------------------------------- callers' egress


def sending(*rules, namespace="callers", pods=None, name="e"):
    return policy(name=name, namespace=namespace, endpointSelector=pods or {}, egress=list(rules))


TO_WEB = {"matchLabels": {"k8s:io.kubernetes.pod.namespace": "shop", "app": "web"}}


@pytest.mark.parametrize(
    ("rules", "breaks"),
    [
        ([ports(9000)], True),
        ([ports(9000, toEndpoints=[TO_WEB])], True),
        ([ports(9000, toEntities=["cluster"])], True),
        ([ports(9000, toEndpoints=[TO_WEB]), ports(14080, toEndpoints=[TO_WEB])], False),
        ([ports(9000, toEndpoints=[TO_WEB]), {"toEntities": ["cluster"]}], False),
        ([ports(9000, toEndpoints=[{}])], False),
        ([ports(9000, toEndpoints=[{"matchLabels": {"app": "web"}}])], False),
        ([ports(9000, toCIDR=["0.0.0.0/0"])], False),
        ([ports(9000, toFQDNs=[{"matchName": "example.com"}])], False),
        ([ports("http", toEndpoints=[TO_WEB])], False),
    ],
)
def test_callers_whose_egress_is_by_number_are_cut_off(rules, breaks):
    assert codes(around(cilium=[sending(*rules)])) == ([BREAKS] if breaks else [])


def test_another_policy_of_the_same_callers_may_admit_the_sidecar():
    by_number = sending(ports(9000), pods=FRONT)
    for pods, namespace, breaks in ((FRONT, "callers", False), ({}, "callers", False), ({}, "others", True)):
        more = sending(ports(14080), pods=pods, namespace=namespace, name="f")
        assert codes(around(cilium=[by_number, more])) == ([BREAKS] if breaks else [])


# ------------------------------------------------------------------------------------------------- the admin port


@pytest.mark.parametrize(
    ("rules", "closed"),
    [
        ([ports("http")], True),
        ([ports(14090, fromEndpoints=[{}])], True),
        ([ports(14090, fromEntities=["host"])], True),
        ([{}], True),
        ([ADMIN], False),
        ([ports(14090, fromEndpoints=[OPERATOR])], False),
        ([ports(14090, fromEntities=["cluster"])], False),
        ([OPEN], False),
    ],
)
def test_the_operator_needs_the_admin_port(rules, closed):
    found = all_of(around(cilium=[policy(*rules)]))
    assert [each.code for each in found] == ([CLOSED] if closed else [])
    assert all("networkPolicy.sidecarNamespaces" in each.fix for each in found)


def test_a_network_policy_for_the_operator_is_enough():
    own = {"metadata": {"name": "p"}, "spec": {"podSelector": {}, "ingress": [{"ports": [{"port": 14090}]}]}}
    assert codes(around(policies=[own], cilium=[policy(ports("http"))])) == []


# ------------------------------------------------------------------------------------------------- what is not known

ACCOUNT, CLUSTER = "io.cilium.k8s.policy.serviceaccount", "io.cilium.k8s.policy.cluster"


@pytest.mark.parametrize(
    ("labels", "effects"),
    [
        ({ACCOUNT: "web"}, [Effect.BREAKS]),
        ({f"k8s:{ACCOUNT}": "web"}, [Effect.BREAKS]),
        ({ACCOUNT: "default"}, []),
        ({CLUSTER: "one"}, [Effect.NOTE]),
        ({CLUSTER: "one", "app": "other"}, []),
    ],
)
def test_a_policy_may_select_pods_by_service_account_and_cluster(labels, effects):
    near = around(cilium=[policy(ports(9000), ADMIN, endpointSelector={"matchLabels": labels})])
    assert [each.effect for each in all_of(near, account="web")] == effects


@pytest.mark.parametrize(
    ("labels", "effects"),
    [
        ({ACCOUNT: "carpool-operator"}, []),
        ({ACCOUNT: "other"}, [Effect.NO_BATCHING]),
        ({CLUSTER: "one"}, [Effect.NOTE]),
    ],
)
def test_a_rule_may_admit_the_operator_by_its_service_account(labels, effects):
    operator = {"matchLabels": {"k8s:io.kubernetes.pod.namespace": "carpool-system", **labels}}
    found = all_of(around(cilium=[policy(ports(14090, fromEndpoints=[operator]))]))
    assert [(each.code, each.effect) for each in found] == [(CLOSED, effect) for effect in effects]


def test_the_command_adds_the_port_beside_the_model_s():
    metrics = {"ports": [{"port": "9090", "protocol": "TCP"}], "rules": {"http": [{"path": "/metrics"}]}}
    rule = {"fromEndpoints": [{}], "toPorts": [metrics, *ports(9000)["toPorts"]]}
    (finding,) = all_of(around(cilium=[policy(ADMIN, rule)]))
    assert patched(finding.fix)[2] == "/spec/ingress/1/toPorts/1/ports/-"


@pytest.mark.parametrize(
    "broken",
    [
        policy(ports(9000), ADMIN, endpointSelector={"matchExpressions": [{"operator": "Exists"}]}),
        policy(ports(9000, fromEndpoints=[{"matchLabels": {"app": None}}]), ADMIN),
        policy({"toPorts": [{"ports": [{"port": "9000", "endPort": "x"}]}]}, ADMIN),
        policy({"toPorts": [9000]}, ADMIN),
        policy({"toPorts": [{"ports": [{"port": reduce(lambda inner, _: [inner], range(3000), "9000")}]}]}, ADMIN),
    ],
)
def test_a_policy_that_is_not_understood_is_named_and_hides_no_other(broken):
    found = all_of(around(cilium=[broken, policy(ports(9000), ADMIN, name="d")]))
    assert [each.code for each in found] == [BREAKS, "NotLookedAt"]
    assert found[1].message.endswith("CiliumNetworkPolicy c")
