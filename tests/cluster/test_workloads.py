"""Every kind of workload with the chart, on a real API server with the CRDs that their projects publish."""

from __future__ import annotations

import json
import logging
import shlex
from time import monotonic

import pytest
from minicluster import carpool, foreign

from carpool_operator.api.model import Target
from carpool_operator.cluster.fleet import Fleet, Lister
from carpool_operator.cluster.kube import connect
from carpool_operator.injector.bypass import port_name
from carpool_operator.workloads.kind import at
from carpool_operator.workloads.registry import BY_NAME, KINDS

pytestmark = pytest.mark.skipif(bool(foreign.missing()), reason=foreign.missing() or "-")

SLO = {"carpool.dev/slo-p99": "50ms"}
ALWAYS = {"policies", "namespaces", "pods", "horizontalpodautoscalers"}
"""What is watched in every cluster, besides workloads."""
INJECT = "carpool.dev/inject"
LABELS = {"app": "web"}
SERVER = {"name": "server", "image": "standin", "args": ["--host=0.0.0.0", "--port=9000"],
          "ports": [{"name": "http", "containerPort": 9000}]}  # fmt: skip
TEMPLATE = {"metadata": {"labels": LABELS}, "spec": {"containers": [SERVER]}}
OF_PODS = {"selector": {"matchLabels": LABELS}, "template": TEMPLATE}
RAY = {"template": {"spec": {"containers": [SERVER]}}, "rayStartParams": {}}
SPECS = {
    "Deployment": {**OF_PODS, "replicas": 0},
    "StatefulSet": {**OF_PODS, "replicas": 1, "serviceName": "web"},
    "DaemonSet": OF_PODS,
    "ReplicaSet": {**OF_PODS, "replicas": 0},
    "Rollout": {**OF_PODS, "strategy": {"canary": {}}},
    "LeaderWorkerSet": {"leaderWorkerTemplate": {"leaderTemplate": TEMPLATE, "workerTemplate": TEMPLATE, "size": 2}},
    "InferenceService": {"predictor": {"minReplicas": 2, "model": {"modelFormat": {"name": "onnx"}, "storageUri": "s3://m"}}},
    "RayService": {"rayClusterConfig": {"headGroupSpec": RAY, "workerGroupSpecs": [
        {**RAY, "groupName": "gpu", "replicas": 2, "minReplicas": 2, "maxReplicas": 2}]}},
}  # fmt: skip
LEADER = {"leaderworkerset.sigs.k8s.io/name": "web", "leaderworkerset.sigs.k8s.io/worker-index": "0"}
MADE = {
    "Rollout": ("apps/v1", "ReplicaSet", "web-5f", {"rollouts-pod-template-hash": "5f"}),
    "LeaderWorkerSet": ("apps/v1", "StatefulSet", "web", LEADER),
    "InferenceService": ("apps/v1", "ReplicaSet", "web-predictor-1a", {
        "serving.kserve.io/inferenceservice": "web", "component": "predictor", "pod-template-hash": "1a"}),
    "RayService": ("ray.io/v1", "RayCluster", "web-x2k4p", {
        "ray.io/originated-from-crd": "RayService", "ray.io/originated-from-cr-name": "web"}),
}  # fmt: skip
"""What controls a pod, and the pod's labels, as the kind's own controller writes them."""


def manifest(kind, name="web", **annotations):
    of = BY_NAME[kind]
    return {
        "apiVersion": of.api,
        "kind": kind,
        "metadata": {"name": name, "annotations": annotations},
        "spec": SPECS[kind],
    }


@pytest.fixture(scope="module")
def cluster(own_cluster):
    return own_cluster


@pytest.fixture(scope="module")
def bare(cluster, api):
    """Only the kinds that every cluster has, and policies."""
    crd = cluster.run("helm", "template", "c", str(carpool.ROOT / "charts/carpool"), "-s", "templates/crds.yaml")
    cluster.run("kubectl", "apply", "--server-side", "-f", "-", text=crd)
    api.until_served(carpool.CRD)
    return api


@pytest.fixture(scope="module")
def installed(cluster, api):
    for crd in foreign.crds():
        api.apply(crd)
    for crd in foreign.crds():
        api.until_served(crd["metadata"]["name"])
    carpool.install(cluster, api)
    return api


async def once(cluster, fleet):
    kube = connect(str(cluster.kubeconfig))
    await Lister(kube, fleet, [None], found=lambda *_: None, log=logging.getLogger("test")).list_all()
    kube.close()


