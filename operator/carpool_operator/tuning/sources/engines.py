"""Metrics of engines without a sidecar, from Prometheus: each pod's counters at one moment."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from carpool.generation.observed import Counters

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from carpool_operator.tuning.sources.scrapes import LabelNames, Series


class Names(NamedTuple):
    """The metric names of one kind of engine; of several names, the newest first."""

    engine: str
    prompts: str
    """Prompt tokens, including those from the prefix cache."""
    cached: tuple[str, ...]
    """Prompt tokens from the prefix cache."""
    gaps: tuple[str, ...]
    """Histograms of the time between tokens."""
    requests: str
    """Completed requests; ``asked`` and ``answered`` are their prompt and output tokens."""
    asked: str
    answered: str
    kv: tuple[str, ...]
    """Share of the KV cache in use."""
    running: str
    waiting: str
    preemptions: str
    steps: str = ""
    size: str = ""
    """Size of the KV cache in tokens."""

    @property
    def needed(self) -> tuple[str, ...]:
        """The required metrics."""
        return tuple(dict.fromkeys((self.prompts, self.asked, self.answered, self.requests)))

    @property
    def read(self) -> tuple[str, ...]:
        """All metrics that are read."""
        parts = (f"{name}_{part}" for name in self.gaps for part in ("sum", "count"))
        rest = (*self.cached, *parts, *self.kv, self.running, self.waiting, self.preemptions, self.steps, self.size)
        return (*self.needed, *(name for name in rest if name))


VLLM = Names(
    "vLLM",
    prompts="vllm:prompt_tokens_total",
    cached=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    gaps=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    requests="vllm:request_generation_tokens_count",
    asked="vllm:request_prompt_tokens_sum",
    answered="vllm:request_generation_tokens_sum",
    kv=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    preemptions="vllm:num_preemptions_total",
    steps="vllm:iteration_tokens_total_count",
)

SGLANG = Names(
    "SGLang",
    # It counts a request's tokens when the request ends.
    prompts="sglang:prompt_tokens_total",
    cached=("sglang:cached_tokens_total",),
    gaps=("sglang:inter_token_latency_seconds",),
    requests="sglang:num_requests_total",
    asked="sglang:prompt_tokens_total",
    answered="sglang:generation_tokens_total",
    kv=("sglang:token_usage",),
    running="sglang:num_running_reqs",
    waiting="sglang:num_queue_reqs",
    preemptions="sglang:num_retracted_requests_total",
    size="sglang:max_total_num_tokens",
)

CACHE = "vllm:cache_config_info"
"""The size of vLLM's KV cache: labels `num_gpu_blocks` and `block_size`."""

READ = (*VLLM.read, CACHE, *SGLANG.read)


def question(labels: LabelNames, namespace: str, pods: Collection[str], seconds: float) -> str:
    """Return the query for the samples of some pods' engines within the last ``seconds``."""
    names = "|".join(READ)
    return f'{{__name__=~"{names}",{labels.selector(namespace, pods)}}}[{max(1, round(seconds * 1000))}ms]'


def counters(series: Iterable[Series], labels: LabelNames) -> dict[str, Counters | str]:
    """Parse the answer: by pod, its newest scrape, or what it lacks. Engines behind one port count as one."""
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
    names = SGLANG if any(name in SGLANG.read for name in sums) else VLLM
    gaps = next((name for name in names.gaps if f"{name}_sum" in sums and f"{name}_count" in sums), None)
    missing = [name for name in names.needed if name not in sums]
    if gaps is None or missing:
        lacks = missing[0] if missing else " nor ".join(names.gaps)
        return f"it has no {lacks}: is it {names.engine}, and is that scraped?"
    cached = next((sums[name] for name in names.cached if name in sums), 0.0)
    return Counters(
        at=at,
        prompt_tokens=max(0.0, sums[names.prompts] - cached),
        gaps=sums[f"{gaps}_count"],
        gap_seconds=sums[f"{gaps}_sum"],
        requests=sums[names.requests],
        request_prompt_tokens=sums[names.asked],
        request_output_tokens=sums[names.answered],
        steps=sums.get(names.steps),
        running=sums.get(names.running, 0.0),
        waiting=sums.get(names.waiting, 0.0),
        kv_share=next((highest[name] for name in names.kv if name in highest), None),
        kv_size=size or sums.get(names.size) or None,
        preemptions=sums.get(names.preemptions, 0.0),
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) and value >= 0 else None
