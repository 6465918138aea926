"""`make proof`: compares Carpool with the oracle and with other rules.

Every scenario in `benchmarks/scenarios` is played in virtual time: by Carpool, which only gets the p99; by rules in
common use, which get the true batch latency; and by an oracle that also knows the load. All of them get the same
requests. Equal seeds give equal figures, on every machine.

Exit codes: 0, every figure is within its limit (`benchmarks/proof/limits.json`); 1, one is not; 130, interrupted, and
then nothing was written.
"""

from __future__ import annotations

import argparse
import resource
import shlex
import sys
import time
from collections import deque
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python benchmarks/proof` has only this folder there

import compiled
from evidence import commit, limits, machine, today

from proof import alone, experiments, kept, report, rows, verdict
from proof import scenario as suite
from proof.experiments import CONTENDERS, Reference, Rows
from proof.rows import CARPOOL, LAZY, Named, Proof

if TYPE_CHECKING:
    from collections.abc import Callable

    from proof.scenario import Scenario

SEED = 1
"""Seed of the record."""

QUICK_SCENARIOS = ("bert-large-a100-overload", "resnet50-t4-throttled", "synthetic-1-executor")
QUICK_CONTENDERS = (CARPOOL, LAZY)


def main() -> int:
    """Run the command; returns the exit code."""
    options = _options()
    if options.check_report or options.report:
        return report.main(check=options.check_report)
    scenarios, left_out = _scenarios(options)
    if not scenarios:
        print("nothing to play: " + "; ".join(f"{name}, {why}" for name, why in left_out.items()))
        return 1
    wanted = options.contender or (QUICK_CONTENDERS if options.quick else tuple(CONTENDERS))
    whole = not (options.quick or options.scenario or options.contender)
    # The commit at the start: changes while this runs are not what was measured.
    measured, began = commit(), time.monotonic()
    kept.forget(0.0 if options.anew else kept.UNUSED)
    try:
        run = Run(scenarios, wanted, options.seed, options.jobs, brief=options.quick)
        if whole and not options.interpreted:
            run.compile()
        run.play()
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was written", file=sys.stderr)
        return 130
    command = ["python", "benchmarks/proof", *sys.argv[1:]]
    proof = run.proof(measured, shlex.join(command), time.monotonic() - began, left_out)
    print(f"\n{proof.seconds:.0f} s, {proof.cpu_seconds:.0f} s of CPU")
    bounds = verdict.QUICK_LIMITS if options.quick else verdict.LIMITS
    if options.write:
        # Tested first: the run takes half an hour.
        path = report.data_file(options.seed)
        rows.write(path, proof)
        print(f"\nwritten to {path}")
    _show(proof, bounds)
    if options.write:
        report.main(check=False)
    beyond = verdict.missed(proof, bounds) if whole or options.quick else []
    for line in beyond:
        print(f"\n*** BEYOND ITS LIMIT {line} ***")
    for name, why in left_out.items():
        print(f"\n*** LEFT OUT {name}: {why} ***")
    return 1 if beyond else 0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        prog="python benchmarks/proof",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A part (--scenario, --contender) is shown, not judged: limits are on all of it.",
    )
    made.add_argument(
        "--seed",
        type=_whole(0),
        default=SEED,
        metavar="N",
        help=f"of arrivals, noise and whatever rules leave to chance (default: {SEED}, the record's)",
    )
    made.add_argument(
        "--quick", action="store_true", help="a few scenarios and contenders, no hours, limits of its own: what CI runs"
    )
    made.add_argument("--scenario", action="append", metavar="NAME", help="only this one; may be given again")
    made.add_argument(
        "--contender",
        action="append",
        choices=sorted(CONTENDERS),
        metavar="NAME",
        help=f"only this one, of {', '.join(CONTENDERS)}; may be given again",
    )
    made.add_argument("--jobs", type=_whole(1), default=2, metavar="N", help="processes (default: 2)")
    made.add_argument(
        "--write",
        action="store_true",
        help=f"keep the results, in {report.data_file(SEED).name} or, of seed 7, {report.data_file(7).name}, "
        "and bring docs/proof.md up to date",
    )
    made.add_argument(
        "--anew",
        action="store_true",
        help="forget what rules and oracle came to before, and play them though nothing that decides them has changed",
    )
    made.add_argument(
        "--interpreted",
        action="store_true",
        help="leave Carpool's core as it is; else a whole run makes machine code of it, where there is a C compiler: "
        "the same figures in half the time",
    )
    made.add_argument("--report", action="store_true", help="only write docs/proof.md again, from the results kept")
    made.add_argument(
        "--check-report", action="store_true", help="only say how docs/proof.md differs from the results kept"
    )
    return made


def _whole(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers that are at least ``least``."""

    def read(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is below {least}")
        return number

    read.__name__ = "int"  # argparse's name for it in error messages
    return read


def _options() -> argparse.Namespace:
    """Read the command line; options that exclude each other end with a usage error."""
    made = parser()
    options = made.parse_args()
    plays = options.quick or options.scenario or options.contender or options.write or options.anew
    plays = plays or options.interpreted or options.seed != SEED
    if (options.report or options.check_report) and (plays or (options.report and options.check_report)):
        made.error("--report and --check-report play nothing: give one of them, alone")
    if options.quick and (options.scenario or options.contender):
        made.error("--quick has scenarios and contenders of its own: leave --scenario and --contender out, or --quick")
    if options.write and (options.quick or options.scenario or options.contender):
        made.error("--write keeps all of it: leave --quick, --scenario and --contender out")
    return options


def _scenarios(options: argparse.Namespace) -> tuple[list[Scenario], dict[str, str]]:
    """Return the scenarios to play, and those that can't be played, with the reason."""
    known = {scenario.name: scenario for scenario in suite.load_all()}
    names = options.scenario or (QUICK_SCENARIOS if options.quick else tuple(known))
    if unknown := [name for name in names if name not in known]:
        parser().error(f"no scenario {unknown[0]!r}: there are {', '.join(known)}")
    left_out = {name: why for name in names if (why := known[name].missing()) is not None}
    return [known[name] for name in names if name not in left_out], left_out


class _Task(NamedTuple):
    """A task for a separate process, and the function that handles its result and returns a message."""

    name: str
    run: Callable[[], Any]
    take: Callable[[Any], str]


class Run:
    """All tasks, which of them are done, and their results."""

    def __init__(
        self, scenarios: list[Scenario], contenders: tuple[str, ...], seed: int, jobs: int, *, brief: bool
    ) -> None:
        self._scenarios = scenarios
        self._seed = seed
        self._jobs = jobs
        self._contenders = contenders
        self._references: list[Reference] = []
        self._rows: list[Rows] = []
        self._hours: list[rows.Hour] = []
        self._rollbacks: list[rows.Rollback] = []
        self._told: list[rows.Stair] = []
        self._rests: list[rows.Rest] = []
        self._kept = sum(kept.has(rows.ORACLE, scenario, seed) for scenario in scenarios)
        self._brief = brief
        self._machine_code: str | None = None
        self._compiled = False
        self._alone: dict[str, tuple[Callable[[Scenario, int], Any], list[Any]]] = {}
        if CARPOOL in contenders:
            self._alone["rollback"] = alone.rollback, self._rollbacks
            if not brief:
                self._alone["hour"] = alone.hour, self._hours
        self._left = len(scenarios) * (1 + len(contenders) + len(self._alone))
        self._done = 0
        self._began = time.monotonic()
        self._ready = deque(
            _Task(
                f"{scenario.name}: oracle",
                partial(kept.refer, scenario, seed),
                partial(self._referred, scenario),
            )
            for scenario in scenarios
        )

    def compile(self) -> None:
        """Play with Carpool's core as machine code, if it can be compiled here."""
        print("Carpool's core as machine code (once for each state of its sources, a minute) ...", file=sys.stderr)
        try:
            self._machine_code = str(compiled.folder())
        except compiled.NotCompiledError as error:
            print(f"not to be had, so all is played at half the speed: {error}", file=sys.stderr)

    def play(self) -> None:
        """Play all tasks in the requested number of processes; each oracle first, then the rules compared with it.

        Where Carpool misses a goal, it is played again: with the true values given, and with more time.
        """
        self._empty()
        if not self._brief:
            self._ready.extend(self._unexplained())
            self._left = len(self._ready)
            self._empty()

    def _empty(self) -> None:
        """Play all tasks, including those that are added meanwhile."""
        finished: SimpleQueue[tuple[_Task, Any, BaseException | None]] = SimpleQueue()
        under_way = 0
        # Processes that have imported nothing yet.
        with get_context("spawn").Pool(self._jobs, compiled.use, (self._machine_code,)) as pool:
            self._compiled = pool.apply(compiled.is_used)
            while self._ready or under_way:
                while self._ready and under_way < self._jobs:
                    task = self._ready.popleft()
                    pool.apply_async(
                        task.run,
                        callback=partial(_put, finished, task, None),
                        error_callback=partial(_put, finished, task),
                    )
                    under_way += 1
                task, result, error = finished.get()
                under_way -= 1
                if error is not None:
                    error.add_note(f"in {task.name}, seed {self._seed}")
                    raise error
                self._done += 1
                self._left -= 1
                self._say(f"{task.name}: {task.take(result)}")

    def _unexplained(self) -> list[_Task]:
        """List the tasks that explain why a goal is missed, with rising loads."""
        proof = self.proof("", "", 0.0, {})
        short = verdict.shortfalls(proof)
        names = {each.scenario for each in short if each.measure in verdict.OF_STAIRS}
        worst = {
            each.scenario: verdict.least_saving(proof, each.scenario) for each in short if each.measure == "saving"
        }
        rests = [
            _Task(
                f"{scenario.name}: Carpool, left alone with {worst[scenario.name]:.0%} load",
                partial(experiments.rest, scenario, worst[scenario.name], self._seed),
                self._rested,
            )
            for scenario in self._scenarios
            if scenario.name in worst
        ]
        return rests + [
            _Task(
                f"{scenario.name}: Carpool, {name}",
                partial(experiments.explain, scenario, name, self._seed),
                self._explained,
            )
            for scenario in self._scenarios
            if scenario.name in names
            for name in rows.TOLD
        ]

    def proof(self, measured: str, command: str, seconds: float, left_out: dict[str, str]) -> Proof:
        """Return the results, in an order that does not depend on which task ended first."""
        order = {name: number for number, name in enumerate((rows.ORACLE, *CONTENDERS))}
        references = sorted(self._references, key=lambda each: each.about.name)
        stairs = [*(each.stair for each in references), *(each.stair for each in self._rows)]
        timelines = [*(each.timeline for each in references), *(each.timeline for each in self._rows)]
        return Proof(
            commit=measured,
            date=today(),
            machine=machine(),
            command=command,
            seed=self._seed,
            suite=suite.suite_hash(),
            seconds=round(seconds),
            cpu_seconds=round(_cpu_seconds()),
            kept=self._kept,
            compiled=self._compiled,
            left_out=left_out,
            contenders=[Named(name, CONTENDERS[name].name, CONTENDERS[name].cite) for name in self._contenders],
            scenarios=[each.about for each in references],
            phases={each.about.name: each.phases for each in references},
            stairs=sorted(stairs, key=lambda each: (each.scenario, order[each.contender])),
            timelines=sorted(timelines, key=lambda each: (each.scenario, order[each.contender])),
            hours=sorted(self._hours, key=lambda each: each.scenario),
            forecasts=sorted(
                (one for each in self._rows for one in each.forecasts), key=lambda each: (each.scenario, each.load)
            ),
            rollbacks=sorted(self._rollbacks, key=lambda each: each.scenario),
            rests=sorted(self._rests, key=lambda each: each.scenario),
            told=sorted(self._told, key=lambda each: (each.scenario, rows.TOLD.index(each.contender))),
        )

    def _say(self, what: str) -> None:
        spent = time.monotonic() - self._began
        left = spent / self._done * self._left
        total = self._done + self._left
        print(f"[{self._done}/{total}, {spent:.0f} s, about {left:.0f} s left] {what}", file=sys.stderr, flush=True)

    def _referred(self, scenario: Scenario, reference: Reference) -> str:
        self._references.append(reference)
        name, seed = scenario.name, self._seed
        self._kept += sum(kept.has(contender, scenario, seed) for contender in self._contenders)
        tasks = [
            _Task(
                f"{name}: {contender}",
                partial(kept.contend, scenario, reference, contender, seed),
                partial(self._contended, reference),
            )
            for contender in self._contenders
        ]
        tasks += [
            _Task(f"{name}: {what}", partial(task, scenario, seed), partial(_take, found))
            for what, (task, found) in self._alone.items()
        ]
        self._ready.extendleft(reversed(tasks))
        return (
            f"holds {verdict.top(reference.about, reference.stair):.0%} of {reference.about.capacity:,.0f} requests/s"
        )

    def _explained(self, stair: rows.Stair) -> str:
        self._told.append(stair)
        (about,) = [each.about for each in self._references if each.about.name == stair.scenario]
        return f"holds {verdict.top(about, stair):.0%}"

    def _rested(self, rest: rows.Rest) -> str:
        self._rests.append(rest)
        return f"saves {verdict.by_minute(rest)} of what the oracle does, minute by minute"

    def _contended(self, reference: Reference, played: Rows) -> str:
        self._rows.append(played)
        return (
            f"holds {verdict.top(reference.about, played.stair):.0%}, "
            f"misses {played.timeline.misses:.2%} of its timeline (oracle {played.timeline.best:.2%})"
        )


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _put(
    finished: SimpleQueue[tuple[_Task, Any, BaseException | None]],
    task: _Task,
    *what: Any,  # noqa: ANN401 - any task's
) -> None:
    """Hand over a task's (error, result), or its error alone."""
    error, *result = what
    finished.put((task, result[0] if result else None, error))


def _take(found: list[Any], result: rows.Hour | rows.Rollback | None) -> str:
    if result is None:
        return "not for this scenario"
    found.append(result)
    return f"{result.flips} flips" if isinstance(result, rows.Hour) else f"{result.requests} requests"


def _show(proof: Proof, bounds: Path) -> None:
    """Print the figures with their limits, and the missed goals."""
    known = limits(bounds)
    print(f"\n{'':28} {'measured':>10} {'limit':>20} {'goal':>10}")
    for name, figure in verdict.figures(proof).items():
        limit = known.get(name)
        bound = f"{limit.direction} {limit.value:g}" if limit is not None else "-"
        goal = f"{limit.aim:g}" if limit is not None else "-"
        print(f"{name:28} {figure.value:10.4g} {bound:>20} {goal:>10}")
    for each in verdict.shortfalls(proof, bounds):
        value = verdict.show(each.measure, each.value)
        print(f"short of its goal: {each.scenario}, {each.measure}: {value}, {each.reason or 'not explained'}")
        for name, found in zip(rows.TOLD, each.told, strict=True):
            if found is not None:
                print(f"  {name}: {verdict.show(each.measure, found)}")
        if each.rest is not None:
            print(f"  left alone with {each.rest.load:.0%} load: {verdict.by_minute(each.rest)}, minute by minute")


if __name__ == "__main__":
    sys.exit(main())
