"""Loads of the past, from what a Prometheus stored of sidecars' additive counters. Pure: questions, and their answers.

``increase()`` repairs restarts by what it has, and extrapolates to the ends of its window by less than a scrape. For
decisions that is too little (``carpool_operator.tuning.sources.scrapes``); for sums over hours it is far below 1 %.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from carpool.batching.counters import Cell, CellKey
from carpool.forecasting.forecaster import Situation
from carpool.learning.arrivals import WindowCounts
from carpool.learning.latency_model import LatencyLearner
from carpool.policy.durations import Duration
from carpool.policy.spec import SLO, BatchingPolicy, Latency
from carpool_cli.planning import assumptions
from carpool_cli.planning.savings import Counted, Stretch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

STEPS = 500
"""Loads that a time is divided into, at most."""

SHORTEST, PARTS = 120.0, 10
"""Seconds of one load at least, unless the time has fewer than so many of them: several scrapes."""

WORKLOAD = ("namespace", "model")
CELL = (*WORKLOAD, *CellKey._fields)
COUNTERS = {
    "arrivals": "carpool_arrivals_total",
    "squared": "carpool_arrivals_squared_total",
    "windows": "carpool_windows_total",
    "rows": "carpool_rows_total",
}
CELLS = ("carpool_batches_total", "carpool_batch_busy_seconds_total", "carpool_batch_busy_seconds_squared_total")
PERCENTILES = {0.5: "p50", 0.9: "p90", 0.95: "p95", 0.99: "p99", 0.999: "p999"}

LEAST = 2
"""Arrivals in a step from which its windows show anything of burstiness."""


class HistoryError(ValueError):
    """What Prometheus holds is not enough; says what is missing and what to do."""


class Series(Struct, frozen=True):
    """One series of an answer: ``values`` of a range, or the one ``value`` of a moment."""

    metric: dict[str, str]
    values: list[tuple[float, str]] = []
    value: tuple[float, str] | None = None


class Questions(NamedTuple):
    """PromQL by name: of the whole range, step by step, and of its end."""

    step: float
    ranges: dict[str, str]
    ends: dict[str, str]


class Past(Struct, frozen=True):
    """One model in one namespace."""

    name: str
    situation: Situation
    policy: BatchingPolicy
    load: list[Stretch]
    counted: Counted


def questions(since: float, selector: str = "") -> Questions:
    """Return what to ask of the last ``since`` seconds; ``selector``: matchers, such as ``namespace="shop"``."""
    step = max(min(SHORTEST, since / PARTS), since / STEPS)
    window, whole = f"[{max(round(1000 * step), 1)}ms]", f"[{max(round(1000 * since), 1)}ms]"

    def summed(labels: Iterable[str], metric: str, over: str) -> str:
        return f"sum by ({', '.join(labels)}) (increase({metric}{{{selector}}}{over}))"

    pods = f"count by (namespace, model) (carpool_arrivals_total{{{selector}}})"
    return Questions(
        step,
        {**{name: summed(WORKLOAD, metric, window) for name, metric in COUNTERS.items()}, "pods": pods},
        {
            **{metric: summed(CELL, metric, whole) for metric in CELLS},
            "busy": summed(("namespace", "pod"), "carpool_device_busy_seconds_total", whole),
            "share": summed(("namespace", "pod", "model"), CELLS[1], whole),
            "slo": f"max by (namespace, quantile) (carpool_slo_target_seconds{{{selector}}})",
        },
    )


def pasts(
    asked: Questions,
    ranges: Mapping[str, Sequence[Series]],
    ends: Mapping[str, Sequence[Series]],
    *,
    slo: float | None = None,
    objective: str | None = None,
    target_utilization: int | None = None,
) -> list[Past]:
    """Read the answers: every model that had requests. ``slo``: p99 in place of the sidecars' own, seconds.

    Raises ``HistoryError``.
    """
    steps = {name: _by(series, WORKLOAD) for name, series in ranges.items()}
    busy = _busy(ends)
    found = []
    for of in sorted(steps["arrivals"]):
        arrivals = steps["arrivals"][of]
        if sum(arrivals.values()) < LEAST:
            continue
        name = "/".join(filter(None, of)) or "model"
        service = _service(ends, of)
        if service is None:
            raise HistoryError(f"{name}: no batch was measured in that time; name a longer one with --since")
        quantile, target = (0.99, slo) if slo is not None else _slo(ends, of[0], name)
        policy = replace(
            assumptions.slo_policy(
                target, largest_batch=service.largest_measured, objective=objective,
                target_utilization=target_utilization,
            ),
            slo=SLO(latency=Latency(**{PERCENTILES[quantile]: Duration(target)})),
        )  # fmt: skip
        load = [Stretch(asked.step, count / asked.step) for _, count in sorted(arrivals.items())]
        seconds, pods = asked.step * len(load), steps["pods"].get(of, {})
        situation = Situation(
            process=_process(steps, of),
            # That more are computed at once was never seen.
            service=replace(service, largest_in_flight=max(service.largest_in_flight, service.executors + 1)),
            target=target,
            budget=assumptions.budget(policy),
            limits=policy.limits(),
            rows=max(round(sum(steps["rows"].get(of, {}).values()) / sum(arrivals.values())), 1),
        )
        counted = Counted(
            device_seconds=3600 * busy.get(of, 0.0) / seconds,
            replicas=sum(pods.values()) / max(len(pods), 1),
            most_replicas=round(max(pods.values(), default=0)),
        )
        found.append(Past(name, situation, policy, load, counted))
    if not found:
        raise HistoryError(
            "Prometheus holds no requests of sidecars in that time: are they scraped (chart: podMonitor.enabled), and "
            "does --select fit?"
        )
    return found


def _by(series: Sequence[Series], labels: tuple[str, ...]) -> dict[tuple[str, ...], dict[float, float]]:
    """Return finite values by labels and time."""
    return {
        tuple(each.metric.get(label, "") for label in labels): {
            at: float(text) for at, text in each.values if math.isfinite(float(text))
        }
        for each in series
    }


def _end(series: Sequence[Series], labels: tuple[str, ...]) -> dict[tuple[str, ...], float]:
    return {
        tuple(each.metric.get(label, "") for label in labels): float(each.value[1])
        for each in series
        if each.value is not None and math.isfinite(float(each.value[1]))
    }


def _busy(ends: Mapping[str, Sequence[Series]]) -> dict[tuple[str, ...], float]:
    """Return the counted device seconds by model: a pod's wall time, shared by the seconds that its batches took."""
    took = _end(ends["share"], ("namespace", "pod", "model"))
    pods: dict[tuple[str, ...], float] = {}
    for (namespace, pod, _), seconds in took.items():
        pods[namespace, pod] = pods.get((namespace, pod), 0.0) + seconds
    found: dict[tuple[str, ...], float] = {}
    for (namespace, pod), wall in _end(ends["busy"], ("namespace", "pod")).items():
        for (where, which, model), seconds in took.items():
            if (where, which) == (namespace, pod) and pods[where, which]:
                key = namespace, model
                found[key] = found.get(key, 0.0) + wall * seconds / pods[where, which]
    return found


