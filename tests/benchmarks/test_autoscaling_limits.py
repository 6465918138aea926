from __future__ import annotations

import json

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
