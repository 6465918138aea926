from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from things import POD, as_kept, deployment, pod

from carpool_operator.api.model import Missed
from carpool_operator.cluster.kube import ApiError
from carpool_operator.cluster.objects import RawPod
from carpool_operator.reporting.inspection import AGAIN, LONGEST, SERVICES, Inspector
from carpool_operator.workloads.registry import BY_NAME
from carpool_operator.workloads.registry import DEFAULT as DEPLOYMENTS


@pytest.fixture
def inspector(writer):
    return Inspector(writer)


def workload(replicas):
    return as_kept(DEPLOYMENTS, deployment(replicas=replicas))


async def test_pods_without_a_sidecar_are_named(api, inspector):
    api.put(*POD, pod("web-1"))
    api.put(*POD, pod("web-2", injected=False))
    api.put(*POD, pod("other-1", target="other", injected=False))
    leaving = pod("web-3", injected=False)
    leaving["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    api.put(*POD, leaving)
    ended = pod("web-4", injected=False)
    ended["status"]["phase"] = "Failed"
    api.put(*POD, ended)

    assert await inspector.missed(workload(2), [as_kept(RawPod, pod("web-1"))], 0.0) == (Missed("web-2"),)


async def test_the_reason_a_pod_was_skipped_is_reported_up_to_a_limit_of_length(api, inspector):
    skipped = pod("web-1", injected=False)
    skipped["metadata"]["annotations"]["carpool.dev/skipped"] = "NoPort: " + "x" * 10_000
    api.put(*POD, skipped)

    (missed,) = await inspector.missed(workload(1), [], 0.0)

    assert missed == Missed("web-1", "NoPort: " + "x" * (LONGEST - 8))


@pytest.mark.parametrize("members", ["containers", "initContainers"])
async def test_a_sidecar_that_tunes_itself_is_reported_and_no_restart(api, inspector, members):
    own = pod("web-1", injected=False)
    own["spec"] = {members: [{"name": "carpool"}]}
    api.put(*POD, own)

    (missed,) = await inspector.missed(workload(1), [], 0.0)

    assert missed.skipped.startswith("SelfTuned: ")
    assert (
        "kubectl -n ns get deployment/web -o yaml | carpool inject --undo -f - | kubectl replace -f -" in missed.skipped
    )


async def test_pods_that_nobody_wanted_a_sidecar_for_are_not_missed(api, inspector):
    api.put(*POD, pod("web-1", injected=False))
    unasked = as_kept(DEPLOYMENTS, deployment(replicas=1, inject=None))

    assert await inspector.missed(unasked, [], 0.0) == ()
    assert api.log == []


async def test_pods_that_a_rollout_is_about_to_replace_are_not_missed(api, inspector):
    """A model that loads for minutes: until then the old pods serve, and nobody is to restart the rollout."""
    status = {"observedGeneration": 7, "conditions": [{"type": "PredictorReady", "status": "True"}]}
    asked = {"predictor": {"minReplicas": 2, "annotations": {"carpool.dev/inject": "true"}}}
    web = as_kept(BY_NAME["InferenceService"], {"metadata": {"name": "web"}, "spec": asked, "status": status})
    old = pod("web-predictor-1", injected=False)
    old["metadata"]["labels"] |= {"serving.kserve.io/inferenceservice": "web", "component": "predictor"}
    api.put(*POD, old)
    made = deployment("web-predictor", replicas=2)
    made["status"]["updatedReplicas"] = 1
    api.put("apps/v1", "deployments", made)

    assert await inspector.missed(web, [], 0.0) == ()

    made["status"]["updatedReplicas"] = 2
    api.put("apps/v1", "deployments", made)
    assert await inspector.missed(web, [], AGAIN) == (Missed("web-predictor-1"),)


async def test_nobody_is_asked_while_the_numbers_match(api, inspector):
    one = as_kept(RawPod, pod())

    assert await inspector.missed(workload(1), [one], 0.0) == ()
    assert api.log == []


async def test_it_asks_again_only_after_a_while_or_when_pods_were_lost(api, inspector):
    api.put(*POD, pod("web-2", injected=False))
    one = as_kept(RawPod, pod())
    for now in range(0, 60, 2):
        assert await inspector.missed(workload(2), [one], float(now)) == (Missed("web-2"),)
    assert len(api.log) == 60 / AGAIN

    api.remove(*POD, "web-2")
    assert await inspector.missed(workload(2), [one], 100.0) == ()


async def test_a_server_that_fails_is_not_asked_at_once_again(api, inspector):
    api.fail("GET", 500)
    with pytest.raises(ApiError):
        await inspector.missed(workload(1), [], 0.0)

    assert await inspector.missed(workload(1), [], 2.0) == ()
    assert len(api.log) == 1


def serving(api, target_port):
    injected = pod()
    injected["metadata"]["annotations"]["carpool.dev/status"] = json.dumps({"container": "server", "port": 9000})
    injected["spec"] = {"containers": [{"name": "server", "ports": [{"containerPort": 14080, "name": "http"}]}]}
    api.put(*POD, injected)
    api.put(
        "v1",
        "services",
        {
            "metadata": {"name": "web"},
            "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": target_port}]},
        },
    )
    return as_kept(RawPod, injected)


async def test_a_service_that_bypasses_the_sidecar_is_reported_with_the_command(api, inspector):
    one = serving(api, 9000)

    await inspector.look_at_services(workload(1), [one], 0.0)

    (event,) = inspector.bypassed(one.target)

    assert event.reason == "ServiceBypassed"
    assert "kubectl -n ns patch service web" in event.message


