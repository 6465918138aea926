"""What the operator does in a cluster, seen from outside: statuses, what sidecars say, counters; and its processes."""

from __future__ import annotations

import json
import os
import signal
import time
from base64 import b64decode
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import requests

from carpool.exchange import report
from carpool_operator.api.model import Target
from carpool_operator.delivery.signing import Signer
from minicluster.carpool import SYSTEM

if TYPE_CHECKING:
    from collections.abc import Callable

    from minicluster.api import Api
    from minicluster.client import Object
    from minicluster.cluster import Cluster

ADMIN = 14090
"""Port of an injected sidecar."""
LEADER = "carpool-operator"
"""Name of the Lease."""


ADMITS = {"shedAt": "Deadline"}
"""Admission that refuses no request for the p99. A model on a machine that pauses is slow at times, and by default
requests that would be late are refused then. Tests in virtual time are about that; tests in which no request may fail
are not."""


class Finding(NamedTuple):
    """A condition of a policy."""

    status: str
    reason: str
    message: str


def policy(name: str, target: str, *, p99: str = "300ms", **spec: Any) -> Object:
    """Return a policy as somebody writes it who wants no request refused for the p99 (see ``ADMITS``)."""
    return {
        "apiVersion": "carpool.dev/v1alpha1",
        "kind": "BatchingPolicy",
        "metadata": {"name": name},
        "spec": {"targetRefs": [{"name": target}], "slo": {"latency": {"p99": p99}}, "admission": ADMITS, **spec},
    }


def status_until(
    api: Api, namespace: str, test: Callable[[Object], Any], name: str = "by-hand", *, timeout: float = 120.0
) -> Object:
    """Wait until ``test`` of a policy's status is true; returns the status."""
    found = api.until(
        "batchingpolicies",
        namespace,
        lambda found: found and test(found[0].get("status") or {}),
        name=name,
        timeout=timeout,
    )
    status: Object = found[0]["status"]
    return status


def conditions(status: Object) -> dict[str, Finding]:
    """Return a status' conditions by type."""
    return {each["type"]: Finding(each["status"], each["reason"], each["message"]) for each in status["conditions"]}


def says(status: Object, kind: str, reason: str) -> bool:
    """Whether a condition is there for that reason."""
    return "conditions" in status and conditions(status)[kind].reason == reason


def acknowledged(status: Object, pods: int) -> bool:
    """Whether a policy's one target has so many pods with a sidecar, and all of them run what is published."""
    return any(each["acknowledged"] == each["injected"] == pods for each in status.get("targets", ()))


def config_map(deployment: str) -> str:
    """Return the name of the ConfigMap that a Deployment's pods mount."""
    return f"carpool-deployment-{deployment}"


def published(api: Api, namespace: str, deployment: str) -> Object:
    """Return the change in a Deployment's ConfigMap."""
    change: Object = json.loads(api.get("configmaps", config_map(deployment), namespace)["data"]["change.json"])
    return change


def pods(api: Api, namespace: str, **labels: str) -> list[Object]:
    """Return the pods that are not on their way out."""
    selector = ",".join(f"{name}={value}" for name, value in labels.items())
    return [pod for pod in api.find("pods", namespace, labels=selector) if "deletionTimestamp" not in pod["metadata"]]


def injected(pod: Object) -> bool:
    """Whether a pod has a sidecar."""
    return any(each["name"] == "carpool" for each in pod["spec"].get("initContainers", ()))


def signer(api: Api) -> Signer:
    """Return who signs what this cluster's sidecars believe."""
    data = api.get("secrets", "carpool-signing-key", SYSTEM)["data"]
    return Signer(b64decode(data["privateKey.pem"]))


def target(pod: Object) -> Target:
    """Return whose pod it is, as injection wrote it there."""
    return Target(pod["metadata"]["namespace"], *pod["metadata"]["annotations"]["carpool.dev/target"].split("/"))


def admin(pod: Object, path: str) -> str:
    """Return an address on a sidecar's admin port."""
    return f"http://{pod['status']['podIP']}:{ADMIN}{path}"


def read(api: Api, pod: Object, by: Signer | None = None) -> report.Report:
    """Return what a pod's sidecar says of itself, asked as the operator asks."""
    ticket = (by or signer(api)).ticket(target(pod), time.time())
    answer = requests.get(admin(pod, "/v1/stats"), headers={"authorization": ticket}, timeout=10)
    assert answer.status_code == 200, answer.text
    return report.decode(answer.content)


def counters(api: Api, name: str) -> float:
    """Return the sum of one of the operator's metrics, over its pods and all labels."""
    total = 0.0
    for pod in pods(api, SYSTEM, **{"app.kubernetes.io/component": "operator"}):
        text = requests.get(f"http://{pod['status']['podIP']}:8080/metrics", timeout=10).text
        total += sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((f"carpool_operator_{name} ", f"carpool_operator_{name}{{"))
        )
    return total


def leader(api: Api) -> str:
    """Return the name of the operator's pod that holds the Lease."""
    return str(api.get("leases", LEADER, SYSTEM)["spec"].get("holderIdentity") or "")


def scale(api: Api, deployment: str, replicas: int, namespace: str = SYSTEM) -> None:
    """Have so many pods of a Deployment and wait until that is so."""
    api.patch("deployments", deployment, namespace, body={"spec": {"replicas": replicas}})
    api.until_ready(deployment, namespace, timeout=120)
    if not replicas:
        labels = f"app.kubernetes.io/component={deployment.removeprefix('carpool-')}"
        api.until_gone("pods", namespace, labels=labels, timeout=120)


def send_signal(cluster: Cluster, pod: Object, container: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal the first process of a running container, as something on its node would."""
    where = f"{cluster.folder}/pods/{pod['metadata']['uid']}/{container}/"
    sent = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            argv = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if Path(argv[0]).name == "unshare" and any(word.startswith(where) for word in argv):
                for child in (process / "task" / process.name / "children").read_text().split():
                    os.kill(int(child), number)
                    sent += 1
        except OSError:
            continue  # it has ended meanwhile
    assert sent == 1, f"{sent} processes of {container} in {pod['metadata']['name']}"