async def test_a_cluster_without_the_crds_is_listed_whole(bare, cluster):
    fleet = Fleet(monotonic)

    await once(cluster, fleet)

    assert fleet.coverage.synced
    assert fleet.coverage.present == {*ALWAYS, *(kind.plural for kind in KINDS if kind.built_in)}


async def test_each_kind_is_read_as_its_real_schema_stores_it(bare, installed, cluster, namespace):
    for kind in SPECS:
        installed.create(manifest(kind, **SLO), namespace)
    fleet = Fleet(monotonic)

    await once(cluster, fleet)

    assert fleet.coverage.present == {*ALWAYS, *(kind.plural for kind in KINDS)}
    for kind in SPECS:
        found = fleet.workload(Target(namespace, kind, "web"))
        assert found.annotations == SLO, kind
        asked = {INJECT: "deployment"} if BY_NAME[kind].annotating else {}
        assert found.template_annotations == ({**SLO, **asked} if kind == "InferenceService" else asked), kind


async def test_an_autoscaler_that_follows_the_load_is_seen_and_no_other(bare, cluster, namespace):
    for name, metric in (("by-load", "carpool_load_ratio"), ("by-cpu", None)):
        source = {
            "type": "Resource",
            "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}},
        }
        if metric:
            target = {"type": "AverageValue", "averageValue": "900m"}
            source = {"type": "Pods", "pods": {"metric": {"name": metric}, "target": target}}
        spec = {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"web-{name}"},
            "minReplicas": 1, "maxReplicas": 4, "metrics": [source],
        }  # fmt: skip
        made = {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": name},
            "spec": spec,
        }
        bare.create(made, namespace)
    fleet = Fleet(monotonic)

    await once(cluster, fleet)

    ours = {target: str(each) for target, each in fleet.autoscalers().items() if target.namespace == namespace}
    assert ours == {Target(namespace, "Deployment", "web-by-load"): "HorizontalPodAutoscaler/by-load"}


def test_annotating_suffices_where_the_registry_says_so(bare, installed, namespace):
    for kind in KINDS:
        made = installed.create(manifest(kind.name, **SLO), namespace, dryRun="All")
        path = kind.template(made)
        written = (at(made, path) or {}) if path else {}
        assert written.get(INJECT) == ("deployment" if kind.annotating else None), kind.name
        plain = installed.create(manifest(kind.name), namespace, dryRun="All")
        assert "deployment" not in str(at(plain, kind.template(plain) or ("spec",)) or ""), kind.name


@pytest.mark.parametrize("kind", ["Rollout", "LeaderWorkerSet", "InferenceService"])
def test_a_port_gets_its_name_by_the_command_that_is_printed(bare, installed, cluster, namespace, kind):
    of = BY_NAME[kind]
    nameless = json.loads(json.dumps(manifest(kind)).replace('"name": "http", ', ""))
    made = installed.create(nameless, namespace)
    container = "kserve-container" if kind == "InferenceService" else "server"
    status = {"container": container, "port": 9000, "dataPort": 14080, "adminPort": 14090}
    annotations = {"carpool.dev/target": f"{kind}/web", "carpool.dev/status": json.dumps(status)}
    pod = {"metadata": {"annotations": annotations}, "spec": {"containers": [{"name": container}]}}

    first = port_name(pod, namespace, made).first

    command, rest = first.split("; ")
    cluster.run(*shlex.split(command))
    after = installed.get(of.plural, "web", namespace)
    _, found = of.container(after, container)
    assert [(port["containerPort"], port["name"]) for port in found["ports"]] == [(9000, "http")]
    assert rest == "when its pods have rolled, "


