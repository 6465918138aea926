"""One contender, or Carpool alone, through one experiment in one scenario: rows of data, equal for equal seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from carpool import arrivals
from carpool.outcome import Setting
from carpool.policy import Duration, Parameters
from carpool.probation import Probation
from carpool.tuner import INTERVAL, TOO_LATE
from carpool.tuning import Assessor, Situation
from proof import courses, measures, oracle
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
    Hour,
    Phase,
    Recovery,
    Rollback,
    Stair,
    Timeline,
)
from proof.world import Stretch, estimate, play

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from carpool.outcome import Outcome
    from carpool.statistics import ModelStats, Stats
    from proof.scenario import Scenario
    from proof.world import Knowledge, Maker, Rival

CONTENDERS: dict[str, Rival] = {CARPOOL: OURSELVES, **RIVALS}

HOUR = 3600.0
HOUR_LOADS = (0.2, 0.5)
"""Loads between which an hour is played, the highest that stays below:"""
HOUR_RATE = 200.0
"""Requests per second, so that an hour takes some ten seconds."""

RANKS = 3
"""How many of the best settings of each load are played for the oracle."""

FORECAST_LOADS = (0.2, 0.5, 0.8)
FORECAST_REQUESTS = 60_000
"""Of which 600 lie beyond the p99: it is known to within about 1 %."""

ROLLBACK_RATE = 400.0
"""Requests per second: what a guard that looks every half second can be held to 310 requests at."""
PROVEN = 30.0
"""Seconds that the good setting is given."""
PUSHED = 20.0
"""Seconds that the bad one is given, if nobody takes it back."""
BAD = 0.2
"""Share of requests that a setting has to miss to be called bad."""


def fixed(setting: Setting) -> Maker:
    """Make a contender of one setting."""
    return lambda *_: oracle.Fixed(setting)


def best_setting(scenario: Scenario, rate: float) -> Setting:
    """Return what is best on the oracle's own arrivals."""
    point = oracle.known()[scenario.name].level(rate).points[0]
    return Setting(point.parameters, estimate(scenario.service(), scenario.limits.max_batch), point.shed)


# ------------------------------------------------------------------------------------------------- the references


class Reference(Struct, frozen=True):
    """What every contender in a scenario is measured by."""

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
    """Put a contender through rising loads and through the scenario's timeline."""
    maker = CONTENDERS[name].maker
    stair = courses.stair(scenario, oracle.capacity(scenario))
    climbed = play(scenario, maker, stair.course, seed)
    steps = tuple(tally(climbed.outcome.summary(step.start, step.stop)) for step in stair.steps)
    forecasts = []
    if isinstance(climbed.contender, Carpool):
        forecasts = _forecasts(scenario, stair, climbed.contender, seed)
    played = play(scenario, maker, timeline_course(reference.phases), seed).outcome
    own = measures.seconds_of(played)
    recoveries = []
    for phase in reference.phases:
        start, stop = int(phase.start), int(phase.start + phase.seconds)
        took = measures.converged(own, reference.best, reference.lazy, start, stop)
        path = measures.settings(played.changes, phase.start, phase.start + phase.seconds)
        recoveries.append(
            Recovery(
                seconds=None if took is None else float(took),
                requests=sum(each.stayed for each in own[start : stop if took is None else start + took]),
                flips=measures.flips(path),
            )
        )
    timeline = Timeline(
        scenario.name,
        name,
        misses=round(add(own).misses, 6),
        best=reference.timeline.misses,
        phases=tuple(recoveries),
        course=_course(own),
    )
    return Rows(Stair(scenario.name, name, steps), timeline, forecasts)


def _part(seconds: list[Tally], phase: Phase) -> list[Tally]:
    return seconds[int(phase.start) : int(phase.start + phase.seconds)]


def _course(seconds: Sequence[Tally]) -> tuple[float, ...]:
    return tuple(round(add(seconds[at : at + COURSE]).misses, 4) for at in range(0, len(seconds), COURSE))


# ------------------------------------------------------------------------------------------------- Carpool alone


def hour(scenario: Scenario, seed: int) -> Hour | None:
    """Leave Carpool alone with a constant load for an hour; ``None`` where that would be too low a load, or none is."""
    capacity = oracle.capacity(scenario)
    load = min(HOUR_LOADS[1], HOUR_RATE / capacity)
    if load < HOUR_LOADS[0] or not isinstance(scenario.arrivals, suite.Poisson | suite.Gamma):
        return None
    rate = load * capacity
    outcome = play(scenario, OURSELVES.maker, [Stretch(HOUR, rate)], seed).outcome
    path = measures.settings(outcome.changes, 0.0, HOUR)
    misses = outcome.summary().miss_fraction
    return Hour(scenario.name, round(load, 4), round(rate, 3), round(misses, 6), len(path) - 1, measures.flips(path))


