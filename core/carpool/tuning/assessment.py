"""What a configuration is forecast to do, at the present load and beyond it, and which of two is better. Pure.

Which of them are looked at lies in ``search``, what is remembered of it all in ``tuner``.

The objective: among configurations whose predicted p99 holds now and at 1.25x the present load, the one with the least
device time per request; when none holds at 1.25x, the one that holds now with the most margin; when none holds at all,
the one with the most goodput, and shed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from carpool.forecasting import sampling
from carpool.forecasting.queueing import Forecast, Glance, forecast, glance
from carpool.forecasting.refinement import Telling
from carpool.learning import arrivals, batchable_share
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Limits, Parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.forecasting.refinement import Expected, Settling

HEADROOM = 1.25
"""Load at which a preferred configuration must hold too."""

REQUESTS = 4000
"""Requests a forecast plays through, at least: at the planning budget of 0.5 %, 20 of them may miss."""

PROMISES = 40
"""Times the SLO that it lasts, at least: of two overloads, that which grows more slowly shows later."""

MOST_REQUESTS = 16_000
"""Requests that it plays through at most: a fifth of a second of one core, for a search."""

LOTS = 8
"""Times that many requests by which a miss fraction near the budget is judged, at most."""

TOGETHER = 3.0
"""Requests that miss at once, at least; how many do is seen where any miss. A busy spell makes seven late, or hundreds,
and then 20 misses are three events, or none most of the time."""

DECIDES = 2.0
"""Standard errors beyond the budget at which misses are no matter of chance, were the budget just met: in runs of n, as
compound Poisson events, the variance of their number is n times its mean."""

_FIELDS = {0.5: "p50", 0.9: "p90", 0.95: "p95", 0.99: "p99"}

SECTIONS = 8
"""Stretches of the arrivals by which is told how much of a difference is theirs."""

FINE = 400
"""Steps in which misses beyond the capacity differ: 0.25 % of the requests."""

KEPT = 1.3
"""Factor on the planning budget below which the present configuration still counts as holding: entering and leaving
differ, so that a forecast near the edge does not turn the parameters back and forth."""


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
    share: float = 1.0
    """Of the arrivals, those that can share a batch with the next one (``batchable_share``)."""
    largest: int | None = None
    """Rows that a batch may have where that is less than ``max_batch`` (``size_limit``)."""


class _Outlook:
    """Forecasts for one configuration, each made when first asked for: most are never needed in full, or at all."""

    def __init__(self, assessor: Assessor, parameters: Parameters) -> None:
        self._assessor = assessor
        self._parameters = parameters

    @cached_property
    def first(self) -> Glance | Forecast:
        """What matters most of ``present``, as far as few requests tell."""
        return self._assessor.glance(self._parameters)

    @cached_property
    def glance(self) -> Glance | Forecast:
        """What matters most of ``present``."""
        return self._assessor.judge(self._parameters, self.first)

    @cached_property
    def glance_ahead(self) -> Glance | Forecast:
        """What matters most of ``ahead``."""
        return self._assessor.judge(self._parameters, self._assessor.glance(self._parameters, ahead=True), ahead=True)

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
    def mix(self) -> list[Counter[int]]:
        """Batches by their rows, of each of ``SECTIONS`` stretches of the present load."""
        return self._assessor.mix(self._parameters)

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

    @property
    def expected(self) -> Expected | None:
        """What answers should show where ``told`` is right; ``None`` while too few requests have been played."""
        return self._telling.expected

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
    def mean(self) -> float:
        """Mean latency (seconds) at the present load, nobody shed."""
        return self.outlook.first.mean

    @property
    def utilization(self) -> float:
        """Share of the time, 0 to 1, for which the device's executors compute, at the present load, nobody shed."""
        service, flights = self.situation.service, self.parameters.max_in_flight
        used = min(service.executors_for(flights), flights)
        return min(self.outlook.first.utilization * used / max(used, service.executors), 1.0)

    @property
    def misses(self) -> float:
        """Fraction of requests forecast to miss the SLO at the present load, nobody shed."""
        return self.outlook.glance.miss_fraction

    @property
    def looks(self) -> float:
        """What ``device_time`` is if the present load is held, which takes more to tell."""
        return self.outlook.first.device_time

    @property
    def rank(self) -> tuple[float, ...]:
        """Less is better: the objective, as a key to sort by."""
        # What is lost of more load than can be kept tells the margin. Where nobody is answered in time, the smallest
        # batches, as many at once as may be computed, show soonest whether anybody can be.
        if self.holds_ahead:
            return (0, self.device_time)
        # Of the present load comes first: what carries most of far more may keep less of this.
        outlook, excess = self.outlook, round(self.outlook.excess * FINE)
        if not self.holds_now:
            point, service = self.parameters, self.situation.service
            executors = service.executors_for(point.max_in_flight)
            return (2, round(outlook.loss * FINE), excess, point.max_wait, point.max_batch, -executors)
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
        self._groups = batchable_share.groups(
            situation.share, batchable_share.MOST_GROUPS // max(len(situation.service.mix), 1)
        )
        self._known: dict[Parameters, _Outlook] = {}
        self._lots: dict[tuple[int, bool], tuple[list[float], list[float] | None]] = {}

    @property
    def _requests(self) -> int:
        situation = self.situation
        process = situation.process
        lasting = PROMISES * situation.target * process.rate
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
        effective = self.effective(parameters)
        outlook = self._known.get(effective)
        if outlook is None:
            outlook = self._known[effective] = _Outlook(self, effective)
        return Assessment(parameters, self.situation, outlook, leniency)

    def effective(self, parameters: Parameters) -> Parameters:
        """Return what the Batcher makes of a configuration: without company it holds nothing, and batches nothing."""
        situation = self.situation
        if situation.largest is not None and situation.largest < parameters.max_batch:
            parameters = replace(parameters, max_batch=max(situation.largest, situation.rows))
        if situation.share <= batchable_share.NONE:
            return replace(parameters, max_wait=Duration(0.0), max_batch=situation.rows)
        return parameters if self.holds(parameters.max_wait) else replace(parameters, max_wait=Duration(0.0))

    def holds(self, wait: float) -> bool:
        """Whether the Batcher holds requests for so many seconds."""
        return batchable_share.pays_to_hold(self.situation.share, self.situation.process.rate, wait)

    def risk(self, parameters: Parameters, within: float | None = None) -> float:
        """Forecast fraction of misses at the upper confidence of t(b): what makes a step riskier than another.

        ``within``: of the first so many seconds from an idle device alone.
        """
        if within is None:
            return self.assess(parameters).outlook.risk
        return self.glance(self.effective(parameters), pessimistic=True, within=within).miss_fraction

    def lot(self, parameters: Parameters, number: int, settling: Settling, *, shed: bool) -> Forecast:
        """Play the load through a configuration, with arrivals and noise of this lot's own; add latencies to it."""
        service, target = self.situation.service, self.situation.target
        executors = self._executors(parameters)
        times, noise = self._now, self._noise
        if number:
            # Not kept: hundreds may be played, each once.
            times = sampling.drawn(self.situation.process, self._requests, number)
            noise = sampling.draws(service.noise, number)
        latencies: list[float] = []
        found = forecast(
            times, service, parameters, target, shed=shed, executors=executors, rows=self._rows_of(times),
            groups=self._groups, noise_draws=noise, latencies=latencies,
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

    def mix(self, parameters: Parameters) -> list[Counter[int]]:
        """Return the batches, by their rows, that a configuration makes of each stretch of the load."""
        sizes: list[int] = []
        self.forecast(parameters, sizes=sizes)
        found = [Counter[int]() for _ in range(SECTIONS)]
        part, rows = sum(sizes) / SECTIONS, 0
        for size in sizes:
            found[int(rows / part)][size] += 1
            rows += size
        return found

    def forecast(
        self,
        parameters: Parameters,
        *,
        ahead: bool = False,
        shed: bool = False,
        sure: bool = False,
        sizes: list[int] | None = None,
    ) -> Forecast:
        """Play the load, or ``HEADROOM`` times it, through a configuration; add the rows of each batch to ``sizes``.

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
            executors=self._executors(parameters),
            rows=self._rows_of(times),
            groups=self._groups,
            noise_draws=self._noise,
            sizes=sizes,
        )

    def glance(
        self, parameters: Parameters, *, ahead: bool = False, pessimistic: bool = False, within: float = math.inf
    ) -> Glance | Forecast:
        """Do the same for misses and device time alone where that is cheaper; at the upper confidence of t(b) too."""
        times = self._ahead if ahead else self._now
        if times[-1] > within:
            times = times[: max(bisect_right(times, within), 1)]
        return self._glance(parameters, times, None if pessimistic else self._noise, pessimistic=pessimistic)

    def judge(self, parameters: Parameters, first: Glance | Forecast, *, ahead: bool = False) -> Glance | Forecast:
        """Return a first glance with misses from more requests, where its own leave open whether the budget is kept.

        Device time stays that of the first lot: that is what candidates differ in.
        """
        one = first
        budget, misses, squares = self.situation.budget, 0.0, 0.0
        for lots in range(1, self._most_lots + 1):
            misses += one.miss_fraction
            squares += one.miss_fraction * (one.together if isinstance(one, Glance) else TOGETHER)
            together = max(squares / misses, TOGETHER) if misses else TOGETHER
            doubt = DECIDES * math.sqrt(budget * together / (lots * self._requests))
            if lots == self._most_lots or abs(misses / lots - budget) >= doubt:
                break
            one = self._glance(parameters, *self._lot(lots, ahead=ahead))
        more = {"miss_fraction": misses / lots}
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
        executors = self._executors(parameters)
        service = self._pessimist if pessimistic else self.situation.service
        rows = self._rows_of(times)
        if rows is not None or self.situation.quantiles:
            return forecast(
                times, service, parameters, target, executors=executors, rows=rows, groups=self._groups,
                noise_draws=noise,
            )  # fmt: skip
        return glance(times, service, parameters, target, executors=executors, groups=self._groups, noise_draws=noise)

    def _rows_of(self, times: Sequence[float]) -> list[int] | None:
        return self._rows[: len(times)] if self._rows is not None else None

    def _executors(self, parameters: Parameters) -> int:
        """Return executors to plan with: in hope of more than were ever met, unless requests are to pass for it.

        Who passes on the strength of executors that are not there finds that out, and may not go back at that load.
        """
        service = self.situation.service
        return service.executors if parameters.pass_through else service.executors_for(parameters.max_in_flight)

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
        executors = min(self._executors(one.parameters), one.parameters.max_in_flight)
        return one.now.utilization * executors / one.now.throughput
