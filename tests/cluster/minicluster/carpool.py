"""Carpool in a cluster, as a user installs it, and a model to try it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicluster.waiting import eventually

if TYPE_CHECKING:
    from minicluster.api import Api
    from minicluster.cluster import Cluster

ROOT = Path(__file__).resolve().parents[3]
SYSTEM = "carpool-system"
CRD = "batchingpolicies.carpool.dev"


def install(cluster: Cluster, api: Api, *settings: str, namespace: str = SYSTEM) -> None:
    """Apply the chart as `helm template | kubectl apply` does, and wait until it serves."""
    api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    # API servers go on without a webhook that does not answer in time; a machine that pauses is no such webhook.
    flags = [flag for setting in ("injector.timeoutSeconds=30", *settings) for flag in ("--set", setting)]
    manifests = cluster.run(
        "helm", "template", "carpool", str(ROOT / "charts/carpool"), "--namespace", namespace, "--skip-tests", *flags
    )
    cluster.run("kubectl", "apply", "--server-side", "--force-conflicts", "-f", "-", text=manifests)
    api.until_served(CRD)
    api.until_ready("carpool-operator", namespace, timeout=120)
    api.until_ready("carpool-injector", namespace, timeout=120)
    until_injecting(api)


def until_injecting(api: Api) -> None:
    """Wait until pods get sidecars: API servers learn where the injector is a moment after it is ready."""
    server = {"name": "server", "image": "standin", "ports": [{"name": "http", "containerPort": 9000}]}
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web", "uid": "u", "controller": True}
    asks = {"carpool.dev/inject": "true"}
    metadata = {"name": "probe", "annotations": asks, "ownerReferences": [owner]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [server]}}
    api.until("serviceaccounts", "default", bool, name="default")
    eventually(lambda: "initContainers" in api.create(pod, "default", dryRun="All")["spec"], timeout=120)


def uninstall(cluster: Cluster, api: Api, *, namespace: str = SYSTEM) -> None:
    """Delete what the chart made, but the CRD, which it keeps, and wait until it is gone."""
    manifests = cluster.run(
        "helm", "template", "carpool", str(ROOT / "charts/carpool"), "--namespace", namespace, "--skip-tests",
        "--set", "crds.install=false",
    )  # fmt: skip
    cluster.run("kubectl", "delete", "--ignore-not-found", "--wait=false", "-f", "-", text=manifests)
    api.until_gone("pods", namespace)


def model(
    name: str, *, replicas: int = 2, first: float = 0.020, row: float = 0.002, executors: int = 1, **annotations: str
) -> list[dict[str, Any]]:
    """Return a model as somebody runs it who has never heard of Carpool: profile, Deployment, Service.

    A batch of b rows takes ``first + row * b`` seconds. Its port has a name, and probes of its own by that name.
    """
    seconds = {"name": name, "source": "synthetic", "executors": executors, "rows": [1, 64]}
    seconds["seconds"] = [first + row, first + 64 * row]
    labels = {"app": name}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{name}-profile"},
            "data": {"profile.json": json.dumps(seconds)},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name, "annotations": annotations},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": labels},
                "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        "terminationGracePeriodSeconds": 45,
                        "containers": [
                            {
                                "name": "server",
                                "image": "standin",
                                "args": ["--profile=/profile/profile.json", "--host=0.0.0.0", "--port=9000"],
                                "ports": [{"name": "http", "containerPort": 9000}],
                                # A machine that pauses makes no model unready.
                                "readinessProbe": {
                                    "httpGet": {"path": "/v2/health/ready", "port": "http"},
                                    "periodSeconds": 1,
                                    "timeoutSeconds": 5,
                                },
                                "livenessProbe": {
                                    "httpGet": {"path": "/v2/health/live", "port": "http"},
                                    "timeoutSeconds": 5,
                                },
                                # As everybody has to do whose server ends at once: endpoints empty meanwhile.
                                "lifecycle": {"preStop": {"exec": {"command": ["sleep", "6"]}}},
                                "volumeMounts": [{"name": "profile", "mountPath": "/profile"}],
                            }
                        ],
                        "volumes": [{"name": "profile", "configMap": {"name": f"{name}-profile"}}],
                    },
                },
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"selector": labels, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
        },
    ]
