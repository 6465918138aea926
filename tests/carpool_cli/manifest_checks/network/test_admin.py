"""Policies of administrators on plain objects; tests/cluster/test_preflight.py has them on a real API server."""

from __future__ import annotations

import pytest
from model_in_shop import all_of, around, codes, patched

from carpool_cli.manifest_checks.findings import Effect

BREAKS, CLOSED = "NetworkPolicyByNumber", "AdminPortClosed"
EVERYWHERE = {"namespaces": {}}
TEAM = {"namespaces": {"matchLabels": {"team": "a"}}}
FRONT = {
    "pods": {"namespaceSelector": {"matchLabels": {"team": "a"}}, "podSelector": {"matchLabels": {"app": "front"}}}
}
WEB = {"pods": {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "web"}}}}
OPERATOR = {"namespaces": {"matchLabels": {"kubernetes.io/metadata.name": "carpool-system"}}}


def number(*ports):
    return [{"portNumber": {"protocol": "TCP", "port": port}} for port in ports]


def rule(action, *ports, peer=EVERYWHERE, way="from", **said):
    return {"action": action, way: [peer], **({"ports": number(*ports)} if ports else {}), **said}


def policy(*rules, kind="AdminNetworkPolicy", name="a", priority=10, subject=EVERYWHERE, way="ingress"):
    spec = {"subject": subject, way: list(rules)}
    if kind == "AdminNetworkPolicy":
        spec["priority"] = priority
    group = "policy.networking.k8s.io/v1alpha1"
    return {"apiVersion": group, "kind": kind, "metadata": {"name": name}, "spec": spec}


def baseline(*rules, **said):
    return policy(*rules, kind="BaselineAdminNetworkPolicy", name="default", **said)


def admits(*ports, callers=()):
    """A NetworkPolicy of the namespace; the operator gets to its port."""
    rules = [{"ports": [{"port": port} for port in ports], "from": list(callers)}, {"ports": [{"port": 14090}]}]
    return {"metadata": {"name": "p"}, "spec": {"podSelector": {}, "ingress": rules}}


TEAM_S = {"namespaceSelector": {"matchLabels": {"team": "a"}}}
"""As a NetworkPolicy has it."""
RANGE = {"ports": [{"portRange": {"protocol": "TCP", "start": 8000, "end": 9999}}]}
NAMED = {"ports": [{"namedPort": "http"}]}


@pytest.mark.parametrize(
    ("rules", "breaks"),
    [
        ([rule("Deny", 9000)], True),
        ([rule("Deny", 9000, peer=FRONT)], True),
        ([rule("Deny", **RANGE)], True),
        ([rule("Deny", 14080)], True),
        ([rule("Deny", 9000, 14080)], False),
        ([rule("Deny", **NAMED)], True),
        ([rule("Allow", **NAMED)], False),
        ([rule("Deny", 443)], False),
        ([rule("Deny", ports=[{"portNumber": {"protocol": "UDP", "port": 9000}}])], False),
        ([rule("Deny", 9000), rule("Deny", 14080)], False),
        ([rule("Deny", 9000, peer=FRONT), rule("Deny", 14080, peer=TEAM)], True),
        ([rule("Allow", 9000), rule("Deny", 9000)], False),
        ([rule("Allow", 9000)], False),
        ([rule("Allow", 9000), rule("Deny", 9000, 14080)], True),
    ],
)
@pytest.mark.parametrize("of", [policy, baseline])
def test_a_policy_is_compared_by_number(of, rules, breaks):
    """These add nothing that is closed: what no rule of theirs is for is left to others."""
    near = around(admin=[of(*rules, rule("Allow", 14090))])
    assert codes(near) == ([BREAKS] if breaks else [])


@pytest.mark.parametrize(
    ("rules", "breaks"),
    [
        ([rule("Pass", 9000)], False),
        ([rule("Pass", 9000), rule("Deny", 9000, 14080)], True),
        ([rule("Pass", 9000), rule("Deny", 9000, 14080, peer=FRONT)], True),
        ([rule("Pass", 9000, peer=FRONT), rule("Deny", 9000, 14080, peer=WEB)], False),
        ([rule("Pass", 9000, 14080), rule("Deny", 9000)], False),
        ([rule("Pass", 9000), rule("Allow")], False),
    ],
)
def test_what_is_passed_on_is_compared_with_what_is_refused_then(rules, breaks):
    assert codes(around(admin=[policy(*rules, rule("Allow", 14090))])) == ([BREAKS] if breaks else [])


def test_two_rules_that_keep_the_same_callers_out_are_one():
    """The wider one is for the sidecar's port, by another policy, and in any order."""
    for first, second in ((1, 2), (2, 1)):
        near = around(admin=[policy(rule("Deny", 9000, peer=FRONT), priority=first),
                             policy(rule("Deny", 14080, 9000, peer=TEAM), name="b", priority=second)])  # fmt: skip
        assert codes(near) == []


