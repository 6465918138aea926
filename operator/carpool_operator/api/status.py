"""What the operator says of a BatchingPolicy: its status."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters

MAX_HISTORY = 10
"""Changes that a status remembers."""


class Said(Struct, rename="camel", frozen=True, kw_only=True, omit_defaults=True):
    """Base of what a status holds: camelCase outside, and what a newer operator added is passed over.

    Times are RFC 3339 in UTC, whole seconds: ``2026-11-21T17:16:00Z``. What is unknown is left out.
    """


Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
"""RFC 3339, UTC."""


class ConditionType(StrEnum):
    """What is said to be so, or not, or unknown."""

    ACCEPTED = "Accepted"
    """The spec makes sense, and no other policy has its targets."""
    PROGRAMMED = "Programmed"
    """Every pod of every target runs what is applied."""
    METRICS_AVAILABLE = "MetricsAvailable"
    """There is evidence to decide on."""
    SLO_MET = "SLOMet"
    """The share of requests that miss is within the SLO."""
    READY = "Ready"
    """All of these but SLOMet."""


ANNOTATION_INVALID = "AnnotationInvalid"
"""With Accepted: annotations that make no sense, so the policy is as the last ones that did asked for."""
SERVICE_BYPASSED = "ServiceBypassed"
"""With Programmed: callers of a Service get past the sidecars."""
DEFECTS = frozenset({ANNOTATION_INVALID, SERVICE_BYPASSED})
"""Reasons of conditions that are so, with a message of something to put right all the same."""


class ConditionStatus(StrEnum):
    """Kubernetes' own three values."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Said, frozen=True, kw_only=True, omit_defaults=False):
    """A condition as all of Kubernetes writes them."""

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
    """Generation of the spec that this is said of."""


class Figures(Said, frozen=True):
    """A load and how it is served: observed, or predicted. What is unknown is left out."""

    rate: float | None = None
    """Requests per second and replica."""
    p50: Duration | None = None
    """Half of the answers within this."""
    p99: Duration | None = None
    """99 % of the answers within this."""
    miss_fraction: float | None = None
    """Share of requests not answered by their due time: late, refused or failed."""
    goodput: float | None = None
    """Answers by their due time per second and replica."""
    mean_batch: float | None = None
    """Rows of a batch."""
    device_time: Duration | None = None
    """Time with a batch in flight per request."""
    utilization: float | None = None
    """Share of the time in which the device computes."""


class Applied(Said, frozen=True):
    """What is in force for the busiest model; each one's stands under targets."""

    generation: int
    """Of the configuration: milliseconds since the epoch."""
    at: Time
    """When it was published."""
    target: str
    """Kind/name of the workload."""
    model: str
    """Name of the model, or `*` for every one."""
    parameters: Parameters
    """What is in force."""
    batch: str
    """For lists: the rows, or `pass` where nothing is merged."""
    wait: str
    """For lists: the wait, or `pass` where nothing is held."""


class Recommendation(Said, frozen=True):
    """Where the tuner would go."""

    target: str
    """Kind/name of the workload."""
    model: str
    """Name of the model, or `*` for every one."""
    parameters: Parameters
    """The next step."""
    uncapped: Parameters | None = None
    """Where it would be if it could go at once."""
    capped_by: str = ""
    """What keeps it from there."""
    predicted: Figures | None = None
    """What the next step is forecast to bring."""


class LastDecision(Said, frozen=True):
    """What was decided last, and on what evidence."""

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
    """What was seen."""
    predicted: Figures | None = None
    """What was forecast for the parameters in force."""
    alternative: str = ""
    """What another objective would do at this load."""


class Trial(Said, frozen=True):
    """Parameters that a share of the pods tries."""

    generation: int
    """Of the configuration that the canaries got."""
    parameters: Parameters
    """What they try."""
    pods: tuple[str, ...]
    """Names of the canaries."""
    since: Time
    """When they began."""


class TargetModel(Said, frozen=True):
    """One model of a workload."""

    name: str
    """As in the request's path, or `*` for every one."""
    generation: int
    """Of the configuration that brought the parameters."""
    parameters: Parameters
    """In force on all pods but canaries."""
    trial: Trial | None = None
    """What canaries try."""


