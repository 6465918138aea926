"""`make ablation`: what each rule of the tuner is worth, by what is lost without it.

Carpool climbs the proof's rising loads in some scenarios, with three seeds: once as it is, and once without each rule.
Compared are the highest load that meets the SLO and the device time saved, both as shares of the oracle's; with
``--phases`` also how it comes to terms with the scenario's own phases of load and device: returns to a setting just
left, and seconds until all is well again. A rule that moves none of these by more than the seeds differ, and guards
against nothing that the proof leaves out, is to be deleted.

Exit codes: 0, played; 130, interrupted, and then nothing was written.
"""

from __future__ import annotations

import argparse
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import compiled
import msgspec
from evidence import Machine, commit, machine, today
from msgspec import Struct
from proof import courses, experiments, kept, measures, oracle, verdict
from proof import scenario as suite
from proof.experiments import CONTENDERS
from proof.measures import tally
from proof.rows import CARPOOL
from proof.world import play

from carpool.batching.requests import Estimate
from carpool.forecasting import forecaster
from carpool.forecasting.accuracy import ForecastCheck
from carpool.forecasting.forecast import forecast
from carpool.forecasting.forecaster import Forecaster, Situation
from carpool.learning import arrivals, concurrency, latency_model, load
from carpool.learning.batchable_share import Sharing
from carpool.learning.latency_model import LatencyLearner
from carpool.learning.load import Load
from carpool.learning.miss_test import MissTest
from carpool.learning.size_limit import SizeLimit
from carpool.simulation import simulator
from carpool.tuning import candidates, exploration, guards, moves, objective, plan, tuner
from carpool.tuning.belief import Belief
from carpool.tuning.exploration import Exploration
from carpool.tuning.guards import SafetyMargin
from carpool.tuning.tuner import Tuner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from proof.experiments import Reference

    from carpool.forecasting.forecaster import Assessment
    from carpool.learning.latency_model import ServiceTime
    from carpool.policy.parameters import Parameters
    from carpool.tuning.moves import Scene

RESULTS = Path(__file__).parent / "results" / "ablation.json"

SEEDS = (1, 3, 7)

SCENARIOS = (
    "bert-base-t4-noisy",
    "bert-large-a100-on-off",
    "bert-large-a100-overload",
    "ocr-1-core-bursty",
    "resnet50-t4-throttled",
    "synthetic-4-executors-lognormal",
    "tiles-32-tight",
)
"""Noise, bursts, overload, a small CPU, a model that slows down, server concurrency 4, steps in batch latency."""

LONG_KNOWN, PAUSES = "resnet50-t4-throttled, long known", "bert-base-t4, pauses"
"""A device that becomes half as fast after ten minutes; one that takes eight times as long for one batch in 300."""

PAUSED, PAUSE = 1 / 300, 8.0

AS_IT_IS = "as it is"


class Rule(NamedTuple):
    """One rule, and how to do without it: what replaces attributes, by their owner and name."""

    what: str
    without: Mapping[tuple[Any, str], Any]


def _never(*_args: object, **_options: object) -> bool:
    return False


def _always(*_args: object, **_options: object) -> bool:
    return True


def _forgetting(*args: Any, **options: Any) -> Scene:  # noqa: ANN401 - as Scene takes them
    """Forget which settings were left."""
    return moves.Scene(*args, **options)._replace(left=frozenset())


def _choosing(make: Callable[..., None]) -> Callable[..., None]:
    """Choose among all settings, those left before included."""

    def without(self: plan.Plan, *args: object) -> None:
        make(self, *args[:-2], (), args[-1])

    return without


def _overloaded(self: Tuner) -> bool:
    """Refuse only where no setting meets the SLO, or more waits than can be served in time."""
    choice = self.plan.choice
    return self._backlogged() or (choice is not None and not choice.efficient.holds_now)


def _two_largest(
    sizes: Sequence[int], means: Sequence[float], lowers: Sequence[float], uppers: Sequence[float]
) -> tuple[float, float]:
    """Draw the line beyond the largest size through that and the next one an octave below, or farther."""
    other = max((index for index, size in enumerate(sizes) if 2 * size <= sizes[-1]), default=0)
    run = sizes[-1] - sizes[other]
    errors = [(upper - lower) / 2 for lower, upper in zip(lowers, uppers, strict=True)]
    return (means[-1] - means[other]) / run, (errors[-1] + errors[other]) / run


