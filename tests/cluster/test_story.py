"""What a user does, from end to end: install, annotate, look, change the promise, and take it out again."""

from __future__ import annotations

import json
import time

import pytest
from minicluster import carpool
from minicluster.traffic import Traffic

PATH = "/v1/models/standin:predict"
BODY = json.dumps({"instances": [[0.5, 1.5]]}).encode()


@pytest.fixture(scope="module")
def installed(cluster, api):
    carpool.install(cluster, api)
    yield
    carpool.uninstall(cluster, api)


def injected(pod):
    return any(one["name"] == "carpool" for one in pod["spec"].get("initContainers", []))


LOOSE = "2s"
"""A p99 for which nobody is refused while pods come and go, however slow the machine is meanwhile."""


def policy(api, namespace, test, name="deployment-resnet", timeout=120.0):
    """The policy, once ``test`` of its status is true."""
    return api.until(
        "batchingpolicies", namespace, lambda found: found and test(found[0].get("status") or {}), name=name,
        timeout=timeout,
    )[0]  # fmt: skip


def conditions(status):
    return {one["type"]: (one["status"], one["reason"]) for one in status.get("conditions", [])}


def acknowledged(status, pods=2):
    return any(target["acknowledged"] == target["injected"] == pods for target in status.get("targets", []))


def ready(status):
    return conditions(status).get("Ready", ("", ""))[0] == "True"


def promised(api, namespace, kubectl, p99):
    """Change the annotation, and wait until every pod acknowledges what follows from it."""
    kubectl("annotate", "--overwrite", "deployment", "resnet", f"carpool.dev/slo-p99={p99}")

    def follows(found):
        return (
            found[0]["spec"]["slo"]["latency"]["p99"] == p99
            and found[0]["status"]["observedGeneration"] == found[0]["metadata"]["generation"]
            and acknowledged(found[0]["status"])
        )

    api.until("batchingpolicies", namespace, follows, name="deployment-resnet", timeout=120)


def test_annotate_tune_change_the_slo_and_take_it_out_again(installed, cluster, api, namespace, kubectl):
    api.apply(*carpool.model("resnet"), namespace=namespace)
    api.until_ready("resnet", namespace)
    with Traffic(cluster.api(), "resnet", namespace, PATH, BODY, rate=20) as traffic:
        traffic.wait_for(20)

        # 1. One annotation: pods with sidecars roll in, those without roll out, nobody notices.
        kubectl("annotate", "deployment", "resnet", f"carpool.dev/slo-p99={LOOSE}")
        api.until(
            "pods",
            namespace,
            lambda pods: len(pods) == 2 and all(map(injected, pods)),
            labels="app=resnet",
            timeout=180,
        )
        api.until_ready("resnet", namespace)
        first = policy(api, namespace, lambda status: ready(status) and acknowledged(status))
        assert first["spec"]["slo"] == {"latency": {"p99": LOOSE}}
        pods = {pod["metadata"]["uid"] for pod in api.find("pods", namespace, labels="app=resnet")}
        assert not traffic.failed(), traffic.outcomes()

        # 2. The load rises beyond what one by one could serve: it batches, without a restart, and says why.
        traffic.rate = 120
        busy = policy(
            api,
            namespace,
            lambda status: (
                acknowledged(status)
                and not status["applied"]["parameters"]["passThrough"]
                and status["applied"]["parameters"]["maxBatch"] > 1
                and status.get("lastDecision", {}).get("predicted")
            ),
        )["status"]
        assert busy["lastDecision"]["observed"]["rate"] > 0
        assert busy["lastDecision"]["message"]
        assert busy["history"]

        # 3. The promise changes: the same pods keep it.
        promised(api, namespace, kubectl, "300ms")
        assert {pod["metadata"]["uid"] for pod in api.find("pods", namespace, labels="app=resnet")} == pods

        # 4. Hardly anybody is there: it steps aside. Were a trial under way as the load falls, in which nothing can be
        # proven any more, that would take 120 s.
        traffic.rate = 0.5
        policy(
            api,
            namespace,
            lambda status: acknowledged(status) and status["applied"]["parameters"]["passThrough"],
            timeout=240,
        )
        restarts = [
            status["restartCount"]
            for pod in api.find("pods", namespace, labels="app=resnet")
            for status in (*pod["status"]["containerStatuses"], *pod["status"]["initContainerStatuses"])
        ]
        assert restarts == [0, 0, 0, 0]

        # 5. Without the annotation it is gone as it came.
        promised(api, namespace, kubectl, LOOSE)
        traffic.rate = 20
        began = time.monotonic()
        kubectl("annotate", "deployment", "resnet", "carpool.dev/slo-p99-")
        api.until(
            "pods",
            namespace,
            lambda pods: len(pods) == 2 and not any(map(injected, pods)),
            labels="app=resnet",
            timeout=180,
        )
        api.until_ready("resnet", namespace)
        api.until_gone("batchingpolicies", namespace)
        traffic.wait_for(20)
        assert not traffic.failed(began), traffic.outcomes(began)
    late = [answer.outcome for answer in traffic.failed() if answer.outcome not in {"503", "504"}]
    assert not late, traffic.outcomes()
