"""One contender in one scenario: every contender gets the same requests at the same times, on the same device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import exp, inf, pi, sin
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from msgspec.structs import replace

from carpool.learning import arrivals
from carpool.policy.spec import Admission
from carpool.simulation.simulator import Device, Dispatcher, Simulation
from carpool_cli.planning import assumptions
from proof import scenario as suite

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from carpool.batching.counters import Stats
    from carpool.batching.requests import Estimate
    from carpool.learning.latency_model import ServiceTime
    from carpool.policy.parameters import Limits
    from carpool.simulation.outcome import Outcome, Setting
    from proof.scenario import Scenario

FINENESS = 48
"""Steps in which the rate of a day rises and falls: 4 % of the swing at most between two of them, times 3."""


class Knowledge(NamedTuple):
    """What a rival knows, in its favour: everything that a person could know beforehand."""

    slo: float
    """Seconds; the p99."""
    limits: Limits
    service: ServiceTime
    """True batch latencies, server concurrency and noise, before any drift; of the mix, where lengths differ."""
    executors: int
    replicas: int
    buckets: Mapping[int, ServiceTime] = {}
    """The same of each length bucket by itself, where lengths differ."""
    admission: Admission = Admission()
    """What may wait, and how long."""


class Contender(Protocol):
    """One rule, made anew for each run."""

    interval: float
    """Seconds between calls of ``observe``; 0: never."""

    def start(self) -> Setting:
        """Return what to begin with."""

    def observe(self, now: float, stats: list[Stats]) -> list[Setting] | None:
        """Look at each replica's counters; return one setting for all, one for each, or none."""

    def dispatcher(self) -> Dispatcher | None:
        """Return the dispatch rule of one replica, called once for each; ``None``: Carpool's Batcher."""


Maker: TypeAlias = Callable[[Knowledge, Random], Contender]


class Rival(NamedTuple):
    """A rule that people use, or ours."""

    name: str
    cite: str
    """Where the algorithm is published, or the source it was read from."""
    maker: Maker


class Stretch(NamedTuple):
    """A part of a run with a load and a device of its own."""

    seconds: float
    rate: float
    """Requests per second over all replicas, on average."""
    device: float = 1.0
    """Factor on the batch latency."""


class Played(NamedTuple):
    """The outcome, and the contender that was played."""

    outcome: Outcome
    contender: Contender


def timeline(scenario: Scenario, capacity: float) -> tuple[Stretch, ...]:
    """Return a scenario's own phases, for the highest load (requests per second) that the oracle can hold in it."""
    return tuple(Stretch(phase.seconds, phase.load * capacity, phase.device) for phase in scenario.phases)


def knowledge(scenario: Scenario) -> Knowledge:
    """Return what may be known of a scenario."""
    return Knowledge(
        slo=float(scenario.slo),
        limits=scenario.limits,
        service=scenario.service(),
        executors=scenario.executors,
        replicas=scenario.replicas,
        buckets={bucket: scenario.service(bucket) for bucket in scenario.lengths.buckets} if scenario.lengths else {},
        admission=scenario.policy.admission,
    )


def estimate(known: Knowledge, device: float = 1.0) -> Estimate:
    """Return what a Batcher is to believe, on a device that takes ``device`` times as long."""
    most = known.limits.max_batch
    buckets = {bucket: service.scaled(device).believed(most) for bucket, service in known.buckets.items()}
    return replace(known.service.scaled(device).believed(most), buckets=buckets)


def play(scenario: Scenario, maker: Maker, course: Sequence[Stretch], seed: int) -> Played:
    """Let a contender of its own making run a course; equal arguments give equal outcomes."""
    contender = maker(knowledge(scenario), Random(f"{scenario.name} {seed} contender"))
    start = contender.start()
    # Asked beforehand, since all replicas have the same kind.
    own = [rule for _ in range(scenario.replicas) if (rule := contender.dispatcher()) is not None]
    lengths = scenario.lengths
    simulation = Simulation(
        requests(scenario, tuple(course), seed),
        devices(scenario, course),
        slo=float(scenario.slo),
        parameters=start.parameters,
        estimate=start.estimate,
        shed_slo=start.shed_slo,
        dispatcher=iter(own).__next__ if own else None,
        admission=scenario.policy.admission,
        bucket=int if lengths is None else lengths.bucket,
        replicas=scenario.replicas,
        seed=seed,
        seconds=sum(stretch.seconds for stretch in course),
    )
    if contender.interval:
        simulation.every(contender.interval, contender.observe)
    return Played(simulation.run(), contender)


