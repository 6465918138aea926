"""The part about token streams in the sidecar's report."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from carpool.exchange.token_streams import GateState, ModelStreams, TokenStreams

if TYPE_CHECKING:
    from carpool.generation.gate import Gate
    from carpool_sidecar.generation.engine_streams import Streams


def report_of(streams: Streams) -> TokenStreams:
    """Return the report's part."""
    keeper = streams.gatekeeper
    return TokenStreams(
        arrivals=streams.rate.total,
        running=streams.running,
        queued=keeper.queued,
        kv_tokens=streams.kv_tokens,
        gate=None if keeper.gate is None else _gate(keeper.gate),
        engine=streams.engine,
        gate_faults=keeper.faults,
        stream_faults=streams.faults,
        models=[
            ModelStreams(
                model=model,
                ends=dict(counts.ends),
                prompt_tokens=counts.prompt_tokens,
                output_tokens=counts.output_tokens,
                hits=counts.hits,
                ttft=list(counts.ttft.counts),
                tpot=list(counts.tpot.counts),
                gaps=list(counts.gaps.counts),
                durations=list(counts.durations.counts),
            )
            for model, counts in streams.models
        ],
    )


def _gate(gate: Gate) -> GateState:
    model, running, carries = gate.meter.model, gate.meter.sequences, gate.carries()
    return GateState(
        ttft=gate.slo.ttft,
        tpot=None if gate.slo.tpot == inf else gate.slo.tpot,
        forecast_tpot=gate.meter.forecast(),
        margin=gate.calibration.tpot,
        step_seconds=model.decode_seconds(1, 0),
        sequence_seconds=model.decode_seconds(running + 1, 0) - model.decode_seconds(running, 0),
        kv_token_seconds=(model.decode_seconds(1, 1e6) - model.decode_seconds(1, 0)) / 1e6,
        prompt_token_seconds=model.prompt_token,
        kv_size=gate.kv.tokens,
        limit=None if carries is None else carries.sequences,
        capacity=None if carries is None else carries.rate,
        capacity_tokens=None if carries is None else carries.tokens,
    )
