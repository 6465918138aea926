"""Latency, misses, utilization and goodput of given arrivals on a given device, with given parameters."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from carpool.batching.requests import ROUNDING, seldom_exceeded
from carpool.forecasting.recursion import Rules, Run, recursion, refusing
from carpool.forecasting.replay import Kind, replay
from carpool.policy.spec import PERCENTILES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.learning.latency_model import ServiceTime
    from carpool.policy.parameters import Parameters


TOGETHER = 3.0
"""Least requests that miss together. A burst makes seven late, or hundreds: then 20 misses are three events."""


class Glance(Struct, frozen=True):
    """The figures that most choices need, at half the cost of a ``Forecast``. Shares are of all requests."""

    miss_fraction: float
    """Requests not answered by their due time: late, or refused."""
    device_time: float
    """Seconds with a batch in flight per request served: shared, never the sum of batch latencies."""
    mean: float
    """Latency in seconds over the requests served (``inf`` when none is)."""
    utilization: float
    """Share of the device's capacity, over all batches it can compute at once, that is used."""
    together: float = TOGETHER
    """Mean number of requests that miss together, over those that miss: the length of runs of late batches."""


class Forecast(Glance, frozen=True, kw_only=True):
    """All figures. Latencies in seconds over the requests served (``inf`` when none is)."""

    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    shed_fraction: float
    """Requests refused on arrival or dropped at dispatch; part of the misses."""
    goodput: float
    """Answers by their due time per second."""
    throughput: float
    """Answers per second."""
    mean_batch: float
    """Rows per batch."""
    requests: int
    """Number of arrivals played."""


class Load(NamedTuple):
    """Requests to be played."""

    arrivals: Sequence[float]
    """Seconds, ascending, at least one."""
    rows: Sequence[int] | int = 1
    """Rows of each request, or one number for all."""
    groups: Sequence[float] = (1.0,)
    """Shares of the requests that have one batch key each."""
    draws: tuple[float, ...] = (1.0,)
    """Multipliers of batch times."""
    scale: float = 1.0
    """Requests played for each real one: as many rows come, but drawn rows have another mean."""


def forecast(
    load: Load, service: ServiceTime, parameters: Parameters, target: float, *, margin: float = 1.0, shed: bool = False,
    latencies: list[float] | None = None,
) -> Forecast:  # fmt: skip
    """Forecast what happens to requests of equal priority that are to be answered within ``target`` seconds.

    ``margin``: share of these after which an answer counts as late. ``shed``: requests that would be late are refused.
    Requests larger than a batch are split. To ``latencies``, if given, those of all requests served are added.
    """
    rules = _rules(load, service, parameters, target, shed=shed)
    run = _played(load, service, rules)
    if latencies is not None:
        latencies += run.latencies
    run.latencies.sort()
    arrivals = load.arrivals
    count, served = len(arrivals), len(run.latencies)
    span = max(run.end, arrivals[-1]) - arrivals[0]
    on_time = bisect_right(run.latencies, margin * target + ROUNDING)
    return Forecast(
        **{name: _quantile(run.latencies, q) for q, name in PERCENTILES.items()},
        mean=math.fsum(run.latencies) / served if served else math.inf,
        miss_fraction=1 - on_time / count,
        shed_fraction=1 - served / count,
        goodput=on_time / load.scale / span,
        throughput=served / load.scale / span,
        device_time=load.scale * run.busy / served if served else 0.0,
        mean_batch=run.rows / len(run.sizes) if run.sizes else 0.0,
        utilization=run.work / (rules.concurrency * span),
        requests=count,
    )


def glance(load: Load, service: ServiceTime, parameters: Parameters, target: float, margin: float = 1.0) -> Glance:
    """Forecast a few figures as ``forecast`` does, with no request refused."""
    rules = _rules(load, service, parameters, target, margin)
    arrivals, limit = load.arrivals, margin * target + ROUNDING
    run: Run
    if (unit := _unit(load, service, rules)) is not None:
        run = tally = recursion(arrivals, *unit)
        waited = tally.waited
    else:
        run = _played(load, service, rules)
        waited = math.fsum(run.latencies)
        ordered = iter(run.latencies)
        for size in filter(None, run.sizes):
            run.missed(sum(map(limit.__lt__, islice(ordered, size))))
    count, span = len(arrivals), max(run.end, arrivals[-1]) - arrivals[0]
    return Glance(
        miss_fraction=run.misses / count,
        device_time=load.scale * run.busy / count,
        mean=waited / count,
        utilization=run.work / (rules.concurrency * span),
        together=run.squares / run.misses if run.misses else 1.0,
    )


def batches(load: Load, service: ServiceTime, parameters: Parameters, target: float) -> list[int]:
    """Return the requests of each batch, with no request refused."""
    return _played(load, service, _rules(load, service, parameters, target)).sizes


def _rules(
    load: Load, service: ServiceTime, parameters: Parameters, target: float, margin: float = 1.0, *, shed: bool = False
) -> Rules:
    return Rules(
        cap=parameters.max_batch,
        wait=parameters.hold,
        slots=parameters.max_in_flight,
        passing=parameters.pass_through,
        concurrency=min(service.executors, parameters.max_in_flight),
        target=target,
        margin=margin,
        shed=shed,
        surely=seldom_exceeded(service.noise),
        draws=load.draws,
    )


def _unit(load: Load, service: ServiceTime, rules: Rules) -> tuple[tuple[float, ...], tuple[float, ...], Rules] | None:
    """Return batch times and rules in requests, if all requests are alike and one queue serves them."""
    rows, cap = load.rows, rules.cap
    if service.mix or len(load.groups) > 1 or not isinstance(rows, int) or rows > cap or cap % rows:
        return None
    return _times(service, cap)[::rows], _slow(service, cap)[::rows], replace(rules, cap=cap // rows)


def _played(load: Load, service: ServiceTime, rules: Rules) -> Run:
    unit = _unit(load, service, rules)
    if unit is not None and not (rules.shed and rules.passing):
        run = refusing(load.arrivals, *unit) if rules.shed else recursion(load.arrivals, *unit, keeps=True)
        run.rows *= rules.cap // unit[2].cap
        return run
    rows = [load.rows] * len(load.arrivals) if isinstance(load.rows, int) else load.rows
    largest = max(rules.cap, *rows) if rules.passing else rules.cap
    kinds = [
        Kind(share * group, _times(own, largest), _slow(own, rules.cap))
        for share, own in service.mix or ((1.0, service),)
        for group in load.groups
    ]
    return replay(load.arrivals, rows, kinds, rules)


# A search needs the same few again and again, for every length bucket.
@lru_cache(maxsize=256)
def _times(service: ServiceTime, largest: int) -> tuple[float, ...]:
    return service.table(largest)


@lru_cache(maxsize=256)
def _slow(service: ServiceTime, largest: int) -> tuple[float, ...]:
    return tuple(service.slow(size) for size in range(largest + 1))


def _quantile(ascending: Sequence[float], q: float) -> float:
    """Return the smallest value that a share ``q`` does not exceed (nearest rank); ``inf`` without values."""
    return ascending[max(math.ceil(q * len(ascending)) - 1, 0)] if ascending else math.inf
