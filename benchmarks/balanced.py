"""What Balanced costs and keeps, against zero wait and against the best grid point: ``make balanced``.

Every scenario of the proof whose load stays as it is, and worlds beside them (roofline, cliff, a large fixed cost,
several rows a request, a ramp, a square wave), each at four loads from 5 to 80 % of what the oracle can hold. Carpool
knows nothing but the SLO. Beside it, over the very same requests:

- *zero wait*: the largest batch, nothing held; and *pass-through*, where the device keeps up with single requests.
- *the oracle*: of a grid over (max_batch, max_wait) by one who knows device and load, the point with the lowest mean
  latency among those with at most 0.5 % of misses now and at 1.25 times the load that keep the target; the grid is
  searched by simulation over the first requests, and refined around the best over all of them.

Figures are of the second half of each run. Virtual time, seeded: the same everywhere.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import groupby, islice
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import compiled
import msgspec
from evidence import Machine, commit, machine, today
from msgspec import Struct
from msgspec.structs import replace
from proof import oracle
from proof.scenario import Diurnal, Trace, load_all
from proof.world import Stretch, devices, estimate, knowledge, requests

from carpool.exchange.decision import State
from carpool.learning.arrivals import Poisson, until
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import TARGET_UTILIZATION, BatchingPolicy, Objective
from carpool.simulation.simulator import Arrival, Device, Simulation, linear
from carpool.tuning.objective import PASSING_IN_FLIGHT
from carpool.tuning.tuner import INTERVAL
from carpool_cli.planning import assumptions
from carpool_cli.planning.twin import Sidecars, flips

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proof.scenario import Scenario

    from carpool.batching.requests import Estimate
    from carpool.exchange.decision import Decision
    from carpool.simulation.outcome import Outcome
    from carpool.simulation.simulator import Dispatcher

TARGET = TARGET_UTILIZATION / 100
LOADS = (0.05, 0.25, 0.5, 0.8)
SIZES = (1, 2, 4, 8, 16, 32, 64)
WAITS = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Shares of the longest wait."""
BUDGET = 0.005
"""Misses that a grid point may have, now and at 1.25 times the load."""
SCREENED = 3000
"""Requests over which every grid point is measured."""
REFINED = 3
"""Best points whose neighbours are measured too."""
REQUESTS = 40_000
"""Requests of a run from which it need not last two minutes, one is enough."""
PLAYED = 6
"""Points that are played over the whole course, at most: the best that keeps everything there is the oracle's."""
SAME_LOAD = 0.1
"""Relative difference of two loads that is none: who goes back to a setting at another load follows it."""
CLOSE = 0.005
"""Utilization beyond the target that chance may add."""
RESULTS = Path(__file__).parent / "results" / "balanced.json"
QUICK = ("bert-large-a100-loose", "resnet50-t4-one-in-flight", "ocr-1-core", "cliff", "square wave")

LIMITS = {
    "like zero wait": 1.05,
    "over target": 0.03,
    "mean, median": 1.15,
    "mean, worst": 1.5,
    "misses": 0.01,
    "flips": 0,
}


class World(NamedTuple):
    """A device and who comes to it."""

    name: str
    capacity: float
    """Requests per second."""
    policy: BatchingPolicy
    device: Sequence[Device]
    arrivals: Callable[[float, float], Sequence[float | tuple[float, ...]]]
    """Of a rate and a length in seconds."""
    estimate: Estimate
    """True batch latency, for fixed settings."""
    bucket: Callable[[int], int] = int
    changing: bool = False
    """Whether the load changes: no one grid point is right for it."""
    drifting: bool = False
    """Whether it changes in part, as recorded: to follow it is no flip."""


class Cell(Struct, frozen=True):
    """One load in one world. Seconds; ratios; utilization 0 to 1."""

    world: str
    load: float
    setting: str
    utilization: float
    mean: float
    p50: float
    p99: float
    misses: float
    flips: int
    zero_wait_utilization: float
    zero_wait_p50: float
    zero_wait_p99: float
    pass_through_p50: float = 0.0
    pass_through_p99: float = 0.0
    """0 where zero wait does not keep the target."""
    oracle: str = ""
    """Its setting; ``""``: no grid point meets SLO and target."""
    oracle_mean: float = 0.0
    zero_wait_misses: float = 0.0

    @property
    def like_zero_wait(self) -> float:
        """How far p50 or p99 exceeds zero wait's and pass-through's, where zero wait keeps the target; else 0."""
        if self.zero_wait_utilization > TARGET:
            return 0.0
        p50, p99 = max(self.zero_wait_p50, self.pass_through_p50), max(self.zero_wait_p99, self.pass_through_p99)
        return max(self.p50 / p50, self.p99 / p99)

    @property
    def over_target(self) -> float:
        """Utilization beyond the target, where the oracle keeps it."""
        return self.utilization - TARGET if self.oracle else 0.0

    @property
    def mean_ratio(self) -> float:
        """Mean latency over the oracle's; 0 where that does not keep the target."""
        return self.mean / self.oracle_mean if self.oracle else 0.0

    @property
    def more_misses(self) -> float:
        """Misses beyond zero wait's: latencies are of answers, so they do not show them."""
        return self.misses - self.zero_wait_misses


