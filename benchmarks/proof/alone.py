"""Tests of Carpool alone: an hour at constant load, forecasts, bad settings. Equal seeds give equal rows."""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool.exchange.decision import State
from carpool.forecasting.forecaster import Forecaster, Situation
from carpool.forecasting.refinement import Refinement
from carpool.learning import arrivals
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.simulation.outcome import Setting
from carpool.tuning.guards import TOO_LATE
from carpool.tuning.tuner import INTERVAL
from carpool_sidecar.tuning.probation import Probation
from proof import courses, measures, oracle
from proof import scenario as suite
from proof.measures import TOLERATED
from proof.ourselves import CARPOOL as OURSELVES
from proof.rows import Forecast, Hour, Rollback
from proof.verdict import UTILIZED
from proof.world import Stretch, estimate, knowledge, play

if TYPE_CHECKING:
    from random import Random

    from carpool.batching.counters import ModelStats, Stats
    from carpool.forecasting.forecast import Forecast as QueueForecast
    from proof.ourselves import Carpool
    from proof.scenario import Scenario
    from proof.world import Knowledge, Maker

HOUR = 3600.0
HOUR_LOADS = (0.2, 0.5)
"""Loads between which an hour is played, the highest that stays below:"""
HOUR_RATE = 200.0
"""Requests per second, so that an hour takes some ten seconds."""

FORECAST_LOADS = (0.2, 0.5, 0.8)
FORECAST_REQUESTS = 20_000
"""Requests of a run: 200 lie beyond the p99. With bursts or noise at a high load, these come in few clusters, and leave
the p99 20 to 30 % off. So runs are added as needed, seldom more than:"""
FORECAST_RUNS = 120
"""Most runs, until the p99 is known to within:"""
FORECAST_DOUBT = 0.01
"""Half of its 95 % interval, relative to it."""
FORECAST_ENOUGH = 3
FEWEST_RUNS = 4
"""Runs if no goal depends on the result."""

ROLLBACK_RATE = 400.0
"""Requests per second at which a guard that checks every half second can react within 310 requests."""
PROVEN = 30.0
"""Least seconds for the good setting, and most until the guard counts it as good."""
PUSHED = 20.0
"""Seconds for the bad setting, if it is not rolled back."""
BAD = 0.2
"""Share of missed requests from which a setting is bad."""


def fixed(setting: Setting) -> Maker:
    """Make a contender of one setting."""
    return lambda *_: oracle.Fixed(setting)


def best_setting(scenario: Scenario, rate: float) -> Setting:
    """Return the best setting on the oracle's own arrivals."""
    point = oracle.known()[scenario.name].level(rate).points[0]
    return Setting(point.parameters, estimate(knowledge(scenario)), point.shed)


def hour(scenario: Scenario, seed: int) -> Hour | None:
    """Run Carpool at a constant load for an hour; ``None`` if no load is suitable."""
    capacity = oracle.capacity(scenario)
    load = min(HOUR_LOADS[1], HOUR_RATE / capacity)
    if load < HOUR_LOADS[0] or not isinstance(scenario.arrivals, suite.Poisson | suite.Gamma):
        return None
    rate = load * capacity
    outcome = play(scenario, OURSELVES.maker, [Stretch(HOUR, rate)], seed).outcome
    path = measures.settings(outcome.changes, 0.0, HOUR)
    misses = outcome.summary().miss_fraction
    return Hour(scenario.name, round(load, 4), round(rate, 3), round(misses, 6), len(path) - 1, measures.flips(path))


def forecasts(scenario: Scenario, stair: courses.Stair, contender: Carpool, seed: int) -> list[Forecast]:
    """Compare simulated p99s with forecasts: with the true batch latencies, and the tuner's own, as it learned them."""
    if scenario.replicas > 1 or scenario.lengths is not None or scenario.stalls is not None:
        return []  # the forecast is for one replica, one bucket, and a host that does not stall
    # Only the first batch of a size is cold, so it does not matter to a setting that stays. The load ramp counts it.
    warm = replace(scenario, cold=1.0)
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
        told = refined(Forecaster(situation), setting.parameters, shed=setting.shed_slo)
        # Beyond that utilization, no goal depends on the forecast.
        runs = FORECAST_RUNS if told.utilization <= UTILIZED else FORECAST_ENOUGH
        simulated = _p99(warm, setting, rate, seed, runs)
        decision = next((each for each in reversed(contender.decisions) if each.at <= step.stop), None)
        learned = realized = None
        # Late requests are refused long before an overload, but refusals are forecast only in an overload.
        if decision is not None and decision.predicted is not None and decision.state is not State.OVERLOADED:
            learned = decision.predicted.p99
            own = Setting(decision.parameters, decision.estimate, decision.shed_slo)
            realized = (simulated if own == setting else _p99(warm, own, rate, seed, FORECAST_ENOUGH)).quantile(0.99)
        found.append(
            Forecast(
                scenario.name,
                step.load,
                round(told.utilization, 4),
                setting.parameters.describe(),
                simulated=round(simulated.quantile(0.99), 6),
                doubt=round(simulated.doubt, 4),
                told=round(told.p99, 6),
                learned=learned,
                realized=None if realized is None else round(realized, 6),
            )
        )
    return found