def _forecasts(scenario: Scenario, stair: courses.Stair, contender: Carpool, seed: int) -> list[Forecast]:
    """Compare p99s with what the tuner forecasts, given the true t(b), and where it came to by itself on the way."""
    if scenario.replicas > 1 or scenario.lengths is not None or scenario.stalls is not None:
        return []  # the forecast is of one replica and one bucket, on a host that runs
    found = []
    for step in stair.steps:
        if step.load not in FORECAST_LOADS:
            continue
        rate = step.load * oracle.capacity(scenario)
        process: arrivals.Poisson | arrivals.Gamma
        match scenario.arrivals:
            case suite.Poisson():
                process = arrivals.Poisson(rate)
            case suite.Gamma(cv=cv):
                process = arrivals.Gamma(rate, cv)
            case _:
                return []
        setting = best_setting(scenario, rate)
        situation = Situation(
            process=process,
            service=scenario.service(),
            target=float(scenario.slo),
            budget=TOLERATED / 2,
            limits=scenario.limits,
        )
        told = Assessor(situation).forecast(setting.parameters)
        decision = next((each for each in reversed(contender.decisions) if each.at <= step.stop), None)
        learned = realized = None
        if decision is not None and decision.predicted is not None and not decision.shed_slo:
            learned = decision.predicted.p99
            own = Setting(decision.parameters, decision.estimate, decision.shed_slo)
            realized = _p99(scenario, own, rate, seed)
        found.append(
            Forecast(
                scenario.name,
                step.load,
                round(told.utilization, 4),
                setting.parameters.describe(),
                simulated=_p99(scenario, setting, rate, seed),
                told=round(told.p99, 6),
                learned=learned,
                realized=realized,
            )
        )
    return found


def _p99(scenario: Scenario, setting: Setting, rate: float, seed: int) -> float:
    """Play a steady load for long with one setting."""
    warm_up, seconds = 0.05 * FORECAST_REQUESTS / rate, FORECAST_REQUESTS / rate
    course = [Stretch(warm_up + seconds, rate)]
    outcome = play(scenario, fixed(setting), course, seed + 1).outcome
    return round(outcome.summary(warm_up).p99, 6)


class OnProbation:
    """A good setting, then a bad one that somebody pushed, under the guard that the sidecar has around such changes."""

    interval = INTERVAL

    def __init__(self, good: Setting, bad: Setting) -> None:
        self._good, self._bad = good, bad
        self._probation = Probation(0.99, good.parameters, 1)
        self._before = (0, 0, 0)
        self._ended = 0
        self._missing_since: int | None = None
        self.requests: int | None = None
        """From the first that missed until the bad setting was taken back; ``None``: not yet."""

    def start(self) -> Setting:
        """Begin with the good one."""
        return self._good

    def observe(self, now: float, stats: list[Stats]) -> list[Setting] | None:
        """Show the guard what it looks at in a sidecar, and go back when it says so."""
        if self.requests is not None or not stats[0].models:
            return None
        after = _counted(stats[0].models[""])
        rows, hits, late = (new - old for new, old in zip(after, self._before, strict=True))
        self._before = after
        pushed = self._probation.generation == 2
        self._ended += hits + late
        if pushed and self._missing_since is None and late:
            self._missing_since = self._ended - late
        verdict = self._probation.observe(self.interval, rows, hits, late, 0)
        if pushed and verdict is not None:
            self.requests = self._ended - (self._missing_since or 0)
            return [self._good]
        if not pushed and now >= PROVEN:
            self._probation.change(self._bad.parameters, 2)
            return [self._bad]
        return None

    def dispatcher(self) -> None:
        """Leave the dispatching to the Batcher."""
        return


def _counted(model: ModelStats) -> tuple[int, int, int]:
    return model.rows, model.hits, sum(model.misses.get(reason, 0) for reason in TOO_LATE)


def rollback(scenario: Scenario, seed: int) -> Rollback | None:
    """Push the worst setting within bounds; ``None`` where none is bad at such a load, or replicas share it."""
    if scenario.replicas > 1:
        return None
    capacity = oracle.capacity(scenario)
    load = max((load for load in courses.LOW if load * capacity <= ROLLBACK_RATE), default=None)
    if load is None:
        return None
    rate = load * capacity
    good = best_setting(scenario, rate)
    limits = scenario.limits
    corners = [
        Parameters(max_batch=size, max_wait=Duration(wait), max_in_flight=flights)
        for size in (1, 2, limits.max_batch)
        for wait in (0.0, limits.max_wait)
        for flights in (1, limits.max_in_flight)
    ]
    course = [Stretch(PUSHED, rate)]

    def misses(parameters: Parameters) -> float:
        setting = good._replace(parameters=parameters)
        return play(scenario, fixed(setting), course, seed).outcome.summary().miss_fraction

    missing, worst = max(((misses(corner), number) for number, corner in enumerate(corners)))
    if missing < BAD:
        return None
    bad = good._replace(parameters=corners[worst])

    def make(known: Knowledge, rng: Random) -> OnProbation:  # noqa: ARG001 - all is said
        return OnProbation(good, bad)

    contender = play(scenario, make, [Stretch(PROVEN + 2 * PUSHED, rate)], seed).contender
    assert isinstance(contender, OnProbation)  # noqa: S101 - for the type checker: made above
    return Rollback(
        scenario.name,
        round(rate, 3),
        good.parameters.describe(),
        bad.parameters.describe(),
        round(missing, 4),
        contender.requests,
    )


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