class Results(Struct, frozen=True):
    """A run, as it is kept."""

    commit: str
    date: str
    machine: Machine
    command: str
    cells: tuple[Cell, ...]


class Served(NamedTuple):
    """How a setting served a load."""

    mean: float
    p50: float
    p99: float
    misses: float
    utilization: float


def served(outcome: Outcome, start: float, stop: float, executors: int) -> Served:
    """Sum up the requests of [start, stop); ``executors``: server concurrency of all replicas."""
    summary = outcome.summary(start, stop)
    low = next((index for index, time in enumerate(outcome.times) if time >= start), 0)
    answered = [seconds for seconds in outcome.latencies[low:] if seconds < inf]
    mean = sum(answered) / len(answered) if answered else inf
    busy = summary.executor_busy / (stop - start) / executors
    return Served(mean, summary.p50, summary.p99, summary.miss_fraction, busy)


def of_scenario(scenario: Scenario) -> World:
    """Make a world of one of the proof's scenarios, without what happens in it besides: drift, cold starts."""
    still = replace(scenario, cold=1.0)
    policy = replace(scenario.policy, objective=Objective.BALANCED)

    def arrivals(rate: float, seconds: float) -> Sequence[float | tuple[float, ...]]:
        return requests(still, (Stretch(seconds, rate),), 5)

    lengths = scenario.lengths
    return World(
        scenario.name,
        oracle.capacity(scenario),
        policy,
        devices(still, (Stretch(3600.0, 1.0),)),
        arrivals,
        estimate(knowledge(still)),
        int if lengths is None else lengths.bucket,
        changing=isinstance(scenario.arrivals, Diurnal),
        drifting=isinstance(scenario.arrivals, Trace),
    )


def others() -> list[World]:
    """Return the worlds beside the proof's."""

    def poisson(rate: float, seconds: float) -> list[float]:
        return list(until(Poisson(rate), seconds, Random(11)))

    def square(rate: float, seconds: float) -> list[float]:
        rng, found, at = Random(12), list[float](), 0.0
        while at < seconds:
            part = rate * (1.6 if round(at / 15) % 2 else 0.4)
            found += [at + time for time in until(Poisson(part), 15.0, rng)]
            at += 15.0
        return found

    def ramp(rate: float, seconds: float) -> list[float]:
        return [seconds * (time / seconds) ** 0.5 for time in until(Poisson(rate), seconds, Random(13))]

    def several(rate: float, seconds: float) -> list[tuple[float, ...]]:
        rng = Random(14)
        return [Arrival(time, rows=rng.choice((1, 1, 2, 4))) for time in until(Poisson(rate), seconds, Random(15))]

    def world(name: str, capacity: float, times: Callable[[int, int], float], slo: float, **more: object) -> World:
        device = Device(times)
        known = {"arrivals": poisson, "estimate": device.estimate()}
        return World(name, capacity, assumptions.slo_policy(slo), [device], **(known | more))  # type: ignore[arg-type]

    return [
        world("roofline", 2000.0, lambda rows, _: max(0.008, 0.0005 * rows), 0.1),
        world("cliff", 900.0, lambda rows, _: 0.004 + 0.0008 * rows + (0.03 if rows > 16 else 0), 0.1),
        world("80 ms fixed", 300.0, linear(0.08, 0.001), 0.5),
        world("several rows", 500.0, linear(0.002, 0.0008), 0.05, arrivals=several),
        world("ramp", 900.0, linear(0.002, 0.0008), 0.05, arrivals=ramp, changing=True),
        world("square wave", 600.0, linear(0.002, 0.0008), 0.05, arrivals=square, changing=True),
    ]


def worlds() -> dict[str, World]:
    """Return all worlds by name."""
    found = [of_scenario(scenario) for scenario in load_all()] + others()
    return {world.name: world for world in found}


