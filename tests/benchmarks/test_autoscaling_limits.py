from __future__ import annotations

import json
import sys
from pathlib import Path

import autoscaling
import pytest


def row(name, hours=100.0, misses=0.002, of=1.09, load="day"):
    return {"model": "m", "load": load, "name": name, "replicaHours": hours, "ofTheFewest": of, "misses": misses}


def results(*hpas, ours=None, live=(), errors=(0.01,)):
    capacities = [{"scenario": "s", "error": each} for each in errors]
    return {"capacities": capacities, "days": [*hpas, ours or row("Carpool's load at 0.9")], "live": [*live]}


@pytest.mark.parametrize(
    "hpa",
    [
        row("HPA, CPU", hours=500.0, misses=0.0),
        row("HPA, requests/s", hours=99.5, misses=0.0015),
        row("HPA, requests/s", hours=100.0, misses=0.05),
    ],
    ids=["more hours", "by chance", "more misses"],
)
def test_an_hpa_that_does_no_better_is_none_to_report(hpa):
    assert autoscaling.beyond(results(hpa)) == []


@pytest.mark.parametrize(
    ("hpa", "words"),
    [
        (row("HPA, requests/s", hours=98.0), "m day: +2.0% replica-hours than HPA, requests/s"),
        (row("HPA, requests/s", hours=100.5, misses=0.0005), "m day: +0.15% missed than HPA, requests/s"),
    ],
)
def test_an_hpa_that_does_better_is_reported_by_hours_and_by_misses(hpa, words):
    assert autoscaling.beyond(results(hpa)) == [words]


def test_what_is_beyond_a_limit_is_reported():
    found = autoscaling.beyond(
        results(
            ours=row("Carpool's load at 0.9", of=1.2, misses=0.02),
            live=[row("waves", of=1.2), row("magika", of=1.3)],
            errors=(0.049, -0.06),
        )
    )
    assert found == [
        "s: -6.0%",
        "m day, Carpool's load at 0.9: 1.20x of the fewest replica-hours, at most 1.15x",
        "m day, Carpool's load at 0.9: 2.00% missed, at most 1%",
        "m day, magika: 1.30x of the fewest replica-hours, at most 1.25x",
    ]


def test_a_capacity_as_known_live_is_the_mean_of_the_seeds_loads_and_lies_between_the_loads_played(
    tmp_path, monkeypatch
):
    assert len(autoscaling.known_live()) == 9
    # At 30 % load one seed knows a third of the capacity, the other all of it: loads of 3 and 1, 2 in the mean.
    errors = {("Efficiency", 0.3): (-2 / 3, 0.0), ("Efficiency", 0.5): (0.0, 0.0), ("Balanced", 0.3): (0.9, 0.9)}
    figures = [
        {"scenario": "s", "objective": objective, "load": load, "error": error}
        for (objective, load), both in errors.items()
        for error in both
    ]
    monkeypatch.setattr(autoscaling, "LIVE", tmp_path / "live.json")
    autoscaling.LIVE.write_text(json.dumps({"figures": figures}))
    known = autoscaling.known_live()["s"]
    assert known(0.0) == known(0.3) == pytest.approx(0.5)
    assert known(0.4) == pytest.approx(0.75)
    assert (known(0.5), known(1.5)) == pytest.approx((1.0, 1.0))


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Write both records; the fields of the days."""
    monkeypatch.setattr(autoscaling, "LIVE", tmp_path / "live.json")
    monkeypatch.setattr(autoscaling, "RESULTS", tmp_path / "days.json")
    autoscaling.LIVE.write_text('{"figures": []}')

    def write(**fields):
        autoscaling.RESULTS.write_text(json.dumps(fields))

    return write


def check(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["autoscaling.py", "--check"])
    return autoscaling.main()


def test_days_are_of_the_live_capacities_that_are_kept_or_of_others(records, monkeypatch, capsys):
    records(liveCapacities=autoscaling.live_digest())
    assert check(monkeypatch) == 0
    autoscaling.LIVE.write_text('{"figures": [1]}')
    assert check(monkeypatch) == 1
    assert "make autoscaling" in capsys.readouterr().out


def test_days_without_a_digest_are_older(records, monkeypatch):
    records(date="2026-11-27")
    assert check(monkeypatch) == 1


def test_what_is_written_has_the_digest_of_what_was_played(records, monkeypatch):
    monkeypatch.setattr(autoscaling, "capacities", list)
    monkeypatch.setattr(autoscaling, "days", lambda: {"days": [], "live": [], "savings": []})
    monkeypatch.setattr(sys, "argv", ["autoscaling.py"])
    assert autoscaling.main() == 0
    assert check(monkeypatch) == 0


def test_the_page_says_whether_the_days_were_played_with_older_capacities():
    page = " ".join((Path(__file__).parents[2] / "docs" / "savings.md").read_text().split())
    said = "the live capacities of 27 November 2026; the ones [above](#scale-by-load) are newer" in page
    assert said == autoscaling.of_other_capacities(), "after make autoscaling, this sentence goes"
