"""A day with an autoscaler: the rules of an HPA or of KEDA, with replicas that are read from a table.

Steps are 15 s, as an HPA's. A replica answers or rejects a request within its SLO, so no backlog lasts into the next
step, and the table gives each step's result for its load (``replica``). Only requests held for the first replica arrive
with the next requests, all at once.
"""

from __future__ import annotations

import math
from collections import deque
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from carpool.forecasting.capacity import replicas
from carpool.policy.durations import Duration
from carpool_cli.autoscaling.controller import CPU, LOAD, NEEDED, REQUESTS, Autoscaler, Controller, Metric
from carpool_operator.tuning.target_load import WINDOW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from carpool_cli.planning.replica import Replica

STEP = 15.0
"""Seconds between an HPA's checks, and over which metrics are measured."""

SEVERAL = 30.0
"""Number of requests from which the count is drawn from a normal distribution."""


class Steps(NamedTuple):
    """Results by step."""

    rates: list[float]
    replicas: list[int]
    """Running replicas, including starting ones: all have a cost."""
    serving: list[int]
    busy: list[float]
    missed: list[float]
    """Shares of the arrived requests; all held requests are late."""
    held: list[float]
    """Shares that waited for a first replica."""


class Day(Struct, frozen=True, rename="camel", kw_only=True):
    """The result of a day."""

    name: str
    replica_hours: float
    misses: float
    """Share of all requests that were late or rejected, including held ones."""
    held: float
    """Share of all requests that were held until a first replica served."""
    scalings: int
    """Times that the number of replicas changed."""
    most: int


class _Fleet:
    """Serving replicas, and starting ones."""

    def __init__(self, serving: int, cold_start: float) -> None:
        self.serving = serving
        self._starting: list[float] = []
        self._cold_start = cold_start

    @property
    def current(self) -> int:
        return self.serving + len(self._starting)

    def look(self, now: float) -> None:
        """Let replicas serve whose start is complete."""
        self.serving += sum(at <= now for at in self._starting)
        self._starting = [at for at in self._starting if at > now]

    def scale(self, now: float, wanted: int) -> None:
        """Start or end replicas; the youngest end first, as in a ReplicaSet."""
        self._starting += [now + self._cold_start] * (wanted - self.current)
        while self.current > wanted:
            if self._starting:
                self._starting.pop()
            else:
                self.serving -= 1


def play(
    scaler: Autoscaler,
    table: Replica,
    rates: Sequence[float],
    *,
    cold_start: float,
    seed: int = 0,
    known: Callable[[float], float] = lambda _: 1.0,
) -> Steps:
    """Play loads (requests per second, by ``STEP``) with replicas that serve ``cold_start`` seconds after their start.

    It begins with the replicas that the first load needs. The autoscaler sees the random counts of one step. If none
    runs, the first request starts one, and waits for it with those that follow (KEDA's HTTP add-on). ``known``:
    Carpool's estimate of the capacity, as a share of the true one, by a replica's load.
    """

    def totals(rate: float, serving: int) -> list[float]:
        return [_total(metric.name, table, rate, serving, known) for metric in scaler.metrics]

    def is_enough(replicas: int) -> bool:
        sums = zip(scaler.metrics, totals(rates[0], replicas), strict=True)
        return all(total <= metric.target * replicas for metric, total in sums)

    rng = Random(seed)  # noqa: S311 - a simulation
    least = scaler.least or int(rates[0] > 0)
    while 0 < least < scaler.most and not is_enough(least):
        least += 1
    fleet, controller = _Fleet(least, cold_start), Controller(scaler, 0.0, least)
    # The operator counts the replicas needed over its own window, before the HPA's.
    kept = [1 + (round(WINDOW / STEP) if metric.name == NEEDED else 0) for metric in scaler.metrics]
    lately = [deque([0.0], maxlen=most) for most in kept]
    steps, waiting, last = Steps([], [], [], [], [], []), 0.0, 0.0
    for index, rate in enumerate(rates):
        now = index * STEP
        fleet.look(now)
        # 1. Arrivals, and held requests; with either there is no pause
        last = now + STEP if rate or waiting else last
        if rate and not fleet.current:
            fleet.scale(now, 1)
        if fleet.serving:
            released = rate + waiting / STEP
            each, waiting = released / fleet.serving, 0.0
            found = (table.utilization(each), table.misses(each), 0.0)
        else:
            released, waiting, found = 0.0, waiting + rate * STEP, (0.0, 1.0, 1.0)
        for values, value in zip(steps, (rate, fleet.current, fleet.serving, *found), strict=True):
            values.append(value)  # type: ignore[attr-defined] # lists of numbers
        # 2. The autoscaler's decision; while no replica serves, nothing is measured
        counted = max(rng.gauss(released * STEP, math.sqrt(released * STEP)), 0.0) / STEP
        measured = totals(counted, fleet.serving) if fleet.serving else [0.0] * len(lately)
        for values, value in zip(lately, measured, strict=True):
            values.append(value)
        if fleet.serving:
            wanted = scaler.wanted([max(values) for values in lately], fleet.serving, fleet.current)
            fleet.scale(now, controller.decide(now, wanted, fleet.current))
        if not scaler.least and now + STEP - last >= scaler.cooldown:
            fleet.scale(now, 0)
    return steps


