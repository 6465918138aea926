from __future__ import annotations

import json
import shlex

from fleets import EPOCH, RESNET, World, pod_of, spec, workload_of
from msgspec.structs import replace

from carpool.batching.counters import Stats
from carpool.policy.durations import Duration
from carpool.policy.spec import SLO, Latency
from carpool_operator.api.model import Event, Missed, Target
from carpool_operator.api.spec import MAX_SELECTED, PolicySpec, TargetRef, TargetSelector
from carpool_operator.api.status import ConditionStatus, ConditionType
from carpool_operator.reporting.conditions import (
    FALSE,
    GRACE,
    TRUE,
    UNKNOWN,
    Finding,
    asks,
    conditions,
    names,
    ready,
    worst,
)
from carpool_operator.reporting.conditions import accepted as accepted_of
from carpool_operator.tuning.assignment import targets_of


def settle(world, steps=4):
    for _ in range(steps):
        world.step(world.now + 2.0)


def programmed(world):
    said = world.condition("Programmed")
    return said["status"], said["reason"], said["message"]


def test_what_asks_for_sidecars():
    assert asks(workload_of(inject="true"))
    assert asks(workload_of(inject="deployment"))
    assert not asks(workload_of(inject="false"))
    assert not asks(workload_of(inject=None))


def test_how_to_get_sidecars_depends_on_what_there_is():
    world = World(pods=0)
    world.workload = workload_of(inject="false")
    settle(world)
    assert "take that annotation out" in programmed(world)[2]
    world.workload = workload_of(inject=None, annotations={"carpool.dev/slo-p99": "50ms"})
    settle(world)
    assert "kubectl -n vision rollout restart deployment/resnet" in programmed(world)[2], "the webhook was away"
    for kind, how in (
        ("StatefulSet", "annotate statefulset/resnet carpool.dev/inject=true"),
        ("Rollout", "annotate rollout.argoproj.io/resnet carpool.dev/inject=true"),
        ("ReplicaSet", """patch replicaset/resnet -p '{"spec":{"template":{"metadata":{"annotations":{"""),
        ("RayService", "edit rayservice.ray.io/resnet"),
    ):
        world.workload = workload_of(Target("vision", kind, "resnet"), inject=None)
        settle(world)
        assert f"kubectl -n vision {how}" in programmed(world)[2]


def test_a_selector_says_when_it_selects_nothing_or_too_much():
    world = World(pods=0)
    wanted = PolicySpec(slo=spec().slo, target_selector=TargetSelector(match_labels={"team": "vision"})).validate()
    world.edit(wanted)
    accepted = conditions_of(world, selected=())
    assert (accepted.status, accepted.reason) == ("False", "TargetNotFound")
    assert accepted.message.endswith("(kubectl -n vision get deployments --show-labels)")
    many = tuple(Target("vision", "Deployment", f"m{number:03}") for number in range(MAX_SELECTED + 1))
    accepted = conditions_of(world, selected=many)
    assert (accepted.status, accepted.reason) == ("False", "TooManyTargets")


def conditions_of(world, selected):
    view = replace(world.view(0.0, {}), selected=selected, owners=dict.fromkeys(selected, world.policy))
    return accepted_of(world.policy, targets_of("vision", world.policy.spec, selected), view)


def test_a_replica_set_s_new_pods_are_made_by_hand():
    world = World(pods=2)
    world.workload = workload_of(Target("vision", "ReplicaSet", "resnet"))
    world.missed = (Missed("resnet-8"),)
    settle(world)
    assert programmed(world)[2].endswith("kubectl -n vision delete pods --selector='app=resnet'")


def test_pods_that_were_missed_are_named_with_the_command():
    world = World(pods=2)
    settle(world)
    world.missed = (Missed("resnet-8"), Missed("resnet-9"))
    settle(world)
    status, reason, message = programmed(world)
    assert (status, reason) == ("False", "Missed")
    assert "resnet-8, resnet-9" in message
    assert "kubectl -n vision rollout restart deployment/resnet" in message
    assert world.status["targets"][0]["missed"] == ["resnet-8", "resnet-9"]
    assert world.reasons().count("Missed") == 1


