"""``kubectl carpool preflight`` on a real API server: every problem planted is found, and the clean model has none."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from minicluster import carpool
from minicluster.waiting import eventually

INJECT = "carpool.dev/inject"
SYSTEM = "carpool-system"


@pytest.fixture(scope="module")
def cluster(own_cluster):
    return own_cluster


@pytest.fixture(scope="module")
def installed(cluster, api):
    carpool.install(cluster, api)
    return api


@pytest.fixture
def preflight(cluster, namespace, tmp_path):
    """Run it: exit code, and what it printed as data."""
    plugin = tmp_path / "kubectl-carpool"
    plugin.write_text(f"#!{sys.executable}\nfrom carpool_cli.kubectl.main import run\nrun()\n")
    plugin.chmod(0o755)

    def run(*arguments, kubeconfig=None, plain=False):
        environment = cluster.environment()
        environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
        where = [f"--kubeconfig={kubeconfig}"] if kubeconfig else []
        command = ["kubectl", "carpool", "preflight", *arguments, *where, *([] if plain else ["--json"])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603 - kubectl finding the plugin is what is tested
        return done.returncode, done.stdout + done.stderr if plain else json.loads(done.stdout)

    return run


@pytest.fixture
def codes(preflight, namespace):
    """What is found of a workload, by code, and the exit code."""

    def of(workload="deployment/web"):
        code, told = preflight(workload, "-n", namespace)
        (found,) = told["workloads"]
        assert told["breaks"] == (code == 3)
        return code, {each["code"]: each for each in found["findings"]}

    return of


@pytest.fixture
def fixed(cluster):
    """Run the command that a finding names."""

    def run(finding):
        command = re.split(r" asks for the least|, and have|; or |; it has to be ", finding["fix"])[0]
        program, *arguments = shlex.split(command)
        assert program == "kubectl"
        cluster.run("kubectl", *arguments)

    return run


def model(name="web", replicas=0, **template):
    """A clean model: a named port, probes by name, no stop hook of its own."""
    labels = {"app": name}
    probe = {"httpGet": {"path": "/v2/health/ready", "port": "http"}}
    server = {
        "name": "server", "image": "standin", "args": ["--host=0.0.0.0", "--port=9000"],
        "ports": [{"name": "http", "containerPort": 9000}], "readinessProbe": probe,
    }  # fmt: skip
    spec = {"containers": [{**server, **template.pop("container", {})}], **template.pop("pod", {})}
    metadata = {"labels": labels, "annotations": template.pop("annotations", {})}
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {
            "replicas": replicas, "selector": {"matchLabels": labels},
            "template": {"metadata": metadata, "spec": spec},
        },
    }  # fmt: skip


def service(target="http", name="web", **spec):
    ports = [{"port": 80, "targetPort": target}]
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
            "spec": {"selector": {"app": "web"}, "ports": ports, **spec}}  # fmt: skip


def admits(*ports, name="web"):
    """Admits ports to everybody, and closes all others."""
    listed = [{"port": port, "protocol": "TCP"} for port in ports]
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": name},
            "spec": {"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [{"ports": listed}]}}  # fmt: skip


def sends(*ports, name="callers"):
    """What callers may send to; DNS is open."""
    listed = [{"port": port, "protocol": "TCP"} for port in ports]
    spec = {"podSelector": {"matchLabels": {"app": "caller"}}, "policyTypes": ["Egress"], "egress": [{"ports": listed}]}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": name}, "spec": spec}


def scales(kind="Resource", name="web"):
    target = {"type": "Utilization", "averageUtilization": 60}
    metric = {"type": kind, "resource": {"name": "cpu", "target": target}}
    of = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"}
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": name},
            "spec": {"scaleTargetRef": of, "maxReplicas": 3, "metrics": [metric]}}  # fmt: skip


def test_the_clean_one_has_none(installed, namespace, codes, preflight):
    installed.apply(model(), service(), admits("http", 14090), sends("http"), namespace=namespace)

    assert codes() == (0, {})
    code, told = preflight("-n", namespace, plain=True)
    assert (code, told.strip()) == (0, f"{namespace} deployment/web: nothing found")


def written(api, namespace):
    """Return what people write of the model and what is around it. Controllers write the status, and annotations."""
    found = [api.get(kind, "web", namespace) for kind in ("deployments", "services", "networkpolicies")]
    return [(each["spec"], "carpool.dev/" in json.dumps(each["metadata"].get("annotations"))) for each in found]


def test_nothing_is_changed(installed, namespace, codes):
    installed.apply(model(), service(9000), admits(9000, 14090), scales(), namespace=namespace)
    before = written(installed, namespace)

    codes()

    assert written(installed, namespace) == before
    assert installed.find("pods", namespace) == []


CLOSED = {
    "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "closed"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
}  # fmt: skip

PLANTED = [
    ("ServiceByNumber", 0, [service(9000)], {}),
    ("NetworkPolicyByNumber", 3, [admits(9000, 14090)], {}),
    ("NetworkPolicyByNumber", 3, [sends(53, 9000)], {}),
    ("AdminPortClosed", 0, [admits("http")], {}),
    ("AdminPortClosed", 0, [CLOSED, admits("http", name="by-name")], {}),
    ("HPAOnPercentage", 3, [scales()], {}),
    ("NoReadinessProbe", 0, [], {"container": {"readinessProbe": None}}),
]


@pytest.mark.parametrize(("code", "exits", "objects", "template"), PLANTED)
def test_a_planted_problem_is_found_and_its_command_corrects_it(
    installed, namespace, codes, fixed, code, exits, objects, template
):
    installed.apply(model(**template), *objects, namespace=namespace)

    found = codes()

    assert found[0] == exits
    assert found[1].keys() == {code}
    fixed(found[1][code])
    assert codes() == (0, {})


def test_a_headless_service(installed, namespace, codes, fixed):
    installed.apply(model(), service(name="web", clusterIP="None"), namespace=namespace)

    code, found = codes()

    assert (code, found.keys()) == (0, {"HeadlessService"})
    fixed(found["HeadlessService"])
    (made,) = [each for each in installed.find("services", namespace) if each["metadata"]["name"] == "web-batched"]
    assert made["spec"]["ports"][0]["targetPort"] == "http"
    assert made["spec"]["clusterIP"] != "None"


def test_host_networking(installed, namespace, codes, fixed):
    installed.apply(model(pod={"hostNetwork": True}), namespace=namespace)

    code, found = codes()

    assert (code, found.keys()) == (0, {"HostNetwork"})
    fixed(found["HostNetwork"])
    assert codes() == (0, {})


def test_a_readiness_probe_that_shows_another_protocol(installed, namespace, codes):
    probe = {"grpc": {"port": 9000}}
    installed.apply(model(container={"readinessProbe": probe}), namespace=namespace)

    code, found = codes()

    assert code == 0
    (reason,) = found
    assert "carpool.dev/port" in found[reason]["fix"]


def counted(api, namespace, **used):
    """Speak for the controller that counts what a quota limits; this cluster has none."""
    (quota,) = api.find("resourcequotas", namespace)
    hard = quota["spec"]["hard"]
    status = {"hard": hard, "used": {**dict.fromkeys(hard, "0"), **used}}
    api.patch("resourcequotas", "q", namespace, sub="status", body={"status": status})


def test_a_quota_that_has_no_room(installed, namespace, codes, fixed):
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "q"},
        "spec": {"hard": {"limits.memory": "300Mi"}},
    }
    small = {"resources": {"limits": {"memory": "64Mi"}}}
    installed.apply(model(container=small), quota, namespace=namespace)
    counted(installed, namespace)

    code, found = codes()

    assert (code, found.keys()) == (0, {"NoRoom"})
    assert "ResourceQuota q has" in found["NoRoom"]["message"]
    fixed(found["NoRoom"])
    assert codes() == (0, {})


def test_a_used_up_quota_hides_nothing(installed, namespace, codes):
    hard = {"requests.nvidia.com/gpu": "4"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": hard}}
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    installed.apply(model(container=gpu), service(9000), admits(9000, 14090), quota, namespace=namespace)
    counted(installed, namespace, **hard)

    code, found = codes()

    assert (code, found.keys()) == (3, {"NoRoomForDryRun", "ServiceByNumber", "NetworkPolicyByNumber"})


def test_a_quota_that_has_room_for_one_and_not_for_all(installed, namespace, codes, fixed):
    """Four pods use 8 of 9 CPU. With sidecars of 500m three fit; with sidecars of 100m four do."""
    hard = {"requests.cpu": "9"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": hard}}
    two = {"resources": {"requests": {"cpu": "2"}}}
    stopped = model(replicas=4, container=two, pod={"schedulingGates": [{"name": "test.example/never"}]})
    installed.apply(quota, namespace=namespace)
    counted(installed, namespace)
    installed.apply(stopped, namespace=namespace)

    installed.until("pods", namespace, lambda pods: len(pods) == 4)

    code, found = codes()

    assert (code, found.keys()) == (3, {"NoRoomForDryRun", "NoRoomForAll"})
    fixed(found["NoRoomForAll"])
    counted(installed, namespace)  # the old pods go, and nobody else takes them off
    eventually(lambda: codes()[1].keys() <= {"NoRoomForDryRun"})


def test_what_the_server_refuses_anyway_is_not_ours(installed, namespace, codes):
    limits = {"limits": [{"type": "Container", "max": {"memory": "64Mi"}}]}
    small = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}, "spec": limits}
    large = {"resources": {"limits": {"memory": "128Mi"}}}
    installed.apply(model(container=large), small, namespace=namespace)

    code, found = codes()

    assert (code, found.keys()) == (0, {"RefusedAlready"})


@pytest.mark.parametrize(
    ("labels", "annotations", "codes_found"),
    [
        ({"istio-injection": "enabled"}, {}, set()),
        ({}, {"linkerd.io/inject": "enabled"}, set()),
        ({"istio.io/dataplane-mode": "ambient"}, {}, {"Mesh"}),
    ],
)
def test_meshes(installed, namespace, codes, labels, annotations, codes_found):
    """From a mesh in the pod the injector excludes the admin port by itself."""
    installed.patch("namespaces", namespace, body={"metadata": {"labels": labels, "annotations": annotations}})
    installed.apply(model(), namespace=namespace)

    code, found = codes()

    assert (code, found.keys()) == (0, codes_found)


def test_a_namespace_that_is_left_alone(installed, namespace, codes):
    installed.patch("namespaces", namespace, body={"metadata": {"labels": {"carpool.dev/injection": "disabled"}}})
    installed.apply(model(), namespace=namespace)

    code, found = codes()

    assert (code, found.keys()) == (0, {"NotAsked"})
    assert "carpool.dev/injection=disabled" in found["NotAsked"]["message"]


def crd_of(group, kind, *, namespaced=True, version="v1"):
    """One that takes anything: the plugins themselves don't run here, and their schemas are not the question."""
    plural = f"{kind.lower()}s" if kind == "Tier" else kind.lower().removesuffix("y") + "ies"
    anything = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        # The API server asks for the annotation where a group is Kubernetes' own.
        "metadata": {
            "name": f"{plural}.{group}", "annotations": {"api-approved.kubernetes.io": "unapproved, test-only"},
        },
        "spec": {
            "group": group, "scope": "Namespaced" if namespaced else "Cluster",
            "names": {"plural": plural, "kind": kind, "listKind": f"{kind}List", "singular": kind.lower()},
            "versions": [{"name": version, "served": True, "storage": True, "schema": anything}],
        },
    }  # fmt: skip


