"""Plays the contenders in one scenario: rows of data, equal for equal seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from proof import alone, courses, measures, oracle, true_values
from proof import scenario as suite
from proof.measures import TOLERATED, Tally, add, tally
from proof.ourselves import CARPOOL as OURSELVES
from proof.ourselves import Carpool
from proof.rivals import RIVALS
from proof.rows import (
    CARPOOL,
    COURSE,
    LAZY,
    ORACLE,
    About,
    Forecast,
    Phase,
    Recovery,
    Rest,
    Stair,
    Timeline,
)
from proof.world import Stretch, play

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.simulation.outcome import Outcome, Setting
    from proof.scenario import Scenario
    from proof.world import Rival

CONTENDERS: dict[str, Rival] = {CARPOOL: OURSELVES, **RIVALS}

RANKS = 3
"""How many of the best settings of each load are played for the oracle."""

RESTED = 5
"""Minutes for which Carpool runs alone at a load at which it saves too little."""

# ------------------------------------------------------------------------------------------------- the references


class Reference(Struct, frozen=True):
    """The reference for every contender in a scenario."""

    about: About
    phases: list[Phase]
    stair: Stair
    """The oracle's."""
    timeline: Timeline
    """The oracle's."""
    best: list[Tally]
    """The oracle's, every second of the timeline."""
    lazy: list[Tally]
    """Zero-wait's."""
    lazy_steps: tuple[Tally, ...]
    """Zero-wait's, of the load ramp."""


def refer(scenario: Scenario, seed: int) -> Reference:
    """Play the oracle and zero-wait: the few best settings for each load, and of these what was best in the event."""
    capacity = oracle.capacity(scenario)
    phases = courses.phases(scenario, capacity)
    course = timeline_course(phases)
    stair = courses.stair(scenario, capacity)
    climbed = [
        [tally(outcome.summary(step.start, step.stop)) for step in stair.steps]
        for outcome in _oracles(scenario, stair.course, seed)
    ]
    steps = [
        min((one[number] for one in climbed), key=_thriftiest if step.load in courses.LOW else _surest)
        for number, step in enumerate(stair.steps)
    ]
    seconds = [measures.seconds_of(outcome) for outcome in _oracles(scenario, course, seed)]
    best: list[Tally] = []
    for phase in phases:
        parts = [_part(one, phase) for one in seconds]
        chosen = min(parts, key=lambda part: _thriftiest(add(part)))
        best += chosen
    return Reference(
        about=About(
            name=scenario.name,
            why=scenario.why,
            profile=scenario.profile,
            slo=float(scenario.slo),
            arrivals=_words(scenario),
            replicas=scenario.replicas,
            capacity=round(capacity, 3),
            loads=courses.LOADS,
        ),
        phases=phases,
        stair=Stair(scenario.name, ORACLE, tuple(steps)),
        timeline=Timeline(
            scenario.name,
            ORACLE,
            misses=round(add(best).misses, 6),
            best=round(add(best).misses, 6),
            phases=tuple(Recovery(0.0, 0, 0) for _ in phases),
            course=_course(best),
        ),
        best=best,
        lazy=seconds[-1],
        lazy_steps=tuple(climbed[-1]),
    )


def timeline_course(phases: Sequence[Phase]) -> tuple[Stretch, ...]:
    """Return the course of a scenario's own phases."""
    return tuple(Stretch(phase.seconds, phase.rate, phase.device) for phase in phases)


def _oracles(scenario: Scenario, course: Sequence[Stretch], seed: int) -> list[Outcome]:
    """Play a course with the best settings for each stretch, with the second best ones, and so on; zero-wait last.

    That is a point of the grid, too: on a few minutes of a recorded load it may do better than what is best over many.
    """
    makers = [*oracle.makers(scenario, course)[:RANKS], CONTENDERS[LAZY].maker]
    return [play(scenario, maker, course, seed).outcome for maker in makers]


def _thriftiest(each: Tally) -> tuple[float, float]:
    """Order by device time those that miss few; behind them, and where nothing is saved, by misses."""
    return (0, each.device_time) if each.misses <= TOLERATED else (1, each.misses)


def _surest(each: Tally) -> float:
    return each.misses


# ------------------------------------------------------------------------------------------------- every contender


class Rows(Struct, frozen=True):
    """What one contender in one scenario leaves behind."""

    stair: Stair
    timeline: Timeline
    forecasts: list[Forecast] = []


