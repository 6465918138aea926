"""Token streams in a sidecar's report: counters by model, and the gate's state."""

from __future__ import annotations

from msgspec import Struct, field

BOUNDS = tuple(0.001 * 2 ** (step / 2) for step in range(41))
"""Upper bounds (seconds) of the histograms: 1 ms to 17 minutes, a factor of 1.41 apart."""


class ModelStreams(Struct, frozen=True, rename="camel", kw_only=True):
    """One model's counters since the process began; durations by ``BOUNDS``, the last beyond them all."""

    model: str
    ends: dict[str, int]
    """Requests by how they ended: stop, length, other; cancelled, failed, deadline; ttft, queue-full (refused); or the
    status of an error."""
    prompt_tokens: int
    output_tokens: int
    hits: int
    """Answers that met both targets."""
    ttft: list[int]
    tpot: list[int]
    gaps: list[int]
    """Between pieces with tokens, of all streams."""
    durations: list[int]


class GateState(Struct, frozen=True, rename="camel", kw_only=True):
    """The gate's present state."""

    ttft: float
    """Target, seconds."""
    tpot: float | None
    """Target, seconds."""
    forecast_tpot: float
    """Of what is with the engine now, seconds."""
    margin: float
    """The target for TPOT divided by the TPOT that is planned with."""
    step_seconds: float
    """A step with one sequence and an empty cache."""
    sequence_seconds: float
    """What each further sequence adds to it, at the present number."""
    kv_token_seconds: float
    prompt_token_seconds: float
    kv_size: float | None
    """Tokens that the KV cache holds, as far as it is known."""
    limit: float | None = None
    """Sequences in the engine at which TPOT reaches what is planned with, for requests like the last ones; ``None``
    while unknown."""
    capacity: float | None = None
    """Requests per second that the engine carries within the targets; ``None`` while unknown."""
    capacity_tokens: float | None = None
    """The same in output tokens per second."""


class EngineSays(Struct, frozen=True, rename="camel", kw_only=True):
    """The engine's own metrics; ``None`` for those that it does not have."""

    kv_share: float | None = None
    """Share of its KV cache in use, 0 to 1."""
    kv_tokens: float | None = None
    """Tokens that its KV cache holds."""
    preemptions: float | None = None
    """Sequences that it preempted and computed again, since it began."""
    running: float | None = None
    waiting: float | None = None
    busy_slots: float | None = None
    """llama.cpp: sequences per decode step, on average."""


class TokenStreams(Struct, frozen=True, rename="camel", kw_only=True):
    """The report's part about token streams."""

    arrivals: int = 0
    """Requests since the process began, refused ones included."""
    running: int = 0
    """Requests that the engine has."""
    queued: int = 0
    kv_tokens: int = 0
    """Tokens of those with the engine, estimated."""
    gate: GateState | None = None
    """``None``: the policy has no targets for token streams, or the gate has failed."""
    engine: EngineSays | None = None
    """``None``: it has no known metrics, or was not asked yet."""
    gate_faults: int = 0
    stream_faults: int = 0
    """Streams that are only forwarded, since they could not be read."""
    models: list[ModelStreams] = field(default_factory=list)


def quantile(counts: list[int], q: float) -> float | None:
    """Return the ``q``-quantile of durations counted by ``BOUNDS``, seconds; None without any."""
    rank, seen = q * sum(counts), 0
    for bound, count in zip(BOUNDS, counts, strict=False):
        if count and seen + count >= rank:
            return bound * 2 ** (-0.5 * (1 - (rank - seen) / count))
        seen += count
    return BOUNDS[-1] if sum(counts) else None
