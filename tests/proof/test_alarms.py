"""Forecasts that the proof's scenarios bear out raise no alarm."""

from __future__ import annotations

import pytest
from proof import courses, oracle
from proof import scenario as suite
from proof.experiments import timeline_course
from proof.ourselves import CARPOOL
from proof.world import play


@pytest.mark.parametrize(
    "name",
    [
        "bert-base-t4-crowds",  # bursts, and single batches of other sizes
        "bert-base-t4-noisy",
        "bert-large-a100-overload",
        "llama-decode-memory",  # batches smaller than the parameters say
        "resnet50-t4-stalls",
        "synthetic-8-executors",
    ],
)
def test_no_forecast_is_off(name):
    (scenario,) = (each for each in suite.load_all() if each.name == name)
    course = timeline_course(courses.phases(scenario, oracle.capacity(scenario)))
    decisions = play(scenario, CARPOOL.maker, course, 1).contender.decisions
    assert [each.alarm for each in decisions if each.alarm] == []
    assert {each.share for each in decisions} == {1.0}
