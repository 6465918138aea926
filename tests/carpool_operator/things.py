"""Objects as the API server has them, for the operator's tests."""

from __future__ import annotations

import msgspec

from carpool_operator.cluster.objects import RawPod, workload
from carpool_operator.workloads.kind import Kind

POLICY = ("carpool.dev/v1alpha1", "batchingpolicies")
DEPLOYMENT = ("apps/v1", "deployments")
POD = ("v1", "pods")
CONFIG_MAP = ("v1", "configmaps")


def policy(name="p", target="web", **metadata):
    return {
        "metadata": {"name": name, **metadata},
        "spec": {"targetRefs": [{"kind": "Deployment", "name": target}], "slo": {"latency": {"p99": "50ms"}}},
    }


def deployment(name="web", annotations=None, replicas=1, inject="true"):
    asked = {} if inject is None else {"carpool.dev/inject": inject}
    return {
        "metadata": {"name": name, "annotations": annotations or {}},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}, "annotations": asked}},
        },
        "status": {"observedGeneration": 1, "replicas": replicas, "updatedReplicas": replicas},
    }


def pod(name="web-1", target="web", ip="127.0.0.1", injected=True, ready=True):
    return {
        "metadata": {
            "name": name,
            "labels": {
                "app": target,
                "pod-template-hash": "h1",
                **({"carpool.dev/injected": "true"} if injected else {}),
            },
            "annotations": {"carpool.dev/target": f"Deployment/{target}"} if injected else {},
        },
        "spec": {},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def as_kept(raw, body, **metadata):
    """What is kept of an object, without a server."""
    meta = {"namespace": "ns", "uid": f"uid-{body['metadata']['name']}", "creationTimestamp": "2026-11-21T12:00:00Z"}
    meta |= {"resourceVersion": "1", "generation": 1, **body["metadata"], **metadata}
    found = msgspec.convert({**body, "metadata": meta}, raw.raw if isinstance(raw, Kind) else raw)
    if isinstance(raw, Kind):
        return workload(raw, found)
    return found.pod() if raw is RawPod else found.policy()
