from __future__ import annotations

import math
from random import Random

import pytest

from carpool.forecasting.refinement import Settling

P99 = -math.log(0.01)
"""Of exponential latencies with mean 1."""


def settled(*runs):
    settling = Settling()
    for run in runs:
        settling.add(run)
    return settling


def independent(count, seed):
    rng = Random(seed)
    return [rng.expovariate(1.0) for _ in range(count)]


def crowds(count, seed, size=100):
    """As many, of which each ``size`` fare alike: who waits behind one another."""
    rng = Random(seed)
    return [latency for _ in range(count // size) for latency in [rng.expovariate(1.0)] * size]


def test_the_quantile_is_that_of_all_that_was_added():
    runs = [independent(1000, seed) for seed in range(40)]
    exact = sorted(latency for run in runs for latency in run)[39_600]
    assert settled(*runs).value == pytest.approx(exact, rel=0.005)


@pytest.mark.parametrize(("draw", "count"), [(independent, 4000), (crowds, 64_000)])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(draw, count):
    inside = sum(
        abs(found.value / P99 - 1) <= found.doubt for found in (settled(draw(count, seed)) for seed in range(100))
    )
    assert 85 <= inside <= 99


def test_a_narrow_interval_of_few_runs_is_not_believed():
    found = Settling()
    for _ in range(3):
        found.add([0.045] * 4000)
        assert not found.is_known(0.02), "by chance it may look so"
    found.add([0.045] * 4000)
    assert found.is_known(0.02)
    found.add([0.045] * 3900 + [0.4] * 100)
    assert not found.is_known(0.02), "one in 200 of the others' is far off: the p99 may be either"


def test_who_fares_alike_tells_less():
    alike, shuffled = crowds(40_000, 1), crowds(40_000, 1)
    Random(2).shuffle(shuffled)
    assert settled(alike).value == settled(shuffled).value
    assert settled(alike).doubt > 3 * settled(shuffled).doubt


def test_more_requests_leave_less_doubt():
    few = settled(*(independent(4000, seed) for seed in range(2)))
    many = settled(*(independent(4000, seed) for seed in range(50)))
    assert many.doubt < few.doubt / 3
    assert few.doubt < 0.1


def test_a_gap_in_what_comes_is_a_doubt():
    # One in a hundred takes ten times as long: the p99 is one or the other.
    rng = Random(1)
    found = settled([10.0 if rng.random() < 0.01 else 1.0 for _ in range(4000)])
    assert found.doubt > 1


def test_what_is_always_the_same_leaves_none():
    found = settled([0.045] * 4000)
    assert (found.value, found.doubt) == (pytest.approx(0.045, rel=0.0025), 0.0)


def test_nothing_tells_nothing():
    found = settled([])
    assert (found.value, found.doubt) == (math.inf, math.inf)
    found.add([0.01])
    assert found.value == pytest.approx(0.01, rel=0.0025)
    assert found.doubt == math.inf
