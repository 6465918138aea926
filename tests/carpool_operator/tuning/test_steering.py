"""Fleets of simulated pods in virtual time: the Batcher, the counters and the tuner are the real ones."""

from __future__ import annotations

from math import nan

import pytest
from fleets import EPOCH, GPU, RESNET, SimulatedPod, World, pod_of, spec
from msgspec.structs import replace

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import (
    Bounds,
    DurationRange,
    Fallback,
    FallbackBehavior,
    IntRange,
    Objective,
    PassThrough,
    PassThroughMode,
    RiskierStep,
    Tuning,
    TuningMode,
)
from carpool.simulation.simulator import Device, table
from carpool_operator.api.spec import Canary
from carpool_operator.delivery.documents import EVERY, VALID, sidecar_policy
from carpool_operator.tuning.learning import Learned

CLIFF = Device(times=table([0.005, *(0.005 + 0.0005 * rows for rows in range(1, 9)), *([0.120] * 56)]))
"""Batches up to 8 are served as usual, larger ones fall off a cliff that nothing measured so far foretells."""
CAREFUL = Parameters(max_batch=8)
SHORT = Bounds(max_in_flight=IntRange(max=1), max_wait=DurationRange(max=Duration(0.002)))


def applied(world):
    """Documents for all pods, as (when, parameters of the one model)."""
    return [
        (at, document.change.parameters.get("", document.change.parameters[EVERY]))
        for at, document in world.log
        if document.pods is None
    ]


# -- finding the way


def test_it_begins_with_the_baseline_and_converges_by_way_of_canaries():
    world = World(pods=3)
    outcome = world.run(900, 60)
    assert applied(world)[0] == (2.0, Parameters())
    trial = world.documents()[1]
    assert trial.pods == ("resnet-uid-0",)
    explored, tried = ["CanaryStarted", "CanaryMeasured"], ["CanaryStarted", "CanaryPromoted"]
    assert world.reasons() == ["ParametersChanged", *explored, *tried]
    assert world.parameters().max_wait > 0
    before, after = outcome.summary(2.0, 6.0), outcome.summary(40.0)
    assert after.device_time < 0.6 * before.device_time
    assert after.miss_fraction < 0.005
    assert {each.change.generation for each in world.pods} == {world.durable.generation}, "canaries run it as all do"


def test_what_is_explored_is_on_canaries_only_until_it_is_chosen():
    world = World(spec(objective=Objective.EFFICIENCY), pods=3)
    world.run(300, 120)
    events = [(event.reason, event.message) for _, event in world.events]
    explored = next(message for reason, message in events if reason == "CanaryStarted")
    assert "it may gain; only running it shows its latency" in explored
    assert "4 in flight" in explored
    started = ["CanaryStarted", "CanaryMeasured", "CanaryStarted", "CanaryPromoted"]
    assert [reason for reason, _ in events] == ["ParametersChanged", *started]
    assert {parameters.max_in_flight for _, parameters in applied(world)} == {1}, "one batch at a time is computed"
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


NEVER = PassThrough(mode=PassThroughMode.NEVER)
MODES = [{"pass_through": NEVER}, {"tuning": Tuning(mode=TuningMode.HOLD)}]


def upgraded(**modes):
    """A fleet that an operator began whose documents had no modes, and the operator of today in its place."""
    world = World(spec(**modes), pods=2)
    world.run(0, 10)
    change = world.durable
    older = replace(change, policy=replace(change.policy, tuning=Tuning(), pass_through=PassThrough()))
    world.durable = older
    for each in world.pods:
        each.change = older
    world.log.clear()
    world.restart_operator()
    return world


@pytest.mark.parametrize("modes", MODES)
def test_an_upgrade_of_the_operator_changes_nothing_that_runs(modes):
    """First calls go on under documents without modes, and would end with these: at one call at a time."""
    world = upgraded(**modes)
    world.run(0, 30)
    assert world.documents() == []
    world.restart_operator()
    world.run(0, 30)
    assert world.documents() == []


def test_after_an_upgrade_the_modes_are_sent_once_all_models_are_named():
    world = upgraded(pass_through=NEVER)
    world.run(300, 60)
    first, *others = world.documents()
    assert "" in first.change.parameters, "what was decided ends first calls"
    assert others[-1].change.policy.pass_through == NEVER


