"""What to turn, and why: guards, candidates and the decision. Pure; what it remembers lies in ``tuner``.

The objective: among configurations whose predicted p99 holds now and at 1.25x the present load, the one with the least
device time per request; when none holds at 1.25x, the one that holds now with the most margin; when none holds at all,
the one with the most goodput, and shed.
"""

from __future__ import annotations

import math
from enum import StrEnum
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from carpool import arrivals
from carpool.latency import ServiceTime
from carpool.policy import Duration, Limits, Parameters, format_seconds, whole_microseconds
from carpool.queueing import Forecast, forecast

HEADROOM = 1.25
"""Load at which a preferred configuration must hold too."""

REQUESTS = 4000
"""Requests a forecast plays through: at the planning budget of 0.5 %, 20 of them may miss."""

SEED = 20
"""Every forecast of every decision meets the same arrivals, so that candidates differ by what they are."""

_FIELDS = {0.5: "p50", 0.9: "p90", 0.95: "p95", 0.99: "p99"}

WORTH = 0.02
"""Relative saving of device time below which nothing is changed for it."""

NOISELESS = 0.01
"""Coefficient of variation of service times below which they are played without noise."""

KEPT = 1.3
"""Factor on the planning budget below which the present configuration still counts as holding: entering and leaving
differ, so that a forecast near the edge does not turn the parameters back and forth."""


class Reason(StrEnum):
    """Why parameters change or stay."""

    CONVERGED = "Converged"
    SAVES_DEVICE_TIME = "SavesDeviceTime"
    RESTORES_SLO = "RestoresSLO"
    MORE_GOODPUT = "MoreGoodput"
    MORE_MARGIN = "MoreMargin"
    EXPLORES = "Explores"
    PASSES_THROUGH = "PassesThrough"
    MISSES_CONFIRMED = "MissesConfirmed"
    # Guards: why nothing is decided.
    HELD = "Held"
    RECOMMEND_ONLY = "RecommendOnly"
    NO_TRAFFIC = "NoTraffic"
    METRICS_STALE = "MetricsStale"
    HOST_STALLED = "HostStalled"
    TOO_FEW_SAMPLES = "TooFewSamples"
    WITHIN_STABILIZATION_WINDOW = "WithinStabilizationWindow"
    WOULD_FLIP = "WouldFlip"


class Situation(Struct, frozen=True):
    """What a choice is made for. Seconds and requests per second."""

    process: arrivals.Poisson | arrivals.Gamma
    service: ServiceTime
    target: float
    """The due time of the SLO's highest percentile, in seconds from arrival."""
    budget: float
    """Fraction of requests that may be forecast to miss: half of what the SLO allows."""
    limits: Limits
    rows: int = 1
    """Rows of a usual request."""
    quantiles: tuple[tuple[float, float], ...] = ()
    """The SLO's other percentiles as (quantile, seconds)."""


class Assessment(Struct, frozen=True):
    """One configuration, forecast now and at ``HEADROOM`` times the load.

    Where it holds not even now, ``now`` is with those shed who would be late, and ``ahead`` the present load without.
    """

    parameters: Parameters
    now: Forecast
    ahead: Forecast
    holds_now: bool
    holds_ahead: bool

    @property
    def rank(self) -> tuple[float, ...]:
        """Less is better: the objective, as a key to sort by."""
        if self.holds_ahead and self.holds_now:
            return (0, self.now.device_time)
        if self.holds_now:
            return (1, self.now.p99)
        # Where nobody is answered in time, the smallest batch shows soonest whether anybody can be.
        return (2, -self.now.goodput, self.parameters.max_batch)


