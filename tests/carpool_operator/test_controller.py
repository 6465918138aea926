from __future__ import annotations

import pytest
from fleets import RESNET, SimulatedPod, World, pod_of, policy_of, spec, workload_of
from msgspec.structs import replace

from carpool.batching.counters import Stats
from carpool.policy.plain import from_plain
from carpool.policy.spec import Tuning, TuningMode
from carpool_operator.api.model import Target
from carpool_operator.api.spec import written
from carpool_operator.api.status import Status
from carpool_operator.controller import Controller


def settle(world, steps=4):
    """Pass a few times, without load."""
    for _ in range(steps):
        world.step(world.now + 2.0)


def test_the_first_pass_publishes_the_baseline_and_says_so():
    world = World(pods=2)
    outcome = world.step(2.0)
    (document,) = outcome.documents
    assert document.pods is None
    assert document.change.policy.slo.due == 0.05
    assert world.status["applied"]["batch"] == "32"
    assert world.status["applied"]["model"] == "*"
    assert world.status["observedGeneration"] == 1
    assert world.status["targets"][0]["injected"] == 2
    assert world.controller.change(RESNET) == document.change
    assert [event.reason for event in outcome.events] == ["ParametersChanged"]


def test_once_all_acknowledged_nothing_more_is_said():
    world = World(pods=2)
    settle(world)
    assert world.condition("Ready")["status"] == "True"
    assert world.status["targets"][0]["acknowledged"] == 2
    before = len(world.writes), len(world.log), len(world.events)
    settle(world, 120)
    assert (len(world.writes), len(world.log), len(world.events)) == before


def test_every_status_can_be_read_again():
    world = World(pods=2)
    world.run(600, 30)
    for _, status in world.writes:
        assert written(_status(status)) == status


def _status(plain):
    return from_plain(plain, Status, what="status")


def test_a_target_that_is_not_there_is_named_with_what_to_do():
    world = World(pods=0)
    world.workload = None
    settle(world)
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "TargetNotFound")
    assert "Deployment resnet" in accepted["message"]
    assert "kubectl -n vision get" in accepted["message"]
    assert world.log == []
    assert world.reasons() == ["TargetNotFound"], "once"
    world.workload = workload_of(replicas=1)
    world.pods, world.stats = [SimulatedPod(0)], world.stats[:1] or [_zero()]
    settle(world)
    assert world.condition("Accepted")["status"] == "True"
    assert len(world.log) == 1


def _zero():
    return Stats(at=0.0)


def test_a_workload_without_sidecars_gets_no_document_and_the_command():
    world = World(pods=0)
    world.workload = workload_of(inject=None)
    settle(world)
    programmed = world.condition("Programmed")
    assert programmed["reason"] == "NotInjected"
    assert "kubectl -n vision annotate deployment/resnet carpool.dev/inject=true" in programmed["message"]
    assert world.log == []
    assert world.condition("Ready")["reason"] == "NotInjected"


def test_sidecars_that_stand_in_the_template_are_asked_for():
    """As ``carpool inject`` writes them, with the pods' own annotation, for manifests in git."""
    world = World(pods=2)
    world.workload = replace(workload_of(inject=None), template_annotations={"carpool.dev/status": "{}"})
    settle(world)
    assert world.condition("Programmed")["reason"] == "Programmed"
    assert world.condition("Ready")["status"] == "True"


def test_un_annotating_says_so_and_keeps_quiet():
    world = World(pods=2)
    world.run(600, 10)
    world.workload = workload_of(inject=None)
    world.pods, world.stats = [], []
    settle(world)
    documents = len(world.log)
    settle(world, 40)
    assert world.condition("Programmed")["reason"] == "NotInjected"
    assert len(world.log) == documents


