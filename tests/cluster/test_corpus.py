"""The corpus of pods through the chart's webhook and a real API server: with quotas, LimitRanges, Pod Security."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
from minicluster import carpool
from minicluster.client import ApiError
from minicluster.waiting import eventually

from carpool_operator.delivery.signing import Signer, new_key

ROOT = Path(__file__).parents[2]
HOME = "carpool-system"
INJECT = "carpool.dev/inject"


def load_corpus():
    """Load the module beside the corpus, which is another folder's."""
    path = ROOT / "tests/carpool_operator/injector/corpus.py"
    found = importlib.util.spec_from_file_location("injector_corpus", path)
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


corpus = load_corpus()
CASES = corpus.cases()
FREE = [case for case in CASES if not (case.around.limit_ranges or case.around.quotas or case.around.annotations)]
BOUND = [case for case in CASES if case.around.limit_ranges or case.around.quotas]


@pytest.fixture(scope="module")
def cluster(own_cluster):
    """One of this file's own, with the injector in it: there is one to a cluster."""
    return own_cluster


@pytest.fixture(scope="module")
def injector(cluster, api):
    """The injector as the chart has it, with its own rights, and without any operator."""
    api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": HOME}})
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}}
    api.apply({**runtime, "handler": "nvidia"})
    only = [flag for part in ("injector", "injector-rbac", "webhook") for flag in ("-s", f"templates/{part}.yaml")]
    chart = str(ROOT / "charts" / "carpool")
    manifests = cluster.run("helm", "template", "carpool", chart, "-n", HOME, "--kube-version", "1.35", *only)
    cluster.run("kubectl", "apply", "-f", "-", text=manifests)
    key = {"publicKey": Signer(new_key()).public}
    publish = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "carpool-public-key"}, "data": key}
    api.apply(publish, namespace=HOME)
    api.until_ready("carpool-injector", HOME)
    carpool.until_injecting(api)


def limit_range(name, *items):
    metadata = {"name": name}
    return {"apiVersion": "v1", "kind": "LimitRange", "metadata": metadata, "spec": {"limits": list(items)}}


def put_quota(api, namespace, name, spec, used=None):
    """Make a quota that is in force: its status is that of a controller, which is not here."""
    api.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": spec}, namespace)
    status = {"hard": spec["hard"], "used": {**dict.fromkeys(spec["hard"], "0"), **(used or {})}}
    api.patch("resourcequotas", name, namespace, body={"status": status}, sub="status")


def hardened(pod):
    """Return a pod that follows the Pod Security Standard `restricted` as closely as it can."""
    pod = copy.deepcopy(pod)
    spec = pod["spec"]
    spec["securityContext"] = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    for each in [*spec.get("initContainers", []), *spec["containers"]]:
        each.setdefault("securityContext", {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}})
    return pod


def limited(pod):
    """Return a pod whose containers all have requests and limits."""
    pod = copy.deepcopy(pod)
    for each in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
        kept = {key: value for key, value in each.get("resources", {}).get("limits", {}).items() if "/" in key}
        amounts = {"cpu": "100m", "memory": "128Mi"}
        each["resources"] = {
            **each.get("resources", {}),
            "requests": {**amounts, **kept},
            "limits": {**amounts, **kept},
        }
    pod["spec"].pop("resources", None)
    return pod


def admitted(api, pod, namespace):
    """Return a pod as the server takes it, and nothing is kept; else why not."""
    try:
        return api.create(pod, namespace, dryRun="All"), ""
    except ApiError as error:
        return None, str(error)


def bare(pod):
    pod = copy.deepcopy(pod)
    del pod["metadata"]["annotations"][INJECT]
    return pod


def outcomes(api, namespace, pods):
    """Return what became of each pod that is admitted without a sidecar: ``Injected``, or why not."""
    found = {}
    for name, pod in pods:
        if admitted(api, bare(pod), namespace)[0] is None:
            continue
        made, why = admitted(api, pod, namespace)
        assert made is not None, f"{name}: refused because of its sidecar: {why}"
        if any(
            each["name"] == "carpool" and "CARPOOL_CONFIG" in str(each)
            for each in made["spec"].get("initContainers", [])
        ):
            found[name] = "Injected"
        else:
            found[name] = made["metadata"]["annotations"].get("carpool.dev/skipped", "").partition(":")[0]
    return found


def test_in_an_ordinary_namespace_each_is_what_it_should_be(injector, api, namespace):
    found = outcomes(api, namespace, [(case.name, case.pod) for case in FREE])
    assert len(found) >= len(FREE) - 2, sorted({case.name for case in FREE} - found.keys())
    for case in FREE:
        if case.name in found:
            quiet = case.expect.get("skipped") in {"Disabled", "AlreadyInjected"}
            assert found[case.name] == ("" if quiet else case.expect.get("skipped", "Injected")), case.name


def test_under_a_quota_none_is_refused(injector, api, namespace):
    hard = {"limits.cpu": "20", "limits.memory": "60Gi", "requests.cpu": "20", "requests.memory": "60Gi"}
    put_quota(api, namespace, "team", {"hard": hard})
    unlimited = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    unlimited["spec"] = {"containers": [{"name": "a", "image": "x"}]}
    eventually(lambda: "must specify limits.cpu" in admitted(api, unlimited, namespace)[1])
    found = outcomes(api, namespace, [(case.name, limited(case.pod)) for case in FREE])
    assert list(found.values()).count("Injected") >= 40


def test_under_limit_ranges_none_is_refused(injector, api, namespace):
    container = {
        "type": "Container",
        "max": {"cpu": "400m", "memory": "300Mi"},
        "default": {"cpu": "200m", "memory": "256Mi"},
    }
    container |= {
        "defaultRequest": {"cpu": "100m", "memory": "128Mi"},
        "maxLimitRequestRatio": {"cpu": "2", "memory": "2"},
    }
    pod = {"type": "Pod", "max": {"cpu": "2", "memory": "2Gi"}}
    api.create(limit_range("containers", container), namespace)
    api.create(limit_range("pods", pod), namespace)
    large = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    large["spec"] = {"containers": [{"name": "a", "image": "x", "resources": {"limits": {"cpu": "8"}}}]}
    eventually(lambda: "maximum cpu usage per Container" in admitted(api, large, namespace)[1])
    found = outcomes(api, namespace, [(case.name, limited(case.pod)) for case in FREE])
    assert list(found.values()).count("Injected") >= 40


def test_under_pod_security_restricted_none_is_refused(injector, api, namespace):
    enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.patch("namespaces", namespace, body={"metadata": {"labels": enforce}})
    plain = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x"},
        "spec": {"containers": [{"name": "a", "image": "x"}]},
    }
    eventually(lambda: "violates PodSecurity" in admitted(api, plain, namespace)[1])
    found = outcomes(api, namespace, [(case.name, hardened(case.pod)) for case in FREE])
    assert list(found.values()).count("Injected") >= 40


@pytest.mark.parametrize("case", BOUND, ids=lambda case: case.name)
def test_what_a_namespace_demands_is_kept(injector, api, namespace, case):
    api.patch("namespaces", namespace, body={"metadata": {"annotations": dict(case.around.annotations)}})
    for each in case.around.limit_ranges:
        api.create({"apiVersion": "v1", "kind": "LimitRange", **copy.deepcopy(each)}, namespace)
    for each in case.around.quotas:
        put_quota(api, namespace, each["metadata"]["name"], each["spec"], each.get("status", {}).get("used"))
    found = outcomes(api, namespace, [(case.name, case.pod)])
    assert found == {case.name: case.expect.get("skipped", "Injected")}
