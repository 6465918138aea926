from __future__ import annotations

import pytest
from msgspec.structs import replace
from proof import courses
from proof.scenario import Diurnal, OnOff, Phase, Poisson, Scenario

from carpool.policy.durations import Duration

PLAIN = Scenario(
    name="plain",
    why="the reference curve",
    profile="synthetic-5-0.5",
    slo=Duration(0.05),
    arrivals=Poisson(),
    phases=(Phase(120.0, 0.3), Phase(40.0, 0.6), Phase(40.0, 0.6, 2.0), Phase(40.0, 0.3, 2.0)),
)


@pytest.mark.parametrize("capacity", [30.0, 300.0, 6000.0])
def test_every_step_is_judged_by_enough_requests_after_it_settled(capacity):
    stair = courses.stair(PLAIN, capacity)
    assert [step.load for step in stair.steps] == list(courses.LOADS)
    end = 0.0
    for step, stretch in zip(stair.steps, stair.course, strict=True):
        assert stretch.rate == step.load * capacity
        assert end < step.start < step.stop
        least = courses.MEASURED_LOW if step.load in courses.LOW else courses.MEASURED_HIGH
        assert (step.stop - step.start) * stretch.rate >= least
        end += stretch.seconds
        assert step.stop == end


def test_a_tuner_has_time_to_find_its_first_setting():
    # Six riskier steps, each after 10 s and 300 requests: at 3 requests/s these take 600 s.
    assert courses.stair(PLAIN, 30.0).steps[0].start >= 600
    assert courses.stair(PLAIN, 6000.0).steps[0].start >= 60


def test_what_is_measured_of_a_day_is_whole_days():
    stair = courses.stair(replace(PLAIN, arrivals=Diurnal(0.5, Duration(30.0))), 1000.0)
    for step in stair.steps:
        assert step.start % 30 == 0
        assert step.stop % 30 == 0


def test_what_is_measured_of_bursts_are_many():
    stair = courses.stair(replace(PLAIN, arrivals=OnOff(Duration(1.0), Duration(1.0))), 1000.0)
    assert all(step.stop - step.start >= 40 for step in stair.steps)


def test_phases_are_distinguished_by_what_changes():
    phases = courses.phases(PLAIN, 100.0)
    assert [(phase.kind, phase.start, phase.rate) for phase in phases] == [
        ("start", 0.0, 30.0),
        ("load up", 120.0, 60.0),
        ("device", 160.0, 60.0),
        ("load down", 200.0, 30.0),
    ]
