"""Calico's policies on plain objects: Calico does not run in the tests."""

from __future__ import annotations

from functools import reduce

import pytest
from model_in_shop import all_of, around, codes, patched, plain, pod, subject

from carpool_cli.kubectl.preflight import checks
from carpool_cli.kubectl.preflight.dry_run import Dry
from carpool_cli.manifest_checks.findings import Effect

BREAKS, CLOSED = "NetworkPolicyByNumber", "AdminPortClosed"


def allow(*ports, action="Allow", **rule):
    return {"action": action, "protocol": "TCP", "destination": {"ports": list(ports)}, **rule}


def policy(*rules, name="c", namespace="shop", group="projectcalico.org/v3", **spec):
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    kind = "NetworkPolicy" if namespace else "GlobalNetworkPolicy"
    said = {"types": ["Ingress"], "ingress": list(rules), **spec}
    return {"apiVersion": group, "kind": kind, "metadata": metadata, "spec": said}


ADMIN = allow(14090)
ALL = {"action": "Allow"}


@pytest.mark.parametrize(
    ("rule", "breaks"),
    [
        (allow(9000), True),
        (allow(443, 9000), True),
        (allow("8000:9999"), True),
        (allow(9000, action="Pass"), True),
        (allow(9000, protocol=6), True),
        ({"action": "Allow", "protocol": "TCP", "destination": {"notPorts": [9000]}}, True),
        (allow("8000:16000"), False),
        (allow(9000, 14080), False),
        (allow("http"), False),
        (allow(443), False),
        (allow(9000, protocol="UDP"), False),
        (allow(9000, action="Log"), False),
        ({"action": "Allow"}, False),
        ({"action": "Allow", "destination": {"notPorts": [9000, 14080]}}, False),
    ],
)
def test_a_policy_is_compared_by_number(rule, breaks):
    assert codes(around(calico=[policy(rule, ADMIN)])) == ([BREAKS] if breaks else [])


@pytest.mark.parametrize(
    ("spec", "namespace", "selects"),
    [
        ({}, "shop", True),
        ({"selector": "app == 'web'"}, "shop", True),
        ({"selector": "app == 'other'"}, "shop", False),
        ({"selector": "projectcalico.org/namespace == 'shop'"}, "", True),
        ({"selector": "projectcalico.org/orchestrator == 'k8s' && pcns.team == 'a'"}, "", True),
        ({}, "other", False),
        ({}, "", True),
        ({"namespaceSelector": "projectcalico.org/name == 'shop'"}, "", True),
        ({"namespaceSelector": "team == 'a'", "selector": "all()"}, "", True),
        ({"namespaceSelector": "team == 'b'"}, "", False),
        ({"types": ["Egress"]}, "shop", False),
        ({"types": None}, "shop", True),
        ({"types": None, "egress": [{"action": "Allow"}]}, "shop", True),
        ({"doNotTrack": True}, "", False),
        ({"preDNAT": True}, "", False),
    ],
)
def test_a_policy_is_for_the_pods_that_it_selects(spec, namespace, selects):
    shop = {"metadata": {"name": "shop", "labels": {"team": "a"}}}
    near = around(shop, calico=[policy(allow(9000), ADMIN, namespace=namespace, **spec)])
    assert codes(near) == ([BREAKS] if selects else [])


FRONT = {"selector": "app == 'front'"}


@pytest.mark.parametrize(
    ("callers", "admitted", "breaks"),
    [
        ({}, {}, False),
        (FRONT, {}, False),
        (FRONT, FRONT, False),
        ({"nets": ["10.0.0.0/8"]}, {"nets": ["10.0.0.0/8"]}, False),
        ({}, FRONT, True),
        (FRONT, {"selector": "app == 'back'"}, True),
    ],
)
def test_all_rules_are_judged_together(callers, admitted, breaks):
    first, second = allow(9000, source=callers), allow(14080, source=admitted)
    expected = [BREAKS] if breaks else []
    assert codes(around(calico=[policy(first, second, ADMIN)])) == expected
    assert codes(around(calico=[policy(first, ADMIN), policy(second, name="d")])) == expected


def test_a_selector_of_another_namespace_is_for_other_pods():
    here, cluster = policy(allow(9000, source=FRONT), ADMIN), policy(allow(14080, source=FRONT), namespace="")
    assert codes(around(calico=[here, cluster])) == [BREAKS]


