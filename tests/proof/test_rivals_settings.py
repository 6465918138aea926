from __future__ import annotations

from random import Random

import pytest
from proof.rivals import settings
from rivalry import known

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters


def parameters(maker, knowledge):
    return maker(knowledge, Random(0)).start().parameters


def test_half_slo_takes_the_batch_that_computes_for_half_of_it():
    # 2 (5 + 0.5 b) <= 50: b <= 40.
    assert settings.half_slo_batch(known()) == 40
    assert parameters(settings.half_slo, known()) == Parameters(max_batch=40, max_wait=Duration(0.025))


def test_half_slo_plans_with_a_standard_deviation_over_the_mean():
    # 2 * 1.1 (5 + 0.5 b) <= 50: b <= 35.45.
    assert settings.half_slo_batch(known(noise=0.1)) == 35


def test_half_slo_stays_below_a_step_that_does_not_pay():
    # 16 rows in 10 ms are 1,600/s; 17 in 20 ms are 850/s, and 30 only 1,500/s.
    assert settings.half_slo_batch(known(largest=30, times=lambda rows: 0.01 if rows <= 16 else 0.02)) == 16


def test_half_slo_where_nothing_fits_is_one():
    assert settings.half_slo_batch(known(slo=0.006)) == 1


@pytest.mark.parametrize(
    ("maker", "batch", "wait"), [(settings.fixed_8, 8, 0.002), (settings.fixed_32, 32, 0.005), (settings.greedy, 64, 0)]
)
def test_fixed_settings(maker, batch, wait):
    assert parameters(maker, known(executors=3)) == Parameters(
        max_batch=batch, max_wait=Duration(wait), max_in_flight=3
    )


def test_settings_stay_within_the_limits():
    chosen = parameters(settings.fixed_32, known(slo=0.008, largest=1, in_flight=2, executors=4))
    assert chosen == Parameters(max_batch=1, max_wait=Duration(0.004), max_in_flight=2)


def test_a_setting_knows_the_true_times_and_stays():
    contender = settings.fixed_8(known(noise=0.1, executors=2), Random(0))
    start = contender.start()
    assert start.estimate.times[64] == pytest.approx(0.037)
    assert start.estimate.upper[64] == pytest.approx(0.037 * 1.2)
    assert start.estimate.executors == 2
    assert start.shed_slo
    assert contender.observe(1.0, []) is None
    assert contender.dispatcher() is None
