"""A day with an autoscaler: an HPA's rules, or KEDA's, over replicas that are looked up in a table.

Steps are 15 s, as an HPA's. A replica answers or refuses a request within its SLO, so no backlog lasts from one step to
the next, and each step is as the table says of its load (``replica``).
"""

from __future__ import annotations

import math
from collections import deque
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from carpool.policy.durations import Duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from carpool_cli.planning.replica import Replica

STEP = 15.0
"""Seconds: how often an HPA looks, and over what time the metrics are counted."""

TOLERANCE = 0.1
"""Relative distance from the target within which an HPA does nothing."""

CPU, REQUESTS, LOAD = "cpu", "requests", "load"
"""What is scaled by: percent busy, requests per second and replica, or Carpool's load."""


class AutoscalerError(ValueError):
    """A manifest that is no autoscaler, or one by a metric that can't be simulated; says what to write."""


class Autoscaler(Struct, frozen=True, kw_only=True):
    """What an HPA does by its manifest, defaults filled in."""

    metric: str
    target: float
    """Per replica: percent busy, requests per second, or share of the capacity."""
    least: int = 1
    most: int = 10
    scale_in_after: float = 300.0
    """Seconds for which fewer replicas must have been enough."""
    scale_out_after: float = 0.0
    tolerance: float = TOLERANCE


class Steps(NamedTuple):
    """What happened, by step."""

    rates: list[float]
    replicas: list[int]
    """That run, those that start included: all cost."""
    serving: list[int]
    busy: list[float]
    missed: list[float]


class Day(Struct, frozen=True, rename="camel", kw_only=True):
    """What a day came to."""

    name: str
    replica_hours: float
    misses: float
    """Share of all requests that were late or refused."""
    scalings: int
    """Times that the number of replicas changed."""
    most: int


def read(document: Mapping[str, Any]) -> Autoscaler:
    """Read an HPA (autoscaling/v2) or a KEDA ScaledObject.

    Raises ``AutoscalerError``.
    """
    spec, kind = document.get("spec") or {}, document.get("kind")
    if kind == "HorizontalPodAutoscaler":
        found = [_hpa_metric(each) for each in spec.get("metrics") or ()]
        least, most, behavior = spec.get("minReplicas", 1), spec.get("maxReplicas", 10), spec.get("behavior")
    elif kind == "ScaledObject":
        found = [_trigger(each) for each in spec.get("triggers") or ()]
        least, most = spec.get("minReplicaCount", 0), spec.get("maxReplicaCount", 100)
        behavior = ((spec.get("advanced") or {}).get("horizontalPodAutoscalerConfig") or {}).get("behavior")
    else:
        raise AutoscalerError(
            f"kind {kind!r} is no HorizontalPodAutoscaler (autoscaling/v2) and no ScaledObject (KEDA)"
        )
    if len(found) != 1:
        raise AutoscalerError(f"it scales by {len(found)} metrics: one can be simulated")
    rules = behavior or {}
    return Autoscaler(
        metric=found[0][0],
        target=found[0][1],
        least=max(least, 1),
        most=most,
        scale_in_after=float((rules.get("scaleDown") or {}).get("stabilizationWindowSeconds", 300)),
        scale_out_after=float((rules.get("scaleUp") or {}).get("stabilizationWindowSeconds", 0)),
    )


_KNOWN = "cpu, Carpool's load (a name with `load`), or a rate of requests (a name with `request` or `arrivals`)"


def _hpa_metric(metric: Mapping[str, Any]) -> tuple[str, float]:
    kind = str(metric.get("type"))
    part = metric.get(kind[:1].lower() + kind[1:]) or {}
    target = part.get("target") or {}
    if kind == "Resource" and part.get("name") == "cpu" and "averageUtilization" in target:
        return CPU, float(target["averageUtilization"])
    if kind in {"External", "Pods"} and "averageValue" in target:
        return _named(str((part.get("metric") or {}).get("name"))), quantity(str(target["averageValue"]))
    raise AutoscalerError(f"metric {kind} can't be simulated: it needs averageUtilization of cpu, or averageValue")


def _trigger(trigger: Mapping[str, Any]) -> tuple[str, float]:
    metadata, kind = trigger.get("metadata") or {}, trigger.get("type")
    if kind == "cpu":
        return CPU, float(metadata["value"])
    if kind == "prometheus":
        return _named(str(metadata.get("query"))), float(metadata["threshold"])
    if kind == "metrics-api":
        return _named(str(metadata.get("valueLocation"))), float(metadata["targetValue"])
    raise AutoscalerError(f"trigger {kind!r} can't be simulated: cpu, prometheus and metrics-api can")


def _named(name: str) -> str:
    if "load" in name:
        return LOAD
    if "request" in name or "arrivals" in name:
        return REQUESTS
    raise AutoscalerError(f"metric {name!r} can't be simulated: use {_KNOWN}")


def quantity(text: str) -> float:
    """Read a Kubernetes quantity: ``850m``, ``2k``, ``1.5``."""
    factors = {"m": 1e-3, "k": 1e3, "M": 1e6}
    return float(text[:-1]) * factors[text[-1]] if text[-1:] in factors else float(text)


class _Recent:
    """Recommendations of the last seconds: the most of them for scale-in, the least for scale-out."""

    def __init__(self, scaler: Autoscaler) -> None:
        self._scaler = scaler
        self._kept: deque[tuple[float, int]] = deque()

    def stabilized(self, now: float, wanted: int, current: int) -> int:
        self._kept.append((now, wanted))
        scaler = self._scaler
        while now - self._kept[0][0] > max(scaler.scale_in_after, scaler.scale_out_after):
            self._kept.popleft()
        most = max(count for at, count in self._kept if now - at <= scaler.scale_in_after)
        least = min(count for at, count in self._kept if now - at <= scaler.scale_out_after)
        # As the controller: up only to what was wanted all the time, down only to what was never too few.
        return min(max(current, least), most)


