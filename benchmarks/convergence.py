"""How close the tuner comes to the best grid point, in the simulator: ``make converge``.

Knowing nothing but an SLO of 50 ms and starting from its own defaults, the tuner meets Poisson arrivals on a device with
t(b) = 5 + 0.5 b ms and 1, 4 or 8 executors, for two simulated minutes. The grid bears the tuner's own rule (p99 now and at
1.25x the load) but knows the device and the load. Prints one row a scenario and a verdict against the limits below.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct, to_builtins

from carpool import arrivals
from carpool.latency import ServiceTime
from carpool.outcome import Outcome, Setting
from carpool.policy import Duration, Parameters, for_p99
from carpool.queueing import Forecast, forecast
from carpool.simulation import Device, Simulation, linear
from carpool.statistics import Stats
from carpool.tuner import Decision, Observation, Tuner

SLO = 0.050
FIXED, PER_ROW = 0.005, 0.0005
SECONDS = 120.0
SETTLED = 30.0
"""Seconds at the end over which goodput and device time are compared."""

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
WAITS = (0.0, 0.001, 0.002, 0.004, 0.008, 0.012, 0.016, 0.02, 0.025)
LOADS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)
EXECUTORS = (1, 4, 8)

GOODPUT = 0.95
SAVING = 0.80
WORTH_SAVING = 0.05
EXTRA_MISSES = 0.01
OVERLOAD = 0.90


def true_service(executors: int, factor: float = 1.0) -> ServiceTime:
    """Return the device's own curve, as the oracle knows it."""
    seconds = {rows: factor * (FIXED + PER_ROW * rows) for rows in range(1, 65)}
    return ServiceTime.measured(seconds, executors=executors)


