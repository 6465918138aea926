"""What to turn, and why: guards, candidates and the decision. Pure; what it remembers lies in ``tuner``.

The objective: among configurations whose predicted p99 holds now and at 1.25x the present load, the one with the least
device time per request; when none holds at 1.25x, the one that holds now with the most margin; when none holds at all,
the one with the most goodput, and shed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from enum import StrEnum
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from carpool import arrivals, sampling
from carpool.latency import WORTHWHILE, ServiceTime
from carpool.policy import Duration, Limits, Parameters, format_seconds, whole_microseconds
from carpool.queueing import Forecast, Glance, forecast, glance
from carpool.settling import Telling

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from carpool.settling import Settling

HEADROOM = 1.25
"""Load at which a preferred configuration must hold too."""

REQUESTS = 4000
"""Requests a forecast plays through, at least: at the planning budget of 0.5 %, 20 of them may miss."""

PROMISES = 40
"""Times the SLO that it lasts, at least: of two overloads, that which grows more slowly shows later."""

ROUNDS = 5
"""Bursts and lulls that it lasts, at least."""

MOST_REQUESTS = 16_000
"""Requests that it plays through at most: a fifth of a second of one core, for a search."""

LOTS = 8
"""Times that many requests by which a miss fraction near the budget is judged, at most."""

NEAR_BUDGET = 0.75
"""Relative distance from the budget within which 4,000 requests don't decide: 20 misses, two or three at a time, are
given or taken 7. Of n lots, within that over the root of n."""

_FIELDS = {0.5: "p50", 0.9: "p90", 0.95: "p95", 0.99: "p99"}

WORTH = 0.02
"""Relative saving of device time below which nothing is changed for it."""

FINE = 400
"""Steps in which misses beyond the capacity differ: 0.25 % of the requests."""

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

    process: arrivals.Poisson | arrivals.Gamma | arrivals.OnOff
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


class _Outlook:
    """Forecasts for one configuration, each made when first asked for: most are never needed in full, or at all."""

    def __init__(self, assessor: Assessor, parameters: Parameters) -> None:
        self._assessor = assessor
        self._parameters = parameters

    @cached_property
    def glance(self) -> Glance | Forecast:
        """What matters most of ``present``."""
        return self._assessor.judge(self._parameters)

    @cached_property
    def glance_ahead(self) -> Glance | Forecast:
        """What matters most of ``ahead``."""
        return self._assessor.judge(self._parameters, ahead=True)

    @cached_property
    def present(self) -> Forecast:
        """The present load, nobody shed."""
        return self._assessor.forecast(self._parameters)

    @cached_property
    def shed(self) -> Forecast:
        """The present load, with those shed who would be late: what is got out of an overload."""
        return self._assessor.forecast(self._parameters, shed=True)

    @cached_property
    def ahead(self) -> Forecast:
        """``HEADROOM`` times the load."""
        return self._assessor.forecast(self._parameters, ahead=True)

    @cached_property
    def excess(self) -> float:
        """Fraction of misses at ``HEADROOM`` times the load, with those shed who would be late.

        At the upper confidence of t(b): of sizes that carry as much, the one hardly ever measured is the luckiest.
        """
        return self._assessor.forecast(self._parameters, ahead=True, shed=True, sure=True).miss_fraction

    @cached_property
    def loss(self) -> float:
        """The same of the present load; beyond the capacity as much is served of either."""
        if (served := HEADROOM * (1 - self.excess)) < 1:
            return 1 - served
        return self._assessor.forecast(self._parameters, shed=True, sure=True).miss_fraction

    @cached_property
    def risk(self) -> float:
        """Forecast fraction of misses at the upper confidence of t(b)."""
        return self._assessor.glance(self._parameters, pessimistic=True).miss_fraction

    @cached_property
    def telling(self) -> Telling:
        """Of ``present``."""
        return self._telling(self.present, shed=False)

    @cached_property
    def telling_shed(self) -> Telling:
        """Of ``shed``."""
        return self._telling(self.shed, shed=True)

    def _telling(self, searched: Forecast, *, shed: bool) -> Telling:
        return Telling(searched, partial(self._assessor.lot, self._parameters, shed=shed))


class Assessment(NamedTuple):
    """One configuration's forecasts, read with some leniency: a factor on the budget of misses."""

    parameters: Parameters
    situation: Situation
    outlook: _Outlook
    leniency: float

    @property
    def now(self) -> Forecast:
        """The present load; where even that does not hold, with those shed who would be late."""
        outlook = self.outlook
        return outlook.present if self._holds(outlook.glance, KEPT) else outlook.shed

    @property
    def ahead(self) -> Forecast:
        """``HEADROOM`` times the load; where not even the present one holds, that."""
        outlook = self.outlook
        return outlook.ahead if self._holds(outlook.glance, KEPT) else outlook.present

    @property
    def told(self) -> Forecast:
        """``now``, its tail from as many requests as have been played for it by ``settle``."""
        return self._telling.told

    def settle(self) -> bool:
        """Play more requests for ``told``, as many as for a search; return whether it needs no more."""
        self._telling.settle()
        return self._telling.settled

    @property
    def _telling(self) -> Telling:
        outlook = self.outlook
        return outlook.telling if self._holds(outlook.glance, KEPT) else outlook.telling_shed

    @property
    def holds_now(self) -> bool:
        """Whether the SLO is forecast to be kept."""
        return self._holds(self.outlook.glance, self.leniency)

    @property
    def holds_ahead(self) -> bool:
        """Whether it is at ``HEADROOM`` times the load too."""
        outlook = self.outlook
        return self._holds(outlook.glance, KEPT) and self._holds(outlook.glance_ahead, self.leniency)

    @property
    def device_time(self) -> float:
        """Of a request now, in seconds."""
        return (self.outlook.glance if self._holds(self.outlook.glance, KEPT) else self.outlook.shed).device_time

    @property
    def rank(self) -> tuple[float, ...]:
        """Less is better: the objective, as a key to sort by."""
        # What is lost of more load than can be kept tells the margin. Where nobody is answered in time, the smallest
        # batch shows soonest whether anybody can be.
        if self.holds_ahead:
            return (0, self.device_time)
        # Of the present load comes first: what carries most of far more may keep less of this.
        outlook, excess = self.outlook, round(self.outlook.excess * FINE)
        if not self.holds_now:
            return (2, round(outlook.loss * FINE), excess, self.parameters.max_wait, self.parameters.max_batch)
        return (1, round(outlook.glance.miss_fraction * FINE), excess, self.device_time)

    def _holds(self, result: Glance | Forecast, leniency: float) -> bool:
        situation = self.situation
        return result.miss_fraction <= situation.budget * leniency and all(
            getattr(result, _FIELDS[q]) <= seconds for q, seconds in situation.quantiles
        )