@pytest.mark.parametrize("modes", [{}, {"pass_through": NEVER}])
def test_after_an_upgrade_mode_recommend_is_sent_at_once(modes):
    """Recommend ends no first calls. If sidecars got Apply, they would send requests of their own."""
    world = upgraded(tuning=Tuning(mode=TuningMode.RECOMMEND), **modes)
    world.run(300, 60)
    world.restart_operator()
    world.run(300, 60)
    (document,) = world.documents()
    assert document.change.policy.tuning.mode is TuningMode.RECOMMEND
    assert document.change.policy.pass_through == PassThrough(), "nobody decides, so first calls go on"
    world.edit(spec(0.04, tuning=Tuning(mode=TuningMode.RECOMMEND), **modes))
    world.run(0, 10)
    assert world.documents()[-1].change.policy.pass_through == modes.get("pass_through", PassThrough())


def test_after_an_upgrade_mode_hold_is_sent_when_no_sidecar_is_older():
    """Older ones end first calls by it."""
    world = upgraded(tuning=Tuning(mode=TuningMode.HOLD))
    first, second = world.pods
    first.pod = replace(first.pod, current=True)
    world.run(300, 60)
    assert world.documents() == []
    second.pod = replace(second.pod, current=True)
    world.run(300, 60)
    (document,) = world.documents()
    assert document.change.policy.tuning.mode is TuningMode.HOLD
    first.pod = replace(first.pod, current=False)
    world.run(300, 60)
    assert len(world.documents()) == 1, "what was said is not taken back"


def test_what_was_edited_while_the_workload_was_away_is_no_upgrade():
    world = World(spec(), pods=2)
    world.run(0, 10)
    workload, pods = world.workload, world.pods
    world.restart_operator()
    world.workload, world.pods = None, []
    world.edit(spec(pass_through=NEVER))
    world.step(world.now + 1, [])
    assert world.status["observedGeneration"] == world.policy.generation
    world.workload, world.pods = workload, pods
    world.run(0, 60)
    assert world.documents()[-1].change.policy.pass_through == NEVER


@pytest.mark.parametrize("modes", MODES)
def test_after_an_upgrade_an_edited_policy_is_sent_as_it_is(modes):
    world = upgraded(**modes)
    world.run(0, 10)
    world.edit(spec(0.04, **modes))
    world.run(0, 10)
    (document,) = world.documents()
    assert document.change.policy == sidecar_policy(spec(0.04, **modes).policy())


def test_what_was_edited_while_no_operator_ran_is_no_upgrade():
    world = World(spec(), pods=2)
    world.run(0, 10)
    world.restart_operator()
    world.edit(spec(pass_through=NEVER))
    world.run(0, 10)
    assert world.documents()[-1].change.policy.pass_through == NEVER


def test_a_single_pod_is_no_canary():
    world = World(pods=1)
    world.run(300, 40)
    assert len(applied(world)) > 1
    assert all(document.pods is None for document in world.documents())


def test_without_canaries_all_get_it_at_once():
    world = World(spec(canary=Canary(enabled=False)), pods=3)
    world.run(900, 40)
    assert world.reasons() == ["ParametersChanged", "ParametersChanged"]


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


def while_undecided(each, report, parameters):
    """Let a pod run what first calls led to, for as long as its document names no model."""
    if each.change is None or "" in each.change.parameters:
        return report
    lanes = {name: replace(lane, parameters=parameters, pass_through=True) for name, lane in report.lanes.items()}
    return replace(report, lanes=lanes)


def runs(world, parameters):
    """Let pods say that their batches are made by ``parameters``, as first calls leave them."""

    def spoil(report):
        lanes = {
            name: replace(lane, parameters=parameters, pass_through=parameters.pass_through)
            for name, lane in report.lanes.items()
        }
        return replace(report, lanes=lanes)

    spoil_all(world, spoil)


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


# -- canaries


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
    assert bad.parameters[""] not in [parameters for _, parameters in applied(world)]
    assert applied(world)[1][1] == Parameters(), "what ran before, with a newer generation"
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
    assert [parameters for _, parameters in applied(world)][:2] == [Parameters(), led_to]
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


