"""Fleets of simulated pods in virtual time: the Batcher, the counters and the tuner are the real ones."""

from __future__ import annotations

import pytest
from fleets import GPU, RESNET, World, spec
from msgspec.structs import replace

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import (
    Bounds,
    DurationRange,
    IntRange,
    Objective,
    PassThrough,
    PassThroughMode,
    RiskierStep,
    Tuning,
    TuningMode,
)
from carpool_operator.delivery.documents import EVERY, VALID


def test_it_begins_with_the_baseline_and_converges_by_way_of_canaries():
    world = World(pods=3)
    outcome = world.run(900, 60)
    assert world.applied()[0] == (2.0, Parameters())
    trial = world.documents()[1]
    assert trial.pods == ("resnet-uid-0",)
    explored, tried = ["CanaryStarted", "CanaryMeasured"], ["CanaryStarted", "CanaryPromoted"]
    assert world.reasons() == ["ParametersChanged", *explored, *tried]
    assert world.parameters().max_wait > 0
    before, after = outcome.summary(2.0, 6.0), outcome.summary(40.0)
    assert after.device_time < 0.6 * before.device_time
    assert after.miss_fraction < 0.005
    assert {each.change.generation for each in world.pods} == {world.durable.generation}, "canaries run it as all do"


def test_steady_load_publishes_and_writes_nothing_more():
    world = World(pods=2)
    world.run(300, 60)
    documents, writes = len(world.log), len(world.writes)
    world.run(300, 150, seed=2)
    assert len(world.log) == documents
    assert len(world.writes) <= writes + 1, "that it converged is told once"
    assert world.status["lastDecision"]["reason"] == "Converged"


def test_what_is_kept_is_named_once_so_that_first_calls_end():
    kept = Bounds(max_batch=IntRange(max=4), max_in_flight=IntRange(max=1), max_wait=DurationRange(max=Duration(0.0)))
    policy = spec(bounds=kept, baseline=Parameters(max_batch=4), pass_through=PassThrough(mode=PassThroughMode.NEVER))
    world = World(policy, pods=2)
    world.run(300, 60)
    assert [set(document.change.parameters) for document in world.documents()] == [{EVERY}, {EVERY, ""}]
    world.restart_operator()
    world.run(300, 30, seed=2)
    assert len(world.documents()) == 2


def test_low_traffic_ends_in_pass_through():
    world = World(pods=2)
    world.run(6, 300)
    assert world.parameters().pass_through
    assert world.status["applied"]["batch"] == "pass"


def test_by_default_nobody_waits_on_an_idle_device_and_on_a_busy_one_they_do():
    world = World(spec(objective=Objective.BALANCED), pods=2)
    world.run(40, 60)
    assert world.parameters().max_wait == 0
    world.run(1200, 60, seed=2)
    assert world.parameters().max_wait > 0
    assert "CanaryPromoted" in world.reasons()


def test_no_traffic_changes_nothing():
    world = World(pods=2)
    world.run(0, 200)
    assert len(world.log) == 1
    world.run(0, 200)
    assert len(world.log) == 1


def test_a_rise_of_the_load_is_met_at_once_and_not_by_canaries():
    world = World(pods=2)
    world.run(300, 120)
    documents = len(world.log)
    outcome = world.run(2400, 60, seed=3)
    first = world.log[documents][1]
    assert first.pods is None
    assert world.log[documents][0] <= 128.0
    assert outcome.summary(20.0).miss_fraction < 0.02


def test_recommend_changes_nothing_and_says_what_it_would():
    world = World(spec(tuning=Tuning(mode=TuningMode.RECOMMEND)), pods=2)
    world.run(600, 60)
    assert len(world.log) == 1
    assert world.status["recommendation"]["cappedBy"] == "mode"
    assert world.status["lastDecision"]["action"] == "Recommended"


def runs(world, parameters):
    """Let pods say that their batches are made by ``parameters``, as first calls leave them."""

    def spoil(report):
        lanes = {
            name: replace(lane, parameters=parameters, pass_through=parameters.pass_through)
            for name, lane in report.lanes.items()
        }
        return replace(report, lanes=lanes)

    world.spoil(spoil)