class Course:
    """One load in one world, to be served by whatever setting."""

    def __init__(self, world: World, load: float) -> None:
        self.world = world
        self.rate = load * world.capacity
        self.seconds = max(60.0, min(120.0, REQUESTS / self.rate), 200 * world.policy.slo.due)
        self.start = self.seconds / 2
        # Of what the policy lets a setting use.
        most = world.policy.limits().max_in_flight
        self.executors = sum(min(device.executors, most) for device in world.device)
        self.arrivals = world.arrivals(self.rate, self.seconds)

    def simulation(
        self,
        parameters: Parameters,
        known: Estimate | None = None,
        arrivals: Sequence[float | tuple[float, ...]] | None = None,
        *,
        dispatcher: Callable[[], Dispatcher] | None = None,
    ) -> Simulation:
        """Make a simulation of the whole course, or of other arrivals.

        ``known``: the batch latencies that the Batcher expects. ``dispatcher``: as the Simulation's.
        """
        world = self.world
        return Simulation(
            self.arrivals if arrivals is None else arrivals,
            list(world.device),
            slo=world.policy.slo.due,
            parameters=parameters,
            estimate=known,
            admission=world.policy.admission,
            bucket=world.bucket,
            replicas=len(world.device),
            seed=3,
            seconds=self.seconds if arrivals is None else 0.0,
            dispatcher=dispatcher,
        )

    def tuned(self) -> tuple[Served, Sidecars]:
        """Let Carpool tune it."""
        sidecars = Sidecars(self.world.policy, replicas=len(self.world.device))
        simulation = self.simulation(sidecars.tuner.parameters, dispatcher=sidecars.dispatcher)
        return self._served(simulation.every(INTERVAL, sidecars.observe).run()), sidecars

    def fixed(self, parameters: Parameters) -> Served:
        """Serve it with a setting that stays; nobody is shed."""
        return self._served(self.simulation(parameters, self.world.estimate).run())

    def screened(self, parameters: Parameters, faster: float = 1.0) -> Served:
        """Serve its first requests, so many times as fast."""
        return self._played(parameters, [_sooner(one, faster) for one in self.arrivals[:SCREENED]])

    def has_headroom(self, parameters: Parameters) -> bool:
        """Whether it meets the SLO at 1.25 times the load; with bursts, the first requests are too few to decide."""
        if self.screened(parameters, 1.25).misses > BUDGET:
            return False
        return self._played(parameters, [_sooner(one, 1.25) for one in self.arrivals]).misses <= BUDGET

    def _played(self, parameters: Parameters, arrivals: Sequence[float | tuple[float, ...]]) -> Served:
        outcome = self.simulation(parameters, self.world.estimate, arrivals).run()
        return served(outcome, 0.0, outcome.seconds, self.executors)

    def best(self) -> tuple[Parameters, Served] | None:
        """Return the oracle's setting; ``None``: none meets SLO and target."""
        limits, executors = self.world.policy.limits(), self.world.device[0].executors
        flights = min(executors, limits.max_in_flight)

        def point(size: int, wait: float) -> Parameters:
            return limits.clamp(Parameters(size, Duration(wait), flights))

        seen: dict[Parameters, Served] = {}

        def measure(points: Sequence[Parameters]) -> list[Parameters]:
            for each in points:
                if each not in seen:
                    seen[each] = self.screened(each)
            room = [
                each for each in seen if seen[each].utilization <= TARGET + CLOSE and seen[each].misses <= 2 * BUDGET
            ]
            return sorted(room, key=lambda each: seen[each].mean)

        sizes = [size for size in SIZES if size <= limits.max_batch]
        ranked = measure([point(size, share * limits.max_wait) for size in sizes for share in WAITS])
        near = [
            point(max(round(factor * one.max_batch), 1), stretch * one.max_wait)
            for one in ranked[:REFINED]
            for factor in (0.75, 1, 1.5)
            for stretch in (0.75, 1, 1.4)
        ]
        room = (one for one in measure(near) if self.has_headroom(one))
        for one in islice(room, PLAYED):
            found = self.fixed(one)
            if found.utilization <= TARGET + CLOSE and found.misses <= BUDGET:
                return one, found
        return None

    def _served(self, outcome: Outcome) -> Served:
        return served(outcome, self.start, self.seconds, self.executors)


def _sooner(one: float | tuple[float, ...], faster: float) -> float | tuple[float, ...]:
    if isinstance(one, Arrival):
        return one._replace(time=one.time / faster)
    return (one[0] / faster, *one[1:]) if isinstance(one, tuple) else one / faster


def without_explorations(decisions: Sequence[Decision]) -> list[Decision]:
    """Leave out the first exploration of each setting.

    It is made once, for a few batches, and paid from the error budget: leaving it is no flip. If the same setting is
    explored again, that counts, and so does a setting that stays after it was explored.
    """
    found: list[Decision] = []
    explored: set[Parameters] = set()
    runs = groupby(decisions, key=lambda one: (one.state is State.EXPLORING, one.parameters))
    for (explores, parameters), run in runs:
        if not explores or parameters in explored:
            found.extend(run)
        else:
            explored.add(parameters)
    return found