def test_missed_pods_that_a_restart_would_not_reach_are_named_with_what_does():
    world = World(pods=2)
    settle(world)
    world.workload = workload_of(held_back="its rollout is paused: resume it")
    world.missed = (Missed("resnet-8"),)
    settle(world)
    assert programmed(world) == (
        "False",
        "Missed",
        "resnet-8 of Deployment resnet started without a sidecar: its rollout is paused: resume it",
    )


def test_skipped_pods_are_named_with_the_reason_and_without_advice_to_restart():
    world = World(pods=1)
    settle(world)
    why = "HostNetwork: the pod uses the node's network: set hostNetwork: false"
    world.missed = (Missed("resnet-8"), Missed("resnet-9", why))
    settle(world)
    assert programmed(world) == ("False", "Skipped", f"resnet-9 of Deployment resnet can't have a sidecar: {why}")
    assert world.status["targets"][0]["missed"] == ["resnet-8", "resnet-9"]


def test_a_pod_that_refuses_is_named_with_its_reason():
    world = World(pods=2)
    settle(world)
    world.pods[1].takes = False
    world.pods[1].restart(world.now, world.stats[1], None)
    settle(world)
    status, reason, message = programmed(world)
    assert (status, reason) == ("False", "PushRefused")
    assert "resnet-1" in message
    assert "403: not for me" in message
    assert "kubectl -n vision delete pod resnet-1" in message
    writes = len(world.writes)
    settle(world, 20)
    assert len(world.writes) == writes, "repeating it is no news"
    world.pods[1].takes = True
    world.run(0, 400)
    assert programmed(world)[0] == "True"


def test_of_several_pods_that_refuse_all_are_restarted():
    world = World(pods=3)
    settle(world)
    for index in (1, 2):
        world.pods[index].takes = False
        world.pods[index].restart(world.now, world.stats[index], None)
    settle(world)
    _, reason, message = programmed(world)
    assert reason == "PushRefused"
    assert "resnet-1, resnet-2 of" in message
    assert message.endswith("from its ConfigMap: kubectl -n vision rollout restart deployment/resnet")


def test_refusals_of_an_earlier_change_and_of_pods_that_start_are_ignored():
    world = World(pods=2)
    settle(world)
    starting = world.pods[1]
    starting.takes = False
    world.edit(replace(world.policy.spec, slo=SLO(latency=Latency(p99=Duration(0.08)))))
    world.step(world.now + 2.0)
    assert programmed(world)[0] == "True", "it has not been told of this one yet"
    starting.pod = replace(starting.pod, ready=False)
    world.step(world.now + 2.0)
    assert programmed(world)[0] == "True", "it reads its ConfigMap when it starts"
    starting.pod = replace(starting.pod, ready=True)
    world.step(world.now + 2.0)
    assert programmed(world)[1] == "PushRefused"


def test_a_pod_that_cannot_use_its_configmap_is_named():
    world = World(pods=2)
    settle(world)
    world.pods[1].restart(world.now, world.stats[1], None)
    world.pods[1].take = lambda change: None
    world.pods[1].spoil = lambda report: replace(report, change_error="wrong signature")
    settle(world)
    _, reason, message = programmed(world)
    assert reason == "ChangeRefused"
    assert "wrong signature" in message


def test_a_pod_has_time_to_follow():
    world = World(pods=2)
    settle(world)
    world.pods[1].take = lambda change: None
    world.edit(world.policy.spec)
    world.pods[1].change = replace(world.pods[1].change, generation=1)
    world.step(world.now + 2.0)
    assert programmed(world)[0] == "True" or world.now - 2.0 > GRACE
    for _ in range(20):
        world.step(world.now + 2.0)
    status, reason, message = programmed(world)
    assert (status, reason) == ("False", "Pending")
    assert "resnet-1" in message
    assert "resnet-0" not in message


