"""The figures on the page about savings are those that were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results():
    return json.loads((ROOT / "benchmarks" / "results" / "autoscaling.json").read_text())


def test_the_page_says_what_a_day_saves_beyond_zero_wait(results):
    gains = [
        way["deviceGain"] for each in results["savings"] for way in each["ways"] if way["name"] == "Carpool at best"
    ]
    some = [f"{gain:.0%}".removesuffix("%") for gain in sorted(gains) if gain >= 0.01]
    page = (ROOT / "docs" / "savings.md").read_text()
    said = re.findall(r"(\d+) to (\d+) %\s+of the\s+device time", page)
    assert said == [(some[0], some[-1])] * 2


def test_the_decision_says_how_close_forecast_and_simulation_are(results):
    errors = [abs(each["error"]) for each in results["capacities"]]
    text = (ROOT / "docs" / "decisions" / "0041-capacity.md").read_text()
    assert f"within {max(errors):.1%} in {len(errors)}".replace("%", " %") in text.replace("\n", " ")
