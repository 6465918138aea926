"""Replicas that autoscalers use over a day, and whether the capacity forecast is right: ``make autoscaling`` (minutes).

- *Capacity*: requests/s per replica as forecast, and as the request-level simulator carries, in every scenario of the
  proof that has one: independent or bursty arrivals of one length. Arrivals are others than those of the forecast.
- *Days*: a GPU, a CPU model and a model that gains nothing from batches, each with a day that rises and falls, and with
  the shared trace (Azure, 2023) at its own pace. HPAs by CPU percent and by requests/s on replicas with zero wait,
  Carpool's load, and the fewest replicas possible.
- *Live*: Carpool's load on those days once more, with the capacity wrong as it is a minute after a sidecar's start, in
  each scenario of ``live_capacity.py``. The row in the table has the worst of them.
- *Savings* of each on that day, as ``carpool savings`` has them.

Virtual time, seeded: the same everywhere. Exit code 1: a figure is beyond its limit, or worse than an HPA's. With
``--check``: the kept results are of other live capacities than those that are kept now.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
from evidence import commit, today
from msgspec.structs import replace
from proof.scenario import Gamma, Poisson, load_all
from proof.world import Stretch, devices

from carpool.batching.requests import Estimate, seldom_exceeded
from carpool.forecasting.capacity import FULL, candidates, capacity
from carpool.forecasting.forecaster import Situation
from carpool.learning.arrivals import first
from carpool.policy.spec import Objective
from carpool.simulation.simulator import Device, Simulation
from carpool.tuning.candidates import known_flights, productive_sizes
from carpool.tuning.objective import Aim
from carpool_cli.autoscaling import day_plot
from carpool_cli.autoscaling import days as fleet
from carpool_cli.autoscaling.controller import CPU, LOAD, REQUESTS, Autoscaler, Metric
from carpool_cli.autoscaling.days import STEP
from carpool_cli.planning import assumptions, replica, savings
from carpool_cli.planning.money import Price
from carpool_cli.profiling import device_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proof.scenario import Scenario

    from carpool.forecasting.capacity import Capacity
    from carpool_cli.autoscaling.days import Steps

HERE = Path(__file__).parent
RESULTS, LIVE = HERE / "results" / "autoscaling.json", HERE / "results" / "live-capacity.json"
PICTURE = HERE.parent / "docs" / "images" / "autoscaling.png"

WITHIN = 0.05
"""Error of a capacity."""

OF_THE_FEWEST, LIVE_OF_THE_FEWEST, MISSES = 1.15, 1.25, 0.01
"""Limits of Carpool's load: replica-hours, the same with capacities as measured live, and the SLO's misses."""

HOURS_MORE, MISSES_MORE = 0.01, 0.001
"""Never worse than an HPA: at most so much more of its replica-hours, and of all requests, so many more may miss where
the HPA takes about the same hours. Counts by chance differ by as much. An HPA that takes more hours may miss less."""
FACTORS = (0.92, 0.96, 1.0, 1.04, 1.08)
REQUESTS_PLAYED, MOST_PLAYED = 30_000, 150_000

MODELS = {
    "bert-large-128-a100": ("a GPU", 0.05),
    "ranking-tower-cpu": ("a CPU model", 0.015),
    "magika-cpu": ("a model that gains nothing", 0.1),
}
PEAK, TRACE_MEAN = 6.0, 3.0
"""Of the load, in replicas that are full."""
OURS = Autoscaler(metrics=(Metric(LOAD, FULL),), most=40)
COLD = 60.0
PRICE = Price(2.5)


def situation_of(profile: str, slo: float, cv: float = 1.0, executors: int | None = None) -> tuple[Situation, Any]:
    """Return what forecasts are made for, and the profile."""
    found = device_profile.load(HERE / "profiles" / f"{profile}.json")
    if executors is not None:
        found = replace(found, executors=executors)
    policy = assumptions.slo_policy(slo, largest_batch=found.largest_safe or 64)
    situation = Situation(
        process=assumptions.process_of(100.0, cv),
        service=assumptions.known(found),
        target=slo,
        budget=assumptions.budget(policy),
        limits=policy.limits(),
    )
    return situation, found


def searched(situation: Situation) -> Capacity:
    """Search as the tuner does."""
    sizes = productive_sizes(situation.service, situation.limits, also=1)
    return capacity(situation, candidates(situation, sizes, known_flights(situation.service, situation.limits)))


def carried(situation: Situation, device: Device, found: Capacity) -> float:
    """Return the highest rate that misses at most 1 % in the simulator, between factors by interpolation."""
    service = situation.service
    times = tuple(service.time(max(rows, 1)) for rows in range(129))
    estimate = Estimate(
        times, tuple(each * seldom_exceeded(service.noise) for each in times), service.executors, service.noise
    )
    # Bursts take as many times more for a rate that is as exact.
    count = min(round(REQUESTS_PLAYED * max(situation.process.dispersion, 1.0)), MOST_PLAYED)
    points = []
    for factor in FACTORS:
        process = replace(situation.process, rate=factor * found.rate)
        missed = []
        for seed in (1, 2):
            arrivals = first(process, count, Random(100 + seed))
            run = Simulation(
                arrivals, device, slo=situation.target, parameters=found.parameters, estimate=estimate,
                shed_slo=True, seed=seed,
            ).run()  # fmt: skip
            missed.append(run.summary().miss_fraction)
        points.append((factor, sum(missed) / len(missed)))
    allowed = 2 * situation.budget
    for (low, under), (high, over) in pairwise(points):
        if under <= allowed < over:
            return (low + (high - low) * (allowed - under) / (over - under)) * found.rate
    return (FACTORS[-1] if points[-1][1] <= allowed else FACTORS[0]) * found.rate


def steady() -> list[Scenario]:
    """List the scenarios of the proof that have one capacity: one process at one rate, requests of one length."""
    return [one for one in load_all() if isinstance(one.arrivals, Poisson | Gamma) and one.lengths is None]


def capacities() -> list[dict[str, Any]]:
    """Compare forecast and simulation, of one replica that is warm and stands nowhere still."""
    rows = []
    for scenario in steady():
        alone = replace(scenario, cold=1.0, stalls=None, replicas=1, slow_pod=1.0)
        cv = scenario.arrivals.cv if isinstance(scenario.arrivals, Gamma) else 1.0
        limits = scenario.limits
        situation = Situation(
            process=assumptions.process_of(100.0, cv),
            service=alone.service(),
            target=float(scenario.slo),
            budget=assumptions.budget(scenario.policy),
            limits=replace(limits, max_batch=min(limits.max_batch, scenario.largest or limits.max_batch)),
        )
        found = searched(situation)
        (device,) = devices(alone, (Stretch(3600.0, 1.0),))
        truth = carried(situation, device, found)
        error = found.rate / truth - 1
        rows.append({"scenario": scenario.name, "forecast": found.rate, "carried": truth, "error": error})
        print(f"{scenario.name:34} forecast {found.rate:9.1f}  carried {truth:9.1f}  {error:+.1%}", flush=True)
    return rows


def contenders(situation: Situation, rates: Sequence[float]) -> list[tuple[str, Steps]]:
    """Play a load by each autoscaler; by requests/s with the target that a load test of zero wait suggests.

    The last two: Carpool's load, and the fewest replicas possible.
    """
    zero, ours = replica.zero_wait(situation), replica.tuned(situation, Aim())
    scalers = (
        ("HPA, CPU 60 %, zero wait", Autoscaler(metrics=(Metric(CPU, 60),), most=40)),
        ("HPA, requests/s at 60 % of a load test, zero wait", _requests(zero, 0.6)),
        (f"HPA, requests/s at {FULL:.0%} of a load test, zero wait", _requests(zero, FULL)),
    )
    plays = [(name, fleet.play(each, zero, rates, cold_start=COLD, seed=1)) for name, each in scalers]
    plays.append((f"Carpool's load at {FULL:g}", fleet.play(OURS, ours, rates, cold_start=COLD, seed=1)))
    return [*plays, ("the fewest possible", fleet.clairvoyant(ours, rates, cold_start=COLD))]


def _requests(table: replica.Replica, share: float) -> Autoscaler:
    return Autoscaler(metrics=(Metric(REQUESTS, share * table.capacity),), most=40)


def known_live() -> dict[str, Callable[[float], float]]:
    """Return what a sidecar takes its capacity for, as a share of what it is, by its load: of each scenario."""
    shares: dict[str, dict[float, list[float]]] = {}
    for row in msgspec.json.decode(LIVE.read_bytes())["figures"]:
        # Where an autoscaler follows the load, the objective is this one.
        if row["objective"] == Objective.EFFICIENCY:
            shares.setdefault(row["scenario"], {}).setdefault(row["load"], []).append(1 + row["error"])
    # Loads add up over replicas, so that the mean over seeds is that of the loads.
    means = {
        name: [(load, len(found) / sum(1 / each for each in found)) for load, found in sorted(loads.items())]
        for name, loads in shares.items()
    }
    return {name: partial(_between, points) for name, points in means.items()}


def live_digest() -> str:
    """Identify the live capacities that are kept now."""
    return hashlib.sha256(LIVE.read_bytes()).hexdigest()[:16]


def of_other_capacities() -> bool:
    """Whether the kept results were played with other live capacities; those without a digest are older."""
    return bool(msgspec.json.decode(RESULTS.read_bytes()).get("liveCapacities") != live_digest())


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at a place between points, or that of the nearest one."""
    for (low, under), (high, over) in pairwise(points):
        if at <= high:
            return under + (over - under) * max(at - low, 0.0) / (high - low)
    return points[-1][1]


