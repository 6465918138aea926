from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest
import yaml
from msgspec.structs import replace

from carpool.forecasting.forecaster import Situation
from carpool.learning.arrivals import Poisson
from carpool.learning.latency_model import ServiceTime
from carpool.policy.parameters import Parameters
from carpool.simulation.simulator import Device, Simulation, table
from carpool_cli.planning import autoscaling, replica
from carpool_cli.planning.assumptions import slo_policy
from carpool_cli.planning.autoscaling import (
    CPU,
    LOAD,
    REQUESTS,
    STEP,
    Autoscaler,
    AutoscalerError,
    clairvoyant,
    diurnal,
    play,
    summary,
)
from carpool_cli.planning.replica import Replica

EXAMPLE = Path(__file__).parents[3] / "examples/autoscaling/hpa.yaml"

# Carries 100/s and is busy in proportion; beyond that it misses what it can't serve.
PLAIN = Replica(100.0, (100.0, 200.0), (1.0, 1.0), (0.0, 0.5), (Parameters(), Parameters()), 0.01)
OURS = Autoscaler(metric=LOAD, target=0.9, most=20)


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
        steps = play(replace(OURS, scale_in_after=window), PLAIN, steady(350.0, 5) + steady(80.0, 10), cold_start=0.0)
        fallen = next(index for index, count in enumerate(steps.replicas) if count < 4)
        assert (fallen - 20) * STEP == pytest.approx(window + STEP, abs=STEP)


def test_a_pause_shorter_than_the_window_changes_nothing():
    rates = steady(350.0, 5) + steady(80.0, 3) + steady(350.0, 5)
    assert set(play(OURS, PLAIN, rates, cold_start=60.0).replicas) == {4}


def test_within_the_tolerance_nothing_changes():
    # 4 replicas at 0.9 have 360/s; 390/s is 8 % more.
    assert set(play(OURS, PLAIN, steady(360.0, 2) + steady(385.0, 20), cold_start=0.0, seed=3).replicas[:8]) == {4}


def test_at_most_twice_as_many_or_four_more_are_started_at_a_time():
    steps = play(replace(OURS, most=100), PLAIN, steady(80.0, 1) + steady(3000.0, 2), cold_start=0.0)
    assert steps.replicas[4:8] == [1, 5, 10, 20]


def test_replicas_that_start_do_not_make_cpu_percent_ask_for_more():
    scaler = Autoscaler(metric=CPU, target=60, most=50)
    steps = play(scaler, PLAIN, steady(50.0, 2) + steady(100.0, 3), cold_start=600.0)
    # 100 % of one is 167 % of the target: two; the second one starts and counts as idle.
    assert set(steps.replicas[9:]) == {2}


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
    for scaler in (OURS, Autoscaler(metric=REQUESTS, target=90.0, most=20), Autoscaler(metric=CPU, target=90, most=20)):
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


# -- manifests


def hpa(metric, **spec):
    return {"kind": "HorizontalPodAutoscaler", "spec": {"maxReplicas": 8, "metrics": [metric], **spec}}


def test_manifests_are_read_with_the_controllers_defaults():
    cpu = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 60}}}
    found = autoscaling.read(hpa(cpu, behavior={"scaleDown": {"stabilizationWindowSeconds": 60}}))
    assert found == Autoscaler(metric=CPU, target=60.0, least=1, most=8, scale_in_after=60.0)
    example = yaml.safe_load(EXAMPLE.read_text("utf-8"))
    assert autoscaling.read(example) == Autoscaler(metric=LOAD, target=0.9, least=1, most=8)
    pods = {"type": "Pods", "pods": {"metric": {"name": "requests_per_second"}, "target": {"averageValue": "2k"}}}
    assert autoscaling.read(hpa(pods)).target == 2000.0


def test_scaled_objects_are_read_too():
    trigger = {"type": "metrics-api", "metadata": {"targetValue": "0.9", "valueLocation": "load"}}
    spec = {"minReplicaCount": 0, "maxReplicaCount": 4, "triggers": [trigger]}
    found = autoscaling.read({"kind": "ScaledObject", "spec": spec})
    assert found == Autoscaler(metric=LOAD, target=0.9, least=1, most=4)
    query = {"type": "prometheus", "metadata": {"threshold": "50", "query": "sum(rate(carpool_arrivals_total[1m]))"}}
    assert autoscaling.read({"kind": "ScaledObject", "spec": {**spec, "triggers": [query]}}).metric == REQUESTS


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"kind": "Deployment"}, "no HorizontalPodAutoscaler"),
        (hpa({"type": "Object"}), "Object can't be simulated"),
        (hpa({"type": "Pods", "pods": {"metric": {"name": "x"}, "target": {"averageValue": "1"}}}), "'x' can't be"),
        ({"kind": "HorizontalPodAutoscaler", "spec": {"metrics": []}}, "0 metrics"),
        ({"kind": "ScaledObject", "spec": {"triggers": [{"type": "kafka"}]}}, "'kafka' can't be"),
    ],
)
def test_what_can_not_be_simulated_is_named(document, words):
    with pytest.raises(AutoscalerError, match=words):
        autoscaling.read(document)


def test_a_day_swings_between_its_lowest_and_its_peak():
    rates = diurnal(1000.0)
    assert len(rates) == 86_400 / STEP
    assert (min(rates), max(rates)) == pytest.approx((150.0, 1000.0), rel=1e-3)
    assert rates.index(min(rates)) * STEP == pytest.approx(4 * 3600)
    assert math.fsum(rates) / len(rates) == pytest.approx(575.0)


def test_recorded_arrivals_become_rates():
    assert autoscaling.binned([0.0, 1.0, 14.9, 15.0, 29.0, 31.0], 10.0) == [2.0, pytest.approx(20 / 15)]
