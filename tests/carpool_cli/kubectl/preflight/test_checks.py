"""The checks on plain objects; tests/cluster/test_preflight.py has them on a real API server."""

from __future__ import annotations

import json

import pytest

from carpool_cli.kubectl.preflight import checks
from carpool_cli.kubectl.preflight.dry_run import Dry, sample
from carpool_cli.kubectl.preflight.findings import Effect
from carpool_cli.kubectl.preflight.scene import Around, Subject
from carpool_operator.workloads.registry import BY_NAME, owner

PORTS = checks.Ports(model=9000, data=14080, admin=14090)
PROBE = {"httpGet": {"path": "/", "port": "http"}}
NAMESPACE = {"metadata": {"name": "shop"}}


def subject(kind="Deployment", **metadata):
    return Subject(BY_NAME[kind], {"metadata": {"name": "web", "namespace": "shop", **metadata}})


def pod(**changes):
    """One with a sidecar, as the server would store it."""
    sidecar = {"name": "carpool"}
    server = {"name": "server", "ports": [{"name": "http", "containerPort": 14080}, {"containerPort": 9000}]}
    status = {"version": "1", "container": "server", "port": 9000, "dataPort": 14080, "adminPort": 14090, "notes": []}
    annotations = {"carpool.dev/status": json.dumps(status), "carpool.dev/target": "Deployment/web"}
    metadata = {"namespace": "shop", "labels": {"app": "web"}, "annotations": annotations}
    return {"metadata": metadata, "spec": {"containers": [server], "initContainers": [sidecar], **changes}}


def plain():
    return {
        "metadata": {"labels": {"app": "web"}},
        "spec": {"containers": [{"name": "server", "readinessProbe": PROBE}]},
    }


def around(namespace=NAMESPACE, services=(), policies=(), autoscalers=()):
    return Around(namespace, list(services), list(policies), list(autoscalers))


def found(near, of=None):
    return [each.code for each in checks.all_of(of or subject(), Dry(plain()), Dry(pod()), near)]


def test_ports_are_those_that_the_injector_wrote_on_the_pod():
    assert checks.ports(pod()) == PORTS
    assert checks.ports(plain()) is None


def admits(*entries, **spec):
    rule = {"ports": list(entries)} if entries else {}
    spec = {"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [rule], **spec}
    return {"metadata": {"name": "p"}, "spec": spec}


@pytest.mark.parametrize(
    ("policy", "breaks"),
    [
        (admits({"port": 9000}), True),
        (admits({"port": 9000, "protocol": "TCP"}, {"port": 443}), True),
        (admits({"port": 8000, "endPort": 9999}), True),
        (admits({"port": 8000, "endPort": 16000}), False),
        (admits({"port": 9000}, {"port": 14080}), False),
        (admits({"port": "http"}), False),
        (admits({}), False),
        (admits(), False),
        (admits({"port": 443}), False),
        (admits({"port": 9000, "protocol": "UDP"}), False),
        (admits({"port": 9000}, policyTypes=["Egress"]), False),
        (admits({"port": 9000}, podSelector={"matchLabels": {"app": "other"}}), False),
        (admits({"port": 9000}, podSelector={"matchExpressions": [{"key": "app", "operator": "Exists"}]}), True),
        (admits({"port": 9000}, podSelector={}), True),
    ],
)
def test_a_network_policy_is_compared_by_number(policy, breaks):
    assert found(around(policies=[policy])) == (["NetworkPolicyByNumber"] if breaks else [])


def scales(metric, name="web", kind="Deployment"):
    return {"metadata": {"name": "h"}, "spec": {"scaleTargetRef": {"kind": kind, "name": name}, "metrics": [metric]}}


PERCENT = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 60}}}