def devices(scenario: Scenario, course: Sequence[Stretch]) -> list[Device]:
    """Return every replica's device, with what happens to it along a course."""
    drift, at = [], 0.0
    for stretch in course:
        drift.append((at, stretch.device))
        at += stretch.seconds
    stalls: tuple[tuple[float, float], ...] = ()
    if scenario.stalls is not None:
        every, lasting = float(scenario.stalls.every), float(scenario.stalls.lasting)
        stalls = tuple((every * number, lasting) for number in range(1, int(at / every) + 1))
    profile = suite.profile_of(scenario.profile)
    times = assumptions.device(profile).times
    lengths = scenario.lengths
    device = Device(
        times if lengths is None else lambda rows, bucket: times(lengths.rows(rows, bucket), 0),
        executors=scenario.executors,
        cv=profile.cv if scenario.cv is None else scenario.cv,
        noise=scenario.noise,
        drift=tuple(drift) if any(factor != 1.0 for _, factor in drift) else (),
        cold=scenario.cold,
        largest=scenario.largest,
        stalls=stalls,
    )
    slow = replace(device, times=lambda rows, bucket: scenario.slow_pod * device.times(rows, bucket))
    return [device] * (scenario.replicas - 1) + [device if scenario.slow_pod == 1.0 else slow]


# A few, since one is played by every contender in turn.
@lru_cache(maxsize=8)
def requests(scenario: Scenario, course: tuple[Stretch, ...], seed: int) -> Sequence[float | tuple[float, ...]]:
    """Return the arrivals in ascending order: times alone, or ``Arrival`` tuples where lengths differ."""
    times = arrival_times(scenario, course, seed)
    if scenario.lengths is None:
        return times
    rng = Random(f"{scenario.name} {seed} lengths")
    median, sigma, largest = scenario.lengths.median, scenario.lengths.sigma, scenario.lengths.buckets[-1]
    # Log-normal, as texts are: half of them are shorter than the median.
    return [(time, 1, min(max(round(median * exp(rng.gauss(0.0, sigma))), 1), largest)) for time in times]


def arrival_times(scenario: Scenario, course: tuple[Stretch, ...], seed: int) -> list[float]:
    """Return the arrival times, ascending.

    One process with a mean of one arrival a unit runs through the whole course. The load only stretches its clock (time
    change: an arrival at u comes when the integral of the rate reaches u). So two courses that begin alike have the
    same arrivals as long as they are alike.
    """
    rng = Random(f"{scenario.name} {seed} arrivals")
    unit = _unit(scenario, rng)
    found = []
    upcoming = next(unit)
    begun = passed = 0.0  # the piece's begin in seconds, and in units
    for end, rate in _rates(scenario, course, Random(f"{scenario.name} {seed} bursts")):
        until = passed + (end - begun) * rate
        while upcoming < until:
            found.append(begun + (upcoming - passed) / rate)
            upcoming = next(unit)
        begun, passed = end, until
    return found


def _unit(scenario: Scenario, rng: Random) -> Iterator[float]:
    """Walk the scenario's process at a mean of one arrival a unit; endless."""
    match scenario.arrivals:
        case suite.Gamma(cv=cv):
            return arrivals.Gamma(1.0, cv).times(rng)
        case suite.Trace():
            return _over_and_over(suite.recording().times, rng)
        case _:
            return arrivals.Poisson(1.0).times(rng)


def _over_and_over(times: Sequence[float], rng: Random) -> Iterator[float]:
    """Play a recording of mean rate 1 without end, from anywhere in it: another seed is another hour."""
    first = int(rng.random() * (len(times) - 1))
    span = times[-1] - times[0] + 1.0
    start = times[first]
    round_ = 0
    while True:
        for time in times[first if not round_ else 0 :]:
            yield time - start + round_ * span
        round_ += 1


def _rates(scenario: Scenario, course: Sequence[Stretch], rng: Random) -> Iterator[tuple[float, float]]:
    """Walk the rate along a course: (until when, requests per second), a piece at a time."""
    factors = _factors(scenario, rng)
    turns, factor = next(factors)
    begun = 0.0
    for stretch in course:
        end = begun + stretch.seconds
        while turns < end:
            yield turns, stretch.rate * factor
            turns, factor = next(factors)
        yield end, stretch.rate * factor
        begun = end


def _factors(scenario: Scenario, rng: Random) -> Iterator[tuple[float, float]]:
    """Walk what the process itself does to the rate: (until when, factor of mean 1); endless."""
    at = 0.0
    match scenario.arrivals:
        case suite.OnOff(on=on, off=off, quiet=quiet):
            burst = (on + off) / (on + quiet * off)
            while True:
                for mean, factor in ((on, burst), (off, quiet * burst)):
                    at += rng.expovariate(1 / mean)
                    yield at, factor
        case suite.Diurnal(swing=swing, period=period):
            number = 0
            while True:
                factor = 1 + swing * sin(2 * pi * (number + 0.5) / FINENESS)
                number += 1
                yield number * period / FINENESS, factor
        case _:
            yield inf, 1.0
