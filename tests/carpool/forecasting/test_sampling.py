from __future__ import annotations

from itertools import pairwise
from math import sqrt
from statistics import mean, stdev

import pytest

from carpool.forecasting import sampling
from carpool.learning.arrivals import Gamma, Poisson


@pytest.mark.parametrize("lot", [0, 1, 2])
@pytest.mark.parametrize("process", [Poisson(700.0), Gamma(700.0, 2.0)], ids=["poisson", "gamma"])
def test_arrivals_come_at_the_very_rate_that_was_asked_for(process, lot):
    for factor in (1.0, 1.25):
        times = sampling.times(process, 4000, factor, lot)
        assert all(one <= other for one, other in pairwise(times))
        assert len(times) / times[-1] == pytest.approx(factor * process.rate, rel=0.002)


def test_lots_differ_and_the_same_lot_does_not():
    assert sampling.times(Gamma(700.0, 2.0), 4000, lot=1) == sampling.times(Gamma(700.0, 2.0), 4000, lot=1)
    assert sampling.times(Gamma(700.0, 2.0), 4000, lot=1) != sampling.times(Gamma(700.0, 2.0), 4000, lot=2)
    assert sampling.draws(0.3, 1) != sampling.draws(0.3, 2)
    assert sampling.draws(0.001) is None


@pytest.mark.parametrize("process", [Poisson(700.0), Gamma(700.0, 2.0)], ids=["poisson", "gamma"])
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
    assert sampling.drawn(Gamma(700.0, 2.0), 400, 1) == sampling.drawn(Gamma(700.0, 2.0), 400, 1)
    assert sampling.drawn(Gamma(700.0, 2.0), 400, 1) != sampling.drawn(Gamma(700.0, 2.0), 400, 2)