class Assessor:
    """Forecasts configurations for one situation, each at most once."""

    _most_lots = LOTS
    """Of arrivals that are drawn; of given ones there are no more."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self._pessimist = situation.service.pessimistic()
        self._sure = situation.service.pessimistic(steps=False)
        self._known: dict[Parameters, _Outlook] = {}
        self._lots: dict[tuple[int, bool], tuple[list[float], list[float] | None]] = {}

    @property
    def _requests(self) -> int:
        situation = self.situation
        process = situation.process
        lasting = PROMISES * situation.target * process.rate
        if isinstance(process, arrivals.OnOff):
            lasting = max(lasting, ROUNDS * (process.mean_on + process.mean_off) * process.rate)
        # In powers of two, so that loads which differ little share their arrivals.
        return min(REQUESTS << max(math.ceil(math.log2(lasting / REQUESTS)), 0), MOST_REQUESTS)

    @cached_property
    def _now(self) -> list[float]:
        return sampling.times(self.situation.process, self._requests)

    @cached_property
    def _ahead(self) -> list[float]:
        return sampling.times(self.situation.process, self._requests, HEADROOM)

    @cached_property
    def _rows(self) -> list[int] | None:
        return [self.situation.rows] * max(len(self._now), len(self._ahead)) if self.situation.rows > 1 else None

    @cached_property
    def _noise(self) -> list[float] | None:
        return sampling.draws(self.situation.service.noise)

    def _lot(self, number: int, *, ahead: bool) -> tuple[list[float], list[float] | None]:
        """Return other arrivals than those of the first lot, 0, and other noise."""
        key = number, ahead
        if key not in self._lots:
            times = sampling.times(self.situation.process, self._requests, HEADROOM if ahead else 1.0, number)
            self._lots[key] = times, sampling.draws(self.situation.service.noise, number)
        return self._lots[key]

    def rest(self) -> None:
        """Let go of what is quickly made again, and large: an operator has a thousand of these, and most rest."""
        for name in ("_now", "_ahead", "_rows", "_noise"):
            self.__dict__.pop(name, None)
        self._lots.clear()

    def assess(self, parameters: Parameters, leniency: float = 1.0) -> Assessment:
        """Return a configuration's forecasts; ``leniency`` is a factor on the budget of misses."""
        outlook = self._known.get(parameters)
        if outlook is None:
            outlook = self._known[parameters] = _Outlook(self, parameters)
        return Assessment(parameters, self.situation, outlook, leniency)

    def risk(self, parameters: Parameters, within: float | None = None) -> float:
        """Forecast fraction of misses at the upper confidence of t(b): what makes a step riskier than another.

        ``within``: of the first so many seconds from an idle device alone.
        """
        if within is None:
            return self.assess(parameters).outlook.risk
        return self.glance(parameters, pessimistic=True, within=within).miss_fraction

    def lot(self, parameters: Parameters, number: int, settling: Settling, *, shed: bool) -> Forecast:
        """Play the load through a configuration, with arrivals and noise of this lot's own; add latencies to it."""
        service, target = self.situation.service, self.situation.target
        executors = service.executors_for(parameters.max_in_flight)
        times, noise = self._now, self._noise
        if number:
            # Not kept: hundreds may be played, each once.
            times = sampling.drawn(self.situation.process, self._requests, number)
            noise = sampling.draws(service.noise, number)
        latencies: list[float] = []
        found = forecast(
            times, service, parameters, target,
            shed=shed, executors=executors, rows=self._rows_of(times), noise_draws=noise, latencies=latencies,
        )  # fmt: skip
        settling.add(latencies)
        return found

    def settled(self, parameters: Parameters, *, shed: bool = False) -> Forecast:
        """Return what is told of a configuration in the end: up to a second's work."""
        outlook = self.assess(parameters).outlook
        telling = outlook.telling_shed if shed else outlook.telling
        while not telling.settled:
            telling.settle()
        return telling.told

    def forecast(
        self, parameters: Parameters, *, ahead: bool = False, shed: bool = False, sure: bool = False
    ) -> Forecast:
        """Play the load, or ``HEADROOM`` times it, through a configuration.

        ``sure``: at the upper confidence of t(b), which goes on straight beyond the largest size measured.
        """
        service = self._sure if sure else self.situation.service
        times = self._ahead if ahead else self._now
        return forecast(
            times,
            service,
            parameters,
            self.situation.target,
            shed=shed,
            executors=service.executors_for(parameters.max_in_flight),
            rows=self._rows_of(times),
            noise_draws=self._noise,
        )

    def glance(
        self, parameters: Parameters, *, ahead: bool = False, pessimistic: bool = False, within: float = math.inf
    ) -> Glance | Forecast:
        """Do the same for misses and device time alone where that is cheaper; at the upper confidence of t(b) too."""
        times = self._ahead if ahead else self._now
        if times[-1] > within:
            times = times[: max(bisect_right(times, within), 1)]
        return self._glance(parameters, times, None if pessimistic else self._noise, pessimistic=pessimistic)

    def judge(self, parameters: Parameters, *, ahead: bool = False) -> Glance | Forecast:
        """Do the same, with misses from more requests where these leave open whether the budget is kept.

        Device time stays that of the first lot: that is what candidates differ in.
        """
        first = self.glance(parameters, ahead=ahead)
        budget, misses, lots = self.situation.budget, first.miss_fraction, 1
        while lots < self._most_lots and abs(misses - budget) < NEAR_BUDGET * budget / math.sqrt(lots):
            misses += (self._glance(parameters, *self._lot(lots, ahead=ahead)).miss_fraction - misses) / (lots + 1)
            lots += 1
        more = {"miss_fraction": misses}
        return first._replace(**more) if isinstance(first, Glance) else replace(first, **more)

    def _glance(
        self,
        parameters: Parameters,
        times: Sequence[float],
        noise: Sequence[float] | None,
        *,
        pessimistic: bool = False,
    ) -> Glance | Forecast:
        target = self.situation.target
        executors = self.situation.service.executors_for(parameters.max_in_flight)
        service = self._pessimist if pessimistic else self.situation.service
        rows = self._rows_of(times)
        if rows is not None or self.situation.quantiles:
            return forecast(times, service, parameters, target, executors=executors, rows=rows, noise_draws=noise)
        return glance(times, service, parameters, target, executors=executors, noise_draws=noise)

    def _rows_of(self, times: Sequence[float]) -> list[int] | None:
        return self._rows[: len(times)] if self._rows is not None else None

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


