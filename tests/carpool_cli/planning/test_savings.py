from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from carpool.forecasting.capacity import FULL
from carpool.forecasting.forecaster import Forecaster, Situation
from carpool.learning.arrivals import Poisson, until
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.simulation.simulator import Device, Simulation, table
from carpool_cli.planning import replica, savings
from carpool_cli.planning.assumptions import slo_policy
from carpool_cli.planning.money import Price
from carpool_cli.planning.savings import ZERO_WAIT, Stretch, stretches

POLICY = slo_policy(0.05, largest_batch=16)
CURVE = replace(ServiceTime.measured({1: 0.0055, 16: 0.013}), largest_in_flight=8)
FLAT = replace(ServiceTime.measured({1: 0.0055, 16: 0.088}), largest_in_flight=8)


def situation(service):
    return Situation(process=Poisson(1.0), service=service, target=0.05, budget=0.005, limits=POLICY.limits())


@pytest.fixture(scope="module")
def busy():
    load = [Stretch(3600.0, 2000.0), Stretch(3600.0, 500.0)]
    return savings.savings("m", situation(CURVE), POLICY, load, by_hand=Parameters(max_batch=4), price=Price(2.0))


def ways(workload):
    return {way.name: way for way in workload.ways}


def test_each_way_needs_the_replicas_that_keep_it_within_the_slo(busy):
    for way in busy.ways:
        needed = [max(1, -(-rate // (FULL * way.capacity))) for rate in (2000.0, 500.0)]
        assert way.replicas == pytest.approx(sum(needed) / 2)
        assert way.most_replicas == needed[0]
        assert way.money == pytest.approx(2.0 * 730 * way.replicas)
    assert busy.rate == pytest.approx(1250.0)


def test_nothing_is_claimed_that_zero_wait_gives_alone(busy):
    named = ways(busy)
    zero, best, single = named[ZERO_WAIT], named["Carpool at best"], named["no batching"]
    assert single.replicas > 2 * zero.replicas
    assert (zero.device_gain, zero.replicas_gain, zero.money_gain) == (0.0, 0.0, 0.0)
    assert best.replicas_gain == pytest.approx(zero.replicas - best.replicas)
    assert best.money_gain == pytest.approx(zero.money - best.money)
    assert best.device_seconds < zero.device_seconds
    # With one batch in flight zero wait carries as much: no replica is saved, and the sentence says so.
    assert best.replicas_gain == 0
    assert "no replica" in busy.note


def test_a_model_that_gains_nothing_from_batches_saves_nothing():
    found = savings.savings("flat", situation(FLAT), POLICY, [Stretch(3600.0, 300.0)])
    assert "saves nothing" in found.note
    named = ways(found)
    assert named["Carpool at best"].device_gain == pytest.approx(0.0, abs=0.01)
    assert all(way.money is None and way.money_gain is None for way in found.ways)


def test_what_is_in_force_is_what_a_sidecar_runs():
    weak = Parameters(max_batch=2)
    found = savings.savings("m", situation(CURVE), POLICY, [Stretch(3600.0, 300.0)], now=weak)
    assert ways(found)["in force now"].setting == weak.describe()


@pytest.mark.parametrize("retunes", [False, True])
def test_pods_that_run_cost_as_many_as_they_are_and_have_their_share_of_the_load_each(retunes):
    now, load = Parameters(max_batch=16), [Stretch(3600.0, 300.0)]
    found = savings.savings(
        "m", situation(CURVE), POLICY, load, now=now, pods=6, retunes=retunes, price=Price(2.0),
    )  # fmt: skip
    running, zero = ways(found)["the pods that run"], ways(found)[ZERO_WAIT]
    assert (running.replicas, running.most_replicas, running.setting) == (6, 6, now.describe())
    assert running.money == pytest.approx(2.0 * 730 * 6)
    assert running.replicas_gain == zero.replicas - 6
    # At 50/s each, hardly two requests share a batch: about 5.5 ms of each request.
    assert running.device_seconds == pytest.approx(3600 * 300 * 0.0055, rel=0.1)
    after = ways(found)["Carpool, retuned" if retunes else "in force now"]
    assert running.device_seconds > 1.2 * after.device_seconds
    assert not any("too few" in each for each in found.beware)


def test_pods_that_run_and_are_too_few_for_the_slo_are_reported():
    now, load = Parameters(max_batch=1), [Stretch(3600.0, 900.0)]
    found = savings.savings("m", situation(CURVE), POLICY, load, now=now, pods=3)
    serves = ways(found)["the pods that run"].capacity
    assert serves < 182, "a request takes 5.5 ms by itself"
    assert f"the pods that run are too few for the SLO: 300 requests/s each, and one serves {serves:.0f} within it" in (
        found.beware
    )


LIVE = replace(ServiceTime.measured({1: 0.0055, 4: 0.007}), largest_in_flight=8)
"""As a sidecar measures it at low load: no batch of more than four rows came."""


def test_what_a_tuner_put_in_force_is_not_frozen_on_fewer_replicas():
    # Chosen for 75/s and replica: pairs, after a wait. On one replica 300/s would queue for slots.
    live, weak = replace(situation(LIVE), process=Poisson(75.0)), Parameters(max_batch=2, max_wait=Duration(0.02))
    load = [Stretch(3600.0, 4 * 75.0)]
    frozen = ways(savings.savings("m", live, POLICY, load, now=weak))
    tuned = ways(savings.savings("m", live, POLICY, load, now=weak, retunes=True))
    retuned = tuned["Carpool, retuned"]
    assert "in force now" not in tuned, "it is another setting"
    assert retuned.setting != weak.describe() == frozen["in force now"].setting
    assert retuned.device_seconds < 0.9 * frozen["in force now"].device_seconds
    assert retuned.replicas <= frozen["in force now"].replicas
    alone = savings.savings("m", live, POLICY, [Stretch(3600.0, 75.0)], now=weak, retunes=True)
    assert ways(alone)["in force now"].setting == weak.describe(), "at its own load it is what runs"


def test_no_way_carries_more_than_the_best_by_sizes_that_nobody_measured():
    live = replace(situation(LIVE), process=Poisson(75.0), limits=slo_policy(0.05, largest_batch=64).limits())
    found = savings.savings("m", live, POLICY, [Stretch(3600.0, 75.0)], now=Parameters(max_batch=32))
    named = ways(found)
    assert named["in force now"].capacity <= 1.01 * named["Carpool at best"].capacity
    assert named["in force now"].setting == Parameters(max_batch=32).describe()
    assert found.beware[0].startswith("batches above 4 rows were not measured")
    assert "batches of up to 8 rows, twice the largest measured" in found.beware[1]


@pytest.mark.parametrize("service", [CURVE, LIVE, FLAT])
def test_between_the_loads_that_are_played_device_time_is_within_two_percent(service):
    parameters = Parameters(max_batch=8)
    table_of = replica.fixed(situation(service), parameters)
    for share in (0.025, 0.055, 0.08, 0.12, 0.17):
        rate = share * table_of.capacity
        at = replace(situation(service), process=Poisson(rate))
        exact = Forecaster(at).forecast(parameters).utilization
        assert table_of.utilization(rate) == pytest.approx(exact, rel=0.025)
        known = replica.fixed(situation(service), parameters, [rate])
        assert known.utilization(rate) == pytest.approx(exact, rel=0.001), "a steady load is played itself"


def test_totals_add_up_over_workloads(busy):
    twice = savings.total([busy, busy])
    for way, one in zip(twice, busy.ways, strict=True):
        assert (way.name, way.replicas, way.money) == (one.name, 2 * one.replicas, 2 * one.money)
        assert way.device_gain == pytest.approx(one.device_gain)
    other = replace(busy, ways=[way for way in busy.ways if way.name != "by hand"])
    assert "by hand" not in {way.name for way in savings.total([busy, other])}


def test_what_is_in_force_adds_to_what_is_retuned_elsewhere(busy):
    def named(name):
        return replace(busy, ways=[replace(way, name=name) if way.name == "by hand" else way for way in busy.ways])

    retuned, other = named("Carpool, retuned"), named("in force now")
    for both in ([retuned, other], [other, retuned]):
        (way,) = [way for way in savings.total(both) if way.name == "Carpool, retuned"]
        assert way.replicas == 2 * ways(busy)["by hand"].replicas
    assert "in force now" in {way.name for way in savings.total([other, other])}


def test_device_seconds_agree_with_requests_simulated_one_by_one(busy):
    zero = replica.zero_wait(situation(CURVE))
    rate = 0.6 * zero.capacity
    times = until(Poisson(rate), 60.0, Random(11))
    parameters = zero.setting(rate)
    run = Simulation(
        times, Device(times=table(CURVE.table(64))), slo=0.05, parameters=parameters, estimate=CURVE.believed(64)
    ).run()
    assert zero.utilization(rate) == pytest.approx(run.summary().device_busy / 60, rel=0.02)


def test_a_trace_is_read_by_minutes_and_scaled_at_its_own_pace():
    times = [0.5 * step for step in range(120)] + [60 + 0.25 * step for step in range(240)]
    plain = stretches(times)
    assert [each.seconds for each in plain] == pytest.approx([60.0, 60.0], rel=0.001)
    assert [each.rate for each in plain] == pytest.approx([2.0, 4.0], rel=0.01)
    scaled = stretches(times, 300.0)
    assert [each.rate for each in scaled] == pytest.approx([200.0, 400.0], rel=0.01)
    assert [each.rate for each in stretches([0.0, 1.0, 2.0, 4.0])] == pytest.approx([0.75])


def test_no_request_of_a_trace_is_left_out():
    quiet = [float(step) for step in range(60)]
    times = quiet + [60 + 0.01 * step for step in range(5900)]
    found = stretches(times)
    assert [each.rate for each in found] == pytest.approx([1.0, 100.0], rel=0.02)
    for recording in (times, quiet, [*quiet, 89.0], [0.0, 1e6]):
        assert sum(each.seconds * each.rate for each in stretches(recording)) == pytest.approx(len(recording))


def test_a_replica_beyond_its_table_answers_no_more_than_at_its_end():
    table_of = replica.fixed(situation(CURVE), Parameters(max_batch=16))
    last = table_of.rates[-1]
    good = last * (1 - table_of.misses(last))
    assert 10 * last * (1 - table_of.misses(10 * last)) == pytest.approx(good)
    assert table_of.utilization(10 * last) == table_of.busy[-1]
    assert table_of.utilization(0.0) == 0.0


def test_at_next_to_no_load_a_request_takes_what_it_takes_alone():
    table_of = replica.fixed(situation(CURVE), Parameters(max_batch=16, max_wait=Duration(0.025)))
    assert table_of.busy[0] / table_of.rates[0] < 0.9 * CURVE.time(1), "some meet at the lowest load that is played"
    for rate in (0.001, 0.1):
        assert table_of.utilization(rate) == pytest.approx(rate * CURVE.time(1), rel=0.01)
    assert table_of.utilization(table_of.rates[0]) == pytest.approx(table_of.busy[0])
