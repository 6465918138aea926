from __future__ import annotations

from types import SimpleNamespace

import pytest
from fleets import EPOCH, RESNET, World, spec
from msgspec.structs import replace

from carpool.exchange.decision import Decision, Reason
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Bounds, IntRange, Tuning, TuningMode
from carpool_operator.api.model import Target
from carpool_operator.api.status import LastDecision, Status
from carpool_operator.reporting.decisions import Reporter, timestamp
from carpool_operator.reporting.metrics import OperatorMetrics


def test_times_are_whole_seconds_in_utc():
    assert timestamp(EPOCH + 0.9) == "2026-09-21T14:13:20Z"


def two_models(world, share=0.5):
    """Split what a pod counts over two models: ``share`` for ``bert``, the rest for ``resnet``."""

    def spoil(report):
        stats = report.stats.models.get("")
        if stats is None:
            return report
        parts = {}
        for name, part in (("bert", share), ("resnet", 1 - share)):
            counts = {
                field: int(getattr(stats, field) * part)
                for field in ("arrivals", "batchable", "arrivals_squared", "rows", "hits", "served", "dispatched")
            }
            parts[name] = replace(stats, **counts, request_rows=[])
        lane = report.lanes[""]
        return replace(report, stats=replace(report.stats, models=parts), lanes={"bert": lane, "resnet": lane})

    for each in world.pods:
        each.spoil = spoil


def test_the_status_is_about_the_busiest_model_and_two_alike_take_no_turns():
    world = World(spec(tuning=Tuning(mode=TuningMode.HOLD)), pods=1)
    two_models(world, 0.5)
    world.run(100, 30)
    about = world.status["applied"]["model"]
    two_models(world, 0.45 if about == "bert" else 0.55)
    writes = len(world.writes)
    world.run(100, 60, seed=2)
    assert world.status["applied"]["model"] == about
    assert len(world.writes) <= writes + 1
    assert {each["name"] for each in world.status["targets"][0]["models"]} == {"bert", "resnet"}


def test_history_is_newest_first_and_bounded():
    world = World(pods=1)
    for turn in range(12):
        world.edit(spec(bounds=Bounds(max_batch=IntRange(max=4 + turn % 2))))
        world.run(300, 6, seed=turn)
    history = world.status["history"]
    published = [document.change.generation for document in world.documents()]
    assert len(published) > 10
    assert [entry["generation"] for entry in history] == sorted(published, reverse=True)[:10]
    assert {entry["target"] for entry in history} == {"Deployment/resnet"}


def test_a_decision_comes_with_what_was_seen_and_what_is_forecast():
    world = World(pods=1)
    world.run(300, 12)
    last = world.status["lastDecision"]
    assert last["action"] == "Applied"
    assert last["observed"]["rate"] > 0
    assert last["predicted"]["p99"]


def test_what_is_applied_says_since_when():
    world = World(pods=1)
    world.run(300, 40)
    applied = world.status["applied"]
    assert applied["generation"] == world.durable.generation
    assert applied["at"] == timestamp(applied["generation"] / 1000)
    assert applied["target"] == "Deployment/resnet"


def test_a_decision_that_leaves_the_parameters_is_reported_once_it_lasts():
    world = World(pods=1)
    world.run(300, 40)
    world.run(300, 100, seed=2)
    assert world.status["lastDecision"]["action"] == "Held"
    assert "recommendation" not in world.status
    assert RESNET.name in world.status["lastDecision"]["target"]


def with_capacity(world, rate):
    for each in world.pods:
        each.spoil = lambda report: replace(
            report, lanes={name: replace(lane, capacity=rate) for name, lane in report.lanes.items()}
        )


def test_where_no_number_of_replicas_meets_the_slo_the_last_figures_go_and_the_reason_comes():
    world = World(pods=2)
    with_capacity(world, 400.0)
    world.run(200, 30)
    assert world.status["capacity"][0]["replicas"] == 1
    assert "noCapacity" not in world.status

    world.edit(spec(0.004))
    with_capacity(world, 0.0)
    world.run(200, 30)
    assert "capacity" not in world.status
    reason = "one request alone takes 5.5ms, longer than the SLO"
    assert world.status["noCapacity"] == [{"target": "Deployment/resnet", "model": "", "reason": reason}]
    metrics = OperatorMetrics()
    metrics.read_policies(lambda: [world.policy])
    assert "carpool_target_load_replicas{" not in metrics.text().decode()

    world.edit(spec())
    with_capacity(world, 400.0)
    world.run(200, 30)
    assert world.status["capacity"][0]["replicas"] == 1
    assert "noCapacity" not in world.status


def decided(reporter, seconds, decision):
    """Report what was decided for the only model of a target, with the baseline in force."""
    learned = SimpleNamespace(rate=10.0, observed=lambda: None, decision=decision, in_force=Parameters())
    steering = SimpleNamespace(
        target=Target("shop", "Deployment", "resnet"),
        models={"": learned},
        trials=SimpleNamespace(current=None),
        trust=SimpleNamespace(blind=None),
    )
    view = SimpleNamespace(now=float(seconds), wall=EPOCH + seconds, policy=SimpleNamespace(paused=False))
    reporter.record(view, [steering], [])


def test_the_recommendation_is_the_next_step_while_that_waits_and_says_where_steps_lead():
    step, target = Parameters(max_batch=16), Parameters(max_batch=64)
    waits = Decision(
        Parameters(), False, Reason.WITHIN_STABILIZATION_WINDOW, f"{step.describe()} is next", target, step, "step"
    )
    reporter = Reporter(Status())
    for seconds in (0, 30, 60):
        decided(reporter, seconds, waits)
    found = reporter._recommendation
    assert (found.parameters, found.uncapped, found.capped_by) == (step, target, "step")
    # With Recommend the same step is recommended once it waits no longer: nothing else to write.
    for seconds in (70, 100, 130):
        decided(reporter, seconds, replace(waits, parameters=step, reason=Reason.RECOMMEND_ONLY, waiting=None))
    assert reporter._recommendation is found


@pytest.mark.parametrize("limited", ["", "step", "minWait"])
def test_the_first_recommendation_is_reported_at_once(limited):
    step, target = Parameters(max_batch=16), Parameters(max_batch=64)
    reporter = Reporter(Status())
    decided(reporter, 0, Decision(step, False, Reason.RECOMMEND_ONLY, "", target, capped_by=limited))
    assert reporter._recommendation.parameters == step


def test_what_is_over_is_replaced_although_no_other_reason_lasts():
    """Otherwise "cannot be read" stays in the status for as long as two reasons to keep the parameters alternate."""
    fell_back = LastDecision(
        action="FellBack", reason="MetricsStale", message="2 of 2 pods cannot be read", model="*",
        target="Deployment/resnet", at=timestamp(EPOCH),
    )  # fmt: skip
    reporter = Reporter(Status(last_decision=fell_back))

    def reported(seconds):
        reason = Reason.CONVERGED if seconds % 40 < 20 else Reason.TOO_FEW_SAMPLES
        decided(reporter, seconds, Decision(Parameters(), False, reason, ""))
        return reporter._last

    told = [reported(seconds) for seconds in range(0, 600, 10)]
    assert told[5] is fell_back
    assert {each.reason for each in told[7:]} <= {"Converged", "TooFewSamples"}
    assert len({id(each) for each in told}) == 2, "reasons that come and go are no news"
