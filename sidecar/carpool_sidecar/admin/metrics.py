"""The metrics for Prometheus: counters that are read at each scrape. The hot path counts once, elsewhere.

``METRICS`` is the one list: the collector emits by it and ``docs/reference/metrics.md`` is written from it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool.batching.counters import CANCELLED, DURATION_BOUNDS, ROW_BOUNDS, Sample
from carpool.batching.requests import Refused
from carpool_sidecar.generation import metrics as generation
from carpool_sidecar.jobs import metrics as jobs
from carpool_sidecar.metric import Families, Metric

if TYPE_CHECKING:
    from carpool.batching.counters import Stats
    from carpool_sidecar.sidecar import Sidecar

PREFIX = "carpool_"

SIZE_BOUNDS = tuple(2**power for power in range(13))
"""Upper bounds (rows) of the batch size histogram: 1 to 4096."""


_CELL = ("model", *Sample._fields[:4])

METRICS = (
    Metric("arrivals", "counter", ("model",), "Requests that arrived, admitted or not"),
    Metric(
        "batchable",
        "counter",
        ("model",),
        "Requests that arrived and could share a batch with a recent one: their keys are equal; "
        "divided by arrivals, the chance that a request that waits can join a batch",
    ),
    Metric("arrivals_squared", "counter", ("model",), "Sum over windows of 100 ms of the squared number of arrivals"),
    Metric(
        "arrival_gaps_seconds_squared",
        "counter",
        ("model",),
        "Squared seconds between an arrival and the one before, summed; gaps of 10 s and more are left out",
    ),
    Metric("windows", "counter", ("model",), "Windows of 100 ms that were counted"),
    Metric("rows", "counter", ("model",), "Rows that arrived"),
    Metric("request_rows", "histogram", ("model",), "Rows of the requests that arrived"),
    Metric(
        "limited_batches",
        "counter",
        ("model",),
        "Batches made while fewer rows than carpool_max_batch were allowed: requests fail their batches, "
        "or the upstream refuses large ones",
    ),
    Metric("limited_batch_rows", "counter", ("model",), "Rows that were allowed, summed over those batches"),
    Metric(
        "batches",
        "counter",
        _CELL,
        "Batches answered, neither cold nor stalled: those with 0 as the last label. Others repeat some of them, to "
        "learn server concurrency: don't add them up",
    ),
    Metric("batch_busy_seconds", "counter", _CELL, "Their seconds with the upstream"),
    Metric("batch_busy_seconds_squared", "counter", _CELL, "Their squared seconds, summed"),
    Metric("device_busy_seconds", "counter", (), "Wall seconds with at least one batch in flight"),
    Metric("slo_target_seconds", "gauge", ("quantile",), "The SLO in force: seconds by quantile"),
    Metric(
        "slo_allowed_misses_ratio",
        "gauge",
        (),
        "Share of requests that the SLO lets miss their due time: 0.01 where its highest quantile is 0.99",
    ),
    Metric("slo_hits", "counter", ("model",), "Requests answered with success by their due time"),
    Metric(
        "slo_misses",
        "counter",
        ("model", "reason"),
        "Requests that were not, by reason: late, cold (after a first batch), failed, or the reason of a refusal; "
        "caused by the caller: rejected (4xx), cancelled",
    ),
    Metric("cold_batches", "counter", ("model",), "First batches of their size, not learned from"),
    Metric("stalled_batches", "counter", ("model",), "Batches during which this host paused, not learned from"),
    Metric("requests", "counter", ("model", "protocol", "code"), "Answers sent, by status"),
    Metric(
        "request_duration_seconds",
        "histogram",
        ("model",),
        "Of answers with success, from a request's last byte in to its answer's last byte out",
    ),
    Metric("queue_wait_seconds", "summary", ("model",), "From a request's arrival to its first dispatch"),
    Metric("batch_size", "histogram", ("model",), "Rows of the batches sent for callers; own copies are left out"),
    Metric("queue_rows", "gauge", (), "Rows waiting"),
    Metric("queue_bytes", "gauge", (), "Bytes of the requests waiting"),
    Metric("buffered_bytes", "gauge", (), "Bytes buffered of requests and answers, bounded by bodies.maxBuffered"),
    Metric("in_flight_batches", "gauge", (), "Slots taken, abandoned calls that the model still computes included"),
    Metric("refused", "counter", ("model", "reason"), "Requests refused, by reason"),
    Metric("expired", "counter", ("model",), "Requests whose deadline passed"),
    Metric("cancelled", "counter", ("model",), "Requests whose caller left"),
    Metric(
        "overdue_calls",
        "counter",
        ("model",),
        "Calls that took four times their forecast, at least a second, and gave their slots to others",
    ),
    Metric(
        "forwarded_requests",
        "counter",
        ("method", "path", "code"),
        "Answers to forwarded requests, which are never batched",
    ),
    Metric(
        "forwarded_duration_seconds",
        "histogram",
        ("method", "path"),
        "Of these with success, from the request's last byte in to the answer's last byte out",
    ),
    Metric("forwarded_slo_hits", "counter", ("method", "path"), "Of these, answered with success in the SLO's time"),
    Metric("alone", "counter", ("model", "reason"), "Requests that may not be merged, by reason"),
    Metric(
        "axis_checks",
        "counter",
        ("model", "result"),
        "Answers in a batch compared with answers to single requests, by result: agreed, disagreed, "
        "failed (no answer to compare)",
    ),
    Metric(
        "unpadded",
        "counter",
        ("model", "reason"),
        "Requests of a model with a sequence axis that only share batches with requests of their own length, by reason",
    ),
    Metric(
        "sequence_tokens",
        "counter",
        ("model",),
        "Rows sent times their own length along the model's sequence axis; padding not included",
    ),
    Metric("padded_tokens", "counter", ("model",), "What padding added to them, so that rows could share a batch"),
    Metric("bisections", "counter", ("model",), "Failed batches halved to find the request that caused it"),
    Metric(
        "key_fragments",
        "counter",
        ("header",),
        "Requests that could not be batched with the one before them, by header",
    ),
    Metric("mode", "gauge", ("model", "mode"), "1 for the mode a model is in: batching or pass-through"),
    Metric("max_batch", "gauge", ("model",), "Rows that a batch may have now"),
    Metric("max_wait_seconds", "gauge", ("model",), "Age at which the oldest request stops waiting for others"),
    Metric("max_in_flight", "gauge", ("model",), "Batches of a model that may be with the upstream at once now"),
    Metric(
        "forecast_utilization_ratio",
        "gauge",
        ("model",),
        "Forecast share of time for which the device is busy, all its users included",
    ),
    Metric(
        "target_utilization_ratio",
        "gauge",
        ("model",),
        "Utilization up to which the objective minimizes latency; 0: it has no such target",
    ),
    Metric(
        "lowest_utilization_ratio",
        "gauge",
        ("model",),
        "Forecast utilization with the least device time within the SLO: what batching could make of this load",
    ),
    Metric("utilization_ratio", "gauge", (), "Share of the last 15 s for which the device computed"),
    Metric(
        "capacity_requests_per_second",
        "gauge",
        ("model",),
        "Forecast of the highest rate that one replica serves within the SLO, the device to itself",
    ),
    Metric(
        "capacity_lower_requests_per_second", "gauge", ("model",), "The same at the upper confidence of batch latency"
    ),
    Metric(
        "capacity_zero_wait_requests_per_second", "gauge", ("model",), "The same if no request ever waited for others"
    ),
    Metric("capacity_unbatched_requests_per_second", "gauge", ("model",), "The same without batching"),
    Metric(
        "capacity_by_hand_requests_per_second",
        "gauge",
        ("model",),
        "The same by the baseline of the policy, where one is written",
    ),
    Metric(
        "load_ratio",
        "gauge",
        (),
        "Requests of the last 15 s as a share of the capacity, summed over models; its sum over replicas is the number "
        "of replicas that would be full",
    ),
    Metric(
        "forecast_alarm",
        "gauge",
        ("model",),
        "1 while answers take longer than forecast; carpool explain has the reason",
    ),
    Metric(
        "model_replaced",
        "counter",
        ("model",),
        "Times that the model changed, or its server restarted: earlier measurements are dropped",
    ),
    Metric("model_ready", "gauge", (), "1 while the model can serve"),
    Metric("config_generation", "gauge", (), "Newest version of the configuration that was accepted"),
    Metric("config_running", "gauge", (), "Oldest version with parameters in force: older after a roll-back"),
    Metric("config_rejected", "counter", (), "Versions of the configuration file that were invalid"),
    Metric(
        "changes_rejected",
        "counter",
        ("reason",),
        "Signed changes refused: signature, content, target, expired, older (a replay, or there is a newer one)",
    ),
    Metric("rollbacks", "counter", ("model",), "Parameters from outside that missed the SLO and were undone"),
    Metric("host_stalls", "counter", (), "Pauses of this host of more than 20 ms"),
    Metric("host_stall_seconds", "counter", (), "Their seconds"),
    Metric("tuner_decisions", "counter", ("action", "reason"), "Decisions of the tuner"),
    Metric("tuner_restarts", "counter", (), "Times that the tuner process was started again"),
    Metric("tuner_errors", "counter", (), "Observations and decisions lost to errors in the sidecar"),
    *generation.METRICS,
    *jobs.METRICS,
)


class Collector:
    """Reads one sidecar's counters."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar

    def collect(self) -> list[Any]:
        """Return every family of ``METRICS``, even those without samples."""
        from prometheus_client import core  # noqa: PLC0415 - 3.6 MiB, of no use before the first scrape

        kinds = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
            "summary": core.SummaryMetricFamily,
        }
        by_name = {
            metric.name: kinds[metric.kind](PREFIX + metric.name, metric.text, labels=metric.labels)
            for metric in METRICS
        }
        families, stats = Families(by_name), self._sidecar.batcher.stats(self._sidecar.clock())
        self._models(families, stats)
        self._others(families)
        self._process(families, stats)
        generation.fill(families, self._sidecar.streams)
        if self._sidecar.jobs is not None:
            jobs.fill(families, self._sidecar.jobs)
        return list(by_name.values())

    def _models(self, families: Families, stats: Stats) -> None:
        """Add what is counted by model."""
        put, control, counts, sizes = (
            families.put,
            self._sidecar.control,
            self._sidecar.driver.counts,
            self._batch_sizes(),
        )
        for state in self._sidecar.batcher.models():
            model, counted = state.name, stats.models[state.name]
            for name in ("arrivals", "batchable", "arrivals_squared", "windows", "rows", "bisections"):
                put(name, getattr(counted, name), model)
            put("arrival_gaps_seconds_squared", counted.gaps_squared, model)
            put("limited_batches", counted.limited, model)
            put("limited_batch_rows", counted.limited_rows, model)
            put("cold_batches", counted.cold, model)
            put("stalled_batches", counted.stalled, model)
            for *key, batches, busy, squared in counted.cells:
                put("batches", batches, model, *key)
                put("batch_busy_seconds", busy, model, *key)
                put("batch_busy_seconds_squared", squared, model, *key)
            put("slo_hits", counted.hits, model)
            for reason, count in counted.misses.items():
                put("slo_misses", count, model, reason)
                if reason in _REFUSALS:
                    put("refused", count, model, reason)
            put("expired", counted.misses.get(Refused.EXPIRED, 0), model)
            put("cancelled", counted.misses.get(CANCELLED, 0), model)
            seconds = counts.duration_seconds.get(model, 0.0)
            families.histogram("request_duration_seconds", DURATION_BOUNDS, counted.durations, seconds, model)
            families.histogram("request_rows", ROW_BOUNDS, counted.request_rows, counted.rows, model)
            families.summary("queue_wait_seconds", counted.dispatched, counted.queue_seconds, model)
            rows = counts.batch_rows.get(model, 0)
            families.histogram("batch_size", SIZE_BOUNDS, sizes.get(model, _NO_SIZES), rows, model)
            for mode, active in (("batching", not state.passing), ("pass-through", state.passing)):
                put("mode", active, model, mode)
            put("max_batch", state.cap, model)
            put("max_wait_seconds", state.parameters.max_wait, model)
            put("max_in_flight", state.slots, model)
            put("overdue_calls", state.load.gave_back, model)
            if (utilization := control.decisions.utilization.get(model)) is not None:
                put("forecast_utilization_ratio", utilization.forecast, model)
                put("target_utilization_ratio", utilization.target, model)
                put("lowest_utilization_ratio", utilization.lowest, model)
            put("forecast_alarm", model in control.decisions.alarms, model)
            put("model_replaced", control.observer.replaced(model), model)

    def _others(self, families: Families) -> None:
        """Add what is counted by other labels."""
        put, sidecar = families.put, self._sidecar
        counts, control = sidecar.driver.counts, sidecar.control
        for name, counted in (
            ("requests", counts.answers),
            ("alone", counts.alone),
            ("unpadded", counts.unpadded),
            ("axis_checks", sidecar.driver.verifier.trials.results),
            ("tuner_decisions", control.decisions.counts),
        ):
            for labels, count in counted.items():
                put(name, count, *labels)
        for model, (own, added) in counts.tokens.items():
            put("sequence_tokens", own, model)
            put("padded_tokens", added, model)
        for header, count in counts.fragments.items():
            put("key_fragments", count, header)
        if sidecar.versions.changes is not None:
            for why, count in sidecar.versions.changes.rejected.items():
                put("changes_rejected", count, why)
        for model, count in control.in_force.rollback.counts.items():
            put("rollbacks", count, sidecar.models.label(model))
        for path, forwarded in sidecar.forwarded.paths.items():
            for code, count in forwarded.statuses.items():
                put("forwarded_requests", count, *path, code)
            put("forwarded_slo_hits", forwarded.hits, *path)
            families.histogram(
                "forwarded_duration_seconds", DURATION_BOUNDS, forwarded.durations, forwarded.seconds, *path
            )

    def _process(self, families: Families, stats: Stats) -> None:
        """Add what is counted of the whole process, and its load."""
        put, sidecar = families.put, self._sidecar
        batcher, control = sidecar.batcher, sidecar.control
        now = sidecar.streams.added_to(control.load())
        put("utilization_ratio", now.utilization)
        if now.load is not None:
            put("load_ratio", now.load)
        for model, load in now.models.items():
            for name, value in (
                ("capacity_requests_per_second", load.capacity),
                ("capacity_lower_requests_per_second", load.capacity_lower),
                ("capacity_zero_wait_requests_per_second", load.capacity_zero_wait),
                ("capacity_unbatched_requests_per_second", load.capacity_alone),
                ("capacity_by_hand_requests_per_second", load.capacity_by_hand),
            ):
                if value is not None:
                    put(name, value, model)
        for quantile, seconds in sidecar.versions.config.policy.slo.percentiles:
            put("slo_target_seconds", seconds, quantile)
        put("slo_allowed_misses_ratio", round(1 - sidecar.versions.config.policy.slo.percentiles[-1][0], 6))
        put("device_busy_seconds", stats.device_busy)
        put("queue_rows", batcher.queued_rows)
        put("queue_bytes", sum(state.load.size for state in batcher.models()))
        put("buffered_bytes", sidecar.data.server.buffered_bytes)
        put("in_flight_batches", batcher.in_flight)
        put("model_ready", sidecar.health.ready)
        put("config_generation", sidecar.versions.generation)
        put("config_running", sidecar.running)
        put("config_rejected", sidecar.versions.file.rejected)
        put("host_stalls", sidecar.stalls.count)
        put("host_stall_seconds", sidecar.stalls.total)
        put("tuner_restarts", control.link.restarts)
        put("tuner_errors", control.errors)

    def _batch_sizes(self) -> dict[str, list[int]]:
        """Return each model's batches by size, for the histogram."""
        found: dict[str, list[int]] = {}
        for (model, power), count in self._sidecar.driver.counts.batch_sizes.items():
            found.setdefault(model, list(_NO_SIZES))[min(power, len(SIZE_BOUNDS))] += count
        return found


