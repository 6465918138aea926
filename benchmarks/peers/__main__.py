"""Real engines, and Carpool, in front of the same model: `python benchmarks/peers ENGINE`, or `--all`.

`benchmarks/results/peers` has runs with the default settings only; others need `--results FOLDER`. Stored results stay
if a new run fails or lacks some of them; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# In place of this folder, whose modules would stand in the way of others' by the same names.
sys.path[0] = str(HERE.parent)

from evidence import commit, machine, today  # noqa: E402 - see above
from peers import trials  # noqa: E402
from peers.engines import ENGINES, Engine, Settings  # noqa: E402
from peers.environments import NotInstalled, environment, versions  # noqa: E402
from peers.results import Peer, Setting, Trial, Tried, best, save, shortcomings  # noqa: E402
from peers.running import NotStarted, Running  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

MEASURED_WITH = ("profile", "slo", "rates", "fault_rate", "seconds", "warm_up", "seed")
"""Options with other figures."""

RESULTS = ROOT / "benchmarks" / "results" / "peers"
TRIED_SECONDS = 5.0
TRIED_WARM_UP = 2.0
MOSTLY_MISSED = 0.5
"""A share of good answers below which higher rates are not tried."""

WENT_WELL = 0.9
"""A share of good answers from which an engine keeps up."""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        prog="benchmarks/peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("engine", nargs="*", choices=[[], *ENGINES], help="what to measure", metavar="ENGINE")
    made.add_argument("--all", action="store_true", help=f"all of {', '.join(ENGINES)}")
    made.add_argument("--profile", default="bert-large-384-a100", help="of benchmarks/profiles [%(default)s]")
    made.add_argument("--slo", type=float, default=0.1, help="seconds by which an answer is good [%(default)s]")
    made.add_argument("--rates", type=rates, default=[60.0, 200.0, 400.0], help="requests/s, ascending [60,200,400]")
    made.add_argument("--fault-rate", type=float, help="requests/s while some misbehave [the highest that went well]")
    made.add_argument("--seconds", type=float, default=15.0, help="measured at each rate [%(default)s]")
    made.add_argument("--warm-up", type=float, default=10.0, help="seconds before that [%(default)s]")
    made.add_argument("--seed", type=int, default=0, help="of arrivals [%(default)s]")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder for the files [%(default)s]")
    return made


def rates(text: str) -> list[float]:
    """Read ascending rates."""
    found = [float(part) for part in text.split(",")]
    if not found or min(found) <= 0 or sorted(found) != found:
        raise argparse.ArgumentTypeError(f"{text!r}: write ascending requests per second, e.g. 60,200,400")
    return found


def fault_rate(seen: Sequence[Trial]) -> float:
    """Return the highest rate that went well: beyond it answers are lost to the load alone. The lowest if none did."""
    return max((trial.rate for trial in seen if trial.good_share >= WENT_WELL), default=seen[0].rate)


class Campaign:
    """One engine, from its environment to its file."""

    def __init__(self, engine: Engine, told: argparse.Namespace) -> None:
        self._engine = engine
        self._told = told
        self._profile = ROOT / "benchmarks" / "profiles" / f"{told.profile}.json"

    def run(self) -> Peer:
        """Measure; an engine that can't be had or started says why in its results."""
        tried: list[Tried] = []
        settings: list[Setting] = []
        known: dict[str, str] = {}
        begun = commit()
        failed = ""
        try:
            self._bin = environment(self._engine.name)
            if self._engine.name == "carpool":
                settings.append(self._measure("p99 alone", self._p99))
            else:
                known = versions(self._bin, self._engine.name)
                settings.append(self._measure("default", {}))
                settings.append(self._beside())
                for point in self._engine.grid:
                    tried.append(self._try(point))
                    self._say(f"tried {tried[-1].settings}: {[f'{share:.1%}' for share in tried[-1].good_shares]}")
                if (chosen := best(tried)) is not None:
                    settings.append(self._measure("tuned", chosen.settings))
        except (NotInstalled, NotStarted) as error:
            failed = f"{type(error).__name__}: {error}"
            self._say(failed)
        return Peer(
            engine=self._engine.name,
            title=self._engine.title,
            default=self._engine.default,
            commit=begun,
            date=today(),
            machine=machine(),
            command=shlex.join(["python", "benchmarks/peers", *sys.argv[1:]]),
            versions=known,
            profile=self._told.profile,
            slo=self._told.slo,
            rates=self._told.rates,
            tried=tried,
            settings=settings,
            failed=failed,
        )

    @property
    def _p99(self) -> Settings:
        """Carpool's whole configuration."""
        return {"slo_p99": f"{self._told.slo * 1e3:g}ms"}

    def _start(self, settings: Settings) -> Running:
        return Running(self._engine, settings, self._bin, self._profile)

    def _beside(self) -> Setting:
        """Measure Carpool in the same minutes: what else this machine has to do differs from hour to hour."""
        carpool = ENGINES["carpool"]
        with Running(carpool, self._p99, environment(carpool.name), self._profile) as running:
            seen = self._loaded("Carpool beside", running)
        return Setting(name="Carpool beside", settings=self._p99, trials=seen, cancels=None, poison=None)

    def _loaded(self, name: str, running: Running) -> list[Trial]:
        told = self._told
        seen = []
        for rate in told.rates:
            last = trials.trial(running, rate, warm_up=told.warm_up, seconds=told.seconds, slo=told.slo, seed=told.seed)
            seen.append(last)
            self._say(
                f"{name} at {rate:g}/s: {last.good_share:.2%} good, p99 {last.p99 or 0:.4f} s, "
                f"{last.rows_a_batch:.1f} rows a batch, device {last.device_ms:.2f} ms, CPU {last.cpu_ms:.2f} ms "
                f"a request, {len(last.stalled)} seconds stalled, denied {last.denied or 0:.0%} of its CPU time"
            )
        return seen

    def _measure(self, name: str, settings: Settings) -> Setting:
        told = self._told
        with self._start(settings) as running:
            seen = self._loaded(name, running)
        rate = told.fault_rate or fault_rate(seen)
        # Fresh processes: an overload before leaves more behind than a wait can see.
        with self._start(settings) as running:
            hung_up = trials.cancels(running, rate, told.seconds, told.seed)
            self._say(f"{name}, cancels: lost {hung_up.lost}, refused {hung_up.refused}, wrong {hung_up.wrong}")
        with self._start(settings) as running:
            poisoned = trials.poison(running, rate, told.seconds, told.seed)
            self._say(
                f"{name}, poison: {poisoned.misbehaved} got {poisoned.their_answers}; of the others refused "
                f"{poisoned.refused}, lost {poisoned.lost}, wrong {poisoned.wrong}"
            )
        return Setting(name=name, settings=settings, trials=seen, cancels=hung_up, poison=poisoned)

    def _try(self, settings: Settings) -> Tried:
        told = self._told
        shares: list[float] = []
        costs: list[float] = []
        stalled = 0
        try:
            with self._start(settings) as running:
                for rate in told.rates:
                    if shares and shares[-1] < MOSTLY_MISSED:
                        shares.append(0.0)
                        costs.append(costs[-1])
                        continue
                    seen = trials.trial(
                        running, rate, warm_up=TRIED_WARM_UP, seconds=TRIED_SECONDS, slo=told.slo, seed=told.seed + 1
                    )
                    # A stall says nothing of a setting, unless nothing else is left.
                    steady = seen.steady_good_share
                    shares.append(seen.good_share if steady is None else steady)
                    costs.append(seen.device_ms)
                    stalled += len(seen.stalled)
        except NotStarted as error:
            return Tried(settings=settings, good_shares=[], device_ms=[], stalled=0, failed=str(error)[-300:])
        return Tried(settings=settings, good_shares=shares, device_ms=costs, stalled=stalled)

    def _say(self, text: str) -> None:
        print(f"{self._engine.name}: {text}", flush=True)


def main(arguments: list[str]) -> int:
    """Measure what was asked for; returns the exit code, 1 when an engine failed or a run lacks something."""
    told = parser().parse_args(arguments)
    names = list(ENGINES) if told.all else told.engine
    if not names:
        parser().error(f"name an engine, of {', '.join(ENGINES)}, or say --all")
    others = [f"--{each.replace('_', '-')}" for each in MEASURED_WITH if getattr(told, each) != default(each)]
    if others and told.results.resolve() == RESULTS:
        parser().error(f"{', '.join(others)}: {RESULTS} has the default settings only; add --results FOLDER")
    # As by Ctrl-C: whatever was started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    code = 0
    for name in names:
        peer = Campaign(ENGINES[name], told).run()
        if short := shortcomings(peer, told.results):
            print(f"{name}: not written, what {told.results} has stays: {', '.join(short)}", flush=True)
        else:
            print(f"written to {save(peer, told.results)}", flush=True)
        code |= bool(peer.failed or short)
    return code


def default(option: str) -> object:
    """Return what an option is if it is not given."""
    return parser().get_default(option)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
