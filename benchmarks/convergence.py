"""How close the tuner comes to the best grid point, in the simulator: ``make converge``.

The tuner starts from its own defaults, with the first calls of a sidecar, and only knows an SLO of 50 ms. For two
simulated minutes it gets Poisson arrivals on a device with batch latency 5 + 0.5 b ms and server concurrency 1, 4 or
8. Then come a load that doubles, a device that becomes half as fast, twice the load that can be served, and a device
on which batching is a loss. The grid follows the tuner's own rule (p99 now and at 1.25x the load) but knows the
device and the load. To leave a setting that was explored for the first time is no flip, as in `balanced.py`. Virtual
time, seeded: the same figures everywhere.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec
from balanced import without_explorations
from evidence import Machine, commit, machine, today
from msgspec import Struct

from carpool.forecasting.forecast import Load, forecast
from carpool.learning import arrivals
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Objective
from carpool.simulation.simulator import Device, Simulation, linear
from carpool_cli.planning.assumptions import for_p99
from carpool_cli.planning.twin import flips, tuned

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool.simulation.outcome import Outcome

SLO = 0.050
FIXED, PER_ROW = 0.005, 0.0005
SECONDS = 120.0
SETTLED = 30.0
"""Seconds at the end over which goodput and device time are compared."""

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
WAITS = (0.0, 0.001, 0.002, 0.004, 0.008, 0.012, 0.016, 0.02, 0.025)
LOADS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)
EXECUTORS = (1, 4, 8)

TOLERATED = 0.005
"""Misses a grid point may have, now and ahead: the planning budget of the tuner's own rule."""

RESULTS = Path(__file__).parent / "results" / "convergence.json"
LIMITS = {"goodput": 0.95, "saving": 0.80, "worth saving": 0.05, "extra misses": 0.01, "overload": 0.90}


class Row(Struct):
    """One scenario's figures. Shares are of the best grid point's; seconds; requests/s."""

    scenario: str
    rate: float
    best: str
    found: str
    goodput_share: float
    saving_available: float | None = None
    saving_share: float | None = None
    """``None`` where the best grid point saves less than is worth comparing."""
    misses: float = 0.0
    misses_best: float | None = None
    """``None`` where there is no best grid point to compare with."""
    flips: int = 0
    changes: int = 0
    settled_at: float = 0.0
    passed: bool = False


class Results(Struct):
    """A run, as it is kept."""

    commit: str
    date: str
    machine: Machine
    command: str
    rows: list[Row]


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
        load = Load([time / rate for time in unit])
        for number in flights(executors):
            point = Parameters(max_batch=64, max_wait=Duration(0.0), max_in_flight=number)
            if forecast(load, service, point, SLO).miss_fraction <= 0.01:
                best = rate
    return best


def oracle(executors: int, rate: float, factor: float = 1.0) -> Parameters:
    """Return the best grid point under the tuner's objective, for a steady load and the true device."""
    service = true_service(executors, factor)
    unit = arrivals.first(arrivals.Poisson(1.0), 20_000, Random(8))
    now, ahead = (Load([time / (rate * more) for time in unit]) for more in (1.0, 1.25))

    def rank(point: Parameters) -> tuple[float, ...]:
        present = forecast(now, service, point, SLO)
        if present.miss_fraction > TOLERATED:
            return 2, -forecast(now, service, point, SLO, shed=True).goodput
        if forecast(ahead, service, point, SLO).miss_fraction > TOLERATED:
            return 1, present.p99
        return 0, present.device_time

    return min(points(executors), key=rank)


def poisson(rate: float, seed: object, start: float = 0.0, stop: float = SECONDS) -> list[float]:
    """Return arrival times in [start, stop)."""
    return [
        start + time for time in arrivals.until(arrivals.Poisson(rate), stop - start, Random(f"convergence {seed}"))
    ]