def play(scaler: Autoscaler, table: Replica, rates: Sequence[float], *, cold_start: float, seed: int = 0) -> Steps:
    """Play loads (requests per second, by ``STEP``) with replicas that serve ``cold_start`` seconds after their start.

    It begins with what the first load needs. What the autoscaler sees of a load is counted over one step, by chance.
    """
    rng = Random(seed)  # noqa: S311 - a simulation
    recent = _Recent(scaler)
    starting: list[float] = []
    serving = scaler.least
    while serving < scaler.most and _total(scaler, table, rates[0], serving) > scaler.target * serving:
        serving += 1
    steps = Steps([], [], [], [], [])
    for index, rate in enumerate(rates):
        now = index * STEP
        serving += sum(at <= now for at in starting)
        starting = [at for at in starting if at > now]
        each = rate / serving
        for values, value in zip(
            steps, (rate, serving + len(starting), serving, table.utilization(each), table.misses(each)), strict=True
        ):
            values.append(value)  # type: ignore[attr-defined] # lists of numbers
        counted = max(rng.gauss(rate * STEP, math.sqrt(rate * STEP)), 0.0) / STEP
        current = serving + len(starting)
        wanted = _wanted(scaler, table, counted, serving, current)
        wanted = recent.stabilized(now, min(max(wanted, scaler.least), scaler.most), current)
        wanted = min(wanted, max(2 * current, current + 4))
        starting += [now + cold_start] * (wanted - current)
        while serving + len(starting) > wanted:
            # The youngest go first, as ReplicaSets have it.
            if starting:
                starting.pop()
            else:
                serving -= 1
    return steps


def _total(scaler: Autoscaler, table: Replica, rate: float, serving: int) -> float:
    """Return the sum of the metric over the replicas that serve."""
    if scaler.metric == CPU:
        return 100 * serving * table.utilization(rate / serving)
    return rate if scaler.metric == REQUESTS else rate / table.capacity


def _wanted(scaler: Autoscaler, table: Replica, rate: float, serving: int, current: int) -> int:
    """Return how many replicas the metric asks for (kube-controller-manager's replica calculator)."""
    total = _total(scaler, table, rate, serving)
    counted = serving if scaler.metric == CPU else current
    ratio = total / (scaler.target * counted)
    if abs(ratio - 1) <= scaler.tolerance:
        return current
    if scaler.metric == CPU and ratio > 1 and current > serving:
        # Those that start count as idle, so that it does not ask for the same replica again and again.
        ratio = total / (scaler.target * current)
        return current if ratio <= 1 + scaler.tolerance else math.ceil(ratio * current)
    return math.ceil(total / scaler.target - 1e-9)


def clairvoyant(table: Replica, rates: Sequence[float], *, cold_start: float, least: int = 1) -> Steps:
    """Return the fewest replica-hours that keep every step within the capacity, all loads being known in advance.

    A replica is started as long before it is needed as it takes. It is kept through a pause that is shorter than that:
    a new one would cost more.
    """
    needed = [max(math.ceil(rate / table.capacity - 1e-9), least) for rate in rates]
    warm, count = round(cold_start / STEP), len(needed)
    running, serving = [0] * count, [0] * count
    for level in range(1, max(needed) + 1):
        for first, last in _spans([need >= level for need in needed], warm):
            for index in range(max(first - warm, 0), last + 1):
                running[index] += 1
                serving[index] += index >= first
    each = [rate / ready for rate, ready in zip(rates, serving, strict=True)]
    return Steps(
        list(rates), running, serving, [table.utilization(one) for one in each], [table.misses(one) for one in each]
    )


def _spans(wanted: Sequence[bool], warm: int) -> Iterator[tuple[int, int]]:
    """List (first, last) of the times in which a replica runs; pauses of up to ``warm`` steps are none."""
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
    """Sum up a day."""
    requests = sum(steps.rates)
    missed = sum(rate * share for rate, share in zip(steps.rates, steps.missed, strict=True))
    return Day(
        name=name,
        replica_hours=sum(steps.replicas) * STEP / 3600,
        misses=missed / requests if requests else 0.0,
        scalings=sum(one != other for one, other in zip(steps.replicas, steps.replicas[1:], strict=False)),
        most=max(steps.replicas),
    )


def diurnal(peak: float, seconds: float = 86_400.0, low: float = 0.15) -> list[float]:
    """Return a day's rates by ``STEP``: lowest at 4 h (``low`` of the peak), highest at 16 h."""
    middle, swing = (1 + low) / 2, (1 - low) / 2
    count = round(seconds / STEP)
    return [peak * (middle - swing * math.cos(2 * math.pi * (index / count - 4 / 24))) for index in range(count)]


def binned(times: Sequence[float], factor: float = 1.0) -> list[float]:
    """Return recorded arrivals (seconds, from 0) as rates by ``STEP``, times ``factor``."""
    counts = [0] * max(int(times[-1] // STEP), 1)
    for time in times:
        if time < len(counts) * STEP:
            counts[int(time // STEP)] += 1
    return [factor * count / STEP for count in counts]


def described(scaler: Autoscaler) -> str:
    """Say what an autoscaler goes by."""
    what = {
        CPU: f"{scaler.target:.0f} % CPU",
        REQUESTS: f"{scaler.target:,.0f} requests/s a replica",
        LOAD: f"load {scaler.target:.2f}",
    }
    window = Duration(scaler.scale_in_after)
    return f"{what[scaler.metric]}, {scaler.least} to {scaler.most} replicas, scale-in after {window}"
