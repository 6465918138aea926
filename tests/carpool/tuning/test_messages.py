"""Decisions in words. Full sentences: what a user reads is what is tested."""

from __future__ import annotations

import re

import pytest
from examples import parameters, situation

from carpool.exchange.decision import Reason
from carpool.forecasting.forecaster import Forecaster
from carpool.policy.spec import Objective, PassThroughMode
from carpool.tuning.messages import alternative, busy, shortfall, why
from carpool.tuning.objective import Aim, Choice, choose

BALANCED = Aim(Objective.BALANCED, 0.6)
TIME = r"[0-9.]+(s|ms|us)"


def explained(rate, start, aim=None, mode=PassThroughMode.NEVER):
    """Why the best setting at a load is turned to."""
    aim = aim or Aim()
    forecaster = Forecaster(situation(rate))
    choice = choose(forecaster, aim, start, mode)
    return why(aim, choice, forecaster.assess(start), choice.target)


AHEAD = rf"p99 forecast {TIME} now, {TIME} at 1\.25x the load"


@pytest.mark.parametrize(
    ("rate", "start", "reason", "words"),
    [
        (600.0, parameters(8), Reason.SAVES_DEVICE_TIME, rf"device time falls \d+%, {TIME} to {TIME} per request; "),
        (1000.0, parameters(1), Reason.RESTORES_SLO, r"the present configuration is forecast to miss the SLO; "),
        (1150.0, parameters(64, 0.018), Reason.MORE_MARGIN, r"meets the SLO at 1\.25x the load too; "),
    ],
)
def test_the_message_says_what_a_move_gains(rate, start, reason, words):
    found, message = explained(rate, start)
    assert found is reason
    assert re.fullmatch(words + AHEAD, message)


def test_in_overload_it_says_how_much_is_lost_and_how_much_is_served():
    found, message = explained(3000.0, parameters(8))
    assert found is Reason.MORE_GOODPUT
    assert re.fullmatch(
        r"no configuration meets the SLO at this load: \d+\.\d% late or refused, 0\.5% is the most planned for; "
        r"\d+ to \d+ answers in time per second, late requests are refused",
        message,
    )


def test_a_fall_of_device_time_is_named_only_where_it_falls():
    here = Forecaster(situation(300.0)).assess(parameters(8))
    reason, message = why(Aim(), Choice(here, here), here, here)
    assert reason is Reason.SAVES_DEVICE_TIME
    assert "falls" not in message


def test_pass_through_says_how_little_batching_would_save():
    found, message = explained(0.2, parameters(8), mode=PassThroughMode.AUTOMATIC)
    assert found is Reason.PASSES_THROUGH
    assert re.fullmatch(
        r"requests pass one by one; batching would save \d\.\d% of the device time at this load", message
    )


def test_where_latency_comes_first_the_device_and_the_latency_are_named():
    found, message = explained(20.0, parameters(8, 0.02), BALANCED, PassThroughMode.AUTOMATIC)
    assert found is Reason.PASSES_THROUGH
    assert re.fullmatch(
        rf"device 11% busy \(target 60%\): requests pass through, mean latency {TIME} to {TIME}", message
    )
    found, message = explained(700.0, parameters(64), BALANCED)
    assert found is Reason.LOWERS_UTILIZATION
    assert re.fullmatch(rf"device \d+% to (59|60)% busy \(target 60%\), mean latency {TIME} to {TIME}", message)
    found, message = explained(300.0, parameters(64, 0.025), BALANCED)
    assert found is Reason.LOWERS_LATENCY
    assert re.fullmatch(rf"mean latency {TIME} to {TIME}, device \d+% busy \(target 60%\)", message)
    found, message = explained(700.0, parameters(64, 0.02), Aim(Objective.LATENCY))
    assert found is Reason.LOWERS_LATENCY
    assert re.fullmatch(rf"p99 {TIME} to {TIME}, device \d+% busy", message)


def test_only_balanced_names_a_target():
    one = Forecaster(situation(100.0)).assess(parameters(1))
    assert busy(BALANCED, one) == "device 55% busy (target 60%)"
    assert busy(Aim(), one) == "device 55% busy"


def test_another_objective_is_named_with_what_it_gives_and_takes():
    forecaster = Forecaster(situation(300.0))
    unheld, held = (forecaster.assess(parameters(64, wait)) for wait in (0.0, 0.025))
    assert re.fullmatch(
        rf"Efficiency would free \d+% of the device for {TIME} more p50", alternative(BALANCED, unheld, held, unheld)
    )
    assert re.fullmatch(
        rf"without a wait p50 would be {TIME} lower, with \d+% more of the device",
        alternative(Aim(), held, held, unheld),
    )
    both = alternative(BALANCED, forecaster.assess(parameters(64, 0.0125)), held, unheld)
    assert re.fullmatch(rf"without a wait p50 would be {TIME} lower, .*; Efficiency would free .* more p50", both)
    assert alternative(BALANCED, unheld, unheld, unheld) == "", "nothing to be freed"
    assert alternative(Aim(), unheld, held, unheld) == "", "nothing to be gained"
    single = forecaster.assess(parameters(4))
    assert alternative(Aim(), unheld, unheld, single) == "", "nothing waits now"


def test_where_a_few_refusals_are_enough_that_is_said():
    one = Forecaster(situation(1480.0)).assess(parameters(64))
    assert not one.holds_now
    assert one.now.miss_fraction <= one.situation.budget
    assert shortfall(one) == "no configuration meets the SLO at this load without refusals: 0.3% late or refused"


def test_a_shortfall_may_be_among_some_configurations():
    one = Forecaster(situation(3000.0)).assess(parameters(64))
    assert shortfall(one, " with 4 in flight").startswith(
        "no configuration with 4 in flight meets the SLO at this load: "
    )
