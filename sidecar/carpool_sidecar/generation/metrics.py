"""The metrics of token streams."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from carpool.exchange.token_streams import BOUNDS
from carpool_sidecar.metric import Metric

if TYPE_CHECKING:
    from carpool_sidecar.generation.engine_streams import Streams
    from carpool_sidecar.metric import Families

_HISTOGRAMS = {
    "time_to_first_token_seconds": "ttft",
    "time_per_output_token_seconds": "tpot",
    "inter_token_seconds": "gaps",
    "generation_duration_seconds": "durations",
}

_ENGINE = {
    "engine_kv_usage_ratio": "kv_share",
    "engine_kv_tokens": "kv_tokens",
    "engine_preemptions": "preemptions",
    "engine_running": "running",
    "engine_waiting": "waiting",
    "engine_busy_slots": "busy_slots",
}

METRICS = (
    Metric(
        "generation_requests",
        "counter",
        ("model", "end"),
        "Requests to language models by how they ended: stop, length, other (as the engine says); cancelled, failed, "
        "deadline; ttft, queue-full (refused by the gate); or the status of an error",
    ),
    Metric("time_to_first_token_seconds", "histogram", ("model",), "From a request's last byte in to its first token"),
    Metric(
        "time_per_output_token_seconds", "histogram", ("model",), "Mean per token after the first, by complete stream"
    ),
    Metric("inter_token_seconds", "histogram", ("model",), "Between two pieces of a stream that carry tokens"),
    Metric(
        "generation_duration_seconds", "histogram", ("model",), "Of complete answers, from a request's last byte in"
    ),
    Metric("prompt_tokens", "counter", ("model",), "Of complete answers; estimated where the engine does not say"),
    Metric("output_tokens", "counter", ("model",), "Of all answers; estimated where the engine does not say"),
    Metric("generation_slo_hits", "counter", ("model",), "Answers that met the targets for ttft and tpot"),
    Metric("generation_running", "gauge", (), "Requests with the engine"),
    Metric("generation_queued", "gauge", (), "Requests that wait at the gate"),
    Metric("kv_tokens", "gauge", (), "Tokens of the requests with the engine, prompts and answers so far; estimated"),
    Metric("generation_target_seconds", "gauge", ("target",), "Targets in force: ttft, tpot"),
    Metric("generation_gated", "gauge", (), "1 while the gate admits requests"),
    Metric("forecast_tpot_seconds", "gauge", (), "Forecast time per output token of what is with the engine"),
    Metric("generation_arrivals", "counter", (), "Requests to language models, refused ones included"),
    Metric(
        "generation_limit",
        "gauge",
        (),
        "Sequences in the engine at which the time per output token reaches what the gate plans with",
    ),
    Metric(
        "generation_capacity_requests_per_second",
        "gauge",
        (),
        "Requests per second that the engine carries within the targets, as the gate has learned",
    ),
    Metric("generation_capacity_tokens_per_second", "gauge", (), "The same in output tokens per second"),
    Metric("engine_kv_usage_ratio", "gauge", (), "Share of its KV cache in use, as the engine says"),
    Metric("engine_kv_tokens", "gauge", (), "Tokens that its KV cache holds, likewise"),
    Metric("engine_preemptions", "counter", (), "Sequences that were computed again for want of KV cache, likewise"),
    Metric("engine_running", "gauge", (), "Requests that it computes, likewise"),
    Metric("engine_waiting", "gauge", (), "Requests that wait inside it, likewise"),
    Metric("engine_busy_slots", "gauge", (), "Sequences per decode step, as llama.cpp says"),
    Metric("gate_faults", "counter", (), "Faults of the gate; each opens it for a minute"),
    Metric("stream_faults", "counter", (), "Streams that were forwarded and no longer looked at, for an error"),
)


def fill(families: Families, streams: Streams) -> None:
    """Add the samples."""
    put = families.put
    for model, counts in streams.models:
        for end, number in counts.ends.items():
            put("generation_requests", number, model, end)
        for name, attribute in _HISTOGRAMS.items():
            histogram = getattr(counts, attribute)
            families.histogram(name, BOUNDS, histogram.counts, histogram.seconds, model)
        put("prompt_tokens", counts.prompt_tokens, model)
        put("output_tokens", counts.output_tokens, model)
        put("generation_slo_hits", counts.hits, model)
    keeper = streams.gatekeeper
    put("generation_running", streams.running)
    put("generation_queued", keeper.queued)
    put("kv_tokens", streams.kv_tokens)
    if streams.terms.slo is not None:
        for target, seconds in streams.terms.slo._asdict().items():
            if seconds < inf:
                put("generation_target_seconds", seconds, target)
    put("generation_gated", keeper.gate is not None)
    if keeper.gate is not None:
        put("forecast_tpot_seconds", keeper.gate.meter.forecast())
        if (carries := keeper.gate.carries()) is not None:
            put("generation_limit", carries.sequences)
            put("generation_capacity_requests_per_second", carries.rate)
            put("generation_capacity_tokens_per_second", carries.tokens)
    put("generation_arrivals", streams.rate.total)
    for name, attribute in _ENGINE.items():
        if (value := getattr(streams.engine, attribute, None)) is not None:
            put(name, value)
    put("gate_faults", keeper.faults)
    put("stream_faults", streams.faults)