class Assessor:
    """Forecasts configurations for one situation, each at most once."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        process = situation.process
        unit = arrivals.first(replace(process, rate=1.0), REQUESTS, Random(SEED))
        self._now = [time / process.rate for time in unit]
        self._ahead = [time / (process.rate * HEADROOM) for time in unit]
        self._pessimist = situation.service.pessimistic()
        self._rows = [situation.rows] * REQUESTS if situation.rows > 1 else None
        self._noise = _draws(situation.service.noise)
        self._known: dict[Parameters, Assessment] = {}
        self._risks: dict[Parameters, float] = {}

    def assess(self, parameters: Parameters, leniency: float = 1.0) -> Assessment:
        """Forecast a configuration; ``leniency`` is a factor on the budget of misses."""
        known = self._known.get(parameters)
        if known is None:
            now = ahead = self._forecast(self._now, parameters, shed=False)
            if self._holds(now, KEPT):
                ahead = self._forecast(self._ahead, parameters, shed=False)
            else:
                # Overload: what is got out of it counts, with those shed who would be late.
                now = self._forecast(self._now, parameters, shed=True)
            known = Assessment(parameters, now, ahead, holds_now=False, holds_ahead=False)
            self._known[parameters] = known
        return replace(
            known,
            holds_now=self._holds(known.now, leniency),
            holds_ahead=self._holds(known.ahead, leniency),
        )

    def risk(self, parameters: Parameters) -> float:
        """Forecast fraction of misses at the upper confidence of t(b): what makes a step riskier than another."""
        if parameters not in self._risks:
            pessimistic = forecast(
                self._now,
                self._pessimist,
                parameters,
                self.situation.target,
                executors=self.situation.service.executors_for(parameters.max_in_flight),
                rows=self._rows,
            )
            self._risks[parameters] = pessimistic.miss_fraction
        return self._risks[parameters]

    def saving(self, one: Assessment, other: Assessment) -> float:
        """Relative saving of ``one`` over ``other`` in device time per request, or in executor time if that is more.

        Several executors may keep the device busy all the time while each request takes them longer than it need.
        """
        wall = 1 - one.now.device_time / other.now.device_time
        work = 1 - self._work(one) / self._work(other)
        return max(wall, work)

    def passing_load(self) -> float:
        """Share of the executors' time that requests would take one by one, at ``HEADROOM`` times the load."""
        situation = self.situation
        seconds = situation.service.time(situation.rows)
        return HEADROOM * situation.process.rate * seconds / situation.service.executors

    def _work(self, one: Assessment) -> float:
        in_flight = one.parameters.max_in_flight
        executors = min(self.situation.service.executors_for(in_flight), in_flight)
        return one.now.utilization * executors / one.now.throughput

    def _forecast(self, times: list[float], parameters: Parameters, *, shed: bool) -> Forecast:
        return forecast(
            times,
            self.situation.service,
            parameters,
            self.situation.target,
            shed=shed,
            executors=self.situation.service.executors_for(parameters.max_in_flight),
            rows=self._rows,
            noise_draws=self._noise,
        )

    def _holds(self, result: Forecast, leniency: float) -> bool:
        return result.miss_fraction <= self.situation.budget * leniency and all(
            getattr(result, _FIELDS[q]) <= seconds for q, seconds in self.situation.quantiles
        )


def _draws(noise: float) -> list[float] | None:
    """Multipliers of service times: gamma with mean 1 and the given coefficient of variation."""
    if noise < NOISELESS:
        return None
    rng = Random(SEED)
    shape = noise**-2
    return [rng.gammavariate(shape, 1 / shape) for _ in range(997)]  # a prime, so that draws don't fall in step


class Choice(Struct, frozen=True):
    """The best configuration within reach, next to the present one."""

    best: Assessment
    current: Assessment


SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Batch sizes tried: half-octave steps, between which device time per row differs by a few percent."""

WAITS = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
"""Waits tried, as shares of the longest allowed."""


def choose(assessor: Assessor, current: Parameters) -> Choice:
    """Find the best configuration within bounds and evidence.

    Sizes go up to twice the largest measured, and not beyond where rows clearly cost more in company. Waits are scanned
    at the largest size; from the best one the search walks to neighbours while they are better: device time falls with
    size and wait until due times turn it, so the walk is short.
    """
    situation = assessor.situation
    limits, service = situation.limits, situation.service
    reach = max(_productive(service, min(limits.max_batch, 2 * service.largest_measured)), limits.min_batch)
    sizes = _grid(SIZES, limits.min_batch, reach, also=current.max_batch)
    longest = limits.max_wait
    waits = sorted({whole_microseconds(max(limits.min_wait, share * longest)) for share in WAITS})
    best: Assessment | None = None
    for flights in _flights(service, limits, current):

        def at(size: int, wait: int, flights: int = flights) -> Assessment:
            return assessor.assess(
                Parameters(max_batch=sizes[size], max_wait=Duration(waits[wait]), max_in_flight=flights)
            )

        top = len(sizes) - 1
        starts = [min(range(len(waits)), key=lambda wait: at(top, wait).rank)]
        i, j = top, starts[0]
        here = at(i, j)
        while True:
            around = [(i + di, j + dj) for di, dj in ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, 1), (-1, -1))]
            inside = [(i, j) for i, j in around if 0 <= i < len(sizes) and 0 <= j < len(waits)]
            step = min(inside, key=lambda place: at(*place).rank, default=None)
            if step is None or not is_better(at(*step), here, 0.001):
                break
            (i, j), here = step, at(*step)
        if best is None or is_better(here, best, 0.005):
            best = here
    if best is None:
        raise ValueError(f"no configuration lies inside {limits}")
    return Choice(best=best, current=assessor.assess(current, KEPT))


def _grid(values: tuple[int, ...], low: int, high: int, *, also: int) -> list[int]:
    return sorted({low, high, *(value for value in values if low <= value <= high), min(max(also, low), high)})


def _productive(service: ServiceTime, reach: int) -> int:
    """Return the largest size up to ``reach`` whose rows aren't clearly dearer than those of a smaller batch."""
    cheapest, largest = math.inf, 1
    for rows in range(1, reach + 1):
        if service.lower(rows) / rows <= cheapest:
            largest = rows
        cheapest = min(cheapest, service.per_row(rows))
    return largest


