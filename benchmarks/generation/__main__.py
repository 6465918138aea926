"""`make generation`: what the gate for token streams makes of an engine, against other rules, in virtual time.

Every scenario of `scenarios.json` is played with two seeds. The second seed was never used to tune anything. Equal
seeds give equal figures on every machine. Figures, limits and the picture: `docs/generation-figures.md`.

Rows are stored in `~/.cache/carpool` under a digest of code and data, so an interrupted run goes on where it was.

Nineteen in twenty plays are of other rules than the gate. If only the gate changed, `--gate` keeps their results. It
plays the best cap of each row again, and fails if that result is different now. Every rule plays new scenarios.

Exit codes: 0, every figure is within its limit (`limits.json`); 1, one is not.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python benchmarks/generation` has only this folder there

import click
import msgspec
from evidence import CACHE, Figure, Machine, commit, limits, machine, today
from msgspec import Struct
from msgspec.structs import replace
from proof import kept

from generation import report
from generation.figures import Row, again, row
from generation.world import OWN, PROFILES, build, recording, scenarios

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Executor

    from generation.world import Scenario, World

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "generation.json"
FOLDER = CACHE / "generation"

SEEDS = (1, 11)
"""The first was used while the gate was written, the second only here."""

QUICK = ("8b-a100-1.3", "8b-a100-kv-tight")


class Record(Struct, frozen=True):
    """A run, as it is kept."""

    commit: str
    date: str
    machine: Machine
    command: str
    figures: list[Figure]
    rows: list[Row]
    others: str = ""
    """The commit at which the other rules were played, where that is another."""


def main() -> int:
    """Play what was asked for; returns the exit code."""
    options = _options()
    if options.report or options.check_report:
        record = msgspec.json.decode(RESULTS.read_bytes(), type=Record)
        record = replace(record, figures=summary(scenarios(), record.rows))
        if not options.check_report:
            _keep(record)
        return report.main(record, check=options.check_report)
    try:
        record = _gate_again() if options.gate else _played(options)
    except click.ClickException as error:
        print(error.message)
        return 1
    known = limits(HERE / "limits.json")
    for figure in record.figures:
        bound = known[figure.name]
        verdict = "ok" if bound.holds(figure.value) else "BEYOND ITS LIMIT"
        print(f"{figure.name}: {figure.value:.4g} {bound.unit} ({bound.direction} {bound.value:g}: {verdict})")
    if options.write or options.gate:
        _keep(record)
        report.main(record, check=False)
        print(f"written to {RESULTS}")
    return int(not all(known[figure.name].holds(figure.value) for figure in record.figures))


def _played(options: argparse.Namespace) -> Record:
    """Play every rule."""
    names = QUICK if options.quick else options.scenario
    wanted = [each for each in scenarios() if not names or each.name in names]
    measured = commit()
    worlds = [build(scenario, seed) for scenario in wanted for seed in options.seed or SEEDS]
    # The shortest first, so that an interrupted run has many.
    worlds.sort(key=lambda world: world.capacity.rate * world.scenario.seconds)
    kept.forget(folder=FOLDER)
    if options.anew:
        for world in worlds:
            _path(world).unlink(missing_ok=True)
    with ProcessPoolExecutor() as pool:
        return _record(measured, list(_printed(_rows(pool, worlds))))


def _gate_again() -> Record:
    """Play the gate alone in every row that is kept, and every rule in those that are missing."""
    measured, before = commit(), msgspec.json.decode(RESULTS.read_bytes(), type=Record)
    by_name = {scenario.name: scenario for scenario in scenarios()}
    worlds = [build(by_name[each.scenario], each.seed) for each in before.rows]
    there = {(each.scenario, each.seed) for each in before.rows}
    missing = [build(each, seed) for each in by_name.values() for seed in SEEDS if (each.name, seed) not in there]
    with ProcessPoolExecutor() as pool:
        rows = list(_printed(chain(pool.map(again, worlds, before.rows), _rows(pool, missing))))
    return _record(measured, rows, others=before.others or before.commit)


def _rows(pool: Executor, worlds: Sequence[World]) -> Iterator[Row]:
    """Return the row of each world, as it is stored, or played by every rule."""
    return pool.map(_row, worlds, map(_path, worlds))


def _row(world: World, path: Path) -> Row:
    return kept.stored(path, Row, partial(row, world))


def _path(world: World) -> Path:
    """Return where a row is stored: under a digest of all that it follows from."""
    profile = (PROFILES / f"{world.scenario.profile}.json").read_bytes()
    scenario = repr(replace(world.scenario, why="")).encode()
    return FOLDER / kept.file_name(str(world.seed).encode(), scenario, profile, _everywhere())


@lru_cache(maxsize=1)
def _everywhere() -> bytes:
    """Return what affects every row: code, and the recorded requests."""
    return kept.sources("generation.figures", "generation.world") + repr(recording()).encode()


def _record(measured: str, rows: list[Row], *, others: str = "") -> Record:
    command = shlex.join(["python", *sys.argv])
    return Record(measured, today(), machine(), command, summary(scenarios(), rows), rows, others)


def _keep(record: Record) -> None:
    """Write a whole run."""
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def summary(wanted: Sequence[Scenario], rows: Sequence[Row]) -> list[Figure]:
    """Sum up rows: what `limits.json` bounds, as far as these scenarios show it."""
    by_name = {scenario.name: scenario for scenario in wanted}
    shares = [each.share for each in rows]
    tables = [each.share for each in rows if "table" in by_name[each.scenario].profile]
    found = [
        _figure("goodput, median", [median(shares)] if shares else [], len(rows)),
        _figure("goodput, worst", shares, len(rows)),
        _figure("goodput on measured tables, worst", tables, len(tables)),
    ]
    for load in (1.3, 2.0):
        kept = [_overload(each, rows, by_name) for each in rows if _overloaded(by_name[each.scenario], load)]
        found.append(_figure(f"overload {load:g}x, worst", [ours for ours, _ in kept], len(kept)))
        without = [none for _, none in kept]
        found.append(_figure(f"overload {load:g}x without a gate, most", without, len(kept), most=True))
    changes = [
        after / reference
        for each in rows
        if (after := each.rules["carpool"].after_change) is not None
        and (reference := each.rules["best cap"].after_change)
    ]
    found.append(_figure("30 s after a change, worst", changes, len(changes)))
    bounded = [(each, each.bound) for each in rows if each.bound is not None]
    ours = [each.rules["carpool"].goodput / bound for each, bound in bounded]
    found.append(_figure("of the clairvoyant bound, median", [median(ours)] if ours else [], len(ours)))
    highest = [max(rule.goodput for rule in each.rules.values()) / bound for each, bound in bounded]
    found.append(_figure("any rule over the clairvoyant bound, most", highest, len(ours), most=True))
    preempted = [float(each.rules["carpool"].preemptions) for each in rows]
    found.append(_figure("preemptions, most", preempted, len(rows), most=True))
    gaps = [each.service_gap for each in rows if each.service_gap is not None]
    found.append(_figure("service gap, most", gaps, len(gaps), most=True))
    for name, batch in (("cost of a flooding tenant, most", False), ("cost of batch traffic, most", True)):
        costs = [each.flood_cost for each in rows if _beside(by_name[each.scenario], batch=batch)]
        found.append(_figure(name, [cost for cost in costs if cost is not None], len(costs), most=True))
    costs = [each.flood_cost for each in rows if _long_prompts_beside(by_name[each.scenario])]
    found.append(
        _figure("cost of others' long prompts, most", [c for c in costs if c is not None], len(costs), most=True)
    )
    answered = [each.long_prompts for each in rows if each.long_prompts is not None]
    found.append(_figure("long prompts, worst", answered, len(answered)))
    return [figure for figure in found if figure is not None]


def _figure(name: str, values: Iterable[float], trials: int, *, most: bool = False) -> Figure | None:
    listed = list(values)
    if not listed:
        return None
    return Figure(name, max(listed) if most else min(listed), trials)


def _overloaded(scenario: Scenario, load: float) -> bool:
    return bool(scenario.family) and scenario.load == load


def _overload(each: Row, rows: Sequence[Row], by_name: dict[str, Scenario]) -> tuple[float, float]:
    """Return the goodput of the gate, and without one, over the highest of any load up to this one in its family.

    In shares of the capacity: each load plays other requests of the trace, and they carry more or less work.
    """
    scenario = by_name[each.scenario]
    family = [
        other
        for other in rows
        if by_name[other.scenario].family == scenario.family
        and other.seed == each.seed
        and by_name[other.scenario].load <= scenario.load
    ]
    peak = max(other.rules[rule].goodput / other.capacity for other in family for rule in ("carpool", "best cap"))
    ours, none = (each.rules[rule].goodput / each.capacity for rule in ("carpool", "no gate"))
    return ours / peak, none / peak


def _beside(scenario: Scenario, *, batch: bool) -> bool:
    flood = scenario.flood
    return flood is not None and flood.prompt_tokens is None and flood.batch is batch


def _long_prompts_beside(scenario: Scenario) -> bool:
    flood = scenario.flood
    return flood is not None and flood.prompt_tokens is not None and flood.tenant != OWN


def _printed(rows: Iterable[Row]) -> Iterator[Row]:
    for found in rows:
        ours, best = found.rules["carpool"], found.rules["best cap"]
        print(
            f"{found.scenario}, seed {found.seed}: {ours.goodput:.2f}/s good of {found.offered:.2f}/s; "
            f"best cap {found.cap}: {best.goodput:.2f}/s; share {found.share:.3f}; {ours.preemptions} preemptions",
            flush=True,
        )
        yield found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    names = [scenario.name for scenario in scenarios()]
    parser.add_argument("--quick", action="store_true", help="two scenarios only")
    parser.add_argument("--scenario", action="append", choices=names, metavar="NAME", help="this only; may be repeated")
    parser.add_argument("--seed", action="append", type=int, help="instead of 1 and 11")
    parser.add_argument("--write", action="store_true", help="keep the results, and write the page and the picture")
    parser.add_argument("--anew", action="store_true", help="play again what is stored")
    parser.add_argument("--gate", action="store_true", help="play the gate alone, and keep what other rules did before")
    parser.add_argument("--report", action="store_true", help="only write the page and the picture from kept results")
    parser.add_argument("--check-report", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args()
    if (options.write or options.gate) and (options.quick or options.scenario or options.seed):
        parser.error("--write and --gate keep whole runs only: leave out --quick, --scenario and --seed")
    return options


if __name__ == "__main__":
    sys.exit(main())
