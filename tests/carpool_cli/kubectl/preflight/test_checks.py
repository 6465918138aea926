"""The checks on plain objects; tests/cluster/test_preflight.py has them on a real API server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from model_in_shop import all_of, around, codes, plain, pod, sent, subject, template

from carpool_cli.kubectl.preflight import checks
from carpool_cli.kubectl.preflight.dry_run import Dry, sample
from carpool_cli.manifest_checks.autoscalers import autoscalers
from carpool_cli.manifest_checks.findings import Effect
from carpool_cli.manifest_checks.objects import Ports, ports
from carpool_operator.workloads.registry import BY_NAME, owner

PORTS = Ports(model=9000, data=14080, admin=14090)


V1 = {"apiVersion": "inference.networking.k8s.io/v1", "metadata": {"name": "pool"}}
BEFORE = {"apiVersion": "inference.networking.x-k8s.io/v1alpha2", "metadata": {"name": "pool"}}


@pytest.mark.parametrize(
    ("pool", "found"),
    [
        ({**V1, "spec": {"selector": {"matchLabels": {"app": "web"}}, "targetPorts": [{"number": 9000}]}}, True),
        ({**BEFORE, "spec": {"selector": {"app": "web"}, "targetPortNumber": 9000}}, True),
        ({**V1, "spec": {"selector": {"matchLabels": {"app": "web"}}, "targetPorts": [{"number": 14080}]}}, False),
        ({**V1, "spec": {"selector": {"matchLabels": {"app": "other"}}, "targetPorts": [{"number": 9000}]}}, False),
        ({**BEFORE, "spec": {"selector": {}, "targetPortNumber": 9000}}, False),
    ],
)
def test_a_pool_of_a_gateway_leads_past_the_sidecar_by_number(pool, found):
    told = all_of(around(pools=[pool]))
    assert [each.code for each in told] == (["InferencePoolByNumber"] if found else [])
    assert all('"carpool.dev/capture":"true"' in each.fix and pool["apiVersion"][:20] in each.fix for each in told)


def test_ports_are_those_that_the_injector_wrote_on_the_pod():
    assert ports(pod()) == PORTS
    assert ports(plain()) is None


def scales(metric, name="web", kind="Deployment"):
    return {"metadata": {"name": "h"}, "spec": {"scaleTargetRef": {"kind": kind, "name": name}, "metrics": [metric]}}


PERCENT = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 60}}}


def test_an_autoscaler_by_percentage_counts_one_container_afterwards():
    (finding,) = autoscalers(subject(), pod(), around(autoscalers=[scales(PERCENT)]))

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

    assert codes(around(autoscalers=others)) == []
    of = subject("InferenceService")
    assert [each.code for each in autoscalers(of, pod(), around(autoscalers=[scales(PERCENT, "web-predictor")]))]


EXAMPLE = Path(__file__).parents[4] / "examples/autoscaling/keda-metrics-api.yaml"


def headless(*ports):
    return {
        "metadata": {"name": "h"},
        "spec": {"clusterIP": "None", "selector": {"app": "web"}, "ports": list(ports)},
    }


def test_the_headless_service_of_the_example_is_for_the_sidecar():
    example, _ = yaml.safe_load_all(EXAMPLE.read_text())
    example["spec"]["selector"] = {"app": "web"}
    assert codes(around(services=[example])) == []


@pytest.mark.parametrize(
    ("ports", "past"),
    [
        ([{"port": 14090}], False),
        ([{"port": 80, "targetPort": 14090}], False),
        ([{"port": 14080}, {"port": 14090}], False),
        ([{"port": 14080, "targetPort": "http"}], False),
        ([], True),
        ([{"port": 9000}, {"port": 14090}], True),
        ([{"port": 9000, "targetPort": "http"}], True),
        ([{"port": 14080, "targetPort": 9000}], True),
    ],
)
def test_callers_of_a_headless_service_choose_the_port(ports, past):
    assert codes(around(services=[headless(*ports)])) == (["HeadlessService"] if past else [])


def test_what_the_server_says():
    refused = Dry(None, "maximum memory usage per Container is 64Mi")
    assert [each.code for each in checks.outcome(subject(), refused, refused, around())] == ["RefusedAlready"]
    (finding,) = checks.outcome(subject(), Dry(plain()), refused, around())
    assert (finding.code, finding.effect) == ("Refused", Effect.BREAKS)
    assert '"carpool.dev/sidecar-cpu":"100m"' in finding.fix
    (finding,) = checks.outcome(subject(), Dry(plain()), Dry(plain()), around())
    assert (finding.code, finding.effect) == ("NotAsked", Effect.NO_BATCHING)
    skipped = plain()
    skipped["metadata"]["annotations"] = {"carpool.dev/skipped": "NoPort: container server names no port"}
    (finding,) = checks.outcome(subject(), Dry(plain()), Dry(skipped), around())
    assert finding.code == "NoPort"
    assert "carpool.dev/port" in finding.fix


def test_a_reason_of_a_newer_injector_is_passed_on():
    skipped = plain()
    skipped["metadata"]["annotations"] = {"carpool.dev/skipped": "Brandnew: because"}

    (finding,) = checks.outcome(subject(), Dry(plain()), Dry(skipped), around())

    assert (finding.code, finding.message) == ("Brandnew", "its pods would get no sidecar: because")


FULL = 'pods "web-preflight" is forbidden: exceeded quota: q, requested: requests.nvidia.com/gpu=1'


def refused_for_quota():
    """Both dry runs, where running pods use up the quota."""
    return (Dry(None, FULL, sent(template(), inject=each)) for each in (False, True))


def test_a_used_up_quota_stops_the_dry_run_and_no_other_check():
    by_number = {"metadata": {"name": "s"}, "spec": {"selector": {"app": "web"}, "ports": [{"port": 9000}]}}
    closed = {"metadata": {"name": "p"}, "spec": {"podSelector": {}, "ingress": [{"ports": [{"port": 9000}]}]}}
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"requests.nvidia.com/gpu": "4"}}}
    near = around(services=[by_number], policies=[closed], autoscalers=[scales(PERCENT)], quotas=[quota])

    found = checks.all_of(subject(), *refused_for_quota(), near)

    assert [each.code for each in found] == [
        "NoRoomForDryRun", "NetworkPolicyByNumber", "ServiceByNumber", "AdminPortClosed", "HPAOnPercentage",
    ]  # fmt: skip
    assert found[0].effect is Effect.NOTE
    assert FULL in found[0].message


def test_other_checks_follow_a_refusal_too():
    ran, asked = (sent(template(), inject=each) for each in (False, True))

    found = checks.all_of(
        subject(), Dry(ran, "", ran), Dry(None, "denied", asked), around(autoscalers=[scales(PERCENT)])
    )

    assert [each.code for each in found] == ["Refused", "HPAOnPercentage"]


def test_what_could_not_be_read_is_said():
    (finding,) = checks.unread(subject(), around(unread=["NetworkPolicies of other namespaces"]))
    assert (finding.code, finding.effect) == ("NotLookedAt", Effect.NOTE)
    assert "NetworkPolicies of other namespaces" in finding.message
    assert codes(around(unread=["Servers"])) == ["NotLookedAt"]


def test_a_pod_without_room_gets_the_command_that_asks_for_less():
    skipped = plain()
    skipped["metadata"]["annotations"] = {"carpool.dev/skipped": "NoRoom: ResourceQuota q has 1Mi left"}
    (finding,) = checks.outcome(subject(), Dry(plain()), Dry(skipped), around())
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
