"""The verdict of a run: figures over all scenarios with their limits, and each scenario that misses a goal."""

from __future__ import annotations

from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
from evidence import Figure, Limit, limits
from msgspec.structs import replace

from proof.measures import Saving, highest, overload, saving
from proof.rows import CARPOOL, LAZY, ORACLE, TOLD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proof.rows import About, Kind, Proof, Rest, Stair

HERE = Path(__file__).parent
LIMITS = HERE / "limits.json"
QUICK_LIMITS = HERE / "limits_quick.json"
REASONS = HERE / "shortfalls.json"

CONSIDERED = (0.1, 0.6)
"""Loads, as shares of the capacity, between which savings are compared."""

UNHURRIED = 0.8
"""Load, as a share of the capacity, up to which each step by itself has to meet the SLO as the oracle does."""

BUSY = 100.0
"""Requests per second from which the first good setting has to be found in time."""

UTILIZED = 0.9
"""Utilization up to which forecasts have to be right: beyond, small errors of the batch latency decide."""


class Measure(NamedTuple):
    """One property of a contender in each scenario it was played in, or at each load of one."""

    title: str
    values: Callable[[Proof, str], dict[str, float]]
    """By scenario, the worst of it; scenarios in which there is nothing to measure are missing."""
    worst: Literal["least", "most"]
    show: Callable[[float], str]
    everybody: bool = True
    """Whether rivals are measured too."""


NEAR = 0.0005
"""Of the oracle's saving: so little less is as good as the best setting in hindsight."""

POOR = 0.9
"""Of the oracle's saving: less misses the goal of each scenario."""


class Savings(NamedTuple):
    """What a contender saves at every load of every scenario where there is something to save."""

    title: str
    loads: int
    near: int
    """Loads at which it saves as much as the oracle, but for ``NEAR``."""
    poor: int
    """Loads at which it saves less than ``POOR`` of what the oracle saves."""
    mean: float
    highest: float
    """Its worst highest load with few misses, as a share of the oracle's."""


Reasons = dict[str, dict[str, str | dict[str, str]]]
"""By scenario and measure: one for every seed, or one for each seed."""


EVERYWHERE = "all scenarios"
"""Stands for a scenario where a goal is about all of them together."""


class Shortfall(NamedTuple):
    """A scenario in which a goal is missed."""

    scenario: str
    """Its name, or ``EVERYWHERE``."""
    measure: str
    """Of ``MEASURES``; of all scenarios together, the figure's name."""
    value: float
    limit: Limit
    reason: str | None
    told: tuple[float | None, ...]
    """The value with true values given, in the order of ``rows.TOLD``; ``None`` where that was not played."""
    rest: Rest | None = None
    """What more time brings, if that was played and the measure is the saving."""


# ------------------------------------------------------------------------------------------------- by scenario


def highest_loads(proof: Proof, contender: str) -> dict[str, float]:
    """Return the highest loads with few misses, as shares of the oracle's."""
    own, best = stairs(proof, contender), stairs(proof, ORACLE)
    found = {}
    for about in proof.scenarios:
        ideal = top(about, best[about.name])
        if about.name in own and ideal:
            found[about.name] = top(about, own[about.name]) / ideal
    return found


def top(about: About, stair: Stair) -> float:
    """Return the highest load with few misses as a share of the capacity; the overload is no part of that."""
    return highest(list(zip(about.loads, stair.steps, strict=True))[:-1])


def savings(proof: Proof, contender: str) -> dict[str, dict[float, Saving]]:
    """Return, by scenario and load, what is saved wherever the oracle saves enough to compare."""
    own, best, lazy = (stairs(proof, name) for name in (contender, ORACLE, LAZY))
    found: dict[str, dict[float, Saving]] = {}
    for about in proof.scenarios:
        name = about.name
        if name not in own or name not in lazy:
            continue
        compared = {
            load: gain
            for load, mine, ideal, zero in zip(
                about.loads, own[name].steps, best[name].steps, lazy[name].steps, strict=True
            )
            if CONSIDERED[0] <= load <= CONSIDERED[1] and (gain := saving(mine, ideal, zero)) is not None
        }
        if compared:
            found[name] = compared
    return found


def saved(proof: Proof, contender: str) -> dict[str, float]:
    """Return the least share of the oracle's saving at any load."""
    return {name: min(gain.share for gain in compared.values()) for name, compared in savings(proof, contender).items()}


def least_saving(proof: Proof, scenario: str) -> float:
    """Return the load at which Carpool saves the least share of what the oracle does."""
    compared = savings(proof, CARPOOL)[scenario]
    return min(compared, key=lambda load: compared[load].share)


def by_minute(rest: Rest) -> str:
    """Write what more time brings, for people."""
    return ", ".join("-" if share is None else f"{share:.0%}" for share in rest.minutes)


def overloads(proof: Proof, contender: str) -> dict[str, float]:
    """Return goodputs at twice the capacity as shares of the contender's own peak."""
    return {name: overload(stair.steps[:-1], stair.steps[-1]) for name, stair in stairs(proof, contender).items()}


