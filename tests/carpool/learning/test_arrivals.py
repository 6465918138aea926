from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import pytest
from bursts import OnOff
from msgspec.structs import replace

from carpool.learning.arrivals import Gamma, Modulated, Poisson, WindowCounts, first, fitted, until

PROCESSES = [
    Poisson(200.0),
    Gamma(200.0, 0.3),
    Gamma(200.0, 3.0),
    Modulated(200.0, 0.6, 0.2),
    Modulated(200.0, 2.0, 0.1),
]


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_mean_rate_is_what_the_process_says(process):
    times = until(process, 400.0, Random(1))
    assert process.rate == pytest.approx(200.0)
    assert len(times) / 400.0 == pytest.approx(200.0, rel=0.1)
    assert all(a <= b for a, b in pairwise(times))


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_equal_seeds_give_equal_arrivals(process):
    assert first(process, 500, Random(7)) == first(process, 500, Random(7))
    assert first(process, 500, Random(7)) != first(process, 500, Random(8))


def test_gamma_gaps_have_the_cv_asked_for():
    for cv in (0.2, 1.0, 2.5):
        times = first(Gamma(100.0, cv), 40_000, Random(3))
        gaps = [b - a for a, b in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
        assert math.sqrt(variance) / mean == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize(
    "process",
    [
        Poisson(50.0),
        Gamma(50.0, 0.5),
        Gamma(50.0, 2.0),
    ],
    ids=repr,
)
def test_dispersion_is_that_of_the_counts_of_long_windows(process):
    # 1,500 windows show it within 4 % or so. A window of five seconds is 50 times as long as the memory of any burst.
    counts = WindowCounts.of(until(process, 7500.0, Random(1)), 7500.0, window=5.0)
    assert counts.windows == 1500
    assert process.dispersion == pytest.approx(counts.dispersion, rel=0.12)


def test_window_counts_add_up():
    times = until(Gamma(300.0, 2.0), 20.0, Random(5))
    whole = WindowCounts.of(times, 20.0)
    parts = WindowCounts.of([t for t in times if t < 8.0], 8.0) + WindowCounts.of(
        [t - 8.0 for t in times if t >= 8.0], 12.0
    )
    assert whole.windows == 200
    assert whole.arrivals == len(times)
    assert (parts.windows, parts.arrivals) == (whole.windows, whole.arrivals)
    # A float boundary may move an arrival by one window, not more.
    assert parts.squared == pytest.approx(whole.squared, rel=0.01)


def test_an_unfinished_window_is_left_out():
    counts = WindowCounts.of([0.01, 0.02, 0.15, 0.31], 0.35)
    assert (counts.windows, counts.arrivals, counts.squared) == (3, 3, 5)


def test_statistics_of_nothing_are_harmless():
    empty = WindowCounts(0, 0, 0)
    assert (empty.rate, empty.dispersion, empty.cv) == (0.0, 1.0, None)
    assert empty.looks_poisson
    silent = WindowCounts(50, 0, 0)
    assert (silent.rate, silent.dispersion, silent.looks_poisson) == (0.0, 1.0, True)


@pytest.mark.parametrize("rate", [5.0, 50.0, 500.0, 2000.0])
def test_poisson_arrivals_are_taken_for_poisson(rate):
    fits = [WindowCounts.of(until(Poisson(rate), 30.0, Random(seed)), 30.0) for seed in range(40)]
    # Two standard errors: about one in twenty may stray.
    assert sum(fit.looks_poisson for fit in fits) >= 34
    assert sum(fit.dispersion for fit in fits) / 40 == pytest.approx(1.0, abs=0.05)
    assert all(isinstance(fitted(fit.rate, fit), Poisson) for fit in fits if fit.looks_poisson)


@pytest.mark.parametrize(("rate", "cv"), [(100.0, 0.3), (100.0, 0.6), (300.0, 2.0), (1000.0, 3.0), (1000.0, 0.5)])
def test_the_cv_of_a_gamma_process_is_recovered(rate, cv):
    fits = [WindowCounts.of(until(Gamma(rate, cv), 120.0, Random(seed)), 120.0) for seed in range(5)]
    assert sum(fit.cv for fit in fits) / 5 == pytest.approx(cv, rel=0.05)
    for fit in fits:
        process = fitted(fit.rate, fit)
        assert isinstance(process, Gamma)
        assert process.rate == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize(("rate", "cv"), [(300.0, 0.5), (300.0, 2.0), (1000.0, 4.0)])
def test_gaps_show_the_cv_better_than_counts_of_windows(rate, cv):
    counts = [WindowCounts.of(until(Gamma(rate, cv), 20.0, Random(seed)), 20.0) for seed in range(20)]
    with_gaps = sum((fitted(rate, each).cv / cv - 1) ** 2 for each in counts)
    without = sum((fitted(rate, replace(each, gaps_squared=0.0)).cv / cv - 1) ** 2 for each in counts)
    assert with_gaps < 0.5 * without


def test_of_requests_that_come_eight_at_once_counts_show_the_cv():
    # Seven of eight gaps are 0, so gaps look like a CV of 3.9. A queue meets groups of eight: a CV of 2.8.
    times = [time for time in until(Poisson(100.0), 60.0, Random(1)) for _ in range(8)]
    assert fitted(800.0, WindowCounts.of(times, 60.0)).cv == pytest.approx(math.sqrt(8), rel=0.1)


def test_correcting_for_short_windows_beats_the_raw_dispersion():
    counts = WindowCounts.of(until(Gamma(60.0, 2.0), 2000.0, Random(9)), 2000.0)
    assert abs(counts.cv - 2.0) < abs(math.sqrt(counts.dispersion) - 2.0)


def fit(times, seconds):
    counts, longer = WindowCounts.of(times, seconds), WindowCounts.of(times, seconds, 0.5)
    return fitted(counts.rate, counts, longer.dispersion, longer.window)


@pytest.mark.parametrize("lasts", [0.07, 0.2])
def test_how_long_bursts_last_is_recovered_from_counts(lasts):
    # Two rates in turn, the higher one a third of the time: a mean of 500/s, and a CV of 0.57.
    times = until(OnOff(rate_on=900.0, mean_on=1.5 * lasts, mean_off=3 * lasts, rate_off=300.0), 3000.0, Random(1))
    found = fit(times, 3000.0)
    assert isinstance(found, Modulated)
    assert found.cv == pytest.approx(0.566, rel=0.1)
    assert found.lasting == pytest.approx(lasts, rel=0.15)
    # It is drawn as it was found, but for what samples differ by: of every 24 rates eight are the higher one.
    assert fit(until(found, 300.0, Random(2)), 300.0).cv == pytest.approx(0.566, rel=0.15)


def test_what_lasts_longer_than_any_burst_is_taken_to_last_as_long():
    found = fit(until(Modulated(500.0, 0.6, 4.0), 3000.0, Random(1)), 3000.0)
    assert isinstance(found, Modulated)
    assert found.lasting * found.rate == pytest.approx(200.0)


@pytest.mark.parametrize(("rate", "cv"), [(100.0, 2.0), (1000.0, 2.0), (1000.0, 4.0), (300.0, 0.5)])
def test_arrivals_with_gamma_gaps_are_not_fitted_as_bursts_that_last(rate, cv):
    fits = [fit(until(Gamma(rate, cv), 120.0, Random(seed)), 120.0) for seed in range(10)]
    assert sum(isinstance(each, Gamma) for each in fits) >= 9


@pytest.mark.parametrize("cv", [0.3, 1.41, 2.0, 4.7])
def test_rates_that_change_have_the_mean_and_the_spread_asked_for(cv):
    counts = WindowCounts.of(until(Modulated(400.0, cv, 0.1), 1200.0, Random(4)), 1200.0, window=0.002)
    assert counts.rate == pytest.approx(400.0, rel=0.1)
    # Of 2 ms, in which a rate seldom changes, counts spread by the rate and by chance.
    assert counts.dispersion == pytest.approx(1 + 0.8 * cv**2, rel=0.15)
