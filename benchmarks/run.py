"""`make bench`: what Carpool costs, against reviewed limits (`limits.json`); figures land in `results/bench.json`.

Every cost is the least of many short trials, taken in turn with what it is compared to, because other work on the
machine can only add to it. Exit code 1: a figure is beyond its limit, or the results kept have figures that this run
lacks; then they stay.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import compiled
import msgspec
import pure
import serving
import token_streams
import uvloop
from evidence import Figure, Results, Skipped, commit, limits, machine, today

if TYPE_CHECKING:
    from collections.abc import Callable

    from evidence import Limit

HERE = Path(__file__).parent
LIMITS = HERE / "limits.json"
RESULTS = HERE / "results" / "bench.json"

BENCHMARKS: dict[str, Callable[[Path], list[Figure]]] = {
    "batcher": lambda _: pure.batcher(),
    "instructions": lambda _: pure.instructions(),
    "simulator": lambda _: pure.simulator(),
    "decision": lambda _: pure.decision(),
    "footprint": lambda folder: uvloop.run(serving.footprint(folder)),
    "copies": lambda folder: uvloop.run(serving.copies(folder)),
    "batched": lambda folder: uvloop.run(serving.batched(folder)),
    "kserve-agent": lambda folder: uvloop.run(serving.kserve(folder)),
    "pass-through": lambda folder: uvloop.run(serving.pass_through(folder)),
    "token-streams": lambda folder: uvloop.run(token_streams.token_streams(folder)),
}


def main() -> int:
    """Run the benchmarks named, or all; print the table; keep the results of a whole run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"what to run, of {', '.join(BENCHMARKS)}; default: all"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="where the results go (default: results/bench.json after a whole run of the wheel, otherwise nowhere)",
    )
    parser.add_argument(
        "--interpreted", action="store_true", help="run the checkout as it is, in place of a wheel with machine code"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {unknown[0]!r}: there are {', '.join(BENCHMARKS)}")
    if not options.interpreted and not compiled.is_used():
        run_compiled()
    bounds = limits(LIMITS)
    before, measured = baseline(RESULTS), commit()
    figures: list[Figure] = []
    skipped: dict[str, str] = {}
    for name in options.names or BENCHMARKS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="carpool-bench-") as folder:
            try:
                figures += BENCHMARKS[name](Path(folder))
            except Skipped as reason:
                skipped[name] = str(reason)
    passed = report(figures, bounds, before)
    for name, why in skipped.items():
        print(f"\n*** SKIPPED {name}: {why} ***")
    target = options.results or (None if options.names or options.interpreted else RESULTS)
    if target is not None:
        command = shlex.join(["python", *sys.argv])
        results = Results(measured, today(), machine(), command, figures, skipped, compiled.is_used())
        passed = keep(results, bounds, target) and passed
    return 0 if passed else 1


def keep(results: Results, bounds: dict[str, Limit], target: Path) -> bool:
    """Write a run and return whether that was done: a file that has more figures stays as it is."""
    lost = sorted((baseline(target).keys() & bounds.keys()) - {figure.name for figure in results.figures})
    if lost:
        print(
            f"\n*** NOT WRITTEN: {target} has figures that this run lacks: {', '.join(lost)}. Install what was "
            "skipped, or name another file with --results ***"
        )
        return False
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    print(f"\nwritten to {target}")
    return True


def run_compiled() -> None:
    """Start again with the wheel that users get, for which the limits hold; exit where it can't be built."""
    try:
        folder = str(compiled.wheel())
    except compiled.NotCompiledError as error:
        sys.exit(f"the wheel is measured, and it can't be built: {error}\n--interpreted measures the checkout instead")
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONPATH": path})  # noqa: S606 - no shell is needed


def baseline(path: Path) -> dict[str, float]:
    """Read what was measured last, where that was kept."""
    if not path.exists():
        return {}
    return {one.name: one.value for one in msgspec.json.decode(path.read_bytes(), type=Results).figures}


def report(figures: list[Figure], bounds: dict[str, Limit], before: dict[str, float]) -> bool:
    """Print the table, and every goal that is missed; return whether every figure keeps its limit."""
    print(f"\n{'':26} {'measured':>12} {'before':>12} {'limit':>18}  verdict")
    passed = True
    missed, made_of = [], None
    for figure in figures:
        limit = bounds[figure.name]
        holds = limit.holds(figure.value)
        passed = passed and holds
        verdict = "ok" if holds else "BEYOND ITS LIMIT"
        if not limit.reaches(figure.value):
            missed.append(
                f"{figure.name}: {figure.value:,.4g} {limit.unit}, the goal is {limit.direction} {limit.aim:,g}: "
                f"{limit.gap(figure.value):.2g} times away. {limit.why}"
            )
            verdict += ", goal missed"
        past = f"{before[figure.name]:12,.4g}" if figure.name in before else f"{'-':>12}"
        print(
            f"{figure.name:26} {figure.value:12,.4g} {past} {limit.direction:>8} {limit.value:<9,g}  "
            f"{verdict}  ({limit.unit})"
        )
        if figure.parts and figure.parts != made_of:
            print(f"{'':28}" + ", ".join(f"{name} {value:,.4g}" for name, value in figure.parts.items()))
        made_of = figure.parts
    for line in missed:
        print(f"\n*** GOAL MISSED {line} ***")
    return passed


if __name__ == "__main__":
    sys.exit(main())
