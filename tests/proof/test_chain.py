from __future__ import annotations

import math
from decimal import Decimal, localcontext
from itertools import pairwise
from random import Random

import pytest
from chain import greedy

from carpool.forecasting.forecast import Load, forecast
from carpool.learning.arrivals import Poisson, first
from carpool.learning.latency_model import ServiceTime
from carpool.policy.parameters import Parameters
from carpool.policy.spec import PERCENTILES


def affine(rows):
    return 0.005 + 0.0005 * rows


SERVICE = ServiceTime.measured({rows: affine(rows) for rows in range(1, 65)})
SLO = 0.05


def erlang_quantile(q, rate, service):
    """Quantile of the time in an M/D/1 system (Erlang 1909), by bisection; exact sums, as the series alternates."""

    def below(wait):
        with localcontext() as context:
            context.prec = 60
            lam, fixed, x = Decimal(rate), Decimal(service), Decimal(wait)
            total = Decimal(0)
            for k in range(int(x / fixed) + 1):
                y = lam * (k * fixed - x)
                total += (y**k if k else Decimal(1)) / math.factorial(k) * (-y).exp()
            return float((1 - lam * fixed) * total)

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < q else (low, middle)
    return low + service


@pytest.mark.parametrize("rate", [50.0, 100.0, 150.0, 171.0])
def test_the_chain_with_batches_of_one_is_erlangs(rate):
    got = greedy(rate, SERVICE, 1, SLO)
    for quantile, value in zip(PERCENTILES, (got.p50, got.p90, got.p95, got.p99, got.p999), strict=True):
        assert value == pytest.approx(erlang_quantile(quantile, rate, affine(1)), rel=0.03)
    # Pollaczek-Khinchine says how busy it is; each request takes t(1).
    assert got.utilization == pytest.approx(rate * affine(1), rel=1e-3)
    assert got.device_time == pytest.approx(affine(1))


@pytest.mark.parametrize(
    ("rate", "cap"),
    [(20.0, 64), (300.0, 64), (1000.0, 64), (1500.0, 64), (400.0, 4), (300.0, 2), (700.0, 8), (1000.0, 16)],
)
def test_the_chain_agrees_with_the_recursion(rate, cap):
    exact = greedy(rate, SERVICE, cap, SLO)
    runs = [
        forecast(Load(first(Poisson(rate), 60_000, Random(seed))), SERVICE, Parameters(max_batch=cap), SLO)
        for seed in range(4)
    ]

    def mean(name):
        return sum(getattr(run, name) for run in runs) / len(runs)

    for name, tolerance in (
        ("p50", 0.015),
        ("p90", 0.02),
        ("p99", 0.04),
        ("device_time", 0.015),
        ("mean_batch", 0.015),
    ):
        assert getattr(exact, name) == pytest.approx(mean(name), rel=tolerance), name
    assert exact.miss_fraction == pytest.approx(mean("miss_fraction"), abs=0.004)
    assert exact.goodput == pytest.approx(rate * (1 - exact.miss_fraction))


@pytest.mark.parametrize("curve", [lambda b: 0.004 * math.ceil(b / 8), lambda b: 0.002 * b**1.2])
def test_the_chain_takes_any_curve(curve):
    service = ServiceTime.measured({rows: curve(rows) for rows in range(1, 33)})
    rate = 0.7 * service.capacity(16, 1)
    exact = greedy(rate, service, 16, SLO)
    loads = [Load(first(Poisson(rate), 60_000, Random(seed))) for seed in range(3)]
    runs = [forecast(load, service, Parameters(max_batch=16), SLO) for load in loads]
    assert exact.p99 == pytest.approx(sum(run.p99 for run in runs) / 3, rel=0.04)
    assert exact.device_time == pytest.approx(sum(run.device_time for run in runs) / 3, rel=0.02)


def test_the_chain_has_no_answer_beyond_capacity():
    got = greedy(2000.0, SERVICE, 64, SLO)
    assert (got.p50, got.miss_fraction, got.goodput) == (math.inf, 1.0, 0.0)
    assert got.throughput == pytest.approx(64 / 0.037)


def test_the_chain_is_monotone_in_load():
    found = [greedy(rate, SERVICE, 32, SLO) for rate in range(100, 1500, 200)]
    for low, high in pairwise(found):
        assert low.p50 < high.p50
        assert low.p99 < high.p99
        assert low.device_time > high.device_time
