from __future__ import annotations

from itertools import pairwise
from math import sqrt
from statistics import mean, stdev

import pytest

from carpool.forecasting import sampling
from carpool.learning.arrivals import Gamma, Modulated, Poisson, WindowCounts, fitted


@pytest.mark.parametrize("sample", [0, 1, 2])
@pytest.mark.parametrize("process", [Poisson(700.0), Gamma(700.0, 2.0), Modulated(700.0, 0.6, 0.2)], ids=repr)
def test_arrivals_come_at_the_very_rate_that_was_asked_for(process, sample):
    for factor in (1.0, 1.25):
        times = sampling.times(process, 4000, factor, sample)
        assert all(one <= other for one, other in pairwise(times))
        assert len(times) / times[-1] == pytest.approx(factor * process.rate, rel=0.002)


def test_at_more_load_bursts_last_as_long_and_bring_more():
    def lasting(factor):
        times = sampling.times(Modulated(700.0, 0.6, 0.1), 200_000, factor)
        windows, longer = (WindowCounts.of(times, times[-1], width) for width in (0.1, 0.5))
        return fitted(factor * 700.0, windows, longer.dispersion, 0.5).lasting

    assert lasting(1.0) == pytest.approx(0.1, rel=0.25)
    assert lasting(2.0) == pytest.approx(lasting(1.0), rel=0.2)


def test_samples_differ_and_the_same_sample_does_not():
    assert sampling.times(Gamma(700.0, 2.0), 4000, sample=1) == sampling.times(Gamma(700.0, 2.0), 4000, sample=1)
    assert sampling.times(Gamma(700.0, 2.0), 4000, sample=1) != sampling.times(Gamma(700.0, 2.0), 4000, sample=2)
    assert sampling.draws(0.3, 1) != sampling.draws(0.3, 2)


def test_parts_of_a_long_run_come_at_other_rates_and_all_of_them_at_the_one_asked_for():
    parts = [sampling.times(Gamma(700.0, 4.0), 4000, 1.25, number, 4) for number in range(4)]
    assert all(one <= other for times in parts for one, other in pairwise(times))
    assert len({len(times) / times[-1] for times in parts}) == 4
    assert 16_000 / sum(times[-1] for times in parts) == pytest.approx(1.25 * 700, rel=0.002)
    assert stdev(times[-1] for times in parts) > 0.02 * mean(times[-1] for times in parts)


def test_noise_has_mean_one_and_the_spread_that_was_asked_for():
    drawn = [each for sample in range(20) for each in sampling.draws(0.3, sample)]
    assert mean(drawn) == pytest.approx(1.0, abs=0.01)
    assert stdev(drawn) == pytest.approx(0.3, rel=0.03)
    assert sampling.draws(0.001) == (1.0,)


@pytest.mark.parametrize("process", [Poisson(700.0), Gamma(700.0, 2.0)], ids=["poisson", "gamma"])
def test_samples_as_they_come_are_now_more_and_now_fewer(process):
    samples = [sampling.times(process, 4000, sample=sample, exact=False) for sample in range(1, 41)]
    assert {len(sample) for sample in samples} == {4000}
    assert all(one <= other for sample in samples for one, other in pairwise(sample))
    # Counts of a time in which 4,000 are expected spread by sqrt(4,000 * dispersion), and as much does that time.
    lasted = [sample[-1] * process.rate / 4000 for sample in samples]
    chance = sqrt(process.dispersion / 4000)
    assert mean(lasted) == pytest.approx(1.0, abs=4 * chance / sqrt(40))
    assert stdev(lasted) == pytest.approx(chance, rel=0.35)


def test_samples_as_they_come_differ_and_the_same_sample_does_not():
    assert sampling.times(Gamma(700.0, 2.0), 400, sample=1, exact=False) == sampling.times(
        Gamma(700.0, 2.0), 400, sample=1, exact=False
    )
    assert sampling.times(Gamma(700.0, 2.0), 400, sample=1, exact=False) != sampling.times(
        Gamma(700.0, 2.0), 400, sample=2, exact=False
    )


def test_rows_are_drawn_in_the_shares_of_their_powers_of_two():
    # Half of the requests have one row, a quarter two, none three or four, a quarter five to eight.
    drawn = sampling.rows((0.5, 0.25, 0.0, 0.25), 4000, 0)
    assert len(drawn) == 4000
    for low, high, share in ((1, 1, 0.5), (2, 2, 0.25), (3, 4, 0.0), (5, 8, 0.25)):
        assert sum(low <= each <= high for each in drawn) / 4000 == pytest.approx(share, abs=0.03)
    assert {5, 6, 7, 8} < set(drawn)
    assert drawn == sampling.rows((0.5, 0.25, 0.0, 0.25), 4000, 0)
    assert drawn != sampling.rows((0.5, 0.25, 0.0, 0.25), 4000, 1)


def test_how_large_a_request_is_does_not_depend_on_the_gap_before_it():
    rows = sampling.rows((0.8, 0.0, 0.0, 0.0, 0.0, 0.2), 4000, 0)
    times = sampling.times(Poisson(1.0), 4000)
    gaps = [time - before for before, time in zip([0.0, *times], times, strict=False)]
    large = [gap for gap, count in zip(gaps, rows, strict=True) if count > 1]
    assert mean(large) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_exponential_batch_times_give_the_mean_latency_of_an_mm1_queue(load):
    drawn = [each for sample in range(40) for each in sampling.draws(1.0, sample)]
    assert sum(drawn) == pytest.approx(len(drawn))
    waited = []
    for sample in range(40):
        free = 0.0
        draws = sampling.draws(1.0, sample)
        for number, time in enumerate(sampling.times(Poisson(load), 4000, sample=sample)):
            free = max(free, time) + draws[number % len(draws)]
            waited.append(free - time)
    assert mean(waited) == pytest.approx(1 / (1 - load), rel=0.05)