def fixed(times: list[float], device: Device, point: Parameters, *, shed: bool = False, factor: float = 1.0) -> Outcome:
    """Run a load with one configuration and known batch latency, ``factor`` times the device's own if that drifts."""
    estimate = device.estimate(64)
    if factor != 1.0:
        estimate = msgspec.structs.replace(
            estimate,
            times=tuple(value * factor for value in estimate.times),
            upper=tuple(value * factor for value in estimate.upper),
        )
    return Simulation(times, device, slo=SLO, parameters=point, estimate=estimate, shed_slo=shed).run()


def compare(
    scenario: str, times: list[float], device: Device, rate: float, *, factor: float = 1.0, since: float = 0.0
) -> Row:
    """Compare the tuner with the best grid point for the load and the device as they are at the end.

    Misses count from ``since`` on.
    """
    executors = device.executors
    best = oracle(executors, rate, factor)
    outcome, decisions = tuned(times, device, for_p99(SLO, Objective.EFFICIENCY), seconds=SECONDS, as_sidecars=True)
    start = SECONDS - SETTLED
    reference = fixed(times, device, best, factor=factor)
    greedy = [Parameters(max_batch=64, max_wait=Duration(0.0), max_in_flight=number) for number in flights(executors)]
    zero = min(
        (fixed(times, device, point, factor=factor) for point in greedy),
        key=lambda result: (result.summary(start).miss_fraction > 0.01, result.summary(start).device_time),
    )
    mine, theirs, lazy = (result.summary(start) for result in (outcome, reference, zero))
    available = 1 - theirs.device_time / lazy.device_time
    worth = available >= LIMITS["worth saving"]
    changes = [decision for decision in decisions if decision.change]
    row = Row(
        scenario=scenario,
        rate=round(rate, 1),
        best=best.describe(),
        found=decisions[-1].parameters.describe(),
        goodput_share=mine.goodput / theirs.goodput,
        saving_available=available,
        saving_share=(lazy.device_time - mine.device_time) / (lazy.device_time - theirs.device_time) if worth else None,
        misses=outcome.summary(since).miss_fraction,
        misses_best=reference.summary(since).miss_fraction,
        flips=flips(without_explorations(decisions)),
        changes=len(changes),
        settled_at=changes[-1].at if changes else 0.0,
    )
    row.passed = (
        row.goodput_share >= LIMITS["goodput"]
        and (row.saving_share is None or row.saving_share >= LIMITS["saving"])
        and row.misses - reference.summary(since).miss_fraction <= LIMITS["extra misses"]
        and row.flips == 0
    )
    return row


def steady(executors: int, load: float, peak: float) -> Row:
    """Compare at a constant load, a share of the best capacity."""
    scenario = f"{executors} executor{'s' * (executors > 1)}, {load:.0%} load"
    rate = load * peak
    device = Device(times=linear(FIXED, PER_ROW), executors=executors)
    return compare(scenario, poisson(rate, scenario), device, rate)


def doubling_load(executors: int, peak: float) -> Row:
    """Compare after the load went from 35 % to 70 % at once; misses count all the way."""
    rate, half = 0.7 * peak, SECONDS / 2
    times = poisson(rate / 2, "before", 0.0, half) + poisson(rate, "after", half, SECONDS)
    scenario = f"{executors} executor{'s' * (executors > 1)}, load doubles to 70%"
    return compare(scenario, times, Device(times=linear(FIXED, PER_ROW), executors=executors), rate)


def slowing_device(executors: int, peak: float) -> Row:
    """Compare after batch latency doubled, at a load that can still be served; misses count from 10 s after that."""
    rate, half = 0.3 * peak, SECONDS / 2
    device = Device(times=linear(FIXED, PER_ROW), executors=executors, drift=((half, 2.0),))
    scenario = f"{executors} executor{'s' * (executors > 1)}, t(b) doubles"
    return compare(scenario, poisson(rate, "slowing"), device, rate, factor=2.0, since=half + 10.0)