def test_an_autoscaler_by_percentage_counts_one_container_afterwards():
    (finding,) = checks.autoscalers(subject(), pod(), around(autoscalers=[scales(PERCENT)]))

    assert finding.effect is Effect.BREAKS
    change = json.loads(finding.fix.partition("-p '")[2].rstrip("'"))
    value = change[0]["value"]
    assert (value["type"], value["containerResource"]["container"]) == ("ContainerResource", "server")
    assert value["containerResource"]["target"] == PERCENT["resource"]["target"]


def test_other_autoscalers_are_fine():
    absolute = {
        "type": "Resource",
        "resource": {"name": "cpu", "target": {"type": "AverageValue", "averageValue": "1"}},
    }
    others = [scales(absolute), scales(PERCENT, name="other"), scales({"type": "Pods", "pods": {}})]

    assert found(around(autoscalers=others)) == []
    of = subject("InferenceService")
    assert [each.code for each in checks.autoscalers(of, pod(), around(autoscalers=[scales(PERCENT, "web-predictor")]))]


def test_what_the_server_says():
    refused = Dry(None, "exceeded quota: q")
    assert [each.code for each in checks.outcome(subject(), refused, refused)] == ["RefusedAlready"]
    (finding,) = checks.outcome(subject(), Dry(plain()), refused)
    assert (finding.code, finding.effect) == ("Refused", Effect.BREAKS)
    assert '"carpool.dev/sidecar-cpu":"100m"' in finding.fix
    (finding,) = checks.outcome(subject(), Dry(plain()), Dry(plain()))
    assert (finding.code, finding.effect) == ("NotAsked", Effect.NO_BATCHING)
    skipped = plain()
    skipped["metadata"]["annotations"] = {"carpool.dev/skipped": "NoPort: container server names no port"}
    (finding,) = checks.outcome(subject(), Dry(plain()), Dry(skipped))
    assert finding.code == "NoPort"
    assert "carpool.dev/port" in finding.fix


def test_a_reason_of_a_newer_injector_is_passed_on():
    skipped = plain()
    skipped["metadata"]["annotations"] = {"carpool.dev/skipped": "Brandnew: because"}

    (finding,) = checks.outcome(subject(), Dry(plain()), Dry(skipped))

    assert (finding.code, finding.message) == ("Brandnew", "its pods would get no sidecar: because")


def test_a_mesh_is_told_of_only_where_it_stands_before_the_whole_pod():
    """From one inside the pod the injector excludes the admin port."""
    istio = {"metadata": {"name": "shop", "labels": {"istio-injection": "enabled"}}}
    assert found(around(istio)) == []
    ambient = {"metadata": {"name": "shop", "labels": {"istio.io/dataplane-mode": "ambient"}}}
    assert found(around(ambient)) == ["Mesh"]


def test_a_pod_without_room_gets_the_command_that_asks_for_less():
    skipped = plain()
    skipped["metadata"]["annotations"] = {"carpool.dev/skipped": "NoRoom: ResourceQuota q has 1Mi left"}
    (finding,) = checks.outcome(subject(), Dry(plain()), Dry(skipped))
    assert (finding.code, finding.effect) == ("NoRoom", Effect.NO_BATCHING)
    assert finding.fix.startswith("kubectl -n shop patch deployment/web -p ")


def test_what_knative_runs():
    of = subject("InferenceService", annotations={"serving.kserve.io/deploymentMode": "Serverless"})
    (finding,) = checks.knative(of)
    assert finding.code == "Knative"
    assert finding.fix.endswith("serving.kserve.io/deploymentMode=RawDeployment --overwrite")
    assert list(checks.knative(subject("InferenceService"))) == []


@pytest.mark.parametrize("kind", BY_NAME)
def test_a_sample_is_one_more_pod_of_the_workload(kind):
    running = {**plain(), "spec": {**plain()["spec"], "nodeName": "n1", "hostname": "web-0"}}
    before = json.dumps(running)

    made = sample(subject(kind), running, inject=True)

    assert owner(made) == (kind, "web")
    assert made["metadata"]["annotations"] == {"carpool.dev/inject": "true"}
    assert not made["spec"].keys() & {"nodeName", "hostname"}
    assert json.dumps(running) == before