def refined(forecaster: Forecaster, parameters: Parameters, *, shed: bool) -> QueueForecast:
    """Return the fully refined forecast of a setting: up to a second's work."""
    effective, played = forecaster.effective(parameters), Refinement()
    while not played.is_done:
        forecaster.sample(effective, played, shed=shed)
    return played.refined(forecaster.forecast(effective, shed=shed))


def _p99(scenario: Scenario, setting: Setting, rate: float, seed: int, runs: int) -> Refinement:
    """Play a steady load with one setting, run after run, until the p99 is known well enough."""
    played = Refinement()
    warm_up, seconds = 0.05 * FORECAST_REQUESTS / rate, FORECAST_REQUESTS / rate
    course = [Stretch(warm_up + seconds, rate)]
    for run in range(runs):
        outcome = play(scenario, fixed(setting), course, seed + 1 + run).outcome
        first = bisect_left(outcome.times, warm_up)
        latencies = [latency for latency in outcome.latencies[first:] if latency < inf]
        played.add(latencies, 0.0, len(latencies))
        if played.samples >= FEWEST_RUNS and played.doubt <= FORECAST_DOUBT:
            break
    return played


class OnProbation:
    """A good setting, then a bad one pushed from outside, under the sidecar's guard for such changes."""

    interval = INTERVAL

    def __init__(self, good: Setting, bad: Setting) -> None:
        self._good, self._bad = good, bad
        self._probation = Probation(0.99, good.parameters, 1)
        self._before = (0, 0, 0)
        self._ended = 0
        self._missing_since: int | None = None
        self.pushed = False
        self.requests: int | None = None
        """Requests from the first miss until the bad setting was rolled back; ``None``: not yet."""

    def start(self) -> Setting:
        """Begin with the good one."""
        return self._good

    def observe(self, now: float, stats: list[Stats]) -> list[Setting] | None:
        """Give the guard the same counts as in a sidecar, and roll back on its verdict."""
        if self.requests is not None or not stats[0].models:
            return None
        after = _counted(stats[0].models[""])
        rows, hits, late = (new - old for new, old in zip(after, self._before, strict=True))
        self._before = after
        pushed = self.pushed
        self._ended += hits + late
        if pushed and self._missing_since is None and late:
            self._missing_since = self._ended - late
        verdict = self._probation.observe(self.interval, rows, hits, late, 0)
        if pushed and verdict is not None:
            self.requests = self._ended - (self._missing_since or 0)
            return [self._good]
        if not pushed and now >= PROVEN and self._probation.standing.good:
            self.pushed = True
            self._probation.change(self._bad.parameters, 2)
            return [self._bad]
        return None

    def dispatcher(self) -> None:
        """Leave the dispatching to the Batcher."""
        return


def _counted(model: ModelStats) -> tuple[int, int, int]:
    return model.rows, model.hits, sum(model.misses.get(reason, 0) for reason in TOO_LATE)


def rollback(scenario: Scenario, seed: int) -> Rollback | None:
    """Push the worst setting within bounds.

    ``None`` where none is bad at such a load, where none gets to be known for good, or where replicas share the load.
    """
    if scenario.replicas > 1:
        return None
    capacity = oracle.capacity(scenario)
    most = ROLLBACK_RATE / _burst(scenario)
    load = max((load for load in courses.LOW if load * capacity <= most), default=None)
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

    contender = play(scenario, make, [Stretch(2 * PROVEN + 2 * PUSHED, rate)], seed).contender
    assert isinstance(contender, OnProbation)  # noqa: S101 - for the type checker: made above
    if not contender.pushed:
        return None
    return Rollback(
        scenario.name,
        round(rate, 3),
        good.parameters.describe(),
        bad.parameters.describe(),
        round(missing, 4),
        contender.requests,
    )


def _burst(scenario: Scenario) -> float:
    """Return the highest rate over the mean, where the process itself has several."""
    match scenario.arrivals:
        case suite.OnOff(on=on, off=off, quiet=quiet):
            return float((on + off) / (on + quiet * off))
        case suite.Diurnal(swing=swing):
            return 1 + swing
        case _:
            return 1.0
