"""The oracle: the best configuration, searched with known device and load: ``make oracle``.

For each scenario it searches first the capacity: the highest load with at most 1 % of misses. Then it searches the best
few points of a grid, for each load of the load ramp and each phase of the timeline. The grid is over (max_batch,
max_wait, max_in_flight) and whether requests that would be late are shed. All points get the same arrivals. The rule is
the tuner's own: at most 0.5 % of misses now and at 1.25 times the load, then the least device time. Near the capacity
no point has that much room; there the fewest misses decide.

Every point is measured over a few thousand requests, and the best of them over more. If one device serves requests of
one row, with no disturbance but noise, the batch recursion gives the simulator's results to the last digit
(tests/proof/test_oracle.py), ten times as fast. All else is played in the simulator. The points are kept, not their
results: ``Oracle`` plays them on any other arrivals.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, lru_cache
from math import ceil, inf, log
from random import Random
from time import process_time
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from evidence import Machine, commit, machine, today
from msgspec import Struct
from msgspec.structs import replace

from carpool.forecasting.forecast import Load, forecast, glance
from carpool.policy.durations import Duration, whole_microseconds
from carpool.policy.parameters import Parameters
from carpool.simulation.outcome import Setting
from carpool.simulation.simulator import Noise
from carpool.tuning.candidates import SIZES, WAITS
from proof.scenario import HERE, Scenario, Trace, load_all, own_hash, recording, suite_hash
from proof.world import Stretch, arrival_times, estimate, knowledge, play

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from carpool.batching.counters import Stats
    from carpool.learning.latency_model import ServiceTime
    from proof.world import Knowledge, Maker

RESULTS = HERE / "results" / "oracle.json"

SEED = 1905
"""Seed of the grid's arrivals, which no contender gets."""

TOLERATED = 0.01
"""Share of misses up to which the SLO is met."""

BUDGET = 0.005
"""Misses that a point may have now and ahead: the tuner's own planning budget."""

HEADROOM = 1.25

NEAR = 0.85
"""Share of the capacity from which misses alone decide."""

SHEDS = 0.75
"""Share of the capacity from which shedding is tried too."""

LOADS = (0.1, 0.2, 0.35, 0.5, 0.6, 0.8, 1.0, 2.0)
"""Shares of the capacity whose best points are kept."""

FINER = (5, 10, 20, 28, 40, 52, 56)
"""Batch sizes beyond the tuner's own, where the batch recursion makes them cheap."""

SHED_WAITS = 3
"""How many of the waits are tried with shedding, shortest first: only near the capacity, where nobody need wait."""

KEPT = 4
"""Points kept of each load."""


class Effort(NamedTuple):
    """How many requests points are measured with."""

    screened: int
    """Requests over which every point is measured."""
    survivors: int
    """How many are measured again."""
    confirmed: int
    """Requests over which those are, for the capacity."""
    assured: int
    """The same for a load's best points: over fewer, some of them meet the budget of misses by chance."""
    promises: int
    """Times the SLO that a load near the capacity is screened for, at least: a backlog that grows slowly shows late."""


FAST = Effort(screened=3000, survivors=16, confirmed=12_000, assured=120_000, promises=20)
SLOW = Effort(screened=1500, survivors=8, confirmed=5000, assured=40_000, promises=8)
"""By simulation."""

FINALISTS = 3
"""Points between which the capacity is decided."""

PLAYED = 16_000
"""Requests over which a capacity is confirmed, after as many as a sixth of these to settle."""


