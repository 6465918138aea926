"""The operator's own metrics. ``METRICS`` is the one list; the reference page is generated from it."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from carpool_operator.api.model import Policy

PREFIX = "carpool_operator_"


class Metric(NamedTuple):
    """One metric; a counter's exported name ends with ``_total``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    text: str


METRICS = (
    Metric("leader", "gauge", (), "1 while this replica leads, or leads its shard"),
    Metric("shards", "gauge", (), "Shards that the cluster is divided into: each has a leader of its own"),
    Metric("pass_seconds", "histogram", (), "Seconds of a pass over all policies"),
    Metric("pass_cpu_seconds", "counter", (), "CPU seconds of the process while it leads"),
    Metric("step_errors", "counter", (), "Decisions lost to errors in the operator; the log has them"),
    Metric("decisions", "counter", ("action", "reason"), "Decisions, as statuses name them"),
    Metric("readings", "counter", ("result",), "Reports asked of pods or of Prometheus: ok, error"),
    Metric("pushes", "counter", ("result",), "Configurations sent to pods: taken, refused"),
    Metric("writes", "counter", ("resource",), "Successful writes to the API server, without the lease"),
    Metric("api_errors", "counter", ("method", "code"), "Requests that the API server refused; code 0: no answer"),
    Metric(
        "last_event_age_seconds",
        "gauge",
        ("kind",),
        "Seconds since the last event of a watch, by kind; for pods, the longest of any namespace's watch",
    ),
    Metric("late_changes", "counter", ("kind",), "Changes that a list found before their event came"),
    Metric("objects", "gauge", ("kind",), "Objects known: policies, workloads by kind, pods with a sidecar"),
    Metric("pods_acknowledged", "gauge", (), "Pods that run the newest configuration"),
    Metric("pods_missed", "gauge", (), "Pods that should have a sidecar and have none"),
)

_OF_TARGETS = {
    "carpool_target_load_replicas": "Load of a workload in capacities of one replica: 2.4 needs 2.4 replicas that are "
    "full",
    "carpool_target_needed_replicas": "Replicas that serve this load, each up to the target of the autoscaler seen, "
    "else to 90 % of its capacity: more at once, fewer after five minutes",
    "carpool_target_needed_replicas_upper": "The same if batch latency is at its upper confidence",
    "carpool_target_serving_replicas": "Pods of a workload that serve; one that starts is not counted",
    "carpool_target_utilization_ratio": "Share of the time in which the devices of a workload compute, in the mean",
    "carpool_target_lowest_utilization_ratio": "What that could be at this load within the SLO",
    "carpool_target_requests_per_second": "Requests per second that one replica can serve within the SLO",
    "carpool_target_tokens_per_second": "Output tokens per second of token streams that one replica can serve within "
    "the SLO",
    "carpool_target_streams_running": "Token streams with the engines of a workload, as its status last said",
    "carpool_target_streams_queued": "Requests for token streams that wait before them, likewise",
    "carpool_target_streams_goodput": "Token streams per second that met both TTFT and TPOT, likewise",
    "carpool_target_streams_limit": "Sequences that one engine may have at once within the targets, likewise",
}
"""Gauges of each target, with complete names."""

OF_POLICIES = (
    Metric(
        "carpool_policy_condition",
        "gauge",
        ("policy_namespace", "policy", "condition", "status", "reason"),
        "1 for each condition of a policy's status, with its status (True, False, Unknown) and reason",
    ),
    Metric(
        "carpool_policy_slo_seconds",
        "gauge",
        ("policy_namespace", "policy", "quantile"),
        "The SLO of a policy: seconds by quantile",
    ),
    Metric(
        "carpool_policy_last_decision_timestamp_seconds",
        "gauge",
        ("policy_namespace", "policy", "action", "reason"),
        "When the last decision on a policy was, with what was decided and why",
    ),
    *(
        Metric(name, "gauge", ("policy_namespace", "policy", "kind", "target"), text)
        for name, text in _OF_TARGETS.items()
    ),
)
"""Metrics of each policy, from the leader alone, with complete names. A scrape adds the operator's own namespace as
`namespace`."""

