"""A run of the proof, small enough to be worked out by hand: one scenario, three contenders, four loads."""

from __future__ import annotations

from evidence import Machine
from msgspec.structs import replace
from proof.measures import Tally
from proof.rows import About, Forecast, Hour, Named, Phase, Proof, Recovery, Rollback, Stair, Timeline

LOADS = (0.5, 0.9, 1.0, 2.0)


def step(missing, milliseconds, rate=100.0):
    """A step of 10 s in which a share misses, late, and each request takes so many ms of the device."""
    requests = round(rate * 10)
    return Tally(10.0, requests, requests - round(missing * requests), requests, requests * milliseconds / 1e3)


def stair(contender, *steps, scenario="plain"):
    return Stair(scenario, contender, tuple(steps))


def timeline(contender, misses, *recoveries, scenario="plain"):
    return Timeline(scenario, contender, misses, 0.002, tuple(recoveries), (misses, misses, misses))


def proof(**changes):
    """Carpool holds 0.94 of the load where the oracle holds all, and saves three quarters of what that saves."""
    made = Proof(
        commit="0123456789ab",
        date="2026-11-21T12:00:00+00:00",
        machine=Machine("a CPU", 2, "Linux", "3.11.7"),
        command="python benchmarks/proof --write",
        seed=1,
        suite="feedfeed",
        seconds=1200,
        cpu_seconds=2300,
        left_out={},
        contenders=[
            Named("carpool", "Carpool", "this project"),
            Named("greedy", "greedy", "common practice"),
            Named("fixed", "fixed", "a page"),
        ],
        scenarios=[About("plain", "the reference curve", "synthetic", 0.05, "Poisson", 1, 200.0, LOADS)],
        phases={"plain": [Phase("start", 0.0, 120.0, 0.5, 1.0, 100.0), Phase("load up", 120.0, 40.0, 1.0, 1.0, 200.0)]},
        stairs=[
            stair("oracle", step(0.0, 2), step(0.001, 2), step(0.01, 2), step(0.5, 2)),
            stair("carpool", step(0.001, 4), step(0.004, 2), step(0.02, 2), step(0.5, 2)),
            stair("greedy", step(0.001, 10), step(0.02, 4), step(0.05, 2), step(0.6, 2)),
            stair("fixed", step(0.02, 1), step(0.03, 2), step(0.05, 2), step(1.0, 2)),
        ],
        timelines=[
            timeline("oracle", 0.002, Recovery(0.0, 0, 0), Recovery(0.0, 0, 0)),
            timeline("carpool", 0.004, Recovery(30.0, 3000, 0), Recovery(None, 8000, 1)),
            timeline("greedy", 0.003, Recovery(0.0, 0, 0), Recovery(2.0, 400, 0)),
            timeline("fixed", 0.2, Recovery(None, 12000, 0), Recovery(None, 8000, 0)),
        ],
        hours=[Hour("plain", 0.5, 100.0, 0.001, 4, 0)],
        forecasts=[Forecast("plain", 0.5, 0.6, "batch 64", 0.040, 0.041, 0.05, 0.045)],
        rollbacks=[Rollback("plain", 100.0, "batch 64", "batch 1", 0.9, 120)],
    )
    return replace(made, **changes)