def _mean_loss(self: Forecaster, parameters: Parameters, factor: float = 1.0) -> float:
    """Compare losses at the mean batch latency."""
    situation, played = self.situation, self.load(factor, count=self._lasting(forecaster.LASTING_LOSS))
    return forecast(played, situation.service, parameters, situation.target, shed=True).miss_fraction


def _one_by_one(quantile: float, **_options: object) -> MissTest:
    """Take each miss as evidence of its own."""
    return MissTest(quantile)


def _one_ratio(*args: Any, **options: Any) -> latency_model._Interval:  # noqa: ANN401 - as the record takes them
    """Compare sizes never measured with the line between their neighbours, too."""
    interval = _INTERVAL(*args, **options)
    return interval._replace(doubtless=interval.ratio)


_INTERVAL = latency_model._Interval  # noqa: SLF001 - left out


def _constant(name: str, value: object) -> dict[tuple[Any, str], Any]:
    """Replace a constant wherever it was imported."""
    modules = (forecaster, candidates, exploration, moves, objective, plan, tuner)
    return {(module, name): value for module in modules if hasattr(module, name)}


def _exploring(explore: Callable[..., Iterator[Parameters]], *, sizes: bool) -> Callable[..., Iterator[Parameters]]:
    """Leave out of what ``explore`` yields the sizes, or more batches in flight."""

    def those(best: Assessment, hopeful: ServiceTime) -> Iterator[Parameters]:
        flights = best.parameters.max_in_flight
        return (point for point in explore(best, hopeful) if (point.max_in_flight > flights) is sizes)

    return those


