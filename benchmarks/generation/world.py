"""Scenarios as data (`scenarios.json`): an engine, lengths, arrivals, and changes during the run."""

from __future__ import annotations

from functools import cache
from math import pi, sin
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from carpool.generation.engine import Engine
from carpool.generation.requests import Slo
from carpool.policy.plain import Camel
from carpool_cli.planning.assumptions import AZURE, find
from carpool_cli.streams import loads
from carpool_cli.streams.loads import Lengths, Stretch

if TYPE_CHECKING:
    from collections.abc import Callable

    from carpool.generation.profiles import EngineProfile
    from carpool.generation.simulation import Arrival

HERE = Path(__file__).parent
PROFILES = HERE / "profiles"

OWN = "own"
"""The tenant whose requests are judged."""

Factor = Annotated[float, Meta(gt=0)]

TRACE_FOLD = 97
"""Requests of the trace between the starts of two seeds, times a prime: seeds don't overlap in what matters."""

DOCUMENT_ANSWER = 200
"""Tokens that a long prompt is answered with."""


class Flood(Camel, frozen=True):
    """A second tenant, or batch traffic, beside the scenario's own; or long prompts among these."""

    tenant: str
    load: Factor
    """Of the capacity for its own requests."""
    batch: bool = False
    start: float = 0.0
    prompt_tokens: Annotated[int, Meta(gt=0)] | None = None
    """Of each request, with an answer of `DOCUMENT_ANSWER` tokens; unset: lengths are the scenario's."""


