from __future__ import annotations

import json
from importlib.metadata import version

import pytest
from things import as_kept, deployment, pod, policy

from carpool_operator.api.model import Target
from carpool_operator.cluster.objects import RawPod, RawPolicy
from carpool_operator.workloads.registry import DEFAULT as DEPLOYMENTS


def test_a_deployment():
    body = deployment(annotations={"carpool.dev/slo-p99": "50ms", "kubectl.kubernetes.io/restartedAt": "x" * 9000})
    body["spec"]["selector"] = {
        "matchLabels": {"app": "web"},
        "matchExpressions": [
            {"key": "tier", "operator": "In", "values": ["a", "b"]},
            {"key": "tier", "operator": "NotIn", "values": ["c"]},
            {"key": "gpu", "operator": "Exists"},
            {"key": "old", "operator": "DoesNotExist"},
        ],
    }

    kept = as_kept(DEPLOYMENTS, body)

    assert kept.target == Target("ns", "Deployment", "web")
    assert kept.selector == "app=web,tier in (a,b),tier notin (c),gpu,!old"
    assert kept.annotations == {"carpool.dev/slo-p99": "50ms"}
    assert kept.created == 1795262400.0
    assert not kept.rolling


@pytest.mark.parametrize(
    ("status", "rolling"),
    [
        ({}, False),
        ({"observedGeneration": 0}, True),
        ({"updatedReplicas": 1}, True),
        ({"replicas": 3}, True),
    ],
)
def test_a_rollout_is_under_way(status, rolling):
    body = deployment(replicas=2)
    body["status"].update(status)

    assert as_kept(DEPLOYMENTS, body).rolling is rolling


def test_pods_that_can_not_be_made_are_known_with_the_server_s_words():
    body = deployment()
    failure = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreate",
        "message": "forbidden: quota " * 99,
    }
    body["status"]["conditions"] = [{"type": "Available", "status": "True"}, failure]
    assert as_kept(DEPLOYMENTS, body).refused.startswith("forbidden: quota ")
    assert len(as_kept(DEPLOYMENTS, body).refused) == 400
    failure["status"] = "False"
    assert as_kept(DEPLOYMENTS, body).refused == ""


def test_a_workload_on_its_way_out_is_gone():
    """Deleted in the foreground it is there until its pods are; a policy written for it would be collected at once."""
    assert as_kept(DEPLOYMENTS, deployment(), deletionTimestamp="2026-11-21T12:00:00Z") is None


def test_a_pod():
    kept = as_kept(RawPod, pod(ip="10.244.0.7"))

    assert (kept.target, kept.ip, kept.admin_port) == (Target("ns", "Deployment", "web"), "10.244.0.7", 14090)
    assert (kept.ready, kept.deleting, kept.template_hash) == (True, False, "h1")
    assert as_kept(RawPod, pod(), deletionTimestamp="2026-11-21T12:00:00Z").deleting


@pytest.mark.parametrize(
    ("status", "container"),
    [
        ('{"version": "1", "container": "model", "port": 9000, "notes": []}', "model"),
        ("{", ""),
        ('{"container": 5}', ""),
        (json.dumps({"container": "x" * 1000}), "x" * 63),
    ],
)
def test_a_pod_s_container_is_what_the_webhook_wrote_or_unknown(status, container):
    body = pod()
    body["metadata"]["annotations"]["carpool.dev/status"] = status
    assert as_kept(RawPod, body).container == container
    assert as_kept(RawPod, pod()).container == ""


@pytest.mark.parametrize(("written", "current"), [(version("carpool-serving"), True), ("0.0.1", False), (None, False)])
def test_a_pod_s_sidecar_is_of_the_operator_s_version_or_another(written, current):
    body = pod()
    body["metadata"]["annotations"]["carpool.dev/status"] = json.dumps({} if written is None else {"version": written})
    assert as_kept(RawPod, body).current is current


def test_a_pod_that_ended_or_is_nobody_s_is_not_kept():
    ended = pod()
    ended["status"]["phase"] = "Failed"

    assert as_kept(RawPod, ended) is None
    assert as_kept(RawPod, pod(injected=False)) is None


def test_a_policy():
    kept = as_kept(RawPolicy, policy(annotations={"carpool.dev/paused": ""}))

    assert kept.spec is not None
    assert kept.spec.target_refs[0].name == "web"
    assert (kept.error, kept.annotated, kept.paused, kept.status) == ("", False, True, {})


LABEL = {"labels": {"carpool.dev/annotated": "true"}}
CONTROLLER = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "u", "controller": True}


def made_for(body):
    kept = as_kept(RawPolicy, body)
    return kept.made_for and str(kept.made_for), kept.orphaned


def test_the_workload_that_a_policy_is_kept_for_is_its_owner_or_its_only_target():
    owned = {**LABEL, "ownerReferences": [CONTROLLER]}

    assert made_for(policy("deployment-web", **owned)) == ("ns/Deployment/web", False)
    assert made_for(policy("deployment-web", **LABEL)) == ("ns/Deployment/web", True)
    gitops = {**LABEL, "ownerReferences": [{**CONTROLLER, "kind": "Application", "controller": False}]}
    assert made_for(policy("deployment-web", **gitops)) == ("ns/Deployment/web", True)


def test_a_policy_of_a_user_is_kept_for_no_workload():
    by_hand = policy("deployment-web")
    another_name = policy("web", **LABEL)
    another_target = policy("deployment-web", "other", **LABEL)
    of_another = policy("deployment-web", **LABEL, ownerReferences=[{**CONTROLLER, "name": "other"}])
    two_targets = policy("deployment-web", **LABEL)
    two_targets["spec"]["targetRefs"].append({"kind": "Deployment", "name": "other"})
    selecting = policy("deployment-web", **LABEL)
    selecting["spec"] |= {"targetSelector": {"matchLabels": {"app": "web"}}}
    unreadable = policy("deployment-web", **LABEL)
    unreadable["spec"]["slo"] = {"latency": {"p99": "fast"}}

    for body in (by_hand, another_name, another_target, of_another, two_targets, selecting, unreadable):
        assert made_for(body) == (None, False)


def test_a_policy_that_can_not_be_read_says_why():
    body = policy()
    body["spec"]["slo"] = {"latency": {"p99": "fast"}}

    kept = as_kept(RawPolicy, body)

    assert kept.spec is None
    assert "spec.slo.latency.p99" in kept.error
