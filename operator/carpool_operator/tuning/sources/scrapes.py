"""Converts Prometheus' samples of sidecars' counters to the reports that the sidecars themselves would have given.

Queries use range selectors for raw samples, never ``increase()`` or ``rate()``. These extrapolate to the window's ends
and guess at resets, so that their differences belong to no exact time and their counts are not whole. A raw sample is
what one pod reported at one known moment. The code that differences sidecars' reports also handles these, resets
included. A window has several scrapes; the newest complete one is used, because with remote write the series of one
scrape can arrive at different times.

These reports lack what a scrape lacks: a lane's batch latency, ceiling, quarantine and queue; a sidecar's rollbacks
(the running generation shows them); how a model's axis was determined; whose changes are accepted.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from msgspec import Struct, field

from carpool.batching.counters import ALL, DURATION_BOUNDS, ROW_BOUNDS, ModelStats, Stats
from carpool.exchange.report import Lane, Queue, Report, Stalls
from carpool.exchange.token_streams import TokenStreams
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_operator.tuning.sources import streams
from carpool_operator.tuning.sources.samples import UnusableError, count, edge, edges, histogram, number

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from carpool_operator.tuning.sources.samples import Key, Scrape

GENERATION = "carpool_config_generation"
RUNNING = "carpool_config_running"
STARTED = "process_start_time_seconds"
DURATIONS = "carpool_request_duration_seconds_bucket"
MISSES = "carpool_slo_misses_total"
BATCHABLE = "carpool_batchable_total"
"""Older sidecars don't count it: all their arrivals count as batchable."""
GAPS_SQUARED = "carpool_arrival_gaps_seconds_squared_total"
"""Older sidecars don't count it: burstiness is then learned from windows alone."""
LIMITED = {"limited": "carpool_limited_batches_total", "limited_rows": "carpool_limited_batch_rows_total"}
"""Older sidecars don't count these: none of their batches counts as limited."""
REQUEST_ROWS = "carpool_request_rows_bucket"
"""Older sidecars don't count this: of their rows per request only the mean is known."""
CAPACITY = "carpool_capacity_requests_per_second"
CAPACITY_LOWER = "carpool_capacity_lower_requests_per_second"
CAPACITY_ZERO_WAIT = "carpool_capacity_zero_wait_requests_per_second"
CAPACITY_ALONE = "carpool_capacity_unbatched_requests_per_second"
CAPACITY_BY_HAND = "carpool_capacity_by_hand_requests_per_second"
CAPACITIES = (CAPACITY, CAPACITY_LOWER, CAPACITY_ZERO_WAIT, CAPACITY_ALONE, CAPACITY_BY_HAND)
"""Older sidecars lack these, and so does any sidecar before it has measured a batch."""
MODE = "carpool_mode"
CELLS = ("carpool_batches_total", "carpool_batch_busy_seconds_total", "carpool_batch_busy_seconds_squared_total")

COUNTS = {
    "arrivals": "carpool_arrivals_total",
    "arrivals_squared": "carpool_arrivals_squared_total",
    "windows": "carpool_windows_total",
    "rows": "carpool_rows_total",
    "dispatched": "carpool_queue_wait_seconds_count",
    "served": "carpool_request_duration_seconds_count",
    "hits": "carpool_slo_hits_total",
    "cold": "carpool_cold_batches_total",
    "stalled": "carpool_stalled_batches_total",
    "bisections": "carpool_bisections_total",
}
"""A model's whole numbers, by their field of ``ModelStats``."""

OF_A_MODEL = (
    *COUNTS.values(),
    "carpool_queue_wait_seconds_sum",
    "carpool_max_batch",
    "carpool_max_wait_seconds",
    "carpool_max_in_flight",
    "carpool_model_replaced_total",
)
OF_THE_PROCESS = (
    GENERATION,
    RUNNING,
    STARTED,
    "carpool_device_busy_seconds_total",
    "carpool_queue_rows",
    "carpool_queue_bytes",
    "carpool_in_flight_batches",
    "carpool_model_ready",
    "carpool_host_stalls_total",
    "carpool_host_stall_seconds_total",
)

OWN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(OF_THE_PROCESS, ()),
    **dict.fromkeys((*OF_A_MODEL, BATCHABLE, GAPS_SQUARED, *CAPACITIES), ("model",)),
    **dict.fromkeys(CELLS, ("model", "bucket", "rows", "in_flight", "executors")),
    DURATIONS: ("model", "le"),
    REQUEST_ROWS: ("model", "le"),
    MISSES: ("model", "reason"),
    MODE: ("model", "mode"),
    **streams.OWN,
}
"""All metrics that are read, each with the labels that the sidecar sets; all other labels identify the source."""

