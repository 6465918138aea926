"""What ``helm test`` runs: is the kind served, does a pod that asks for a sidecar get one."""  # noqa: INP001 - no package

from __future__ import annotations

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HOME = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NAMESPACE = os.environ["NAMESPACE"]
PATIENCE = 15  # seconds
LABELS = {"pod-template-hash": "0"}
CONTAINER = {
    "name": "model",
    "image": "model",
    "ports": [{"name": "http", "containerPort": 8000}],
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}
# As one of a Deployment's: by its ReplicaSet's name.
OWNER = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "carpool-test-0", "uid": "0", "controller": True}
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "generateName": "carpool-test-0-",
        "labels": LABELS,
        "annotations": {"carpool.dev/inject": "true"},
        "ownerReferences": [OWNER],
    },
    "spec": {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [CONTAINER],
    },
}


def ask(path: str, body: object = None) -> dict:
    """Ask the API server."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    headers = {"Authorization": f"Bearer {(HOME / 'token').read_text()}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"https://{host}:{port}{path}", data, headers)
    context = ssl.create_default_context(cafile=str(HOME / "ca.crt"))
    with urllib.request.urlopen(request, context=context, timeout=30) as answer:  # noqa: S310 - https
        return json.load(answer)


def wrong() -> str | None:
    """Return what is wrong and what to look at, or nothing."""
    # 1. The kind
    try:
        kinds = {each["kind"] for each in ask("/apis/carpool.dev/v1alpha1")["resources"]}
    except urllib.error.HTTPError as error:
        return f"carpool.dev/v1alpha1 is not served ({error}): is the CRD installed?"
    if "BatchingPolicy" not in kinds:
        return f"carpool.dev/v1alpha1 has no BatchingPolicy: {kinds}"
    # 2. The injector, on the way that every pod takes
    try:
        made = ask(f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All", POD)
    except urllib.error.HTTPError as error:
        return f"no pod may be made in {NAMESPACE} ({error}): {error.read().decode(errors='replace')[:500]}"
    if skipped := made["metadata"]["annotations"].get("carpool.dev/skipped"):
        return f"the injector gave no sidecar: {skipped}"
    if not any(each["name"] == "carpool" for each in made["spec"].get("initContainers", ())):
        return "the injector was not asked, or did not answer: kubectl logs -l app.kubernetes.io/component=injector"
    return None


def main() -> str | None:
    """Return the same, once the API server had time to take in what was installed a moment ago: rights, webhooks."""
    for _ in range(PATIENCE):
        if _wrong_or_away() is None:
            return None
        time.sleep(1.0)
    return _wrong_or_away()


def _wrong_or_away() -> str | None:
    try:
        return wrong()
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        return f"the API server does not answer this pod ({error}): do NetworkPolicies let it out?"


sys.exit(main())
