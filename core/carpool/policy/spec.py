"""The types a person or another program writes: SLO, bounds, and the policy that names a p99.

Single source of the CRD, the sidecar's config file and the command line's options.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Self

from msgspec import Meta, field
from msgspec.structs import replace

from carpool.policy.durations import Duration, Quantity, format_seconds, whole_microseconds
from carpool.policy.generation import ClassTarget, Generation, TokenTarget, validate_targets
from carpool.policy.parameters import Limits, Parameters
from carpool.policy.plain import Camel, PolicyError

PERCENTILES = {0.5: "p50", 0.9: "p90", 0.95: "p95", 0.99: "p99", 0.999: "p999"}
"""Names by quantile, ascending."""


class Latency(Camel, frozen=True):
    """Percentile targets in seconds; at least one."""

    p50: Duration | None = None
    """Half of the answers within this."""
    p90: Duration | None = None
    """90 % within this."""
    p95: Duration | None = None
    """95 % within this."""
    p99: Duration | None = None
    """99 % within this."""
    p999: Duration | None = None
    """99.9 % within this."""


class SLO(Camel, frozen=True):
    """The targets: latency of answers; first token and time per token of token streams."""

    latency: Latency | None = None
    """Targets by percentile; the highest one given also sets each request's due time. Unset: that of `ttft`."""
    ttft: TokenTarget | None = None
    """Of token streams: time from a request's arrival to its first token. With it a gate admits requests."""
    tpot: TokenTarget | None = None
    """Of token streams: mean time per output token after the first. Needs `ttft` beside it."""
    classes: Annotated[tuple[ClassTarget, ...], Meta(max_length=8)] = ()
    """Of token streams: other targets by class, which a request names in its header `x-carpool-priority`. Needs `ttft`
    beside it."""

    @property
    def percentiles(self) -> tuple[tuple[float, float], ...]:
        """The targets of answers that are no streams, as (quantile in 0..1, seconds), lowest quantile first."""
        latency = self.latency
        if latency is None:
            latency = Latency(p99=None if self.ttft is None else self.ttft.p99)
        return tuple(
            (q, float(value)) for q, name in PERCENTILES.items() if (value := getattr(latency, name)) is not None
        )

    @property
    def due(self) -> float:
        """Seconds from arrival to due time: the target of the highest percentile given."""
        return self.percentiles[-1][1]


class Axis(StrEnum):
    """Batch dimension of a model's tensors: ``Auto`` asks the model, ``First`` is dim 0, ``None`` never batches."""

    AUTO = "Auto"
    FIRST = "First"
    NONE = "None"


class IntRange(Camel, frozen=True):
    """Inclusive bounds."""

    min: Annotated[int, Meta(ge=1, le=65536)] | None = None
    """Least value allowed."""
    max: Annotated[int, Meta(ge=1, le=65536)] | None = None
    """Largest value allowed."""


class DurationRange(Camel, frozen=True):
    """Inclusive bounds, seconds."""

    min: Duration | None = None
    """Least value allowed."""
    max: Duration | None = None
    """Largest value allowed."""


class Bounds(Camel, frozen=True):
    """Range of parameters that the tuner may choose from. Unset bounds are wide: see ``BatchingPolicy.limits``."""

    max_batch: IntRange = field(default_factory=IntRange)
    """Rows; 1 to 64 unless set."""
    max_wait: DurationRange = field(default_factory=DurationRange)
    """0s to half the SLO unless set; below the SLO in any case."""
    max_in_flight: IntRange = field(default_factory=IntRange)
    """1 to 32 unless set."""


class SequenceAxis(Camel, frozen=True):
    """Lets requests of different lengths share a batch: shorter rows are padded to the longest of the batch."""

    pad: Annotated[dict[str, float], Meta(min_length=1, max_length=32)]
    """Inputs that are padded, each with the value that it is padded with: 0 for an attention mask."""
    axis: Annotated[int, Meta(ge=1, le=8)] = 1
    """Dimension of the length; dim 0 counts the rows."""
    lengths: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1, max_length=32)] = tuple(
        16 << power for power in range(10)
    )
    """Upper ends of the length buckets: requests of one bucket share batches. Longer requests are not padded."""
    outputs: Annotated[tuple[Annotated[str, Meta(max_length=253)], ...], Meta(max_length=32)] = ()
    """Outputs that have the length in that dimension, too: each answer is cut back to its request's own length."""