class Point(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A configuration, and what it came to over the grid's arrivals."""

    max_batch: int
    max_wait: float
    max_in_flight: int
    shed: bool = False
    misses: float = 0.0
    ahead: float | None = None
    """Misses at ``HEADROOM`` times the load; ``None`` where already the present ones are too many."""
    device_time: float = 0.0

    @property
    def parameters(self) -> Parameters:
        """What to configure."""
        return Parameters(max_batch=self.max_batch, max_wait=Duration(self.max_wait), max_in_flight=self.max_in_flight)


class Level(Struct, frozen=True):
    """A load, as a share of the capacity, on a device that takes ``device`` times as long; best point first."""

    load: float
    device: float
    points: tuple[Point, ...]


class Entry(Struct, frozen=True, omit_defaults=True):
    """What is known of a scenario."""

    scenario: str
    hash: str
    """Of its file and its profile's."""
    capacity: float
    """Highest load with at most 1 % of misses, requests per second over all replicas."""
    levels: tuple[Level, ...] = ()
    commit: str = ""
    """The commit that searched it, and when; empty: searched before this was recorded."""
    date: str = ""

    def level(self, rate: float, device: float = 1.0) -> Level:
        """Return the nearest load that points are known for."""
        share = rate / self.capacity
        like = min((abs(log(level.device / device)) for level in self.levels), default=0.0)
        return min(
            (level for level in self.levels if abs(log(level.device / device)) == like),
            key=lambda level: abs(log(level.load / share)),
        )


class Results(Struct, frozen=True):
    """What is kept. All but the entries is of the last run that searched something."""

    suite: str
    commit: str
    date: str
    machine: Machine
    command: str
    cpu_seconds: float
    entries: tuple[Entry, ...]


class OutdatedError(RuntimeError):
    """The oracle's file is of other scenarios than these."""


@cache
def known() -> dict[str, Entry]:
    """Return what is kept, by scenario.

    Raises ``OutdatedError`` where a scenario or its profile has changed since.
    """
    entries = {entry.scenario: entry for entry in _kept()}
    for scenario in load_all():
        entry = entries.get(scenario.name)
        if entry is None or entry.hash != own_hash(scenario):
            raise OutdatedError(
                f"{RESULTS.name} does not know {scenario.name} as it is now: make oracle SCENARIO={scenario.name}"
            )
    return entries


def _kept() -> tuple[Entry, ...]:
    return msgspec.json.decode(RESULTS.read_bytes(), type=Results).entries if RESULTS.exists() else ()


def capacity(scenario: Scenario) -> float:
    """Return the highest load (requests per second over all replicas) with at most 1 % of misses."""
    return known()[scenario.name].capacity


class Oracle:
    """The oracle: it knows every stretch of the course, and uses the ``rank``-th best point from its beginning on."""

    interval = 0.25

    def __init__(self, told: Knowledge, entry: Entry, course: Sequence[Stretch], rank: int) -> None:
        self._upcoming: list[tuple[float, Setting]] = []
        at = 0.0
        for stretch in course:
            points = entry.level(stretch.rate, stretch.device).points
            point = points[min(rank, len(points) - 1)]
            self._upcoming.append((at, Setting(point.parameters, estimate(told, stretch.device), point.shed)))
            at += stretch.seconds

    def start(self) -> Setting:
        """Begin with the first stretch's."""
        return self._upcoming.pop(0)[1]

    def observe(self, now: float, stats: list[Stats]) -> list[Setting] | None:  # noqa: ARG002 - it knows
        """Switch where a stretch begins, to the nearest interval."""
        setting = None
        while self._upcoming and self._upcoming[0][0] <= now + self.interval / 2:
            setting = self._upcoming.pop(0)[1]
        return [setting] if setting else None

    def dispatcher(self) -> None:
        """Leave the dispatching to the Batcher."""
        return


def makers(scenario: Scenario, course: Sequence[Stretch]) -> list[Maker]:
    """Return oracles for a course, one a rank: which is best on the arrivals at hand is for the caller to see."""
    entry = known()[scenario.name]
    return [_maker(entry, tuple(course), rank) for rank in range(KEPT)]


def _maker(entry: Entry, course: tuple[Stretch, ...], rank: int) -> Maker:
    return lambda told, _: Oracle(told, entry, course, rank)


# ----------------------------------------------------------------------------------------------------- measurement


class Measured(NamedTuple):
    """What a point came to."""

    misses: float
    device_time: float


class Bench:
    """Measures points of one scenario, each over the same arrivals as all others."""

    def __init__(self, scenario: Scenario, device: float = 1.0) -> None:
        # A device is cold once for each size; what is looked for is what is best from then on.
        self.scenario = replace(scenario, cold=1.0)
        self.device = device
        self.service: ServiceTime = scenario.service().scaled(device)
        self.exact = is_exact(self.scenario)

    def points(self) -> list[Point]:
        """Return the grid, coarser where a point is dear."""
        scenario, limits = self.scenario, self.scenario.limits
        sizes = sorted(
            {1, limits.max_batch, *(size for size in SIZES + FINER * self.exact if size <= limits.max_batch)}
        )
        waits = [whole_microseconds(share * limits.max_wait) for share in (WAITS if self.exact else WAITS[::2])]
        # More in flight than are computed at once only queue at the device.
        most = min(scenario.executors, limits.max_in_flight)
        flights = [number for number in (1, 2, 3, 4, 6, 8) if number < most] * self.exact + [most]
        return [
            Point(max_batch=size, max_wait=wait, max_in_flight=number)
            for number in flights
            for size in sizes
            for wait in (waits if size > 1 else waits[:1])
        ]

    def shedding(self) -> list[Point]:
        """Return the grid of those that shed."""
        waits = sorted({point.max_wait for point in self.points()})[:SHED_WAITS]
        return [replace(point, shed=True) for point in self.points() if point.max_wait in waits]

    def fair(self, requests: int, rate: float) -> int:
        """Return so many requests or more: where the load has a cycle, whole ones of it."""
        if isinstance(self.scenario.arrivals, Trace):
            return -(-requests // len(recording().times)) * len(recording().times)
        cycle = self.scenario.cycle * rate
        return round(ceil(requests / cycle) * cycle) if cycle else requests

    def measure(self, point: Point, rate: float, requests: int) -> Measured:
        """Play a constant load through a point: by the recursion where that is exact, else by ``simulate``."""
        if not self.exact:
            return self.simulate(point, rate, requests)
        seconds = requests / rate
        slo = float(self.scenario.slo)
        load = Load(_arrivals(self.scenario, seconds, rate), draws=_draws(self.scenario, 2 * requests))
        if point.shed:
            expected = forecast(load, self.service, point.parameters, slo, shed=True)
            served = 1 - expected.shed_fraction
            return Measured(expected.miss_fraction, expected.device_time if served else inf)
        seen = glance(load, self.service, point.parameters, slo)
        return Measured(seen.miss_fraction, seen.device_time)

    def simulate(self, point: Point, rate: float, requests: int, settle: float = 0.0) -> Measured:
        """Do so by the simulator; the first ``settle`` seconds don't count."""
        setting = Setting(point.parameters, estimate(knowledge(self.scenario), self.device), point.shed)
        course = (Stretch(settle + requests / rate, rate, self.device),)
        summary = play(self.scenario, lambda *_: Fixed(setting), course, SEED).outcome.summary(settle)
        return Measured(summary.miss_fraction, summary.device_time)


class Fixed:
    """One setting, whatever comes."""

    interval = 0.0

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def start(self) -> Setting:
        """Return it."""
        return self._setting

    def observe(self, now: float, stats: list[Stats]) -> None:
        """Look away."""

    def dispatcher(self) -> None:
        """Leave the dispatching to the Batcher."""
        return


def is_exact(scenario: Scenario) -> bool:
    """Whether the batch recursion gives what the simulator does."""
    return (
        scenario.replicas == 1
        and scenario.lengths is None
        and scenario.cold == 1.0
        and scenario.stalls is None
        and scenario.largest is None
    )


@lru_cache(maxsize=4)
def _arrivals(scenario: Scenario, seconds: float, rate: float) -> list[float]:
    return arrival_times(scenario, (Stretch(seconds, rate),), SEED)


@lru_cache(maxsize=4)
def _draws(scenario: Scenario, batches: int) -> tuple[float, ...]:
    """Return what the simulator multiplies the service times of its first replica's batches with, in their order."""
    cv = scenario.service().noise
    if not cv:
        return (1.0,)
    rng = Random(f"{SEED} noise 0")
    if scenario.noise is Noise.GAMMA:
        return tuple([rng.gammavariate(cv**-2, cv**2) for _ in range(batches)])
    spread = log(1 + cv**2) ** 0.5
    return tuple([rng.lognormvariate(-(spread**2) / 2, spread) for _ in range(batches)])


# ---------------------------------------------------------------------------------------------------------- search


def find_capacity(scenario: Scenario) -> float:
    """Return the highest load (requests per second) with at most 1 % of misses, to 1 %.

    Raises ``ValueError`` where not even a hundredth of what the device could do is held.
    """
    bench = Bench(scenario)
    effort = FAST if bench.exact else SLOW
    slo, limits = float(scenario.slo), scenario.limits
    executors = min(scenario.executors, limits.max_in_flight) * scenario.replicas
    times = bench.service.table(limits.max_batch)
    ideal = executors * max(size / times[size] for size in range(1, limits.max_batch + 1))

    def screened(rate: float) -> int:
        return max(effort.screened, round(effort.promises * slo * rate))

    def confirmed(rate: float) -> int:
        return bench.fair(max(effort.confirmed, round(3 * effort.promises * slo * rate)), rate)

    # 1. All points, at loads that rise by 8 %; those that miss too many are dropped.
    points = [*bench.points(), *bench.shedding()]
    held, left, rate = 0.0, points, 0.75 * ideal
    while True:
        alive = [p for p in left if bench.measure(p, rate, screened(rate)).misses <= 1.2 * TOLERATED]
        if alive:
            held, left, rate = rate, alive, 1.08 * rate
        elif held:
            break
        elif rate > 0.01 * ideal:
            rate *= 0.8
        else:
            raise ValueError(f"{scenario.name}: no load can be held")
    # 2. Those with the highest loads, over more requests.
    left.sort(key=lambda p: bench.measure(p, held, screened(held)).misses)
    finalists = left[: effort.survivors]
    if bench.exact:
        held = _edge(
            held,
            lambda rate: min(bench.measure(p, rate, confirmed(rate)).misses for p in finalists),
        )
        finalists.sort(key=lambda p: bench.measure(p, held, confirmed(held)).misses)

    # 3. The best of them, by the simulator.
    def simulated(rate: float) -> float:
        requests, settle = bench.fair(PLAYED, rate), PLAYED / 6 / rate
        return min(bench.simulate(point, rate, requests, settle).misses for point in finalists[:FINALISTS])

    return _edge(held, simulated)


def _edge(rate: float, misses: Callable[[float], float]) -> float:
    """Walk from a rate in steps of 1 % to the last at which misses are tolerable."""
    if misses(rate) <= TOLERATED:
        while misses(1.01 * rate) <= TOLERATED:
            rate *= 1.01
        return rate
    while misses(rate) > TOLERATED:
        rate /= 1.01
    return rate


def find_level(scenario: Scenario, load: float, device: float, held: float) -> Level:
    """Return the best points for a share of the capacity ``held``."""
    bench = Bench(scenario, device)
    effort = FAST if bench.exact else SLOW
    rate = load * held
    near = load * device >= NEAR
    points = [*bench.points(), *(bench.shedding() if load * device >= SHEDS else [])]

    def look(point: Point, requests: int, budget: float) -> Point:
        found = bench.measure(point, rate, requests)
        ahead = None
        if not near and found.misses <= budget:
            ahead = bench.measure(point, HEADROOM * rate, requests).misses
        return replace(point, misses=found.misses, ahead=ahead, device_time=found.device_time)

    def rank(point: Point, budget: float) -> tuple[float, ...]:
        if near:
            return 0, point.misses, point.device_time
        if point.ahead is None:
            return 2, point.misses
        return (0, point.device_time) if point.ahead <= budget else (1, point.ahead)

    # Few requests can't distinguish 0.5 % from 1 %, so points near it are measured again.
    loose = 1.6 * BUDGET
    screened = [look(point, effort.screened, loose) for point in points]
    screened.sort(key=lambda point: rank(point, loose))
    if near:
        # Points that shed miss some requests from the start; the others miss none until there is a backlog.
        half = effort.survivors // 2
        shed = [point for point in screened if point.shed]
        screened = [point for point in screened if not point.shed][:half] + shed[:half]
    requests = bench.fair(effort.assured, rate)
    assured = [look(point, requests, BUDGET) for point in screened[: effort.survivors]]
    assured.sort(key=lambda point: rank(point, BUDGET))
    # Those that did the very same, as a cap does that is never reached, are no choice.
    distinct = {(point.misses, point.ahead, point.device_time): point for point in reversed(assured)}
    best = sorted(distinct.values(), key=lambda point: rank(point, BUDGET))[:KEPT]
    return Level(load, device, tuple(_rounded(point) for point in best))


def _rounded(point: Point) -> Point:
    return replace(
        point,
        misses=round(point.misses, 5),
        ahead=None if point.ahead is None else round(point.ahead, 5),
        device_time=float(f"{point.device_time:.5g}"),
    )


def wanted(scenario: Scenario) -> list[tuple[float, float]]:
    """Return every (load, device) that points are needed for."""
    return sorted({*((load, 1.0) for load in LOADS), *((phase.load, phase.device) for phase in scenario.phases)})


def find(scenario: Scenario, entry: Entry | None, *, levels: bool) -> tuple[Entry, float]:
    """Return a scenario's entry, made further where it is unfinished, and the CPU seconds that took."""
    begun = process_time()
    if entry is None or entry.hash != own_hash(scenario):
        entry = Entry(scenario.name, own_hash(scenario), float(f"{find_capacity(scenario):.4g}"))
    if levels:
        there = {(level.load, level.device): level for level in entry.levels}
        held = entry.capacity
        found = tuple(there.get(each) or find_level(scenario, *each, held) for each in wanted(scenario))
        entry = replace(entry, levels=found)
    return entry, process_time() - begun


def main() -> None:
    """Search what is not known yet, and keep it."""
    scenarios = {scenario.name: scenario for scenario in load_all()}
    arguments = _arguments(list(scenarios))
    for name, scenario in scenarios.items():
        if (missing := scenario.missing()) is not None:
            print(f"{name}: left out: {missing}")
    measured, spent = commit(), 0.0
    entries = {entry.scenario: entry for entry in _kept() if entry.scenario in scenarios}
    names = arguments.only or list(scenarios)
    playable = [scenario for name, scenario in scenarios.items() if name in names and scenario.missing() is None]
    playable.sort(key=lambda scenario: not is_exact(scenario))  # the quick ones first
    known = {} if arguments.only or arguments.anew else dict(entries)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        futures = [pool.submit(find, each, known.get(each.name), levels=not arguments.capacities) for each in playable]
        for number, future in enumerate(as_completed(futures), 1):
            entry, seconds = future.result()
            print(f"{number}/{len(futures)} {entry.scenario}: {entry.capacity:.4g}/s, {seconds:.1f} CPU s", flush=True)
            if entry == known.get(entry.scenario):
                continue
            spent += seconds
            entries[entry.scenario] = replace(entry, commit=measured, date=today())
            _keep(entries, measured, spent)
    print(f"{len(entries)} scenarios in {RESULTS}, {spent:.0f} CPU s")


def _arguments(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help="this scenario, whether known or not"
    )
    parser.add_argument("--anew", action="store_true", help="all scenarios, whether known or not")
    parser.add_argument("--capacities", action="store_true", help="no levels yet")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    return parser.parse_args()


def _keep(entries: dict[str, Entry], measured: str, spent: float) -> None:
    command = " ".join(["python -m proof.oracle", *sys.argv[1:]])
    kept = tuple(entries[name] for name in sorted(entries))
    results = Results(suite_hash(), measured, today(), machine(), command, round(spent, 1), kept)
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


if __name__ == "__main__":
    main()