# -- what sidecars do by themselves


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


# -- bad evidence


def spoil_all(world, spoil):
    for each in world.pods:
        each.spoil = spoil


def test_nothing_is_decided_on_numbers_that_are_none():
    world = World(pods=3)
    world.run(900, 4)
    documents = len(world.log)
    spoil_all(world, lambda report: replace(report, stats=replace(report.stats, at=nan)))
    world.run(3000, 60, seed=2)
    assert len(world.log) == documents
    assert world.condition("MetricsAvailable")["reason"] == "MetricsStale"
    assert "clock is no number" in world.condition("MetricsAvailable")["message"]
    spoil_all(world, lambda report: report)
    world.run(900, 60, seed=3)
    assert world.condition("MetricsAvailable")["status"] == "True"
    assert len(world.log) > documents


def test_stalled_hosts_teach_nothing():
    world = World(pods=2)
    world.run(600, 4)
    documents = len(world.log)

    def stall(now):
        for each in world.pods:
            each.stalled = now

    world.run(600, 20, seed=2, every=stall)
    assert len(world.log) == documents
    world.run(600, 40, seed=3, every=stall)
    assert world.condition("MetricsAvailable")["reason"] == "HostStalled"


def silence(world):
    for each in world.pods:
        each.answers = not each.answers


def test_fallback_holds_the_last_parameters():
    world = World(pods=3)
    world.run(900, 40)
    last, documents = world.parameters(), len(world.log)
    silence(world)
    world.run(900, 28, seed=2)
    assert "FellBack" not in world.reasons(), "not before the evidence is stale"
    world.run(900, 60, seed=2)
    assert world.reasons().count("FellBack") == 1
    assert (world.parameters(), len(world.log)) == (last, documents)
    silence(world)
    world.run(900, 10, seed=3)
    assert "Recovered" in world.reasons()
    assert len(world.log) == documents


def test_fallback_to_the_baseline_is_published_once_and_recovers():
    world = World(spec(fallback=Fallback(behavior=FallbackBehavior.BASELINE)), pods=3)
    world.run(900, 40)
    tuned, documents = world.parameters(), len(world.log)
    silence(world)
    world.run(900, 120, seed=2)
    assert world.parameters() == Parameters()
    assert len(world.log) == documents + 1
    assert world.status["history"][0]["reason"] == "MetricsStale"
    silence(world)
    world.run(900, 60, seed=3)
    assert world.parameters().max_wait == tuned.max_wait


@pytest.mark.parametrize("mode", [TuningMode.APPLY, TuningMode.HOLD, TuningMode.RECOMMEND])
def test_what_has_to_stay_does_not_fall_back_until_it_may_change_again(mode):
    baseline = Fallback(behavior=FallbackBehavior.BASELINE)
    world = World(spec(fallback=baseline), pods=3)
    world.run(900, 40)
    tuned = world.parameters()
    world.edit(spec(tuning=Tuning(mode=mode), fallback=baseline))
    world.policy = replace(world.policy, paused=mode is TuningMode.APPLY)
    silence(world)
    world.run(900, 120, seed=2)
    assert world.parameters() == tuned != Parameters()
    assert "FellBack" not in world.reasons()
    assert world.condition("MetricsAvailable")["reason"] == "MetricsStale"
    world.edit(spec(fallback=baseline))
    world.policy = replace(world.policy, paused=False)
    world.run(900, 10, seed=3)
    assert world.parameters() == Parameters()
    assert world.reasons().count("FellBack") == 1


def test_half_of_the_pods_suffice_and_a_lost_answer_costs_an_interval():
    world = World(pods=4)

    def lossy(now):
        for index, each in enumerate(world.pods):
            each.answers = (int(now / 2) + index) % 3 != 0

    world.run(1200, 90, every=lossy)
    assert world.parameters().max_wait > 0
    assert "FellBack" not in world.reasons()


def test_restarts_of_pods_are_no_load_and_no_silence():
    world = World(pods=3)

    def restart(now):
        if now % 10 == 0:
            world.pods[int(now / 10) % 3].restart(now, world.stats[int(now / 10) % 3], world.durable)

    world.run(900, 90, every=restart)
    assert world.condition("MetricsAvailable")["status"] == "True"
    assert world.parameters().max_wait > 0
    rates = world.controller._steerings[RESNET].models[""].rate
    assert rates == pytest.approx(300, rel=0.15)


