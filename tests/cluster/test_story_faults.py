"""What goes wrong with Carpool itself while a model is served: traffic flows, the status says it, all comes back."""

from __future__ import annotations

import json
import shlex
import signal
import time
from math import log2
from pathlib import Path

import pytest
import yaml
from minicluster import carpool
from minicluster.operated import (
    acknowledged,
    conditions,
    config_map,
    counters,
    injected,
    leader,
    pods,
    policy,
    published,
    read,
    says,
    scale,
    send_signal,
    signer,
    status_until,
)
from minicluster.traffic import Traffic
from minicluster.waiting import eventually

from carpool.exchange.report import encode
from carpool_operator.delivery.documents import FIRST_REPEAT

CRDS = Path(__file__).parents[2] / "crds" / "carpool.dev_batchingpolicies.yaml"
PATH = "/v1/models/standin:predict"
BODY = json.dumps({"instances": [[0.5, 1.5]]}).encode()
ASKS = {"carpool.dev/inject": "true"}
BASELINE = {"maxBatch": 6, "maxWait": "3ms", "maxInFlight": 2}
STILL = {"baseline": BASELINE, "tuning": {"mode": "Hold"}}
"""Of a policy that leaves the parameters as they are. They differ from those of a sidecar without a policy."""


@pytest.fixture(scope="module")
def cluster(own_cluster):
    """One of this file's own: what is installed there is taken away in every order."""
    return own_cluster


@pytest.fixture(scope="module")
def installed(cluster, api):
    carpool.install(cluster, api)


@pytest.fixture
def traffic(cluster, namespace):
    """Requests to the Service ``resnet``; none may fail."""
    with Traffic(cluster.api(), "resnet", namespace, PATH, BODY) as one:
        yield one


@pytest.fixture
def serve(api, namespace, traffic):
    """Start a model with sidecars under a policy; returns the status in which all of its pods acknowledge."""

    def begin(*, replicas=2, rate=20, grace=45, **spec):
        profile, deployment, service = carpool.model("resnet", replicas=replicas, **ASKS)
        deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = grace
        api.apply(profile, deployment, service, policy("by-hand", "resnet", **spec), namespace=namespace)
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
    status_until(api, namespace, lambda status: acknowledged(status, 2))
    assert api.get("configmaps", config_map("resnet"), namespace)["metadata"]["resourceVersion"] == version
    assert all(runs(read(api, pod), change) for pod in of_model(api, namespace))
    assert counters(api, "pushes_total") == 0
    assert set(traffic.outcomes()) == {"200"}, traffic.failed()[:5]


def test_a_policy_deleted_while_no_operator_runs_is_gone_from_its_pods_once_one_does(
    installed, api, namespace, serve, traffic
):
    serve(**STILL)
    assert {read(api, pod).slo_seconds for pod in of_model(api, namespace)} != {3600.0}
    scale(api, "carpool-operator", 0)
    api.delete("batchingpolicies", "by-hand", namespace)
    api.until_gone("configmaps", namespace, labels="carpool.dev/change=true", timeout=180)
    scale(api, "carpool-operator", 1)

    def standby(pod):
        report = read(api, pod)
        return report.slo_seconds == 3600 and all(lane.parameters.pass_through for lane in report.lanes.values())

    eventually(lambda: all(map(standby, of_model(api, namespace))), timeout=120)
    eventually(lambda: [each for each in api.find("events", namespace) if each["reason"] == "PolicyGone"])
    assert set(traffic.outcomes()) == {"200"}, traffic.failed()[:5]


