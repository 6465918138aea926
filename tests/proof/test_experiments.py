from __future__ import annotations

import pytest
from msgspec.structs import replace
from proof import courses, experiments, oracle
from proof.measures import TOLERATED
from proof.oracle import Entry, Level, Point
from proof.scenario import Gamma, OnOff, Phase, Poisson, Scenario
from proof.verdict import top

from carpool.policy import Duration

SCENARIO = Scenario(
    name="tiny",
    why="the reference curve with a promise so tight that it holds little",
    profile="synthetic-5-0.5",
    slo=Duration(0.03),
    arrivals=Poisson(),
    phases=(Phase(120.0, 0.3), Phase(30.0, 0.6)),
)
CAPACITY = 400.0


SEED = 3


@pytest.fixture(scope="module", autouse=True)
def small():
    """An oracle that was never searched for, and few loads."""
    points = (Point(32, 0.008, 1), Point(32, 0.0, 1))
    entry = Entry("tiny", "", CAPACITY, tuple(Level(load, 1.0, points) for load in (0.3, 0.6, 1.0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "known", lambda: {"tiny": entry})
        patch.setattr(courses, "LOADS", (0.2, 0.5, 1.0, 8.0))
        patch.setattr(courses, "MEASURED_HIGH", 3000)
        patch.setattr(courses, "BURSTS", 2)
        patch.setattr(experiments, "FORECAST_REQUESTS", 8000)
        patch.setattr(experiments, "HOUR", 60.0)
        yield


@pytest.fixture(scope="module")
def reference(small):
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


def test_an_hour_is_of_a_load_that_can_be_played():
    hour = experiments.hour(replace(SCENARIO, arrivals=Gamma(2.0)), SEED)
    assert hour is not None
    assert (hour.load, hour.rate) == (0.5, 200.0)
    assert hour.flips <= hour.changes
    assert experiments.hour(replace(SCENARIO, arrivals=OnOff(Duration(1.0), Duration(1.0))), SEED) is None


def test_fast_devices_have_no_such_hour(monkeypatch):
    monkeypatch.setattr(oracle, "capacity", lambda _: 2000.0)
    assert experiments.hour(SCENARIO, SEED) is None


def test_a_bad_setting_is_taken_back():
    pushed = experiments.rollback(SCENARIO, SEED)
    assert pushed is not None
    assert pushed.rate <= experiments.ROLLBACK_RATE
    assert pushed.misses >= experiments.BAD
    assert pushed.bad.startswith("batch 1,")
    assert pushed.requests is not None
    assert pushed.requests <= 310


def test_where_no_setting_is_bad_there_is_nothing_to_take_back(monkeypatch):
    monkeypatch.setattr(oracle, "capacity", lambda _: 60.0)
    assert experiments.rollback(SCENARIO, SEED) is None


def test_several_replicas_have_no_guard_in_common():
    assert experiments.rollback(replace(SCENARIO, replicas=2), SEED) is None
