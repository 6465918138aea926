from __future__ import annotations

import pytest

from carpool_cli.planning.money import Price, written


def test_a_month_has_730_hours():
    assert Price(2.5).month(1) == pytest.approx(1825.0)
    assert Price(2.5).month(3.5) == pytest.approx(3.5 * 1825.0)
    assert Price(2.5).month(0) == 0.0


def test_amounts_are_written_for_people():
    assert written(1825.0) == "1,825.00"
    assert written(-0.005) in {"-0.01", "-0.00"}
