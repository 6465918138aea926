from __future__ import annotations

from itertools import pairwise
from math import log, sqrt
from statistics import mean, stdev

import pytest

from carpool.forecasting import sampling
from carpool.learning.arrivals import Gamma, OnOff, Poisson

BURSTY = OnOff(rate_on=1152.0, mean_on=0.3, mean_off=0.6, rate_off=345.0)


@pytest.mark.parametrize("lot", [0, 1, 2])
@pytest.mark.parametrize("process", [Poisson(700.0), Gamma(700.0, 2.0), BURSTY], ids=["poisson", "gamma", "bursts"])
def test_arrivals_come_at_the_very_rate_that_was_asked_for(process, lot):
    for factor in (1.0, 1.25):
        times = sampling.times(process, 4000, factor, lot)
        assert all(one <= other for one, other in pairwise(times))
        assert len(times) / times[-1] == pytest.approx(factor * process.rate, rel=0.002)


def test_lots_differ_and_the_same_lot_does_not():
    assert sampling.times(BURSTY, 4000, lot=1) == sampling.times(BURSTY, 4000, lot=1)
    assert sampling.times(BURSTY, 4000, lot=1) != sampling.times(BURSTY, 4000, lot=2)
    assert sampling.draws(0.3, 1) != sampling.draws(0.3, 2)
    assert sampling.draws(0.001) is None


def test_more_callers_come_in_the_same_bursts():
    def inside(times, start, stop):
        return sum(start <= time < stop for time in times)

    now, ahead = sampling.times(BURSTY, 8000), sampling.times(BURSTY, 8000, 1.25)
    assert ahead[-1] == pytest.approx(now[-1], rel=0.01)
    # Which half-seconds are busy is the same, so that each has a quarter more, give or take what chance makes of 300.
    ratios = [inside(ahead, at / 2, at / 2 + 0.5) / inside(now, at / 2, at / 2 + 0.5) for at in range(10)]
    assert all(0.9 < ratio < 1.7 for ratio in ratios), ratios


def test_lulls_are_of_all_lengths_whatever_the_lot():
    for lot in range(6):
        times = sampling.times(OnOff(rate_on=2000.0, mean_on=0.5, mean_off=0.5), 8000, lot=lot)
        lulls = sorted((gap for gap in (other - one for one, other in pairwise(times)) if gap > 0.02), reverse=True)
        # Eight parts of the distribution, of which the last lull and the shortest ones may not show.
        assert 5 <= len(lulls) <= 8
        longest, second = 0.5 * log(16), 0.5 * log(16 / 3)
        assert any(lulls[0] == pytest.approx(length, rel=0.15) for length in (longest, second))


@pytest.mark.parametrize("process", [Poisson(700.0), Gamma(700.0, 2.0), BURSTY], ids=["poisson", "gamma", "bursts"])
def test_lots_as_they_come_are_now_more_and_now_fewer(process):
    lots = [sampling.drawn(process, 4000, lot) for lot in range(1, 41)]
    assert {len(lot) for lot in lots} == {4000}
    assert all(one <= other for lot in lots for one, other in pairwise(lot))
    # Counts of a time in which 4,000 are expected spread by sqrt(4,000 * dispersion), and as much does that time.
    lasted = [lot[-1] * process.rate / 4000 for lot in lots]
    chance = sqrt(process.dispersion / 4000)
    assert mean(lasted) == pytest.approx(1.0, abs=4 * chance / sqrt(40))
    assert stdev(lasted) == pytest.approx(chance, rel=0.35)


def test_lots_as_they_come_differ_and_the_same_lot_does_not():
    assert sampling.drawn(BURSTY, 400, 1) == sampling.drawn(BURSTY, 400, 1)
    assert sampling.drawn(BURSTY, 400, 1) != sampling.drawn(BURSTY, 400, 2)
