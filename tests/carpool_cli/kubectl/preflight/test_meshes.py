"""Istio's and Linkerd's rules on plain objects: no mesh runs in the tests."""

from __future__ import annotations

import json
import shlex

import pytest
from model_in_shop import all_of, around, codes, patched, plain, pod, subject

from carpool_cli.kubectl.preflight import checks
from carpool_cli.kubectl.preflight.dry_run import Dry
from carpool_cli.manifest_checks.findings import Effect

BREAKS = "MeshPolicyByNumber"
SOURCE = [{"source": {"namespaces": ["team"]}}]


ISTIO = {"metadata": {"name": "shop", "labels": {"istio-injection": "enabled"}}}
AMBIENT = {"metadata": {"name": "shop", "labels": {"istio.io/dataplane-mode": "ambient"}}}
LINKERD = {"metadata": {"name": "shop", "annotations": {"linkerd.io/inject": "enabled"}}}
WITHOUT = {"metadata": {"name": "shop"}}


def to(*ports, **rule):
    return {"to": [{"operation": {"ports": list(ports)}}], **rule}


def authorization(*rules, namespace="shop", **spec):
    return {"metadata": {"name": "a", "namespace": namespace}, "spec": {"rules": list(rules), **spec}}


def test_a_mesh_is_reported_only_where_its_proxy_is_outside_the_pod():
    """From one inside the pod the injector excludes the admin port."""
    assert codes(around(ISTIO)) == []
    assert codes(around(AMBIENT)) == ["Mesh"]


@pytest.mark.parametrize(
    ("namespace", "found"), [(ISTIO, ["a"]), (AMBIENT, ["a", "Mesh"]), (LINKERD, ["s"]), (WITHOUT, [])]
)
def test_rules_of_a_mesh_are_for_its_pods(namespace, found):
    near = around(namespace, authorizations=[authorization(to("9000"))], servers=[server(9000)])
    assert [each.fix.split()[5] if each.code == BREAKS else each.code for each in all_of(near)] == found


@pytest.mark.parametrize(
    ("namespace", "labels", "annotations"),
    [
        (ISTIO, {"sidecar.istio.io/inject": "false"}, {}),
        (ISTIO, {}, {"sidecar.istio.io/inject": "false"}),
        (LINKERD, {}, {"linkerd.io/inject": "disabled"}),
        (AMBIENT, {"istio.io/dataplane-mode": "none"}, {}),
    ],
)
def test_rules_of_a_mesh_are_not_for_pods_that_opted_out(namespace, labels, annotations):
    alone = pod()
    alone["metadata"]["labels"] |= labels
    alone["metadata"]["annotations"] |= annotations
    near = around(namespace, authorizations=[authorization(to("9000"))], servers=[server(9000)])
    assert checks.all_of(subject(), Dry(plain()), Dry(alone), near) == []


@pytest.mark.parametrize(("proxy", "breaks"), [("istio-proxy", True), ("linkerd-proxy", False)])
def test_a_pod_is_in_the_mesh_whose_proxy_it_has(proxy, breaks):
    meshed = pod()
    meshed["spec"]["containers"].append({"name": proxy})
    near = around(WITHOUT, authorizations=[authorization(to("9000"))])
    found = checks.all_of(subject(), Dry(plain()), Dry(meshed), near)
    assert [each.code for each in found] == ([BREAKS] if breaks else [])


@pytest.mark.parametrize(
    ("policy", "breaks"),
    [
        (authorization(to("9000")), True),
        (authorization(to("9000"), action="DENY"), True),
        (authorization(to("9000"), action="CUSTOM"), True),
        (authorization(to("9000"), action="AUDIT"), False),
        (authorization(to("9000"), selector={"matchLabels": {"app": "web"}}), True),
        (authorization(to("9000"), namespace="istio-system"), True),
        (authorization({"to": [{"operation": {"notPorts": ["9000"]}}]}), True),
        (authorization({"when": [{"key": "destination.port", "values": ["9000"]}]}), True),
        (authorization(to("9000", "14080")), False),
        (authorization(to("443")), False),
        (authorization({"from": SOURCE}), False),
        (authorization({"when": [{"key": "request.headers[x]", "values": ["9000"]}]}), False),
        (authorization(to("9000"), selector={"matchLabels": {"app": "other"}}), False),
        (authorization(to("9000"), namespace="other"), False),
        (authorization(to("9000"), targetRefs=[{"kind": "Gateway", "name": "g"}]), False),
        ({"metadata": {"name": "deny-all", "namespace": "shop"}, "spec": {}}, False),
    ],
)
def test_an_authorization_policy_is_compared_by_number(policy, breaks):
    assert codes(around(ISTIO, authorizations=[policy])) == ([BREAKS] if breaks else [])