def test_network_policies_count_too():
    for_all = {"metadata": {"name": "q"}, "spec": {"podSelector": {}, "ingress": [{"ports": [{"port": 14080}]}]}}
    assert codes(around(policies=[for_all], calico=[policy(allow(9000), ADMIN)])) == []


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ([allow(9000, action="Deny"), ALL], "would get in"),
        ([allow(9000, action="Deny", source=FRONT), ALL], "would get in"),
        ([allow(9000, 14080, action="Deny", source=FRONT), ALL], None),
        ([{"action": "Deny", "source": FRONT}, ALL], None),
        (
            [{"action": "Deny", "protocol": "TCP", "destination": {"notPorts": [9000, 14090]}}, ALL],
            "denies all but port",
        ),
        ([{"action": "Deny", "protocol": "TCP", "destination": {"notPorts": [9000, 14080, 14090]}}, ALL], None),
    ],
)
def test_rules_that_deny_are_compared_too(rules, told):
    found = all_of(around(calico=[policy(*rules)]))
    assert [each.code for each in found] == ([] if told is None else [BREAKS])
    assert told is None or told in found[0].message


def test_the_command_adds_a_port_where_the_other_is():
    (finding,) = all_of(around(calico=[policy(ADMIN, allow(9000))]))
    assert finding.effect is Effect.BREAKS
    assert finding.fix.startswith("kubectl -n shop patch networkpolicies.projectcalico.org c ")
    assert patched(finding.fix)[1:] == ("add", "/spec/ingress/1/destination/ports/-", 14080)

    stored = policy(
        {"action": "Allow", "destination": {"notPorts": [9000]}}, namespace="", group="crd.projectcalico.org/v1"
    )
    (finding,) = all_of(around(calico=[stored]))
    assert finding.fix.startswith("kubectl patch globalnetworkpolicies.crd.projectcalico.org c ")
    assert patched(finding.fix)[1:] == ("add", "/spec/ingress/0/destination/notPorts/-", 14080)


BAD, BOTH = {"selector": "app == 'bad'"}, allow(9000, 14080)
LAST = {"action": "Deny"}


@pytest.mark.parametrize(
    ("rules", "breaks"),
    [
        ([allow(9000, action="Deny", source=BAD), BOTH], True),
        ([allow(9000, action="Deny", source=BAD), BOTH, LAST], True),
        ([allow(9000, action="Deny", source=BAD), BOTH, allow(9000, 14080, action="Deny")], True),
        ([allow(9000, action="Deny", source=BAD), allow(14080, action="Deny"), BOTH], True),
        ([allow(9000, action="Deny", source=BAD), allow(14080, source=FRONT), {**LAST, "source": BAD}, BOTH], False),
        ([allow(9000, action="Deny", source=BAD), LAST], False),
        ([BOTH, allow(9000, action="Deny", source=BAD), LAST], False),
        ([BOTH, allow("1:10000", action="Deny")], False),
    ],
)
def test_a_rule_that_denies_holds_for_what_no_rule_before_it_admits(rules, breaks):
    expected = [BREAKS] if breaks else []
    assert codes(around(calico=[policy(ADMIN, *rules)])) == expected
    one_by_one = [policy(rule, name=f"c{order}", order=order) for order, rule in enumerate([ADMIN, *rules])]
    assert codes(around(calico=one_by_one)) == expected


def test_a_rule_to_admit_that_is_to_be_changed_counts_as_changed():
    """Its command would open the sidecar's port to callers that the model's is closed to."""
    found = all_of(around(calico=[policy(ADMIN, allow(9000, action="Deny", source=BAD), allow(9000), LAST)]))
    assert [patched(each.fix)[2] for each in found] == [
        "/spec/ingress/2/destination/ports/-",
        "/spec/ingress/1/destination/ports/-",
    ]


DB, ACCOUNT = {"selector": "app == 'db'"}, "projectcalico.org/serviceaccount"


def at(*numbers, **destination):
    return {"action": "Allow", "protocol": "TCP", "destination": {"ports": list(numbers), **destination}}