def test_recommend_compares_with_what_first_calls_led_to_and_publishes_nothing_of_it():
    world = World(spec(tuning=Tuning(mode=TuningMode.RECOMMEND)), pods=2)
    runs(world, Parameters(max_in_flight=8, pass_through=True))
    world.run(600, 30)
    assert world.status["lastDecision"]["message"].startswith("pass-through, 8 in flight to ")
    assert world.status["applied"]["batch"] == "pass"
    assert [document.change.parameters for document in world.documents()] == [{EVERY: Parameters()}]
    # With Apply it begins with the baseline, which is what the pods were given.
    world.edit(spec())
    world.step(world.now + 2.0)
    assert world.documents()[-1].change.parameters == {EVERY: Parameters()}
    assert world.controller._steerings[RESNET].models[""].in_force == Parameters()


def test_a_pause_ends_no_first_calls():
    world = World(pods=2)
    world.run(0, 4)
    world.policy = replace(world.policy, paused=True)
    passing = Parameters(max_in_flight=8, pass_through=True)
    runs(world, passing)
    world.run(600, 30)
    (document,) = world.documents()
    assert document.change.policy.tuning.mode is TuningMode.APPLY
    assert world.controller._steerings[RESNET].models[""].in_force == passing
    writes = len(world.writes)
    world.run(600, 200, seed=2)
    assert len(world.writes) <= writes + 2


@pytest.mark.parametrize("paused", [False, True])
def test_hold_and_pause_keep_what_runs(paused):
    world = World(spec(tuning=Tuning(mode=TuningMode.APPLY if paused else TuningMode.HOLD)), pods=2, paused=paused)
    world.run(600, 120)
    assert len(world.log) == 1
    assert world.status["lastDecision"]["reason"] == ("Paused" if paused else "Held")
    assert world.condition("Ready")["reason"] == ("Paused" if paused else "Ready")
    world.policy = replace(world.policy, paused=False, spec=spec())
    world.run(600, 60, seed=2)
    assert len(world.log) > 1, "what was learned meanwhile is used"


def test_what_only_the_operator_reads_publishes_nothing():
    world = World(pods=2)
    world.run(600, 60)
    documents = len(world.log)
    world.edit(spec(tuning=Tuning(riskier=RiskierStep(min_requests=999))))
    world.run(600, 10, seed=2)
    assert len(world.log) == documents
    assert world.status["observedGeneration"] == 2


def test_an_operator_that_restarts_goes_on_and_writes_nothing():
    world = World(pods=3)
    world.run(600, 120)
    documents, writes, parameters = len(world.log), len(world.writes), world.parameters()
    world.restart_operator()
    world.run(600, 60, seed=2)
    assert (len(world.log), len(world.writes)) == (documents, writes)
    assert world.parameters() == parameters
    learned = world.controller._steerings[RESNET].models[""]
    assert learned.parameters == parameters


def test_a_document_is_signed_anew_before_it_expires():
    world = World(pods=2)
    world.run(0, 10)
    first = world.durable
    world.step(world.now + VALID / 2 + 10)
    assert world.durable.generation > first.generation
    assert world.durable.parameters == first.parameters
    documents = len(world.log)
    world.step(world.now + 2)
    assert len(world.log) == documents


def test_a_pod_that_missed_a_push_gets_it_again():
    world = World(pods=2)
    world.run(0, 4)
    world.pods[1].restart(world.now, world.stats[1], None)
    world.run(0, 20)
    repeats = [document for document in world.documents() if document.pods == ("resnet-uid-1",)]
    assert len(repeats) == 1
    assert world.pods[1].change == world.durable
    assert world.condition("Programmed")["status"] == "True"


def test_the_device_of_a_fleet_is_learned_from_all_its_pods():
    world = World(pods=4, device=GPU)
    world.run(1200, 40)
    service = world.controller._steerings[RESNET].models[""].tuner.belief.in_force
    assert service.time(8) == pytest.approx(0.009, rel=0.05)