@pytest.mark.parametrize(
    ("subject", "selects"),
    [
        (EVERYWHERE, True),
        (TEAM, True),
        (WEB, True),
        ({"namespaces": {"matchLabels": {"team": "b"}}}, False),
        (FRONT, False),
    ],
)
def test_a_policy_is_for_the_pods_that_it_selects(subject, selects):
    shop = {"metadata": {"name": "shop", "labels": {"team": "a"}}}
    assert codes(around(shop, admin=[policy(rule("Deny", 9000), subject=subject)])) == ([BREAKS] if selects else [])


@pytest.mark.parametrize(
    ("rules", "policies", "breaks"),
    [
        ([rule("Allow", 9000)], [admits(9000)], 2),
        ([rule("Allow", 9000)], [admits(9000, 14080)], 0),
        ([rule("Allow", 9000)], [admits()], 0),
        ([rule("Allow", 9000, peer=TEAM)], [admits(443)], 1),
        ([rule("Allow")], [admits(9000, callers=[{"namespaceSelector": {}}])], 0),
        ([rule("Allow", peer=TEAM)], [admits(9000, callers=[{"namespaceSelector": {}}])], 1),
        ([rule("Deny")], [admits(9000, callers=[{"namespaceSelector": {}}])], 0),
        ([rule("Pass", 9000)], [admits(443)], 0),
    ],
)
def test_it_decides_before_the_namespace_s_own_policies(rules, policies, breaks):
    near = around(policies=policies, admin=[policy(rule("Allow", 14090), *rules)])
    assert codes(near) == [BREAKS] * breaks


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ([rule("Pass", 9000), rule("Allow")], True),
        ([rule("Pass", 9000), rule("Allow", peer=FRONT)], True),
        ([rule("Pass", 9000, 14080), rule("Allow")], False),
        ([rule("Pass", 9000), rule("Pass", 14080), rule("Allow")], False),
    ],
)
def test_what_is_passed_on_may_be_refused_then(rules, told):
    """By the namespace's own policy, which the rule behind keeps from being asked about the sidecar's port."""
    for_some = [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "web"}}}]
    found = all_of(around(policies=[admits("http", callers=for_some)], admin=[policy(*rules)]))
    assert [(each.code, "leaves port 9000 to later policies" in each.message) for each in found] == [
        (BREAKS, True)
    ] * told
    for open_to_all in (admits("http"), admits()):
        assert codes(around(policies=[open_to_all], admin=[policy(*rules)])) == []


@pytest.mark.parametrize(
    ("rules", "policies", "breaks"),
    [
        ([rule("Allow", **NAMED), rule("Deny", 9000)], [], 0),
        ([rule("Allow", peer=TEAM, **NAMED), rule("Deny", 9000, peer=FRONT)], [], 0),
        ([rule("Allow", peer=FRONT, **NAMED), rule("Deny", 9000, peer=TEAM)], [], 1),
        ([rule("Pass", peer=TEAM, **NAMED), rule("Allow")], [admits(9000, callers=[TEAM_S])], 1),
    ],
)
def test_a_port_by_its_name_was_the_model_s(rules, policies, breaks):
    """It is the sidecar's now; callers were let in, or left to the namespace's policy, by that name all the same."""
    for of in (policy,) if policies else (policy, baseline):
        assert codes(around(policies=policies, admin=[of(rule("Allow", 14090), *rules)])) == [BREAKS] * breaks


def test_callers_that_a_rule_lets_in_first_are_not_kept_out_behind_it():
    rules = [rule("Allow", 9000, 14080, peer=FRONT), rule("Allow", 9000), rule("Deny", 9000, 14080, peer=FRONT)]
    assert codes(around(admin=[policy(*rules)])) == []


def test_who_is_denied_the_sidecar_s_port_gets_in_only_where_the_model_s_is_open():
    """The namespace's policy admits the port by its name: nobody gets to the model's number."""
    denied = policy(rule("Deny", peer=FRONT, **NAMED))
    assert codes(around(policies=[admits("http")], admin=[denied])) == []
    assert codes(around(policies=[admits("http", 9000)], admin=[denied])) == [BREAKS]


def test_the_baseline_is_for_pods_that_no_policy_selects():
    closed = baseline(rule("Allow", 9000), rule("Deny", 9000, 14080), rule("Allow", 14090))
    assert codes(around(admin=[closed])) == [BREAKS]
    assert codes(around(admin=[closed], policies=[admits("http")])) == []


@pytest.mark.parametrize("of", [policy, baseline])
def test_the_command_adds_a_port_to_the_rule(of):
    (finding,) = all_of(around(admin=[of(rule("Allow", 14090), rule("Deny", 9000))]))
    assert finding.effect is Effect.BREAKS
    resource, *change = patched(finding.fix)
    kind, name = ("adminnetworkpolicy", "a") if of is policy else ("baselineadminnetworkpolicy", "default")
    assert resource == [f"{kind}.policy.networking.k8s.io", name]
    assert change == ["add", "/spec/ingress/1/ports/-", {"portNumber": {"protocol": "TCP", "port": 14080}}]


# ------------------------------------------------------------------------------------------------- callers' egress


def sending(*rules, of=policy, **said):
    return of(*[{**each, "to": each.pop("from")} for each in map(dict, rules)], way="egress", **said)


