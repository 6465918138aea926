from __future__ import annotations

import math
from random import Random

import pytest
from msgspec.structs import replace

from carpool.forecasting.forecaster import Situation
from carpool.learning.arrivals import Poisson
from carpool.learning.latency_model import ServiceTime
from carpool.policy.parameters import Parameters
from carpool.simulation.simulator import Device, Simulation, table
from carpool_cli.autoscaling import days
from carpool_cli.autoscaling.controller import CPU, DOWN, LOAD, NEEDED, REQUESTS, Autoscaler, Behavior, Metric, Rules
from carpool_cli.autoscaling.days import STEP, clairvoyant, diurnal, play, summary
from carpool_cli.planning import replica
from carpool_cli.planning.assumptions import slo_policy
from carpool_cli.planning.replica import Replica

# Carries 100/s and is busy in proportion; beyond that it misses what it can't serve.
PLAIN = Replica(100.0, (100.0, 200.0), (1.0, 1.0), (0.0, 0.5), (Parameters(), Parameters()), 0.01)
OURS = Autoscaler(metrics=(Metric(LOAD, 0.9),), most=20)

LOADS, CPUS = Metric(LOAD, 0.9), Metric(CPU, 60.0)
METRICS = {"load": (LOADS,), "cpu": (CPUS,), "both": (LOADS, CPUS), "both, the other way round": (CPUS, LOADS)}


def steady(rate, minutes):
    return [rate] * round(60 * minutes / STEP)


# -- what an HPA does


def test_more_load_starts_replicas_at_once_and_they_serve_after_their_cold_start():
    steps = play(OURS, PLAIN, steady(90.0, 2) + steady(350.0, 5), cold_start=60.0)
    rise = 8
    assert steps.replicas[rise] == 1
    assert steps.replicas[rise + 1] == 4
    assert steps.serving[rise : rise + 5] == [1, 1, 1, 1, 4]
    assert steps.missed[rise] > 0.4
    assert steps.missed[-1] == 0.0


def test_less_load_ends_replicas_after_the_window_only():
    for window in (0.0, 120.0, 300.0):
        scaler = replace(OURS, behavior=Behavior(down=Rules(window, DOWN.policies)))
        steps = play(scaler, PLAIN, steady(350.0, 5) + steady(80.0, 10), cold_start=0.0)
        fallen = next(index for index, count in enumerate(steps.replicas) if count < 4)
        assert (fallen - 20) * STEP == pytest.approx(window + STEP, abs=STEP)


def test_a_pause_shorter_than_the_window_changes_nothing():
    rates = steady(350.0, 5) + steady(80.0, 3) + steady(350.0, 5)
    assert set(play(OURS, PLAIN, rates, cold_start=60.0).replicas) == {4}


def test_within_the_tolerance_nothing_changes():
    # 4 replicas at 0.9 have 360/s; 390/s is 8 % more.
    assert set(play(OURS, PLAIN, steady(360.0, 2) + steady(385.0, 20), cold_start=0.0, seed=3).replicas[:8]) == {4}


def test_at_most_twice_as_many_or_four_are_started_at_a_time():
    steps = play(replace(OURS, most=100), PLAIN, steady(80.0, 1) + steady(3000.0, 2), cold_start=0.0)
    assert steps.replicas[4:8] == [1, 4, 8, 16]


def test_replicas_that_start_do_not_make_cpu_percent_ask_for_more():
    scaler = Autoscaler(metrics=(Metric(CPU, 60),), most=50)
    steps = play(scaler, PLAIN, steady(50.0, 2) + steady(100.0, 3), cold_start=600.0)
    # 100 % of one is 167 % of the target: two; the second one starts and counts as idle.
    assert set(steps.replicas[9:]) == {2}


def test_replicas_needed_are_whole_and_the_most_of_five_minutes():
    """As the operator counts them, each replica up to 90 %: 188/s need three, which a load of 0.9 tolerates on two."""
    rates = steady(150.0, 2) + steady(188.0, 2) + steady(150.0, 20)
    eager = replace(OURS, behavior=Behavior(down=Rules(0.0, DOWN.policies)))
    assert set(play(eager, PLAIN, rates, cold_start=0.0).replicas) == {2}
    needed = play(replace(eager, metrics=(Metric(NEEDED, 1.0),)), PLAIN, rates, cold_start=0.0).replicas
    assert needed[:8] == [2] * 8
    assert set(needed[9 : 16 + 20]) == {3}, "until 300 s after the last one that needs three"
    assert set(needed[16 + 22 :]) == {2}


