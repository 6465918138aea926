"""Each kind as its controller makes it: pods find their workload, and a workload's state is read."""

from __future__ import annotations

import json
import shlex

import msgspec
import pytest

from carpool_operator.workloads.kind import at
from carpool_operator.workloads.registry import BY_NAME, KINDS, NAMES, is_part, owner

ASKS = {"metadata": {"annotations": {"carpool.dev/inject": "true"}}}
META = {"name": "web", "namespace": "ns", "generation": 2, "creationTimestamp": "2026-11-21T12:00:00Z"}


def pod(kind, name, api="apps/v1", **labels):
    reference = {"apiVersion": api, "kind": kind, "name": name, "uid": "u", "controller": True}
    return {"metadata": {"labels": labels, "ownerReferences": [{**reference, "controller": False}, reference]}}


LWS = {"leaderworkerset.sigs.k8s.io/name": "llm"}
ISVC = {"serving.kserve.io/inferenceservice": "bert", "pod-template-hash": "1a"}
RAY = {"ray.io/cluster": "chat-x2k4p", "ray.io/node-type": "worker"}


@pytest.mark.parametrize(
    ("made", "of"),
    [
        (pod("ReplicaSet", "web-7d9c", **{"pod-template-hash": "7d9c"}), ("Deployment", "web")),
        (pod("ReplicaSet", "web", app="web"), ("ReplicaSet", "web")),
        (pod("ReplicaSet", "web-7d9c", **{"pod-template-hash": "other"}), None),
        (pod("ReplicaSet", "web-5f", **{"rollouts-pod-template-hash": "5f"}), ("Rollout", "web")),
        (pod("StatefulSet", "db"), ("StatefulSet", "db")),
        (pod("DaemonSet", "edge"), ("DaemonSet", "edge")),
        (pod("StatefulSet", "llm", **LWS, **{"leaderworkerset.sigs.k8s.io/worker-index": "0"}),
         ("LeaderWorkerSet", "llm")),
        (pod("ReplicaSet", "bert-predictor-1a", **ISVC, component="predictor"), ("InferenceService", "bert")),
        (pod("RayCluster", "chat-x2k4p", "ray.io/v1", **RAY, **{"ray.io/originated-from-crd": "RayService",
         "ray.io/originated-from-cr-name": "chat"}), ("RayService", "chat")),
        (pod("RayCluster", "chat-x2k4p", "ray.io/v1", **RAY), None),
        (pod("Job", "train", "batch/v1"), None),
        (pod("ReplicaSet", "web", "extensions.example.com/v1"), None),
        ({"metadata": {}}, None),
    ],
)  # fmt: skip
def test_a_pod_belongs_to(made, of):
    assert owner(made) == of


def test_a_worker_of_a_set_serves_nobody():
    made = pod("StatefulSet", "llm-0", **LWS, **{"leaderworkerset.sigs.k8s.io/worker-index": "1"})

    assert owner(made) is None


def test_parts_of_an_inference_service_that_serve_no_model():
    transformer = pod("ReplicaSet", "bert-transformer-1a", **ISVC, component="transformer")

    assert owner(transformer) is None


def test_annotations_go_to_the_template_that_counts():
    """A leader's own, where there is one: a worker's serves nobody."""
    with_leader = {"spec": {"leaderWorkerTemplate": {"leaderTemplate": {}, "workerTemplate": {}}}}
    for manifest, template in (
        (with_leader, "leaderTemplate"),
        ({"spec": {}}, "workerTemplate"),
        (None, "workerTemplate"),
    ):
        command = BY_NAME["LeaderWorkerSet"].annotate_pods("ns", "web", {"a": "b"}, manifest)
        assert json.loads(shlex.split(command)[-1]) == {
            "spec": {"leaderWorkerTemplate": {template: {"metadata": {"annotations": {"a": "b"}}}}}
        }


def read(kind, spec, status, **metadata):
    body = {"metadata": {**META, **metadata}, "spec": spec, "status": {"observedGeneration": 2, **status}}
    return BY_NAME[kind].state(msgspec.convert(body, BY_NAME[kind].raw))