class CapacityStatus(Said, frozen=True):
    """How full a workload is, and how many replicas its load needs. Loads are in capacities of one replica."""

    target: str
    """Kind/name of the workload."""
    load: float
    """Of all pods: 2.4 needs 2.4 replicas that are full. An autoscaler's signal."""
    load_upper: float
    """The same at the upper confidence of batch latency."""
    replicas: int
    """Replicas that serve this load up to `targetLoad` each: more at once, fewer after five minutes."""
    replicas_upper: int
    """The same by `loadUpper`."""
    replicas_zero_wait: int
    """Replicas that this load would need if no request ever waited for others, over the same five minutes."""
    replicas_unbatched: int
    """The same without batching."""
    serving: int
    """Pods that serve; one that starts is not counted."""
    replicas_by_hand: int | None = None
    """Replicas that this load would need by the policy's `baseline`; left out where none is written, or where it meets
    the SLO at no load."""
    target_load: float | None = None
    """Load up to which a replica is planned: the target of the autoscaler that follows it; left out, it is 0.9."""
    requests_per_second: float | None = None
    """That one replica can serve within the SLO, over all models as they are mixed now."""
    tokens_per_second: float | None = None
    """Output tokens of token streams that one replica can serve within the SLO."""
    utilization: float | None = None
    """Share of the time in which the devices compute, in the mean."""
    lowest_utilization: float | None = None
    """What it could be at this load within the SLO."""
    cold_start: Duration | None = None
    """From the creation of a pod until it was ready: the median of the last starts; left out until one was seen."""


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
    """Why."""


class TokenStreamsStatus(Said, frozen=True, kw_only=True):
    """Token streams of one workload in the last minute, over all its pods; written when it changes clearly."""

    target: str
    """Kind/name of the workload."""
    gated: int
    """Pods whose gate admits requests; 0: the policy has no `slo.ttft`, or the engine has no sidecar."""
    requests_per_second: float
    """Requests that came, refused ones included."""
    goodput: float | None = None
    """Answers per second that met both targets."""
    miss_fraction: float | None = None
    """Share of requests that did not: late, refused or failed."""
    tokens_per_second: float
    """Output tokens."""
    ttft_p50: Duration | None = None
    """Half of the first tokens within this."""
    ttft_p99: Duration | None = None
    """99 % of the first tokens within this."""
    tpot_p50: Duration | None = None
    """Half of the answers have at most this per output token after the first."""
    tpot_p99: Duration | None = None
    """99 % of them."""
    running: int
    """Requests with the engines."""
    queued: int
    """Requests that wait before them."""
    limit: int | None = None
    """Sequences that one engine may have at once within the targets, as learned."""
    recommended: EngineLimits | None = None
    """For engines without a sidecar, with `tuning.mode: Recommend` and metrics from Prometheus."""


class TargetStatus(Said, frozen=True, omit_defaults=False):
    """One workload, and how far its pods have got."""

    kind: str
    """As in `targetRefs`."""
    name: str
    """Its name."""
    replicas: int = 0
    """Pods that it wants."""
    injected: int = 0
    """Pods that have a sidecar."""
    acknowledged: int = 0
    """Pods that run the newest configuration."""
    missed: tuple[str, ...] = ()
    """Pods without a sidecar that should have one; restart the workload to give them theirs."""
    models: tuple[TargetModel, ...] = ()
    """What is in force, by model."""
    autoscaler: str = ""
    """What follows the load, so that `Balanced` is `Efficiency`: kind/name of an autoscaler, or the annotation."""


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
    """What came into force."""
    reason: str
    """Why, in one word."""


class Status(Said, frozen=True):
    """What the operator says of a policy."""

    observed_generation: int | None = None
    """Generation of the spec that all this is said of."""
    conditions: tuple[Condition, ...] = ()
    """What is so, and why."""
    applied: Applied | None = None
    """What is in force for the busiest model; nothing before the first configuration is published."""
    recommendation: Recommendation | None = None
    """Where the tuner would go, where it is kept from going there."""
    last_decision: LastDecision | None = None
    """What was decided last, and on what evidence."""
    targets: tuple[TargetStatus, ...] = ()
    """The workloads, and how far their pods have got."""
    history: tuple[HistoryEntry, ...] = ()
    """The last 10 changes, newest first."""
    capacity: tuple[CapacityStatus, ...] = ()
    """How full each workload is, and how many replicas its load needs, once that is known."""
    token_streams: tuple[TokenStreamsStatus, ...] = ()
    """How each workload's token streams are served, where there are any."""
