from __future__ import annotations

import math

import pytest

from carpool.learning.latency_model import ServiceTime
from carpool_cli.profiling.inflection import inflection


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
