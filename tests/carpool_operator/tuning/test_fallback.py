"""Simulated fleets whose readings are wrong, or missing."""

from __future__ import annotations

from math import nan

import pytest
from fleets import RESNET, World, spec
from msgspec.structs import replace

from carpool.policy.parameters import Parameters
from carpool.policy.spec import Fallback, FallbackBehavior, Tuning, TuningMode


def test_nothing_is_decided_on_numbers_that_are_none():
    world = World(pods=3)
    world.run(900, 4)
    documents = len(world.log)
    world.spoil(lambda report: replace(report, stats=replace(report.stats, at=nan)))
    world.run(3000, 60, seed=2)
    assert len(world.log) == documents
    assert world.condition("MetricsAvailable")["reason"] == "MetricsStale"
    assert "clock is no number" in world.condition("MetricsAvailable")["message"]
    world.spoil(lambda report: report)
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
