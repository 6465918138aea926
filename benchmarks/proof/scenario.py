"""Scenarios as data: ``benchmarks/scenarios/NAME.json``, each a load, a device, an SLO and a timeline.

Rates are shares of the highest load that the oracle can hold in the scenario, so a file names no requests per second.
"""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

import click
import msgspec
from msgspec import Meta

from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.plain import Camel, PolicyError, from_plain
from carpool.simulation.simulator import Noise
from carpool_cli.planning import assumptions
from carpool_cli.profiling import device_profile

if TYPE_CHECKING:
    from carpool.policy.parameters import Limits
    from carpool.policy.spec import BatchingPolicy
    from carpool_cli.profiling.device_profile import DeviceProfile

HERE = Path(__file__).parent.parent
SCENARIOS = HERE / "scenarios"
PROFILES = HERE / "profiles"

AZURE = Path("azure")

Share = Annotated[float, Meta(gt=0)]


class ScenarioError(ValueError):
    """A scenario file that can't be played; the text names the file, the field and what it takes."""


class Poisson(Camel, frozen=True, tag_field="process", tag="poisson"):
    """Independent callers."""


class Gamma(Camel, frozen=True, tag_field="process", tag="gamma"):
    """A renewal process with gamma gaps."""

    cv: Annotated[float, Meta(gt=0, le=10)]


