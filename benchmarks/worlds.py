"""Scenarios beyond the proof: irregular bursts, heavy-tailed rows, ramps, cliffs: ``make worlds``.

In each world, Carpool and the rules of the proof serve the same requests at rising loads. Carpool only knows a p99; the
rules know the true batch latency. Two figures are compared: the highest load at which at most 1 % of the requests miss
the SLO, and the device time per request at half of the capacity, over several seeds: where latency varies, one burst of
misses decides a single one. Virtual time, seeded: the same on every machine.

Exit codes: 0, in every world Carpool's highest load is at least ``LIMIT`` of the best rule's; 1, in one it is not;
2, there is no rule to compare it with.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from math import exp
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import compiled
import msgspec
from evidence import Machine, commit, machine, today
from msgspec import Struct
from proof.experiments import CONTENDERS
from proof.measures import TOLERATED, Tally, add, highest, tally
from proof.rows import CARPOOL
from proof.world import Knowledge

from carpool.learning.latency_model import ServiceTime
from carpool.policy.spec import Admission
from carpool.simulation.simulator import Device, Simulation, table
from carpool_cli.planning.assumptions import for_p99

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RESULTS = Path(__file__).parent / "results" / "worlds.json"

LOADS = (0.1, 0.2, 0.35, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
"""Shares of the rows that the device serves per second at its most productive size."""

SECONDS = 30.0
"""For which each load lasts; the first ``SETTLING`` of it count for nobody."""

SETTLING = 8.0

SEEDS = (1, 3, 7)
"""Those of the proof."""

MOST = 64
"""Rows of a batch at most, as by default."""

GOAL, LIMIT = 0.97, 0.95
"""Of what the best rule holds: what is wanted, and what may not get worse. docs/benchmarks.md has what misses them."""


class World(NamedTuple):
    """A device, an SLO, and how requests come."""

    why: str
    times: Callable[[int], float]
    """Seconds of a batch by its rows."""
    slo: float
    concurrency: int = 1
    noise: float = 0.0
    rows: float = 0.0
    """Spread of the logarithm of a request's rows around 2, at most 32; 0: all requests have one row."""
    bursts: float = 0.0
    """Spread of the logarithm of the rate, which changes every 0.3 s on average."""
    wave: float = 0.0
    """Seconds for which the rate is 20 % above its mean, then 20 % below."""
    ramp: bool = False
    """Whether the rate rises from 0.8 to 1.2 times its mean within each load."""

    @property
    def capacity(self) -> float:
        """Rows per second, in batches that are answered within the SLO."""
        sizes = [rows for rows in range(1, MOST + 1) if self.times(rows) <= self.slo]
        return self.concurrency * max(rows / self.times(rows) for rows in sizes)


def _line(fixed: float, per_row: float) -> Callable[[int], float]:
    return lambda rows: fixed + per_row * rows


