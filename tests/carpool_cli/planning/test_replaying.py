from __future__ import annotations

import click
import pytest
from msgspec.structs import replace

from carpool.forecasting.forecast import Load, forecast
from carpool.forecasting.forecaster import HEADROOM, Forecaster, Situation
from carpool.learning.arrivals import Gamma, Poisson
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.replaying import How, Replay, load

EVEN = [(50.0 + 0.01 * i, 1) for i in range(1001)]
"""100 requests a second for 10 s."""


def situation(process=None, **change):
    return replace(
        Situation(
            process=process or Poisson(100.0),
            service=ServiceTime.measured({1: 0.005, 2: 0.006}),
            target=0.05,
            budget=0.005,
            limits=for_p99(0.05).limits(),
        ),
        **change,
    )


def test_once_is_as_it_came_from_zero():
    found = load(EVEN)
    assert (found.times[0], found.times[-1], len(found.times), found.rows) == (0.0, pytest.approx(10.0), 1001, None)
    assert found.process.rate == pytest.approx(100.0)
    assert (found.recorded, found.span) == (1001, pytest.approx(10.0))
    assert isinstance(found.process, Gamma)  # so even arrivals are no Poisson's
    assert found.described == "1,001 arrivals over 10s, 100/s (gamma, cv 0.2), played once"
    assert found.arrivals is found.times


def test_faster_is_closer_together():
    found = load(EVEN, factor=1.25)
    assert found.times[-1] == pytest.approx(8.0)
    assert found.process.rate == pytest.approx(125.0)


def test_over_and_over_goes_on_a_gap_after_the_end_until_the_time_is_up():
    found = load(EVEN, How.REPEATED, seconds=25.0)
    gaps = [after - before for before, after in zip(found.times, found.times[1:], strict=False)]
    assert gaps == pytest.approx([0.01] * len(gaps))
    assert len(found.times) == 2500
    assert found.described.endswith("played 2.5 times over")
    # A recording is played to its end once.
    assert load(EVEN, How.REPEATED, seconds=5.0).times == load(EVEN).times


def test_fitted_is_drawn_from_the_seed_at_the_same_rate():
    one, same, other = (load(EVEN, How.FITTED, seconds=20.0, seed=seed) for seed in (1, 1, 2))
    assert one.times == same.times != other.times
    assert len(one.times) == pytest.approx(2000, rel=0.05)
    assert one.described.startswith(f"{len(one.times):,} drawn of what 1,001 arrivals over 10s")


def test_a_moment_of_arrivals_shows_no_spread():
    assert load(EVEN[:50]).process == Poisson(pytest.approx(100.0))


def test_rows_go_with_their_requests_and_in_turn_when_there_are_more():
    recorded = [(time, 1 + index % 3) for index, (time, _) in enumerate(EVEN[:150])]
    found = load(recorded, How.REPEATED, seconds=4.0)
    assert found.rows[:4] == [1, 2, 3, 1]
    assert found.rows[150:153] == [1, 2, 3]
    assert found.mean_rows == 2
    assert "2 rows each on average" in found.described
    assert found.arrivals[1] == (pytest.approx(0.01), 2)
    one_in_four = [(time, 1 + (index % 4 == 0)) for index, (time, _) in enumerate(EVEN[:400])]
    assert "1.25 rows each" in load(one_in_four).described


def test_too_many_to_play_names_the_options():
    with pytest.raises(click.ClickException, match="lower --load or --for"):
        load(EVEN, How.REPEATED, factor=100.0, seconds=3600.0)


def test_a_replay_forecasts_the_very_arrivals():
    found = load(EVEN)
    service = situation().service
    forecaster = found.forecaster(situation(found.process))
    assert isinstance(forecaster, Replay)
    # Alone every request finds the device idle: 5 ms. Two together: the first waits 10 ms, and 6 ms are shared.
    alone = forecaster.forecast(Parameters(max_batch=1))
    assert (alone.p99, alone.device_time) == (pytest.approx(0.005), pytest.approx(0.005))
    pair = Parameters(max_batch=2, max_wait=Duration(0.02))
    assert forecaster.forecast(pair).p99 == pytest.approx(0.016)
    assert forecaster.forecast(pair).device_time == pytest.approx(0.003, rel=0.01)
    assert forecaster.forecast(pair) == forecast(Load(found.times), service, pair, 0.05)
    assert forecaster.forecast(pair, HEADROOM).p99 == pytest.approx(0.014)  # 8 ms between them
    assert forecaster.glance(pair).device_time == forecaster.forecast(pair).device_time
    assert forecaster.glance(pair, HEADROOM).miss_fraction == 0


def test_a_replay_at_another_rate_puts_arrivals_closer():
    found = load(EVEN)
    pair = Parameters(max_batch=2, max_wait=Duration(0.02))
    twice = found.forecaster(situation(replace(found.process, rate=2 * found.process.rate)))
    assert twice.forecast(pair).p99 == pytest.approx(0.011)


def test_a_replay_counts_rows_other_percentiles_and_doubt():
    recorded = [(time, 2) for time, _ in EVEN]
    found = load(recorded)
    forecaster = found.forecaster(situation(found.process, rows=2))
    two = Parameters(max_batch=2)
    assert forecaster.forecast(two).p99 == pytest.approx(0.006)
    assert forecaster.glance(two).mean == forecaster.forecast(two).mean == pytest.approx(0.006)
    median = load(EVEN).forecaster(situation(found.process, quantiles=((0.5, 0.02),)))
    assert median.glance(two).p50 == pytest.approx(0.005)
    # What was never measured is pessimistically no cheaper a row than what was.
    four = Parameters(max_batch=4, max_wait=Duration(0.04))
    calm = load(EVEN).forecaster(situation(found.process))
    assert calm.assess(four).risk >= calm.assess(four).glance.miss_fraction


def test_what_is_fitted_is_forecast_as_the_tuner_would():
    found = load(EVEN, How.FITTED)
    assert type(found.forecaster(situation(found.process))) is Forecaster
