"""The figures on the page about savings are those that were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def recorded(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def text_of(name):
    return " ".join((ROOT / "docs" / name).read_text().split())


@pytest.fixture(scope="module")
def results():
    return recorded("autoscaling.json")


@pytest.fixture(scope="module")
def live():
    return recorded("live-capacity.json")


def test_the_page_says_what_a_day_saves_beyond_zero_wait(results):
    gains = [
        way["deviceGain"] for each in results["savings"] for way in each["ways"] if way["name"] == "Carpool at best"
    ]
    some = [f"{gain:.0%}".removesuffix("%") for gain in sorted(gains) if gain >= 0.01]
    page = (ROOT / "docs" / "savings.md").read_text()
    said = re.findall(r"(\d+) to (\d+) %\s+of the\s+device time", page)
    assert said == [(some[0], some[-1])] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Carpool's load at 0.9", "Carpool's load at 0.9 takes {} to {} times the fewest replica-hours"),
        ("the same, capacity as known live", "Carpool's load takes {} to {} times the fewest replica-hours"),
    ],
)
def test_the_page_says_how_many_replica_hours_the_load_takes(results, name, words):
    hours = [each["ofTheFewest"] for each in results["days"] if each["name"].startswith(name)]
    assert len(hours) == 6, "three models, a day and a trace"
    assert words.format(f"{min(hours):.2f}", f"{max(hours):.2f}") in text_of("savings.md")
    assert f"{min(hours):.2f} to {max(hours):.2f} times" in text_of("decisions/0041-capacity.md")


def test_the_decision_says_how_close_forecast_and_simulation_are(results):
    errors = [abs(each["error"]) for each in results["capacities"]]
    text = (ROOT / "docs" / "decisions" / "0041-capacity.md").read_text()
    assert f"within {max(errors):.1%} in {len(errors)}".replace("%", " %") in text.replace("\n", " ")


def test_the_page_says_how_far_off_the_capacity_of_a_sidecar_is_with_first_calls_and_without(live):
    errors = [each["error"] for each in live["figures"]]
    without = [each["error"] for each in live["withoutFirstCalls"]]
    close, alike = (sum(abs(error) <= 0.1 for error in each) for each in (errors, without))
    page = text_of("savings.md")
    assert f"within 10 % in {close} of {len(errors)} plays" in page
    assert f"at most {-100 * min(errors):.0f} % too low and {100 * max(errors):.0f} % too high" in page
    assert max(errors) <= 0.1, "none is beyond on the side that takes replicas away"
    assert f"{alike} of {len(without)} plays were within 10 %, {len(without) - alike} were" in page
    assert f"were {-100 * min(without):.0f} % too low" in page


def test_where_the_capacity_is_half_too_low_is_at_low_load_only(live):
    far = [each for each in live["withoutFirstCalls"] if abs(each["error"]) > 0.1]
    assert {each["load"] for each in far} == {0.3}