RULES: dict[str, Rule] = {
    AS_IT_IS: Rule("all rules", {}),
    "pass-through": Rule("where batching saves too little, requests pass one by one", _constant("PASSING_LOAD", -1.0)),
    "test of misses": Rule(
        "after more late requests than forecast the setting is left, and forecasts plan with a shorter target",
        {(MissTest, "observe"): _never},
    ),
    "forecast check": Rule(
        "while answers are slower than forecast nothing is held", {(ForecastCheck, "observe"): _never}
    ),
    "unmeasured sizes": Rule(
        "a size never measured is explored where it may save 5 %",
        {(exploration, "_candidates"): _exploring(exploration._candidates, sizes=True)},  # noqa: SLF001 - left out
    ),
    "more in flight": Rule(
        "more batches in flight than ever seen are explored",
        {(exploration, "_candidates"): _exploring(exploration._candidates, sizes=False)},  # noqa: SLF001 - left out
    ),
    "error budget": Rule(
        "what may make requests late is explored only from misses that were not made",
        {(Exploration, "_is_bearable"): _always},
    ),
    "smoothing": Rule(
        "the time of a size is drawn towards the line through its neighbours",
        {(latency_model, "smoothed"): lambda _rows, means, _counts, _noise: list(means)},
    ),
    "outliers": Rule(
        "pauses of the host are not learned from",
        {(latency_model, "_without_outliers"): lambda sample, _noise: sample},
    ),
    "change of the model": Rule(
        "when three observations agree, all sizes move at once", {(LatencyLearner, "_moved"): lambda _: 1.0}
    ),
    "change of the load": Rule("after a jump what was before is forgotten", {(Load, "_jumped"): lambda _: 0.0}),
    "limited sizes": Rule("forecasts know when batches are kept small", {(SizeLimit, "observe"): _never}),
    "batchable share": Rule("forecasts know how many can share a batch", {(Sharing, "observe"): _never}),
    "misses near the budget": Rule(
        "those are forecast from up to eight times as many requests", {(Forecaster, "samples"): 1}
    ),
    "no vain wait": Rule(
        "there is no wait that gathers no more", {(candidates.Grid, "_without_vain_wait"): candidates.Grid.at}
    ),
    "settings left before": Rule(
        "a setting left at this load is not chosen again, and the way back needs a better reason",
        {(tuner, "Scene"): _forgetting, (plan.Plan, "make"): _choosing(plan.Plan.make)},
    ),
    "always refusing": Rule(
        "requests that would be late are always refused, not only beyond the capacity",
        {(Tuner, "_sheds_late"): _overloaded},
    ),
    "bursts": Rule(
        "arrivals that come in bursts are forecast as such", {(load, "fitted"): lambda rate, *_: arrivals.Poisson(rate)}
    ),
    "bursts that last": Rule(
        "bursts longer than a window have rates of their own", {(arrivals, "_modulated"): lambda *_: None}
    ),
    "gaps": Rule(
        "how bursty arrivals are is seen from the gaps between them",
        {(arrivals.WindowCounts, "cv"): property(lambda _: None)},
    ),
    "long stretches": Rule(
        "a change that bursts hide in a second is looked for in up to 32", {(load, "LONGEST_STRETCH"): load.RECENT}
    ),
    "another dispersion": Rule(
        "arrivals that become burstier, or less so, are another load", {(Load, "_spread_moved"): _never}
    ),
    "more memory": Rule(
        "a load of few arrivals, or of bursts, is remembered for longer than 30 s",
        {(load, "PRECISE"): 0.0, (load, "ENOUGH_ARRIVALS"): 0},
    ),
    "line of many sizes": Rule(
        "as many of the largest sizes as agree on it show the slope beyond them",
        {(latency_model, "_tail"): _two_largest},
    ),
    "wild batches": Rule(
        "one or two batches four times as slow as expected are left out", {(latency_model, "_WILD"): float("inf")}
    ),
    "steps": Rule(
        "what a step between two measured sizes explains is no change of the model",
        {(latency_model, "_Interval"): _one_ratio},
    ),
    "means of equal batches": Rule(
        "server concurrency is judged by means, too, and not only by the spread",
        {(concurrency, "_outlies"): _never, (concurrency, "_DOUBTFUL"): float("inf")},
    ),
    "answers in order": Rule(
        "where answers come in order, batches are taken to be computed one at a time",
        {(concurrency, "_is_in_order"): _never},
    ),
    "gains beyond doubt": Rule(
        "a saving has to exceed what is unknown of batch latency", {(moves, "width"): lambda *_: 0.0}
    ),
    "losses at the upper confidence": Rule(
        "beyond the capacity the least known size does not seem best by chance", {(Forecaster, "loss"): _mean_loss}
    ),
    "equal device time": Rule("of settings that cost as much the quickest is taken", {(objective, "LEAST"): 0.0}),
    "waits beyond the capacity": Rule(
        "where several batches are computed at once, a short wait keeps one of them free",
        {(candidates.Grid, "held"): lambda *_: []},
    ),
    "higher load": Rule(
        "at 1.25 times the load candidates are looked for again", {(exploration, "RISE"): float("inf")}
    ),
    "flat beyond": Rule(
        "a size being measured is taken to be as fast as the next smaller one",
        {(Estimate, "flat_beyond"): lambda self, *_: self},
    ),
    "misses in bursts": Rule("misses of one burst are one piece of evidence", {(guards, "MissTest"): _one_by_one}),
    "forgiven misses": Rule(
        "after 300 s without misses the margin is one step wider again", {(SafetyMargin, "is_over"): _never}
    ),
    "batches of copies": Rule(
        "sizes that the load does not fill are measured with copies", {(plan, "to_measure"): lambda *_: ()}
    ),
    "rows by share": Rule("forecasts know how many rows each request has", {(Belief, "_count_rows"): lambda *_: None}),
    "out of reach": Rule(
        "where no request can be in time, the mean is minimized", {(Situation, "is_out_of_reach"): False}
    ),
    "crowded device": Rule("beside other models each batch is all that waits", {(Situation, "is_crowded"): False}),
}


class Row(Struct, frozen=True):
    """One climb: shares of the oracle's; ``saved`` is the least at any load, ``None`` where nothing can be saved."""

    rule: str
    scenario: str
    seed: int
    highest: float
    saved: float | None
    flips: int | None = None
    """Over all phases; ``None``: they were not played."""
    late: float | None = None
    """Seconds until all was well again after each change of load or device, all of a phase where that never was so,
    as a share of the phases' seconds."""
    commit: str = ""
    """What it was played on; empty: the record's own."""


class Results(Struct, frozen=True):
    """All climbs, and what they were played on, where a row does not say."""

    commit: str
    date: str
    machine: Machine
    rows: list[Row]