WORLDS = {
    "line": World("fixed cost and cost per row", _line(0.0036, 0.0012), 0.15),
    "heavy rows": World("heavy-tailed rows per request", _line(0.0036, 0.0012), 0.24, rows=1.0),
    "irregular": World("the rate changes by a half every 0.3 s", _line(0.0036, 0.0012), 0.15, bursts=0.35),
    "irregular heavy rows": World("both", _line(0.0036, 0.0012), 0.3, rows=1.0, bursts=0.25),
    "roofline": World("12 rows cost as much as one", lambda rows: max(0.018, 0.0015 * rows), 0.18),
    "cliff": World("25 rows cost 60 ms more than 24", lambda rows: 0.012 + 0.0009 * rows + 0.06 * (rows > 24), 0.3),
    "early cliff": World(
        "5 rows take twice as long as 4", lambda rows: (0.024 + 0.0016 * rows) * (2 if rows > 4 else 1), 0.32, noise=0.1
    ),
    "80 ms fixed": World("nearly all of the cost is fixed", _line(0.08, 0.0008), 0.4),
    "tight": World("four at once, an SLO of 1.3 times the latency of one row", _line(0.03, 0.003), 0.0435, 4),
    "square wave": World("20 % more for 2 s, then 20 % less", _line(0.0036, 0.0012), 0.15, wave=2.0),
    "ramp": World("the load rises all the time", _line(0.006, 0.0009), 0.15, ramp=True),
    "noisy": World("batches of one size differ by 40 %", _line(0.009, 0.0015), 0.36, noise=0.4),
    "two at once, heavy rows": World("two at once", _line(0.009, 0.0018), 0.3, 2, rows=0.8),
    "two cliffs": World("tiles of 16 rows", lambda rows: 0.009 + 0.018 * -(-rows // 16), 0.18, noise=0.1, bursts=0.2),
    "convex": World("large batches cost more per row", lambda rows: 0.006 + 0.0009 * rows**1.3, 0.24, wave=5.0),
}

UNSEEN = {
    "bursts, cliff": World(
        "9 rows cost 20 ms more than 8", lambda rows: 0.01 + 0.001 * rows + 0.02 * (rows > 8), 0.2, bursts=0.3
    ),
    "noisy roofline": World(
        "two at once, 16 rows cost as much as one", lambda rows: max(0.02, 0.0012 * rows), 0.2, 2, 0.2
    ),
    "heavy rows, cliff": World(
        "33 rows cost 30 ms more than 32", lambda rows: 0.005 + 0.001 * rows + 0.03 * (rows > 32), 0.25, rows=0.8
    ),
    "five at once, tight": World("an SLO of twice the latency of one row", _line(0.02, 0.001), 0.04, 5),
    "200 ms fixed": World("nearly all of the cost is fixed", _line(0.2, 0.004), 1.0),
    "harsh bursts": World("the rate changes by two thirds every 0.3 s", _line(0.004, 0.001), 0.2, bursts=0.5),
    "slow wave, noisy": World("20 % more for 10 s, then 20 % less", _line(0.006, 0.0008), 0.15, wave=10.0, noise=0.1),
    "ramp, heavy rows": World("the load rises all the time", _line(0.004, 0.001), 0.3, rows=1.0, ramp=True),
    "fast": World("half a millisecond, an SLO of 12 ms", _line(0.0005, 0.00008), 0.012),
    "loose": World("an SLO of 3 s", _line(0.02, 0.002), 3.0),
    "somewhat noisy": World("batches of one size differ by 25 %", _line(0.012, 0.001), 0.2, noise=0.25),
    "tiles of 8": World("each 8 rows cost 8 ms", lambda rows: 0.006 + 0.008 * -(-rows // 8), 0.15, noise=0.05),
}
"""Written down on 30 November before any was played; no rule has been chosen or changed by them."""

EVERY = WORLDS | UNSEEN


class Row(Struct, frozen=True):
    """One contender in one world."""

    world: str
    contender: str
    highest: float
    """Share of the capacity."""
    device_time: float
    """Milliseconds per request at half of the capacity; 0: the SLO was missed there."""
    by_seed: tuple[float, ...] = ()
    """The highest load with each single seed, as a share of the capacity."""


class Results(Struct, frozen=True):
    """All of it."""

    commit: str
    date: str
    machine: Machine
    rows: list[Row]


def arrivals(world: World, seed: int) -> list[tuple[float, int]]:
    """Return (seconds, rows) of every request."""
    rng = Random(f"{seed} arrivals")
    drawn = Random(f"{seed} rows")
    mean = _mean_rows(world)
    found = []
    now = 0.0
    levels = _levels(world, Random(f"{seed} levels"))
    until, level = next(levels)
    while now < SECONDS * len(LOADS):
        while now >= until:
            until, level = next(levels)
        part, within = divmod(now, SECONDS)
        factor = 0.8 + 0.4 * within / SECONDS if world.ramp else 1.0
        now += rng.expovariate(LOADS[int(part)] * factor * level * world.capacity / mean)
        found.append((now, _rows(world, drawn)))
    return found[:-1]


def _rows(world: World, rng: Random) -> int:
    return min(max(round(2 * exp(rng.gauss(0.0, world.rows))), 1), 32) if world.rows else 1


def _mean_rows(world: World) -> float:
    rng = Random("mean")
    return sum(_rows(world, rng) for _ in range(20_000)) / 20_000


def _levels(world: World, rng: Random) -> Iterator[tuple[float, float]]:
    """Walk what the rate is multiplied by, with mean 1: (until when, factor)."""
    now = 0.0
    while True:
        if world.bursts:
            now += rng.expovariate(1 / 0.3)
            yield now, exp(rng.gauss(-(world.bursts**2) / 2, world.bursts))
        elif world.wave:
            now += world.wave
            yield now, 1.2 if round(now / world.wave) % 2 else 0.8
        else:
            yield float("inf"), 1.0


def climb(task: tuple[str, str, tuple[int, ...]]) -> Row:
    """Let a contender serve a world's rising loads, once with each seed."""
    name, contender, seeds = task
    plays = [play(name, contender, seed) for seed in seeds]
    steps = list(zip(LOADS, map(add, zip(*plays, strict=True)), strict=True))
    half = steps[LOADS.index(0.5)][1]
    saved = round(1e3 * half.device_time, 4) if half.misses <= TOLERATED else 0.0
    by_seed = tuple(round(highest(list(zip(LOADS, tallies, strict=True))), 4) for tallies in plays)
    return Row(name, contender, round(highest(steps), 4), saved, by_seed)


def play(name: str, contender_name: str, seed: int) -> list[Tally]:
    """Let a contender serve a world's rising loads; return one tally per load."""
    world = EVERY[name]
    times = [world.times(max(rows, 1)) for rows in range(MOST + 1)]
    curve = ServiceTime.measured(dict(enumerate(times[1:], 1)), noise=world.noise, executors=world.concurrency)
    admission = Admission(max_queued_rows=100_000)
    knowledge = Knowledge(
        slo=world.slo, limits=for_p99(world.slo).limits(), service=curve, executors=world.concurrency, replicas=1,
        admission=admission,
    )  # fmt: skip
    contender = CONTENDERS[contender_name].maker(knowledge, Random(f"{name} {seed} contender"))
    start = contender.start()
    own = contender.dispatcher()
    simulation = Simulation(
        arrivals(world, seed),
        Device(table(times), executors=world.concurrency, cv=world.noise),
        slo=world.slo,
        parameters=start.parameters,
        estimate=start.estimate,
        shed_slo=start.shed_slo,
        dispatcher=(lambda: own) if own is not None else None,
        admission=admission,
        seconds=SECONDS * len(LOADS),
        seed=seed,
    )
    if contender.interval:
        simulation.every(contender.interval, contender.observe)
    outcome = simulation.run()
    return [tally(outcome.summary(SECONDS * part + SETTLING, SECONDS * (part + 1))) for part in range(len(LOADS))]


def show(rows: Sequence[Row]) -> tuple[list[str], float | None]:
    """Return a table as Markdown, and the least share of the best rule's highest load; ``None``: no rule has one."""
    lines = [
        "| world | highest load: Carpool | best rule | zero wait | device time at half load: Carpool | best rule |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    shares = []
    for name, world in EVERY.items():
        here = {row.contender: row for row in rows if row.world == name}
        if CARPOOL not in here or len(here) < 2:
            continue
        mine = here.pop(CARPOOL)
        best = max(here.values(), key=lambda row: row.highest)
        thrifty = min((row for row in here.values() if row.device_time), key=lambda row: row.device_time, default=None)
        if best.highest:
            shares.append(mine.highest / best.highest)
        zero = f"{here['greedy'].highest:.1%}" if "greedy" in here else "-"
        other = f"{thrifty.device_time:.3g} ms ({thrifty.contender})" if thrifty is not None else "-"
        own = f"{mine.device_time:.3g} ms" if mine.device_time else "-"
        loads = f"{mine.highest:.1%} | {best.highest:.1%} ({best.contender}) | {zero}"
        lines.append(f"| {name}: {world.why} | {loads} | {own} | {other} |")
    return lines, min(shares, default=None)


def judge(least: float | None) -> int:
    """Print what Carpool holds of the best rule's highest load; returns the exit code."""
    if least is None:
        print("\nno verdict: no rule holds any load here; name other rules with --contender", file=sys.stderr)
        return 2
    print(f"\nCarpool holds at least {least:.1%} of what the best rule holds (goal {GOAL:.0%})")
    return 0 if least >= LIMIT else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", action="append", choices=[*EVERY], help="only this one; may be given again")
    parser.add_argument("--unseen", action="store_true", help="the worlds that no rule was chosen by; nothing is kept")
    parser.add_argument("--contender", action="append", choices=[*CONTENDERS], help="only this one, beside Carpool")
    parser.add_argument("--seed", type=int, action="append", help="only this one; may be given again")
    parser.add_argument("--again", action="store_true", help="only Carpool, and what no results are kept of")
    parser.add_argument("--table", action="store_true", help="only print the table of the results kept")
    options = parser.parse_args()
    if options.again and options.seed:
        parser.error("--again: the results kept are of all seeds; leave --seed or --again out")
    return options


def main() -> int:
    """Play what was asked for."""
    options = _options()
    seeds = tuple(options.seed or SEEDS)
    if options.table:
        print(*show(msgspec.json.decode(RESULTS.read_bytes(), type=Results).rows)[0], sep="\n")
        return 0
    compiled.start_again()
    before = msgspec.json.decode(RESULTS.read_bytes(), type=Results).rows if options.again else []
    kept = {(row.world, row.contender) for row in before if row.contender != CARPOOL}
    names = dict.fromkeys([CARPOOL, *(options.contender or CONTENDERS)])
    pairs = product(options.world or (UNSEEN if options.unseen else WORLDS), names)
    tasks = [(world, name, seeds) for world, name in pairs if (world, name) not in kept]
    rows: list[Row] = []
    measured = commit()
    with get_context("spawn").Pool(2) as pool:
        for row in pool.imap_unordered(climb, tasks):
            rows.append(row)
            print(f"\r{len(rows)} of {len(tasks)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rows += [row for row in before if (row.world, row.contender) in kept]
    rows.sort(key=lambda row: ([*EVERY].index(row.world), row.contender))
    lines, least = show(rows)
    print(*lines, sep="\n")
    if not (options.world or options.unseen or options.contender or options.seed):
        results = Results(measured, today(), machine(), rows)
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    return judge(least)


if __name__ == "__main__":
    sys.exit(main())