def days() -> dict[str, list[Any]]:
    """Play each model's day and trace, with capacities as they are and as known live; and the day's savings."""
    recorded, _ = assumptions.read_trace(Path("azure"), None)
    raw = fleet.binned(recorded)
    mean = sum(raw) / len(raw)
    rows, live, saved = [], [], []
    for model, (kind, slo) in MODELS.items():
        situation, profile = situation_of(model, slo)
        full = searched(situation).rate
        loads = {
            "day": fleet.diurnal(PEAK * full),
            "trace": [TRACE_MEAN * full / mean * each for each in raw],
        }
        for load, rates in loads.items():
            played = contenders(situation, rates)
            if (model, load) == ("bert-large-128-a100", "day"):
                drawn = [played[index] for index in (0, 1, 3, 4)]
                day_plot.draw(PICTURE, f"{profile.name}: a day, replicas start in {COLD:.0f} s", drawn)
            least = fleet.summary(*played[-1]).replica_hours
            within = {"model": model, "kind": kind, "load": load}
            live += [{**within, **_row(each, least)} for each in lived(situation, rates)]
            worst = max((row for row in live if row.items() >= within.items()), key=lambda row: row["ofTheFewest"])
            ours = {**worst, "name": f"the same, capacity as known live, worst: {worst['name']}"}
            found = [{**within, **_row(each, least)} for each in played]
            rows += [*found[:-1], ours, found[-1]]
            for each in rows[-len(found) - 1 :]:
                print(
                    f"{model:22} {load:6} {each['name']:68} {each['replicaHours']:7.1f} h {each['ofTheFewest']:5.2f}x "
                    f"{each['misses']:.3%}",
                    flush=True,
                )
        policy = assumptions.slo_policy(slo, largest_batch=profile.largest_safe or 64)
        stretches = [savings.Stretch(STEP, each) for each in loads["day"]]
        saved.append(savings.savings(profile.name, situation, policy, stretches, price=PRICE))
        print("\n".join(["", assumptions.lines(savings.table(saved[-1])), saved[-1].note, ""]), flush=True)
    return {"days": rows, "live": live, "savings": saved}