SEEN = {"observedGeneration": "2"}  # a string, as Argo writes it
SELECTOR = {"selector": {"matchLabels": {"app": "web"}}, "template": ASKS}
LEADERS = "leaderworkerset.sigs.k8s.io/name=web,leaderworkerset.sigs.k8s.io/worker-index=0"
PREDICTORS = "serving.kserve.io/inferenceservice=web,component=predictor"
RAYS = "ray.io/originated-from-crd=RayService,ray.io/originated-from-cr-name=web"

CASES = [
    ("Deployment", {**SELECTOR, "replicas": 3}, {"replicas": 3, "updatedReplicas": 3}, "app=web", 3),
    ("StatefulSet", {**SELECTOR, "replicas": 3}, {"currentRevision": "a", "updateRevision": "a"}, "app=web", 3),
    ("DaemonSet", SELECTOR, {"desiredNumberScheduled": 4, "updatedNumberScheduled": 4}, "app=web", 4),
    ("ReplicaSet", {**SELECTOR, "replicas": 2}, {"replicas": 2}, "app=web", 2),
    ("Rollout", {**SELECTOR, "replicas": 2},
     {**SEEN, "replicas": 2, "updatedReplicas": 2, "currentPodHash": "a", "stableRS": "a"},
     "app=web", 2),
    ("LeaderWorkerSet", {"replicas": 2, "leaderWorkerTemplate": {"leaderTemplate": ASKS, "workerTemplate": {}}},
     {"replicas": 2, "updatedReplicas": 2}, LEADERS, 2),
    ("InferenceService", {"predictor": {"minReplicas": 2, "annotations": {"carpool.dev/inject": "true"}, "model": {}}},
     {"conditions": [{"type": "PredictorReady", "status": "True"}]}, PREDICTORS, 2),
    ("RayService", {"rayClusterConfig": {"headGroupSpec": {"template": {}},
     "workerGroupSpecs": [{"replicas": 3, "template": ASKS}, {"replicas": 9, "template": {}}]}},
     {"pendingServiceStatus": {}}, RAYS, 3),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "spec", "status", "selector", "replicas"), CASES)
def test_its_state(kind, spec, status, selector, replicas):
    assert read(kind, spec, status) == ({"carpool.dev/inject": "true"}, selector, replicas, False, "", "")


ROLLING = [
    ("Deployment", {"updatedReplicas": 2}),
    ("StatefulSet", {"updateRevision": "b"}),
    ("DaemonSet", {"updatedNumberScheduled": 3}),
    ("ReplicaSet", {"observedGeneration": 1}),
    ("Rollout", {"observedGeneration": "1"}),
    ("Rollout", {"stableRS": "b"}),
    ("LeaderWorkerSet", {"updatedReplicas": 1}),
    ("InferenceService", {"conditions": []}),
    ("RayService", {"pendingServiceStatus": {"rayClusterName": "web-x"}}),
]


@pytest.mark.parametrize(("kind", "change"), ROLLING)
def test_a_rollout_is_under_way(kind, change):
    _, spec, status, _, _ = next(case for case in CASES if case[0] == kind)

    assert read(kind, spec, {**status, **change}).rolling


ON_DELETE = {"updateStrategy": {"type": "OnDelete"}}


def partition(last):
    return {"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": last}}}


def groups(last):
    return {"rolloutStrategy": {"rollingUpdateConfiguration": {"partition": last, "maxUnavailable": 1}}}


HELD_BACK = [
    # With these, the revisions of a StatefulSet differ until its strategy changes.
    ("StatefulSet", ON_DELETE, {"updateRevision": "b", "updatedReplicas": 3}, "delete these pods"),
    ("StatefulSet", ON_DELETE, {"updateRevision": "b"}, "delete these pods"),
    ("StatefulSet", partition(2), {"updateRevision": "b", "updatedReplicas": 1}, "is 2: lower it"),
    ("StatefulSet", partition(9), {"updateRevision": "b"}, "is 9: lower it"),
    ("DaemonSet", ON_DELETE, {"updatedNumberScheduled": 1}, "delete these pods"),
    ("Deployment", {"paused": True}, {"updatedReplicas": 0}, "resume it"),
    ("LeaderWorkerSet", groups(1), {"updatedReplicas": 1}, "is 1: lower it"),
]


@pytest.mark.parametrize(("kind", "strategy", "change", "fix"), HELD_BACK)
def test_a_rollout_that_goes_no_further_is_not_under_way(kind, strategy, change, fix):
    _, spec, status, _, _ = next(case for case in CASES if case[0] == kind)
    found = read(kind, {**spec, **strategy}, {**status, **change})
    assert not found.rolling
    assert fix in found.held_back