_EDGES = {name: edges(bounds) for name, bounds in ((DURATIONS, DURATION_BOUNDS), (REQUEST_ROWS, ROW_BOUNDS))}
"""Upper bounds of the histograms' buckets, as written in ``le``."""


class LabelNames(NamedTuple):
    """The labels that identify a series' pod, as a PodMonitor sets them, and the other required labels."""

    namespace: str = "namespace"
    pod: str = "pod"
    matchers: tuple[tuple[str, str], ...] = ()
    """Labels and their values: those of this cluster, where several share a server."""

    def selector(self, namespace: str, pods: Iterable[str]) -> str:
        """Return the selector for some pods' series."""
        # Object names consist of [a-z0-9.-]; only the dot is special in a regular expression.
        names = "|".join(sorted(name.replace(".", "[.]") for name in pods))
        # PromQL accepts JSON's escapes.
        others = "".join(f",{label}={json.dumps(value, ensure_ascii=False)}" for label, value in self.matchers)
        return f'{self.namespace}="{namespace}",{self.pod}=~"{names}"{others}'


POD_MONITOR = LabelNames()


class Series(Struct, frozen=True):
    """One series of an answer: ``values`` of a range query, or the one ``value`` of an instant query."""

    metric: dict[str, str]
    values: list[tuple[float, str]] = field(default_factory=list)
    """Seconds since the epoch, and a number as text."""
    value: tuple[float, str] | None = None


CLOCKS = 30.0
"""Seconds by which the clocks of a node and of Prometheus may differ."""

_YEAR_3000 = 32_503_680_000

Source: TypeAlias = frozenset[tuple[str, str]]
"""The labels that identify neither the metric nor the pod, but the scraper and its job."""


class Fresh(NamedTuple):
    """When a pod was last scraped."""

    at: float
    """Seconds since the epoch, of Prometheus's clock."""
    age: float
    """Seconds, at the time of the query, by the same clock."""


class Scraped(NamedTuple):
    """The result of one scrape of a pod. ``note``: why its token streams are left out; ``""`` where they are not."""

    report: Report
    note: str = ""


def ages(labels: LabelNames, namespace: str, pods: Collection[str]) -> str:
    """Return the query for the last scrape of some pods: small, and all on Prometheus's clock."""
    return f"time() - timestamp({GENERATION}{{{labels.selector(namespace, pods)}}})"


def everything(labels: LabelNames, namespace: str, pods: Collection[str], seconds: float) -> str:
    """Return the query for all samples of some pods within the last ``seconds``."""
    names = "|".join(OWN)
    return f'{{__name__=~"{names}",{labels.selector(namespace, pods)}}}[{max(1, round(seconds * 1000))}ms]'


def freshness(series: Iterable[Series], labels: LabelNames) -> dict[str, dict[Source, Fresh]]:
    """Parse the answer to ``ages``: by pod and source."""
    found: dict[str, dict[Source, Fresh]] = {}
    for each in series:
        rest = dict(each.metric)
        pod = rest.pop(labels.pod, None)
        if pod is None or each.value is None:
            continue
        asked, age = each.value[0], number(each.value[1])
        # Prometheus stores whole milliseconds; the difference of two floats is slightly off.
        at = round(asked - age, 3)
        if 0 <= at < _YEAR_3000:
            found.setdefault(pod, {})[frozenset(rest.items())] = Fresh(at, age)
    return found