@pytest.mark.parametrize(
    ("rules", "effects"),
    [
        ([at(9000, **DB)], []),
        ([at(9000, notSelector="app == 'web'")], []),
        ([at(9000, serviceAccounts={"names": ["db"]})], []),
        ([at(9000, namespaceSelector="projectcalico.org/name == 'other'")], []),
        ([at(9000, selector="app == 'web'")], [Effect.BREAKS]),
        ([at(9000, serviceAccounts={"names": ["web"]})], [Effect.BREAKS]),
        ([at(9000, nets=["10.0.0.7/32"])], [Effect.NOTE]),
        ([at(9000, serviceAccounts={"selector": "role == 'model'"})], [Effect.NOTE]),
        ([at(9000), at(14080, **DB)], [Effect.BREAKS]),
        ([at(9000), at(14080, selector="app == 'web'")], []),
        ([at(9000), at(14080, notNets=["10.0.0.0/8"])], [Effect.NOTE]),
        ([at(9000, 14080, nets=["10.0.0.7/32"])], []),
        ([{**at(9000, **DB), "action": "Deny"}, {"action": "Allow"}], []),
    ],
)
def test_a_rule_is_for_the_pods_at_its_near_end(rules, effects):
    found = all_of(around(calico=[policy(*rules, ADMIN, namespace="")]), account="web")
    assert [each.effect for each in found if each.code == BREAKS] == effects
    assert len(found) == len(effects)


@pytest.mark.parametrize(
    ("spec", "effects"),
    [
        ({"selector": f"{ACCOUNT} == 'web'"}, [Effect.BREAKS]),
        ({"selector": f"{ACCOUNT} == 'default'"}, []),
        ({"selector": "pcsa.role == 'model'"}, [Effect.NOTE]),
        ({"serviceAccountSelector": "role == 'model'"}, [Effect.NOTE]),
        ({"serviceAccountSelector": "role == 'model'", "selector": "app == 'db'"}, []),
    ],
)
def test_a_policy_may_select_pods_by_service_account(spec, effects):
    found = all_of(around(calico=[policy(allow(9000), ADMIN, **spec)]), account="web")
    assert [each.effect for each in found] == effects


NO_ACTION = {"destination": {"ports": [9000]}}
NESTED = reduce(lambda inner, _: [inner], range(3000), 9000)


@pytest.mark.parametrize(
    "broken",
    [
        policy(allow(9000), ADMIN, selector="app = 'web'"),
        policy(NO_ACTION, ADMIN),
        policy(allow(9000, source={"selector": "app = 'web'"}), ADMIN),
        policy(allow(9000, source={"nets": ["ten"]}), ADMIN),
        policy(allow(9000), ADMIN, order="last"),
        policy(allow("8000:x"), ADMIN),
        policy(allow(9000), ADMIN, selector=f"{'(' * 3000}all(){')' * 3000}"),
        policy(allow(9000, source={"notSelector": f"{'!' * 3000}all()"}), ADMIN),
        policy(allow(NESTED), ADMIN),
        {"kind": "NetworkPolicy", "metadata": {"name": "c", "namespace": "shop"}, "apiVersion": "v1"},
    ],
)
def test_a_policy_that_is_not_understood_is_named_and_hides_no_other(broken):
    found = all_of(around(calico=[broken, policy(allow(9000), ADMIN, name="d")]))
    assert [each.code for each in found] == [BREAKS, "NotLookedAt"]
    assert found[1].message.endswith("Calico's NetworkPolicy c")


def tier(name, order, **spec):
    return {"metadata": {"name": name}, "spec": {**({} if order is None else {"order": order}), **spec}}


TIERS = (tier("security", 100), tier("default", 1_000_000), tier("last", None), tier("open", 200, defaultAction="Pass"))
ADMIN_PASSES = allow(14090, action="Pass")


@pytest.mark.parametrize(
    ("first", "second", "breaks"),
    [
        # What a tier does not name it refuses, whatever the next one admits.
        ([allow(9000)], [ALL], ["first"]),
        ([allow(9000, action="Pass")], [ALL], ["first"]),
        ([allow(9000, 14080, action="Pass")], [BOTH], []),
        ([allow(9000, 14080, action="Pass")], [allow(9000)], ["second"]),
        ([{"action": "Pass", "source": FRONT}], [allow(9000, source=BAD), ALL], []),
        ([{"action": "Pass", "source": FRONT}], [allow(9000, source=BAD)], ["second"]),
        # What a tier admits no later one refuses.
        ([allow(9000, 14080)], [allow(9000)], []),
        ([allow(9000, 14080, source=FRONT), {"action": "Pass"}], [allow(9000)], ["second"]),
        ([BOTH], [allow(9000, action="Deny"), ALL], []),
        ([{"action": "Deny", "source": BAD}, {"action": "Pass"}], [allow(9000, action="Deny", source=BAD), ALL], []),
        ([{"action": "Pass"}], [allow(9000, action="Deny", source=BAD), ALL], ["second"]),
    ],
)
def test_tiers_decide_one_after_the_other(first, second, breaks):
    for earlier, later in (("security", None), ("default", "last"), ("security", "last")):
        policies = [
            policy(ADMIN_PASSES, *first, name="first", tier=earlier),
            policy(ADMIN, *second, name="second", **({} if later is None else {"tier": later})),
        ]
        found = all_of(around(calico=policies[::-1], tiers=TIERS))
        assert [each.code for each in found] == [BREAKS] * len(breaks)
        assert [each.message.split()[2] for each in found] == breaks