# -- rollouts, models, policies


def test_a_rollout_discards_what_was_learned_of_the_old_template():
    world = World(pods=2)
    world.run(600, 40)
    steering = world.controller._steerings[RESNET]
    tuner, parameters = steering.models[""].tuner, world.parameters()
    for index, each in enumerate(world.pods):
        each.pod = pod_of(index, template_hash="two")
    world.step(world.now + 2.0)
    assert steering.models[""].tuner is not tuner
    assert world.parameters() == parameters, "what ran goes on until it is known better"


def replaced(count):
    def spoil(report):
        return replace(report, lanes={name: replace(lane, replaced=count) for name, lane in report.lanes.items()})

    return spoil


def test_a_model_is_learned_anew_when_most_pods_say_that_it_is_another():
    world = World(pods=3)
    world.run(900, 20)
    tuner = world.controller._steerings[RESNET].models[""].tuner
    world.pods[0].spoil = replaced(1)
    world.run(900, 4, seed=2)
    assert world.controller._steerings[RESNET].models[""].tuner is tuner, "one model server restarted"
    world.pods[1].spoil = replaced(1)
    world.run(900, 4, seed=3)
    assert world.controller._steerings[RESNET].models[""].tuner is not tuner


def test_models_that_callers_make_up_are_bounded_and_forgotten():
    world = World(spec(tuning=Tuning(mode=TuningMode.HOLD)), pods=1)

    def many(report):
        models = {f"m{index}": report.stats.models[""] for index in range(200)} if "" in report.stats.models else {}
        models |= {"<other>": report.stats.models[""]} if models else {}
        lane = next(iter(report.lanes.values()), None)
        return replace(report, stats=replace(report.stats, models=models), lanes=dict.fromkeys(models, lane))

    world.pods[0].spoil = many
    world.run(20, 10)
    models = world.controller._steerings[RESNET].models
    assert len(models) == 64
    assert "<other>" not in models
    world.pods[0].spoil = lambda report: report
    for _ in range(5):
        world.step(world.now + 200.0)
    world.run(20, 10)
    assert set(world.controller._steerings[RESNET].models) == {""}


def test_what_was_found_outlasts_a_night_without_pods():
    world = World(pods=1)
    world.run(300, 60)
    tuned = world.parameters()
    pods, world.pods = world.pods, []
    world.step(world.now + 40_000.0)
    world.step(world.now + VALID / 2)
    world.pods = pods
    world.run(300, 4, seed=2)
    assert world.parameters() == tuned != Parameters()


def test_bounds_that_close_in_move_what_runs():
    world = World(pods=2)
    world.run(600, 40)
    assert world.parameters().max_wait > 0.005
    world.edit(spec(bounds=Bounds(max_wait=DurationRange(max=0.002))))
    world.step(world.now + 2.0)
    assert world.parameters().max_wait <= 0.002
    assert world.status["lastDecision"]["reason"] == "PolicyChanged"


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


def test_pass_through_that_a_backlog_ended_is_entered_again():
    world = World(spec(pass_through=PassThrough(mode=PassThroughMode.ALWAYS)), pods=1)
    world.run(60, 60)
    assert world.parameters().pass_through
    documents = len(world.log)

    def expelled(report):
        return replace(report, lanes={name: replace(lane, pass_through=False) for name, lane in report.lanes.items()})

    world.pods[0].spoil = expelled
    world.run(60, 30, seed=2)
    assert len(world.log) == documents + 1
    assert world.log[-1][1].change.parameters == world.log[-2][1].change.parameters
    world.run(60, 100, seed=3)
    assert len(world.log) <= documents + 3, "at most once a minute"


def test_the_device_of_a_fleet_is_learned_from_all_its_pods():
    world = World(pods=4, device=GPU)
    world.run(1200, 40)
    service = world.controller._steerings[RESNET].models[""].tuner.belief.in_force
    assert service.time(8) == pytest.approx(0.009, rel=0.05)
