from __future__ import annotations

import math

import pytest

from carpool.learning.latency_model import ServiceTime
from carpool_cli.profiling.inflection import inflection, may_gain_more


def affine(rows):
    return 0.005 + 0.0005 * rows


@pytest.mark.parametrize(
    ("curve", "rows"),
    [
        (affine, 64),
        (lambda rows: 0.001 * rows, 1),
        (lambda rows: 0.001 * rows**1.2, 1),
        (lambda rows: 0.004 * math.ceil(rows / 16) + 0.0001, 16),
        (lambda _: 0.01, 61),
    ],
)
def test_inflection_is_where_growing_stops_paying(curve, rows):
    service = ServiceTime.measured({size: curve(size) for size in range(1, 65)})
    # 5 + 0.5 b: 0.578 ms a row at 64; 0.6066 at most, which 47 rows reach.
    assert inflection(service) == {64: 47}.get(rows, rows)


def test_inflection_looks_as_far_as_asked():
    service = ServiceTime.measured({1: 1.0, 2: 1.0, 64: 63.0})
    assert inflection(service, 1) == 1
    assert inflection(service, 2) == 2


# ResNet-50 on a V100 (benchmarks/profiles): at 64 rows a row takes 181 us, and each row more 155 us.
RESNET = {1: 0.0020779, 8: 0.0032938, 16: 0.00435118, 32: 0.00658944, 64: 0.0115623}


@pytest.mark.parametrize(
    ("seconds", "more"),
    [
        (RESNET, True),
        ({1: 0.010, 8: 0.010}, True),
        ({1: 0.010}, True),
        ({size: affine(size) for size in (1, 64, 128, 256)}, False),  # 0.5195 ms at 256, 0.5 at most beyond
        ({1: 0.010, 8: 0.010, 16: 0.020, 64: 0.080}, False),
        ({1: 0.001, 8: 0.001, 9: 0.009, 16: 0.009}, False),  # a step up: 72 rows at that time would be as cheap as 8
    ],
)
def test_larger_batches_may_gain_more_where_a_row_still_gets_cheaper_at_the_largest(seconds, more):
    assert may_gain_more(ServiceTime.measured(seconds)) is more