def _service(ends: Mapping[str, Sequence[Series]], of: tuple[str, ...]) -> Any:  # noqa: ANN401 - a ServiceTime or None
    """Learn batch latency from the counts of the whole time, as a tuner does that begins with them."""
    batches, busy, squared = (_end(ends[metric], CELL) for metric in CELLS)
    cells = {
        CellKey(*(int(float(text)) for text in own[2:])): Cell(count, busy.get(own, 0.0), squared.get(own, 0.0))  # type: ignore[arg-type] # increase() has fractions
        for own, count in batches.items()
        if own[:2] == of and count > 0
    }
    learner = LatencyLearner()
    learner.observe(0.0, cells)
    return learner.estimate()


def _slo(ends: Mapping[str, Sequence[Series]], namespace: str, name: str) -> tuple[float, float]:
    """Return the highest percentile in force, and its seconds."""
    targets = {
        float(q): seconds
        for (where, q), seconds in _end(ends["slo"], ("namespace", "quantile")).items()
        if where == namespace
    }
    known = [quantile for quantile in targets if quantile in PERCENTILES]
    if not known:
        raise HistoryError(f"{name}: Prometheus has no carpool_slo_target_seconds of it; name the p99 with --slo-p99")
    return max(known), targets[max(known)]


def _process(steps: Mapping[str, Mapping[tuple[str, ...], Mapping[float, float]]], of: tuple[str, ...]) -> Any:  # noqa: ANN401 - a process
    """Return burstiness within steps, the median of the requests: where the load moves in a step, it looks bursty."""
    found = []
    for at, arrivals in steps["arrivals"][of].items():
        windows = steps["windows"].get(of, {}).get(at, 0.0)
        squared = steps["squared"].get(of, {}).get(at, 0.0)
        if windows >= 1 and arrivals >= LEAST:
            counts = WindowCounts(round(windows), arrivals, squared)  # type: ignore[arg-type] # likewise
            found.append((1.0 if counts.looks_poisson else counts.cv, arrivals))
    half, cv = sum(arrivals for _, arrivals in found) / 2, 1.0
    for each, arrivals in sorted(found):
        half, cv = half - arrivals, each
        if half <= 0:
            break
    return assumptions.process_of(1.0, min(max(cv, 0.1), 10.0))