async def test_services_are_looked_at_seldom_and_when_pods_change(api, inspector):
    one = serving(api, "http")
    await inspector.look_at_services(workload(1), [], 0.0)
    assert api.log == []
    for now in range(0, int(SERVICES), 2):
        await inspector.look_at_services(workload(1), [one], float(now))
    assert inspector.bypassed(one.target) == ()
    assert len(api.log) == 2

    rolled = as_kept(RawPod, {**pod(), "metadata": {**pod()["metadata"], "labels": {"pod-template-hash": "h2"}}})
    await inspector.look_at_services(workload(1), [rolled], 10.0)
    assert len(api.log) == 4
    inspector.forget(set())
    await inspector.look_at_services(workload(1), [rolled], 12.0)
    assert len(api.log) == 6


async def test_a_bypass_is_reported_until_another_check_finds_it_corrected(api, inspector):
    one = serving(api, 9000)
    target = one.target
    await inspector.look_at_services(workload(1), [one], 0.0)
    told = inspector.bypassed(target)
    await inspector.look_at_services(workload(1), [replace(one, ready=False)], AGAIN)
    assert inspector.bypassed(target) == told
    api.fail("GET", 500)
    with pytest.raises(ApiError):
        await inspector.look_at_services(workload(1), [one], AGAIN)
    assert inspector.bypassed(target) == told
    serving(api, "http")
    await inspector.look_at_services(workload(1), [one], AGAIN + 2)
    assert inspector.bypassed(target) == told
    await inspector.look_at_services(workload(1), [one], 2 * AGAIN)
    assert inspector.bypassed(target) == ()


async def test_where_no_pod_has_a_sidecar_nothing_leads_past_it(api, inspector):
    one = serving(api, 9000)
    await inspector.look_at_services(workload(1), [one], 0.0)
    await inspector.look_at_services(workload(1), [replace(one, deleting=True)], 2.0)
    assert inspector.bypassed(one.target) == ()


# ------------------------------------------------------------------------------------------- pods that are refused

QUOTA = 'create Pod web-0 in StatefulSet web failed: pods "web-0" is forbidden: exceeded quota: team'


def put_event(api, reason, minute, kind="StatefulSet", name="web", message=QUOTA, field="lastTimestamp"):
    at = f"2026-11-21T12:{minute:02}:00Z"
    body = {
        "metadata": {"name": f"{kind}.{name}.{reason}.{minute}".lower()},
        "involvedObject": {"kind": kind, "name": name}, "reason": reason, "message": message,
    }  # fmt: skip
    body |= {"series": {"lastObservedTime": at}} if field == "series" else {field: at}
    api.put("v1", "events", body)


def of_kind(name="StatefulSet", replicas=2, **changes):
    """A workload of some kind, as it is kept."""
    kept = workload(replicas)
    return replace(kept, target=kept.target._replace(kind=name), **changes)


async def test_the_message_of_an_event_about_refused_pods_is_reported(api, inspector):
    put_event(api, "FailedCreate", 1)
    put_event(api, "FailedCreate", 1, name="web-2", message="of another")

    assert await inspector.refused(of_kind(), [], 0.0) == QUOTA


@pytest.mark.parametrize("field", ["lastTimestamp", "eventTime", "series"])
async def test_the_last_event_counts_however_its_time_is_written(api, inspector, field):
    put_event(api, "FailedCreate", 5, message="before", field=field)
    put_event(api, "SuccessfulCreate", 7, message="made", field=field)
    assert await inspector.refused(of_kind(), [], 0.0) == ""

    put_event(api, "FailedCreate", 9, message="again", field=field)
    assert await inspector.refused(of_kind(), [], AGAIN) == "again"


async def test_events_of_other_things_say_nothing_of_pods(api, inspector):
    put_event(api, "RecreatingFailedPod", 9)
    put_event(api, "FailedCreate", 9, kind="DaemonSet")

    assert await inspector.refused(of_kind(), [], 0.0) == ""


@pytest.mark.parametrize(
    ("kind", "maker", "name", "reason"),
    [
        ("DaemonSet", "DaemonSet", "web", "FailedCreate"),
        ("LeaderWorkerSet", "StatefulSet", "web", "FailedCreate"),
        ("InferenceService", "ReplicaSet", "web-predictor-5d8f", "FailedCreate"),
        ("RayService", "RayCluster", "web-abc12", "FailedToCreateWorkerPod"),
    ],
)
async def test_each_kind_knows_who_makes_its_pods(api, inspector, kind, maker, name, reason):
    put_event(api, reason, 1, kind=maker, name=name)
    put_event(api, reason, 2, kind=maker, name="other", message="of another")

    assert await inspector.refused(of_kind(kind), [], 0.0) == QUOTA


async def test_a_workload_that_says_it_itself_costs_no_look(api, inspector):
    assert await inspector.refused(of_kind("Deployment", refused="no room"), [], 0.0) == "no room"
    assert api.log == []


async def test_events_are_listed_while_pods_lack_and_not_without_pause(api, inspector):
    both = [as_kept(RawPod, pod("web-1")), as_kept(RawPod, pod("web-2"))]
    put_event(api, "FailedCreate", 1)
    assert await inspector.refused(of_kind(), both, 0.0) == ""
    assert api.log == []
    for now in range(0, 60, 2):
        assert await inspector.refused(of_kind(), both[:1], float(now)) == QUOTA
    assert len(api.log) == 60 / AGAIN


def test_a_kind_that_has_no_maker_reads_refusals_of_its_own_condition():
    assert {kind.name for kind in BY_NAME.values() if kind.maker is None} == {"Deployment", "ReplicaSet", "Rollout"}