def stranger(pod):
    """A pod like another, of the same target, whose sidecar believes another key: of an operator before, say."""
    spec = json.loads(json.dumps(pod["spec"]))
    for name in ("nodeName", "tolerations", "serviceAccount"):
        spec.pop(name, None)
    spec["automountServiceAccountToken"] = False
    spec["volumes"] = [each for each in spec["volumes"] if not each["name"].startswith("kube-api-access")]
    for container in (*spec["initContainers"], *spec["containers"]):
        mounts = container.get("volumeMounts", ())
        container["volumeMounts"] = [each for each in mounts if not each["name"].startswith("kube-api-access")]
        for variable in container.get("env", ()):
            if variable["name"] == "CARPOOL_CONFIG":
                config = json.loads(variable["value"])
                variable["value"] = json.dumps({**config, "publicKey": "ab" * 32})
    ours = {name: pod["metadata"]["annotations"][name] for name in ("carpool.dev/target", "carpool.dev/status")}
    labels = {
        name: value
        for name, value in pod["metadata"]["labels"].items()
        if name in {"carpool.dev/injected", "pod-template-hash"}
    }
    metadata = {"name": "stranger", "labels": labels, "annotations": ours}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_a_pod_that_believes_another_key_is_named_and_the_others_go_on(
    installed, cluster, api, namespace, serve, traffic
):
    began, pushed = time.monotonic(), counters(api, "pushes_total")
    serve(**STILL)
    real = of_model(api, namespace)

    # 1. It can neither be read nor changed. The status says which pod it is, why, and what to do.
    api.create(stranger(real[0]), namespace)
    status = status_until(api, namespace, lambda status: conditions(status)["Programmed"].status == "False")
    found = conditions(status)["Programmed"]
    assert found == conditions(status)["Ready"]
    assert found.message.startswith("stranger of Deployment resnet did not say")
    assert "403" in found.message
    assert '"reason":"signature"' in found.message
    assert found.message.endswith(f": kubectl -n {namespace} logs stranger -c carpool")
    assert conditions(status)["MetricsAvailable"].status == "True"  # two of three can be read

    # 2. A new promise reaches all others, and it is not sent over and over.
    before = published(api, namespace, "resnet")
    api.apply(policy("by-hand", "resnet", p99="400ms", **STILL), namespace=namespace)
    status = status_until(api, namespace, lambda status: says(status, "Programmed", "PushRefused"))
    found = conditions(status)["Programmed"]
    assert found.message.startswith("stranger of Deployment resnet did not take the configuration (it answers 403")
    change = published(api, namespace, "resnet")
    assert change["generation"] > before["generation"]
    eventually(lambda: all(runs(read(api, pod), change) for pod in real))
    status_until(api, namespace, lambda status: status["targets"][0]["acknowledged"] == 2)
    written, passes = counters(api, "writes_total"), counters(api, "pass_seconds_count")
    eventually(lambda: counters(api, "pass_seconds_count") >= passes + 3)
    assert counters(api, "writes_total") <= written + 1  # what a status says of what lasts
    # Two changes for three pods; one that takes neither gets them again after 10 s, 20 s more, 40 s more.
    repeats = 2 * int(log2((time.monotonic() - began) / FIRST_REPEAT + 1))
    assert counters(api, "pushes_total") - pushed <= 2 * 3 + repeats

    # 3. The command does what it says.
    cluster.run(*shlex.split(found.message.rpartition(": ")[2]))
    status_until(api, namespace, lambda status: says(status, "Ready", "Ready") and acknowledged(status, 2))
    assert set(traffic.outcomes()) == {"200"}, traffic.failed()[:5]


