"""What autoscalers need of a day, and whether the capacity is forecast right: ``make autoscaling`` (minutes).

- *Capacity*: requests/s per replica as forecast, and as the request-level simulator carries, in every scenario of the
  proof that has one: independent or bursty arrivals of one length. Arrivals are others than those of the forecast.
- *Days*: a GPU, a CPU model and a model that gains nothing from batches, each with a day that rises and falls, and with
  the shared trace (Azure, 2023) at its own pace. HPAs by CPU percent and by requests/s on replicas with zero wait,
  Carpool's load, and the fewest replicas possible.
- *Savings* of each on that day, as ``carpool savings`` has them.

Virtual time, seeded: the same everywhere.
"""

from __future__ import annotations

import sys
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
from carpool.simulation.simulator import Device, Simulation
from carpool.tuning.candidates import known_flights, productive_sizes
from carpool.tuning.objective import Aim
from carpool_cli.planning import assumptions, autoscaling, day_plot, replica, savings
from carpool_cli.planning.autoscaling import CPU, LOAD, REQUESTS, STEP, Autoscaler
from carpool_cli.planning.money import Price
from carpool_cli.profiling import device_profile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proof.scenario import Scenario

    from carpool.forecasting.capacity import Capacity
    from carpool_cli.planning.autoscaling import Steps

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "autoscaling.json"
PICTURE = HERE.parent / "docs" / "images" / "autoscaling.png"

WITHIN = 0.05
FACTORS = (0.92, 0.96, 1.0, 1.04, 1.08)
REQUESTS_PLAYED, MOST_PLAYED = 30_000, 150_000

MODELS = {
    "bert-large-128-a100": ("a GPU", 0.05),
    "ranking-tower-cpu": ("a CPU model", 0.015),
    "magika-cpu": ("a model that gains nothing", 0.1),
}
PEAK, TRACE_MEAN = 6.0, 3.0
"""Of the load, in replicas that are full."""
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
    """Play a load by each autoscaler; by requests/s with the target that a load test of zero wait suggests."""
    zero, ours = replica.zero_wait(situation), replica.tuned(situation, Aim())
    scalers = (
        ("HPA, CPU 60 %, zero wait", zero, Autoscaler(metric=CPU, target=60, most=40)),
        ("HPA, requests/s at 60 % of a load test, zero wait", zero, _requests(zero, 0.6)),
        (f"HPA, requests/s at {FULL:.0%} of a load test, zero wait", zero, _requests(zero, FULL)),
        (f"Carpool's load at {FULL:g}", ours, Autoscaler(metric=LOAD, target=FULL, most=40)),
    )
    plays = [(name, autoscaling.play(each, table, rates, cold_start=COLD, seed=1)) for name, table, each in scalers]
    return [*plays, ("the fewest possible", autoscaling.clairvoyant(ours, rates, cold_start=COLD))]


def _requests(table: replica.Replica, share: float) -> Autoscaler:
    return Autoscaler(metric=REQUESTS, target=share * table.capacity, most=40)


def days() -> tuple[list[dict[str, Any]], list[Any]]:
    """Play each model's day and trace; and what ``carpool savings`` says of the day."""
    recorded, _ = assumptions.read_trace(Path("azure"), None)
    raw = autoscaling.binned(recorded)
    mean = sum(raw) / len(raw)
    rows, saved = [], []
    for model, (kind, slo) in MODELS.items():
        situation, profile = situation_of(model, slo)
        full = searched(situation).rate
        loads = {
            "day": autoscaling.diurnal(PEAK * full),
            "trace": [TRACE_MEAN * full / mean * each for each in raw],
        }
        for load, rates in loads.items():
            played = contenders(situation, rates)
            if (model, load) == ("bert-large-128-a100", "day"):
                drawn = [played[index] for index in (0, 1, 3, 4)]
                day_plot.draw(PICTURE, f"{profile.name}: a day, replicas start in {COLD:.0f} s", drawn)
            sums = [autoscaling.summary(*each) for each in played]
            for each in sums:
                share = each.replica_hours / sums[-1].replica_hours
                rows.append(
                    {"model": model, "kind": kind, "load": load, "ofTheFewest": share, **msgspec.to_builtins(each)}
                )
                print(f"{model:22} {load:6} {each.name:52} {each.replica_hours:7.1f} h {share:5.2f}x {each.misses:.3%}")
        policy = assumptions.slo_policy(slo, largest_batch=profile.largest_safe or 64)
        stretches = [savings.Stretch(STEP, each) for each in loads["day"]]
        saved.append(savings.savings(profile.name, situation, policy, stretches, price=PRICE))
        print("\n".join(["", assumptions.lines(savings.table(saved[-1])), saved[-1].note, ""]), flush=True)
    return rows, saved


def main() -> int:
    """Measure, write, and say what is beyond its limit."""
    found, (played, saved) = capacities(), days()
    document = {
        "date": today(), "commit": commit(), "coldStartSeconds": COLD, "gpuHour": PRICE.hour, "capacities": found,
        "days": played, "savings": saved,
    }  # fmt: skip
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=1) + b"\n")
    wrong = [f"{each['scenario']}: {each['error']:+.1%}" for each in found if abs(each["error"]) > WITHIN]
    ours = [each for each in played if each["name"].startswith("Carpool")]
    wrong += [
        f"{each['model']} {each['load']}: {each['ofTheFewest']:.2f}x" for each in ours if each["ofTheFewest"] > 1.15
    ]
    wrong += [f"{each['model']} {each['load']}: {each['misses']:.2%} missed" for each in ours if each["misses"] > 0.01]
    print("\n".join(["beyond its limit:", *wrong] if wrong else ["all within their limits"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
