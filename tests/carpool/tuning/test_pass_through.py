"""When requests pass one by one, in the simulator."""

from __future__ import annotations

import re

import pytest
from examples import GPU, poisson, policy

from carpool.exchange.decision import Reason
from carpool.policy.parameters import Parameters
from carpool.policy.spec import PassThrough, PassThroughMode
from carpool.simulation.simulator import Device, linear
from carpool_cli.planning.twin import tuned


def test_a_trickle_passes_through_and_says_why():
    decisions = tuned(poisson(2.0, 120), GPU, policy()).decisions
    final = decisions[-1].parameters
    assert final.pass_through
    assert final.max_wait == 0
    reason = next(d for d in decisions if d.change and d.parameters.pass_through)
    assert reason.reason is Reason.PASSES_THROUGH
    assert re.search(r"batching would save [0-9]\.[0-9]% of the device time", reason.message)


@pytest.mark.parametrize("seed", [4, 7])
def test_where_first_batches_are_slow_nobody_passes_on_the_strength_of_a_line(seed):
    # 13 ms up to 14 rows and 0.9 ms a row beyond: the line through what is measured ends at 1 ms for a row by itself.
    device = Device(times=lambda rows, _: max(0.013, 0.0009 * rows + 0.0005), cold=10.0, cv=0.05)
    outcome, decisions = tuned(poisson(380, 15, seed), device, policy(slo=0.15))
    assert not any(decision.parameters.pass_through for decision in decisions)
    # A dozen first batches take a third of a second each, and the first ones are not known for what they are.
    assert outcome.summary(7.0).miss_fraction < 0.01


def test_pass_through_ends_when_traffic_comes():
    times = poisson(2.0, 60) + [60.0 + time for time in poisson(600, 60, seed=2)]
    outcome, decisions = tuned(times, GPU, policy())
    assert any(d.parameters.pass_through for d in decisions if d.at < 60.0)
    assert not decisions[-1].parameters.pass_through
    assert outcome.summary(70.0).miss_fraction < 0.01


@pytest.mark.parametrize("mode", list(PassThroughMode))
def test_the_pass_through_mode_is_kept(mode):
    decisions = tuned(poisson(2.0, 90), GPU, policy(pass_through=PassThrough(mode=mode))).decisions
    assert decisions[-1].parameters.pass_through == (mode is not PassThroughMode.NEVER)


def test_where_requests_always_pass_nothing_is_explored_from_the_first_second_on():
    device = Device(times=linear(0.005, 0.0005), executors=4)
    always = policy(pass_through=PassThrough(mode=PassThroughMode.ALWAYS))
    outcome, decisions = tuned(poisson(250.0, 10.0), device, always, seconds=10.0, as_sidecars=True)
    assert {decision.parameters for decision in decisions} == {Parameters(max_in_flight=32, pass_through=True)}
    assert {*outcome.batch_rows} == {1}