@pytest.mark.parametrize(
    ("other", "breaks"),
    [
        (authorization(to("14080")), False),
        (authorization(to("14080", **{"from": SOURCE})), False),
        (authorization({}), False),
        (authorization(to("14080", **{"from": [{"source": {"namespaces": ["x"]}}]})), True),
        (authorization({"to": [{"operation": {"ports": ["14080"], "methods": ["GET"]}}]}), True),
        (authorization(to("14080"), action="DENY"), True),
        (authorization(to("14080"), selector={"matchLabels": {"app": "other"}}), True),
    ],
)
def test_all_rules_of_one_action_are_judged_together(other, breaks):
    by_number = authorization(to("9000", **{"from": SOURCE}))
    assert codes(around(ISTIO, authorizations=[by_number, other])) == ([BREAKS] if breaks else [])


def test_the_command_adds_the_port_where_the_other_is_listed():
    (finding,) = all_of(around(ISTIO, authorizations=[authorization({"from": SOURCE}, to("9000"), action="DENY")]))
    assert finding.effect is Effect.BREAKS
    resource, *change = patched(finding.fix)
    assert resource == ["authorizationpolicies.security.istio.io", "a"]
    assert change == ["add", "/spec/rules/1/to/0/operation/ports/-", "14080"]
    everywhere = authorization({"when": [{"key": "destination.port", "notValues": ["9000"]}]}, namespace="istio-system")
    (finding,) = all_of(around(ISTIO, authorizations=[everywhere]))
    assert finding.fix.startswith("kubectl -n istio-system ")
    assert patched(finding.fix)[2] == "/spec/rules/0/when/0/notValues/-"


def server(port, name="s", **selector):
    return {"metadata": {"name": name}, "spec": {"podSelector": {"matchLabels": selector}, "port": port}}


@pytest.mark.parametrize(
    ("servers", "breaks"),
    [
        ([server(9000)], True),
        ([server(9000, app="web")], True),
        ([server(9000), server(9001, "t")], True),
        ([server(9000), server(14080, "t")], False),
        ([server(9000), server("http", "t")], False),
        ([server("http")], False),
        ([server(9001)], False),
        ([server(9000, app="other")], False),
        ([{"metadata": {"name": "s"}, "spec": {"externalWorkloadSelector": {}, "port": 9000}}], False),
    ],
)
def test_a_server_is_compared_by_number(servers, breaks):
    assert codes(around(LINKERD, servers=servers)) == ([BREAKS] if breaks else [])


def test_the_command_has_a_server_name_the_port():
    (finding,) = all_of(around(LINKERD, servers=[server(9000)]))
    assert finding.effect is Effect.BREAKS
    words = shlex.split(finding.fix)
    assert words[:6] == ["kubectl", "-n", "shop", "patch", "servers.policy.linkerd.io", "s"]
    assert json.loads(words[-1]) == {"spec": {"port": "http"}}


def test_a_server_stays_on_the_port_until_that_has_a_name():
    """A Server for 14080 alone would leave 9000 to the namespace's default policy until all pods have a sidecar."""
    nameless = pod()
    del nameless["spec"]["containers"][0]["ports"][0]["name"]
    near = around(LINKERD, servers=[server(9000)])

    (finding,) = checks.all_of(subject(), Dry(plain()), Dry(nameless), near)

    named, rolled, patched = finding.fix.split(" && ")
    assert json.loads(shlex.split(named)[-1])["spec"]["template"]["spec"]["containers"] == [
        {"name": "server", "ports": [{"containerPort": 9000, "name": "http"}]}
    ]
    assert rolled == "kubectl -n shop rollout status deployment/web"
    assert json.loads(shlex.split(patched)[-1]) == {"spec": {"port": "http"}}
