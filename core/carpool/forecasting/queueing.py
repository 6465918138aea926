"""Fast forecasts of latency and goodput: what parameters would do to given arrivals on a given device.

``forecast`` runs the batch recursion over explicit arrival times, batch by batch instead of event by event, about a
million requests a second. ``doubts`` says when a forecast is not to be believed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from carpool.forecasting.mixed import ROUNDING
from carpool.forecasting.recursion import Setting, in_runs, mixed, recursion, refusing, with_queue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.learning.latency_model import ServiceTime
    from carpool.policy.parameters import Parameters


class Forecast(Struct, frozen=True):
    """What to expect. Latencies in seconds over the requests served (``inf`` when none is); shares of all requests."""

    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    mean: float
    miss_fraction: float
    """Requests not answered by their due time: late, or refused."""
    shed_fraction: float
    """Requests refused on arrival or dropped at dispatch; part of the misses."""
    goodput: float
    """Answers by their due time per second."""
    throughput: float
    """Answers per second."""
    device_time: float
    """Seconds with a batch in flight per request served: shared, never the sum of batch latencies."""
    mean_batch: float
    """Rows."""
    utilization: float
    """Share of the executors' time spent computing."""
    stable: bool
    """Whether the rate lies below what full batches can serve."""
    requests: int
    """Arrivals behind the forecast; 0 for a forecast in closed form."""


class Stability(NamedTuple):
    """Whether a rate can be kept up with."""

    capacity: float
    """Rows per second of a backlog, which is served in full batches."""
    peak: float
    """Rows per second at the most productive size; more than ``capacity`` where large batches cost more a row."""
    peak_rows: int
    utilization: float
    """Rate over capacity; in a stable system an upper end, since batches that need not be full are no longer."""

    @property
    def stable(self) -> bool:
        """Whether a backlog shrinks."""
        return self.utilization < 1


def stability(rate: float, service: ServiceTime, max_batch: int, executors: int | None = None) -> Stability:
    """Compare a rate (rows per second) with what the device does.

    A backlog is drained in batches of ``max_batch``, so that is what decides stability, not the best size below it:
    with a superlinear t(b) and too large a cap a backlog that a smaller cap would drain never ends.
    """
    executors = executors or service.executors
    table = service.table(max_batch)
    productivity = [rows * executors / table[rows] for rows in range(1, max_batch + 1)]
    peak = max(productivity)
    return Stability(productivity[-1], peak, productivity.index(peak) + 1, rate / productivity[-1])


def forecast(
    arrivals: Sequence[float],
    service: ServiceTime,
    parameters: Parameters,
    slo_target: float,
    *,
    shed: bool = False,
    deadline: float = math.inf,
    executors: int | None = None,
    rows: Sequence[int] | None = None,
    groups: Sequence[float] = (1.0,),
    noise_draws: Sequence[float] | None = None,
    latencies: list[float] | None = None,
    sizes: list[int] | None = None,
) -> Forecast:
    """Forecast what happens to ``arrivals`` (seconds, ascending, at least one), all of equal priority.

    A batch leaves at d = max(first free slot, a0, min(a0 + W, aB)): when a slot is free and it is full, or its oldest
    has waited W = ``max_wait``, or waiting on would make its oldest later than ``slo_target``. Slots beyond
    ``executors`` (default: the fitted ones) only queue at the device. ``shed`` refuses whom the SLO can't be kept for,
    on arrival and at dispatch; without it that is done at ``deadline`` seconds of age. ``rows`` gives each request's
    rows (default 1); requests larger than the cap are split. Where ``service`` has a mix, those of one row ride with
    others of their length bucket, drawn by the buckets' shares. ``groups``: shares of the requests that have one key
    each, where they have several; these have equally many rows. ``noise_draws`` are multipliers of service times, one a
    batch, over and over. To ``latencies``, if given, those of all who are served are appended, in order of arrival
    (with a mix, of service); to ``sizes`` the rows of every batch.
    """
    setting = Setting.of(
        service,
        parameters,
        slo_target,
        executors,
        noise_draws,
        deadline=deadline,
        shed=shed,
        largest=max(rows, default=0) if rows else 0,
    )
    run = None
    unit = rows[0] if rows else 1
    grouped = len(groups) > 1 and unit <= setting.cap
    if (grouped or (service.mix and rows is None)) and deadline == math.inf:
        run = mixed(arrivals, service, setting, groups, unit)
    elif rows is None and not shed:
        run = recursion(arrivals, setting).run(arrivals, setting)
        # Who is refused is predicted late behind full batches: at most two of these more than it would take.
        if deadline < math.inf and max(run.latencies) + 2 * setting.times[setting.cap] > deadline:
            run = None
    elif rows is None and deadline == math.inf and not setting.passing and setting.times[1] <= slo_target:
        run = refusing(arrivals, setting)
    if run is None:
        run = with_queue(arrivals, rows or [1] * len(arrivals), setting)
    if latencies is not None:
        latencies += run.latencies
    if sizes is not None:
        sizes += run.sizes
    run.latencies.sort()
    total_rows = sum(rows) if rows is not None else len(arrivals)
    count, served = len(arrivals), len(run.latencies)
    span = max(run.end, arrivals[-1]) - arrivals[0]
    on_time = bisect_right(run.latencies, slo_target + ROUNDING)
    offered = max(arrivals[-1] - arrivals[0], 1e-9)
    # Over one arrival fewer: n arrivals span n - 1 gaps.
    rate = total_rows / count * (count - 1) / offered
    p50, p90, p95, p99, p999 = (_quantile(run.latencies, q) for q in QUANTILES)
    return Forecast(
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        p999=p999,
        mean=math.fsum(run.latencies) / served if served else math.inf,
        miss_fraction=1 - on_time / count,
        shed_fraction=1 - served / count,
        goodput=on_time / span,
        throughput=served / span,
        device_time=run.device_busy / served if served else 0.0,
        mean_batch=sum(run.sizes) / len(run.sizes) if run.sizes else 0.0,
        utilization=run.work / (setting.executors * span),
        stable=rate < setting.cap * setting.executors / setting.times[setting.cap],
        requests=count,
    )


