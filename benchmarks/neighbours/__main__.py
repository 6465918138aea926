"""`make neighbours`: nobody pays for somebody else's request.

200 healthy requests a second go to a sidecar in front of a model server. Beside them one neighbour at a time
misbehaves: bodies that are dear to parse, poisoned rows, calls that hang, streams, slow uploads, connections that never
finish, a flood. The same is done to the model server without a sidecar, to compare with, and in virtual time where
the simulator can play it. Every answer to a healthy caller is checked: a model's answer is a function of its request,
and the text of an error names whose it is.

Printed at the end: one table, and a line for every limit (benchmarks/neighbours/limits.json) that was not met.

columns:
  failed, wrong, foreign   healthy requests without a good answer; with another's answer; with another's error text
  p50, p99                 latency of healthy requests; machines pause, so it is not judged
  alone                    the same load and neighbour at the model server itself
  rows a call              rows in a call of the model: how many share a batch
  livez CPU                most CPU time of the sidecar between a livez request and its answer
  livez gap                longest wall time between two answers of livez; not judged
  peak                     most memory of the sidecar, which is started anew for each neighbour
  p99 in virtual time      healthy requests' p99, times what it is without the neighbour

exit codes:
  0  every limit is met
  1  one is not
  130  interrupted; nothing was written
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python benchmarks/neighbours` has only this folder there
sys.path.append(str(Path(__file__).parents[2] / "tools"))

import msgspec
import uvloop
from evidence import commit, machine, today

from neighbours import trials, verdict, virtual
from neighbours.catalogue import NEIGHBOURS, RATE, Neighbour
from neighbours_page import HEADS, cells

RESULTS = Path(__file__).parents[1] / "results" / "neighbours.json"


def main() -> int:
    """Play the neighbours asked for; print the table; keep the results of a whole run."""
    options = _options()
    if options.list:
        for neighbour in NEIGHBOURS:
            print(f"{neighbour.name:16} {neighbour.what}")
        return 0
    chosen = [neighbour for neighbour in NEIGHBOURS if not options.only or neighbour.name in options.only]
    measured = commit()  # of the code as it is now: what changes while this runs is not what was measured
    rows, broken = [], []
    try:
        for neighbour in chosen:
            print(f"{neighbour.name}: {neighbour.what} ...", file=sys.stderr, flush=True)
            row = play(neighbour, options.seconds)
            rows.append(row)
            broken += verdict.violations(row)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was written", file=sys.stderr)
        return 130
    results = verdict.Neighbours(
        commit=measured,
        date=today(),
        machine=msgspec.to_builtins(machine()),
        command=shlex.join(["python", "benchmarks/neighbours", *sys.argv[1:]]),
        rate=RATE,
        seconds=options.seconds,
        rows=rows,
        violations=broken,
    )
    show(results)
    target = options.results or (None if options.only else RESULTS)
    if target is not None:
        target.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
        print(f"\nwritten to {target}")
    return int(bool(broken))


def play(neighbour: Neighbour, seconds: float) -> verdict.Row:
    """Play one neighbour at the server, in virtual time, and at a sidecar."""
    server = uvloop.run(trials.alone(neighbour, seconds))
    played = virtual.play(neighbour.name)
    seen = []
    while True:
        seen.append(uvloop.run(trials.behind_sidecar(neighbour, seconds)))
        row = verdict.row(neighbour, seen, server, played)
        if len(seen) == verdict.TRIALS or not verdict.only_noise(row):
            return row


def show(results: verdict.Neighbours) -> None:
    """Print the table, and what is beyond a limit."""
    table = [list(HEADS), *(cells(msgspec.to_builtins(row)) for row in results.rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print()
    for line in table:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))
    for violation in results.violations:
        print(f"\n*** BEYOND ITS LIMIT {violation} ***")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/neighbours", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="play this neighbour, not all; may be given several times"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="N", help="how long each neighbour acts (default: 10)"
    )
    parser.add_argument("--list", action="store_true", help="print the neighbours and end")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="where the results go (default: results/neighbours.json after a whole run, nowhere after a part)",
    )
    options = parser.parse_args()
    names = {neighbour.name for neighbour in NEIGHBOURS}
    if unknown := [name for name in options.only or () if name not in names]:
        parser.error(f"no neighbour {unknown[0]!r}: --list prints them")
    return options


if __name__ == "__main__":
    sys.exit(main())