def contend(scenario: Scenario, reference: Reference, name: str, seed: int) -> Rows:
    """Play a contender at rising loads and in the scenario's timeline."""
    steps, own, changes, forecasts = _played(scenario, reference, name, seed)
    found = recoveries(reference, own, changes)
    timeline = Timeline(
        scenario.name,
        name,
        misses=round(add(own).misses, 6),
        best=reference.timeline.misses,
        phases=tuple(found),
        course=_course(own),
    )
    return Rows(Stair(scenario.name, name, steps), timeline, forecasts)


def recoveries(
    reference: Reference, own: Sequence[Tally], changes: Sequence[tuple[float, int, Setting]]
) -> list[Recovery]:
    """Return how a contender recovered in each phase; ``own``: its timeline, second by second."""
    found = []
    for phase in reference.phases:
        start, stop = int(phase.start), int(phase.start + phase.seconds)
        took = measures.converged(own, reference.best, reference.lazy, start, stop)
        path = measures.settings(changes, phase.start, phase.start + phase.seconds)
        found.append(
            Recovery(
                seconds=None if took is None else float(took),
                requests=sum(each.stayed for each in own[start : stop if took is None else start + took]),
                flips=measures.flips(path),
            )
        )
    return found


def explain(scenario: Scenario, name: str, seed: int) -> Stair:
    """Play Carpool at rising loads, with true values that it has to learn otherwise (``name``: of ``rows.TOLD``)."""
    stair = courses.stair(scenario, oracle.capacity(scenario))
    outcome = play(scenario, true_values.maker(stair.course, name), stair.course, seed).outcome
    steps = tuple(tally(outcome.summary(step.start, step.stop)) for step in stair.steps)
    return Stair(scenario.name, name, steps)


def rest(scenario: Scenario, load: float, seed: int) -> Rest:
    """Run Carpool at one load, a share of the capacity, for ``RESTED`` minutes."""
    course = (Stretch(60.0 * RESTED, load * oracle.capacity(scenario)),)
    ideals = _oracles(scenario, course, seed)
    own = play(scenario, OURSELVES.maker, course, seed).outcome
    minutes = []
    for minute in range(RESTED):
        mine, lazy, *others = (
            tally(outcome.summary(60.0 * minute, 60.0 * (minute + 1))) for outcome in (own, ideals[-1], *ideals)
        )
        gain = measures.saving(mine, min(others, key=_thriftiest), lazy)
        minutes.append(None if gain is None else round(gain.share, 4))
    return Rest(scenario.name, load, tuple(minutes))


class _Played(NamedTuple):
    steps: tuple[Tally, ...]
    """Of the load ramp."""
    seconds: list[Tally]
    """Of the timeline."""
    changes: Sequence[tuple[float, int, Setting]]
    """Of settings, in the timeline."""
    forecasts: list[Forecast]


def _played(scenario: Scenario, reference: Reference, name: str, seed: int) -> _Played:
    if name == LAZY:
        return _Played(reference.lazy_steps, reference.lazy, [], [])  # the reference has been through both already
    maker = CONTENDERS[name].maker
    stair = courses.stair(scenario, oracle.capacity(scenario))
    climbed = play(scenario, maker, stair.course, seed)
    steps = tuple(tally(climbed.outcome.summary(step.start, step.stop)) for step in stair.steps)
    forecasts = []
    if isinstance(climbed.contender, Carpool):
        forecasts = alone.forecasts(scenario, stair, climbed.contender, seed)
    outcome = play(scenario, maker, timeline_course(reference.phases), seed).outcome
    return _Played(steps, measures.seconds_of(outcome), outcome.changes, forecasts)


def _part(seconds: list[Tally], phase: Phase) -> list[Tally]:
    return seconds[int(phase.start) : int(phase.start + phase.seconds)]


def _course(seconds: Sequence[Tally]) -> tuple[float, ...]:
    return tuple(round(add(seconds[at : at + COURSE]).misses, 4) for at in range(0, len(seconds), COURSE))


def _words(scenario: Scenario) -> str:
    match scenario.arrivals:
        case suite.Poisson():
            return "Poisson"
        case suite.Gamma(cv=cv):
            return f"gamma, CV {cv:g}"
        case suite.OnOff(on=on, off=off):
            return f"on {on}, off {off}"
        case suite.Diurnal(swing=swing, period=period):
            return f"sine of {swing:.0%} every {period}"
        case _:
            return "Azure conversations, 2023"