def test_of_several_metrics_the_one_that_asks_for_most_replicas_counts():
    """A replica is 100 % busy at 100/s: at 200/s, a load of 0.9 takes three, and 60 % of CPU takes four."""
    rates = steady(50.0, 2) + steady(200.0, 5)
    of = {name: replace(OURS, metrics=metrics) for name, metrics in METRICS.items()}
    ends = {name: play(each, PLAIN, rates, cold_start=0.0).replicas[-1] for name, each in of.items()}
    assert ends == {"load": 3, "cpu": 4, "both": 4, "both, the other way round": 4}
    begins = {name: play(each, PLAIN, steady(200.0, 1), cold_start=0.0).replicas[0] for name, each in of.items()}
    assert begins == ends, "it begins with as many as the first load needs"


def test_only_replicas_needed_are_the_most_of_five_minutes():
    rates = steady(350.0, 5) + steady(80.0, 20)
    quick = replace(OURS, behavior=Behavior(down=Rules(0.0, DOWN.policies)))
    needed, load = Metric(NEEDED, 1.0), Metric(LOAD, 0.5)
    asked = ((needed,), (load,), (needed, load))
    of = [play(replace(quick, metrics=metrics), PLAIN, rates, cold_start=0.0).replicas for metrics in asked]
    assert (set(of[1][2:20]), set(of[1][22:])) == ({7}, {2}), "the load asks for 2 at once"
    assert min(of[0][22:38]) > 2, "NEEDED does so after 300 s"
    assert of[2][2:20] == of[1][2:20]
    assert of[2][22:] == [max(each) for each in zip(of[0][22:], of[1][22:], strict=True)]


def test_bounds_are_kept():
    bounded = replace(OURS, least=2, most=3)
    steps = play(bounded, PLAIN, steady(10.0, 10) + steady(2000.0, 10), cold_start=15.0)
    assert (min(steps.replicas), max(steps.replicas)) == (2, 3)


# -- the fewest possible


def test_the_fewest_possible_start_in_time_and_are_kept_through_a_short_pause():
    rates = steady(80.0, 5) + steady(180.0, 5) + steady(80.0, 0.5) + steady(180.0, 5) + steady(80.0, 5)
    steps = clairvoyant(PLAIN, rates, cold_start=60.0)
    assert steps.replicas[15] == 1
    assert steps.replicas[16] == 2, "four steps ahead"
    assert set(steps.replicas[16:62]) == {2}
    assert steps.serving[20] == 2
    assert max(steps.missed) == 0.0
    assert summary("", steps).replica_hours == pytest.approx((82 + 46) * STEP / 3600)


def test_no_autoscaler_takes_less_at_no_more_misses():
    rates = diurnal(700.0)
    best = summary("", clairvoyant(PLAIN, rates, cold_start=60.0))
    for scaler in (
        OURS,
        Autoscaler(metrics=(Metric(REQUESTS, 90.0),), most=20),
        Autoscaler(metrics=(Metric(CPU, 90),), most=20),
    ):
        assert summary("", play(scaler, PLAIN, rates, cold_start=60.0)).replica_hours > best.replica_hours


def test_over_a_day_the_load_costs_little_more_than_the_fewest_possible():
    rates = diurnal(700.0)
    best = summary("", clairvoyant(PLAIN, rates, cold_start=60.0))
    ours = summary("", play(OURS, PLAIN, rates, cold_start=60.0))
    assert ours.replica_hours <= 1.15 * best.replica_hours
    assert ours.misses <= 0.01


# -- against requests one by one


def test_steps_from_the_table_agree_with_requests_simulated_one_by_one():
    service = replace(ServiceTime.measured({1: 0.0055, 16: 0.013}), largest_in_flight=8)
    policy = slo_policy(0.05, largest_batch=16)
    of = Situation(process=Poisson(1.0), service=service, target=0.05, budget=0.005, limits=policy.limits())
    zero = replica.zero_wait(of)
    rates = [share * zero.capacity for share in (0.3, 0.6, 0.9, 1.2, 0.5)]
    rng, times = Random(5), []
    for index, rate in enumerate(rates):
        now = index * STEP
        while (now := now + rng.expovariate(rate)) < (index + 1) * STEP:
            times.append(now)
    run = Simulation(
        times, Device(times=table(service.table(64))), slo=0.05, parameters=zero.setting(1.0),
        estimate=service.believed(64), shed_slo=True,
    ).run()  # fmt: skip
    found = [run.summary(index * STEP, (index + 1) * STEP) for index in range(len(rates))]
    for rate, stretch in zip(rates, found, strict=False):
        assert zero.misses(rate) == pytest.approx(stretch.miss_fraction, abs=0.02)
        assert zero.utilization(rate) == pytest.approx(stretch.device_busy / STEP, abs=0.03)


