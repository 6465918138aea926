from __future__ import annotations

import msgspec
import pytest
import run
from evidence import Results, limits

FIGURES = msgspec.json.decode(run.RESULTS.read_bytes(), type=Results).figures
NOISE = 0.15


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_limit_is_near_what_is_recorded(figure):
    limit = limits(run.LIMITS)[figure.name]
    worse = 1 + NOISE if limit.direction == "at most" else 1 - NOISE
    assert limit.holds(figure.value)
    assert not limit.holds(1.001 * worse * figure.value if worse > 1 else 0.999 * worse * figure.value), (
        f"{figure.name}: {limit.value} would let {figure.value:.4g} get worse by more than {NOISE:.0%}"
    )
