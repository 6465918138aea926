"""The token streams of one scrape of a sidecar, in the format of its own report.

A scrape lacks what the gate has learned of steps, and the engine's own metrics. No decision uses these.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from carpool.exchange.token_streams import BOUNDS, GateState, ModelStreams, TokenStreams
from carpool_operator.tuning.sources.samples import UnusableError, count, edge, edges, histogram

if TYPE_CHECKING:
    from carpool_operator.tuning.sources.samples import Scrape

ARRIVALS = "carpool_generation_arrivals_total"
"""Older sidecars have none of these metrics; their streams are unknown."""
STREAMING, QUEUED = "carpool_generation_running", "carpool_generation_queued"
GATED = "carpool_generation_gated"
TARGET = "carpool_generation_target_seconds"
LIMIT = "carpool_generation_limit"
RATE, TOKENS = "carpool_generation_capacity_requests_per_second", "carpool_generation_capacity_tokens_per_second"
ENDS = "carpool_generation_requests_total"
TTFT, TPOT = "carpool_time_to_first_token_seconds_bucket", "carpool_time_per_output_token_seconds_bucket"
OF_A_MODEL = {
    "prompt_tokens": "carpool_prompt_tokens_total",
    "output_tokens": "carpool_output_tokens_total",
    "hits": "carpool_generation_slo_hits_total",
}
"""A model's whole numbers, by their field of ``ModelStreams``."""

OWN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((ARRIVALS, STREAMING, QUEUED, GATED, LIMIT, RATE, TOKENS), ()),
    TARGET: ("target",),
    ENDS: ("model", "end"),
    **dict.fromkeys((TTFT, TPOT), ("model", "le")),
    **dict.fromkeys(OF_A_MODEL.values(), ("model",)),
}
"""All metrics that are read, each with its labels."""

PASSING = frozenset({TARGET, LIMIT, RATE, TOKENS})
"""Gauges that exist only while they have a value, which may be infinite."""

_EDGES = edges(BOUNDS)


def read(scrape: Scrape) -> TokenStreams:
    """Read a scrape; raises ``UnusableError`` where it is incomplete."""
    if (ARRIVALS, ()) not in scrape:
        return TokenStreams()
    missing = [name for name in (STREAMING, QUEUED, GATED) if (name, ()) not in scrape]
    if missing:
        raise UnusableError(f"there is no {missing[0]}: metric relabeling drops it, or samples arrive in part")
    return TokenStreams(
        arrivals=count(scrape, ARRIVALS, ()),
        running=count(scrape, STREAMING, ()),
        queued=count(scrape, QUEUED, ()),
        gate=_gate(scrape) if scrape[GATED, ()] else None,
        models=_models(scrape),
    )


def _gate(scrape: Scrape) -> GateState:
    def known(name: str, *own: str) -> float | None:
        value = scrape.get((name, own))
        return value if value is not None and isfinite(value) else None

    return GateState(
        ttft=known(TARGET, "ttft") or 0.0,
        tpot=known(TARGET, "tpot"),
        forecast_tpot=0.0,
        margin=1.0,
        step_seconds=0.0,
        sequence_seconds=0.0,
        kv_token_seconds=0.0,
        prompt_token_seconds=0.0,
        kv_size=None,
        limit=known(LIMIT),
        capacity=known(RATE),
        capacity_tokens=known(TOKENS),
    )


def _models(scrape: Scrape) -> list[ModelStreams]:
    ends: dict[str, dict[str, int]] = {}
    buckets: dict[tuple[str, str], dict[str, int]] = {}
    models = {own[0] for name, own in scrape if name == OF_A_MODEL["hits"]}
    for name, own in scrape:
        if name == ENDS:
            ends.setdefault(own[0], {})[own[1]] = count(scrape, name, own)
        elif name in {TTFT, TPOT}:
            buckets.setdefault((name, own[0]), {})[edge(own[1])] = count(scrape, name, own)
    lacking = [f"{name}{{model={model!r}}}" for model in sorted(models | ends.keys()) for name in OF_A_MODEL.values()
               if (name, (model,)) not in scrape]  # fmt: skip
    if lacking:
        raise UnusableError(f"there is no {lacking[0]}: metric relabeling drops it, or samples arrive in part")
    nothing = [0] * (len(BOUNDS) + 1)
    return [
        ModelStreams(
            model=model,
            ends=ends.get(model, {}),
            **{field: count(scrape, name, (model,)) for field, name in OF_A_MODEL.items()},
            ttft=histogram(TTFT, _EDGES, buckets.get((TTFT, model), {})),
            tpot=histogram(TPOT, _EDGES, buckets.get((TPOT, model), {})),
            gaps=nothing,
            durations=nothing,
        )
        for model in sorted(models)
    ]