def test_what_started_while_the_injector_was_away_is_named_with_the_command_that_mends_it(
    installed, cluster, api, namespace, serve, traffic
):
    api.apply(*carpool.model("late", replicas=1), namespace=namespace)
    serve(**STILL)
    api.until_ready("late", namespace)
    (plain,) = pods(api, namespace, app="late")
    scale(api, "carpool-injector", 0)

    # 1. One is annotated, and goes on as it is; the other loses a pod, and has one in its place that has no sidecar.
    api.annotate("deployment", "late", namespace, slo_p99="300ms")
    fresh = replaced(api, namespace, of_model(api, namespace)[0])
    assert not injected(fresh)
    late = status_until(
        api, namespace, lambda status: says(status, "Programmed", "NotInjected"), name="deployment-late"
    )
    missed = status_until(api, namespace, lambda status: says(status, "Programmed", "Missed"))
    assert [each["metadata"]["uid"] for each in pods(api, namespace, app="late")] == [plain["metadata"]["uid"]]
    name = fresh["metadata"]["name"]
    assert missed["targets"][0]["missed"] == [name]
    messages = [conditions(late)["Ready"].message, conditions(missed)["Ready"].message]
    wrong = (
        "Deployment late has no sidecars: it was annotated while the injector was not available",
        f"{name} of Deployment resnet started without a sidecar",
    )
    commands = [f"kubectl -n {namespace} rollout restart deployment/{each}" for each in ("late", "resnet")]
    assert messages == [f"{what}: {command}" for what, command in zip(wrong, commands, strict=True)]

    # 2. It is back, and the commands do what they say.
    scale(api, "carpool-injector", 2)
    carpool.until_injecting(api)
    for message in messages:
        cluster.run(*shlex.split(message.rpartition(": ")[2]))
    for policy_name, replicas in (("by-hand", 2), ("deployment-late", 1)):
        status_until(
            api, namespace,
            lambda status, replicas=replicas: says(status, "Ready", "Ready") and acknowledged(status, replicas),
            name=policy_name,
        )  # fmt: skip
    assert set(traffic.outcomes()) == {"200"}, traffic.failed()[:5]


QUICK = {
    "objective": "Efficiency",
    "bounds": {"maxBatch": {"max": 16}},
    "tuning": {"riskier": {"after": "2s", "minRequests": 50}},
    "metrics": {"staleAfter": "4s"},
}
"""Of a policy that decides soon, and batches however idle the device is."""

LIES = """
import http.server, json, sys
report, kind = json.loads(sys.argv[1]), sys.argv[2]
class Liar(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Liar.asked += 1
        stats = report["stats"]
        stats["at"] += 2.0
        report["uptimeSeconds"] += 2.0
        for model in stats["models"].values():
            if kind == "negative":
                model["arrivals"] = -1
        if kind == "backward":
            stats["at"] = -1.0
        body = b"NaN" if kind == "nan" else json.dumps(report).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("", 14090), Liar).serve_forever()
"""
"""A sidecar whose counters can't be."""


def liar(kind, pod, truth):
    """A pod of the same target whose report is false."""
    told = pod["metadata"]
    template = told["labels"]["pod-template-hash"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"liar-{kind}",
            "labels": {"carpool.dev/injected": "true", "pod-template-hash": template},
            "annotations": {"carpool.dev/target": told["annotations"]["carpool.dev/target"]},
        },
        "spec": {
            "containers": [
                {"name": "carpool", "image": "python", "command": ["python", "-c", LIES, encode(truth).decode(), kind]}
            ],
            "terminationGracePeriodSeconds": 0,
        },
    }


def flips(history):
    """Whether parameters went from one set to another and back."""
    sets = [each["parameters"] for each in history if each["model"] == "standin"]
    return any(a == c != b for a, b, c in zip(sets, sets[1:], sets[2:], strict=False))