def _flights(service: ServiceTime, limits: Limits, current: Parameters) -> list[int]:
    """Numbers of batches in flight worth trying: what the device computes at once; more while nobody knows.

    Twice and four times the most ever seen: an overloaded device with many executors is reached in few steps.
    """
    most = service.largest_in_flight
    wanted = {1, service.executors, current.max_in_flight}
    if service.executors >= most:
        wanted |= {2 * most, 4 * most}
    return sorted({min(max(flights, limits.min_in_flight), limits.max_in_flight) for flights in wanted})


def is_better(one: Assessment, other: Assessment, share: float) -> bool:
    """Whether ``one`` is better than ``other`` by more than ``share`` of what they differ in."""
    if one.rank[0] != other.rank[0]:
        return one.rank[0] < other.rank[0]
    for mine, theirs in zip(one.rank[1:], other.rank[1:], strict=True):
        if mine != theirs:
            return mine < theirs - share * abs(theirs)
    return False


def toward(current: Parameters, target: Parameters, factor: float, largest: int) -> Parameters:
    """Go from ``current`` towards ``target``: per step at most ``factor``, or one row, or one millisecond more.

    ``largest`` is the largest batch measured; growth stops at twice that. Downwards a step may be of any size.
    """
    size = min(target.max_batch, max(int(current.max_batch * factor), current.max_batch + 1))
    size = min(size, max(2 * largest, current.max_batch))
    wait = min(target.max_wait, max(current.max_wait * factor, current.max_wait + 0.001))
    flights = min(target.max_in_flight, max(int(current.max_in_flight * factor), current.max_in_flight + 1))
    return Parameters(
        max_batch=size,
        max_wait=Duration(whole_microseconds(wait)),
        max_in_flight=flights,
        pass_through=target.pass_through,
    )


def why(choice: Choice, target: Assessment) -> tuple[Reason, str]:
    """Say what the move to ``target`` is for."""
    current = choice.current
    if target.parameters.pass_through:
        return Reason.PASSES_THROUGH, "merging would save next to nothing at this load; requests pass one by one"
    saving = 1 - target.now.device_time / current.now.device_time if current.now.device_time else 0.0
    times = f"{format_seconds(current.now.device_time)} to {format_seconds(target.now.device_time)} a request"
    ahead = f"p99 forecast {format_seconds(target.now.p99)} now, {format_seconds(target.ahead.p99)} at 1.25x the load"
    if target.holds_now and not current.holds_now:
        return Reason.RESTORES_SLO, f"the present configuration is forecast to miss the SLO; {ahead}"
    if target.holds_ahead and not current.holds_ahead:
        return Reason.MORE_MARGIN, f"holds at 1.25x the load too; {ahead}"
    if target.holds_ahead:
        return Reason.SAVES_DEVICE_TIME, f"device time falls {saving:.0%}, {times}; {ahead}"
    if target.holds_now:
        return Reason.MORE_MARGIN, f"no configuration holds at 1.25x the load; this one is fastest now; {ahead}"
    if not target.now.goodput:
        return Reason.EXPLORES, "nothing measured so far is forecast to keep the SLO; a smaller batch may"
    good = f"{current.now.goodput:.0f} to {target.now.goodput:.0f} good answers/s"
    return Reason.MORE_GOODPUT, f"no configuration holds the SLO at this load; {good}, shedding who would be late"
