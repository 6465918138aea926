"""What Prometheus stored of engines without a sidecar: vLLM's own metrics, as counters of one moment for each pod."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from carpool.generation.observed import Counters

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from carpool_operator.tuning.sources.scrapes import LabelNames, Series

PROMPTS = "vllm:prompt_tokens_total"
CACHED = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
GAPS = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
"""Histograms of the time between tokens, by the newer name and the older one."""
KV = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
ASKED, ANSWERED = "vllm:request_prompt_tokens_sum", "vllm:request_generation_tokens"
STEPS = "vllm:iteration_tokens_total_count"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
PREEMPTIONS = "vllm:num_preemptions_total"
CACHE = "vllm:cache_config_info"
"""The size of the KV cache: labels `num_gpu_blocks` and `block_size`."""

READ = (
    PROMPTS, *CACHED, *(f"{name}_{part}" for name in GAPS for part in ("sum", "count")), *KV, ASKED,
    f"{ANSWERED}_sum", f"{ANSWERED}_count", STEPS, RUNNING, WAITING, PREEMPTIONS, CACHE,
)  # fmt: skip

NEEDED = (PROMPTS, ASKED, f"{ANSWERED}_sum", f"{ANSWERED}_count")


def question(labels: LabelNames, namespace: str, pods: Collection[str], seconds: float) -> str:
    """Return the question what was stored of some pods' engines within the last ``seconds``."""
    names = "|".join(READ)
    return f'{{__name__=~"{names}",{labels.selector(namespace, pods)}}}[{max(1, round(seconds * 1000))}ms]'


def counters(series: Iterable[Series], labels: LabelNames) -> dict[str, Counters | str]:
    """Read the answer: by pod, its newest scrape, or what it lacks. Engines behind one port are one."""
    newest: dict[str, float] = {}
    found: dict[str, list[Series]] = {}
    for each in series:
        pod = each.metric.get(labels.pod)
        if pod is not None and each.values:
            found.setdefault(pod, []).append(each)
            newest[pod] = max(newest.get(pod, 0.0), each.values[-1][0])
    return {pod: _counters(every, newest[pod]) for pod, every in found.items()}


def _counters(series: list[Series], at: float) -> Counters | str:
    sums: dict[str, float] = {}
    highest: dict[str, float] = {}
    size = 0.0
    for each in series:
        name, (when, text) = each.metric.get("__name__", ""), each.values[-1]
        value = _number(text)
        if when != at or value is None:
            continue  # it has ended: another process writes the others
        sums[name] = sums.get(name, 0.0) + value
        highest[name] = max(highest.get(name, 0.0), value)
        if name == CACHE:
            blocks, block = (_number(each.metric.get(label, "")) for label in ("num_gpu_blocks", "block_size"))
            size += (blocks or 0.0) * (block or 0.0)
    gaps = next((name for name in GAPS if f"{name}_sum" in sums and f"{name}_count" in sums), None)
    missing = [name for name in NEEDED if name not in sums]
    if gaps is None or missing:
        return f"it has no {missing[0] if missing else f'{GAPS[0]} nor {GAPS[1]}'}: is it vLLM, and is that scraped?"
    cached = next((sums[name] for name in CACHED if name in sums), 0.0)
    return Counters(
        at=at,
        prompt_tokens=max(0.0, sums[PROMPTS] - cached),
        gaps=sums[f"{gaps}_count"],
        gap_seconds=sums[f"{gaps}_sum"],
        requests=sums[f"{ANSWERED}_count"],
        request_prompt_tokens=sums[ASKED],
        request_output_tokens=sums[f"{ANSWERED}_sum"],
        steps=sums.get(STEPS),
        running=sums.get(RUNNING, 0.0),
        waiting=sums.get(WAITING, 0.0),
        kv_share=next((highest[name] for name in KV if name in highest), None),
        kv_size=size or None,
        preemptions=sums.get(PREEMPTIONS, 0.0),
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) and value >= 0 else None