def reports(
    series: Iterable[Series], labels: LabelNames, chosen: Mapping[str, Source]
) -> dict[str, Scraped | UnusableError]:
    """Parse the answer to ``everything``: by pod, its newest complete scrape, or why there is none.

    If only token streams are incomplete, the newest scrape is read without them.

    ``Report.stats.at`` is the time of that scrape, in seconds since the epoch. A pod that two jobs or two servers
    scrape is counted once, from its ``chosen`` source. Sources of different processes can't be used.
    """
    pods: dict[str, dict[Source, dict[float, Scrape]]] = {}
    bad: dict[str, UnusableError] = {}
    for each in series:
        rest = dict(each.metric)
        name, pod = rest.pop("__name__", ""), rest.pop(labels.pod, None)
        if pod is None or name not in OWN:
            continue
        try:
            # Prometheus gives our label another name where the scrape itself sets one of that name.
            key = (name, tuple(rest.pop(f"exported_{label}", "") or rest.pop(label) for label in OWN[name]))
        except KeyError as error:
            bad[pod] = UnusableError(f"{name} has no label {error.args[0]}: metric relabeling drops it")
            continue
        scrapes = pods.setdefault(pod, {}).setdefault(frozenset(rest.items()), {})
        for at, text in each.values:
            scrapes.setdefault(at, {})[key] = number(text)
    found: dict[str, Scraped | UnusableError] = {}
    for pod, sources in pods.items():
        # The model exports process_start_time_seconds, too, where it is scraped.
        ours = {
            source: scrapes
            for source, scrapes in sources.items()
            if any(name != STARTED for one in scrapes.values() for name, _ in one)
        }
        own = ours.get(chosen[pod]) if pod in chosen else None
        if pod not in bad and own is not None:
            found[pod] = _another(chosen[pod], ours) or _newest(own)
    return found | bad


def _another(chosen: Source, sources: Mapping[Source, dict[float, Scrape]]) -> UnusableError | None:
    """Return the error that a source belongs to another process than the chosen one, with the labels that differ.

    Replicas of a Prometheus see one process, with one start time. After a restart one of them may still have the
    previous process: its last scrape was before the new process started.
    """
    last = {source: max(scrapes) for source, scrapes in sources.items()}
    lives = {source: (sources[source][at].get(_START, 0.0), at) for source, at in last.items()}
    for source, life in lives.items():
        (_, ended), (started, _) = sorted((lives[chosen], life))
        if life[0] != lives[chosen][0] and ended > started + CLOCKS:
            differ = sorted((name, value) for name, value in chosen ^ source)
            return UnusableError(
                f"two processes are behind its series, which differ in {', '.join(map('='.join, differ))}: "
                "name the label and value of yours in spec.metrics.prometheus.matchers"
            )
    return None


def _newest(scrapes: dict[float, Scrape]) -> Scraped | UnusableError:
    times = sorted(scrapes, reverse=True)
    wrong: UnusableError | None = None
    for whole in (True, False):
        for at, before in pairwise([*times, None]):
            assert at is not None  # noqa: S101 - only the last is
            try:
                return _report(scrapes[at], at, scrapes[before] if before is not None else {}, whole=whole)
            except UnusableError as error:
                wrong = wrong or error
    assert wrong is not None  # noqa: S101 - there is a scrape where there is a source
    return wrong


def _report(scrape: Scrape, at: float, before: Scrape, *, whole: bool) -> Scraped:
    """Build the report of one scrape; token streams that are not ``whole`` are left out.

    Raises ``UnusableError`` where it is incomplete, or has impossible counter values.
    """
    models = _models(scrape, before, whole=whole)
    streamed, note = TokenStreams(), ""
    try:
        streamed = streams.read(scrape)
    except UnusableError as error:
        if whole:
            raise
        note = str(error)

    def of_process(name: str) -> float:
        return scrape[name, ()]

    ready = of_process("carpool_model_ready") == 1
    lanes = {model: _lane(scrape, model) for model in models}
    report = Report(
        stats=Stats(
            at,
            of_process("carpool_device_busy_seconds_total"),
            _counters(scrape, models),
            count(scrape, "carpool_queue_rows", ()),
        ),
        uptime_seconds=max(at - of_process(STARTED), 0.0),
        ready=ready,
        readiness="ready" if ready else "the model is not ready",
        generation=count(scrape, GENERATION, ()),
        running=count(scrape, RUNNING, ()),
        slo_seconds=0.0,
        queue=Queue(
            rows=count(scrape, "carpool_queue_rows", ()),
            bytes=count(scrape, "carpool_queue_bytes", ()),
            in_flight=count(scrape, "carpool_in_flight_batches", ()),
            slots=max((lane.parameters.max_in_flight for lane in lanes.values()), default=0),
        ),
        lanes=lanes,
        token_streams=streamed,
        stalls=Stalls(count(scrape, "carpool_host_stalls_total", ()), of_process("carpool_host_stall_seconds_total")),
    )
    return Scraped(report, note)


