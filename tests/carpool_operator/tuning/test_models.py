"""Models of simulated fleets: found, replaced, moved and forgotten."""

from __future__ import annotations

import pytest
from fleets import RESNET, World, pod_of, spec
from msgspec.structs import replace

from carpool.policy.parameters import Parameters
from carpool.policy.spec import Bounds, DurationRange, Tuning, TuningMode
from carpool_operator.api.spec import Canary
from carpool_operator.delivery.documents import VALID
from carpool_operator.tuning.evidence import Gathered
from carpool_operator.tuning.models import Models


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


def test_a_trial_of_a_model_that_was_forgotten_is_called_back_and_tuning_goes_on():
    world = World(spec(canary=Canary(min_requests=1_000_000)), pods=3)
    world.run(600, 8)
    assert world.status["targets"][0]["models"][0]["trial"]
    for each in world.pods:
        each.pod = replace(each.pod, ready=False)
        each.spoil = lambda report: replace(report, ready=False)
    for _ in range(5):
        world.step(world.now + 150.0)
    again = world.now
    for each in world.pods:
        each.pod, each.spoil = replace(each.pod, ready=True), lambda report: report
    world.run(600, 20, seed=3)
    steering = world.controller._steerings[RESNET]
    assert steering.models[""].seen_at > again
    assert steering.trials.current is None or steering.trials.current.since > again


def test_what_was_recommended_for_a_model_that_was_forgotten_is_recommended_again():
    world = World(spec(tuning=Tuning(mode=TuningMode.RECOMMEND)), pods=1)
    world.run(300, 30)
    world.spoil(lambda report: replace(report, stats=replace(report.stats, models={}), lanes={}))
    for _ in range(5):
        world.step(world.now + 200.0)
    assert not world.controller._steerings[RESNET].models
    world.spoil(lambda report: report)
    world.run(300, 30)
    before, again = (event.message for _, event in world.events if event.reason == "RecommendOnly")
    said = "to batch 12, wait 25ms, 1 in flight: device time falls"
    assert said in before
    assert said in again, "the API server has deleted the first event by then"


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


POLICY = spec().policy()
PODS = ["a", "b", "c"]


def gathered(*pods):
    """Readings of three pods; these report that their model was replaced."""
    return Gathered([], {}, 3, True, [(pod, "resnet") for pod in pods], [])


@pytest.mark.parametrize("learn_anew", [lambda models: models.learn_replaced(gathered("b"), PODS), Models.learn_anew])
def test_reports_of_a_replaced_model_count_until_it_is_learned_anew(learn_anew):
    models = Models()
    learned = models.meet(0.0, POLICY, "resnet", None)
    models.learn_replaced(gathered("a"), PODS)
    first = learned.tuner
    learn_anew(models)
    second = learned.tuner
    assert second is not first
    models.learn_replaced(gathered("c"), PODS)
    assert learned.tuner is second


def test_reports_of_pods_that_are_gone_do_not_count():
    models = Models()
    learned = models.meet(0.0, POLICY, "resnet", None)
    tuner = learned.tuner
    models.learn_replaced(gathered("a"), PODS)
    models.learn_replaced(gathered("b"), ["b", "c"])
    assert learned.tuner is tuner
