from __future__ import annotations

import balanced
import msgspec
import pytest

from carpool.exchange.decision import Decision, Reason, State
from carpool.policy.parameters import Parameters
from carpool_cli.planning.twin import flips

A, B, C = (Parameters(max_batch=size) for size in (8, 16, 32))


def decisions(*path):
    """Return one decision for each (setting, state)."""
    return [
        Decision(one, False, Reason.CONVERGED, "", at=float(at), state=state) for at, (one, state) in enumerate(path)
    ]


def steady(one):
    return one, State.STEADY


def exploring(one):
    return one, State.EXPLORING


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ([steady(A), exploring(B), exploring(B), steady(A)], 0),
        ([steady(A), steady(B), steady(A)], 1),
        ([steady(A), exploring(B), steady(A), exploring(B), steady(A)], 1),
        ([steady(A), exploring(B), exploring(C), steady(A)], 0),
        ([steady(A), exploring(B), steady(B), steady(A)], 1),
    ],
    ids=["explored once", "without exploring", "explored again", "two explored", "stayed, then left"],
)
def test_leaving_a_setting_that_was_explored_for_the_first_time_is_no_flip(path, expected):
    assert flips(balanced.without_explorations(decisions(*path))) == expected


def test_misses_are_judged_although_latencies_are_of_answers_only():
    kept = msgspec.json.decode(balanced.RESULTS.read_bytes(), type=balanced.Results).cells
    worse = [msgspec.structs.replace(cell, misses=cell.zero_wait_misses + 0.3) for cell in kept]
    assert balanced.verdict(worse)["misses"][0] == pytest.approx(0.3)
    assert balanced.LIMITS["misses"] < 0.3