def _models(scrape: Scrape, before: Scrape, *, whole: bool) -> list[str]:
    """Return the models of a scrape that is complete, its token streams included if they have to be ``whole``.

    Raises ``UnusableError``.
    """
    for (name, _), value in scrape.items():
        if name not in streams.PASSING and (not isfinite(value) or value < 0):
            raise UnusableError(f"{name} is {value:g}, which no sidecar writes: it comes from a rule or proxy")
    # Within one process no series ends: a series of the previous scrape that is missing has not arrived yet.
    if before.get(_START) == scrape.get(_START):
        passing = streams.PASSING if whole else streams.OWN.keys()
        for name, own in (key for key in before.keys() - scrape.keys() if key[0] not in passing):
            raise UnusableError(f"{name}{list(own)} is missing from the last scrape: samples arrive in part")
    missing = [name for name in OF_THE_PROCESS if (name, ()) not in scrape]
    models = sorted({own[0] for name, own in scrape if own and name not in streams.OWN})
    missing += [
        f"{name}{{model={model!r}}}" for name in OF_A_MODEL for model in models if (name, (model,)) not in scrape
    ]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UnusableError(
            f"there is no {', '.join(missing[:3])}{more}: metric relabeling drops them, or samples arrive in part"
        )
    return models


_START: Key = (STARTED, ())


def _lane(scrape: Scrape, model: str) -> Lane:
    passing = scrape.get((MODE, (model, "pass-through"))) == 1
    batch = count(scrape, "carpool_max_batch", (model,))
    return Lane(
        parameters=Parameters(
            max_batch=max(batch, 1),
            max_wait=Duration(scrape["carpool_max_wait_seconds", (model,)]),
            max_in_flight=max(count(scrape, "carpool_max_in_flight", (model,)), 1),
            pass_through=passing,
        ),
        pass_through=passing,
        queued_requests=0,
        cap=batch,
        quarantined=False,
        capacity=scrape.get((CAPACITY, (model,))),
        capacity_lower=scrape.get((CAPACITY_LOWER, (model,))),
        capacity_zero_wait=scrape.get((CAPACITY_ZERO_WAIT, (model,))),
        capacity_alone=scrape.get((CAPACITY_ALONE, (model,))),
        capacity_by_hand=scrape.get((CAPACITY_BY_HAND, (model,))),
        replaced=count(scrape, "carpool_model_replaced_total", (model,)),
    )


def _counters(scrape: Scrape, models: list[str]) -> dict[str, ModelStats]:
    """Collect every model's counters in one pass over the scrape."""
    cells: dict[str, list[tuple[int, int, int, int, int, float, float]]] = {model: [] for model in models}
    misses: dict[str, dict[str, int]] = {model: {} for model in models}
    buckets: dict[tuple[str, str], dict[str, int]] = {}
    for name, own in scrape:
        if name in CELLS:
            values = [scrape.get((each, own)) for each in CELLS]
            if None in values:
                raise UnusableError(f"{CELLS[values.index(None)]}{list(own)} is missing: samples arrive in part")
            if name == CELLS[0]:
                cells[own[0]].append(
                    (*_cell(own), count(scrape, name, own), scrape[CELLS[1], own], scrape[CELLS[2], own])
                )
        elif name == MISSES:
            misses[own[0]][own[1]] = count(scrape, name, own)
        elif name in _EDGES:
            buckets.setdefault((name, own[0]), {})[edge(own[1])] = count(scrape, name, own)
    return {
        model: ModelStats(
            **{field: count(scrape, name, (model,)) for field, name in COUNTS.items()},
            batchable=count(scrape, BATCHABLE, (model,)) if (BATCHABLE, (model,)) in scrape else ALL,
            **{field: count(scrape, name, (model,)) for field, name in LIMITED.items() if (name, (model,)) in scrape},
            gaps_squared=scrape.get((GAPS_SQUARED, (model,)), 0.0),
            queue_seconds=scrape["carpool_queue_wait_seconds_sum", (model,)],
            misses=misses[model],
            cells=cells[model],
            durations=histogram(DURATIONS, _EDGES[DURATIONS], buckets.get((DURATIONS, model), {})),
            request_rows=histogram(REQUEST_ROWS, _EDGES[REQUEST_ROWS], rows)
            if (rows := buckets.get((REQUEST_ROWS, model)))
            else [],
        )
        for model in models
    }


def _cell(own: tuple[str, ...]) -> tuple[int, int, int, int]:
    if not all(re.fullmatch(r"[0-9]{1,9}", text) for text in own[1:]):
        raise UnusableError(f"{CELLS[0]}{list(own)} has labels that are no numbers")
    bucket, rows, in_flight, executors = map(int, own[1:])
    return bucket, rows, in_flight, executors
