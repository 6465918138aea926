"""Past loads, from Prometheus' samples of sidecars' additive counters. Pure: builds queries, and parses the answers.

``increase()`` handles restarts approximately, and extrapolates to the ends of its window by less than a scrape. For
decisions that is not exact enough (``carpool_operator.tuning.sources.scrapes``); for sums over hours the error is far
below 1 %.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from msgspec import Struct
from msgspec.structs import replace

from carpool.batching.counters import Sample
from carpool.forecasting.forecaster import Situation
from carpool.learning.arrivals import Gamma, WindowCounts, fitted
from carpool.learning.latency_model import LatencyLearner, ServiceTime
from carpool.policy.durations import Duration, format_seconds
from carpool.policy.spec import PERCENTILES, SLO, BatchingPolicy, Latency
from carpool_cli.planning import assumptions, replica
from carpool_cli.planning.savings import Counted, Stretch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

STEPS = 500
"""Most steps of constant load that a time is divided into."""

SHORTEST, PARTS = 120.0, 10
"""Least seconds of a step, unless the time has fewer than ``PARTS`` of them: several scrapes."""

WORKLOAD = ("namespace", "target", "model")
"""The chart's PodMonitor sets ``target``, e.g. ``Deployment/resnet``; empty if nothing sets it."""
KIND = Sample._fields[:4]
CELL = (*WORKLOAD, *KIND)
COUNTERS = {
    "arrivals": "carpool_arrivals_total",
    "squared": "carpool_arrivals_squared_total",
    "windows": "carpool_windows_total",
    "gaps": "carpool_arrival_gaps_seconds_squared_total",  # older sidecars do not count it
    "rows": "carpool_rows_total",
}
CELLS = ("carpool_batches_total", "carpool_batch_busy_seconds_total", "carpool_batch_busy_seconds_squared_total")

LEAST = 2
"""Least arrivals in a step whose windows can show burstiness."""

SCRAPES = 4
"""Least scrapes in a step: without two of them there is no increase, and the step would look like one without load."""


class HistoryError(ValueError):
    """Prometheus' data does not suffice; the message has what is missing and the fix."""


class Series(Struct, frozen=True):
    """One series of an answer: ``values`` of a range query, or the one ``value`` of an instant query."""

    metric: dict[str, str]
    values: list[tuple[float, str]] = []
    value: tuple[float, str] | None = None


class Held(NamedTuple):
    """What Prometheus holds of the sidecars, seconds."""

    since: float
    """How long ago the first sample was, at most what was asked for."""
    interval: float
    """Mean time between two samples of a pod; 0: there are none."""


class Questions(NamedTuple):
    """PromQL queries by name: over the whole range, step by step, and at its end."""

    step: float
    ranges: dict[str, str]
    ends: dict[str, str]


class Past(Struct, frozen=True):
    """The past of one model of one workload."""

    name: str
    situation: Situation
    policy: BatchingPolicy
    load: list[Stretch]
    counted: Counted
    beware: tuple[str, ...] = ()


class Unknown(Struct, frozen=True):
    """A model that had requests, but whose data in Prometheus does not suffice."""

    name: str
    error: str
    """What is missing, and the fix."""


Steps = dict[str, dict[tuple[str, ...], dict[int, float]]]
"""Results over time: by query, workload, and number of the step."""

POD = (*WORKLOAD, "pod")
SURE = 'executors="0"'
"""Cells for a server concurrency above 1 count the same batches again."""


def about_held(since: float, selector: str = "") -> tuple[str, str]:
    """Return the queries for what is held of the last ``since`` seconds.

    1. The time of the first sample (epoch), late by at most a 500th of ``since``.
    2. The mean time between two samples of a pod: of a series that is looked at in even steps, and of its samples.
    """
    series, step = f"carpool_arrivals_total{{{selector}}}", since / STEPS
    steps = f"[{_milliseconds(since)}:{_milliseconds(step)}]"
    samples = f"sum(count_over_time({series}[{_milliseconds(since)}]))"
    return (
        f"min(min_over_time(timestamp({series}){steps}))",
        f"{step:.3f} * sum(count_over_time({series}{steps})) / {samples}",
    )


def _milliseconds(seconds: float) -> str:
    return f"{max(round(1000 * seconds), 1)}ms"