class Choice(Struct, frozen=True):
    """The best configuration within reach, next to the present one."""

    best: Assessment
    current: Assessment


SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Batch sizes tried: half-octave steps, between which device time per row differs by a few percent."""

WAITS = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
"""Waits tried, as shares of the longest allowed."""


def choose(assessor: Assessor, current: Parameters, avoid: Collection[Parameters] = (), unused: float = 0.0) -> Choice:
    """Find the best configuration within bounds and evidence, ``avoid`` left out.

    ``unused``: share of device time that a size never measured has to save, where the present configuration holds now.

    Sizes go up to twice the largest measured, and not beyond where rows clearly cost more in company. Every second wait
    is tried at the largest size, and at those whose rows are cheapest; from the best the search walks to neighbours
    while they are better: device time falls with size and wait until due times turn it, so the walk is short.
    """
    situation = assessor.situation
    limits, service = situation.limits, situation.service
    reach = max(_productive(service, min(limits.max_batch, 2 * service.largest_measured)), limits.min_batch)
    sizes = _grid(SIZES, limits.min_batch, reach, also=current.max_batch)
    present = assessor.assess(current, KEPT)
    best = _search(assessor, sizes, current, avoid)
    if unused and present.holds_now and best is not None and best.parameters.max_batch not in service.sizes:
        used = [size for size in sizes if size in service.sizes]
        if used and best.device_time > (1 - unused) * present.device_time:
            best = _search(assessor, used, current, avoid)
    return Choice(best=best or assessor.assess(current), current=present)


def _search(
    assessor: Assessor, sizes: Sequence[int], current: Parameters, avoid: Collection[Parameters]
) -> Assessment | None:
    """Find the best of some sizes, ascending, with any wait and number in flight; ``None``: all are avoided."""
    limits, service = assessor.situation.limits, assessor.situation.service
    longest = limits.max_wait
    waits = sorted({whole_microseconds(max(limits.min_wait, share * longest)) for share in WAITS})

    def at(places: Iterable[tuple[int, int]], flights: int) -> list[Assessment]:
        inside = [(sizes[i], waits[j]) for i, j in places if 0 <= i < len(sizes) and 0 <= j < len(waits)]
        points = [Parameters(max_batch=i, max_wait=Duration(j), max_in_flight=flights) for i, j in inside]
        return [assessor.assess(point) for point in points if point not in avoid]

    # Device time a row may have valleys, at a tile's size, out of which no walk leads: the deepest is begun in as well.
    # By what is believed, and by what is sure: of sizes hardly measured the luckiest looks cheapest.
    begins = {sizes[-1], min(sizes, key=lambda size: (service.per_row(size), size))}
    begins.add(min(sizes, key=lambda size: (service.upper(size) / size, size)))
    # And in the first that is nearly as deep: smaller batches take less time, which may be what holds a higher load.
    begins.add(_first_valley(service, sizes))
    starts = [
        at([(sizes.index(size), wait) for wait in range(0, len(waits), 2)], flights)
        for flights in _flights(service, limits, current)
        for size in sorted(begins)
    ]
    # Where some number in flight keeps the SLO, those that don't are not searched for the most they could do.
    holding = [start for start in starts if any(one.holds_now for one in start)]
    best: Assessment | None = None
    for start in holding or starts:
        step = here = _best(start)
        while step is not None:
            here = step
            i, j = sizes.index(here.parameters.max_batch), waits.index(here.parameters.max_wait)
            around = ((i + di, j + dj) for di, dj in ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, 1), (-1, -1)))
            step = _best(at(around, here.parameters.max_in_flight), than=here, share=0.001)
        if here is not None and (best is None or is_better(here, best, 0.005)):
            best = here
    return best


def _best(candidates: list[Assessment], than: Assessment | None = None, share: float = 0.0) -> Assessment | None:
    """Return who ranks first, if that ``is_better`` than another, with as few forecasts as that takes."""
    holding = sorted((one for one in candidates if one.holds_now), key=lambda one: one.device_time)
    aim = math.inf
    if than is not None and than.rank[0] == 0:
        aim = than.device_time * (1 - share)
    for one in holding:
        if one.device_time >= aim:
            return None
        if one.holds_ahead:
            return one
    if aim < math.inf:
        return None
    first = min(holding or candidates, key=lambda one: one.rank, default=None)
    if first is None or than is None or is_better(first, than, share):
        return first
    return None


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


def _first_valley(service: ServiceTime, sizes: Sequence[int]) -> int:
    """Return the smallest size whose rows cost less than those of its neighbours, and hardly more than the cheapest."""
    costs = [math.inf, *(service.per_row(size) for size in sizes), math.inf]
    enough = WORTHWHILE * min(costs)
    around = zip(sizes, costs, costs[1:], costs[2:], strict=False)
    return next(size for size, left, mine, right in around if left > mine <= min(right, enough))


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
    least = FINE / 4 if one.rank[0] else 0.0
    for mine, theirs in zip(one.rank[1:], other.rank[1:], strict=True):
        if mine < theirs - share * max(theirs, least):
            return True
        if mine > theirs:
            return False
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
        saving = max(1 - choice.best.device_time / target.device_time, 0.0)
        return (
            Reason.PASSES_THROUGH,
            f"merging would save {saving:.1%} of the device time at this load: too little; requests pass one by one",
        )
    saving = 1 - target.now.device_time / current.now.device_time if current.now.device_time else 0.0
    times = f"{format_seconds(current.now.device_time)} to {format_seconds(target.now.device_time)} a request"
    ahead = f"p99 forecast {format_seconds(target.now.p99)} now, {format_seconds(target.ahead.p99)} at 1.25x the load"
    if target.holds_now and not current.holds_now:
        return Reason.RESTORES_SLO, f"the present configuration is forecast to miss the SLO; {ahead}"
    if target.holds_ahead and not current.holds_ahead:
        return Reason.MORE_MARGIN, f"holds at 1.25x the load too; {ahead}"
    if target.holds_ahead:
        # Executors' time may be what is saved, while at least one of them is busy all the same.
        falls = f"falls {saving:.0%}, " if saving >= 0.005 else ""
        return Reason.SAVES_DEVICE_TIME, f"device time {falls}{times}; {ahead}"
    if target.holds_now:
        return Reason.MORE_MARGIN, f"no configuration holds at 1.25x the load; this one leaves the most room; {ahead}"
    if not target.now.goodput:
        return Reason.EXPLORES, "nothing measured so far is forecast to keep the SLO; a smaller batch may"
    good = f"{current.now.goodput:.0f} to {target.now.goodput:.0f} good answers/s"
    return Reason.MORE_GOODPUT, f"no configuration holds the SLO at this load; {good}, shedding who would be late"
