"""Canaries of simulated fleets."""

from __future__ import annotations

import pytest
from fleets import EPOCH, RESNET, SimulatedPod, World, spec
from msgspec.structs import replace

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Bounds, DurationRange, IntRange, Objective
from carpool.simulation.simulator import Device, table
from carpool_operator.api.spec import Canary
from carpool_operator.delivery.documents import EVERY
from carpool_operator.tuning.learning import Learned

CLIFF = Device(times=table([0.005, *(0.005 + 0.0005 * rows for rows in range(1, 9)), *([0.120] * 56)]))
"""Batches up to 8 are served as usual, larger ones fall off a cliff that nothing measured so far foretells."""
CAREFUL = Parameters(max_batch=8)
SHORT = Bounds(max_in_flight=IntRange(max=1), max_wait=DurationRange(max=Duration(0.002)))


def while_undecided(each, report, parameters):
    """Let a pod run what first calls led to, for as long as its document names no model."""
    if each.change is None or "" in each.change.parameters:
        return report
    lanes = {name: replace(lane, parameters=parameters, pass_through=True) for name, lane in report.lanes.items()}
    return replace(report, lanes=lanes)


def test_what_is_explored_is_on_canaries_only_until_it_is_chosen():
    world = World(spec(objective=Objective.EFFICIENCY), pods=3)
    world.run(300, 120)
    events = [(event.reason, event.message) for _, event in world.events]
    explored = next(message for reason, message in events if reason == "CanaryStarted")
    assert "it may gain; only running it shows its latency" in explored
    assert "4 in flight" in explored
    started = ["CanaryStarted", "CanaryMeasured", "CanaryStarted", "CanaryPromoted"]
    assert [reason for reason, _ in events] == ["ParametersChanged", *started]
    assert {parameters.max_in_flight for _, parameters in world.applied()} == {1}, "one batch at a time is computed"
    assert {each.change.generation for each in world.pods} == {world.durable.generation}


@pytest.mark.parametrize(
    ("pods", "canary", "explorers"),
    [(5, Canary(), 1), (5, Canary(percent=40), 2), (5, Canary(enabled=False), 0), (1, Canary(), 0)],
)
def test_what_all_pods_save_is_spent_by_those_that_explore(monkeypatch, pods, canary, explorers):
    found, step = set(), Learned.step
    monkeypatch.setattr(Learned, "step", lambda self, *a, **k: (found.add(k["canaries"]), step(self, *a, **k))[1])
    World(spec(canary=canary), pods=pods).run(100, 10)
    assert found == {explorers}


def test_a_single_pod_is_no_canary():
    world = World(pods=1)
    world.run(300, 40)
    assert len(world.applied()) > 1
    assert all(document.pods is None for document in world.documents())


def test_without_canaries_all_get_it_at_once():
    world = World(spec(canary=Canary(enabled=False)), pods=3)
    world.run(900, 40)
    assert world.reasons() == ["ParametersChanged", "ParametersChanged"]


def late_on_canaries(world, share):
    """Misses that no forecast has: a pod with other parameters than all has this share of late requests."""
    late = dict.fromkeys(range(len(world.pods)), 0)
    before = dict(late)

    def spoil(index, each, report):
        model = report.stats.models.get("")
        if model is None:
            return report
        if world.durable is not None and each.parameters() != world.parameters():
            late[index] += round(share * (model.served - before[index]))
        before[index] = model.served
        spoilt = replace(model, hits=model.hits - late[index], misses={**model.misses, "late": late[index]})
        return replace(report, stats=replace(report.stats, models={"": spoilt}))

    for index, each in enumerate(world.pods):
        each.spoil = lambda report, index=index, each=each: spoil(index, each, report)