class Model(Camel, frozen=True):
    """Settings of one model behind the upstream."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]
    """The model's name in the request's path."""
    axis: Axis = Axis.AUTO
    """Batch dimension of its tensors. V1 `instances` have it first by protocol, unless this is None."""
    max_batch: Annotated[int, Meta(ge=1, le=65536)] | None = None
    """Most rows that the model accepts in one request."""
    sequence: SequenceAxis | None = None
    """Where requests differ in length, as texts do. Unset: only requests of equal length share a batch."""
    bounds: Bounds | None = None
    """Replace the policy's bounds, field by field."""


class TuningMode(StrEnum):
    """``Apply`` turns parameters, ``Recommend`` only says what it would do, ``Hold`` freezes them."""

    APPLY = "Apply"
    RECOMMEND = "Recommend"
    HOLD = "Hold"


class RiskierStep(Camel, frozen=True):
    """When the tuner may take a step with more forecast misses, and how large the step may be."""

    after: Duration = Duration(10.0)
    """Least time since the last change."""
    min_requests: Annotated[int, Meta(ge=1)] = 300
    """Least number of requests since the last change."""
    max_factor: Annotated[float, Meta(gt=1.0, le=16.0)] = 2.0
    """Largest factor on a parameter in one step; one row and one millisecond are always allowed."""


class Tuning(Camel, frozen=True):
    """How the tuner changes parameters."""

    mode: TuningMode = TuningMode.APPLY
    """Apply, only recommend, or hold."""
    tolerance_percent: Annotated[int, Meta(ge=0, le=100)] = 10
    """Change of the load, in percent, that the tuner ignores."""
    riskier: RiskierStep = field(default_factory=RiskierStep)
    """Steps with more forecast misses. All other steps are immediate."""


class PassThroughMode(StrEnum):
    """Whether requests pass one by one, without a wait, and without batching unless more than ``maxInFlight`` wait."""

    AUTOMATIC = "Automatic"
    ALWAYS = "Always"
    NEVER = "Never"


class PassThrough(Camel, frozen=True):
    """Whether requests pass straight through at low traffic."""

    mode: PassThroughMode = PassThroughMode.AUTOMATIC
    """Automatic follows the load and the saving that batching would bring."""


class ShedAt(StrEnum):
    """Which time a request must be able to meet to be admitted and dispatched.

    ``SLO`` refuses requests that would miss the SLO, once batch latency is known; a request that could not meet it even
    alone never is. ``Deadline`` refuses only requests that would miss their deadline. ``Automatic`` is ``SLO`` where
    device time is scarce (30 % utilization and more, or a backlog), else ``Deadline``.
    """

    AUTOMATIC = "Automatic"
    SLO = "SLO"
    DEADLINE = "Deadline"


class Admission(Camel, frozen=True):
    """Bounds of the queue and the default deadline."""

    max_queued_rows: Annotated[int, Meta(ge=1)] = 1024
    """Rows of a model that may wait; from 80 % of it low priority is refused."""
    max_queued_bytes: Quantity = Quantity(256 * 2**20)
    """Bytes of a model's requests that may wait, likewise."""
    max_queued_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Payload elements of a model that may wait, likewise; unset: not bounded."""
    timeout: Duration | None = None
    """Deadline of a request that names none, or a later one. Unset: 10 s, or twice the SLO's target if that is more."""
    shed_at: ShedAt = ShedAt.AUTOMATIC
    """Whether requests that would miss the SLO are refused: Automatic where device time is scarce, SLO always, Deadline
    never: only those that would miss their deadline."""

    def seconds(self, due: float) -> float:
        """Return the deadline of a request that names none, by when it is due: both in seconds from arrival."""
        return max(10.0, 2 * due) if self.timeout is None else float(self.timeout)


