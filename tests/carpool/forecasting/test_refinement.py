from __future__ import annotations

import math
from random import Random

import pytest

from carpool.forecasting.refinement import BELIEVED, ENOUGH, MOST, WITHIN, Refinement

P99 = -math.log(0.01)
"""Of exponential latencies with mean 1."""


def refined(*samples):
    played = Refinement()
    for sample in samples:
        played.add(sample, 0.0, len(sample))
    return played


def independent(count, seed):
    rng = Random(seed)
    return [rng.expovariate(1.0) for _ in range(count)]


def in_bursts(count, seed, size=100):
    """As many, but ``size`` in a row take equally long: they wait behind one another."""
    rng = Random(seed)
    return [latency for _ in range(count // size) for latency in [rng.expovariate(1.0)] * size]


def test_the_quantile_is_that_of_all_that_was_added():
    samples = [independent(1000, seed) for seed in range(40)]
    exact = sorted(latency for sample in samples for latency in sample)
    for q in (0.5, 0.99):
        assert refined(*samples).quantile(q) == pytest.approx(exact[round(40_000 * q)], rel=0.005)


@pytest.mark.parametrize(("draw", "count"), [(independent, 4000), (in_bursts, 8000)])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(draw, count):
    inside = 0
    for seed in range(60):
        found = refined(*(draw(count, 100 * seed + number) for number in range(16)))
        inside += abs(found.quantile(0.99) / P99 - 1) <= found.doubt
    assert inside >= 48


def test_bursts_leave_more_open():
    smooth = refined(*(independent(4000, seed) for seed in range(16)))
    bursty = refined(*(in_bursts(4000, seed) for seed in range(16)))
    assert bursty.doubt > 3 * smooth.doubt


def test_more_samples_leave_less_open():
    few = refined(*(independent(4000, seed) for seed in range(4)))
    many = refined(*(independent(4000, seed) for seed in range(64)))
    assert many.doubt < few.doubt / 2


def test_where_samples_agree_few_are_enough():
    played = Refinement()
    for number in range(ENOUGH):
        assert not played.is_done, "by chance it may look so"
        played.add([0.045] * 4000, 0.0, 4000)
        assert played.samples == number + 1
    assert played.is_done
    assert played.quantile(0.99) == pytest.approx(0.045, rel=0.0025)


def test_a_tail_that_differs_is_played_on_until_it_is_sure_or_there_is_an_end():
    played = Refinement()
    seed = 0
    while not played.is_done:
        played.add(in_bursts(8000, seed, size=20), 0.0, 8000)
        seed += 1
    assert ENOUGH < played.samples < MOST
    assert played.doubt <= WITHIN
    endless = Refinement()
    while not endless.is_done:
        seed += 1
        endless.add([Random(seed).expovariate(1.0)] * 100, 0.0, 100)
    assert endless.samples == MOST


def test_misses_and_requests_are_kept_by_sample():
    played = Refinement()
    played.add([0.01] * 90, 0.1, 100)
    played.add([0.01] * 70, 0.3, 100)
    assert played.misses == (0.1, 0.3)
    assert played.requests == 200


def test_answers_are_compared_only_once_enough_was_played():
    played = Refinement()
    for number in range(BELIEVED):
        assert played.expected_p99 is None, number
        played.add([0.01] * 98 + [0.05] * 2, 0.0, 100)
    assert played.expected_p99 == pytest.approx(0.05, rel=0.0025)


def test_where_no_request_is_answered_there_is_nothing_to_expect_and_an_end():
    played = Refinement()
    for _ in range(ENOUGH):
        played.add([], 1.0, 100)
    assert played.quantile(0.99) == math.inf
    assert played.expected_p99 is None
    assert played.is_done