def lived(situation: Situation, rates: Sequence[float]) -> list[tuple[str, Steps]]:
    """Play a load by Carpool's load, with the capacity as wrong as in each scenario a minute after the start."""
    ours = replica.tuned(situation, Aim())
    return [
        (name, fleet.play(OURS, ours, rates, cold_start=COLD, seed=1, known=known))
        for name, known in known_live().items()
    ]


def _row(played: tuple[str, Steps], least: float) -> dict[str, Any]:
    found = fleet.summary(*played)
    return {"ofTheFewest": found.replica_hours / least, **msgspec.to_builtins(found)}


def beyond(results: dict[str, list[Any]]) -> list[str]:
    """List what is beyond its limit, and where an HPA does better."""
    wrong = [
        f"{each['scenario']}: {each['error']:+.1%}" for each in results["capacities"] if abs(each["error"]) > WITHIN
    ]
    ours = {(row["model"], row["load"]): row for row in results["days"] if row["name"].startswith("Carpool")}
    limited = [(row, OF_THE_FEWEST) for row in ours.values()] + [(row, LIVE_OF_THE_FEWEST) for row in results["live"]]
    for row, limit in limited:
        of = f"{row['model']} {row['load']}, {row['name']}"
        if row["ofTheFewest"] > limit:
            wrong.append(f"{of}: {row['ofTheFewest']:.2f}x of the fewest replica-hours, at most {limit:.2f}x")
        if row["misses"] > MISSES:
            wrong.append(f"{of}: {row['misses']:.2%} missed, at most {MISSES:.0%}")
    for hpa in results["days"]:
        if hpa["name"].startswith("HPA"):
            mine = ours[hpa["model"], hpa["load"]]
            wrong += [f"{hpa['model']} {hpa['load']}: {why} than {hpa['name']}" for why in worse(mine, hpa)]
    return wrong


def worse(mine: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Say in what an autoscaler does worse than another, by more than chance."""
    hours, misses = mine["replicaHours"] / other["replicaHours"] - 1, mine["misses"] - other["misses"]
    found = [f"{hours:+.1%} replica-hours"] if hours > HOURS_MORE else []
    return [*found, f"{misses:+.2%} missed"] if misses > MISSES_MORE and hours > -HOURS_MORE else found


def main() -> int:
    """Measure, write, and say what is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare the kept results with the live capacities")
    if parser.parse_args().check:
        if of_other_capacities():
            print(f"{RESULTS.name} was played with other capacities than {LIVE.name} has now: make autoscaling")
            return 1
        return 0
    digest = live_digest()
    results: dict[str, Any] = {"capacities": capacities(), **days()}
    document = {
        "date": today(), "commit": commit(), "liveCapacities": digest, "coldStartSeconds": COLD, "gpuHour": PRICE.hour,
        "hoursMore": HOURS_MORE, "missesMore": MISSES_MORE, **results,
    }  # fmt: skip
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=1) + b"\n")
    wrong = beyond(results)
    print("\n".join(["beyond its limit:", *wrong] if wrong else ["all within their limits"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