NEVER_ACROSS = frozenset(
    {
        "connection", "content-encoding", "content-length", "content-type", "expect", "inference-header-content-length",
        "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Headers that say where a body ends or how it is to be read: requests that differ in them can't be one."""

HeaderName = Annotated[str, Meta(pattern=r"^[a-z0-9!#$%&'*+.^_`|~-]+$", min_length=1, max_length=128)]


class VerificationMode(StrEnum):
    """``Automatic`` checks that rows can be merged before any are; ``Never`` believes the server's metadata."""

    AUTOMATIC = "Automatic"
    NEVER = "Never"


class Verification(Camel, frozen=True):
    """Whether rows give the same answers in a batch as alone: checked before requests are merged, and now and then."""

    mode: VerificationMode = VerificationMode.AUTOMATIC
    """Automatic sends copies of a few real requests, alone and merged; Never merges by the server's metadata alone."""
    tolerance_percent: Annotated[int, Meta(ge=0, le=100)] = 1
    """Largest difference of two numbers, in percent of the largest number of their row."""


TARGET_UTILIZATION = 60
"""Percent."""


class Objective(StrEnum):
    """What is chosen among the settings that meet the SLO now and at 1.25x the load."""

    BALANCED = "Balanced"
    EFFICIENCY = "Efficiency"
    LATENCY = "Latency"


class FallbackBehavior(StrEnum):
    """The parameters to use when metrics fail."""

    HOLD_LAST = "HoldLast"
    BASELINE = "Baseline"


class Fallback(Camel, frozen=True):
    """After how many failed observations the tuner no longer relies on what it learned."""

    failure_threshold: Annotated[int, Meta(ge=1)] = 3
    """Failed observations in a row."""
    behavior: FallbackBehavior = FallbackBehavior.HOLD_LAST
    """Keep the last parameters, or go back to the baseline. Paused, or in a `mode` other than `Apply`, they stay."""


class BatchingPolicy(Camel, frozen=True):
    """What a user writes: an SLO, and optionally what the tuner may change to meet it, and how fast."""

    slo: SLO
    """Targets for latency, or for the first token and each further one of token streams."""
    objective: Objective = Objective.BALANCED
    """What is chosen among the settings that meet the SLO. Balanced: the lowest mean latency that keeps the device's
    utilization at or below the target, and beyond it the least device time; Efficiency: the least device time, at low
    load too; Latency: the lowest p99."""
    target_utilization_percent: Annotated[int, Meta(ge=1, le=100)] = TARGET_UTILIZATION
    """Share of time, in percent, for which the device may be busy before Balanced gives latency for device time."""
    device_share_percent: Annotated[int, Meta(ge=1, le=100)] = 100
    """Share of the device, in percent, that is there for the models behind this sidecar, where others use it too: they
    are taken to keep it busy for the rest of the time. Models behind the same sidecar are counted by it."""
    models: tuple[Model, ...] = ()
    """Settings of single models."""
    bounds: Bounds = field(default_factory=Bounds)
    """Range of parameters that the tuner may choose from."""
    baseline: Parameters = field(default_factory=Parameters)
    """Parameters that the tuner starts with."""
    tuning: Tuning = field(default_factory=Tuning)
    """Whether and how fast the tuner changes parameters."""
    pass_through: PassThrough = field(default_factory=PassThrough)
    """Whether requests pass straight through at low traffic."""
    admission: Admission = field(default_factory=Admission)
    """Which requests are refused."""
    generation: Generation = field(default_factory=Generation)
    """Bounds of the gate for token streams."""
    batch_across: Annotated[tuple[HeaderName, ...], Meta(max_length=32)] = ()
    """Request headers, in lower case, in which the requests of a batch may differ, e.g. `authorization`: to the model
    all callers are equal. The batch is sent with the values of its first request."""
    verification: Verification = field(default_factory=Verification)
    """Whether the batch axis is checked before requests are merged."""
    idempotent: bool = True
    """Whether a request may be sent to the model more than once. False: when a batch fails all of its requests share
    the error, and no copies are sent to check the batch axis, so only models with `axis: First` are merged."""
    fallback: Fallback = field(default_factory=Fallback)
    """What an operator does when metrics fail; a sidecar by itself does not read it."""

    def start(self, model: Model | None = None) -> Parameters:
        """Return what a model starts with: the baseline inside its limits, or pass-through if that is the only mode."""
        limits, passes = self.limits(model), self.pass_through.mode is PassThroughMode.ALWAYS
        most = limits.max_in_flight
        return limits.clamp(replace(self.baseline, max_in_flight=most, pass_through=True) if passes else self.baseline)

    def limits(self, model: Model | None = None) -> Limits:
        """Bounds with defaults: 1-64 rows, a wait of at most half the SLO, 1-32 batches in flight.

        A model's own bounds replace the policy's field by field; its ``max_batch`` and ``axis: None`` cap the batch.
        """
        layers = [self.bounds] if model is None or model.bounds is None else [model.bounds, self.bounds]

        def first(name: str, end: str, default: float) -> Any:  # noqa: ANN401 - int or Duration, as the range holds
            values = (getattr(getattr(bounds, name), end) for bounds in layers)
            return next((value for value in values if value is not None), default)

        min_batch = first("max_batch", "min", 1)
        max_batch = first("max_batch", "max", max(64, min_batch))
        if model is not None and model.max_batch is not None:
            max_batch = min(max_batch, model.max_batch)
        if model is not None and model.axis is Axis.NONE:
            max_batch = 1
        min_wait = float(first("max_wait", "min", 0.0))
        # A quarter of the SLO would still miss the mid-load saving; all of it leaves no time to serve.
        max_wait = float(first("max_wait", "max", max(whole_microseconds(self.slo.due / 2), min_wait)))
        min_in_flight = first("max_in_flight", "min", 1)
        return Limits(
            min_batch=min(min_batch, max_batch),
            max_batch=max_batch,
            min_wait=min_wait,
            max_wait=max_wait,
            min_in_flight=min_in_flight,
            max_in_flight=first("max_in_flight", "max", max(32, min_in_flight)),
        )

    def validate(self) -> Self:
        """Check what types can't say, and return the policy; raises ``PolicyError`` that names the field."""
        slo = self.slo
        if slo.latency == Latency() or (slo.latency is None and slo.ttft is None and slo.tpot is None):
            raise PolicyError(
                "slo.latency",
                "name at least one of p50, p90, p95, p99, p999, e.g. p99: 50ms; for token streams ttft and tpot",
            )
        validate_targets(slo.ttft, slo.tpot, slo.classes, self.generation)
        percentiles = self.slo.percentiles
        for (low, first), (high, second) in pairwise(percentiles):
            if first > second:
                one, other = PERCENTILES[low], PERCENTILES[high]
                raise PolicyError(
                    "slo.latency",
                    f"{one} ({Duration(first)}) is longer than {other} ({Duration(second)}): lower it or raise {other}",
                )
        quantile, shortest = percentiles[0]
        if shortest <= 0:
            raise PolicyError(f"slo.latency.{PERCENTILES[quantile]}", "must be longer than 0s")
        self._validate_bounds("bounds", self.bounds)
        limits = self.limits()
        for name, value, low, high in (
            ("maxBatch", self.baseline.max_batch, limits.min_batch, limits.max_batch),
            ("maxWait", self.baseline.max_wait, Duration(limits.min_wait), Duration(limits.max_wait)),
            ("maxInFlight", self.baseline.max_in_flight, limits.min_in_flight, limits.max_in_flight),
        ):
            # Nobody wrote the default down: it moves to the nearest value allowed.
            if self.baseline != Parameters() and not low <= value <= high:
                raise PolicyError(f"baseline.{name}", f"{value} lies outside its bounds {low} to {high}: change one")
        seen: set[str] = set()
        for index, model in enumerate(self.models):
            if model.name in seen:
                raise PolicyError(f"models[{index}].name", f"{model.name!r} is named twice")
            seen.add(model.name)
            if model.bounds is not None:
                self._validate_bounds(f"models[{index}].bounds", model.bounds, self.bounds)
        if self.admission.seconds(1.0) <= 0:
            raise PolicyError("admission.timeout", "must be longer than 0s")
        for index, name in enumerate(self.batch_across):
            if name in NEVER_ACROSS:
                raise PolicyError(f"batchAcross[{index}]", f"{name} says how a body is to be read: it can't differ")
        return self

    def _validate_bounds(self, path: str, bounds: Bounds, outer: Bounds | None = None) -> None:
        """Check bounds by themselves, and with what they leave to ``outer``."""
        outer = outer or Bounds()
        for name, bound, rest in (
            ("maxBatch", bounds.max_batch, outer.max_batch),
            ("maxWait", bounds.max_wait, outer.max_wait),
            ("maxInFlight", bounds.max_in_flight, outer.max_in_flight),
        ):
            low = rest.min if bound.min is None else bound.min
            high = rest.max if bound.max is None else bound.max
            if low is not None and high is not None and low > high:
                raise PolicyError(f"{path}.{name}", f"min {low} exceeds max {high}: lower it or raise max")
        for end, wait in (("min", bounds.max_wait.min), ("max", bounds.max_wait.max)):
            if wait is not None and wait >= self.slo.due:
                raise PolicyError(
                    f"{path}.maxWait.{end}",
                    f"{wait} is not below the SLO of {format_seconds(self.slo.due)}: lower it or drop it",
                )
