"""`make generation`: what the gate for token streams makes of an engine, against other rules, in virtual time.

Every scenario of `scenarios.json` is played with two seeds. The second seed was never used to tune anything. Equal
seeds give equal figures on every machine. Figures, limits and the picture: `docs/generation-figures.md`.

Nineteen in twenty plays are of other rules than the gate. If only the gate changed, `--gate` keeps their results. It
plays the best cap of each row again, and fails if that result is different now. Every rule plays new scenarios.

Exit codes: 0, every figure is within its limit (`limits.json`); 1, one is not.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python benchmarks/generation` has only this folder there

import click
import msgspec
from evidence import Figure, Machine, commit, limits, machine, today
from msgspec import Struct

from generation import report
from generation.figures import Row, again, row
from generation.world import OWN, build, scenarios

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from generation.world import Scenario

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "generation.json"

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
        record = msgspec.structs.replace(record, figures=summary(scenarios(), record.rows))
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
    wanted = [each for each in scenarios() if _named(each, QUICK if options.quick else options.scenario)]
    measured = commit()
    rows = [] if options.anew or not options.write else _kept(measured)
    done = {(each.scenario, each.seed) for each in rows}
    worlds = [build(scenario, seed) for scenario in wanted for seed in options.seed or SEEDS]
    # The shortest first, so that an interrupted run has many.
    worlds.sort(key=lambda world: world.capacity.rate * world.scenario.seconds)
    with ProcessPoolExecutor() as pool:
        for found in pool.map(row, [each for each in worlds if (each.scenario.name, each.seed) not in done]):
            _print(found)
            rows.append(found)
            if options.write:
                _keep(_record(measured, rows, figures=[]))
    return _record(measured, rows)


def _gate_again() -> Record:
    """Play the gate alone in every row that is kept, and every rule in those that are missing."""
    measured, before = commit(), msgspec.json.decode(RESULTS.read_bytes(), type=Record)
    by_name = {scenario.name: scenario for scenario in scenarios()}
    worlds = [build(by_name[each.scenario], each.seed) for each in before.rows]
    kept = {(each.scenario, each.seed) for each in before.rows}
    missing = [build(each, seed) for each in by_name.values() for seed in SEEDS if (each.name, seed) not in kept]
    rows = []
    with ProcessPoolExecutor() as pool:
        for found in chain(pool.map(again, worlds, before.rows), pool.map(row, missing)):
            _print(found)
            rows.append(found)
    return _record(measured, rows, others=before.others or before.commit)


def _kept(measured: str) -> list[Row]:
    """Return what an interrupted run of the same commit has played already."""
    if not RESULTS.exists():
        return []
    record = msgspec.json.decode(RESULTS.read_bytes(), type=Record)
    return record.rows if record.commit == measured and not record.others else []


def _record(measured: str, rows: list[Row], *, others: str = "", figures: list[Figure] | None = None) -> Record:
    found = summary(scenarios(), rows) if figures is None else figures
    return Record(measured, today(), machine(), shlex.join(["python", *sys.argv]), found, rows, others)


def _keep(record: Record) -> None:
    """Write what was played so far."""
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


def _named(scenario: Scenario, names: Sequence[str] | None) -> bool:
    return not names or scenario.name in names


def _print(found: Row) -> None:
    ours, best = found.rules["carpool"], found.rules["best cap"]
    print(
        f"{found.scenario}, seed {found.seed}: {ours.goodput:.2f}/s good of {found.offered:.2f}/s; "
        f"best cap {found.cap}: {best.goodput:.2f}/s; share {found.share:.3f}; {ours.preemptions} preemptions",
        flush=True,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="two scenarios only")
    parser.add_argument("--scenario", action="append", help="these only")
    parser.add_argument("--seed", action="append", type=int, help="instead of 1 and 11")
    parser.add_argument("--write", action="store_true", help="keep the results, and write the page and the picture")
    parser.add_argument(
        "--anew", action="store_true", help="play again what an interrupted run of this commit has kept"
    )
    parser.add_argument("--gate", action="store_true", help="play the gate alone, and keep what other rules did before")
    parser.add_argument("--report", action="store_true", help="only write the page and the picture from kept results")
    parser.add_argument("--check-report", action="store_true", help="only say whether the page is up to date")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