def test_a_pod_that_does_not_follow_is_reported_with_the_reason_it_cannot_be_read():
    world = World(pods=3)
    settle(world)
    world.pods[1].answers = False
    world.pods[1].take = lambda change: None
    world.pods[1].change = replace(world.pods[1].change, generation=1)
    world.edit(replace(world.policy.spec, slo=SLO(latency=Latency(p99=Duration(0.08)))))
    settle(world, 25)
    status, reason, message = programmed(world)
    assert (status, reason) == ("False", "Pending")
    assert message.startswith("resnet-1 of Deployment resnet did not say that the newest configuration runs (resnet-1")
    assert message.endswith("): kubectl -n vision logs resnet-1 -c carpool")


def test_metrics_name_the_pod_and_the_error():
    world = World(pods=1)
    settle(world)
    world.pods[0].answers = False
    settle(world, 5)
    assert world.condition("MetricsAvailable")["status"] == "True", "not at the first lost answer"
    settle(world, 20)
    said = world.condition("MetricsAvailable")
    assert (said["status"], said["reason"]) == ("False", "MetricsStale")
    assert "resnet-0: connection refused" in said["message"]
    assert "kubectl -n vision get pods" in said["message"]


def test_token_streams_that_are_left_out_are_named():
    world = World(pods=2)
    settle(world)
    assert "message" not in world.condition("MetricsAvailable") or not world.condition("MetricsAvailable")["message"]
    world.pods[1].note = "there is no carpool_time_per_output_token_seconds_bucket: metric relabeling drops it"
    settle(world, 5)
    said = world.condition("MetricsAvailable")
    assert (said["status"], said["reason"]) == ("True", "Available")
    assert "token streams are left out, of resnet-1 at least: there is no carpool_time_per" in said["message"]


def test_pods_that_are_not_ready_are_no_lost_metrics():
    world = World(pods=1)
    settle(world)
    world.pods[0].pod = pod_of(0, ready=False)
    settle(world, 30)
    said = world.condition("MetricsAvailable")
    assert (said["status"], said["reason"]) == ("Unknown", "NoPodsReady")


def test_the_slo_is_missed_and_kept_again_with_an_event_each():
    world = World(pods=2)
    world.run(600, 20)
    assert world.condition("SLOMet")["status"] == "True"
    world.run(6_000, 10, seed=2)
    said = world.condition("SLOMet")
    assert (said["status"], said["reason"]) == ("False", "Missed")
    assert said["message"].endswith("kubectl carpool explain resnet -n vision")
    assert world.condition("Ready")["status"] == "True", "readiness is of the machinery"
    assert "Missed" in world.reasons()


def strict(seconds):
    return SLO(latency=Latency(p99=Duration(seconds)))


def test_misses_counted_by_the_old_slo_do_not_count_for_the_new_one():
    world = World(spec(0.004), pods=2)
    world.run(200, 60)
    assert world.condition("SLOMet")["status"] == "False"
    world.edit(replace(world.policy.spec, slo=strict(0.5)))
    at = world.now + 2.0  # the interval before the pods get the next document
    late = [replace(own.models[""], misses={"late": own.models[""].misses["late"] + 200}) for own in world.stats]
    world.step(at, [Stats(at, models={"": model}) for model in late])
    assert not any(each.error for each in world.controller._steerings[RESNET].evidence.pods.values())
    assert world.condition("SLOMet")["status"] == "Unknown"
    world.run(200, 60)
    assert world.condition("SLOMet")["status"] == "True"


def test_replicas_are_no_advice_where_one_request_alone_takes_longer_than_the_slo():
    world = World(spec(0.004), pods=2)
    world.run(200, 60)
    said = world.condition("SLOMet")
    assert (said["status"], said["reason"]) == ("False", "Missed")
    advice = "one request alone takes 5.5ms, longer than the SLO. More replicas do not help there: raise slo.latency"
    assert advice in said["message"]
    assert "Add replicas" not in said["message"]


def test_a_policy_that_lost_its_targets_has_no_verdict_on_its_slo():
    world = World(pods=2)
    world.run(200, 60)
    assert world.condition("SLOMet")["status"] == "True"
    world.others = [replace(world.policy, name="older", uid="uid-older", created=world.policy.created - 1)]
    settle(world)
    assert world.condition("Accepted")["reason"] == "Conflicted"
    assert (world.condition("SLOMet")["status"], world.condition("SLOMet")["reason"]) == ("Unknown", "NoTargets")