@pytest.mark.parametrize(
    ("rules", "effects"),
    [
        ([rule("Deny", 9000)], [Effect.BREAKS]),
        ([rule("Deny", 9000, peer=WEB)], [Effect.BREAKS]),
        ([rule("Deny", **RANGE)], [Effect.BREAKS]),
        ([rule("Deny", 9000, peer={"networks": ["10.0.0.0/8"]})], [Effect.NOTE]),
        ([rule("Deny", 14080)], [Effect.BREAKS]),
        ([rule("Allow", 9000), rule("Deny")], [Effect.BREAKS]),
        ([rule("Allow", 9000)], [Effect.NOTE]),
        ([rule("Pass", 9000), rule("Deny")], [Effect.BREAKS]),
        ([rule("Pass", 9000)], []),
        ([rule("Deny", 9000, 14080)], []),
        ([rule("Deny", 9000), rule("Deny", 14080, peer=WEB)], []),
        ([rule("Allow", 9000, 14080), rule("Deny")], []),
        ([rule("Allow", 9000, 14080), rule("Deny", 9000)], []),
        ([rule("Deny", 9000, peer=FRONT)], []),
        ([rule("Deny", 9000, peer={"nodes": {}})], []),
        ([rule("Deny", **NAMED)], [Effect.BREAKS]),
        ([rule("Allow", **NAMED), rule("Deny", 9000)], []),
    ],
)
def test_callers_that_it_selects_are_compared_too(rules, effects):
    assert [each.effect for each in all_of(around(admin=[sending(*rules)]))] == effects


def test_an_open_baseline_lets_callers_send():
    assert codes(around(admin=[sending(rule("Allow", 9000), of=baseline)])) == []
    assert codes(around(admin=[sending(rule("Allow", 9000), rule("Deny"), of=baseline)])) == [BREAKS]


def test_what_is_left_to_an_open_or_closed_baseline_is_no_finding():
    """A pass for the model's port, and a baseline that denies all: it is for namespaces to open both ports."""
    closed = sending(rule("Deny"), of=baseline)
    assert codes(around(admin=[sending(rule("Pass", 9000)), closed])) == []
    assert codes(around(admin=[sending(rule("Pass", 9000), rule("Deny")), closed])) == [BREAKS]


def test_of_two_policies_the_first_decides_for_the_same_callers():
    first = sending(rule("Deny", 9000, 14080), priority=1)
    second = sending(rule("Deny", 9000), name="b", priority=2)
    assert codes(around(admin=[second, first])) == []
    for_others = sending(rule("Deny", 9000, 14080), priority=1, subject=FRONT)
    assert codes(around(admin=[second, for_others])) == [BREAKS]


# ------------------------------------------------------------------------------------------------- the admin port


@pytest.mark.parametrize(
    ("rules", "policies", "closed"),
    [
        ([rule("Deny")], [], True),
        ([rule("Deny", 14090)], [], True),
        ([rule("Deny", 14090)], [admits(9000, 14080)], True),
        ([rule("Deny", peer=OPERATOR)], [], True),
        ([rule("Deny", peer=TEAM)], [], False),
        ([rule("Allow", 14090, peer=OPERATOR), rule("Deny")], [], False),
        ([rule("Pass", 14090), rule("Deny")], [], False),
        ([rule("Pass", 14090), rule("Deny")], [admits(9000, 14080)], False),
    ],
)
def test_the_operator_needs_the_admin_port(rules, policies, closed):
    near = around(admin=[policy(*rules)], policies=policies)
    found = [each for each in all_of(near) if each.code == CLOSED]
    assert len(found) == closed
    if closed:
        assert found[0].fix == "let AdminNetworkPolicy a admit it"


def test_an_admin_s_policy_lets_the_operator_through_what_a_namespace_closes():
    closed = {"metadata": {"name": "p"}, "spec": {"podSelector": {}, "ingress": [{"ports": [{"port": "http"}]}]}}
    assert codes(around(policies=[closed])) == [CLOSED]
    assert codes(around(policies=[closed], admin=[policy(rule("Allow", 14090, peer=OPERATOR))])) == []


# ------------------------------------------------------------------------------------------------- not understood


@pytest.mark.parametrize(
    "broken",
    [
        policy(rule("Permit", 9000)),
        policy({"action": "Deny"}),
        policy(rule("Deny", peer={"services": {}})),
        policy(rule("Deny", ports=[{"protocols": ["TCP"]}])),
        policy(rule("Deny", peer={"networks": ["ten"]})),
        policy(rule("Deny", 9000), priority="first"),
        policy(rule("Deny", 9000), subject={"nodes": {}}),
        {"kind": "AdminNetworkPolicy", "metadata": {"name": "a"}, "spec": {}},
        policy(rule("Deny", 9000), kind="ClusterNetworkPolicy"),
    ],
)
def test_a_policy_that_is_not_understood_is_named_and_hides_no_other(broken):
    found = all_of(around(admin=[broken, policy(rule("Deny", 9000), name="b")]))
    assert [each.code for each in found] == [BREAKS, "NotLookedAt"]
    assert found[1].message.endswith(f"{broken['kind']} a")