def test_a_spec_that_cannot_be_read_changes_nothing_but_what_is_said():
    world = World(pods=2)
    settle(world)
    before, documents = world.status, len(world.log)
    world.policy = replace(world.policy, spec=None, error="spec.slo.latency: name at least one", generation=2)
    settle(world)
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "Invalid")
    assert "spec.slo.latency" in accepted["message"]
    assert world.condition("Ready")["status"] == "False"
    assert world.status["applied"] == before["applied"]
    assert len(world.log) == documents
    assert world.reasons().count("Invalid") == 1
    world.edit(spec(0.08))
    settle(world)
    assert world.condition("Accepted")["status"] == "True"
    assert len(world.log) == documents + 1


def test_the_policy_that_loses_a_conflict_is_not_accepted_and_publishes_nothing():
    world = World(pods=2)
    world.others = [policy_of(name="older", created=1.0)]
    settle(world)
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "Conflicted")
    assert "BatchingPolicy older" in accepted["message"]
    assert world.log == []
    assert world.controller.change(RESNET) is None
    world.others = []
    settle(world)
    assert world.condition("Accepted")["status"] == "True"
    assert len(world.log) == 1


def test_several_targets_each_get_their_own():
    bert = Target("vision", "Deployment", "bert")
    world = World(spec(names=("resnet", "bert")), pods=1)
    pods = {RESNET: [pod_of(0)], bert: [pod_of(1, bert)]}
    view = replace(world.view(2.0, {}), workloads={RESNET: workload_of(), bert: workload_of(bert)}, pods=pods)
    outcome = world.controller.step(view)
    assert {document.target for document in outcome.documents} == {RESNET, bert}
    assert {document.change.target for document in outcome.documents} == {str(RESNET), str(bert)}
    assert [each["name"] for each in outcome.status["targets"]] == ["resnet", "bert"]


def test_transition_times_move_with_the_status_only():
    world = World(pods=2)
    settle(world, 10)
    at = world.condition("Accepted")["lastTransitionTime"]
    world.edit(spec(0.08))
    settle(world, 10)
    assert world.condition("Accepted")["lastTransitionTime"] == at
    world.workload = None
    settle(world)
    assert world.condition("Accepted")["lastTransitionTime"] > at


def test_another_operator_says_nothing_until_it_has_read_something():
    world = World(pods=2)
    world.run(600, 100)
    for each in world.pods:
        each.answers = False
    writes, documents = len(world.writes), len(world.log)
    world.restart_operator()
    settle(world, 5)
    assert (len(world.writes), len(world.log)) == (writes, documents)
    settle(world, 20)
    assert world.condition("MetricsAvailable")["reason"] == "MetricsStale", "but not for ever"
    assert world.condition("SLOMet")["status"] == "True", "of which nothing else is known"
    assert world.status["history"]


def test_a_status_that_nobody_can_read_is_written_anew():
    world = World(pods=1, status={"conditions": 7})
    settle(world)
    assert world.condition("Accepted")["status"] == "True"


def test_restore_is_what_a_configmap_should_hold():
    world = World(pods=1)
    settle(world)
    controller = Controller()
    controller.restore(RESNET, world.durable)
    assert controller.change(RESNET) == world.durable


@pytest.mark.parametrize("seconds", [30.0, 3600.0])
def test_scaled_to_zero_is_no_fault(seconds):
    world = World(pods=1)
    settle(world)
    world.pods, world.stats = [], []
    world.workload = workload_of(replicas=0)
    world.step(world.now + seconds)
    assert world.condition("Programmed")["reason"] == "ScaledToZero"
    assert world.condition("MetricsAvailable")["reason"] == "ScaledToZero"
    assert "FellBack" not in world.reasons()


def test_another_operator_knows_the_models_that_run_what_all_do():
    world = World(spec(tuning=Tuning(mode=TuningMode.HOLD)), pods=2)
    world.run(100, 100)
    assert [each["name"] for each in world.status["targets"][0]["models"]] == [""]
    assert set(world.durable.parameters) == {"*"}
    writes = len(world.writes)
    world.restart_operator()
    settle(world, 20)
    assert len(world.writes) == writes