def test_ready_is_all_but_the_slo():
    good = Finding(TRUE, "Good")
    found = dict.fromkeys(ConditionType, good) | {ConditionType.SLO_MET: Finding(FALSE, "Missed")}
    assert ready(found, paused=False) == Finding(TRUE, "Ready")
    assert ready(found, paused=True).reason == "Paused"
    found[ConditionType.PROGRAMMED] = Finding(UNKNOWN, "Pending", "wait")
    assert ready(found, paused=False) == Finding(FALSE, "Pending", "wait")


def test_of_several_targets_the_worst_speaks():
    good, bad = Finding(TRUE, "Good"), Finding(FALSE, "Missed", "one")
    assert worst([good, Finding(UNKNOWN, "Pending"), bad, Finding(FALSE, "Missed", "two")], good).message == "one; two"
    assert worst([good, Finding(UNKNOWN, "Pending")], good).reason == "Pending"
    assert worst([], bad) == bad
    past = Finding(TRUE, "ServiceBypassed", "one")
    assert worst([good, past, past._replace(message="two")], good).message == "one; two"
    assert worst([past, bad], good) == bad


def test_a_transition_keeps_its_time_while_the_reason_changes():
    first = conditions({ConditionType.READY: Finding(FALSE, "Missed")}, (), 1, "then")
    second = conditions({ConditionType.READY: Finding(FALSE, "Pending", "m")}, first, 2, "now")
    assert (second[0].last_transition_time, second[0].reason, second[0].observed_generation) == ("then", "Pending", 2)
    third = conditions({ConditionType.READY: Finding(TRUE, "Ready")}, second, 2, "now")
    assert third[0].last_transition_time == "now"
    assert third[0].status is ConditionStatus.TRUE


def test_many_names_are_cut():
    assert names(["a", "b"]) == "a, b"
    assert names(list("abcdefgh")) == "a, b, c, d, e and 3 more"


def test_times_are_of_the_wall():
    world = World(pods=1)
    world.step(2.0)
    assert world.condition("Accepted")["lastTransitionTime"] == "2026-09-21T14:13:22Z"
    assert EPOCH == 1_790_000_000.0
    assert world.status["targets"][0]["name"] == RESNET.name


PAST = "Service web port 80 bypasses the sidecar. Correct it: kubectl -n vision patch service web …"


def test_a_service_that_bypasses_the_sidecar_is_reported_and_no_condition_becomes_false():
    world = World(pods=1)
    settle(world)
    world.workload_events = (Event(True, "ServiceBypassed", PAST),)
    settle(world)
    assert programmed(world) == ("True", "ServiceBypassed", PAST)
    said = world.condition("Ready")
    assert (said["status"], said["reason"], said["message"]) == ("True", "ServiceBypassed", PAST)
    writes = len(world.writes)
    settle(world, 20)
    assert len(world.writes) == writes
    world.workload_events = ()
    settle(world)
    assert programmed(world) == ("True", "Programmed", "")
    assert world.condition("Ready")["reason"] == "Ready"


def test_invalid_annotations_are_reported_in_the_policy_of_their_workload():
    """One that a person wrote, too: ``carpool.dev/capture`` on the Deployment itself captures nothing."""
    typo = Event(True, "AnnotationInvalid", "carpool.dev/capture is read in the pod template only: move it")
    for annotated in (True, False):
        world = World(pods=1, annotated=annotated)
        world.workload_events = (typo,)
        settle(world)
        said = world.condition("Accepted")
        assert (said["status"], said["reason"]) == ("True", "AnnotationInvalid")
        assert world.condition("Ready")["status"] == "True"
        kept = ". Until then the policy stays as it was before" if annotated else ""
        assert said["message"] == f"{typo.message}{kept}"


def test_a_question_ends_with_one_mark():
    world = World(pods=1, annotated=True)
    world.workload_events = (Event(True, "AnnotationInvalid", "did you mean Efficiency?"),)
    settle(world)
    said = world.condition("Accepted")["message"]
    assert said == "did you mean Efficiency? Until then the policy stays as it was before"


