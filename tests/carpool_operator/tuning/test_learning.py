from __future__ import annotations

from math import inf
from random import Random

import pytest
from fleets import counted, spec

from carpool.batching.batcher import Batcher
from carpool.batching.counters import Stats, combine
from carpool.exchange.decision import Forecasted, Reason
from carpool.learning.arrivals import Poisson, until
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Bounds, IntRange, Model, Objective, Tuning, TuningMode
from carpool.simulation.simulator import Device, Simulation, linear
from carpool_operator.tuning.evidence import Sum
from carpool_operator.tuning.learning import SELDOM, Learned, predicted

POLICY = spec().policy()


def step(learned, now, arrivals=600, *, hurried=False, **changes):
    stats = counted(arrivals, cells=[(1, arrivals, 0.0055)], **changes)
    total = Sum(1, 2.0, stats, passing=False, queued_rows=0)
    return learned.step(now, total, stats, hurried=hurried)


def test_it_starts_from_what_it_is_given_within_its_limits():
    model = Model(name="resnet", max_batch=8)
    assert Learned(0.0, POLICY, model, Parameters(max_batch=64), met=None).parameters.max_batch == 8


def test_service_times_may_come_from_more_pods_than_the_load():
    learned = Learned(0.0, POLICY, None, Parameters(), met=None)
    own, more = counted(100), counted(0, cells=[(8, 40, 0.009)])
    for now in (2.0, 4.0):
        decision = learned.step(now, Sum(1, 2.0, own, passing=False, queued_rows=0), combine([own, more]))
    assert decision.estimate is not None
    assert decision.rate == pytest.approx(50)


@pytest.mark.parametrize("passing", [True, False])
def test_to_keep_what_passes_one_by_one_is_no_decision(passing):
    """Eight workers of 40 ms at 2/s: one call at a time was kept after 5 s, before a second had met the first."""
    policy = spec(0.2, objective=Objective.BALANCED).policy()
    learned = Learned(0.0, policy, None, Parameters(), met=None)
    stats = counted(10, cells=[(1, 10, 0.04)])
    found = [learned.step(5.0 * n, Sum(1, 5.0, stats, passing=passing, queued_rows=0), stats) for n in range(1, 7)]
    assert any(each.decided and not each.change for each in found)
    assert learned.decided is not passing


def test_forecasts_are_made_surer_seldom_while_others_wait_for_their_decisions():
    def played(*, hurried):
        learned, found = Learned(0.0, POLICY, None, Parameters(), met=None), []
        for number in range(1, 71):
            step(learned, 2.0 * number, arrivals=100, hurried=hurried)
            found.append(learned.tuner.plan.assess(learned.tuner.parameters).refinement.samples)
        return found

    # It explores for 20 s, chooses anew, and rests from then on.
    assert played(hurried=False)[11:20] == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    rare = played(hurried=True)
    assert rare == [0] * 59 + [1] * 11
    assert 2.0 * (rare.index(1) + 1) == SELDOM


def test_another_policy_keeps_the_model_and_another_slo_resets_the_slo_status():
    learned = Learned(0.0, POLICY, None, Parameters(), met=True)
    step(learned, 2.0)
    tuner = learned.tuner
    learned.follow(spec(bounds=Bounds(max_batch=IntRange(max=4))).policy(), None)
    assert learned.parameters.max_batch <= 4
    assert learned.slo_status.met is True
    assert learned.tuner is tuner
    learned.follow(spec(0.2).policy(), None)
    assert learned.slo_status.met is None


def test_recommend_forecasts_what_pods_run_and_not_what_they_were_given():
    """Eight workers with 20 ms a row. One batch of 32 at a time would take seconds; first calls let them all work."""
    policy = spec(0.1, objective=Objective.BALANCED, tuning=Tuning(mode=TuningMode.RECOMMEND)).policy()
    learned, batchers, before = Learned(0.0, policy, None, Parameters(), met=None), [], [Stats(at=0.0)]

    def dispatcher():
        batchers.append(Batcher(undecided=32))
        return batchers[-1]

    def hook(now, stats):
        total, state = stats[0].since(before[0]).models[""], batchers[0].model("")
        before[0] = stats[0]
        one = Sum(1, 5.0, total, state.passing, stats[0].queued_rows, in_force=state.in_force)
        learned.step(now, one, total)

    arrivals = until(Poisson(200.0), 30.0, Random(1))
    device = Device(linear(0.0, 0.02), executors=8, cv=0.05)
    outcome = Simulation(arrivals, device, slo=0.1, seconds=30.0, dispatcher=dispatcher).every(5.0, hook).run()
    assert learned.in_force == batchers[0].model("").in_force
    assert learned.in_force.pass_through
    assert learned.parameters == Parameters()
    assert learned.decision.predicted.p99 == pytest.approx(outcome.summary(5.0).p99, rel=0.2)
    assert learned.decision.reason is not Reason.RECOMMEND_ONLY


def test_what_is_observed_is_of_the_last_half_minute():
    learned = Learned(0.0, POLICY, None, Parameters(), met=None)
    assert learned.observed() is None
    for now in range(2, 40, 2):
        step(learned, float(now), 600)
    assert learned.observed().rate == 300
    for now in range(40, 80, 2):
        step(learned, float(now), 100, misses=10)
    seen = learned.observed()
    assert (seen.rate, seen.miss_fraction, seen.goodput) == (50, 0.1, 45)
    assert seen.p99 > 0


def test_forecasts_are_written_as_people_read_them_and_infinite_ones_not_at_all():
    forecast = Forecasted(
        p50=0.0123456,
        p99=inf,
        p99_ahead=inf,
        miss_fraction=0.00123456,
        goodput=1234.5,
        device_time=0.001,
        mean_batch=7.77,
    )
    figures = predicted(forecast)
    assert (figures.p50, figures.p99, figures.miss_fraction, figures.goodput) == (0.0123, None, 0.00123, 1230)
    assert predicted(None) is None


def test_forgetting_keeps_what_runs():
    learned = Learned(0.0, POLICY, None, Parameters(max_batch=16), met=None)
    step(learned, 2.0)
    learned.forget()
    assert learned.tuner.parameters == Parameters(max_batch=16)
