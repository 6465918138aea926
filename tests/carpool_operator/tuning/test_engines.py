"""Engines without a sidecar, in Recommend mode: what the operator learns from their own metrics, and says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fleets import RESNET, World, spec, workload_of
from msgspec.structs import replace

sys.path.append(str(Path(__file__).parent))
from vllm import CAPACITY, scrapes

from carpool.policy.durations import Duration
from carpool.policy.generation import TokenTarget
from carpool.policy.spec import SLO, Tuning, TuningMode
from carpool_operator.api.spec import Metrics, MetricsSource, Prometheus
from carpool_operator.tuning.engines import watches_engines

TARGETS = SLO(ttft=TokenTarget(Duration(2.0)), tpot=TokenTarget(Duration(0.05)))
WATCHING = replace(
    spec(),
    slo=TARGETS,
    tuning=Tuning(mode=TuningMode.RECOMMEND),
    metrics=Metrics(source=MetricsSource.PROMETHEUS, prometheus=Prometheus(url="http://prometheus:9090")),
).validate()
LOADS = (0.3, 0.6, 0.9, 1.05, 0.8, 0.5)


@pytest.fixture(scope="module")
def fleet():
    """Scrapes of two engines."""
    return {f"resnet-{seed}": scrapes(LOADS, seed=seed) for seed in (1, 2)}


class Watched:
    """A world whose pods have no sidecar; Prometheus has one more scrape of each every 15 s."""

    def __init__(self, fleet):
        self.world = World(WATCHING, pods=0)
        self.world.workload = workload_of(replicas=2, inject=None)
        self.fleet, self.number, self.engines = fleet, 0, {}
        view = self.world.view
        self.world.view = lambda now, readings: replace(view(now, readings), engines=self.engines)

    def pass_by(self, scrapes):
        for _ in range(scrapes):
            self.engines = {RESNET: {pod: every[self.number] for pod, every in self.fleet.items()}}
            self.number += 1
            self.world.step(self.world.now + 2)
            for _ in range(6):  # between two scrapes nothing is asked
                self.engines = {}
                self.world.step(self.world.now + 2)
        return self.world


def test_only_policies_that_recommend_by_prometheus_for_both_targets_watch_engines():
    assert watches_engines(WATCHING)
    assert not watches_engines(replace(WATCHING, tuning=Tuning()))
    assert not watches_engines(replace(WATCHING, metrics=Metrics()))
    assert not watches_engines(replace(WATCHING, slo=SLO(ttft=TARGETS.ttft)))


def test_limits_are_recommended_with_a_reason_and_nothing_is_written_elsewhere(fleet):
    world = Watched(fleet).pass_by(20)
    (said,) = world.status["tokenStreams"]
    found = said["recommended"]
    # The engines carry 106 sequences at 50 ms per token; planned is with 1.15 times less.
    assert 0.7 * CAPACITY.sequences < found["maxNumSeqs"] < CAPACITY.sequences
    assert found["maxConcurrency"] == found["maxNumSeqs"] == pytest.approx(said["limit"], rel=0.1)
    assert found["maxNumBatchedTokens"] in {512, 1024, 2048}
    assert found["maxNumQueuedTokens"] > 5000
    assert "ms per output token" in found["reason"]
    assert "goodput" not in said, "nobody knows which answers were in time"
    assert not world.log


def test_capacity_and_conditions_are_those_of_the_engines(fleet):
    world = Watched(fleet).pass_by(16)
    (capacity,) = world.status["capacity"]
    assert capacity["requestsPerSecond"] == pytest.approx(CAPACITY.rate, rel=0.15)
    assert capacity["tokensPerSecond"] == pytest.approx(CAPACITY.rate * 206, rel=0.2)
    assert capacity["serving"] == 2
    # The fourth minute: 1.05 of the capacity on each of two.
    assert capacity["load"] == pytest.approx(2.1, rel=0.2)
    assert capacity["replicas"] == 3
    for kind, reason in (("Programmed", "RecommendOnly"), ("MetricsAvailable", "Available"), ("Ready", "Ready")):
        condition = world.condition(kind)
        assert (condition["status"], condition["reason"]) == ("True", reason)


def test_another_operator_goes_on_with_what_was_recommended(fleet):
    watched = Watched(fleet)
    world = watched.pass_by(12)
    before = world.status["tokenStreams"][0]["recommended"]
    world.restart_operator()
    watched.pass_by(6)
    assert world.status["tokenStreams"][0]["recommended"] == before


def test_another_operator_goes_on_with_the_load(fleet):
    watched = Watched(fleet)
    world = watched.pass_by(16)
    before = world.status["capacity"]
    world.restart_operator()
    watched.pass_by(1)
    assert world.status["capacity"] == before, "one scrape is no evidence that fewer replicas are enough"


def test_engines_that_prometheus_does_not_scrape_are_named(fleet):
    watched = Watched(fleet)
    watched.pass_by(2)
    world = watched.world
    for _ in range(60):
        watched.engines = {RESNET: dict.fromkeys(fleet, "Prometheus has no metrics of vLLM of it: is it scraped?")}
        world.step(world.now + 2)
    condition = world.condition("MetricsAvailable")
    assert (condition["status"], condition["reason"]) == ("False", "MetricsStale")
    assert "resnet-1: Prometheus has no metrics of vLLM" in condition["message"]