def test_a_tier_may_leave_to_the_next_what_it_does_not_name():
    by_number = policy(allow(9000, action="Pass"), name="first", tier="open")
    assert codes(around(calico=[by_number, policy(ALL)], tiers=TIERS)) == []
    by_number["spec"]["tier"] = "security"
    assert BREAKS in codes(around(calico=[by_number, policy(ALL)], tiers=TIERS))


def test_a_tier_closes_the_admin_port_and_a_namespace_s_own_policy_does_not_open_it():
    near = around(calico=[policy(allow(9000, 14080, action="Pass"), tier="security"), policy(ALL)], tiers=TIERS)
    (found,) = all_of(near)
    assert (found.code, found.fix) == (CLOSED, "let Calico's NetworkPolicy c admit it")


def test_network_policies_are_in_the_default_tier_behind_an_order_of_1000():
    for_all = {"metadata": {"name": "q"}, "spec": {"podSelector": {}, "ingress": [{}]}}
    denied = allow(9000, action="Deny")
    for order, breaks in ((999, True), (1001, False)):
        near = around(policies=[for_all], calico=[policy(denied, order=order)])
        assert codes(near) == ([BREAKS] if breaks else [])


@pytest.mark.parametrize("order", [5, None])
def test_of_tiers_with_the_same_order_names_decide(order):
    first = policy(ADMIN_PASSES, allow(9000, action="Pass"), name="first", tier="x")
    second = policy(ALL, name="second", tier="y")
    assert codes(around(calico=[second, first], tiers=(tier("y", order), tier("x", order)))) == [BREAKS]
    assert codes(around(calico=[second, first], tiers=(tier("y", order), tier("z", order)))) == ["NotLookedAt"]
    first["spec"]["tier"] = "z"
    assert codes(around(calico=[second, first], tiers=(tier("y", order), tier("z", order)))) == []


@pytest.mark.parametrize("order", [1_000_000, None])
def test_the_default_tier_has_network_policies_in_it_whatever_its_order(order):
    """Before Calico 3.29 it has no number."""
    by_name = {"metadata": {"name": "q"}, "spec": {"podSelector": {}, "ingress": [{"ports": [{"port": "http"}]}]}}
    near = around(policies=[by_name], calico=[policy(ADMIN)], tiers=(tier("default", order), tier("security", 100)))
    assert codes(near) == []


def test_a_policy_of_a_tier_whose_place_is_not_known_is_named_and_hides_no_other():
    for tiers in ((), (tier("security", "first"),)):
        near = around(calico=[policy(allow(9000), tier="security"), policy(allow(9000), ADMIN, name="d")], tiers=tiers)
        found = all_of(near)
        assert [each.code for each in found] == [BREAKS, "NotLookedAt"]
        assert found[1].message.endswith("Calico's NetworkPolicy c")


# ------------------------------------------------------------------------------------------------- callers' egress


def sending(*rules, namespace="callers", name="e", **spec):
    return policy(name=name, namespace=namespace, types=["Egress"], ingress=None, egress=list(rules), **spec)


def to(*ports, **destination):
    return {"action": "Allow", "protocol": "TCP", "destination": {"ports": list(ports), **destination}}


SHOP = {"namespaceSelector": "projectcalico.org/name == 'shop'"}


@pytest.mark.parametrize(
    ("rules", "breaks"),
    [
        ([to(9000)], True),
        ([to(9000, **SHOP)], True),
        ([to(9000, selector="app == 'web'", **SHOP)], True),
        ([to(9000, nets=["0.0.0.0/0"])], True),
        ([to(9000, **SHOP), to(14080, **SHOP)], False),
        ([to(9000, **SHOP), {"action": "Allow"}], False),
        ([to(9000, selector="app == 'web'")], False),
        ([to(9000, selector="app == 'other'", **SHOP)], False),
        ([to(9000, notNets=["10.0.0.0/8"])], False),
        ([to("http", **SHOP)], False),
    ],
)
def test_callers_whose_egress_is_by_number_are_cut_off(rules, breaks):
    assert codes(around(calico=[sending(*rules)])) == ([BREAKS] if breaks else [])


