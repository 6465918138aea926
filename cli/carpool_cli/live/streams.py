"""Token streams in the live view and in ``explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from carpool.exchange.token_streams import ModelStreams, TokenStreams, quantile
from carpool.policy.durations import format_seconds
from carpool_cli.live.figures import duration, number

if TYPE_CHECKING:
    from carpool.exchange.report import Report

REFUSED = ("ttft", "queue-full", "deadline")
"""Outcomes of requests that the gate rejected, or that a deadline ended."""


class Streamed(Struct, frozen=True, kw_only=True, rename="camel"):
    """One model's answers between two polls; seconds, requests and tokens per second."""

    model: str
    seconds: float
    requests: int
    refused: int
    cancelled: int
    failed: int
    good_share: float | None
    """Share that met both targets, without cancelled ones; None: there are none."""
    output_tokens_rate: float
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None

    def __str__(self) -> str:
        rate = self.requests / self.seconds if self.seconds else 0.0
        parts = [f"{number(rate)}/s, {number(self.output_tokens_rate)} tokens/s"]
        if self.ttft_p99 is not None:
            parts.append(f"TTFT p50 {duration(self.ttft_p50)}, p99 {duration(self.ttft_p99)}")
        if self.tpot_p99 is not None:
            parts.append(f"TPOT p50 {duration(self.tpot_p50)}, p99 {duration(self.tpot_p99)}")
        if self.good_share is not None:
            parts.append(f"{self.good_share:.1%} within both targets")
        counts = {"refused": self.refused, "cancelled": self.cancelled, "failed": self.failed}
        parts += [f"{count} {name}" for name, count in counts.items() if count]
        return f"{self.model or 'model'}: {'; '.join(parts)}"


def streamed(before: Report | None, after: Report, seconds: float) -> list[Streamed]:
    """Return each model's answers between two polls; without the first, since the start."""
    earlier = {} if before is None else {each.model: each for each in before.token_streams.models}
    gated = after.token_streams.gate is not None
    found = [_streamed(earlier.get(each.model), each, seconds, gated=gated) for each in after.token_streams.models]
    return [each for each in found if each.requests]


def _streamed(before: ModelStreams | None, after: ModelStreams, seconds: float, *, gated: bool) -> Streamed:
    if before is None:
        nothing = [0] * len(after.ttft)
        before = ModelStreams(
            model=after.model, ends={}, prompt_tokens=0, output_tokens=0, hits=0,
            ttft=nothing, tpot=nothing, gaps=nothing, durations=nothing,
        )  # fmt: skip
    ends = {how: count - before.ends.get(how, 0) for how, count in after.ends.items()}
    requests, cancelled = sum(ends.values()), ends.get("cancelled", 0)
    ttft = [new - old for new, old in zip(after.ttft, before.ttft, strict=True)]
    tpot = [new - old for new, old in zip(after.tpot, before.tpot, strict=True)]
    judged = requests - cancelled
    return Streamed(
        model=after.model,
        seconds=seconds,
        requests=requests,
        refused=sum(ends.get(how, 0) for how in REFUSED),
        cancelled=cancelled,
        failed=ends.get("failed", 0) + sum(count for how, count in ends.items() if how.isdigit()),
        good_share=(after.hits - before.hits) / judged if gated and judged else None,
        output_tokens_rate=(after.output_tokens - before.output_tokens) / seconds if seconds else 0.0,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p99=quantile(ttft, 0.99),
        tpot_p50=quantile(tpot, 0.5),
        tpot_p99=quantile(tpot, 0.99),
    )


def only_streams(report: Report) -> bool:
    """Return whether a sidecar has served only token streams so far: then nothing is batched here."""
    streams = report.token_streams
    asked = any(model.arrivals for model in report.stats.models.values())
    return not asked and (streams.gate is not None or bool(streams.models))


def engine_line(streams: TokenStreams) -> str:
    """Return the requests at the engine, and the gate's view of it; "" without a gate before the first stream."""
    if streams.gate is None and not streams.models and not streams.running and not streams.queued:
        return ""
    line = f"{streams.running} running, {streams.queued} waiting, {number(streams.kv_tokens)} KV tokens"
    gate, engine = streams.gate, streams.engine
    if engine is not None and engine.kv_share is not None:
        line += f" (the engine: {engine.kv_share:.0%} of its cache"
        line += f", {number(engine.preemptions)} preempted)" if engine.preemptions else ")"
    if gate is None:
        why = "it failed; see the log" if streams.gate_faults else "the policy has no slo.ttft"
        return f"{line}; not gated: {why}"
    size = "" if gate.kv_size is None else f" of {number(round(gate.kv_size))}"
    target = "" if gate.tpot is None else f" of {format_seconds(gate.tpot)}"
    return (
        f"{line}{size}; forecast TPOT {duration(gate.forecast_tpot)}{target}, TTFT within {format_seconds(gate.ttft)}"
    )


def learned_line(streams: TokenStreams) -> str:
    """Return the step model, in words; "" without a gate, or before the first stream."""
    gate = streams.gate
    if gate is None or not streams.models:
        return ""
    parts = (
        f"{duration(gate.step_seconds)} per step",
        f"{duration(gate.sequence_seconds)} per further sequence",
        f"{duration(1000 * gate.kv_token_seconds)} per 1,000 KV tokens",
        f"{duration(1000 * gate.prompt_token_seconds)} per 1,000 prompt tokens",
    )
    return f"learned: {', '.join(parts)}; TPOT is planned with the target over {gate.margin:.2f}"