def test_every_annotated_kind_has_its_policy_with_the_chart_s_rights(bare, installed, namespace):
    for kind in SPECS:
        installed.create(manifest(kind, **SLO), namespace)

    found = installed.until("batchingpolicies", namespace, lambda found: len(found) == len(SPECS), timeout=120)

    refs = {policy["metadata"]["name"]: policy["spec"]["targetRefs"] for policy in found}
    assert refs == {
        f"{kind.lower()}-web": [{"group": BY_NAME[kind].group, "kind": kind, "name": "web"}] for kind in SPECS
    }


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet"])
def test_pods_of_a_real_controller_get_their_sidecars(bare, installed, namespace, kind):
    installed.create(manifest(kind, **SLO), namespace)

    (pod,) = installed.until("pods", namespace, lambda found: len(found) == 1, labels="carpool.dev/injected=true")

    assert pod["metadata"]["annotations"]["carpool.dev/target"] == f"{kind}/web"
    assert pod["metadata"]["labels"][BY_NAME[kind].revision]


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet"])
def test_pods_that_a_quota_refuses_are_reported_with_the_fix(bare, installed, namespace, kind):
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    installed.create(quota, namespace)
    # Its status is that of a controller which is not here.
    counted = {"status": {"hard": {"pods": "0"}, "used": {"pods": "0"}}}
    installed.patch("resourcequotas", "none", namespace, body=counted, sub="status")
    installed.create(manifest(kind, **SLO), namespace)

    def says(reason):
        def test(found):
            said = found and found[0].get("status", {}).get("conditions", ())
            return said and any((each["type"], each["reason"]) == ("Programmed", reason) for each in said)

        return test

    name = f"{kind.lower()}-web"
    (found,) = installed.until("batchingpolicies", namespace, says("PodsRefused"), name=name, timeout=180)
    (said,) = [each for each in found["status"]["conditions"] if each["type"] == "Programmed"]
    assert "exceeded quota: none" in said["message"]
    assert "carpool.dev/sidecar-cpu" in said["message"]


@pytest.mark.parametrize("kind", MADE)
def test_pods_as_their_controllers_make_them_belong_to_the_workload(bare, installed, namespace, kind):
    api, owner, name, labels = MADE[kind]
    reference = {"apiVersion": api, "kind": owner, "name": name, "uid": "u", "controller": True}
    metadata = {"name": "p", "labels": labels, "annotations": {INJECT: "true"}, "ownerReferences": [reference]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [SERVER]}}

    made = installed.create(pod, namespace, dryRun="All")

    assert made["metadata"]["annotations"]["carpool.dev/target"] == f"{kind}/web"


def test_a_group_that_is_not_the_kind_s_is_refused_by_name(bare, installed, namespace):
    policy = {"apiVersion": "carpool.dev/v1alpha1", "kind": "BatchingPolicy", "metadata": {"name": "p"}}
    spec = {"targetRefs": [{"kind": "Rollout", "name": "web"}], "slo": {"latency": {"p99": "50ms"}}}

    with pytest.raises(Exception, match=r"group.*Rollout is of the group argoproj.io"):
        installed.create({**policy, "spec": spec}, namespace)
    spec["targetRefs"][0]["group"] = "argoproj.io"
    assert installed.create({**policy, "spec": spec}, namespace)["spec"]["targetRefs"] == spec["targetRefs"]


def test_defaults_of_a_namespace_and_a_selector_make_and_find_policies(bare, installed, namespace):
    asks = {INJECT: "true"}
    installed.create(manifest("Deployment", "by-default", **asks), namespace)
    selected = manifest("StatefulSet", "selected", **asks)
    selected["metadata"]["labels"] = {"team": "vision"}
    selected["spec"] = {**selected["spec"], "replicas": 0}
    installed.create(selected, namespace)
    spec = {
        "targetSelector": {"kind": "StatefulSet", "matchLabels": {"team": "vision"}},
        "slo": {"latency": {"p99": "40ms"}},
    }
    policy = {
        "apiVersion": "carpool.dev/v1alpha1",
        "kind": "BatchingPolicy",
        "metadata": {"name": "vision"},
        "spec": spec,
    }
    installed.create(policy, namespace)

    installed.patch("namespaces", namespace, body={"metadata": {"annotations": {"carpool.dev/slo-p99": "80ms"}}})

    def settled(found):
        by_name = {each["metadata"]["name"]: each for each in found}
        targets = by_name.get("vision", {}).get("status", {}).get("targets", [])
        return by_name.keys() == {"vision", "deployment-by-default"} and [each["name"] for each in targets] == [
            "selected"
        ]

    found = installed.until("batchingpolicies", namespace, settled, timeout=120)
    (made,) = [each for each in found if each["metadata"]["name"] == "deployment-by-default"]
    assert made["spec"]["slo"]["latency"] == {"p99": "80ms"}

    installed.patch("namespaces", namespace, body={"metadata": {"annotations": {"carpool.dev/slo-p99": None}}})
    installed.until("batchingpolicies", namespace, lambda found: len(found) == 1, timeout=120)