PASS_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


_CAPACITY = {
    "load": "carpool_target_load_replicas",
    "replicas": "carpool_target_needed_replicas",
    "replicasUpper": "carpool_target_needed_replicas_upper",
    "serving": "carpool_target_serving_replicas",
    "utilization": "carpool_target_utilization_ratio",
    "lowestUtilization": "carpool_target_lowest_utilization_ratio",
    "requestsPerSecond": "carpool_target_requests_per_second",
    "tokensPerSecond": "carpool_target_tokens_per_second",
}
"""By field of a target's capacity in a status: its metric."""

_STREAMS = {
    "running": "carpool_target_streams_running",
    "queued": "carpool_target_streams_queued",
    "goodput": "carpool_target_streams_goodput",
    "limit": "carpool_target_streams_limit",
}
"""The same for its token streams."""


class Policies:
    """Reads the policies at a scrape; ``known`` returns the leader's policies, and nothing on other replicas."""

    def __init__(self, known: Callable[[], Iterable[Policy]]) -> None:
        self._known = known

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield every family of ``OF_POLICIES``."""
        families = {each.name: GaugeMetricFamily(*each[::3], labels=each.labels) for each in OF_POLICIES}
        condition, slo, decision, *_ = families.values()
        for policy in self._known():
            name = (policy.namespace, policy.name)
            for each in policy.status.get("conditions", ()):
                condition.add_metric((*name, each["type"], each["status"], each["reason"]), 1)
            for quantile, seconds in () if policy.spec is None else policy.spec.slo.percentiles:
                slo.add_metric((*name, str(quantile)), seconds)
            last = policy.status.get("lastDecision")
            if last:
                at = datetime.fromisoformat(last["at"]).timestamp()
                decision.add_metric((*name, last["action"], last["reason"]), at)
            for part, metrics in (("capacity", _CAPACITY), ("tokenStreams", _STREAMS)):
                for said in policy.status.get(part, ()):
                    for field, metric in metrics.items():
                        if field in said:
                            families[metric].add_metric((*name, *said["target"].split("/", 1)), said[field])
        yield from families.values()


class OperatorMetrics:
    """All of them; by name, without the prefix."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._all: dict[str, Any] = {}
        self.before_scrape: list[Callable[[], None]] = []
        """Called before every scrape: gauges whose values are kept elsewhere."""
        for metric in METRICS:
            name = PREFIX + metric.name
            if metric.kind == "histogram":
                made: Any = Histogram(name, metric.text, metric.labels, buckets=PASS_BOUNDS, registry=self._registry)
            else:
                kind = Counter if metric.kind == "counter" else Gauge
                made = kind(name, metric.text, metric.labels, registry=self._registry)
            self._all[metric.name] = made

    def count(self, name: str, *labels: object, by: float = 1.0) -> None:
        """Add to a counter."""
        self._of(name, labels).inc(by)

    def set(self, name: str, value: float, *labels: object) -> None:
        """Set a gauge."""
        self._of(name, labels).set(value)

    def observe(self, name: str, value: float) -> None:
        """Add to a histogram."""
        self._all[name].observe(value)

    def read_policies(self, known: Callable[[], Iterable[Policy]]) -> None:
        """Export the policies' figures, too."""
        self._registry.register(Policies(known))

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        for each in self.before_scrape:
            each()
        return generate_latest(self._registry)

    def _of(self, name: str, labels: tuple[object, ...]) -> Any:  # noqa: ANN401 - a counter or a gauge
        return self._all[name].labels(*labels) if labels else self._all[name]


def reference() -> str:
    """Return the operator's section of ``docs/reference/metrics.md``."""
    lines = ["", "## Of the operator", "", "| metric | type | labels | what |", "|---|---|---|---|"]
    for metric in (*METRICS, *OF_POLICIES):
        name = metric.name if metric in OF_POLICIES else PREFIX + metric.name
        name += "_total" if metric.kind == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{name}` | {metric.kind} | {labels} | {metric.text} |")
    return "\n".join(lines) + "\n"