def flips_at_one_load(decisions: Sequence[Decision], start: float) -> int:
    """Count the settings that were left for another, and put in force again at the load at which they were left."""
    path: list[tuple[Parameters, float]] = []
    for one in decisions:
        if one.at >= start and (not path or one.parameters != path[-1][0]):
            path.append((one.parameters, one.rate))
    triples = zip(path, path[1:], path[2:], strict=False)
    return sum(
        before == after and abs(again - left) <= SAME_LOAD * left for (before, _), (_, left), (after, again) in triples
    )


def cell(name: str, load: float) -> Cell:
    """Measure one load in one world."""
    world = worlds()[name]
    course = Course(world, load)
    limits, executors = world.policy.limits(), world.device[0].executors
    ours, sidecars = course.tuned()
    zero = course.fixed(limits.clamp(Parameters(limits.max_batch, Duration(0.0), executors)))
    through = Parameters(limits.max_batch, Duration(0.0), max(executors, PASSING_IN_FLIGHT), pass_through=True)
    single = course.fixed(through) if zero.utilization <= TARGET else None
    found = None if world.changing else course.best()
    counted = flips_at_one_load if world.changing or world.drifting else flips
    return Cell(
        name,
        load,
        sidecars.tuner.parameters.describe(),
        *ours[4:],
        ours.mean,
        ours.p50,
        ours.p99,
        ours.misses,
        counted(without_explorations(sidecars.decisions), course.start),
        zero.utilization,
        zero.p50,
        zero.p99,
        *((0.0, 0.0) if single is None else (single.p50, single.p99)),
        *(("", 0.0) if found is None else (found[0].describe(), found[1].mean)),
        zero.misses,
    )


def table(cells: Sequence[Cell]) -> list[str]:
    """Return the figures as lines."""
    heads = ("busy", "mean", "of oracle", "zero wait busy", "p50, p99 of it")
    lines = ["{:34} {:>4}  {:>5} {:>8} {:>9} {:>14} {:>14}  setting".format("world", "load", *heads)]
    for one in cells:
        like = f"{one.p50 / one.zero_wait_p50:6.2f} {one.p99 / one.zero_wait_p99:6.2f}"
        ratio = f"{one.mean_ratio:.2f}" if one.oracle else "-"
        lines.append(
            f"{one.world:34} {one.load:4.0%}  {one.utilization:5.0%} {one.mean * 1e3:6.1f}ms {ratio:>9} "
            f"{one.zero_wait_utilization:14.0%} {like:>14}  {one.setting}"
            + (f"; {one.flips} flips" if one.flips else "")
        )
    return lines


def verdict(cells: Sequence[Cell]) -> dict[str, tuple[float, str]]:
    """Return the figures that have limits, each with the cell that is worst."""

    def worst(of: Callable[[Cell], float]) -> tuple[float, str]:
        one = max(cells, key=of)
        return of(one), f"{one.world} at {one.load:.0%}"

    ratios = [one.mean_ratio for one in cells if one.oracle]
    return {
        "like zero wait": worst(lambda one: one.like_zero_wait),
        "over target": worst(lambda one: one.over_target),
        "mean, median": (median(ratios), f"{len(ratios)} cells"),
        "mean, worst": worst(lambda one: one.mean_ratio),
        "misses": worst(lambda one: one.more_misses),
        "flips": worst(lambda one: one.flips),
    }


def main() -> int:
    """Measure, print, keep; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="five worlds; nothing is written")
    parser.add_argument("--only", help="one world; nothing is written")
    arguments = parser.parse_args()
    if arguments.only and arguments.only not in worlds():
        parser.error(f"no world {arguments.only}; there are: {'; '.join(worlds())}")
    names = [arguments.only] if arguments.only else list(QUICK) if arguments.quick else list(worlds())
    cells = []
    compiled.start_again()
    with ProcessPoolExecutor(2) as pool:
        pending = [pool.submit(cell, name, load) for name in names for load in LOADS]
        for done, each in enumerate(as_completed(pending), 1):
            cells.append(each.result())
            print(f"\r{done} of {len(pending)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    cells.sort(key=lambda one: (names.index(one.world), one.load))
    print(*table(cells), sep="\n")
    broken = 0
    for name, (value, where) in verdict(cells).items():
        holds = value <= LIMITS[name] + 1e-9
        broken += not holds
        print(f"{name:16} {value:.3f} (at most {LIMITS[name]}; {where}){'' if holds else '  BROKEN'}")
    if not (arguments.quick or arguments.only):
        results = Results(commit(), today(), machine(), "python benchmarks/balanced.py", tuple(cells))
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
