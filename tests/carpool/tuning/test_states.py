"""Which state the tuner is in: the first that applies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from examples import parameters
from msgspec.structs import replace

from carpool.exchange.decision import State
from carpool.policy.spec import Admission, ShedAt, Tuning, TuningMode
from carpool.tuning.requirements import Requirements
from carpool.tuning.states import state_of
from carpool_cli.planning.assumptions import for_p99

POLICY = for_p99(0.05)


def state(point=None, *, policy=POLICY, chosen=True, meets=True, **changes):
    choice = SimpleNamespace(efficient=SimpleNamespace(holds_now=meets)) if chosen else None
    flags = {"known": True, "sheds": False, "cautious": False, "explores": False} | changes
    return state_of(
        point or parameters(8), Requirements.of(policy, None), SimpleNamespace(choice=choice), **flags
    )  # fmt: skip


def test_requests_are_batched_or_pass_through():
    assert state() is State.STEADY
    assert state(parameters(8, passing=True)) is State.PASS_THROUGH


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"explores": True}, State.EXPLORING),
        ({"explores": True, "cautious": True}, State.ROLLED_BACK),
        ({"explores": True, "cautious": True, "sheds": True}, State.SHEDDING),
        ({"explores": True, "cautious": True, "sheds": True, "meets": False}, State.OVERLOADED),
        ({"explores": True, "cautious": True, "sheds": True, "meets": False, "known": False}, State.LEARNING),
    ],
)
def test_the_first_that_applies_is_the_state(changes, expected):
    assert state(**changes) is expected


def test_a_held_policy_is_held_whatever_else_there_is():
    held = replace(POLICY, tuning=Tuning(mode=TuningMode.HOLD))
    assert state(policy=held, known=False, sheds=True, meets=False) is State.HELD


def test_without_a_choice_the_tuner_learns_but_for_requests_that_pass():
    assert state(chosen=False) is State.LEARNING
    assert state(parameters(8, passing=True), chosen=False) is State.PASS_THROUGH


@pytest.mark.parametrize(
    ("shed_at", "expected"),
    [(ShedAt.AUTOMATIC, State.SHEDDING), (ShedAt.SLO, State.SHEDDING), (ShedAt.DEADLINE, State.STEADY)],
)
def test_where_only_deadlines_refuse_a_request_there_is_no_state_for_it(shed_at, expected):
    assert state(policy=replace(POLICY, admission=Admission(shed_at=shed_at)), sheds=True) is expected