def step_misses(proof: Proof, contender: str) -> dict[str, float]:
    """Return by how much more of a step's requests missed than under the oracle, at moderate loads.

    The highest load does not show that: there, misses at different loads are averaged.
    """
    own, best = stairs(proof, contender), stairs(proof, ORACLE)
    return {
        about.name: max(
            (
                mine.misses - ideal.misses
                for load, mine, ideal in zip(about.loads, own[about.name].steps, best[about.name].steps, strict=True)
                if load <= UNHURRIED
            ),
            default=0.0,
        )
        for about in proof.scenarios
        if about.name in own
    }


def extra_misses(proof: Proof, contender: str) -> dict[str, float]:
    """Return by how much more of all requests missed than under the oracle, over the whole timeline."""
    return {each.scenario: each.misses - each.best for each in proof.timelines if each.contender == contender}


def recoveries(*kinds: Kind, least_rate: float = 0.0) -> Callable[[Proof, str], dict[str, float]]:
    """Return a measure of the longest time it took to adapt to such phases; ``inf``: it never did."""

    def measure(proof: Proof, contender: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for line in proof.timelines:
            if line.contender != contender:
                continue
            for phase, recovery in zip(proof.phases[line.scenario], line.phases, strict=True):
                if phase.kind in kinds and phase.rate >= least_rate:
                    took = inf if recovery.seconds is None else recovery.seconds
                    found[line.scenario] = max(found.get(line.scenario, 0.0), took)
        return found

    return measure


def flips(proof: Proof, contender: str) -> dict[str, float]:
    """Return how often a setting was left and come back to, within phases of constant load, together."""
    return {
        line.scenario: sum(recovery.flips for recovery in line.phases)
        for line in proof.timelines
        if line.contender == contender
    }


def hourly_flips(proof: Proof, _contender: str) -> dict[str, float]:
    """Return the same for an hour at constant load, which only Carpool was given."""
    return {hour.scenario: hour.flips for hour in proof.hours}


def forecast_errors(proof: Proof, _contender: str) -> dict[str, float]:
    """Return the greatest error of p99 forecasts with true batch latencies, relative, on devices not saturated."""
    found: dict[str, float] = {}
    for one in proof.forecasts:
        if one.utilization <= UTILIZED:
            found[one.scenario] = max(found.get(one.scenario, 0.0), abs(one.told / one.simulated - 1))
    return found


def learned_errors(proof: Proof, _contender: str) -> dict[str, float]:
    """Return the same for tuners that had to learn the batch latencies."""
    found: dict[str, float] = {}
    for one in proof.forecasts:
        if one.utilization <= UTILIZED and one.learned is not None and one.realized:
            found[one.scenario] = max(found.get(one.scenario, 0.0), abs(one.learned / one.realized - 1))
    return found


def rollbacks(proof: Proof, _contender: str) -> dict[str, float]:
    """Return how many requests it took until a bad setting was taken back."""
    return {one.scenario: inf if one.requests is None else one.requests for one in proof.rollbacks}


def _percent(value: float) -> str:
    return f"{value:.1%}" if value < inf else "never"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value < inf else "never"


def _count(value: float) -> str:
    return f"{value:.0f}" if value < inf else "never"


MEASURES = {
    "highest load": Measure("highest load, of the oracle's", highest_loads, "least", _percent),
    "saving": Measure("device time saved, of what the oracle saves", saved, "least", _percent),
    "step misses": Measure(
        "misses at 10 to 80 % of the capacity, beyond the oracle's", step_misses, "most", lambda value: f"{value:+.2%}"
    ),
    "extra misses": Measure("misses, beyond the oracle's", extra_misses, "most", lambda value: f"{value:+.2%}"),
    "first good": Measure("first good setting after", recoveries("start", least_rate=BUSY), "most", _seconds),
    "load rises": Measure("good again after the load rises", recoveries("load up"), "most", _seconds),
    "device changes": Measure("good again after t(b) changes", recoveries("device"), "most", _seconds),
    "overload": Measure("goodput at twice the capacity, of its peak", overloads, "least", _percent),
    "flips": Measure("flips", flips, "most", _count),
    "flips in an hour": Measure("flips in an hour", hourly_flips, "most", _count, everybody=False),
    "forecast": Measure("error of the p99 forecast, t(b) given", forecast_errors, "most", _percent, everybody=False),
    "rollback": Measure("requests until a bad setting is taken back", rollbacks, "most", _count, everybody=False),
}
"""By the name that limits and reasons go by."""


OF_STAIRS = ("highest load", "saving", "step misses", "overload")
"""Measures of rising loads, not of a scenario's own timeline."""


def show(name: str, value: float) -> str:
    """Write a value of a measure, or of a figure of one, for people."""
    return MEASURES[name.partition(", ")[0]].show(value)


def stairs(proof: Proof, contender: str) -> dict[str, Stair]:
    """Return a contender's load ramps by scenario."""
    return {stair.scenario: stair for stair in proof.stairs if stair.contender == contender}


# ------------------------------------------------------------------------------------------------- over all of them


def median_share(proof: Proof, contender: str, measure: str) -> float:
    """Return the median of one of the two shares: over scenarios; of savings, over every load of every scenario."""
    if measure == "saving":
        values = [gain.share for each in savings(proof, contender).values() for gain in each.values()]
    else:
        values = list(MEASURES[measure].values(proof, contender).values())
    return median(values) if values else 0.0


def worst(measure: str, values: Mapping[str, float]) -> float:
    """Return the worst over scenarios, at least one."""
    return (min if MEASURES[measure].worst == "least" else max)(values.values())


def beside_those_ahead(proof: Proof) -> list[Savings]:
    """Return Carpool's savings, and those of every rule that saves more at the median."""
    own = median_share(proof, CARPOOL, "saving")
    return [
        _savings_of(proof, each.name, each.title)
        for each in sorted(proof.contenders, key=lambda each: each.name != CARPOOL)
        if each.name == CARPOOL or median_share(proof, each.name, "saving") > own
    ]


def _savings_of(proof: Proof, contender: str, title: str) -> Savings:
    shares = [gain.share for one in savings(proof, contender).values() for gain in one.values()]
    return Savings(
        title,
        loads=len(shares),
        near=sum(share >= 1.0 - NEAR for share in shares),
        poor=sum(share < POOR for share in shares),
        mean=fmean(shares),
        highest=worst("highest load", highest_loads(proof, contender)),
    )


def figures(proof: Proof) -> dict[str, Figure]:
    """Return everything that has a limit, of Carpool, as far as it was measured: by the limit's name."""
    found: dict[str, tuple[float, int]] = {}
    for name, measure in MEASURES.items():
        if values := measure.values(proof, CARPOOL):
            found[f"{name}, worst"] = worst(name, values), len(values)
    rivals = [each.name for each in proof.contenders if each.name != CARPOOL]
    for share in ("highest load", "saving"):
        if f"{share}, worst" not in found:
            continue
        own = median_share(proof, CARPOOL, share)
        count = found[f"{share}, worst"][1]
        found[f"{share}, median"] = own, count
        if rivals:
            found[f"{share}, ahead"] = own - max(median_share(proof, rival, share) for rival in rivals), count
    return {name: Figure(name, value, count) for name, (value, count) in found.items()}


def missed(proof: Proof, bounds: Path) -> list[str]:
    """Say which figures are beyond their limit."""
    measured = figures(proof)
    return [
        f"{limit.name}: {measured[name].value:.4g}, {limit.direction} {limit.value:g} {limit.unit}. {limit.why}"
        for name, limit in limits(bounds).items()
        if name in measured and not limit.holds(measured[name].value)
    ]


def shortfalls(proof: Proof, bounds: Path = LIMITS, reasons: Path = REASONS) -> list[Shortfall]:
    """Return every scenario in which Carpool misses a goal, with the reason as far as one is known.

    First those that all scenarios miss together: a median, a rule that is ahead.
    """
    goals = limits(bounds)
    known = msgspec.json.decode(reasons.read_bytes(), type=Reasons)
    together = [
        Shortfall(
            EVERYWHERE, name, figure.value, goals[name], _reason(known, EVERYWHERE, name, proof.seed), (None, None)
        )
        for name, figure in figures(proof).items()
        if name in goals and not name.endswith(", worst") and not goals[name].reaches(figure.value)
    ]
    rests = {each.scenario: each for each in proof.rests}
    found = []
    for name, measure in MEASURES.items():
        limit = goals.get(f"{name}, worst")
        if limit is None:
            continue
        found += [
            Shortfall(
                scenario,
                name,
                value,
                limit,
                _reason(known, scenario, name, proof.seed),
                _with_true_values(proof, scenario, name),
                rests.get(scenario) if name == "saving" else None,
            )
            for scenario, value in measure.values(proof, CARPOOL).items()
            if not limit.reaches(value)
        ]
    return [*together, *sorted(found, key=lambda each: each.scenario)]


def _reason(known: Reasons, scenario: str, name: str, seed: int) -> str | None:
    found = known.get(scenario, {}).get(name)
    return found.get(str(seed)) if isinstance(found, dict) else found


def _with_true_values(proof: Proof, scenario: str, measure: str) -> tuple[float | None, ...]:
    """Return a measure of Carpool with true values, if that was played and the measure is of the load ramp."""
    if measure not in OF_STAIRS:
        return None, None
    others = [each for each in proof.stairs if each.scenario == scenario and each.contender != CARPOOL]
    only = replace(proof, scenarios=[each for each in proof.scenarios if each.name == scenario])
    found = {each.contender: replace(each, contender=CARPOOL) for each in proof.told if each.scenario == scenario}
    return tuple(
        MEASURES[measure].values(replace(only, stairs=[*others, found[name]]), CARPOOL).get(scenario)
        if name in found
        else None
        for name in TOLD
    )