def _total(metric: str, table: Replica, rate: float, serving: int, known: Callable[[float], float]) -> float:
    """Return the sum of a metric over the replicas that serve."""
    if metric == CPU:
        return 100 * serving * table.utilization(rate / serving)
    if metric == REQUESTS:
        return rate
    load = rate / table.capacity
    load /= known(load / serving)
    return float(replicas(load)) if metric == NEEDED else load


def clairvoyant(table: Replica, rates: Sequence[float], *, cold_start: float, least: int = 1) -> Steps:
    """Return the fewest replica-hours that keep every step within the capacity, with all loads known in advance.

    A replica starts before it is needed, by its start time. It runs through any shorter pause: a new one would cost
    more.
    """
    needed = [max(math.ceil(rate / table.capacity - 1e-9), least) for rate in rates]
    warm, count = round(cold_start / STEP), len(needed)
    running, serving = [0] * count, [0] * count
    for level in range(1, max(needed) + 1):
        for first, last in _spans([need >= level for need in needed], warm):
            for index in range(max(first - warm, 0), last + 1):
                running[index] += 1
                serving[index] += index >= first
    each = [rate / max(ready, 1) for rate, ready in zip(rates, serving, strict=True)]
    busy, missed = [table.utilization(one) for one in each], [table.misses(one) for one in each]
    return Steps(list(rates), running, serving, busy, missed, [0.0] * count)


def _spans(wanted: Sequence[bool], warm: int) -> Iterator[tuple[int, int]]:
    """List (first, last) of the times in which a replica runs; pauses of up to ``warm`` steps are bridged."""
    first = last = -1
    for index, is_wanted in enumerate(wanted):
        if not is_wanted:
            continue
        if first >= 0 and index - last - 1 > warm:
            yield first, last
            first = index
        first, last = (index if first < 0 else first), index
    if first >= 0:
        yield first, last


def summary(name: str, steps: Steps) -> Day:
    """Return a day's totals."""
    requests = sum(steps.rates) or 1.0
    missed, held = (
        sum(rate * share for rate, share in zip(steps.rates, shares, strict=True)) / requests
        for shares in (steps.missed, steps.held)
    )
    return Day(
        name=name,
        replica_hours=sum(steps.replicas) * STEP / 3600,
        misses=missed,
        held=held,
        scalings=sum(one != other for one, other in zip(steps.replicas, steps.replicas[1:], strict=False)),
        most=max(steps.replicas),
    )


def diurnal(peak: float, seconds: float = 86_400.0, low: float = 0.15) -> list[float]:
    """Return a day's rates by ``STEP``: lowest at 4 h (``low`` of the peak), highest at 16 h."""
    middle, swing = (1 + low) / 2, (1 - low) / 2
    count = round(seconds / STEP)
    return [peak * (middle - swing * math.cos(2 * math.pi * (index / count - 4 / 24))) for index in range(count)]


def drawn(rates: Sequence[float], seed: int) -> list[float]:
    """Return random numbers of requests (Poisson), as rates: 0 where none arrived."""
    rng = Random(seed)  # noqa: S311 - a simulation
    return [_poisson(rate * STEP, rng) / STEP for rate in rates]


def _poisson(mean: float, rng: Random) -> int:
    if mean > SEVERAL:
        return max(round(rng.gauss(mean, math.sqrt(mean))), 0)
    count, left = -1, mean
    while left >= 0:
        left -= rng.expovariate(1.0)
        count += 1
    return count


def binned(times: Sequence[float], factor: float = 1.0) -> list[float]:
    """Return recorded arrivals (seconds, from 0) as rates by ``STEP``, times ``factor``.

    A last, unfinished step is left out.
    """
    counts = [0] * max(int(times[-1] // STEP), 1)
    for time in times:
        if time < len(counts) * STEP:
            counts[int(time // STEP)] += 1
    return [factor * count / STEP for count in counts]


def described(scaler: Autoscaler) -> str:
    """Describe an autoscaler's metrics and targets."""
    what = "; ".join(_target(metric) for metric in scaler.metrics)
    most = "the most replicas by " if len(scaler.metrics) > 1 else ""
    window, zero = Duration(scaler.window), "" if scaler.least else f", to 0 after {Duration(scaler.cooldown)} idle"
    return f"{most}{what}, {scaler.least} to {scaler.most} replicas, scale-in after {window}{zero}"


def _target(metric: Metric) -> str:
    formats = {
        CPU: "{:.0f} % CPU",
        REQUESTS: "{:,.0f} requests/s a replica",
        LOAD: "load {:.2f}",
        NEEDED: "{:g} replicas needed a replica",
    }
    return formats[metric.name].format(metric.target)