def test_a_bad_step_stays_with_the_canaries_and_is_taken_back():
    world = World(pods=4)
    late_on_canaries(world, 0.1)
    world.run(1200, 60)
    bad = next(document.change for document in world.documents() if document.pods)
    assert world.reasons()[1:3] == ["CanaryStarted", "CanaryRolledBack"]
    begun, back = (next(at for at, event in world.events if event.reason == name) for name in world.reasons()[1:3])
    assert back - begun <= 8.0
    assert bad.parameters[""] not in [parameters for _, parameters in world.applied()]
    assert world.applied()[1][1] == Parameters(), "what ran before, with a newer generation"
    tried = [document.change.parameters[""] for document in world.documents() if document.pods]
    assert 1 <= len(tried) <= 2, "and nothing else is tried before long"
    assert world.status["history"][0]["reason"] == "CanaryRolledBack"


@pytest.mark.parametrize("ends", ["rolled back", "gone"])
def test_after_a_trial_that_failed_all_run_what_first_calls_had_led_to(ends):
    """The baseline never ran. Named, it would be one call at a time, for a server that answered eight at once."""
    world = World(pods=4)
    late_on_canaries(world, 0.1)
    led_to = Parameters(max_in_flight=8, pass_through=True)
    for each in world.pods:
        each.spoil = lambda report, each=each, spoil=each.spoil: while_undecided(each, spoil(report), led_to)

    def lose(_):
        if ends == "gone" and world.reasons()[-1:] == ["CanaryStarted"]:
            world.pods[0].pod = replace(world.pods[0].pod, ready=False)

    world.run(1200, 60, every=lose)
    reason = "CanaryRolledBack" if ends == "rolled back" else "CanaryReturned"
    assert world.reasons()[1:3] == ["CanaryStarted", reason]
    assert [parameters for _, parameters in world.applied()][:2] == [Parameters(), led_to]
    learned = world.controller._steerings[RESNET].models[""]
    assert learned.tuner.parameters == learned.parameters == world.parameters()


def test_a_cliff_that_nothing_foretells_is_left_again():
    world = World(spec(baseline=CAREFUL, bounds=SHORT), pods=4, device=CLIFF)
    outcome = world.run(2400, 120)
    tried = [document.change.parameters[""] for document in world.documents() if "" in document.change.parameters]
    assert max(parameters.max_batch for parameters in tried) > 8, "by a canary, at least"
    assert world.parameters().max_batch <= 8
    assert outcome.summary(60.0).miss_fraction < 0.01


def held_trial():
    """A fleet with a trial under way that only time or events will end."""
    world = World(spec(canary=Canary(min_requests=1_000_000)), pods=3)
    world.run(600, 8)
    assert world.status["targets"][0]["models"][0]["trial"]["pods"] == ["resnet-0"]
    return world


def test_a_trial_is_in_the_status_while_it_lasts():
    world = held_trial()
    assert world.status["lastDecision"]["action"] == "Trying"
    world.run(600, 260, seed=2)
    assert "CanaryPromoted" in world.reasons(), "in time nothing speaks against it"
    assert "trial" not in world.status["targets"][0]["models"][0]


def test_canaries_that_vanish_end_their_trial_without_blame():
    world = held_trial()
    world.pods[0] = SimulatedPod(9, now=world.now)
    world.pods[0].take(world.durable)
    world.run(600, 4, seed=2)
    assert "CanaryReturned" in world.reasons()
    assert world.log[-1][1].pods is None
    world.run(600, 80, seed=3)
    assert world.reasons().count("CanaryStarted") == 2, "later it is tried again"


def test_a_trial_ends_with_the_load_it_was_for():
    world = held_trial()
    fell = world.now
    world.run(6, 180, seed=2)
    returned = next(at for at, event in world.events if event.reason == "CanaryReturned" and at > fell)
    assert returned - fell <= 20.0, "not in two minutes"
    assert world.parameters().pass_through
    assert "the load they were for fell" in next(
        event.message for _, event in world.events if event.reason == "CanaryReturned"
    )


