from __future__ import annotations

import pytest
from msgspec.structs import replace
from proof import courses, experiments
from proof.measures import TOLERATED
from proof.scenario import OnOff
from proof.verdict import top
from tiny_world import CAPACITY, SCENARIO, SEED, small  # noqa: F401 - a fixture

from carpool.policy.durations import Duration


@pytest.fixture(scope="module")
def reference():
    return experiments.refer(SCENARIO, SEED)


def test_an_oracle_is_what_was_best_in_the_event(reference):
    lazy = experiments.contend(SCENARIO, reference, "greedy", SEED)
    assert reference.about.capacity == CAPACITY
    assert len(reference.best) == len(reference.lazy) == 150
    for load, best, zero in zip(reference.about.loads, reference.stair.steps, lazy.stair.steps, strict=True):
        assert best.stayed == zero.stayed, "all meet the same requests"
        if load in courses.LOW:
            assert best.misses <= TOLERATED
            assert best.device_time < zero.device_time
    # Eight times the load is beyond what any setting can do.
    assert reference.stair.steps[-1].misses > 0.3
    assert top(reference.about, reference.stair) == 1.0
    assert reference.timeline.misses <= TOLERATED
    assert len(reference.timeline.course) == 30


def test_equal_seeds_give_equal_rows(reference):
    rows = experiments.contend(SCENARIO, reference, "random", SEED)
    assert rows == experiments.contend(SCENARIO, reference, "random", SEED)
    assert rows != experiments.contend(SCENARIO, reference, "random", SEED + 1)


def test_carpool_is_asked_for_forecasts_as_well(reference):
    rows = experiments.contend(SCENARIO, reference, "carpool", SEED)
    assert [one.load for one in rows.forecasts] == [0.2, 0.5]
    for one in rows.forecasts:
        assert one.told == pytest.approx(one.simulated, rel=0.2)
        assert one.realized is not None
    assert rows.timeline.phases[0].seconds is not None
    assert rows.timeline.phases[0].requests <= 120 * 0.3 * CAPACITY * 1.1


def test_forecasts_are_only_of_what_they_are_for(reference, monkeypatch):
    monkeypatch.setattr(courses, "LOADS", (0.2, 0.5))
    bursty = replace(SCENARIO, arrivals=OnOff(Duration(1.0), Duration(1.0)))
    assert experiments.contend(bursty, reference, "carpool", SEED).forecasts == []
