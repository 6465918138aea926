"""The command against a kubectl that has what a test gives it."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from carpool.policy.durations import Duration
from carpool.policy.spec import SLO, BatchingPolicy, Latency
from carpool_cli.kubectl.main import main
from carpool_operator.injector.decide import InjectorSettings, decide
from carpool_operator.injector.patch import patch

FAKE = """#!{python} -SE
import json, pathlib, sys
folder = pathlib.Path({folder!r})
state = json.loads((folder / "state.json").read_text())
words = [each for each in sys.argv[1:] if not each.startswith("--")]
with (folder / "asked").open("a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
what = words[1] if words[0] == "get" else words[0]
if what == "create" and "create" not in state:
    print(sys.stdin.read())
elif what not in state:
    sys.exit('error: the server doesn\\'t have a resource type "%s"' % what)
elif isinstance(state[what], str):
    sys.exit(state[what])
elif what == "api-resources":
    print("\\n".join(state[what]["listed"]))
    sys.exit(state[what]["error"])
else:
    print(json.dumps(state[what]))
"""

SERVER = {"name": "server", "ports": [{"name": "http", "containerPort": 9000}], "readinessProbe": {"tcpSocket": {}}}
REQUESTS = {"resources": {"requests": {"cpu": "2"}}}


def forbidden(what):
    return f'Error from server (Forbidden): {what} is forbidden: User "u" cannot list resource "{what}"'


def items(*found):
    return {"items": list(found)}


def named(name, namespace="shop", **spec):
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


class Shop:
    """A namespace with one model. What is not in ``state`` the cluster does not know."""

    def __init__(self, folder):
        self._folder = folder
        program = folder / "kubectl"
        program.write_text(FAKE.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)
        template = {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{**SERVER, **REQUESTS}]}}
        self.pod = {
            "metadata": {"name": "web-0", "namespace": "shop", **template["metadata"]},
            "spec": template["spec"],
        }
        self.state = {
            "deployments.apps": named("web", replicas=4, template=template, selector={"matchLabels": {"app": "web"}}),
            "namespace": {"metadata": {"name": "shop"}},
            **{each: items() for each in ("services", "resourcequotas", "limitranges", "pods")},
            "networkpolicies.networking.k8s.io": items(),
            "horizontalpodautoscalers.autoscaling": items(),
        }

    def look(self, *workload):
        (self._folder / "state.json").write_text(json.dumps(self.state))
        arguments = ["preflight", *(workload or ["deployment/web"]), "-n", "shop", "--json"]
        result = CliRunner().invoke(main, arguments, prog_name="kubectl carpool")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        (found,) = json.loads(result.stdout)["workloads"]
        return result.exit_code, {each["code"]: each for each in found["findings"]}

    @property
    def asked(self):
        return [json.loads(line) for line in (self._folder / "asked").read_text().splitlines()]


@pytest.fixture
def shop(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    return Shop(tmp_path)


def test_no_injector_answers_and_all_else_is_clean(shop):
    code, found = shop.look()
    assert (code, found.keys()) == (0, {"NotAsked"})


def test_a_used_up_quota_hides_nothing(shop):
    """Of 9 CPU four pods use 8: no dry run, and no room for four sidecars."""
    shop.state["create"] = 'Error from server (Forbidden): pods "web-preflight" is forbidden: exceeded quota: q'
    hard = {"requests.cpu": "9"}
    shop.state["resourcequotas"] = items(
        {**named("q", hard=hard), "status": {"hard": hard, "used": {"requests.cpu": "8"}}}
    )
    shop.state["pods"] = items(*[shop.pod] * 4)
    shop.state["services"] = items(named("web", selector={"app": "web"}, ports=[{"port": 80, "targetPort": 9000}]))

    code, found = shop.look()

    assert (code, found.keys()) == (3, {"NoRoomForDryRun", "NoRoomForAll", "ServiceByNumber"})


def test_pods_that_end_are_none_of_a_quota_s(shop):
    ended = {**shop.pod, "status": {"phase": "Failed"}}
    hard = {"requests.cpu": "10"}
    shop.state["resourcequotas"] = items(
        {**named("q", hard=hard), "status": {"hard": hard, "used": {"requests.cpu": "4"}}}
    )
    shop.state["pods"] = items(shop.pod, shop.pod, ended, ended)
    assert shop.look()[1].keys() == {"NotAsked"}


CILIUM_S = {
    **named("c", endpointSelector={}, ingress=[{"toPorts": [{"ports": [{"port": "9000"}]}]}]),
    "kind": "CiliumNetworkPolicy",
}
CALICO_S = {
    **named("c", selector="all()", ingress=[{"action": "Allow", "destination": {"ports": [9000]}}]),
    "kind": "NetworkPolicy", "apiVersion": "crd.projectcalico.org/v1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("group", "policy"),
    [("cilium.io", CILIUM_S), ("projectcalico.org", CALICO_S), ("crd.projectcalico.org", CALICO_S)],
)
def test_policies_of_network_plugins_are_read_where_the_cluster_has_them(shop, group, policy):
    kinds = ("ciliumnetworkpolicies", "ciliumclusterwidenetworkpolicies") if group == "cilium.io" else (
        "networkpolicies", "globalnetworkpolicies",
    )  # fmt: skip
    shop.state |= {f"{kinds[0]}.{group}": items(policy), f"{kinds[1]}.{group}": items()}

    code, found = shop.look()

    assert (code, found.keys()) == (3, {"NotAsked", "NetworkPolicyByNumber", "AdminPortClosed"})


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("ciliumnetworkpolicies.cilium.io", CILIUM_S),
        ("ciliumclusterwidenetworkpolicies.cilium.io", {**CILIUM_S, "metadata": {"name": "c"}}),
        ("networkpolicies.projectcalico.org", CALICO_S),
        ("globalnetworkpolicies.crd.projectcalico.org", {**CALICO_S, "metadata": {"name": "c"}}),
    ],
)
def test_one_kind_of_policies_is_read_where_the_cluster_lacks_the_other(shop, kind, policy):
    shop.state[kind] = items(policy)
    assert shop.look()[1].keys() == {"NotAsked", "NetworkPolicyByNumber", "AdminPortClosed"}


def test_a_policy_that_is_not_understood_ends_nothing(shop):
    broken = {**CALICO_S, **named("d", selector="app ~ 'web'")}
    shop.state["networkpolicies.projectcalico.org"] = items(CALICO_S, broken)
    code, found = shop.look()
    assert (code, found.keys()) == (3, {"NotAsked", "NetworkPolicyByNumber", "AdminPortClosed", "NotLookedAt"})


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("ciliumnetworkpolicies.cilium.io", "Cilium's policies"),
        ("networkpolicies.projectcalico.org", "Calico's policies"),
        ("networkpolicies.crd.projectcalico.org", "Calico's policies"),
    ],
)
def test_policies_of_network_plugins_that_one_may_not_read_are_named(shop, kind, named):
    shop.state[kind] = forbidden(kind)

    code, found = shop.look()

    assert (code, found.keys()) == (0, {"NotAsked", "NotLookedAt"})
    assert named in found["NotLookedAt"]["message"]


def test_calico_s_policies_are_read_as_stored_where_its_api_does_not_let_one(shop):
    shop.state["networkpolicies.projectcalico.org"] = forbidden("networkpolicies.projectcalico.org")
    for kind in ("networkpolicies", "globalnetworkpolicies"):
        shop.state[f"{kind}.crd.projectcalico.org"] = items(*([CALICO_S] if kind == "networkpolicies" else []))

    assert shop.look()[1].keys() == {"NotAsked", "NetworkPolicyByNumber", "AdminPortClosed"}


UNAVAILABLE = "Error from server (ServiceUnavailable): the server is currently unable to handle the request"


def test_an_api_that_is_away_hides_nothing_else(shop):
    """As in clusters whose metrics-server is broken: kubectl lists all other kinds, and ends with 1."""
    away = "unable to retrieve the complete list of server APIs: metrics.k8s.io/v1beta1: stale GroupVersion discovery"
    shop.state["api-resources"] = {"listed": ["pods", "deployments.apps"], "error": f"error: {away}"}
    web = shop.state["deployments.apps"]
    shop.state["deployments.apps"] = items({**web, "apiVersion": "apps/v1", "kind": "Deployment"})
    shop.state["networkpolicies.projectcalico.org"] = UNAVAILABLE
    for kind in ("networkpolicies", "globalnetworkpolicies"):
        shop.state[f"{kind}.crd.projectcalico.org"] = items(*([CALICO_S] if kind == "networkpolicies" else []))

    code, found = shop.look("--json")

    assert (code, found.keys()) == (3, {"NotAsked", "NetworkPolicyByNumber", "AdminPortClosed"})


def test_policies_of_all_namespaces_are_read(shop):
    outgoing = named("e", "callers", podSelector={}, policyTypes=["Egress"], egress=[{"ports": [{"port": 9000}]}])
    shop.state["networkpolicies.networking.k8s.io"] = items(outgoing)

    code, found = shop.look()

    assert (code, found.keys()) == (3, {"NotAsked", "NetworkPolicyByNumber"})
    (asked,) = [each for each in shop.asked if each[1] == "networkpolicies.networking.k8s.io"]
    assert "--all-namespaces" in asked


def test_addresses_are_compared_with_those_of_the_pods_that_run(shop):
    """Of 203.0.113.7 no pod of the model is."""
    egress = [{"to": [{"ipBlock": {"cidr": "203.0.113.7/32"}}], "ports": [{"port": 9000}]}]
    outgoing = named("e", "callers", podSelector={}, policyTypes=["Egress"], egress=egress)
    shop.state["networkpolicies.networking.k8s.io"] = items(outgoing)
    assert shop.look()[1].keys() == {"NotAsked", "NetworkPolicyByNumber"}
    shop.state["pods"] = items({**shop.pod, "status": {"podIPs": [{"ip": "10.2.0.7"}]}})
    assert shop.look()[1].keys() == {"NotAsked"}


def test_the_rules_of_meshes_are_read_where_the_server_has_them(shop):
    joined = {"labels": {"istio-injection": "enabled"}, "annotations": {"linkerd.io/inject": "enabled"}}
    shop.state["namespace"]["metadata"] |= joined
    rules = [{"to": [{"operation": {"ports": ["9000"]}}]}]
    shop.state["authorizationpolicies.security.istio.io"] = items(named("a", rules=rules))
    assert shop.look()[1].keys() == {"NotAsked", "MeshPolicyByNumber"}
    del shop.state["authorizationpolicies.security.istio.io"]
    shop.state["servers.policy.linkerd.io"] = items(named("s", podSelector={}, port=9000))
    assert shop.look()[1].keys() == {"NotAsked", "MeshPolicyByNumber"}


def test_where_the_operator_runs_is_read(shop):
    labels = {"app.kubernetes.io/name": "carpool", "app.kubernetes.io/component": "operator"}
    shop.state["pods"] = items({"metadata": {"name": "o", "namespace": "platform", "labels": labels}})
    shop.state["namespace"]["metadata"]["labels"] = {"team": "infra"}
    peer = {"namespaceSelector": {"matchLabels": {"team": "infra"}}}
    rules = [{"ports": [{"port": "http"}]}, {"ports": [{"port": 14090}], "from": [peer]}]
    shop.state["networkpolicies.networking.k8s.io"] = items(named("p", podSelector={}, ingress=rules))
    assert shop.look()[1].keys() == {"NotAsked"}
    del rules[1]
    shop.state["networkpolicies.networking.k8s.io"] = items(named("p", podSelector={}, ingress=rules))
    assert "namespace platform" in shop.look()[1]["AdminPortClosed"]["message"]


def test_what_one_may_not_read_is_said_and_stops_nothing(shop):
    for what in ("pods", "resourcequotas", "authorizationpolicies.security.istio.io"):
        shop.state[what] = forbidden(what)

    code, found = shop.look()

    assert (code, found.keys()) == (0, {"NotAsked", "NotLookedAt"})
    for words in ("its pods", "the operator's pods", "ResourceQuotas", "AuthorizationPolicies"):
        assert words in found["NotLookedAt"]["message"]


def test_sidecars_that_tune_themselves_are_found(shop):
    own = InjectorSettings(image="s", version="1", policy=BatchingPolicy(slo=SLO(latency=Latency(p99=Duration(0.05)))))
    spec = shop.state["deployments.apps"]["spec"]
    spec["template"] = patch(spec["template"], decide(spec["template"], None, own, asked=True), own, "")

    code, found = shop.look()

    assert (code, found.keys()) == (0, {"SelfTuned"})
    assert "-n shop get deployment/web -o yaml | carpool inject --undo -f -" in found["SelfTuned"]["fix"]