def questions(since: float, selector: str = "", interval: float = 0.0) -> Questions:
    """Return the queries for the last ``since`` seconds, which are divided evenly.

    ``selector``: matchers, such as ``namespace="shop"``. ``interval``: seconds between two scrapes.
    """
    least = max(min(SHORTEST, since / PARTS), since / STEPS, SCRAPES * interval)
    step = since / max(int(since / least), 1)
    window, whole = f"[{_milliseconds(step)}]", f"[{_milliseconds(since)}]"

    def summed(labels: Iterable[str], metric: str, over: str, more: str = "") -> str:
        matchers = ",".join(filter(None, (selector, more)))
        return f"sum by ({', '.join(labels)}) (increase({metric}{{{matchers}}}{over}))"

    # Whether the server scraped anything at all, whatever the selector: at times there may be no sidecar.
    scraped = f"count(count_over_time(up{window}))"
    pods = f"count by ({', '.join(WORKLOAD)}) (carpool_arrivals_total{{{selector}}})"
    slo, by_pod = f"carpool_slo_target_seconds{{{selector}}}", "max by (namespace, pod, quantile)"
    return Questions(
        step,
        {
            **{name: summed(WORKLOAD, metric, window) for name, metric in COUNTERS.items()},
            "pods": pods,
            "scraped": scraped,
        },
        {
            **{metric: summed(CELL, metric, whole) for metric in CELLS},
            "busy": summed(("namespace", "pod"), "carpool_device_busy_seconds_total", whole),
            "work": summed(POD, CELLS[1], whole, SURE),
            "slo": f"{by_pod} ({slo})",
            "last slo": f"{by_pod} (last_over_time({slo}{whole}))",
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
) -> list[Past | Unknown]:
    """Parse the answers: every model that had requests. ``slo``: p99 instead of the sidecars' own, seconds.

    Raises ``HistoryError`` if there is none.
    """
    began = min((at for some in ranges.values() for each in some for at, _ in each.values), default=0.0)
    steps = {name: _steps(series, began, asked.step) for name, series in ranges.items()}
    asked_for = [of for of, arrivals in sorted(steps["arrivals"].items()) if sum(arrivals.values()) >= LEAST]
    services = {of: _service(ends, of) for of in asked_for}
    busy = _busy(ends, {of: each.executors for of, each in services.items() if each is not None})
    known = [step for arrivals in steps["arrivals"].values() for step in arrivals]
    # All over the same time. Otherwise two workloads in succession would add up to two replicas.
    time = range(min(known, default=0), max(known, default=0) + 1)
    # While the server was down, nothing is known: that time does not count as without load, or without pods.
    scraped = {at for seen in steps.get("scraped", {}).values() for at in seen}
    span = [at for at in time if at in scraped.union(known)] if scraped else time
    found: list[Past | Unknown] = []
    for of in asked_for:
        service = services[of]
        if service is None:
            found.append(Unknown(_name(of), "no batch was measured in that time; name a longer one with --since"))
            continue
        try:
            targets = Targets(0.99, slo, slo) if slo is not None else _targets(ends, of)
            policy = replace(
                assumptions.slo_policy(
                    targets.shortest, largest_batch=service.largest_measured, objective=objective,
                    target_utilization=target_utilization,
                ),
                slo=SLO(latency=Latency(**{PERCENTILES[targets.quantile]: Duration(targets.shortest)})),
            )  # fmt: skip
        except HistoryError as error:
            found.append(Unknown(_name(of), str(error)))
            continue
        except click.ClickException as error:
            found.append(Unknown(_name(of), error.message))
            continue
        found.append(_past(of, asked.step, span, steps, service, policy, targets, busy.get(of, 0.0) / len(time)))
    if not found:
        raise HistoryError(
            "Prometheus holds no requests of sidecars in that time: are they scraped (chart: podMonitor.enabled), and "
            "does --select fit?"
        )
    return found


def _past(
    of: tuple[str, ...],
    step: float,
    span: Sequence[int],
    steps: Steps,
    service: ServiceTime,
    policy: BatchingPolicy,
    targets: Targets,
    busy: float,
) -> Past:
    """Combine one model's data over the steps of a ``span``; ``busy``: its device seconds in a step."""
    arrivals, pods = steps["arrivals"][of], steps["pods"].get(of, {})
    load = [Stretch(step, arrivals.get(at, 0.0) / step, least=min(round(pods.get(at, 0.0)), 1)) for at in span]
    situation = Situation(
        process=_process(steps, of),
        # Greater concurrency was never observed.
        service=replace(service, largest_in_flight=max(service.largest_in_flight, service.executors + 1)),
        target=targets.shortest,
        budget=assumptions.budget(policy),
        limits=policy.limits(),
        rows=max(sum(steps["rows"].get(of, {}).values()) / sum(arrivals.values()), 1.0),
    )
    counted = Counted(
        device_seconds=3600 * busy / step,
        replicas=sum(pods.get(at, 0.0) for at in span) / len(span),
        most_replicas=round(max(pods.get(at, 0.0) for at in span)),
    )
    return Past(_name(of), situation, policy, load, counted, (*targets.beware, *_unseen(situation)))


def _unseen(situation: Situation) -> Iterator[str]:
    """Yield a note if larger batches than those counted may serve more: at low load hardly any are large.

    The sidecars' own limit is not among the counters, so that of the forecast is the largest batch counted.
    """
    largest = situation.service.largest_measured
    twice = replace(situation, limits=replace(situation.limits, max_batch=2 * largest))
    if replica.unmeasured_beyond(twice) is not None:
        yield (
            f"batches above {largest} rows are not in these counts: requests/s and replicas count none, and may be "
            "better; running sidecars (carpool savings http://...:9090) know more sizes"
        )


def _name(of: tuple[str, ...]) -> str:
    """Return ``shop/Deployment/resnet/m``, or ``shop/m`` without a target."""
    return "/".join(filter(None, of)) or "model"


def _steps(series: Sequence[Series], began: float, step: float) -> dict[tuple[str, ...], dict[int, float]]:
    """Return finite values by workload and number of the step, from 0."""
    return {
        tuple(each.metric.get(label, "") for label in WORKLOAD): {
            round((at - began) / step): float(text) for at, text in each.values if math.isfinite(float(text))
        }
        for each in series
    }


def _end(series: Sequence[Series], labels: tuple[str, ...]) -> dict[tuple[str, ...], float]:
    return {
        tuple(each.metric.get(label, "") for label in labels): float(each.value[1])
        for each in series
        if each.value is not None and math.isfinite(float(each.value[1]))
    }


def _busy(
    ends: Mapping[str, Sequence[Series]], executors: Mapping[tuple[str, ...], int]
) -> dict[tuple[str, ...], float]:
    """Return the counted device seconds by model.

    A pod's are the wall time with a batch in flight. With a server concurrency above 1 they are the batches' total time
    divided by the concurrency, if that is less: a device that can compute four at once is a quarter busy with one.
    """
    pods: dict[tuple[str, str], dict[tuple[str, ...], float]] = {}
    for (*of, pod), seconds in _end(ends["work"], POD).items():
        pods.setdefault((of[0], pod), {})[tuple(of)] = seconds / executors.get(tuple(of), 1)
    found: dict[tuple[str, ...], float] = {}
    for (namespace, pod), wall in _end(ends["busy"], ("namespace", "pod")).items():
        works = pods.get((namespace, pod), {})
        total = sum(works.values())
        # With a concurrency of 1, batches take at least the wall time. Only the wall time includes first batches of a
        # size.
        several = any(executors.get(of, 1) > 1 for of in works)
        busy = min(wall, total) if several else wall
        for each, work in works.items():
            if total:
                found[each] = found.get(each, 0.0) + busy * work / total
    return found


def _service(ends: Mapping[str, Sequence[Series]], of: tuple[str, ...]) -> ServiceTime | None:
    """Learn batch latency from the counts of the whole time, like a tuner that starts with them."""
    batches, busy, squared = (_end(ends[metric], CELL) for metric in CELLS)
    samples = []
    for own, count in batches.items():
        if own[: len(WORKLOAD)] == of and count > 0:
            bucket, rows, in_flight, executors = (int(float(text)) for text in own[len(WORKLOAD) :])
            sums = busy.get(own, 0.0), squared.get(own, 0.0)
            samples.append(Sample(bucket, rows, in_flight, executors, count, *sums))
    learner = LatencyLearner()
    learner.observe(0.0, samples)
    return learner.estimate()


class Targets(NamedTuple):
    """The highest percentile targeted by a model's pods, and its seconds: the shortest and the longest."""

    quantile: float
    shortest: float
    longest: float

    @property
    def beware(self) -> tuple[str, ...]:
        """Name targets that differ."""
        if self.longest <= self.shortest:
            return ()
        shortest, longest = format_seconds(self.shortest), format_seconds(self.longest)
        note = (
            f"its pods have a p{self.quantile * 100:g} from {shortest} to {longest}: several workloads may have a "
            "model of this name. The forecast is for the shortest; narrow it by --select"
        )
        return (note,)


def _targets(ends: Mapping[str, Sequence[Series]], of: tuple[str, ...]) -> Targets:
    """Return the SLO of a model's pods.

    Raises ``HistoryError``.
    """
    pods = {own[-1] for own in _end(ends["work"], POD) if own[:-1] == of}
    targets: dict[float, list[float]] = {}
    for name in ("slo", "last slo"):  # the present one; for a deleted workload, its last one
        for (namespace, pod, q), seconds in _end(ends[name], ("namespace", "pod", "quantile")).items():
            if namespace == of[0] and pod in pods and float(q) in PERCENTILES:
                targets.setdefault(float(q), []).append(seconds)
        if targets:
            break
    if not targets:
        raise HistoryError("Prometheus has no carpool_slo_target_seconds of it; name the p99 with --slo-p99")
    highest = max(targets)
    return Targets(highest, min(targets[highest]), max(targets[highest]))


def _process(steps: Steps, of: tuple[str, ...]) -> Any:  # noqa: ANN401 - a process
    """Return burstiness within steps, the median of the requests: a load that changes within a step looks bursty."""
    found = []
    for at, arrivals in steps["arrivals"][of].items():
        windows = steps["windows"].get(of, {}).get(at, 0.0)
        squared = steps["squared"].get(of, {}).get(at, 0.0)
        if windows >= 1 and arrivals >= LEAST:
            gaps = steps["gaps"].get(of, {}).get(at, 0.0)
            counts = WindowCounts(round(windows), arrivals, squared, gaps_squared=gaps)  # type: ignore[arg-type] # likewise
            process = fitted(1.0, counts)
            found.append((process.cv if isinstance(process, Gamma) else 1.0, arrivals))
    half, cv = sum(arrivals for _, arrivals in found) / 2, 1.0
    for each, arrivals in sorted(found):
        half, cv = half - arrivals, each
        if half <= 0:
            break
    return assumptions.process_of(1.0, cv)
