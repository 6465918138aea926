from __future__ import annotations

from collections import Counter

import pytest
from examples import CURVE, parameters, situation
from msgspec.structs import replace

from carpool.exchange.decision import Reason
from carpool.learning.latency_model import ServiceTime
from carpool.tuning.assessment import Assessor
from carpool.tuning.search import Choice, choose, is_better
from carpool.tuning.steps import LEAST, WORTH, gain, is_worth, toward, why


def assessed(rate, *sizes, **changes):
    """Batches of these sizes, with the longest wait."""
    assessor = Assessor(situation(rate, **changes))
    return [assessor.assess(parameters(size, 0.025)) for size in sizes]


def unsure(low, high, by=0.2):
    """The curve, its times between two sizes known give or take ``by``."""
    beside = [(by if low <= rows <= high else 0.0) * CURVE.time(rows) for rows in CURVE.sizes]
    return replace(
        CURVE,
        lowers=tuple(mean - half for mean, half in zip(CURVE.means, beside, strict=True)),
        uppers=tuple(mean + half for mean, half in zip(CURVE.means, beside, strict=True)),
    )


# -- worth it?


def test_a_small_gain_is_taken_where_it_is_sure():
    larger, smaller = assessed(300.0, 24, 12)
    assert LEAST < 1 - larger.device_time / smaller.device_time < WORTH
    assert is_worth(larger, smaller)
    assert not is_worth(smaller, larger)


def test_of_length_buckets_no_small_gain_is_sure():
    larger, smaller = assessed(300.0, 24, 12, service=replace(CURVE, mix=((1.0, CURVE),)))
    assert LEAST < 1 - larger.device_time / smaller.device_time < WORTH
    assert not is_worth(larger, smaller)


def test_less_than_the_least_is_not_however_sure():
    larger, smaller = assessed(200.0, 24, 12)
    assert 0 < 1 - larger.device_time / smaller.device_time < LEAST
    assert not is_worth(larger, smaller)


@pytest.mark.parametrize(("low", "high", "worth"), [(1, 8, True), (12, 20, False), (30, 64, True)])
def test_what_is_open_of_a_gain_is_open_at_sizes_that_become_more_or_fewer(low, high, worth):
    # 12 rows or 24 at 300/s: batches of up to 11 are as many either way, and 30 never come together.
    larger, smaller = assessed(300.0, 24, 12, service=unsure(low, high))
    assert is_worth(larger, smaller) is worth


def test_draws_of_noise_are_no_gain():
    # Rows that cost the same in any company: nothing is saved by any setting, though forecasts with noise differ.
    dear = ServiceTime.measured({rows: 0.001 * rows for rows in range(1, 65)}, noise=0.5)
    for rate in (100.0, 200.0, 300.0):
        one, other = sorted(assessed(rate, 4, 8, service=dear), key=lambda each: each.device_time)
        assert gain(one, other).share == pytest.approx(0, abs=1e-9)
        assert not is_worth(one, other) or is_better(one, other, WORTH)


def test_what_one_stretch_of_the_arrivals_brings_alone_may_be_theirs():
    larger, smaller = assessed(300.0, 24, 12)
    here = [Counter({8: 10})] * 8
    # Two batches of 16 instead of four of 8 save 10 ms: in one eighth of the arrivals, or in each.
    smaller.outlook.__dict__["mix"] = here
    larger.outlook.__dict__["mix"] = [*here[1:], Counter({8: 6, 16: 2})]
    once = gain(larger, smaller)
    assert once.share == pytest.approx(0.01 / (80 * 0.009))
    assert once.error == pytest.approx(once.share)
    larger.outlook.__dict__["mix"] = [Counter({8: 6, 16: 2})] * 8
    assert gain(larger, smaller) == (pytest.approx(8 * once.share), 0)


def test_between_equals_there_is_no_gain_and_nothing_open():
    (one,) = assessed(300.0, 12)
    assert gain(one, one) == (0, 0)


def test_more_room_for_load_has_to_be_clearly_more():
    # Where neither holds at 1.25x the load, small savings are none: what is lost of more load comes first.
    one, other = assessed(1500.0, 64, 48)
    assert not one.holds_ahead
    assert not other.holds_ahead
    assert is_worth(one, other) == is_better(one, other, WORTH)


# -- how far, and what for


def test_a_step_goes_at_most_twice_as_far():
    step = toward(parameters(4, 0.002, 1), parameters(64, 0.025, 8), 2.0, largest=64)
    assert (step.max_batch, step.max_wait, step.max_in_flight) == (8, 0.004, 2)
    step = toward(parameters(1, 0.0, 1), parameters(64, 0.025, 8), 2.0, largest=1)
    assert (step.max_batch, step.max_wait, step.max_in_flight) == (2, 0.001, 2)
    step = toward(parameters(32, 0.02, 4), parameters(4, 0.0, 1), 2.0, largest=64)
    assert (step.max_batch, step.max_wait, step.max_in_flight) == (4, 0.0, 1)


@pytest.mark.parametrize(
    ("rate", "start", "reason", "words"),
    [
        (600.0, parameters(8), Reason.SAVES_DEVICE_TIME, "device time falls"),
        (1000.0, parameters(1), Reason.RESTORES_SLO, "forecast to miss the SLO"),
        (3000.0, parameters(8), Reason.MORE_GOODPUT, "late requests are refused"),
        (1350.0, parameters(64, 0.0, 8), Reason.RESTORES_SLO, "1.25x"),
    ],
)
def test_the_reason_says_what_the_move_is_for(rate, start, reason, words):
    choice = choose(Assessor(situation(rate)), start)
    found, message = why(choice, choice.best)
    assert found is reason
    assert words in message


def test_a_fall_of_device_time_is_told_only_where_it_falls():
    assessor = Assessor(situation(300.0))
    here = assessor.assess(parameters(8))
    reason, message = why(Choice(best=here, current=here), here)
    assert reason is Reason.SAVES_DEVICE_TIME
    assert "falls" not in message