def flights(executors: int) -> tuple[int, ...]:
    """Numbers in flight on the grid."""
    return tuple(sorted({1, 2, executors // 2, executors} - {0}))


def points(executors: int) -> list[Parameters]:
    """Every grid point."""
    return [
        Parameters(max_batch=size, max_wait=Duration(wait), max_in_flight=number)
        for number in flights(executors)
        for size in SIZES
        for wait in WAITS
    ]


def capacity(executors: int) -> float:
    """Highest load (requests/s) at which some greedy grid point misses at most 1 %, scanned in steps of 2 %."""
    service = true_service(executors)
    full = executors * 64 / service.time(64)
    unit = arrivals.first(arrivals.Poisson(1.0), 20_000, Random(7))
    best = 0.0
    for step in range(25, 51):
        rate = full * step / 50
        times = [time / rate for time in unit]
        for number in flights(executors):
            point = Parameters(max_batch=64, max_wait=Duration(0.0), max_in_flight=number)
            if forecast(times, service, point, SLO).miss_fraction <= 0.01:
                best = rate
    return best


def oracle(executors: int, rate: float) -> tuple[Parameters, Forecast]:
    """Return the best grid point under the tuner's objective, for a steady load and the true device."""
    service = true_service(executors)
    unit = arrivals.first(arrivals.Poisson(1.0), 20_000, Random(8))
    now = [time / rate for time in unit]
    ahead = [time / (rate * 1.25) for time in unit]

    def rank(point: Parameters) -> tuple[float, ...]:
        present = forecast(now, service, point, SLO)
        if present.miss_fraction > 0.01:
            return 2, -forecast(now, service, point, SLO, shed=True).goodput
        if forecast(ahead, service, point, SLO).miss_fraction > 0.01:
            return 1, present.p99
        return 0, present.device_time

    best = min(points(executors), key=rank)
    return best, forecast(now, service, best, SLO)


def fixed(times: list[float], device: Device, point: Parameters, executors: int, *, shed: bool = False) -> Outcome:
    """Run a load with one configuration, with t(b) known."""
    return Simulation(
        times, device, slo=SLO, parameters=point, estimate=device.estimate(64), shed_slo=shed, seed=executors
    ).run()


def tuned(
    times: list[float], device: Device, *, seconds: float = SECONDS, interval: float = 0.5
) -> tuple[Outcome, list[Decision]]:
    """Run a load with the tuner in the loop, from its own defaults."""
    tuner = Tuner(for_p99(SLO))
    decisions: list[Decision] = []
    last = Stats(at=0.0)

    def observe(now: float, stats: list[Stats]) -> list[Setting] | None:
        nonlocal last
        delta, last = stats[0].since(last), stats[0]
        if "" not in delta.models:
            return None
        passing = tuner.parameters.pass_through
        decision = tuner.step(Observation(now=now, seconds=interval, stats=delta.models[""], passing=passing))
        decisions.append(decision)
        return [Setting(decision.parameters, decision.estimate, decision.shed_slo)]

    simulation = Simulation(times, device, slo=SLO, parameters=tuner.parameters, seconds=seconds)
    return simulation.every(interval, observe).run(), decisions


def flips(decisions: list[Decision], start: float = 0.0) -> int:
    """Count returns to a configuration that was just left: A, B, A."""
    path: list[Parameters] = []
    for decision in decisions:
        if decision.at >= start and (not path or decision.parameters != path[-1]):
            path.append(decision.parameters)
    return sum(path[i] == path[i + 2] for i in range(len(path) - 2))


class Row(Struct):
    """One scenario's figures. Shares are of the best grid point's; seconds; requests/s."""

    scenario: str
    rate: float
    best: str
    found: str
    goodput_share: float
    saving_available: float
    saving_share: float | None
    misses: float
    misses_best: float
    flips: int
    changes: int
    settled_at: float
    passed: bool = False


def steady(executors: int, load: float, peak: float) -> Row:
    """Return the figures of one constant load."""
    rate = load * peak
    times = arrivals.until(arrivals.Poisson(rate), SECONDS, Random(f"{executors} {load}"))
    device = Device(times=linear(FIXED, PER_ROW), executors=executors)
    best, _ = oracle(executors, rate)
    outcome, decisions = tuned(times, device)
    start = SECONDS - SETTLED
    reference = fixed(times, device, best, executors)
    zero = min(
        (
            fixed(times, device, Parameters(max_batch=64, max_wait=Duration(0.0), max_in_flight=number), executors)
            for number in flights(executors)
        ),
        key=lambda result: (result.summary(start).miss_fraction > 0.01, result.summary(start).device_time),
    )
    mine, theirs, lazy = (result.summary(start) for result in (outcome, reference, zero))
    available = 1 - theirs.device_time / lazy.device_time
    saving = (lazy.device_time - mine.device_time) / (lazy.device_time - theirs.device_time) if available > 0 else None
    changes = [decision for decision in decisions if decision.change]
    row = Row(
        scenario=f"{executors} executors, {load:.0%}",
        rate=round(rate, 1),
        best=best.describe(),
        found=decisions[-1].parameters.describe(),
        goodput_share=mine.goodput / theirs.goodput,
        saving_available=available,
        saving_share=saving if available >= WORTH_SAVING else None,
        misses=outcome.summary().miss_fraction,
        misses_best=reference.summary().miss_fraction,
        flips=flips(decisions),
        changes=len(changes),
        settled_at=changes[-1].at if changes else 0.0,
    )
    row.passed = (
        row.goodput_share >= GOODPUT
        and (row.saving_share is None or row.saving_share >= SAVING)
        and row.misses - row.misses_best <= EXTRA_MISSES
        and row.flips == 0
    )
    return row


def show(row: Row) -> str:
    """Return one line of the table."""
    saving = f"{row.saving_share:6.0%}" if row.saving_share is not None else "     -"
    return (
        f"{'ok  ' if row.passed else 'MISS'} {row.scenario:22} {row.rate:8.0f}/s goodput {row.goodput_share:6.1%}"
        f" saving {saving} of {row.saving_available:5.1%}  misses {row.misses:6.2%} (best {row.misses_best:6.2%})"
        f" flips {row.flips} changes {row.changes:2} last at {row.settled_at:5.1f}s | {row.found} (best: {row.best})"
    )


def main() -> None:
    """Run the scenarios and print the verdict; exit 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, help="executors")
    parser.add_argument("--load", type=float)
    arguments = parser.parse_args()
    rows = []
    for executors in EXECUTORS:
        if arguments.only not in (None, executors):
            continue
        peak = capacity(executors)
        print(f"{executors} executors: best capacity {peak:.0f}/s", flush=True)
        for load in LOADS:
            if arguments.load not in (None, load):
                continue
            row = steady(executors, load, peak)
            rows.append(row)
            print(show(row), flush=True)
    sys.exit(not all(row.passed for row in rows))


if __name__ == "__main__":
    main()
