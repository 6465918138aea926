from __future__ import annotations

import re

import pytest

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_cli.planning import plots
from carpool_cli.planning.parameter_map import Plane, Point

NOW = Parameters(max_batch=1)
BEST = Parameters(max_batch=2, max_wait=Duration(0.01))


def plane(slots=1, holds=((True, True), (False, False))):
    sizes, waits = [1, 2], [0.0, 0.01]
    points = [
        [
            Point(max_batch=size, max_wait=wait, latency=0.0123, device_time=0.00456, miss_share=0.0, holds=now,
                  holds_ahead=ahead)
            for wait in waits
        ]
        for size, (now, ahead) in zip(sizes, holds, strict=True)
    ]  # fmt: skip
    return Plane(max_in_flight=slots, percentile="p99", sizes=sizes, waits=waits, points=points, measured=(1, 1))


@pytest.fixture
def drawn(tmp_path):
    def draw(*planes, slo=0.05):
        path = tmp_path / "what-if.svg"
        # Letters as letters, to be found again.
        with plots.plt.rc_context({"svg.fonttype": "none"}):
            plots.what_if(path, "m_x$y at 10 requests/s", planes, {"now": NOW, "recommended": BEST}, slo)
        return path.read_text("utf-8")

    return draw


def test_a_map_shows_figures_configurations_and_infeasible_settings(drawn):
    text = drawn(plane())
    assert "m_x$y at 10 requests/s" in text
    assert text.count(">12.3<") == text.count(">4.56<") == 4
    for words in ("now: batch 1, wait 0s, 1 in flight", "recommended: batch 2, wait 10ms", "infeasible: ",
                  "batch latency extrapolated (measured 1 to 1 rows)", "max_wait, ms", "max_batch, rows"):  # fmt: skip
        assert words in text
    assert len(re.findall("<pattern", text)) >= 1


def test_a_second_number_in_flight_is_a_second_row_with_the_same_colours(drawn):
    text = drawn(plane(), plane(slots=2))
    assert text.count("p99, ms; 1 in flight;") == text.count("p99, ms; 2 in flight;") == 1
    assert text.count(">12.3<") == 8


@pytest.mark.parametrize("holds", [((False, False), (False, False)), ((True, False), (True, False))])
def test_where_nothing_holds_there_is_a_picture_all_the_same(drawn, holds):
    assert "<svg" in drawn(plane(holds=holds), slo=0.01)
