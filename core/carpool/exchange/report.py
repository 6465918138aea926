"""A sidecar's report (``GET /v1/stats``), which the operator and the command line read."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from carpool.batching.counters import Stats
from carpool.exchange.token_streams import TokenStreams
from carpool.policy.parameters import Parameters
from carpool.policy.plain import PolicyError, from_plain


class Queue(Struct, frozen=True, rename="camel", kw_only=True):
    """Requests that wait, and those with the upstream."""

    rows: int
    bytes: int = 0
    in_flight: int
    slots: int


class Jobs(Struct, frozen=True, rename="camel", kw_only=True):
    """Stored jobs, waiting and done."""

    states: dict[str, int]
    """Jobs by state."""
    lines: int
    """Lines of batches that have no result yet."""
    bytes: int
    max_bytes: int
    in_flight: int
    limit: int
    """Jobs and lines that may be with the model now."""


class Lane(Struct, frozen=True, rename="camel", kw_only=True):
    """One model's present state."""

    parameters: Parameters
    """The parameters in force."""
    pass_through: bool
    """Whether requests are now sent one by one; a backlog can end that before the parameters change."""
    queued_requests: int
    cap: int
    """Rows that a batch may have now."""
    ceiling: int | None = None
    """Rows from which the upstream was seen to fail for size."""
    quarantined: bool
    """Whether its answers had the wrong number of rows, so that nothing is merged."""
    service_seconds: tuple[float, ...] | None = None
    """Batch latency by rows, seconds, and the coefficient of variation of single batches; ``None`` while unknown."""
    service_noise: float | None = None
    executors: int | None = None
    forecast_alarm: str = ""
    """What was observed, while answers take 20 % longer than forecast; ``""``: they don't."""
    capacity: float | None = None
    """Requests per second that this replica can serve of it within the SLO; ``None`` while unknown."""
    capacity_lower: float | None = None
    """The same at the upper confidence of batch latency."""
    capacity_zero_wait: float | None = None
    """The same if no request waited for others; next: without batching, and with the policy's baseline."""
    capacity_alone: float | None = None
    capacity_by_hand: float | None = None
    replaced: int = 0
    """How often the model was replaced or its server restarted; earlier measurements are void each time."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """The last arrivals, if asked for: seconds of the sidecar's clock, and rows."""


class ModelEntry(Struct, frozen=True, rename="camel", kw_only=True):
    """How a model's requests may be merged, and why."""

    name: str
    version: str
    lane: str
    merges: bool
    max_batch: int | None
    axis: str
    verified: str = ""
    """Whether batches gave the same answers: unverified, verified, refuted, asserted (by the policy), contradicted
    (asserted, and seen not to), off; "" from an older sidecar."""
    evidence: str = ""
    """A sentence about it: what was compared, or what differed."""
    padding: str = ""
    """Whether requests of different lengths share batches, why not, and how much is padding; "": no sequence axis."""
    trouble: str = ""
    """What has to be solved before batching can help: no request succeeds, or each has its own header; "": nothing."""


class Alone(Struct, frozen=True, omit_defaults=True):
    """Requests that may not be merged."""

    model: str
    reason: str
    requests: int
    detail: str = ""
    """Details on the last of them, if the reason leaves something open."""


NOT_FOUND, OTHER = "<not found>", "<other>"
"""Stand for all paths that the upstream only answers with 404 or 405, as callers can invent them; and for paths beyond
the limit."""


class Forwarded(Struct, frozen=True, kw_only=True):
    """Requests that were forwarded and not batched, of one path, of ``NOT_FOUND`` or of ``OTHER``."""

    method: str
    path: str
    requests: int
    """Answered, whatever the status."""
    hits: int
    """Successful, within the SLO."""
    durations: list[int]
    """Counts by duration, as in the models' counters."""


class Stalls(Struct, frozen=True):
    """Pauses of the sidecar's host."""

    count: int
    seconds: float


class RolledBack(Struct, frozen=True, rename="camel", kw_only=True):
    """Parameters that missed the SLO where the previous ones had met it, so that the sidecar rolled back."""

    model: str
    generation: int
    """The change that brought the rejected parameters."""
    rejected: Parameters
    back_to: Parameters
    back_to_generation: int
    reason: str
    """What was counted, for display."""
    at: float
    """Seconds since the epoch."""


class Report(Struct, frozen=True, rename="camel", kw_only=True):
    """The whole report. Unknown fields are a newer sidecar's and are ignored."""

    stats: Stats
    """All counts since the process began; ``at`` is a time of its monotonic clock."""
    uptime_seconds: float
    ready: bool
    readiness: str
    """Why it is not ready, in words."""
    target: str = ""
    """The target whose changes it accepts; "" for none."""
    generation: int
    """The newest configuration that was accepted."""
    running: int = 0
    """The oldest configuration still partly in force: less than ``generation`` after a roll-back."""
    rolled_back: list[RolledBack] = field(default_factory=list)
    """Roll-backs of the newest generation, at most one per model."""
    change_error: str | None = None
    """What is wrong with the change in the watched directory."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Number of changes refused since the process began, by reason."""
    slo_seconds: float
    queue: Queue
    lanes: dict[str, Lane]
    """By model; ``""`` for requests without a model."""
    models: list[ModelEntry] = field(default_factory=list)
    alone: list[Alone] = field(default_factory=list)
    forwarded: list[Forwarded] = field(default_factory=list)
    token_streams: TokenStreams = TokenStreams()
    stalls: Stalls = Stalls(0, 0.0)
    jobs: Jobs | None = None
    """None: they are off."""


def encode(report: Report) -> bytes:
    """Write a report as JSON."""
    return msgspec.json.encode(report, enc_hook=str)


def decode(body: bytes) -> Report:
    """Read a report, newer ones too; raises ``PolicyError`` naming the field, or saying that it is no JSON."""
    try:
        plain = msgspec.json.decode(body)
        _drop_unknown(plain)
        msgspec.msgpack.encode(plain)  # its readers keep counts like this: none beyond 64 bits
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise PolicyError("report", f"it is not JSON as a sidecar writes it: {error}") from None
    return from_plain(plain, Report, what="report")


_PARAMETERS = frozenset(Parameters.__struct_encode_fields__)


def _drop_unknown(plain: Any) -> None:  # noqa: ANN401 - parsed JSON, whatever it holds
    """Remove from all parameters the fields of a newer sidecar: their type is also a file's, which refuses them."""
    if isinstance(plain, list):
        values = plain
    elif isinstance(plain, dict):
        if plain.keys() >= _PARAMETERS:
            for name in plain.keys() - _PARAMETERS:
                del plain[name]
        values = [value for name, value in plain.items() if name != "stats"]
    else:
        return
    for value in values:
        _drop_unknown(value)