ANY = {"action": "Allow"}
DENIED = {"action": "Deny", "protocol": "TCP"}


def not_to(*ports, **end):
    return {**to(*ports, **SHOP), "action": "Deny", **end}


BY_ACCOUNT = {"source": {"serviceAccounts": {"names": ["front"]}}}


@pytest.mark.parametrize(
    ("rules", "breaks"),
    [
        ([not_to(9000), ANY], True),
        ([not_to(9000, **BY_ACCOUNT), ANY], True),
        ([not_to(14080), ANY], True),
        ([not_to("10000:20000"), ANY], True),
        ([not_to(9000, 14080), ANY], False),
        ([not_to(9000, **BY_ACCOUNT), not_to(14080, **BY_ACCOUNT), ANY], False),
        ([not_to(9000, **BY_ACCOUNT), not_to(14080), ANY], True),
        ([not_to(9000), not_to(14080, **BY_ACCOUNT), ANY], True),
        ([ANY, not_to(9000)], False),
        ([not_to(9000)], False),
        ([not_to("http"), ANY], True),
        ([{**not_to(9000), "destination": {"ports": [9000], "selector": "app == 'web'"}}, ANY], False),
    ],
)
def test_callers_that_may_not_send_by_number_are_compared_too(rules, breaks):
    """They would get in by the sidecar's port, to which Services by name lead."""
    assert codes(around(calico=[sending(*rules)])) == ([BREAKS] if breaks else [])


def test_egress_passes_tiers_one_after_the_other():
    passing, by_number = sending(to(9000, 14080), name="f"), sending(to(9000))
    for action, breaks in (("Allow", False), ("Pass", True)):
        passing["spec"] |= {"tier": "security", "egress": [{**to(9000, 14080), "action": action}]}
        assert codes(around(calico=[by_number, passing], tiers=TIERS)) == ([BREAKS] if breaks else [])


def test_addresses_are_those_of_the_pods_that_run():
    near = around(calico=[sending(to(9000, nets=["10.0.0.0/8"]))])
    running = [{"metadata": {}, "spec": {}, "status": {"podIPs": [{"ip": "10.2.0.7"}]}}]
    for pods, effects in ((running, [Effect.BREAKS]), ([], [Effect.NOTE])):
        found = checks.all_of(subject(), Dry(plain()), Dry(pod()), near, pods)
        assert [each.effect for each in found] == effects


def test_another_policy_of_the_same_callers_may_admit_the_sidecar():
    by_number = sending(to(9000), selector="app == 'front'")
    for selector, breaks in (("app == 'front'", False), ("app == 'back'", True)):
        assert codes(around(calico=[by_number, sending(to(14080), name="f", selector=selector)])) == (
            [BREAKS] if breaks else []
        )


# ------------------------------------------------------------------------------------------------- the admin port


@pytest.mark.parametrize(
    ("rules", "closed"),
    [
        ([], True),
        ([allow("http")], True),
        ([allow(14090, source={"selector": "all()"})], True),
        ([allow(14090, action="Deny")], True),
        ([ADMIN], False),
        ([allow(14090, source={"namespaceSelector": "projectcalico.org/name == 'carpool-system'"})], False),
        ([allow(14090, source={"selector": f"{ACCOUNT} == 'carpool-operator'", "namespaceSelector": "all()"})], False),
        ([allow(14090, source={"selector": f"{ACCOUNT} == 'other'", "namespaceSelector": "all()"})], True),
        (
            [allow(14090, source={"serviceAccounts": {"names": ["carpool-operator"]}, "namespaceSelector": "all()"})],
            False,
        ),
        ([allow(14090, source={"serviceAccounts": {"names": ["other"]}, "namespaceSelector": "all()"})], True),
        ([{"action": "Allow"}], False),
    ],
)
def test_the_operator_needs_the_admin_port(rules, closed):
    assert codes(around(calico=[policy(*rules)])) == ([CLOSED] if closed else [])


def test_whether_the_operator_has_a_label_that_is_not_known_is_a_note():
    source = {"selector": "pcsa.role == 'operator'", "namespaceSelector": "all()"}
    (found,) = all_of(around(calico=[policy(allow(14090, source=source))]))
    assert (found.code, found.effect) == (CLOSED, Effect.NOTE)
