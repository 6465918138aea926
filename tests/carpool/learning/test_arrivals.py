from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import pytest

from carpool.learning.arrivals import (
    Choice,
    Diurnal,
    Fixed,
    Gamma,
    HeavyTailed,
    OnOff,
    Poisson,
    Schedule,
    Trace,
    WindowCounts,
    azure_llm_2023,
    first,
    requests,
    scaled,
    until,
)

PROCESSES = [
    Poisson(200.0),
    Gamma(200.0, 0.3),
    Gamma(200.0, 3.0),
    OnOff(rate_on=800.0, mean_on=0.2, mean_off=0.6),
    OnOff(rate_on=300.0, rate_off=100.0, mean_on=1.0, mean_off=1.0),
    Schedule(((5.0, 100.0), (5.0, 300.0))),
    Diurnal(rate=200.0, swing=0.8, period=20.0),
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


def test_schedule_steps_at_its_times():
    times = until(Schedule(((10.0, 50.0), (10.0, 0.0), (10.0, 500.0))), 60.0, Random(1))
    per_step = [sum(10 * step <= time < 10 * step + 10 for time in times) for step in range(6)]
    assert per_step[1] == per_step[4] == 0
    for low, high in ((per_step[0], per_step[2]), (per_step[3], per_step[5])):
        assert 400 < low < 600
        assert 4700 < high < 5300


@pytest.mark.parametrize(
    "process",
    [
        Poisson(50.0),
        Gamma(50.0, 0.5),
        Gamma(50.0, 2.0),
        OnOff(rate_on=200.0, mean_on=0.1, mean_off=0.4),
        OnOff(rate_on=120.0, rate_off=20.0, mean_on=0.3, mean_off=0.1),
    ],
    ids=repr,
)
def test_dispersion_is_that_of_the_counts_of_long_windows(process):
    # 1,500 windows tell it within 4 % or so, and those of five seconds are 50 times as long as any burst remembers.
    counts = WindowCounts.of(until(process, 7500.0, Random(1)), 7500.0, window=5.0)
    assert counts.windows == 1500
    assert process.dispersion == pytest.approx(counts.dispersion, rel=0.12)


def test_more_callers_come_in_bursts_that_last_as_long():
    bursty = OnOff(rate_on=300.0, rate_off=100.0, mean_on=1.0, mean_off=3.0)
    assert bursty.scaled(1.5) == OnOff(rate_on=450.0, rate_off=150.0, mean_on=1.0, mean_off=3.0)


def test_a_trace_is_rescaled_and_reports_the_factor():
    recorded = [10.0, 11.0, 11.5, 14.0, 20.0]
    trace = Trace.at_rate(recorded, rate=4.0)
    assert trace.factor == pytest.approx(0.1)
    assert trace.rate == pytest.approx(4.0)
    assert list(trace.times(Random(0))) == pytest.approx([0.0, 0.1, 0.15, 0.4, 1.0])
    assert first(trace, 3, Random(0)) == pytest.approx([0.0, 0.1, 0.15])


def test_scaled_keeps_the_first_at_zero():
    assert scaled([5.0, 6.0, 9.0], 2.0) == [0.0, 2.0, 8.0]


def test_requests_carry_rows_and_lengths():
    drawn = list(
        requests(
            range(5000),
            Random(2),
            rows=Choice((1, 4, 16), (0.5, 0.25, 0.25)),
            lengths=HeavyTailed(median=100.0, sigma=1.0, largest=2000),
        )
    )
    assert [request.time for request in drawn] == list(range(5000))
    assert sum(request.rows == 1 for request in drawn) / 5000 == pytest.approx(0.5, abs=0.03)
    lengths = sorted(request.length for request in drawn)
    assert lengths[2500] == pytest.approx(100, rel=0.1)
    # Heavy: the mean lies well above the median (by exp(1/2) when uncapped).
    assert sum(lengths) / 5000 > 140
    assert lengths[0] >= 1
    assert lengths[-1] <= 2000
    assert [tuple(request) for request in requests([1.5], Random(0))] == [(1.5, 1, 1)]


def test_choice_never_draws_what_weighs_nothing():
    choice = Choice((1, 2, 3), (0.0, 1.0, 0.0))
    assert {choice.draw(Random(seed)) for seed in range(200)} == {2}
    assert Fixed(3).draw(Random(0)) == 3


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
    assert (empty.rate, empty.dispersion, empty.cv, empty.dispersion_error) == (0.0, 1.0, 1.0, math.inf)
    assert empty.looks_poisson
    silent = WindowCounts(50, 0, 0)
    assert (silent.rate, silent.dispersion, silent.looks_poisson) == (0.0, 1.0, True)


@pytest.mark.parametrize("rate", [5.0, 50.0, 500.0, 2000.0])
def test_poisson_arrivals_are_taken_for_poisson(rate):
    fits = [WindowCounts.of(until(Poisson(rate), 30.0, Random(seed)), 30.0) for seed in range(40)]
    # Two standard errors: about one in twenty may stray.
    assert sum(fit.looks_poisson for fit in fits) >= 34
    assert sum(fit.dispersion for fit in fits) / 40 == pytest.approx(1.0, abs=0.05)
    assert all(isinstance(fit.process(), Poisson) for fit in fits if fit.looks_poisson)


@pytest.mark.parametrize(("rate", "cv"), [(100.0, 0.3), (100.0, 0.6), (300.0, 2.0), (1000.0, 3.0), (1000.0, 0.5)])
def test_the_cv_of_a_gamma_process_is_recovered_from_counts(rate, cv):
    fits = [WindowCounts.of(until(Gamma(rate, cv), 120.0, Random(seed)), 120.0) for seed in range(5)]
    assert sum(fit.cv for fit in fits) / 5 == pytest.approx(cv, rel=0.12)
    for fit in fits:
        process = fit.process()
        assert isinstance(process, Gamma)
        assert process.rate == pytest.approx(rate, rel=0.1)


def test_correcting_for_short_windows_beats_the_raw_dispersion():
    counts = WindowCounts.of(until(Gamma(60.0, 2.0), 2000.0, Random(9)), 2000.0)
    assert abs(counts.cv - 2.0) < abs(math.sqrt(counts.dispersion) - 2.0)


def test_bursts_longer_than_the_window_are_still_bursts():
    counts = WindowCounts.of(until(OnOff(rate_on=40.0, mean_on=5.0, mean_off=20.0), 500.0, Random(4)), 500.0)
    assert not counts.looks_poisson
    assert counts.cv > 1.2


def test_azure_trace_is_read():
    trace = azure_llm_2023(
        [
            "TIMESTAMP,ContextTokens,GeneratedTokens\n",
            "2023-11-16 18:15:46.6805900,374,44\n",
            "2023-11-16 18:15:50.9951690,396,109\n",
            "2023-11-17 00:00:00.0000000,10,5\n",
            "\n",
        ]
    )
    assert trace.times == pytest.approx((0.0, 4.314579, 20653.31941), abs=1e-5)
    assert trace.context == (374, 396, 10)
    assert trace.generated == (44, 109, 5)
    assert azure_llm_2023([]).times == ()


def test_azure_trace_crosses_a_leap_day():
    trace = azure_llm_2023(["2024-02-28 23:59:59,1,1", "2024-03-01 00:00:00,1,1"])
    assert trace.times == (0.0, 86_401.0)


@pytest.mark.parametrize("line", ["18:15,1,2", "2023-11-16 18:15:46,1", "2023-11-16 18:15:46,many,2", "x"])
def test_azure_trace_names_the_broken_line(line):
    with pytest.raises(ValueError, match="line 2"):
        azure_llm_2023(["TIMESTAMP,ContextTokens,GeneratedTokens", line])
