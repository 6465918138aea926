from __future__ import annotations

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


def test_a_capacity_as_known_live_is_the_mean_of_the_seeds_loads_and_lies_between_the_loads_played():
    known = autoscaling.known_live()
    assert len(known) == 9
    magika = known["magika-8-cores"]
    assert magika(0.0) == magika(0.3) == pytest.approx(0.5, abs=0.01)
    assert magika(0.4) == pytest.approx(0.75, abs=0.01)
    assert (magika(0.5), magika(1.5)) == pytest.approx((1.0, 1.0), abs=0.01)
