from __future__ import annotations

import pytest
from examples import CURVE, LIMITS, parameters, situation
from msgspec.structs import replace

from carpool.exchange.decision import Reason
from carpool.forecasting.forecaster import Forecaster
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.spec import Objective, PassThroughMode, RiskierStep, Tuning, TuningMode
from carpool.tuning.history import History
from carpool.tuning.moves import WORTH, Scene, is_faster, is_gain, is_worth, move, toward
from carpool.tuning.objective import LEAST, Aim, Choice, choose, is_better
from carpool.tuning.requirements import Requirements
from carpool_cli.planning.assumptions import for_p99


def assessed(rate, *sizes, **changes):
    """Batches of these sizes, with the longest wait."""
    forecaster = Forecaster(situation(rate, **changes))
    return [forecaster.assess(parameters(size, 0.025)) for size in sizes]


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


def test_less_than_the_least_is_not_however_sure():
    larger, smaller = assessed(200.0, 24, 12)
    assert 0 < 1 - larger.device_time / smaller.device_time < LEAST
    assert not is_worth(larger, smaller)


@pytest.mark.parametrize(("low", "high", "worth"), [(1, 8, True), (22, 26, False), (30, 64, True)])
def test_a_small_gain_is_not_taken_while_the_time_of_either_size_is_unsure(low, high, worth):
    larger, smaller = assessed(300.0, 24, 12, service=unsure(low, high))
    assert is_worth(larger, smaller) is worth


def test_a_large_gain_is_taken_whatever_is_unsure_of_it():
    larger, smaller = assessed(500.0, 24, 2, service=unsure(22, 26))
    assert larger.device_time < 0.8 * smaller.device_time
    assert is_worth(larger, smaller)


def test_draws_of_noise_are_no_gain():
    # Rows cost the same in any batch: nothing is saved by any setting, though forecasts with noise differ.
    dear = ServiceTime.measured({rows: 0.001 * rows for rows in range(1, 65)}, noise=0.5)
    for rate in (100.0, 150.0, 200.0, 300.0):
        one, other = sorted(assessed(rate, 4, 8, service=dear), key=lambda each: each.device_time)
        assert not is_worth(one, other) or is_better(one, other, WORTH)


def test_more_room_for_load_has_to_be_clearly_more():
    # Where neither meets the SLO at 1.25x the load, small savings are none: what is lost of more load comes first.
    one, other = assessed(1500.0, 64, 48)
    assert not one.holds_ahead
    assert not other.holds_ahead
    assert is_worth(one, other) == is_better(one, other, WORTH)


def test_a_lower_latency_has_to_be_lower_by_a_twentieth_while_the_target_is_kept():
    forecaster = Forecaster(situation(700.0))
    aim = Aim(Objective.BALANCED, 0.9)
    near, far, current = (forecaster.assess(parameters(64, wait)) for wait in (0.0145, 0.005, 0.015))
    assert aim.keeps_target(current)
    assert near.mean < current.mean
    assert not is_faster(aim, near, current)
    assert is_faster(aim, far, current)
    # Beyond the target any change that was chosen is worth it.
    assert is_faster(replace(aim, target=0.3), near, current)


def test_a_rate_known_from_few_arrivals_does_not_lower_utilization():
    forecaster = Forecaster(situation(700.0))
    slower, current = (forecaster.assess(parameters(64, wait)) for wait in (0.015, 0.0145))
    target = 100 * (Aim().utilization(current) - 0.04)
    policy = replace(for_p99(0.1), objective=Objective.BALANCED, target_utilization_percent=target)
    assert is_faster(Aim.of(policy, error=0.01), slower, current)
    assert not is_faster(Aim.of(policy, error=0.1), slower, current)


def test_into_and_out_of_pass_through_is_a_gain_in_itself():
    forecaster = Forecaster(situation(20.0))
    through = forecaster.assess(parameters(8, passing=True, flights=4))
    batched = forecaster.assess(parameters(8))
    assert is_gain(Aim(), Choice(through, batched), batched)
    assert is_gain(Aim(), Choice(batched, batched), through)
    assert not is_gain(Aim(), Choice(batched, batched), batched)


# -- how far


def test_a_step_goes_at_most_twice_as_far():
    step = toward(parameters(4, 0.002, 1), parameters(64, 0.025, 8), 2.0, largest=64)
    assert (step.max_batch, step.max_wait, step.max_in_flight) == (8, 0.004, 2)
    step = toward(parameters(1, 0.0, 1), parameters(64, 0.025, 8), 2.0, largest=1)
    assert (step.max_batch, step.max_wait, step.max_in_flight) == (2, 0.001, 2)
    step = toward(parameters(32, 0.02, 4), parameters(4, 0.0, 1), 2.0, largest=64)
    assert (step.max_batch, step.max_wait, step.max_in_flight) == (4, 0.0, 1)


# -- a move


