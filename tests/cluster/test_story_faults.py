"""What goes wrong with Carpool itself while a model is served: traffic flows, the status says it, all comes back."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from minicluster import carpool
from minicluster.cluster import Cluster
from minicluster.operated import (
    acknowledged,
    config_map,
    counters,
    eventually,
    injected,
    pods,
    policy,
    published,
    read,
    scale,
    send_signal,
    status_until,
)
from minicluster.traffic import Traffic

PATH = "/v1/models/standin:predict"
BODY = json.dumps({"instances": [[0.5, 1.5]]}).encode()
ASKS = {"carpool.dev/inject": "true"}
BASELINE = {"maxBatch": 6, "maxWait": "3ms", "maxInFlight": 2}
STILL = {"baseline": BASELINE, "tuning": {"mode": "Hold"}}
"""Of a policy that leaves the parameters what they are: they can be told from those of a sidecar that knows none."""


@pytest.fixture(scope="module")
def cluster():
    """A cluster of this file's own: what is installed there is taken away in every order."""
    one = Cluster()
    try:
        yield one.start()
    finally:
        one.stop()


@pytest.fixture(autouse=True)
def _inside(cluster):
    with cluster.inside():
        yield


@pytest.fixture(scope="module")
def api(cluster):
    with cluster.inside(), closing(cluster.api()) as one:
        yield one


@pytest.fixture(scope="module")
def installed(cluster, api):
    with cluster.inside():
        carpool.install(cluster, api)


@pytest.fixture
def traffic(cluster, namespace):
    """Requests to the Service ``resnet``, of which none may fail."""
    with Traffic(cluster.api(), "resnet", namespace, PATH, BODY) as one:
        yield one


@pytest.fixture
def serve(api, namespace, traffic):
    """Start a model with sidecars under a policy; returns the status in which all of its pods acknowledge."""

    def begin(*, replicas=2, rate=20, **spec):
        api.apply(
            *carpool.model("resnet", replicas=replicas, **ASKS), policy("by-hand", "resnet", **spec),
            namespace=namespace,
        )  # fmt: skip
        api.until_ready("resnet", namespace, timeout=120)
        traffic.rate = rate
        traffic.wait_for(10)
        return status_until(api, namespace, lambda status: acknowledged(status, replicas))

    return begin


def of_model(api, namespace):
    """The pods of the model."""
    return pods(api, namespace, app="resnet")


def runs(report, change):
    """Whether a sidecar runs what a change says, and serves by it."""
    lane = report.lanes.get("standin")
    return (
        report.generation == report.running == change["generation"]
        and lane is not None
        and lane.parameters.max_batch == BASELINE["maxBatch"]
    )


def replaced(api, namespace, pod, replicas=2):
    """Delete a pod; returns the one in its place once it is ready."""
    before = {each["metadata"]["uid"] for each in of_model(api, namespace)}
    api.delete("pods", pod["metadata"]["name"], namespace)
    api.until_gone("pods", namespace, name=pod["metadata"]["name"], timeout=120)
    api.until_ready("resnet", namespace, timeout=120)
    (fresh,) = [each for each in of_model(api, namespace) if each["metadata"]["uid"] not in before]
    return fresh


def test_without_an_operator_all_goes_on_and_its_return_changes_nothing(
    installed, cluster, api, namespace, serve, traffic
):
    serve(**STILL)
    change = published(api, namespace, "resnet")
    version = api.get("configmaps", config_map("resnet"), namespace)["metadata"]["resourceVersion"]

    # 1. Killed, it is restarted, and goes on where it was.
    (operator,) = pods(api, carpool.SYSTEM, **{"app.kubernetes.io/component": "operator"})
    send_signal(cluster, operator, "operator")
    api.until(
        "pods", carpool.SYSTEM,
        lambda found: found and found[0]["status"]["containerStatuses"][0]["restartCount"] == 1,
        name=operator["metadata"]["name"],
    )  # fmt: skip
    eventually(lambda: counters(api, "pods_acknowledged") == 2)

    # 2. Gone altogether: a pod that starts meanwhile runs what was published last.
    scale(api, "carpool-operator", 0)
    fresh = replaced(api, namespace, of_model(api, namespace)[0])
    assert injected(fresh)
    eventually(lambda: runs(read(api, fresh), change))
    traffic.wait_for(20)

    # 3. Back: everybody acknowledges what they have already.
    scale(api, "carpool-operator", 1)
    eventually(lambda: counters(api, "pods_acknowledged") == 2)
    status = api.get("batchingpolicies", "by-hand", namespace)["status"]
    assert acknowledged(status, 2)
    assert api.get("configmaps", config_map("resnet"), namespace)["metadata"]["resourceVersion"] == version
    assert all(runs(read(api, pod), change) for pod in of_model(api, namespace))
    assert counters(api, "pushes_total") == 0
    assert set(traffic.outcomes()) == {"200"}, traffic.failed()[:5]
