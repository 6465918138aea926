"""Forecasts of any setting for one situation: the load, the device and the SLO. Each is made at most once."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from carpool.forecasting import sampling
from carpool.forecasting.forecast import TOGETHER, Forecast, Glance, Load, batches, forecast, glance
from carpool.forecasting.refinement import Refinement
from carpool.learning import batchable_share
from carpool.learning.arrivals import Fitted
from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Limits, Parameters
from carpool.policy.spec import PERCENTILES

HEADROOM = 1.25
"""Factor on the load at which a preferred setting must also meet the SLO."""

REQUESTS = 4000
"""Least requests that a forecast plays: with a planning budget of 0.5 %, 20 of them may miss."""

LASTING, LASTING_LOSS = 10, 40
"""Least duration of a forecast, as a multiple of the SLO's target. It is longer when losses are compared: the empty
queue at the start admits requests that would be refused later."""

MOST_REQUESTS = 16_000
"""Requests that it plays at most."""

DECIDES = 2.0
"""Standard errors beyond the budget at which chance does not explain the misses. With runs of n, as compound Poisson
events, the variance of their number is n times its mean."""


class Situation(Struct, frozen=True):
    """The input of a choice. Seconds and requests per second."""

    process: Fitted
    service: ServiceTime
    target: float
    """The due time of the SLO's highest percentile, in seconds from arrival."""
    budget: float
    """Fraction of requests that may be forecast to miss: half of what the SLO allows."""
    limits: Limits
    margin: float = 1.0
    """Share of the target within which answers are planned. Batches always leave by the whole target."""
    rows: float = 1
    """Mean rows of a request."""
    row_shares: tuple[float, ...] = ()
    """Shares of requests by rows, in powers of two, as ``ModelStats.request_rows``; empty: all have ``rows``."""
    quantiles: tuple[tuple[float, float], ...] = ()
    """The SLO's other percentiles as (quantile, seconds)."""
    share: float = 1.0
    """Share of the arrivals that can share a batch with the next one (``batchable_share``)."""
    largest: int | None = None
    """Rows that a batch may have if that is less than ``max_batch`` (``size_limit``)."""

    rest: float = 1.0
    """Share of the device that other models leave: ``service`` is slower by it than measured."""

    def with_the_whole_device(self) -> Self:
        """Return the same without other models."""
        return replace(self, service=self.service.scaled(self.rest), rest=1.0)

    @property
    def usual_rows(self) -> int:
        """Rows of a usual request: the rounded mean."""
        return max(round(self.rows), 1)

    @property
    def alone(self) -> float:
        """Seconds that the smallest request takes at least; 0: unknown, or measured as one of many in the server."""
        service, rows = self.service, self.usual_rows
        if self.row_shares:
            rows = 2 ** next(power for power, share in enumerate(self.row_shares) if share) // 2 + 1
        if service.sizes[0] > rows or service.executors > self.limits.max_in_flight:
            return 0.0
        return self.rest * min(curve.lower(rows) for curve in [each for _, each in service.mix] or [service])

    @property
    def is_out_of_reach(self) -> bool:
        """Whether even the smallest request takes longer than the SLO, with no other in front of it."""
        return self.alone > self.target

    @property
    def is_crowded(self) -> bool:
        """Whether others use a tenth of the device, so that only batches of all that waits are right.

        Batches take turns with theirs, and a backlog grows meanwhile. Smaller ones need more device time; others then
        wait longer, and take smaller ones as well.
        """
        return self.rest < 0.9 and not self.is_out_of_reach


