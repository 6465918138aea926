"""The status of a BatchingPolicy, written by the operator."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from carpool.policy.durations import Duration, whole_microseconds
from carpool.policy.parameters import Parameters

MAX_HISTORY = 10
"""Changes that a status keeps."""


class Said(Struct, rename="camel", frozen=True, kw_only=True, omit_defaults=True):
    """Base of a status's types: camelCase in JSON; unknown fields of a newer operator are ignored.

    Times are RFC 3339 in UTC, whole seconds: ``2026-11-21T17:16:00Z``. Unknown values are left out.
    """


Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
"""RFC 3339, UTC."""


LONGEST = 99999 * 3600.0
"""Longest duration that can be written, in seconds: forecasts of an overload are infinite."""


def figure(value: float) -> float:
    """Round to three digits for readers."""
    return float(f"{value:.3g}")


def duration(seconds: float | None) -> Duration | None:
    """Round to three digits; ``None`` for what is unknown or too long to be written."""
    return None if seconds is None or seconds > LONGEST else Duration(whole_microseconds(figure(seconds)))


class ConditionType(StrEnum):
    """A statement that is true, false or unknown."""

    ACCEPTED = "Accepted"
    """The spec is valid, and no other policy has its targets."""
    PROGRAMMED = "Programmed"
    """Every pod of every target runs the applied parameters."""
    METRICS_AVAILABLE = "MetricsAvailable"
    """There are metrics to decide on."""
    SLO_MET = "SLOMet"
    """The share of requests that miss is within the SLO."""
    READY = "Ready"
    """All of these but SLOMet."""


ANNOTATION_INVALID = "AnnotationInvalid"
"""With Accepted: annotations are invalid, so the policy stays as the last valid ones specified."""
SERVICE_BYPASSED = "ServiceBypassed"
"""With Programmed: callers of a Service bypass the sidecars."""
DEFECTS = frozenset({ANNOTATION_INVALID, SERVICE_BYPASSED})
"""Reasons of conditions that are true, but whose message names something to fix."""


class ConditionStatus(StrEnum):
    """Kubernetes' own three values."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Said, frozen=True, kw_only=True, omit_defaults=False):
    """A condition in Kubernetes' usual format."""

    type: Annotated[str, Meta(max_length=316)]
    """Accepted, Programmed, MetricsAvailable, SLOMet or Ready."""
    status: ConditionStatus
    """Whether it is so."""
    reason: Annotated[str, Meta(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, in one word."""
    message: Annotated[str, Meta(max_length=32768)] = ""
    """Why, and what to do about it."""
    last_transition_time: Time
    """When `status` last changed."""
    observed_generation: Annotated[int, Meta(ge=0)] = 0
    """Generation of the spec that this refers to."""


class Figures(Said, frozen=True):
    """A load and how it is served: observed, or predicted. Unknown values are left out."""

    rate: float | None = None
    """Requests per second and replica."""
    p50: Duration | None = None
    """Half of the requests are answered within this."""
    p99: Duration | None = None
    """99 % of the requests are answered within this."""
    miss_fraction: float | None = None
    """Share of requests not answered by their due time: late, rejected or failed."""
    goodput: float | None = None
    """Answers by their due time per second and replica."""
    mean_batch: float | None = None
    """Mean rows per batch."""
    device_time: Duration | None = None
    """Time with a batch in flight, per request."""
    utilization: float | None = None
    """Share of the time in which the device computes."""


class Applied(Said, frozen=True):
    """Parameters in use for the busiest model; those of every model are listed under targets."""

    generation: int
    """Of the configuration: milliseconds since the epoch."""
    at: Time
    """When it was published."""
    target: str
    """Kind/name of the workload."""
    model: str
    """Name of the model, or `*` for every one."""
    parameters: Parameters
    """Parameters in use."""
    batch: str
    """For lists: the rows, or `pass` where requests are not batched."""
    wait: str
    """For lists: the wait, or `pass` where requests do not wait."""


class Recommendation(Said, frozen=True):
    """What the tuner recommends."""

    target: str
    """Kind/name of the workload."""
    model: str
    """Name of the model, or `*` for every one."""
    parameters: Parameters
    """The next step: the parameters that are, or would be, applied next."""
    uncapped: Parameters | None = None
    """Where the steps lead: the final recommendation, without the limit on each step."""
    capped_by: str = ""
    """What limits the next step, or makes it wait: `canary`, `mode`, `step` or `evidence`."""
    predicted: Figures | None = None
    """Forecast for the next step."""


class LastDecision(Said, frozen=True):
    """The last decision, and the metrics that it was based on."""

    action: str
    """Applied, Recommended, Held, Trying, Promoted, Measured, RolledBack or FellBack."""
    reason: str
    """Why, in one word."""
    message: str
    """Why, in a sentence."""
    model: str
    """Name of the model, or `*` for every one."""
    target: str
    """Kind/name of the workload."""
    at: Time
    """When."""
    observed: Figures | None = None
    """Measured before the decision."""
    predicted: Figures | None = None
    """Forecast for the parameters in use."""
    alternative: str = ""
    """Forecast for another objective at this load."""


class TrialStatus(Said, frozen=True):
    """Parameters that run on a share of the pods for a trial."""

    generation: int
    """Generation of the canaries' configuration."""
    parameters: Parameters
    """Parameters of the trial."""
    pods: tuple[str, ...]
    """Names of the canaries."""
    since: Time
    """When the trial began."""


class TargetModel(Said, frozen=True):
    """One model of a workload."""

    name: str
    """As in the request's path, or `*` for every one."""
    generation: int
    """Generation of the configuration that introduced the parameters."""
    parameters: Parameters
    """Used by all pods except canaries."""
    trial: TrialStatus | None = None
    """The canaries' trial."""


class CapacityStatus(Said, frozen=True):
    """How full a workload is, and how many replicas its load needs. Loads are in capacities of one replica."""

    target: str
    """Kind/name of the workload."""
    load: float
    """Of all pods: 2.4 fills 2.4 replicas. An autoscaler's signal."""
    load_upper: float
    """The same at the upper confidence of batch latency."""
    replicas: int
    """Replicas that serve this load up to `targetLoad` each: it rises at once and falls after five minutes."""
    replicas_upper: int
    """The same by `loadUpper`."""
    replicas_zero_wait: int
    """Replicas that this load would need if requests never waited for others, over the same five minutes."""
    replicas_unbatched: int
    """The same without batching."""
    serving: int
    """Pods that serve; starting pods are not counted."""
    replicas_by_hand: int | None = None
    """Replicas that this load would need with the policy's `baseline`; left out without a baseline, or if the baseline
    misses the SLO even at the lowest load."""
    target_load: float | None = None
    """Planned load of a replica: the target of the autoscaler that follows it; left out, it is 0.9."""
    requests_per_second: float | None = None
    """Requests per second that one replica can serve within the SLO, over all models in their present mix."""
    tokens_per_second: float | None = None
    """Output tokens of token streams that one replica can serve within the SLO."""
    utilization: float | None = None
    """Share of the time in which the devices compute, on average."""
    lowest_utilization: float | None = None
    """Lowest utilization possible at this load within the SLO."""
    cold_start: Duration | None = None
    """Time from a pod's creation until it is ready: the median of the last starts; left out until one was observed."""


class NoCapacity(Said, frozen=True, kw_only=True, omit_defaults=False):
    """A workload for which no number of replicas meets the SLO."""

    target: str
    """Kind/name of the workload."""
    model: str
    """Name of the model."""
    reason: str
    """Why, in a sentence."""


class EngineLimits(Said, frozen=True, kw_only=True):
    """Limits to set on engines that have no sidecar, or on a gateway before them."""

    max_num_seqs: int
    """vLLM's `--max-num-seqs` (`--max-num-active-seqs`)."""
    max_num_batched_tokens: int
    """vLLM's `--max-num-batched-tokens`."""
    max_num_queued_tokens: int
    """vLLM's `--max-num-queued-tokens`."""
    max_concurrency: int
    """`maxConcurrency` of the Gateway API Inference Extension, for each replica."""
    reason: str
    """Why these limits."""


class TokenStreamsStatus(Said, frozen=True, kw_only=True):
    """Token streams of one workload in the last minute, over all its pods; updated when it changes clearly."""

    target: str
    """Kind/name of the workload."""
    gated: int
    """Pods whose gate admits requests; 0: the policy has no `slo.ttft`, or the engine has no sidecar."""
    requests_per_second: float
    """Requests that arrived, including rejected ones."""
    goodput: float | None = None
    """Answers per second that met both targets."""
    miss_fraction: float | None = None
    """Share of requests that missed a target: late, rejected or failed."""
    tokens_per_second: float
    """Output tokens."""
    ttft_p50: Duration | None = None
    """Half of the first tokens arrive within this."""
    ttft_p99: Duration | None = None
    """99 % of the first tokens arrive within this."""
    tpot_p50: Duration | None = None
    """Half of the answers take at most this per output token after the first."""
    tpot_p99: Duration | None = None
    """99 % of the answers take at most this per output token after the first."""
    running: int
    """Requests that the engines process."""
    queued: int
    """Requests that wait before the engines."""
    limit: int | None = None
    """Sequences that one engine may run at once within the targets, as learned."""
    recommended: EngineLimits | None = None
    """For engines without a sidecar, with `tuning.mode: Recommend` and metrics from Prometheus."""


class TargetStatus(Said, frozen=True, omit_defaults=False):
    """One workload, and the state of its pods."""

    kind: str
    """As in `targetRefs`."""
    name: str
    """Its name."""
    replicas: int = 0
    """Desired number of pods."""
    injected: int = 0
    """Pods that have a sidecar."""
    acknowledged: int = 0
    """Pods that run the newest configuration."""
    missed: tuple[str, ...] = ()
    """Pods without a sidecar that should have one; restart the workload to add it."""
    models: tuple[TargetModel, ...] = ()
    """Parameters in use, by model."""
    autoscaler: str = ""
    """What follows the load, so that `Balanced` becomes `Efficiency`: kind/name of an autoscaler, or the annotation."""


class HistoryEntry(Said, frozen=True):
    """One change."""

    generation: int
    """Of the configuration: milliseconds since the epoch."""
    at: Time
    """When it was published."""
    target: str
    """Kind/name of the workload."""
    model: str
    """Name of the model, or `*` for every one."""
    parameters: Parameters
    """The new parameters."""
    reason: str
    """Why, in one word."""


class Status(Said, frozen=True):
    """The operator's status of a policy."""

    observed_generation: int | None = None
    """Generation of the spec that this status refers to."""
    conditions: tuple[Condition, ...] = ()
    """The conditions, with their reasons."""
    applied: Applied | None = None
    """Parameters in use for the busiest model; empty before the first configuration is published."""
    recommendation: Recommendation | None = None
    """What the tuner recommends, if it can't apply it."""
    last_decision: LastDecision | None = None
    """The last decision, and the metrics that it was based on."""
    targets: tuple[TargetStatus, ...] = ()
    """The workloads, and the state of their pods."""
    history: tuple[HistoryEntry, ...] = ()
    """The last 10 changes, newest first."""
    capacity: tuple[CapacityStatus, ...] = ()
    """How full each workload is, and how many replicas its load needs, once that is known."""
    no_capacity: tuple[NoCapacity, ...] = ()
    """Workloads for which no number of replicas meets the SLO: they have no `capacity`."""
    token_streams: tuple[TokenStreamsStatus, ...] = ()
    """How each workload's token streams are served, where there are any."""