def test_nothing_is_decided_on_counters_that_cannot_be(installed, cluster, api, namespace, serve, traffic):
    status = serve(rate=4, canary={"enabled": False}, **QUICK)
    truth = eventually(lambda: (found := read(api, of_model(api, namespace)[0])).lanes and found)
    kinds = ("negative", "backward", "nan")
    for kind in kinds:
        api.create(liar(kind, of_model(api, namespace)[0], truth), namespace)

    # 1. Most of the pods make no sense. The load rises so that much could be saved, and nobody moves.
    # Not while they start: those can't be reached, which is another matter.
    nonsense = "3 of 5 pods cannot be read, among them liar-backward: its clock is no number"
    status = status_until(api, namespace, lambda status: nonsense in conditions(status)["MetricsAvailable"].message)
    assert conditions(status)["MetricsAvailable"][:2] == ("False", "MetricsStale")
    assert "Nothing is changed meanwhile" in conditions(status)["MetricsAvailable"].message
    before = published(api, namespace, "resnet")
    traffic.rate = 60
    passes = counters(api, "pass_seconds_count")
    traffic.wait_for(200)
    eventually(lambda: counters(api, "pass_seconds_count") >= passes + 4)
    assert published(api, namespace, "resnet") == before

    # 2. They are gone, and the same load is decided on.
    for kind in kinds:
        api.delete("pods", f"liar-{kind}", namespace)
    tuned = status_until(
        api,
        namespace,
        lambda status: acknowledged(status, 2) and status["applied"]["parameters"]["maxBatch"] > 1,
    )
    assert says(tuned, "Ready", "Ready")

    # 3. A sidecar dies: its counters begin anew, it runs what the others do, and nobody takes that for a calm.
    assert set(traffic.outcomes()) == {"200"}, traffic.failed()[:5]
    (victim, _) = of_model(api, namespace)
    send_signal(cluster, victim, "carpool")
    fresh = eventually(lambda: (found := read(api, victim)).lanes and found)
    assert fresh.uptime_seconds < truth.uptime_seconds + 30
    api.until_ready("resnet", namespace)
    eventually(
        lambda: (
            {read(api, pod).generation for pod in of_model(api, namespace)}
            == {published(api, namespace, "resnet")["generation"]}
        )
    )
    passes = counters(api, "pass_seconds_count")
    eventually(lambda: counters(api, "pass_seconds_count") >= passes + 3)
    status = status_until(api, namespace, lambda status: says(status, "Ready", "Ready") and acknowledged(status, 2))
    assert not status["applied"]["parameters"]["passThrough"]
    assert not flips(status["history"])
    # Nobody could have answered what was in it.
    address = victim["status"]["podIP"]
    assert {answer.endpoint.partition(":")[0] for answer in traffic.failed()} <= {address}, traffic.failed()[:5]


def trial_of(status):
    """What is tried, if anything is."""
    tried = [model["trial"] for each in status.get("targets", ()) for model in each["models"] if model.get("trial")]
    return tried[0] if tried else None


def test_one_pod_tries_first_and_the_others_follow(installed, api, namespace, serve, traffic):
    # A trial of 15 s, in which all can be looked at.
    serve(replicas=3, rate=60, canary={"minRequests": 300}, **QUICK)
    before = published(api, namespace, "resnet")

    # 1. One of three has it, and runs it; the others run what the ConfigMap says.
    trial = trial_of(status_until(api, namespace, trial_of))
    assert len(trial["pods"]) == 1
    running = {pod["metadata"]["name"]: read(api, pod).running for pod in of_model(api, namespace)}
    canary = running.pop(trial["pods"][0])
    assert canary == trial["generation"] > before["generation"]
    assert set(running.values()) == {published(api, namespace, "resnet")["generation"]}

    # 2. What does well all have; what was only explored, nobody, until it is chosen.
    tried = [trial["parameters"]]

    def is_promoted(status):
        one = trial_of(status)
        tried.extend([one["parameters"]] if one else [])
        return any(each["reason"] in chosen for each in status.get("history", ()))

    # With what was measured on the canary, what saves device time may be sure enough for all at once.
    chosen = {"CanaryPromoted", "SavesDeviceTime"}
    status = status_until(api, namespace, is_promoted)
    promoted = next(each for each in status["history"] if each["reason"] in chosen)
    assert promoted["reason"] == "SavesDeviceTime" or promoted["parameters"] in tried
    assert promoted["generation"] > trial["generation"]
    status_until(api, namespace, lambda status: acknowledged(status, 3))
    assert not flips(status["history"])
    assert set(traffic.outcomes()) == {"200"}, traffic.failed()[:5]