def overload(executors: int, peak: float) -> Row:
    """Offer twice the capacity; the goodput must not fall far below the best any load gets."""
    device = Device(times=linear(FIXED, PER_ROW), executors=executors)
    times = poisson(2 * peak, "overload")
    outcome, decisions = tuned(times, device, for_p99(SLO, Objective.EFFICIENCY), seconds=SECONDS, as_sidecars=True)
    goodput = outcome.summary(SECONDS / 2, SECONDS).goodput
    return Row(
        scenario=f"{executors} executor{'s' * (executors > 1)}, twice the capacity",
        rate=2 * peak,
        best=f"{peak:.0f}/s at capacity",
        found=decisions[-1].parameters.describe(),
        goodput_share=goodput / peak,
        misses=outcome.summary().miss_fraction,
        misses_best=None,
        flips=flips(without_explorations(decisions)),
        changes=sum(decision.change for decision in decisions),
        passed=goodput / peak >= LIMITS["overload"],
    )


def superlinear(executors: int, _peak: float) -> Row:
    """Play a device on which each row costs more in larger batches: max_batch must end at 1."""
    device = Device(times=lambda rows, _: 0.0057 * rows**1.12, executors=executors)
    times = poisson(90.0 * executors, "superlinear")
    outcome, decisions = tuned(times, device, for_p99(SLO, Objective.EFFICIENCY), seconds=SECONDS, as_sidecars=True)
    end, misses = decisions[-1].parameters, outcome.summary().miss_fraction
    return Row(
        scenario=f"{executors} executor{'s' * (executors > 1)}, superlinear t(b)",
        rate=90.0 * executors,
        best="batch 1",
        found=end.describe(),
        goodput_share=outcome.summary(SECONDS - SETTLED).goodput / (90.0 * executors),
        misses=misses,
        flips=flips(without_explorations(decisions)),
        changes=sum(decision.change for decision in decisions),
        passed=end.max_batch == 1 and flips(without_explorations(decisions)) == 0 and misses <= LIMITS["extra misses"],
    )


def show(row: Row) -> str:
    """Return one line of the table."""
    saving = "saving      -          "
    if row.saving_available is not None and row.saving_share is not None:
        saving = f"saving {row.saving_share:6.0%} of {row.saving_available:5.1%}"
    best = f"{row.misses_best:6.2%}" if row.misses_best is not None else "-"
    verdict = "ok  " if row.passed else "MISS"
    return (
        f"{verdict} {row.scenario:36} {row.rate:7.0f}/s  goodput {row.goodput_share:6.1%}  {saving}"
        f"  misses {row.misses:6.2%} (best {best})  {row.flips} flips, {row.changes:2} changes,"
        f" last at {row.settled_at:5.1f} s | {row.found} (best: {row.best})"
    )


def main() -> None:
    """Run the scenarios and print the verdict; exit 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--executors", type=int, action="append", choices=EXECUTORS, help="only these (default: all)")
    parser.add_argument("--load", type=float, action="append", help="only these shares of the capacity, e.g. 0.5")
    parser.add_argument("--no-dynamic", action="store_true", help="constant loads only")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} for the record")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    arguments = parser.parse_args()
    if arguments.write and (arguments.executors or arguments.load or arguments.no_dynamic):
        parser.error("--write is for the record: leave --executors, --load and --no-dynamic out")
    measured = commit()
    rows: list[Row] = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = []
        for executors in arguments.executors or EXECUTORS:
            peak = capacity(executors)
            print(f"best capacity with {executors} executors: {peak:.0f}/s", flush=True)
            futures += [pool.submit(steady, executors, load, peak) for load in arguments.load or LOADS]
            if not arguments.no_dynamic:
                dynamic: tuple[Callable[[int, float], Row], ...] = (
                    doubling_load,
                    slowing_device,
                    overload,
                    superlinear,
                )
                futures += [pool.submit(scenario, executors, peak) for scenario in dynamic]
        for future in as_completed(futures):
            rows.append(future.result())
            print(show(rows[-1]), flush=True)
    print(f"\n{sum(row.passed for row in rows)} of {len(rows)} scenarios within the limits {LIMITS}")
    if arguments.write:
        command = "python benchmarks/convergence.py --write"
        results = Results(measured, today(), machine(), command, sorted(rows, key=lambda row: row.scenario))
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
        print(f"written to {RESULTS}")
    sys.exit(not all(row.passed for row in rows))


if __name__ == "__main__":
    main()