# -- none at night

ASLEEP = replace(OURS, least=0)


def test_the_last_replica_ends_after_a_pause_and_the_next_request_starts_one():
    rates = steady(50.0, 2) + steady(0.0, 10) + steady(50.0, 3)
    steps = play(ASLEEP, PLAIN, rates, cold_start=60.0)
    idle, comes = 8, 48
    assert set(steps.replicas[: idle + 20]) == {1}
    assert set(steps.replicas[idle + 20 : comes]) == {0}, "300 s without a request are over"
    assert (steps.replicas[comes], steps.serving[comes : comes + 5]) == (1, [0, 0, 0, 0, 1])
    # Four steps of requests wait for it: all of them are late, and come at once with those of the fifth.
    assert steps.held[comes : comes + 5] == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert steps.missed[comes + 4] == pytest.approx(PLAIN.misses(250.0))
    day = summary("", steps)
    assert day.held == pytest.approx(4 / 20)
    assert day.misses == pytest.approx((4 + steps.missed[comes + 4]) / 20, abs=0.01)
    assert steps.missed[-1] == 0.0


def test_what_was_held_asks_for_more_replicas_like_any_request():
    steps = play(ASLEEP, PLAIN, [0.0, *steady(200.0, 5)], cold_start=30.0)
    assert steps.replicas[0] == 0
    served = steps.serving.index(1)
    # 45 s of requests in 15 s: six replicas' worth. The controller starts four of them at once.
    assert steps.replicas[served + 1] == 4


def test_a_cooldown_is_counted_from_the_last_request():
    rates = steady(50.0, 1) + [*steady(0.0, 1), 5.0] * 8
    # A minute without any: the last replica of 45 s is gone for a step.
    for cooldown, least in ((300.0, 1), (60.0, 1), (45.0, 0)):
        steps = play(replace(ASLEEP, cooldown=cooldown), PLAIN, rates, cold_start=15.0)
        assert min(steps.replicas) == least


def test_a_request_that_waits_for_the_first_replica_is_no_pause():
    """KEDA's HTTP add-on counts a request from when it comes until it is answered."""
    steps = play(ASLEEP, PLAIN, [0.0, 1 / STEP, *steady(0.0, 30)], cold_start=600.0)
    served, cooldown = 41, 20
    assert steps.serving[served - 1 : served + 1] == [0, 1]
    assert steps.replicas == [0] + [1] * (served + cooldown) + [0] * (121 - served - cooldown)


def test_a_replica_that_is_never_needed_is_never_started():
    steps = play(ASLEEP, PLAIN, steady(0.0, 5), cold_start=60.0)
    assert summary("", steps).replica_hours == 0.0
    assert summary("", steps).misses == 0.0


def test_the_fewest_possible_are_none_where_nothing_comes():
    steps = clairvoyant(PLAIN, steady(0.0, 5) + steady(50.0, 5), cold_start=60.0, least=0)
    assert steps.replicas[:20] == [0] * 16 + [1] * 4
    assert sum(steps.held) == 0.0


def test_requests_drawn_by_chance_are_whole_and_some_steps_have_none():
    rates = days.drawn([0.01] * 4000 + [100.0] * 400, 3)
    assert {round(each * STEP, 6) % 1 for each in rates} == {0.0}
    seldom, often = rates[:4000], rates[4000:]
    assert seldom.count(0.0) / 4000 == pytest.approx(math.exp(-0.15), abs=0.02)
    assert math.fsum(seldom) / 4000 == pytest.approx(0.01, rel=0.1)
    assert math.fsum(often) / 400 == pytest.approx(100.0, rel=0.01)


# -- loads


def test_a_day_swings_between_its_lowest_and_its_peak():
    rates = diurnal(1000.0)
    assert len(rates) == 86_400 / STEP
    assert (min(rates), max(rates)) == pytest.approx((150.0, 1000.0), rel=1e-3)
    assert rates.index(min(rates)) * STEP == pytest.approx(4 * 3600)
    assert math.fsum(rates) / len(rates) == pytest.approx(575.0)


def test_recorded_arrivals_become_rates():
    assert days.binned([0.0, 1.0, 14.9, 15.0, 29.0, 31.0], 10.0) == [2.0, pytest.approx(20 / 15)]