class Glance(NamedTuple):
    """The figures of a ``Forecast`` that most choices need, for half of what it costs."""

    miss_fraction: float
    device_time: float
    together: float = 1.0
    """With how many one who misses does, itself included: in how large runs of late batches."""
    mean: float = 0.0
    utilization: float = 0.0


def glance(
    arrivals: Sequence[float],
    service: ServiceTime,
    parameters: Parameters,
    slo_target: float,
    *,
    executors: int | None = None,
    groups: Sequence[float] = (1.0,),
    noise_draws: Sequence[float] | None = None,
) -> Glance:
    """Forecast a few figures as ``forecast`` does: of requests of one row, none of them refused."""
    setting = Setting.of(service, parameters, slo_target, executors, noise_draws)
    count = len(arrivals)
    if service.mix or len(groups) > 1:
        run = mixed(arrivals, service, setting, groups)
        latencies, limit = iter(run.latencies), slo_target + ROUNDING
        late, squares = in_runs(sum(map(limit.__lt__, islice(latencies, size))) for size in run.sizes)
        busy, waited, work, end = run.device_busy, math.fsum(run.latencies), run.work, run.end
    else:
        course = recursion(arrivals, setting)
        late, squares = course.late(arrivals, slo_target + ROUNDING)
        busy, end = course.busy(), max(course.finishes)
        waited, work = course.sums(arrivals, setting)
    span = max(end, arrivals[-1]) - arrivals[0]
    return Glance(
        miss_fraction=1 - (count - late) / count,
        device_time=busy / count,
        together=squares / late if late else 1.0,
        mean=waited / count,
        utilization=work / (setting.executors * span),
    )


QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


def _quantile(ascending: Sequence[float], q: float) -> float:
    """Smallest value that a share ``q`` does not exceed (nearest rank); ``inf`` of nothing."""
    return ascending[max(math.ceil(q * len(ascending)) - 1, 0)] if ascending else math.inf


class Doubt(StrEnum):
    """Why a forecast may be wrong."""

    TOO_FEW_ARRIVALS = "TooFewArrivals"
    NEAR_SATURATION = "NearSaturation"
    EXTRAPOLATED = "Extrapolated"
    TOO_FEW_SAMPLES = "TooFewSamples"


def too_few_arrivals(arrivals: int, quantile: float) -> bool:
    """Whether fewer than ten requests are expected beyond a quantile: 1,000 arrivals carry a p99, 200 a p95."""
    return arrivals * (1 - quantile) < 10 - 1e-9


def near_saturation(utilization: float, seconds: float, service_seconds: float) -> bool:
    """Whether the horizon decides the answer: close to saturation a queue takes long to settle.

    Its relaxation time is about t / (1 - utilization)^2 (Kleinrock, Queueing Systems II, 2.9); ten of these must fit
    in. Beyond 0.95 small errors of t(b) matter more than any horizon.
    """
    return utilization > 0.95 or seconds * (1 - utilization) ** 2 < 10 * service_seconds


def doubts(
    expected: Forecast, service: ServiceTime, max_batch: int, *, quantile: float = 0.99, seconds: float = math.inf
) -> tuple[Doubt, ...]:
    """Return every reason not to trust a forecast made over ``seconds`` of arrivals; none is a good sign."""
    found = []
    if expected.requests and too_few_arrivals(expected.requests, quantile):
        found.append(Doubt.TOO_FEW_ARRIVALS)
    if near_saturation(expected.utilization, seconds, service.time(max_batch)):
        found.append(Doubt.NEAR_SATURATION)
    if max_batch > service.largest_measured:
        found.append(Doubt.EXTRAPOLATED)
    if service.samples < 20:
        found.append(Doubt.TOO_FEW_SAMPLES)
    return tuple(found)