TO_9000 = {"toPorts": [{"ports": [{"port": "9000", "protocol": "TCP"}]}]}
TO_ADMIN = {"toPorts": [{"ports": [{"port": "14090", "protocol": "TCP"}]}]}
OF_PLUGINS = {
    "cilium.io/v2": (
        ("CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy"),
        {"endpointSelector": {"matchLabels": {"app": "web"}}, "ingress": [TO_9000, TO_ADMIN]},
    ),
    "crd.projectcalico.org/v1": (
        ("NetworkPolicy", "GlobalNetworkPolicy"),
        {
            "selector": "app == 'web'",
            "ingress": [{"action": "Allow", "protocol": "TCP", "destination": {"ports": [9000, 14090]}}],
        },
    ),
}


@pytest.mark.parametrize("api_version", OF_PLUGINS)
def test_policies_of_network_plugins(installed, cluster, namespace, codes, fixed, api_version):
    group, _, version = api_version.partition("/")
    kinds, spec = OF_PLUGINS[api_version]
    crds = [crd_of(group, kind, namespaced=kind == kinds[0], version=version) for kind in kinds]
    for crd in crds:
        installed.apply(crd)
        installed.until_served(crd["metadata"]["name"])
    try:
        installed.apply(model(), namespace=namespace)
        policy = {"apiVersion": api_version, "kind": kinds[0], "metadata": {"name": "web"}, "spec": spec}
        cluster.run("kubectl", "-n", namespace, "apply", "-f", "-", text=json.dumps(policy))

        code, found = codes()

        assert (code, found.keys()) == (3, {"NetworkPolicyByNumber"})
        fixed(found["NetworkPolicyByNumber"])
        assert codes() == (0, {})
    finally:
        for crd in crds:
            installed.delete("customresourcedefinitions", crd["metadata"]["name"])


