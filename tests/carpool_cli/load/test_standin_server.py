from __future__ import annotations

from math import sqrt
from random import Random

import pytest

from carpool.learning.latency_model import ServiceTime
from carpool_cli.load.standin_server import single_batch


def test_single_batches_have_the_mean_and_the_noise_of_the_curve():
    assert single_batch(ServiceTime.measured({1: 0.01}), 1, Random(0)) == 0.01
    noisy = ServiceTime.measured({1: 0.01}, noise=0.3)
    rng = Random(1)
    drawn = [single_batch(noisy, 1, rng) for _ in range(20_000)]
    mean = sum(drawn) / len(drawn)
    assert mean == pytest.approx(0.01, rel=0.02)
    assert sqrt(sum((x - mean) ** 2 for x in drawn) / len(drawn)) / mean == pytest.approx(0.3, rel=0.05)
    assert single_batch(noisy, 1, Random(5)) == single_batch(noisy, 1, Random(5))