_NO_SIZES = [0] * (len(SIZE_BOUNDS) + 1)
_REFUSALS = frozenset(set(Refused) - {Refused.EXPIRED})


class Exposition:
    """The text that Prometheus reads. Nothing of its library is loaded before the first scrape."""

    def __init__(self, sidecar: Sidecar) -> None:
        from prometheus_client import ProcessCollector  # noqa: PLC0415 - see Collector
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415 - likewise

        self.content_type = CONTENT_TYPE_LATEST.encode()
        self._collector = Collector(sidecar)
        self._process = ProcessCollector(registry=None)
        self._generate = generate_latest

    async def text(self) -> bytes:
        """Read everything now, and format it in a thread: for 256 models that takes 0.2 s of CPU."""
        return await asyncio.to_thread(self._generate, _Read([*self._collector.collect(), *self._process.collect()]))


class _Read(NamedTuple):
    """Families that were already read, in place of a registry that reads them."""

    families: list[Any]

    def collect(self) -> list[Any]:
        """Return them."""
        return self.families


def reference() -> str:
    """Return ``docs/reference/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "Generated by `make docs` from the code; do not edit.",
        "Counters only grow and sum over replicas. The number of model names is bounded: the rest are `<other>`.",
        "",
        "| metric | type | labels | what it counts |",
        "|---|---|---|---|",
    ]
    for metric in METRICS:
        name = PREFIX + metric.name + ("_total" if metric.kind == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{name}` | {metric.kind} | {labels} | {metric.text} |")
    return "\n".join(lines) + "\n"