class _Pausing(Random):
    """Noise of a device that pauses now and then, as collectors of garbage and shared hosts do."""

    def gammavariate(self, alpha: float, beta: float) -> float:
        """Draw, and seldom a pause."""
        return super().gammavariate(alpha, beta) * (PAUSE if self.random() < PAUSED else 1.0)


def scenario_of(name: str) -> suite.Scenario:
    """Return a scenario of the proof, or one of the two that are only here."""
    (scenario,) = [each for each in suite.load_all() if each.name == name.partition(",")[0]]
    if name == LONG_KNOWN:
        load = 0.45
        phases = (suite.Phase(600, load), suite.Phase(60, load, 2.0), suite.Phase(60, load))
        return msgspec.structs.replace(scenario, phases=phases)
    return scenario


def climb(task: tuple[str, str, int, bool]) -> Row:
    """Play one scenario's rising loads, and its phases if wanted, without one rule."""
    name, scenario_name, seed, phases = task
    scenario = scenario_of(scenario_name)
    reference = kept.refer(scenario, seed)
    stair = courses.stair(scenario, oracle.capacity(scenario))
    changes = dict(RULES[name].without)
    if scenario_name == PAUSES:
        changes[simulator, "Random"] = _Pausing
    before = {(owner, attribute): getattr(owner, attribute) for owner, attribute in changes}
    try:
        for (owner, attribute), value in changes.items():
            setattr(owner, attribute, value)
        outcome = play(scenario, CONTENDERS[CARPOOL].maker, stair.course, seed).outcome
        recoveries = _recoveries(scenario, reference, seed) if phases else None
    finally:
        for (owner, attribute), value in before.items():
            setattr(owner, attribute, value)
    own = tuple(tally(outcome.summary(step.start, step.stop)) for step in stair.steps)
    low, high = verdict.CONSIDERED
    gains = [
        gain.share
        for load, mine, best, lazy in zip(
            reference.about.loads, own, reference.stair.steps, reference.lazy_steps, strict=True
        )
        if low <= load <= high and (gain := measures.saving(mine, best, lazy)) is not None
    ]
    ideal = measures.highest(list(zip(reference.about.loads, reference.stair.steps, strict=True))[:-1])
    top = measures.highest(list(zip(reference.about.loads, own, strict=True))[:-1])
    row = Row(name, scenario_name, seed, round(top / ideal, 4), round(min(gains), 4) if gains else None)
    if recoveries is None:
        return row
    flips, late = recoveries
    return msgspec.structs.replace(row, flips=flips, late=round(late, 4))


def _recoveries(scenario: suite.Scenario, reference: Reference, seed: int) -> tuple[int, float]:
    """Play the scenario's phases; return the flips in them, and the share of their time until all was well."""
    course = experiments.timeline_course(reference.phases)
    outcome = play(scenario, CONTENDERS[CARPOOL].maker, course, seed).outcome
    found = experiments.recoveries(reference, measures.seconds_of(outcome), outcome.changes)
    lasted = [phase.seconds for phase in reference.phases]
    until = [seconds if one.seconds is None else one.seconds for one, seconds in zip(found, lasted, strict=True)]
    return sum(one.flips for one in found), sum(until) / sum(lasted)


def table(rows: list[Row]) -> str:
    """Write what is lost without each rule, in points, as Markdown: the mean of all climbs, and the worst scenario."""
    base = {(row.scenario, row.seed): row for row in rows if row.rule == AS_IT_IS}
    lines = [
        "| without | highest load: mean | worst | saving: mean | worst | most in | flips | not well |",
        "|---|---:|---:|---:|---:|---|---:|---:|",
    ]
    for name, rule in RULES.items():
        own = [row for row in rows if row.rule == name]
        if name == AS_IT_IS or not own:
            continue
        high, saved = _moves(own, base, "highest"), _moves(own, base, "saved")
        both = {scenario: abs(high[scenario]) + abs(saved.get(scenario, 0.0)) for scenario in high}
        most = max(both, key=both.__getitem__)
        figures = " | ".join(
            f"{value:+.1f}" for moves in (high, saved) for value in (fmean(moves.values()), min(moves.values()))
        )
        phases = _phases(own, base)
        lines.append(f"| {name}: {rule.what} | {figures} | {most if both[most] >= NOTICEABLE else '-'} | {phases} |")
    spread = ", ".join(f"{_spread(list(base.values()), field):.1f}" for field in ("highest", "saved"))
    return "\n".join([*lines, "", f"Seeds differ by (standard deviation, points): {spread}."])