class OnOff(Camel, frozen=True, tag_field="process", tag="onOff"):
    """Poisson in bursts and lulls, both exponentially long."""

    on: Duration
    """Mean length of a burst."""
    off: Duration
    """Mean length of a lull."""
    quiet: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Rate in a lull over the rate in a burst."""


class Diurnal(Camel, frozen=True, tag_field="process", tag="diurnal"):
    """Poisson at a rate that rises and falls as a sine."""

    swing: Annotated[float, Meta(gt=0, le=1)]
    """How far it goes from its mean, as a share of it."""
    period: Duration


class Trace(Camel, frozen=True, tag_field="process", tag="trace"):
    """The Azure LLM inference trace of 2023, conversations, over and over, at the rate wanted."""


Arrivals: TypeAlias = Poisson | Gamma | OnOff | Diurnal | Trace


class Lengths(Camel, frozen=True):
    """Log-normal lengths; only requests of one bucket are batched together.

    A row that is n times as long as the profile's rows costs the device as much as n of them, rounded up. That is 10 to
    20 % less than is published for BERT-large at a length of 384 beside 128, where attention grows with the square.
    """

    median: Annotated[int, Meta(ge=1)]
    sigma: Annotated[float, Meta(gt=0, le=3)]
    """Standard deviation of the logarithm."""
    buckets: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1)]
    """Upper ends, ascending; what is longer than the last is cut to it."""
    reference: Annotated[int, Meta(ge=1)]
    """Length of the profile's rows."""

    def bucket(self, length: int) -> int:
        """Return the upper end of a length's bucket."""
        return next((end for end in self.buckets if length <= end), self.buckets[-1])

    def shares(self) -> dict[int, float]:
        """Return how much of the traffic falls into each bucket."""
        logs = NormalDist(log(self.median), self.sigma)
        upto = [0.0, *(logs.cdf(log(end + 0.5)) for end in self.buckets[:-1]), 1.0]
        return {end: high - low for end, (low, high) in zip(self.buckets, pairwise(upto), strict=True)}

    def rows(self, rows: int, bucket: int) -> int:
        """Return how many of the profile's rows cost as much."""
        return -(-rows * bucket // self.reference)


class Phase(Camel, frozen=True):
    """A stretch of a scenario's timeline."""

    seconds: Annotated[float, Meta(gt=0)]
    load: Share
    """Share of the highest load that the oracle can hold on the device as it is at first."""
    device: Share = 1.0
    """Factor on the batch latency."""


class Stalls(Camel, frozen=True):
    """The sidecar's host stands still now and then."""

    every: Duration
    lasting: Duration


class Scenario(Camel, frozen=True):
    """One situation for a tuner. It is given little of what is said here, and has to learn the rest."""

    name: Annotated[str, Meta(min_length=1)]
    """The file's own."""
    why: Annotated[str, Meta(min_length=1)]
    """What it is that this one shows."""
    profile: str
    """A file in ``benchmarks/profiles``, which names its source."""
    slo: Duration
    """The p99 that is promised: all that Carpool is given."""
    arrivals: Arrivals
    phases: Annotated[tuple[Phase, ...], Meta(min_length=1)]
    """The timeline; the first one lasts two minutes at least."""
    executors: Annotated[int, Meta(ge=1, le=64)] = 1
    """Batches that the device computes at once."""
    max_in_flight: Annotated[int, Meta(ge=1, le=64)] = 8
    """Most batches that any rule may have under way."""
    cv: Annotated[float, Meta(ge=0, le=2)] | None = None
    """Coefficient of variation of single batches; the profile's own unless given."""
    noise: Noise = Noise.GAMMA
    replicas: Annotated[int, Meta(ge=1, le=16)] = 1
    slow_pod: Annotated[float, Meta(ge=1)] = 1.0
    """Factor on the batch latency of the last replica."""
    lengths: Lengths | None = None
    cold: Annotated[float, Meta(ge=1)] = 1.0
    """Factor on the first batch of each size."""
    stalls: Stalls | None = None
    largest: Annotated[int, Meta(ge=1)] | None = None
    """Rows above which a batch fails for its size."""

    @property
    def policy(self) -> BatchingPolicy:
        """What a user would write: the promise, and how many batches the server takes."""
        return assumptions.slo_policy(float(self.slo), most_in_flight=self.max_in_flight)

    @property
    def limits(self) -> Limits:
        """Where every rule may go."""
        return self.policy.limits()

    def service(self, bucket: int | None = None) -> ServiceTime:
        """Return the true batch latencies of a replica that is not slow, before any drift.

        Where lengths differ: of one bucket, or of the mix.

        Every size that the limits allow is given, so that none is in doubt.
        """
        profile = profile_of(self.profile)
        curve, lengths = profile.service_time(), self.lengths

        def seconds(rows: int) -> float:
            if lengths is None:
                return curve.time(rows)
            shares = lengths.shares() if bucket is None else {bucket: 1.0}
            return sum(share * curve.time(lengths.rows(rows, each)) for each, share in shares.items())

        return msgspec.structs.replace(
            ServiceTime.measured({rows: seconds(rows) for rows in range(1, self.limits.max_batch + 1)}),
            noise=profile.cv if self.cv is None else self.cv,
            executors=self.executors,
            # That is certain, too: more in flight would only queue.
            largest_in_flight=max(2 * self.executors, self.max_in_flight),
        )

    @property
    def cycle(self) -> float:
        """Seconds that a fair measurement is a multiple of; 0 where any length will do."""
        return float(self.arrivals.period) if isinstance(self.arrivals, Diurnal) else 0.0

    def missing(self) -> str | None:
        """Say what of it is not at hand, and where to get it; ``None``: nothing."""
        if not isinstance(self.arrivals, Trace):
            return None
        try:
            recording()
        except click.ClickException as error:
            return error.message
        return None


class Recording(NamedTuple):
    """A trace at a mean rate of one a second."""

    times: tuple[float, ...]
    rate: float
    """Its own mean rate, requests per second: what its clock is multiplied by, for one request a second."""


@cache
def recording() -> Recording:
    """Read the Azure trace (CC-BY-4.0, Microsoft Azure; "Splitwise", Patel et al., ISCA 2024).

    Raises ``click.ClickException`` that says where to get it.
    """
    own, _ = assumptions.read_trace(AZURE, None)
    times, _ = assumptions.read_trace(AZURE, 1.0)
    return Recording(tuple(times), (len(own) - 1) / (own[-1] - own[0]))


def stretch_factor(rate: float) -> float:
    """Return the factor on the trace's clock that gives it a mean ``rate``: below 1 is faster than life."""
    return recording().rate / rate


@cache
def profile_of(name: str) -> DeviceProfile:
    """Read a profile of this repository's."""
    return device_profile.load(PROFILES / f"{name}.json")


def load(path: Path) -> Scenario:
    """Read a scenario.

    Raises ``ScenarioError`` naming the file, the field and what it takes.
    """
    try:
        scenario = from_plain(msgspec.json.decode(path.read_bytes()), Scenario, what="scenario")
        _check(scenario, path.stem)
    except (PolicyError, msgspec.DecodeError, click.ClickException) as error:
        raise ScenarioError(f"{path.name}: {error}") from None
    return scenario


def _check(scenario: Scenario, stem: str) -> None:
    """Check what types can't say.

    Raises ``PolicyError`` naming the field.
    """
    if scenario.name != stem:
        raise PolicyError("name", f"{scenario.name!r} is not the file's")
    if scenario.phases[0].seconds < 120:
        raise PolicyError(
            "phases[0].seconds", f"{scenario.phases[0].seconds:g} is less than 120: tuning needs its time"
        )
    if scenario.phases[0].device != 1.0:
        raise PolicyError("phases[0].device", "is 1 by definition")
    if not (PROFILES / f"{scenario.profile}.json").is_file():
        raise PolicyError("profile", f"there is no {scenario.profile}.json in {PROFILES.name}/")
    if scenario.slow_pod != 1.0 and scenario.replicas == 1:
        raise PolicyError("slowPod", "needs a second replica to be slower than")
    lengths = scenario.lengths
    if lengths is not None and list(lengths.buckets) != sorted(set(lengths.buckets)):
        raise PolicyError("lengths.buckets", "must ascend")
    if scenario.stalls is not None and scenario.stalls.lasting >= scenario.stalls.every:
        raise PolicyError("stalls.lasting", f"{scenario.stalls.lasting} is no shorter than {scenario.stalls.every}")
    alone = scenario.service().slow(1) * max(phase.device for phase in scenario.phases)
    if alone >= scenario.slo:
        raise PolicyError("slo", f"{scenario.slo} can't be kept by anybody: one row takes up to {alone * 1e3:.3g} ms")


def load_all() -> list[Scenario]:
    """Read the suite, in order of name."""
    return [load(path) for path in sorted(SCENARIOS.glob("*.json"))]


def suite_hash() -> str:
    """Return what changes with any scenario and any profile that the suite may use."""
    return _digest([*SCENARIOS.glob("*.json"), *PROFILES.glob("*.json")])


def own_hash(scenario: Scenario) -> str:
    """Return what changes with one scenario and its profile."""
    return _digest([SCENARIOS / f"{scenario.name}.json", PROFILES / f"{scenario.profile}.json"])


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = msgspec.json.decode(path.read_bytes())
        content.pop("why", None)  # another description changes no figure
        digest.update(f"{path.parent.name}/{path.name}\n".encode())
        digest.update(msgspec.json.encode(content))
    return digest.hexdigest()[:16]