def test_up_to_its_partition_it_rolls():
    _, spec, status, _, _ = next(case for case in CASES if case[0] == "StatefulSet")
    found = read("StatefulSet", {**spec, **partition(1)}, {**status, "updateRevision": "b", "updatedReplicas": 1})
    assert found.rolling
    # No template is kept back: the pods that are missed were created while the injector was not available.
    assert not read("StatefulSet", {**spec, **partition(1)}, status).held_back


def test_pods_that_can_not_be_made_are_no_rollout():
    """Those with one template: the first pod may fail for its missing sidecar, and the others wait for it."""
    _, spec, status, _, _ = next(case for case in CASES if case[0] == "StatefulSet")
    assert not read("StatefulSet", spec, {**status, "updatedReplicas": 1}).rolling


def test_a_generation_of_any_length_is_no_error():
    _, spec, status, _, _ = next(case for case in CASES if case[0] == "Rollout")
    assert not read("Rollout", spec, {**status, "observedGeneration": "9" * 5000}).rolling


def test_every_kind_has_its_cases():
    assert {case[0] for case in CASES} == {case[0] for case in ROLLING} == set(BY_NAME)


def test_a_set_whose_version_does_not_say_what_it_has_seen_is_not_rolling_for_ever():
    _, spec, status, _, _ = next(case for case in CASES if case[0] == "LeaderWorkerSet")
    body = {"metadata": META, "spec": spec, "status": status}
    kind = BY_NAME["LeaderWorkerSet"]

    assert not kind.state(msgspec.convert(body, kind.raw)).rolling


def test_a_rollout_that_refers_to_a_deployment_has_its_selector_in_its_status():
    assert read("Rollout", {"workloadRef": {"name": "web"}}, {**SEEN, "selector": "app=web"}).selector == "app=web"


def made_by(kind, api):
    reference = {"uid": "u", "apiVersion": api, "kind": kind, "name": "x", "controller": True}
    meta = BY_NAME["Deployment"].raw
    return msgspec.convert({"metadata": {**META, "ownerReferences": [reference]}}, meta).metadata


def test_what_another_workload_made_is_a_part_of_that():
    assert is_part(made_by("InferenceService", "serving.kserve.io/v1beta1"))
    assert is_part(made_by("Deployment", "apps/v1"))
    assert not is_part(made_by("Revision", "serving.knative.dev/v1"))
    assert not is_part(made_by("Deployment", "apps.example.com/v1"))


def test_where_the_annotations_of_pods_lie():
    sets, service = BY_NAME["LeaderWorkerSet"], BY_NAME["InferenceService"]
    both = {"spec": {"leaderWorkerTemplate": {"leaderTemplate": ASKS, "workerTemplate": {}}}}
    alone = {"spec": {"leaderWorkerTemplate": {"workerTemplate": ASKS}}}

    assert at(both, sets.template(both)) == at(alone, sets.template(alone)) == {"carpool.dev/inject": "true"}
    assert sets.template(both)[2] == "leaderTemplate"
    assert service.template({"spec": {"predictor": {}}}) == ("spec", "predictor", "annotations")
    assert service.pod({"spec": {"predictor": {}}}) is None, "KServe makes the template"
    assert BY_NAME["Rollout"].template({"spec": {"workloadRef": {}}}) is None
    assert BY_NAME["RayService"].template({"spec": {}}) is None


def test_names_that_kubectl_takes():
    assert NAMES["deploy"] is NAMES["deployments.apps"] is BY_NAME["Deployment"]
    assert NAMES["rollouts.argoproj.io"] is BY_NAME["Rollout"]
    assert BY_NAME["Deployment"].resource("web") == "deployment/web"
    assert BY_NAME["Rollout"].resource("web") == "rollout.argoproj.io/web"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_pod_made_for_a_look_belongs_to_its_workload(kind):
    labels, by = kind.made("web")

    assert owner({"metadata": {"labels": labels, "ownerReferences": [by]}}) == (kind.name, "web")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_command_that_makes_new_pods_is_whole(kind):
    command = kind.restarted("shop", "web", "app=web")

    assert command.startswith("kubectl -n shop ")
    assert "web" in command
    assert command.count("{") == command.count("}")
    assert "{name}" not in command