NUMBER = {"portNumber": {"protocol": "TCP", "port": 9000}}
OF_ADMINISTRATORS = {
    "policy.networking.k8s.io/v1alpha1": (
        ("AdminNetworkPolicy", "BaselineAdminNetworkPolicy"),
        {"priority": 10, "ingress": [{"action": "Deny", "from": [{"namespaces": {}}], "ports": [NUMBER]}]},
    ),
    "projectcalico.org/v3": (
        ("GlobalNetworkPolicy", "Tier"),
        {
            "tier": "security", "selector": "app == 'web'",
            "ingress": [{"action": "Pass", "protocol": "TCP", "destination": {"ports": [9000, 14090]}}],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("api_version", OF_ADMINISTRATORS)
def test_policies_of_the_cluster_s_administrators(installed, cluster, namespace, codes, fixed, api_version):
    group, _, version = api_version.partition("/")
    kinds, spec = OF_ADMINISTRATORS[api_version]
    crds = [crd_of(group, kind, namespaced=False, version=version) for kind in kinds]
    for crd in crds:
        installed.apply(crd)
        installed.until_served(crd["metadata"]["name"])

    def make(kind, name, spec):
        made = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}
        cluster.run("kubectl", "apply", "-f", "-", text=json.dumps(made))

    try:
        installed.apply(model(), service(), admits("http", 14090), namespace=namespace)
        assert codes() == (0, {})
        here = {"namespaces": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
        make(kinds[0], "web", {**spec, "subject": here})
        if kinds[1] == "Tier":
            code, found = codes()
            assert (code, found.keys()) == (0, {"NotLookedAt"})
            make("Tier", "security", {"order": 100})

        code, found = codes()

        assert (code, found.keys()) == (3, {"NetworkPolicyByNumber"})
        fixed(found["NetworkPolicyByNumber"])
        assert codes() == (0, {})
    finally:
        for crd in crds:
            installed.delete("customresourcedefinitions", crd["metadata"]["name"])


def owned_by_kserve(thing, **annotations):
    reference = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "name": "bert",
        "uid": "u",
        "controller": True,
    }
    thing["metadata"] |= {"ownerReferences": [reference], "annotations": annotations}
    return thing


def test_what_kserve_and_knative_run(installed, namespace, codes):
    """The Service of a model in raw mode is KServe's own, and a serverless one's pods are Knative's."""
    installed.apply(model(), owned_by_kserve(service(9000)), namespace=namespace)
    knative = model("served")
    revision = {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Revision",
        "name": "served",
        "uid": "u",
        "controller": True,
    }
    knative["metadata"]["ownerReferences"] = [revision]
    installed.apply(knative, namespace=namespace)

    code, found = codes()
    assert (code, found.keys()) == (0, {"KServeRaw"})
    assert "expose service web --name=web-batched" in found["KServeRaw"]["fix"]
    assert codes("deployment/served")[1].keys() == {"Knative"}


def test_all_at_once_and_one_line_each(installed, namespace, preflight):
    installed.apply(model(), service(9000), admits(9000, 14090), scales(), model("other"), namespace=namespace)

    code, told = preflight("-n", namespace, plain=True)
    everywhere = preflight("--all")[1]

    assert code == 3
    lines = told.splitlines()
    assert len(lines) == 4
    assert all(re.match(rf"{namespace} deployment/(web|other): ", line) for line in lines)
    assert sum("Fix: kubectl -n " in line for line in lines) == 3
    mine = [each for each in everywhere["workloads"] if each["namespace"] == namespace]
    assert {each["name"]: len(each["findings"]) for each in mine} == {"web": 3, "other": 0}
    assert not any(each["namespace"] == SYSTEM for each in everywhere["workloads"])


def test_a_user_that_may_not_create_pods_gets_the_permission_to_ask_for(installed, namespace, preflight, cluster):
    nobody = cluster.kubeconfig_of(installed.account_token("default", namespace))

    code, told = preflight("deployment/web", "-n", namespace, kubeconfig=nobody, plain=True)

    assert code == 1
    assert "ask for" in told


def test_port_capture_has_nothing_left_to_correct_and_says_where_it_is_forbidden(installed, namespace, codes):
    captured = model(annotations={"carpool.dev/capture": "true"})
    installed.apply(
        captured, service(9000), admits(9000, 14090), service(name="direct", clusterIP="None"), namespace=namespace
    )
    assert codes() == (0, {})

    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}}
    installed.patch("namespaces", namespace, body=label)

    def noted():
        code, found = codes()
        return code == 3 and {"CaptureForbidden", "NetworkPolicyByNumber"} <= found.keys() and found

    found = eventually(noted)  # the injector keeps what a namespace says for some seconds
    assert "pod-security.kubernetes.io/enforce=privileged" in found["CaptureForbidden"]["fix"]
