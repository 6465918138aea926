"""``kubectl carpool`` as kubectl runs it, on a real API server; the test speaks for the operator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_operator.api import crd
from carpool_operator.api.spec import API_VERSION, KIND, written
from carpool_operator.api.status import (
    Applied,
    Condition,
    ConditionStatus,
    Figures,
    HistoryEntry,
    LastDecision,
    Recommendation,
    Status,
    TargetModel,
    TargetStatus,
)

CRD = "batchingpolicies.carpool.dev"
NOW = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
EIGHT = Parameters(max_batch=8, max_wait=Duration(0.002))


def condition(kind, status=ConditionStatus.TRUE, reason="Fine", message=""):
    return Condition(
        type=kind, status=status, reason=reason, message=message, last_transition_time=NOW, observed_generation=1
    )


FINE = Status(
    observed_generation=1,
    conditions=tuple(condition(kind) for kind in ("Accepted", "Programmed", "MetricsAvailable", "SLOMet", "Ready")),
    applied=Applied(
        generation=1795000000000, at=NOW, target="Deployment/resnet", model="*", parameters=EIGHT, batch="8", wait="2ms"
    ),
    recommendation=Recommendation(target="Deployment/resnet", model="*", parameters=EIGHT),
    last_decision=LastDecision(
        action="Applied", reason="SavesDeviceTime", message="device time falls 20%", model="*",
        target="Deployment/resnet", at=NOW, observed=Figures(rate=300.0, p99=Duration(0.031)),
        predicted=Figures(rate=300.0, p99=Duration(0.03)),
    ),
    targets=(
        TargetStatus(
            kind="Deployment", name="resnet", replicas=3, injected=3, acknowledged=3,
            models=(TargetModel(name="*", generation=1795000000000, parameters=EIGHT),),
        ),
    ),
    history=(
        HistoryEntry(
            generation=1795000000000, at=NOW, target="Deployment/resnet", model="*", parameters=EIGHT, reason="First"
        ),
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def server(api):
    api.apply(crd.resource())
    api.until_served(CRD)
    return api


@pytest.fixture
def carpool(cluster, namespace, tmp_path):
    """Run kubectl with the plugin on its path: exit code, and what it printed."""
    plugin = tmp_path / "kubectl-carpool"
    plugin.write_text(f"#!{sys.executable}\nfrom carpool_cli.kubectl.main import run\nrun()\n")
    plugin.chmod(0o755)

    def run(*arguments, kubeconfig=None):
        environment = cluster.environment()
        environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
        where = [f"--kubeconfig={kubeconfig}"] if kubeconfig else []
        command = ["kubectl", "carpool", *arguments, "-n", namespace, *where]
        done = subprocess.run(  # noqa: S603 - kubectl finding the plugin is what is tested
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=120, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


@pytest.fixture
def policy(server, namespace):
    """Make a policy; the status is what its operator would have written."""

    def make(name="resnet", status=FINE, target="resnet"):
        spec = {"targetRefs": [{"name": target}], "slo": {"latency": {"p99": "50ms"}}}
        manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
        server.create(manifest, namespace)
        if status is not None:
            server.patch("batchingpolicies", name, namespace, sub="status", body={"status": written(status)})

    return make


def test_what_the_operator_writes_is_read(carpool, policy, namespace):
    assert "no policies here" in carpool("status")[1]
    policy()
    code, told = carpool("status")
    assert code == 0
    assert " ".join(told.splitlines()[1].split()).startswith(
        "resnet p99 50ms Apply batch 8, wait 2ms, 1 in flight 3/3/3 True True"
    )
    assert f"resnet in {namespace}: p99 50ms, Apply" in carpool("status", "deployment/resnet")[1]
    assert "Applied, SavesDeviceTime: device time falls 20%" in carpool("explain", "resnet")[1]
    assert "First" in carpool("history", "resnet")[1]
    assert json.loads(carpool("status", "resnet", "-o", "json")[1])["status"] == written(FINE)


def test_what_is_wrong_stands_below(carpool, policy):
    policy("silent", status=None)
    not_so = condition("Programmed", ConditionStatus.FALSE, "NotInjected", "annotate the Deployment")
    policy("resnet", Status(observed_generation=1, conditions=(not_so,)))
    code, told = carpool("status", "--check")
    assert code == 3
    assert "silent: the operator has not reported yet" in told
    assert "resnet: Programmed is not true: NotInjected: annotate the Deployment" in told


def test_paused_and_resumed_with_the_rights_to_edit_alone(carpool, policy, server, namespace, cluster, tmp_path):
    policy()
    rules = [{"apiGroups": ["carpool.dev"], "resources": ["batchingpolicies"], "verbs": ["get", "list"]}]
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "p"}, "rules": rules}
    server.apply(
        role,
        {
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "p"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "p"},
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": namespace}],
        },
        namespace=namespace,
    )  # fmt: skip
    account = server.as_account("default", namespace)
    account.until_allowed("list", "batchingpolicies", namespace)
    mine = cluster.kubeconfig_of(account.token)
    assert carpool("status", "resnet", kubeconfig=mine)[0] == 0
    code, told = carpool("pause", "resnet", kubeconfig=mine)
    assert code == 1
    assert "cannot patch resource" in told
    assert "or `edit` to pause" in told
    rules[0]["verbs"].append("patch")
    server.apply(role, namespace=namespace)
    account.until_allowed("patch", "batchingpolicies", namespace)
    account.close()
    assert carpool("pause", "deployment/resnet", kubeconfig=mine)[0] == 0
    assert server.get("batchingpolicies", "resnet", namespace)["metadata"]["annotations"] == {
        "carpool.dev/paused": "true"
    }
    assert "Paused" in carpool("status")[1]
    assert carpool("resume", "resnet", kubeconfig=mine)[0] == 0
    assert not server.get("batchingpolicies", "resnet", namespace)["metadata"].get("annotations")


def test_failures_of_the_real_server_name_the_fix(carpool, policy, server, namespace, cluster, tmp_path):
    policy()
    assert "did you mean resnet?" in carpool("explain", "resnte")[1]
    nobody = cluster.kubeconfig_of(server.account_token("default", namespace))
    assert "ask for the role `view`" in carpool("status", kubeconfig=nobody)[1]
    assert "log in to the cluster again" in carpool("status", kubeconfig=cluster.kubeconfig_of("nonsense"))[1]
    assert 'context "far" does not exist' in carpool("status", "--context", "far")[1]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(cluster.kubeconfig.read_text().replace(":6443", ":6444"))
    assert "no API server answers" in carpool("status", kubeconfig=elsewhere)[1]


def test_without_the_kind(carpool, tmp_path):
    plugin = tmp_path / "kubectl-carpool"
    plugin.write_text(
        plugin.read_text().replace(
            "run()\n",
            "from carpool_cli.kubectl import cluster\ncluster.RESOURCE = 'nothings.carpool.dev'\nrun()\n",
        )
    )
    code, told = carpool("status")
    assert code == 1
    assert "helm install carpool" in told
