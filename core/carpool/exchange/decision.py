"""The tuner's input and output: an observation, and a decision with its forecast."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from carpool.batching.counters import ModelStats
from carpool.batching.requests import Estimate
from carpool.policy.parameters import Parameters


class Reason(StrEnum):
    """Why parameters change or stay."""

    CONVERGED = "Converged"
    SAVES_DEVICE_TIME = "SavesDeviceTime"
    RESTORES_SLO = "RestoresSLO"
    MORE_GOODPUT = "MoreGoodput"
    MORE_MARGIN = "MoreMargin"
    EXPLORES = "Explores"
    PASSES_THROUGH = "PassesThrough"
    LOWERS_LATENCY = "LowersLatency"
    LOWERS_UTILIZATION = "LowersUtilization"
    MISSES_CONFIRMED = "MissesConfirmed"
    NOTHING_BATCHABLE = "NothingBatchable"
    FORECAST_OFF = "ForecastOff"
    # Guards: why nothing is decided.
    HELD = "Held"
    RECOMMEND_ONLY = "RecommendOnly"
    NO_TRAFFIC = "NoTraffic"
    METRICS_STALE = "MetricsStale"
    HOST_STALLED = "HostStalled"
    TOO_FEW_SAMPLES = "TooFewSamples"
    WITHIN_STABILIZATION_WINDOW = "WithinStabilizationWindow"
    WOULD_FLIP = "WouldFlip"


class State(StrEnum):
    """What the tuner is doing, whatever the last decision was."""

    LEARNING = "Learning"
    """Too little is known for a decision."""
    PASS_THROUGH = "PassThrough"  # noqa: S105 - no password
    """Requests are sent one by one."""
    STEADY = "Steady"
    """Requests are batched; no better setting is known."""
    EXPLORING = "Exploring"
    """A setting is in force in order to measure it."""
    SHEDDING = "Shedding"
    """Requests that would be late are refused, until a backlog is over."""
    OVERLOADED = "Overloaded"
    """No setting meets the SLO at this load: requests that would be late are refused."""
    ROLLED_BACK = "RolledBack"
    """A setting was undone because more requests were late than forecast; forecasts now use a shorter target."""
    HELD = "Held"
    """The policy forbids changes."""


STALLED_SHARE = 0.25
"""Share of an interval that the counting host may pause before the whole interval is void."""


class Observation(Struct, frozen=True):
    """The counts since the last observation."""

    now: float
    """Seconds, monotonic, of the clock that counted."""
    seconds: float
    """Length of the interval; with several replicas, the sum of their intervals."""
    stats: ModelStats
    """Differences of the model's counters over the interval."""
    growing: bool = False
    """Whether the next answers show what larger batches take, and requests wait for that: nothing is decided before."""
    stalled: bool = False
    """Whether the counting host paused in it, so that its latencies are not the model's."""
    paused: float = 0.0
    """Seconds of it that the counting host paused; with several replicas, the sum."""
    queued_rows: int = 0
    """Rows that wait at its end; with several replicas, the mean."""
    others: tuple[float, float] = (0.0, 0.0)
    """What other models behind the same sidecars used (``Stats.others``); with several replicas, the sums."""
    replicas: int = 1
    """Replicas whose counters are summed up in ``stats``. All rates are per replica."""
    explorers: int = 1
    """How many of them run the explored setting."""


class Forecasted(Struct, frozen=True, rename="camel"):
    """The forecast of a decision. Seconds and requests per second."""

    p50: float
    p99: float
    p99_ahead: float
    miss_fraction: float
    goodput: float
    device_time: float
    mean_batch: float
    mean: float = 0.0
    """Latency."""
    utilization: float = 0.0
    """Share of time, 0 to 1, for which the device is busy, all its users included."""
    lowest_utilization: float = 0.0
    """What it could be within the SLO: with the least device time."""


class Decision(Struct, frozen=True, rename="camel"):
    """What to change and why.

    Apply ``parameters`` if ``change``; ``waiting`` are next, but wait. ``uncapped``: without the limits on a step,
    ``capped_by`` is the limit that applies (``""``: none). ``estimate`` and ``shed_slo`` go to the Batcher in any case.
    """

    parameters: Parameters
    change: bool
    reason: Reason
    message: str
    uncapped: Parameters | None = None
    waiting: Parameters | None = None
    capped_by: str = ""
    decided: bool = False
    """Whether ``parameters`` were chosen, even if they are the same as before: first calls end with that."""
    predicted: Forecasted | None = None
    recommended: Forecasted | None = None
    """Of ``parameters`` that are only recommended: then ``predicted`` is of those in force."""
    shed_slo: bool = False
    estimate: Estimate | None = None
    at: float = 0.0
    rate: float = 0.0
    tentative: bool = False
    """Of a change: whether one replica should have it first. The present parameters are forecast to meet the SLO; the
    new ones miss more at the upper confidence of the batch latency, or go beyond what was measured."""
    share: float = 1.0
    """Batchable share: share of the arrivals that can share a batch with another one."""
    target_utilization: float = 0.0
    """Utilization up to which latency comes first, 0 to 1; 0: the objective has none."""
    alternative: str = ""
    """What another objective would do; ``""``: nothing worth mentioning."""
    state: State = State.LEARNING
    alarm: str = ""
    """What was observed, while answers take 20 % longer than forecast; ``""``: they don't."""