def test_the_length_of_reported_annotations_is_limited():
    world = World(pods=1, annotated=True)
    world.workload_events = tuple(
        Event(True, "AnnotationInvalid", f"{index} is {'x' * 100_000}") for index in range(50)
    )
    settle(world)
    assert len(world.condition("Accepted")["message"]) < 10_000
    assert "and 45 more" in world.condition("Accepted")["message"]


def world_of_a_container(wanted, *stands):
    named = replace(spec(), target_refs=(TargetRef(name="resnet", container=wanted),))
    world = World(named, pods=len(stands))
    for each, container in zip(world.pods, stands, strict=True):
        each.pod = replace(each.pod, container=container)
    settle(world)
    return world


def test_a_sidecar_before_another_container_than_the_one_named_is_reported_with_the_command():
    world = world_of_a_container("model", "proxy", "proxy")
    status, reason, message = programmed(world)
    assert (status, reason) == ("False", "WrongContainer")
    told, command = message.split(": ", 1)
    assert told == "the sidecars of Deployment resnet stand before container proxy, not model"
    *kubectl, patch = shlex.split(command)
    assert kubectl == ["kubectl", "-n", "vision", "patch", "deployment/resnet", "-p"]
    assert json.loads(patch) == {
        "spec": {"template": {"metadata": {"annotations": {"carpool.dev/container": "model"}}}}
    }
    writes = len(world.writes)
    settle(world, 20)
    assert len(world.writes) == writes


def test_while_pods_are_replaced_for_that_nothing_else_is_to_be_done():
    world = world_of_a_container("model", "proxy", "model")
    world.workload = replace(
        world.workload, template_annotations={"carpool.dev/inject": "true", "carpool.dev/container": "model"}
    )
    settle(world)
    status, reason, message = programmed(world)
    assert (status, reason) == ("False", "WrongContainer")
    assert message.endswith("new pods will stand: kubectl -n vision get deployment/resnet --watch")
    world.pods[0].pod = replace(world.pods[0].pod, container="model")
    settle(world)
    assert programmed(world)[:2] == ("True", "Programmed")


def test_any_container_will_do_where_none_is_named_and_one_that_cannot_be_read():
    assert programmed(world_of_a_container(None, "proxy"))[:2] == ("True", "Programmed")
    assert programmed(world_of_a_container("model", ""))[:2] == ("True", "Programmed")


def test_scaled_to_zero_is_no_fault():
    world = World(pods=0)
    world.workload = workload_of(replicas=0)
    settle(world, 20)
    assert programmed(world)[:2] == ("True", "ScaledToZero")
    assert world.condition("MetricsAvailable")["reason"] == "ScaledToZero"
    assert world.condition("Ready")["status"] == "True"


def test_pods_that_run_where_none_has_to_are_read_like_others():
    # An InferenceService with `minReplicas: 0` has pods while requests come.
    world = World(pods=2)
    world.workload = workload_of(replicas=0)
    settle(world, 20)
    assert world.condition("MetricsAvailable")["reason"] == "Available"
    for pod in world.pods:
        pod.answers = False
    settle(world, 200)
    assert world.condition("MetricsAvailable")["status"] == "False"


def test_pods_that_the_server_refuses_are_reported_with_the_fix():
    world = World(pods=2)
    settle(world)
    quota = 'pods "resnet-7c9-x" is forbidden: exceeded quota: team, requested: limits.cpu=1, used: limits.cpu=8'
    world.workload = workload_of(refused=quota, rolling=True)
    settle(world)
    status, reason, message = programmed(world)
    assert (status, reason) == ("False", "PodsRefused")
    assert quota in message
    assert "carpool.dev/sidecar-cpu-limit" in message
    assert "kubectl -n vision patch deployment/resnet" in message
    assert world.condition("Ready")["reason"] == "PodsRefused"
    world.workload = workload_of(refused="admission webhook denied the request: no such image")
    settle(world)
    assert programmed(world)[2].endswith("kubectl -n vision get events --field-selector type=Warning")