def scene(rate, start, *, mode=TuningMode.APPLY, since=60.0, requests=10_000, left=(), service=CURVE, **changes):
    """What a move is decided by where ``start`` has been in force for some time."""
    riskier = RiskierStep(after=Duration(10.0), min_requests=300)
    policy = replace(for_p99(0.05, Objective.EFFICIENCY), tuning=Tuning(mode=mode, riskier=riskier))
    forecaster = Forecaster(situation(rate, service=service))
    history = History()
    history.observe(100.0 - since, 1)
    history.changed()
    history.observe(100.0, 1)
    history.requests = requests
    basis = Scene(
        requirements=Requirements.of(policy, None),
        aim=Aim(),
        forecaster=forecaster,
        choice=choose(forecaster, Aim(), start, PassThroughMode.NEVER),
        current=forecaster.assess(start),
        history=history,
        left=frozenset(left),
        backlogged=False,
        forecast_low=False,
        explored=None,
        explores=False,
        ended=False,
    )
    return basis._replace(**changes)


def moved(basis, *, alarmed=False):
    return move(basis, alarmed=alarmed)


def test_what_restores_the_slo_is_done_at_once():
    basis = scene(1000.0, parameters(1), since=0.5, requests=10)
    found = moved(basis)
    assert found.reason is Reason.RESTORES_SLO
    assert found.step is basis.choice.target
    assert not found.tentative, "a setting that misses the SLO has nothing to lose"


DOUBTFUL = replace(CURVE, uppers=tuple(1.8 * mean for mean in CURVE.means))


def test_a_step_goes_only_half_way_where_more_may_be_late():
    far = scene(600.0, parameters(64), service=DOUBTFUL)
    assert far.is_riskier(far.choice.target)
    found = moved(far)
    assert found.capped_by == "step"
    assert found.step.parameters == parameters(64, 0.001)
    assert found.target is far.choice.target


def test_a_riskier_step_waits_and_says_for_what():
    found = moved(scene(600.0, parameters(64, 0.012), since=2.0, requests=100, service=DOUBTFUL))
    assert (found.reason, found.step) == (Reason.WITHIN_STABILIZATION_WINDOW, None)
    assert "riskier steps wait for 10s and 300 requests (now 2s and 100)" in found.message
    assert found.message.startswith(f"{found.waiting.describe()} is next")
    later = moved(scene(600.0, parameters(64, 0.012), service=DOUBTFUL))
    assert later.reason is Reason.SAVES_DEVICE_TIME
    assert later.step is not None
    assert later.tentative


def test_a_step_that_is_no_riskier_is_taken_at_once():
    found = moved(scene(600.0, parameters(8), since=0.5, requests=10))
    assert found.reason is Reason.SAVES_DEVICE_TIME
    assert not found.tentative


def test_a_setting_that_was_left_is_not_returned_to_unless_misses_or_an_exploration_ask_for_it():
    target = scene(600.0, parameters(8)).choice.target.parameters
    found = moved(scene(600.0, parameters(8), left=[target]))
    assert (found.reason, found.step) == (Reason.WOULD_FLIP, None)
    assert found.message == f"{found.waiting.describe()} was in force at this load, and was left"
    assert moved(scene(600.0, parameters(8), left=[target], ended=True)).step is not None
    alarmed = moved(scene(600.0, parameters(8), left=[target]), alarmed=True)
    assert alarmed.reason is Reason.MISSES_CONFIRMED
    assert alarmed.message.startswith("more requests were late than forecast; ")


def test_at_rest_nothing_is_done():
    target = scene(600.0, parameters(8)).choice.target.parameters
    found = moved(scene(600.0, target))
    assert (found.reason, found.step) == (Reason.CONVERGED, None)


def test_while_a_setting_is_explored_nothing_else_is_done():
    found = moved(scene(1000.0, parameters(1), explores=True))
    assert (found.reason, found.step) == (Reason.EXPLORES, None)


def test_what_is_worth_exploring_is_put_in_force_but_for_a_rescue_or_a_recommendation():
    candidate = parameters(48, 0.01)
    found = moved(scene(600.0, parameters(8), explored=candidate))
    assert found.explores
    assert found.tentative
    assert found.step.parameters == candidate
    assert not moved(scene(1000.0, parameters(1), explored=candidate)).explores
    assert not moved(scene(600.0, parameters(8), explored=candidate, mode=TuningMode.RECOMMEND)).explores


def test_while_the_forecast_is_too_low_no_request_is_held():
    waiting = parameters(16, 0.02)
    found = moved(scene(600.0, waiting, forecast_low=True))
    assert found.reason is Reason.FORECAST_OFF
    assert found.step.parameters == parameters(16)
    assert moved(scene(600.0, parameters(16), forecast_low=True)).step is None
    # What restores the SLO comes first.
    assert moved(scene(1000.0, parameters(1), forecast_low=True)).reason is Reason.RESTORES_SLO


def test_a_size_beyond_those_measured_is_tried_by_one_replica_first():
    measured = ServiceTime.measured({rows: 0.008 + 0.0004 * rows for rows in (1, 8, 16)})
    found = moved(scene(500.0, parameters(16), service=replace(measured, largest_in_flight=2)))
    assert found.reason is Reason.SAVES_DEVICE_TIME
    assert found.step.parameters.max_batch > 16
    assert found.tentative
    assert LIMITS.max_batch >= found.step.parameters.max_batch