class Scenario(Camel, frozen=True):
    """One engine under one load. Loads are shares of the capacity of the engine for these lengths and targets."""

    name: str
    profile: str
    why: str
    phases: list[tuple[float, float]]
    """(seconds, load), one after the other."""
    lengths: Literal["azure", "long prompts", "long answers", "short answers"] = "azure"
    arrivals: Literal["poisson", "bursty", "trace", "diurnal"] = "poisson"
    ttft: Factor = 2.0
    tpot: Factor = 0.05
    start: Factor = 2.0
    """How far the gate's first guess is off."""
    noise: Annotated[float, Meta(ge=0, le=0.5)] = 0.05
    slowdowns: tuple[tuple[float, float], ...] = ()
    """(seconds, factor): from then on the engine's steps take that many times as long."""
    stalls: tuple[tuple[float, float], ...] = ()
    """(seconds, seconds): from then on the engine makes no step for that long."""
    changes_at: float | None = None
    """When the load or the engine changes: figures are also taken from 30 s after that."""
    kv_tokens: int | None = None
    prefill: Literal["chunked", "first"] = "chunked"
    cancelled: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the clients that leave, after up to 10 s."""
    flood: Flood | None = None
    max_queued_tokens: int | None = None
    """A limit that is set for the gate."""
    family: str = ""
    """Scenarios that differ in load only: overload is compared with the best of them."""

    @property
    def slo(self) -> Slo:
        """The targets."""
        return Slo(self.ttft, self.tpot)

    @property
    def seconds(self) -> float:
        """How long requests come."""
        return sum(seconds for seconds, _ in self.phases)

    @property
    def load(self) -> float:
        """The highest load."""
        return max(load for _, load in self.phases)


class World(NamedTuple):
    """A scenario with a seed, to be played by any rule as often as one likes."""

    scenario: Scenario
    profile: EngineProfile
    capacity: loads.Capacity
    seed: int

    def engine(self) -> Engine:
        """Return a new engine."""
        engine = Engine(self.profile, Random(self.seed), noise=self.scenario.noise)
        engine.slowdown = next((factor for at, factor in self.scenario.slowdowns if at <= 0), 1.0)
        return engine

    def events(self) -> list[tuple[float, Callable[[Engine], None]]]:
        """Return what changes in the engine, and when."""
        slow = [(at, _slow(factor)) for at, factor in self.scenario.slowdowns if at > 0]
        return slow + [(at, _stall(at + seconds)) for at, seconds in self.scenario.stalls]

    def arrivals(self, *, flood: bool = True) -> list[Arrival]:
        """Return new requests, the same each time; ``flood``: those of the other tenant too."""
        scenario, random = self.scenario, Random(self.seed)
        lengths = lengths_of(scenario.lengths)
        stretches = [Stretch(seconds, load * self.capacity.rate) for seconds, load in scenario.phases]
        times = loads.stretched(self._times(random, sum(s.seconds * s.rate for s in stretches)), stretches)
        start = first_of(self.seed)
        found = loads.arrivals(times, lengths.draw(start, len(times)), tenant=OWN)
        if scenario.cancelled:
            found = [
                arrival._replace(cancel=arrival.request.arrival + random.uniform(0, 10))
                if random.random() < scenario.cancelled
                else arrival
                for arrival in found
            ]
        if flood and scenario.flood is not None:
            found += self._beside(scenario.flood, random)
            found.sort(key=lambda arrival: arrival.request.arrival)
        return found

    def _beside(self, other: Flood, random: Random) -> list[Arrival]:
        """Return the requests of the other tenant."""
        lengths, rate = lengths_of(self.scenario.lengths), other.load * self.capacity.rate
        if other.prompt_tokens is not None:
            lengths = Lengths([(other.prompt_tokens, DOCUMENT_ANSWER)], "documents")
            rate = other.load * loads.capacity(self.profile, lengths, self.scenario.slo).rate
        span = self.scenario.seconds - other.start
        times = loads.stretched(loads.poisson(random, int(2 * rate * span) + 50), [Stretch(span, rate)])
        drawn = lengths.draw(first_of(self.seed) + 5000, len(times))
        return loads.arrivals(
            [other.start + time for time in times], drawn, tenant=other.tenant, batch=other.batch, first=10**6
        )

    def _times(self, random: Random, expected: float) -> list[float]:
        """Return arrival times at one a second."""
        count = int(1.5 * expected) + 100
        if self.scenario.arrivals == "trace":
            recorded = recording()[1]
            rate = len(recorded) / (recorded[-1] - recorded[0])
            first = (self.seed * TRACE_FOLD * 31) % (len(recorded) // 2)
            return [(time - recorded[first]) * rate for time in recorded[first : first + count]]
        # cv 2: bursts of several requests at once.
        return loads.poisson(random, count, 0.25 if self.scenario.arrivals == "bursty" else 1.0)


@cache
def recording() -> tuple[Lengths, list[float]]:
    """Return the Azure conversation trace; raises ``click.ClickException`` where it is not at hand."""
    return loads.recorded(find(Path(AZURE)))


@cache
def lengths_of(kind: str) -> Lengths:
    """Return the lengths of a kind."""
    if kind == "azure":
        return recording()[0]
    random = Random(11)
    if kind == "long prompts":
        # Short chats, and one request in ten with a document of 12,000 tokens at the median.
        chats = loads.lognormal(300, 130, random).pairs
        documents = loads.lognormal(12_000, 130, random, 0.3).pairs
        return Lengths([documents[i] if i % 10 == 0 else chats[i] for i in range(len(chats))], kind)
    if kind == "long answers":
        return loads.lognormal(250, 900, random, 0.7)
    return loads.lognormal(800, 12, random)


def build(scenario: Scenario, seed: int) -> World:
    """Put a scenario together."""
    profile = loads.read_profile(PROFILES / f"{scenario.profile}.json")
    profile = replace(profile, prefill=scenario.prefill, kv_tokens=scenario.kv_tokens or profile.kv_tokens)
    scenario = _diurnal(scenario)
    return World(scenario, profile, carried(scenario, profile, seed), seed)


def first_of(seed: int) -> int:
    """Return where in the lengths a seed begins."""
    return seed * TRACE_FOLD * 101


def carried(scenario: Scenario, profile: EngineProfile, seed: int) -> loads.Capacity:
    """Return the load that the engine carries of the very requests that are played.

    The trace has hours of short answers and hours of long ones. By the mean of all of it, four minutes at 1.3 times the
    capacity were 1.05 times of what those minutes' requests need.
    """
    lengths = lengths_of(scenario.lengths)
    seconds = sum(seconds * load for seconds, load in scenario.phases)

    def of(count: int) -> loads.Capacity:
        drawn = loads.Lengths(lengths.draw(first_of(seed), count), lengths.described)
        return loads.capacity(profile, drawn, scenario.slo)

    # Capacity and the number of requests follow from each other: the number is where both agree.
    low, high = 1, 2
    while of(high).rate * seconds > high:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if of(middle).rate * seconds > middle else (low, middle)
    return of(low)


def scenarios() -> list[Scenario]:
    """Read all scenarios."""
    return msgspec.json.decode((HERE / "scenarios.json").read_bytes(), type=list[Scenario])


def _diurnal(scenario: Scenario) -> Scenario:
    """Make a day of a single phase: its load is the peak, and the night has a quarter of it."""
    if scenario.arrivals != "diurnal":
        return scenario
    ((seconds, load),) = scenario.phases
    pieces = 48
    shares = [0.625 - 0.375 * sin(2 * pi * (i + 0.5) / pieces + pi / 2) for i in range(pieces)]
    return replace(scenario, phases=[(seconds / pieces, load * share) for share in shares])


def _slow(factor: float) -> Callable[[Engine], None]:
    def change(engine: Engine) -> None:
        engine.slowdown = factor

    return change


def _stall(until: float) -> Callable[[Engine], None]:
    def change(engine: Engine) -> None:
        engine.stalled_until = until

    return change
