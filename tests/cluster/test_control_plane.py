"""The control plane is the real one: its admission, its RBAC, its controllers, its tokens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from minicluster.client import ApiError
from minicluster.cluster import network_restored


def test_we_are_in_the_cluster_s_network(cluster):
    names = {name for _, name in socket.if_nameindex()}

    assert "pods0" in names
    assert "eth0" not in names


def test_kubectl_speaks_to_it(kubectl, namespace):
    kubectl("create", "configmap", "colours", "--from-literal=sky=blue")

    assert kubectl("get", "configmap", "colours", "-o", "jsonpath={.data.sky}") == "blue"


def test_a_wrong_object_is_refused(api, namespace):
    with pytest.raises(ApiError, match="template") as refused:
        api.create({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": {}}, namespace)

    assert refused.value.status == 422


def test_a_service_account_may_do_what_its_roles_say_and_nothing_else(api, namespace):
    api.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "reader"},
            "rules": [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "reader"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": namespace}],
        },
        namespace=namespace,
    )
    reader = api.as_account("default", namespace)
    reader.until_allowed("list", "configmaps", namespace)

    assert "kube-root-ca.crt" in {one["metadata"]["name"] for one in reader.find("configmaps", namespace)}
    with pytest.raises(ApiError, match="cannot list resource") as denied:
        reader.find("secrets", namespace)
    assert denied.value.status == 403
    reader.close()


def test_a_deployment_gets_a_replica_set(api, namespace):
    template = {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [{"name": "main", "image": "none"}]}}
    spec = {"replicas": 0, "selector": {"matchLabels": {"app": "x"}}, "template": template}
    api.create({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": spec}, namespace)

    (made,) = api.until("replicasets", namespace, bool, labels="app=x")

    assert made["metadata"]["ownerReferences"][0]["name"] == "x"


def test_nothing_outlives_who_started_it(cluster, tmp_path):
    """A killed pytest leaves nothing behind: its pipe to the first process closes, and the kernel ends all others."""
    script = (
        "import os, sys\n"
        "from minicluster.cluster import Cluster\n"
        "one = Cluster().start()\n"
        "print(one.folder, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path)}
    started = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)  # noqa: S603 - our own
    with started, network_restored():
        folder = started.communicate(timeout=180)[0].strip()

    assert started.returncode == -9
    assert folder.startswith(str(tmp_path))
    deadline = time.monotonic() + 60
    while any(folder in text for text in command_lines()):
        assert time.monotonic() < deadline, "processes live on"


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended meanwhile
            yield path.read_text()