class Assessment:
    """Forecasts of one setting, each made at first use: most are never needed in full, or at all."""

    __slots__ = ("__dict__", "parameters")

    def __init__(self, forecaster: Forecaster, parameters: Parameters, effective: Parameters) -> None:
        """``effective``: ``parameters`` as the Batcher applies them."""
        self.parameters = parameters
        self.forecaster = forecaster
        self.effective = effective
        self.refinement = Refinement()

    def of(self, parameters: Parameters) -> Assessment:
        """Return the same forecasts for other parameters that the Batcher would apply in the same way."""
        other = Assessment.__new__(Assessment)
        other.parameters, other.__dict__ = parameters, self.__dict__
        return other

    @property
    def situation(self) -> Situation:
        """The situation of the forecasts."""
        return self.forecaster.situation

    @property
    def holds_now(self) -> bool:
        """Whether the SLO is forecast to be met."""
        return not self.is_overload and self._meets(self.glance)

    @property
    def holds_ahead(self) -> bool:
        """Whether the SLO is also forecast to be met at ``HEADROOM`` times the load."""
        return self.holds_now and not self.is_overload_ahead and self._meets(self.glance_ahead)

    def _meets(self, result: Glance) -> bool:
        situation = self.situation
        return result.miss_fraction <= situation.budget and all(
            getattr(result, PERCENTILES[q]) <= seconds for q, seconds in situation.quantiles
        )

    @cached_property
    def is_overload(self) -> bool:
        """Whether the load exceeds the capacity of full batches: a backlog then grows, however slowly."""
        return self.forecaster.load_share(self.effective) >= 1

    @cached_property
    def is_overload_ahead(self) -> bool:
        """The same at ``HEADROOM`` times the load."""
        return HEADROOM * self.forecaster.load_share(self.effective) >= 1

    @cached_property
    def first(self) -> Glance:
        """The present load, no request refused, from one sample of arrivals."""
        return self.forecaster.glance(self.effective)

    @cached_property
    def glance(self) -> Glance:
        """The same, with enough samples to decide whether the misses are within the budget."""
        return self.forecaster.judge(self.effective, self.first)

    @cached_property
    def glance_ahead(self) -> Glance:
        """The same at ``HEADROOM`` times the load."""
        return self.forecaster.judge(self.effective, self.forecaster.glance(self.effective, HEADROOM), HEADROOM)

    @property
    def device_time(self) -> float:
        """Device time per request at the present load, in seconds."""
        return self.first.device_time if self.holds_now else self.now.device_time

    @property
    def mean(self) -> float:
        """Mean latency (seconds) at the present load, no request refused."""
        return self.first.mean

    @property
    def utilization(self) -> float:
        """Share of the device's capacity, 0 to 1, that the present load uses, no request refused."""
        concurrency = self.situation.service.executors
        used = min(concurrency, self.parameters.max_in_flight)
        return min(self.first.utilization * used / concurrency, 1.0)

    @cached_property
    def batches(self) -> list[int]:
        """Requests of each batch at the present load, no request refused."""
        situation = self.situation
        return batches(self.forecaster.load(), situation.service, self.effective, situation.target)

    @cached_property
    def present(self) -> Forecast:
        """The present load, no request refused."""
        return self.forecaster.forecast(self.effective)

    @cached_property
    def now(self) -> Forecast:
        """The present load; if that misses the SLO, with requests that would be late refused."""
        return self.present if self.holds_now else self.forecaster.forecast(self.effective, shed=True)

    @cached_property
    def ahead(self) -> Forecast:
        """``HEADROOM`` times the load; if the present load already misses the SLO, the present load."""
        return self.forecaster.forecast(self.effective, HEADROOM) if self.holds_now else self.present

    @property
    def refined(self) -> Forecast:
        """``now``, with its tail from all requests that ``refine`` has played."""
        return self.refinement.refined(self.now)

    def refine(self) -> bool:
        """Play another sample of arrivals for ``refined``; return whether it needs no more."""
        if not self.refinement.is_done:
            self.forecaster.sample(self.effective, self.refinement, shed=not self.holds_now)
        return self.refinement.is_done

    @cached_property
    def lost(self) -> float:
        """Misses with refusals, at the upper confidence of batch latency.

        With the mean, the least measured of equally good sizes would seem best by chance.
        """
        return self.forecaster.loss(self.effective)

    @cached_property
    def lost_ahead(self) -> float:
        """The same at ``HEADROOM`` times the load."""
        return self.forecaster.loss(self.effective, HEADROOM)

    @property
    def least_loss(self) -> float:
        """Return the share of the present load that is lost even if all batches are full and in time."""
        return self.forecaster.least_loss(self.effective)

    @cached_property
    def risk(self) -> float:
        """Forecast fraction of misses at the upper confidence of batch latency."""
        return self.forecaster.glance(self.effective, upper=True).miss_fraction


