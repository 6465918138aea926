"""A scenario that takes a second to play, and an oracle for it that was never searched for."""

from __future__ import annotations

import pytest
from proof import alone, courses, oracle
from proof.oracle import Entry, Level, Point
from proof.scenario import Phase, Poisson, Scenario

from carpool.policy.durations import Duration

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
    """Few loads, each played for little time."""
    points = (Point(32, 0.008, 1), Point(32, 0.0, 1))
    entry = Entry("tiny", "", CAPACITY, tuple(Level(load, 1.0, points) for load in (0.3, 0.6, 1.0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "known", lambda: {"tiny": entry})
        patch.setattr(courses, "LOADS", (0.2, 0.5, 1.0, 8.0))
        patch.setattr(courses, "MEASURED_HIGH", 3000)
        patch.setattr(courses, "BURSTS", 2)
        patch.setattr(alone, "FORECAST_REQUESTS", 8000)
        patch.setattr(alone, "HOUR", 60.0)
        yield