def _phases(own: list[Row], base: Mapping[tuple[str, int], Row]) -> str:
    """Write how many flips more there are, and by how many points the time until all is well moves."""
    both = [(row, base[row.scenario, row.seed]) for row in own]
    flips = [one.flips - other.flips for one, other in both if one.flips is not None and other.flips is not None]
    late = [one.late - other.late for one, other in both if one.late is not None and other.late is not None]
    return f"{sum(flips):+d} | {100 * fmean(late):+.1f}" if flips and late else " | "


NOTICEABLE = 0.05
"""Points below which a scenario is not named."""


def _moves(own: list[Row], base: Mapping[tuple[str, int], Row], field: str) -> dict[str, float]:
    """Return by how many points each scenario's figure moves, as a mean over the seeds."""
    moves: dict[str, list[float]] = {}
    for row in own:
        mine, theirs = getattr(row, field), getattr(base[row.scenario, row.seed], field)
        if mine is not None and theirs is not None:
            moves.setdefault(row.scenario, []).append(100 * (mine - theirs))
    return {scenario: fmean(values) for scenario, values in moves.items()}


def _spread(rows: list[Row], field: str) -> float:
    """Return how much equal scenarios differ by their seeds, in points: a pooled standard deviation."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if (value := getattr(row, field)) is not None:
            groups.setdefault(row.scenario, []).append(100 * value)
    spreads = [variance(values) for values in groups.values() if len(values) > 1]
    return fmean(spreads) ** 0.5 if spreads else 0.0


def _order(row: Row) -> tuple[int, str, int]:
    return [*RULES].index(row.rule), row.scenario, row.seed


def _kept(played: Results) -> Results:
    """Put what was played into the record, each row with what it was played on."""
    old = msgspec.json.decode(RESULTS.read_bytes(), type=Results)
    rows = {_order(row): row for row in old.rows if row.rule in RULES}
    for row in played.rows:
        rows[_order(row)] = msgspec.structs.replace(row, commit=played.commit)
    return msgspec.structs.replace(old, rows=[rows[key] for key in sorted(rows)])


def main() -> int:
    """Play what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", action="append", choices=[*RULES][1:], help="only this rule; may be given again")
    parser.add_argument("--scenario", action="append", help="only this one, of all of the proof; may be given again")
    parser.add_argument("--seed", action="append", type=int, help="only this one; may be given again")
    parser.add_argument("--phases", action="store_true", help="play the scenarios' phases too: twice the time")
    parser.add_argument("--keep", action="store_true", help="put what is played into the results kept, part as it is")
    parser.add_argument("--table", action="store_true", help="only print the table of the results kept")
    options = parser.parse_args()
    known = [*(each.name for each in suite.load_all()), LONG_KNOWN, PAUSES]
    if unknown := sorted({*(options.scenario or ())} - {*known}):
        parser.error(f"no scenario {', '.join(unknown)}; there are: {'; '.join(known)}")
    if options.table:
        print(table(msgspec.json.decode(RESULTS.read_bytes(), type=Results).rows))
        return 0
    compiled.start_again()
    rules = [AS_IT_IS, *options.without] if options.without else [*RULES]
    tasks = [
        (rule, scenario, seed, options.phases)
        for seed in options.seed or SEEDS
        for scenario in options.scenario or SCENARIOS
        for rule in rules
    ]
    rows: list[Row] = []
    measured, began = commit(), time.monotonic()
    try:
        with get_context("spawn").Pool(2) as pool:
            for row in pool.imap_unordered(climb, tasks):
                rows.append(row)
                left = (time.monotonic() - began) / len(rows) * (len(tasks) - len(rows))
                print(f"[{len(rows)}/{len(tasks)}, about {left:.0f} s left] {row}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was written", file=sys.stderr)
        return 130
    rows.sort(key=_order)
    results = Results(measured, today(), machine(), rows)
    if options.keep:
        results = _kept(results)
    if options.keep or not (options.without or options.scenario or options.seed):
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    print(table(results.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
