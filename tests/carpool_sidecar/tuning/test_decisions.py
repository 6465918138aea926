from __future__ import annotations

import logging

import pytest

from carpool.exchange.decision import Decision, Reason
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_sidecar.tuning.decisions import Decisions

SAVES, WAITS = Reason.SAVES_DEVICE_TIME, Reason.WITHIN_STABILIZATION_WINDOW


def wait(milliseconds):
    return Parameters(max_batch=64, max_wait=Duration(milliseconds / 1000), max_in_flight=1)


TARGET = wait(25)


def step(milliseconds, reason=SAVES):
    """A change towards the target: a step of a ramp, or the last one."""
    capped_by = "" if milliseconds == 25 else "step"
    message = f"to {milliseconds} ms"
    return Decision(wait(milliseconds), True, reason, message, uncapped=TARGET, capped_by=capped_by)


def kept(reason, capped_by="", uncapped=TARGET):
    return Decision(wait(1), False, reason, "kept", uncapped=uncapped, capped_by=capped_by)


@pytest.fixture
def decided(caplog):
    """Take decisions on a model; the log lines and the history so far are its attributes."""
    caplog.set_level("INFO")
    decisions = Decisions(logging.getLogger("carpool"))

    def decided(*each, model="m"):
        for decision in each:
            decisions.add(model, decision)

    decided.lines = lambda: [(line.detail, getattr(line, "target", "")) for line in caplog.records]
    decided.history = lambda: [(each.decision.message, each.times) for each in decisions.recent]
    decided.counts = decisions.counts
    return decided


def test_a_ramp_is_one_line_when_it_begins_and_one_when_it_ends(decided):
    for milliseconds in (1, 2, 4, 8, 16):
        decided(step(milliseconds), *[kept(WAITS, "step")] * 20)
    decided(step(25), kept(Reason.CONVERGED))
    assert decided.lines() == [("to 1 ms", TARGET.describe()), ("to 25 ms", "")]
    assert decided.history() == [("to 1 ms", 1), ("kept", 100), ("to 25 ms", 1), ("kept", 1)]
    assert decided.counts["Change", "SavesDeviceTime"] == 6


def test_a_ramp_goes_on_after_a_moment_without_a_decision(decided):
    decided(step(1), kept(Reason.HOST_STALLED, uncapped=None), kept(WAITS, "step"), step(2))
    assert [detail for detail, _ in decided.lines()] == ["to 1 ms"]


@pytest.mark.parametrize(
    "between",
    [
        kept(Reason.CONVERGED),
        kept(Reason.WOULD_FLIP, "evidence"),
        Decision(wait(0), True, Reason.PASSES_THROUGH, "no request for 30s"),
    ],
)
def test_a_ramp_that_was_given_up_may_begin_again(decided, between):
    decided(step(1), step(2), between, step(4), step(8))
    assert [detail for detail, _ in decided.lines() if detail.startswith("to")] == ["to 1 ms", "to 4 ms"]


def test_a_step_for_another_reason_is_logged(decided):
    decided(step(1), step(2, Reason.MISSES_CONFIRMED), step(4, Reason.MISSES_CONFIRMED))
    assert [detail for detail, _ in decided.lines()] == ["to 1 ms", "to 2 ms"]


def test_each_model_has_ramps_of_its_own(decided):
    decided(step(1))
    decided(step(1), step(2), model="n")
    decided(step(2))
    assert [detail for detail, _ in decided.lines()] == ["to 1 ms", "to 1 ms"]
