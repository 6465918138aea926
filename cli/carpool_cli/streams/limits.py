"""The limits of an engine that meet an SLO for token streams, by search in the engine's twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from carpool_cli.live.figures import number
from carpool_cli.streams import loads
from carpool_cli.streams.twin import Figures, StreamTwin

if TYPE_CHECKING:
    from carpool_cli.streams.loads import Capacity
    from carpool_cli.streams.options import Asked

OVERLOAD = 1.3
"""Load as a multiple of the capacity: limits act in overload, so they are chosen there, or at the load if it is
higher."""

MOST_REQUESTS = 10_000
"""Requests of a load in overload: the gate looks at all that wait, so that thousands a second would take an hour."""

SEQUENCES = (0.35, 0.42, 0.5, 0.6, 0.71, 0.84, 1.0, 1.19)
"""Candidates, as factors on the number of sequences at the capacity, those that compute their prompt included."""

QUEUE = (0.9, 0.75, 0.6, 0.45, 0.3)
"""Candidates, as shares of the target TTFT that a full queue takes."""

BUDGETS = (512, 1024, 2048, 4096, 8192)
"""Candidates for the tokens of a step."""

GAIN = 1.01
"""Least gain by another number of tokens per step; otherwise the engine keeps its own."""

ENOUGH = 0.99
"""Share of the requests that must meet both targets: p99."""


class Recommendation(Struct, frozen=True, kw_only=True, rename="camel"):
    """The recommended limits. ``capacity`` in requests/s; ``load``: that of ``results``; ``holds``: SLO met there."""

    max_num_seqs: int
    max_num_queued_tokens: int
    max_num_batched_tokens: int
    max_concurrency: int
    max_token_concurrency: int
    capacity: float
    load: float
    holds: bool
    results: list[Figures]
    reasons: list[str]


def recommend(asked: Asked) -> Recommendation | None:
    """Search the limits; None if a single request alone is slower than the SLO."""
    profile, slo, load = asked
    capacity = loads.capacity(profile, load.lengths, slo)
    if not capacity.rate:
        return None
    twin = StreamTwin(asked, load.rate) if load.named else None
    rate = max(OVERLOAD * capacity.rate, 0.0 if twin is None else twin.offered)
    shorter = load._replace(seconds=min(load.seconds, MOST_REQUESTS / rate))
    stressed = StreamTwin(asked._replace(load=shorter), rate)
    pairs = load.lengths.pairs
    prompt, both = sum(prompt for prompt, _ in pairs) / len(pairs), sum(map(sum, pairs)) / len(pairs)
    # A prompt takes a step, as each token after the first does; a step has room for so many prompts.
    decoded, room = both - prompt - 1, profile.max_batched_tokens / prompt
    running = capacity.sequences + (min(capacity.sequences / decoded, room) if decoded else room)

    def queue(sequences: int, share: float) -> int:
        # While prompts leave the queue at the pace of `sequences`: 0.9 x 2 s x 6/s x 1,000 tokens.
        rate = loads.rate_at(profile, load.lengths, sequences)
        return max(1, round(share * slo.ttft * rate * prompt))

    def goodput(sequences: int, share: float, budget: int) -> float:
        return stressed.limited(sequences, queue(sequences, share), budget).goodput

    # 1. Sequences, 2. the queue before them, 3. tokens of a step
    budget = profile.max_batched_tokens
    sizes = sorted({min(profile.max_running, max(1, round(f * running))) for f in SEQUENCES})
    sequences = max(sizes, key=lambda size: goodput(size, QUEUE[1], budget))
    share = max(QUEUE, key=lambda share: goodput(sequences, share, budget))
    by_budget = {size: goodput(sequences, share, size) for size in sorted({*BUDGETS, budget}) if size > sequences}
    best = max(by_budget, key=lambda size: by_budget[size], default=budget)
    if best != budget and (budget not in by_budget or by_budget[best] > GAIN * by_budget[budget]):
        budget = best
    queued = queue(sequences, share)
    # 4. The gain
    twin = twin or stressed
    results = [twin.limited(sequences, queued, budget), twin.gate(), twin.no_gate()]
    return Recommendation(
        max_num_seqs=sequences,
        max_num_queued_tokens=queued,
        max_num_batched_tokens=budget,
        max_concurrency=sequences,
        # A gateway counts a request with its prompt and its whole answer from its admission.
        max_token_concurrency=round(sequences * both),
        capacity=capacity.rate,
        load=twin.offered,
        holds=results[0].good_share >= ENOUGH,
        results=results,
        reasons=_reasons(asked, capacity, sequences, share),
    )


def _reasons(asked: Asked, capacity: Capacity, sequences: int, share: float) -> list[str]:
    profile, slo = asked.profile, asked.slo
    waited = share * slo.ttft
    queue = (
        f"a full queue takes {waited:.2g} s of the {slo.ttft:g} s for the first token; longer ones make answers late"
    )
    if all(output == 1 for _, output in asked.load.lengths.pairs):
        return [
            f"capacity: {number(capacity.rate)} requests/s, of prompts alone: answers of one token have no TPOT",
            f"{sequences} sequences have the most goodput in overload: fewer leave the device idle",
            queue,
        ]
    if capacity.kv_tokens > 0.98 * profile.kv_tokens:
        bound = f"the KV cache ({profile.kv_tokens} tokens) is full then"
    elif capacity.sequences > 0.98 * profile.max_running:
        bound = f"--max-num-seqs {profile.max_running} is reached then"
    else:
        bound = f"the mean time per output token reaches {1000 * slo.tpot:g} ms then"
    return [
        f"capacity: {number(capacity.rate)} requests/s with {capacity.sequences:.0f} sequences; {bound}",
        f"{sequences} sequences have the most goodput in overload: more miss TPOT, fewer leave the device idle",
        queue,
    ]