def test_of_two_operators_one_goes_on_where_the_other_ended(installed, cluster, api, namespace, serve, traffic):
    serve(**STILL)
    scale(api, "carpool-operator", 2)
    generation = published(api, namespace, "resnet")["generation"]

    def promise(p99):
        """Change the promise, and wait until the present leader has delivered it."""
        nonlocal generation
        api.apply(policy("by-hand", "resnet", p99=p99, **STILL), namespace=namespace)
        change = eventually(lambda: (found := published(api, namespace, "resnet"))["generation"] > generation and found)
        generation = change["generation"]
        eventually(lambda: all(runs(read(api, pod), change) for pod in of_model(api, namespace)))
        status_until(api, namespace, lambda status: says(status, "Ready", "Ready") and acknowledged(status, 2))

    # 1. The leader is gone without a word.
    first = leader(api)
    api.delete("pods", first, carpool.SYSTEM, grace=0)
    eventually(lambda: leader(api) not in {"", first})
    promise("350ms")

    # 2. The next one is not dead, only stopped: it comes back to find that another leads.
    second = leader(api)
    stopped = api.get("pods", second, carpool.SYSTEM)
    api.until_ready("carpool-operator", carpool.SYSTEM)
    send_signal(cluster, stopped, "operator", signal.SIGSTOP)
    try:
        eventually(lambda: leader(api) not in {"", second})
        promise("400ms")
    finally:
        send_signal(cluster, stopped, "operator", signal.SIGCONT)
    eventually(lambda: counters(api, "leader") == 1)
    passes = counters(api, "pass_seconds_count")
    eventually(lambda: counters(api, "pass_seconds_count") >= passes + 2)
    assert published(api, namespace, "resnet")["generation"] == generation
    assert leader(api) not in {first, second}
    promise("450ms")
    scale(api, "carpool-operator", 1)
    assert set(traffic.outcomes()) == {"200"}, traffic.failed()[:5]


SHORT = 20
"""Seconds of grace: the controller that ends namespaces looks again after half of it."""


def test_the_chart_goes_first_and_the_model_serves_to_the_end(installed, cluster, api, namespace, serve, traffic):
    serve(grace=SHORT, **STILL)
    change, signs = published(api, namespace, "resnet"), signer(api)

    def serves():
        traffic.wait_for(20)
        assert set(traffic.outcomes()) == {"200"}, traffic.failed()[:5]

    # 1. Chart, its namespace, policy: what runs stays.
    carpool.uninstall(cluster, api)
    api.delete("namespaces", carpool.SYSTEM)
    api.until_gone("namespaces", "", name=carpool.SYSTEM)
    serves()
    api.delete("batchingpolicies", "by-hand", namespace)
    api.until_gone("batchingpolicies", namespace)
    serves()
    assert all(runs(read(api, pod, signs), change) for pod in of_model(api, namespace))

    # 2. The CRD. Pods that start from now on have no sidecar, and need none.
    api.delete("customresourcedefinitions", carpool.CRD)
    api.until_gone("customresourcedefinitions", "", name=carpool.CRD)
    assert not injected(replaced(api, namespace, of_model(api, namespace)[0]))
    serves()
    api.delete("namespaces", namespace)
    api.until_gone("namespaces", "", name=namespace, timeout=120)


def test_the_crd_goes_first_while_the_operator_runs(cluster, api, namespace, serve, traffic):
    carpool.install(cluster, api)
    serve(grace=SHORT, **STILL)
    api.delete("customresourcedefinitions", carpool.CRD)
    api.until_gone("customresourcedefinitions", "", name=carpool.CRD)
    api.until_gone("configmaps", namespace, name=config_map("resnet"))
    fresh = replaced(api, namespace, of_model(api, namespace)[0])
    assert injected(fresh)  # it asks still, and passes all through
    traffic.wait_for(20)
    assert set(traffic.outcomes()) == {"200"}, traffic.failed()[:5]

    # It is there again, and so are they: the operator has not even to be restarted.
    api.apply(yaml.safe_load(CRDS.read_text()))
    api.until_served(carpool.CRD)
    api.apply(policy("by-hand", "resnet", **STILL), namespace=namespace)
    status_until(api, namespace, lambda status: says(status, "Ready", "Ready") and acknowledged(status, 2))
    (operator,) = pods(api, carpool.SYSTEM, **{"app.kubernetes.io/component": "operator"})
    assert [each["restartCount"] for each in operator["status"]["containerStatuses"]] == [0]
    assert set(traffic.outcomes()) == {"200"}, traffic.failed()[:5]

    api.delete("namespaces", namespace)
    api.until_gone("namespaces", "", name=namespace, timeout=120)
    carpool.uninstall(cluster, api)
    api.delete("namespaces", carpool.SYSTEM)
    api.until_gone("namespaces", "", name=carpool.SYSTEM)