class Forecaster:
    """Forecasts settings for one situation, each at most once."""

    samples = 8
    """Most samples of ``requests`` played when misses are near the budget; recorded arrivals are one sample."""

    def __init__(self, situation: Situation, parts: int = 0) -> None:
        """``parts``: as the attribute."""
        self.situation = situation
        self.parts = parts
        """Number of samples that are parts of one long run and differ in rate; 0: each has the exact rate."""
        self._upper = situation.service.pessimistic()
        self._groups = batchable_share.groups(
            situation.share, batchable_share.MOST_GROUPS // max(len(situation.service.mix), 1)
        )
        self._known: dict[Parameters, Assessment] = {}
        self._loads: dict[tuple[float, int, int], Load] = {}

    @cached_property
    def requests(self) -> int:
        """Number of requests that a forecast plays."""
        return self._lasting(LASTING)

    def _lasting(self, targets: float) -> int:
        """Return the number of requests in ``targets`` times the SLO's target, within bounds."""
        count = targets * self.situation.target * self.situation.process.rate
        # In powers of two, so that loads that differ little share their arrivals.
        return min(REQUESTS << max(math.ceil(math.log2(count / REQUESTS)), 0), MOST_REQUESTS)

    def load(self, factor: float = 1.0, sample: int = 0, count: int = 0) -> Load:
        """Return a sample of ``count`` arrivals (0: ``requests``) at ``factor`` times the load."""
        key = factor, sample, count or self.requests
        if key not in self._loads:
            self._loads[key] = self._drawn(*key)
        return self._loads[key]

    def _drawn(self, factor: float, sample: int, count: int) -> Load:
        situation = self.situation
        rows = sampling.rows(situation.row_shares, count, sample) if situation.row_shares else situation.usual_rows
        scale = situation.rows / (rows if isinstance(rows, int) else sum(rows) / len(rows))
        times = sampling.times(situation.process, count, factor * scale, sample, self.parts)
        return Load(times, rows, self._groups, sampling.draws(situation.service.noise, sample), scale)

    def rest(self) -> None:
        """Drop large data that is quickly made again: an operator has a thousand of these, and most are idle."""
        self._loads.clear()

    def assess(self, parameters: Parameters) -> Assessment:
        """Return a setting's forecasts."""
        effective = self.effective(parameters)
        known = self._known.get(effective)
        if known is None:
            known = self._known[effective] = Assessment(self, effective, effective)
        return known if parameters == effective else known.of(parameters)

    def effective(self, parameters: Parameters) -> Parameters:
        """Return a setting as the Batcher applies it: if no request can share a batch, it holds none."""
        situation = self.situation
        if situation.largest is not None and situation.largest < parameters.max_batch:
            parameters = replace(parameters, max_batch=max(situation.largest, situation.usual_rows))
        if situation.share <= batchable_share.NONE:
            return replace(parameters, max_wait=Duration(0.0), max_batch=situation.usual_rows)
        return parameters if self.holds(parameters.max_wait) else replace(parameters, max_wait=Duration(0.0))

    def holds(self, wait: float) -> bool:
        """Whether the Batcher holds requests for so many seconds."""
        return batchable_share.pays_to_hold(self.situation.share, self.situation.process.rate, wait)

    def forecast(
        self, parameters: Parameters, factor: float = 1.0, sample: int = 0, *, shed: bool = False, upper: bool = False
    ) -> Forecast:
        """Play ``factor`` times the load; ``shed``: refuse what is late; ``upper``: at the upper batch latency."""
        situation = self.situation
        service, margin = self._upper if upper else situation.service, 1.0 if shed else situation.margin
        return forecast(self.load(factor, sample), service, parameters, situation.target, margin=margin, shed=shed)

    def loss(self, parameters: Parameters, factor: float = 1.0) -> float:
        """Return the share of requests lost with refusals, at the upper confidence of batch latency."""
        load = self.load(factor, count=self._lasting(LASTING_LOSS))
        found = forecast(load, self._upper, parameters, self.situation.target, shed=True).miss_fraction
        # With a target of many seconds, the backlog at its end is a large part of even the longest forecast.
        return max(found, self.least_loss(parameters, factor))

    def load_share(self, parameters: Parameters, *, upper: bool = False) -> float:
        """Return the load as a share of what full batches carry, of all kinds in the mix."""
        situation, most = self.situation, parameters.max_batch
        service = self._upper if upper else situation.service
        seconds = sum(share * own.per_row(most) for share, own in service.mix or ((1.0, service),))
        concurrency = min(service.executors, parameters.max_in_flight)
        return situation.process.rate * situation.rows * seconds / concurrency

    def least_loss(self, parameters: Parameters, factor: float = 1.0) -> float:
        """Return a lower bound of ``loss``: what batches of the cheapest size do not carry."""
        situation, service = self.situation, self._upper
        if situation.row_shares or service.mix:
            return 0.0  # small and short requests are refused less
        most = parameters.max_batch
        # Between measured sizes batch latency is linear, so the cheapest size is one of them, or the largest.
        seconds = min(service.per_row(size) for size in (*service.sizes, most) if size <= most)
        concurrency = min(service.executors, parameters.max_in_flight)
        return max(1 - concurrency / (seconds * situation.rows * situation.process.rate * factor), 0.0)

    def glance(
        self, parameters: Parameters, factor: float = 1.0, sample: int = 0, *, count: int = 0, upper: bool = False
    ) -> Glance:
        """Play the same for fewer figures, which is cheaper; at the upper confidence without noise."""
        situation, load = self.situation, self.load(factor, sample, count)
        service = self._upper if upper else situation.service
        if upper:
            load = load._replace(draws=(1.0,))
        if situation.quantiles:
            return forecast(load, service, parameters, situation.target, margin=situation.margin)
        return glance(load, service, parameters, situation.target, situation.margin)

    def judge(self, parameters: Parameters, first: Glance, factor: float = 1.0) -> Glance:
        """Return a first glance, with misses from more requests if its own do not decide whether the budget is kept.

        Device time stays that of the first sample, so that candidates are compared on the same arrivals.
        """
        one = first
        budget, misses, squares = self.situation.budget, 0.0, 0.0
        for samples in range(1, self.samples + 1):
            misses += one.miss_fraction
            squares += one.miss_fraction * one.together
            together = max(squares / misses, TOGETHER) if misses else TOGETHER
            doubt = DECIDES * math.sqrt(budget * together / (samples * self.requests))
            if samples == self.samples or abs(misses / samples - budget) >= doubt:
                break
            one = self.glance(parameters, factor, samples)
        return replace(first, miss_fraction=misses / samples)

    def sample(self, parameters: Parameters, played: Refinement, *, shed: bool) -> None:
        """Play the load once more, with a sample of its own, and add its latencies."""
        number = played.samples
        load = self.load()
        if number and self.samples > 1:
            # Not kept: a hundred may be played, each once.
            arrivals = sampling.times(self.situation.process, self.requests, load.scale, number, exact=False)
            load = load._replace(arrivals=arrivals, draws=sampling.draws(self.situation.service.noise, number))
        latencies: list[float] = []
        situation = self.situation
        service, margin = situation.service, 1.0 if shed else situation.margin
        found = forecast(load, service, parameters, situation.target, margin=margin, shed=shed, latencies=latencies)
        played.add(latencies, found.miss_fraction, found.requests)

    def single_load(self) -> float:
        """Return the share of the device's capacity that single requests would take at ``HEADROOM`` times the load."""
        situation, service = self.situation, self.situation.service
        # Below the smallest measured size a line may end at 1 ms when the true latency is 13 ms.
        rows = situation.usual_rows
        seconds = service.time(rows) if service.sizes[0] <= rows else service.upper(rows)
        return HEADROOM * situation.process.rate * seconds / service.executors

    def saving(self, one: Assessment, other: Assessment) -> float:
        """Return the saving of ``one`` over ``other`` in device time per request, or in used capacity if that is more.

        A device that computes several batches at once may be busy all the time while requests use more of its
        capacity than they need.
        """
        wall = 1 - one.now.device_time / other.now.device_time
        return max(wall, 1 - self._work(one) / self._work(other))

    def _work(self, one: Assessment) -> float:
        concurrency = min(self.situation.service.executors, one.parameters.max_in_flight)
        return one.now.utilization * concurrency / one.now.throughput
