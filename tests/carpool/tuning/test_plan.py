from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from carpool.forecasting import capacity as searching
from carpool.learning.arrivals import Poisson, until
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Objective, Tuning, TuningMode
from carpool.simulation.simulator import Device, Simulation, table
from carpool.tuning import plan
from carpool.tuning.tuner import INTERVAL, Tuner
from carpool_cli.planning import replica
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.recommending import recommend
from carpool_cli.planning.savings import Stretch, savings
from carpool_cli.planning.twin import Pilot

TIMES = (0.0, *(0.005 + 0.0005 * rows for rows in range(1, 129)))
TRUTH = 1490.0
"""Requests/s that this device carries within 50 ms (tests/carpool/forecasting/test_capacity.py)."""


def served(policy, rate, seconds=30.0, **settings):
    tuner = Tuner(policy, **settings)
    pilot = Pilot(tuner)
    simulation = Simulation(
        until(Poisson(rate), seconds, Random(3)),
        Device(times=table(TIMES), cv=0.02),
        slo=0.05,
        parameters=tuner.parameters,
        admission=policy.admission,
    )
    simulation.every(INTERVAL, pilot.observe).run()
    return tuner, pilot


def test_after_half_a_minute_a_tuner_knows_what_its_replica_can_serve():
    tuner, pilot = served(for_p99(0.05, Objective.EFFICIENCY), 0.5 * TRUTH)
    found = tuner.plan.capacity(tuner.parameters)
    assert found.rate == pytest.approx(TRUTH, rel=0.1)
    assert found.lower <= found.rate
    expected = pilot.decisions[-1].predicted
    assert 0 < expected.lowest_utilization <= expected.utilization + 0.02


def test_sizes_that_were_never_measured_add_nothing_to_the_capacity():
    tuner, _ = served(for_p99(0.05), 40.0)
    measured = tuner.belief.service.largest_measured
    found = tuner.plan.capacity(tuner.parameters)
    assert found.parameters.max_batch <= measured < 32
    assert found.rate < 0.8 * TRUTH
    # `savings`, `recommend` and `simulate --from-running` say the same of what was measured.
    situation = tuner.plan.forecaster.situation
    assert replica.carried(situation).rate == pytest.approx(found.rate, rel=0.03)
    assert recommend(situation).highest_load == replica.carried(situation).rate
    by = {way.name: way.capacity for way in savings("m", situation, for_p99(0.05), [Stretch(60.0, 40.0)]).ways}
    assert by["Carpool at best"] == replica.carried(situation).rate
    assert by["zero wait"] == pytest.approx(found.zero_wait, rel=0.03)
    assert by["no batching"] == pytest.approx(found.alone, rel=0.03)


def test_of_held_parameters_it_is_theirs_and_the_best_where_somebody_else_turns_them():
    policy = replace(for_p99(0.05), tuning=Tuning(mode=TuningMode.HOLD))
    parameters = Parameters(max_batch=8, max_wait=Duration(0.0))
    tuner, _ = served(policy, 600.0, 10.0, parameters=parameters)
    held, best = (tuner.plan.capacity(tuner.parameters, best=each) for each in (False, True))
    assert held.parameters == parameters
    assert held.rate <= 8 / TIMES[8]
    assert best.rate >= 0.99 * held.rate


def test_a_baseline_that_is_written_is_what_was_set_by_hand():
    assert served(for_p99(0.05), 300.0, 10.0)[0].plan.capacity(Parameters()).by_hand == 0, "nobody wrote one"
    policy = replace(for_p99(0.05, Objective.EFFICIENCY), baseline=Parameters(max_batch=4))
    whole, _ = served(policy, 600.0)
    half, _ = served(replace(policy, device_share_percent=50), 600.0)
    found, part = whole.plan.capacity(whole.parameters), half.plan.capacity(half.parameters)
    assert found.alone < found.by_hand < found.zero_wait
    assert found.by_hand == pytest.approx(4 / TIMES[4], rel=0.1)
    assert part.by_hand == pytest.approx(found.by_hand / 2, rel=0.05)
    # No more of it is promised than was measured.
    large, _ = served(replace(for_p99(0.05), baseline=Parameters(max_batch=128)), 40.0, 10.0)
    assert large.plan.capacity(large.parameters).by_hand < 0.8 * TRUTH


def test_a_device_that_others_share_serves_its_part():
    whole, _ = served(for_p99(0.05), 300.0, 10.0)
    half, _ = served(replace(for_p99(0.05), device_share_percent=50), 300.0, 10.0)
    one, part = whole.plan.capacity(whole.parameters), half.plan.capacity(half.parameters)
    assert part.alone == pytest.approx(one.alone / 2, rel=0.05)


def test_nothing_is_searched_twice_and_nothing_without_a_load(monkeypatch):
    assert Tuner(for_p99(0.05)).plan.capacity(Parameters()) is None
    tuner, _ = served(for_p99(0.05), 300.0, 10.0)
    found = tuner.plan.capacity(tuner.parameters)
    monkeypatch.setattr(plan, "capacity", lambda *_: pytest.fail("searched again"))
    assert tuner.plan.capacity(tuner.parameters) is found
    assert searching.replicas(found.rate / found.rate) == 2, "a full replica needs another one"


def test_evidence_that_does_not_count_rows_is_of_requests_of_one_row():
    tuner, _ = served(for_p99(0.05), 300.0, 10.0)
    tuner.belief.load.rows = 0.0
    tuner.plan.make(tuner.parameters, (), 10.0)
    assert tuner.plan.forecaster.situation.rows == 1
    assert tuner.plan.choice.efficient.holds_now