@pytest.mark.parametrize(
    ("share", "passes", "ends"),
    [(0.9, True, True), (1.1, True, False), (0.6, False, False), (0.4, False, True)],
)
def test_a_trial_ends_with_any_fall_once_requests_are_to_pass_and_else_with_half_of_the_load(share, passes, ends):
    steering = held_trial().controller._steerings[RESNET]
    began = steering.trials.current.decision
    wanted = Parameters(max_batch=began.parameters.max_batch + 1, pass_through=passes)
    steering.trials.outlive("", replace(began, rate=share * began.rate, parameters=wanted, change=True))
    assert (steering.trials.current is None) is ends


def test_nobody_gets_at_once_what_a_lost_canary_was_trying():
    world = World(pods=2)
    world.run(100, 8)
    assert world.reasons()[-1] == "CanaryStarted"
    canary = world.pods[0]
    canary.pod = replace(canary.pod, ready=False)
    world.run(50, 40, seed=2)
    assert world.reasons()[-1] == "CanaryReturned", "the other pod would be the first to run it"
    canary.pod = replace(canary.pod, ready=True)
    world.run(100, 60, seed=3)
    assert "CanaryStarted" in world.reasons()[-2:]


def test_a_trial_does_not_end_with_a_load_that_varies():
    world = held_trial()
    world.run(400, 60, seed=2)
    assert "CanaryReturned" not in world.reasons()
    assert world.status["targets"][0]["models"][0]["trial"]


def test_an_slo_edit_ends_a_trial_and_keeps_what_was_learned():
    world = held_trial()
    documents = len(world.log)
    world.edit(spec(0.2, canary=Canary(min_requests=1_000_000)))
    world.step(world.now + 2.0)
    (document,) = world.documents()[documents:]
    assert document.pods is None
    assert document.change.policy.slo.due == 0.2
    world.run(900, 4, seed=5)
    learned = world.controller._steerings[RESNET].models[""]
    assert learned.decision.predicted is not None
    assert learned.decision.reason != "TooFewSamples"


def test_an_operator_that_died_during_a_trial_is_followed_by_one_that_ends_it():
    world = held_trial()
    assert len({each.change.generation for each in world.pods}) == 2
    world.restart_operator()
    world.run(900, 6, seed=4)
    assert len({each.change.generation for each in world.pods} - {world.durable.generation}) <= 1
    generations = [document.change.generation for document in world.documents()]
    assert generations == sorted(set(generations))
    assert world.pods[1].parameters("") == world.parameters()


def test_pausing_ends_a_trial():
    world = held_trial()
    world.policy = replace(world.policy, paused=True)
    world.run(900, 4, seed=2)
    assert {each.change.generation for each in world.pods} == {world.durable.generation}
    assert world.status["targets"][0]["models"][0].get("trial") is None
    assert "CanaryPromoted" not in world.reasons()


def test_what_a_sidecar_took_back_nobody_is_to_run():
    world = World(pods=3)
    world.run(900, 60)
    bad, before = world.parameters(), len(world.log)
    assert bad != Parameters()
    world.pods[2].before = world.pods[2].before or world.pods[2].change
    world.pods[2].before = replace(world.durable, parameters={EVERY: Parameters()}, generation=1)
    world.pods[2].roll_back("", EPOCH + world.now)
    world.run(900, 4, seed=2)
    document = world.documents()[before]
    assert document.pods is None
    # What the sidecar went back to, or what the tuner goes on to from there.
    assert document.change.parameters.get("", document.change.parameters[EVERY]) != bad
    assert "SidecarRolledBack" in world.reasons()
    world.run(900, 60, seed=3)
    assert world.parameters() != bad, "what failed is not tried again at this load"


def test_a_canary_that_went_back_by_itself_ends_the_trial():
    world = held_trial()
    world.pods[0].before = world.durable
    world.pods[0].roll_back("", EPOCH + world.now)
    documents = len(world.log)
    world.run(900, 2, seed=2)
    assert "SidecarRolledBack" in world.reasons()
    assert world.documents()[documents].pods is None
