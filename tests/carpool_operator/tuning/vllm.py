"""A fleet of vLLM or SGLang engines as Prometheus stores it; the plant is the engine's twin."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).parents[2] / "carpool"))

from metered import scraped

from carpool.generation.requests import Slo
from carpool_cli.streams import loads

PROFILE = loads.read_profile(Path(__file__).parents[3] / "benchmarks" / "generation" / "profiles" / "8b-a100.json")
SLO = Slo(2.0, 0.05)
LENGTHS = loads.lognormal(600, 150, Random(3))
CAPACITY = loads.capacity(PROFILE, LENGTHS, SLO)


def scrapes(rates, *, seed=1):
    """Counters of one engine every 15 s, a minute at each of ``rates`` in shares of the capacity."""
    return scraped(PROFILE, SLO, LENGTHS.pairs, [rate * CAPACITY.rate for rate in rates], seed=seed)


def stored(pod, counters, *, gaps="vllm:inter_token_latency_seconds", kv="vllm:kv_cache_usage_perc", **labels):
    """The series of one pod, as a range query answers them: a sample for each of ``counters``."""
    own = {"namespace": "shop", "pod": pod, "model_name": "llama", "engine": "0", **labels}

    def series(name, value, **more):
        values = [[each.at, repr(value(each))] for each in counters]
        return {"metric": {"__name__": name, **own, **more}, "values": values}

    return [
        series("vllm:prompt_tokens_total", lambda each: each.prompt_tokens),
        series(f"{gaps}_sum", lambda each: each.gap_seconds),
        series(f"{gaps}_count", lambda each: each.gaps),
        series("vllm:request_prompt_tokens_sum", lambda each: each.request_prompt_tokens),
        series("vllm:request_generation_tokens_sum", lambda each: each.request_output_tokens),
        series("vllm:request_generation_tokens_count", lambda each: each.requests),
        series("vllm:iteration_tokens_total_count", lambda each: each.steps),
        series("vllm:num_requests_running", lambda each: float(each.running)),
        series("vllm:num_requests_waiting", lambda each: float(each.waiting)),
        series("vllm:num_preemptions_total", lambda each: each.preemptions),
        series(kv, lambda each: each.kv_share),
        series("vllm:cache_config_info", lambda _: 1.0, num_gpu_blocks=str(PROFILE.kv_tokens // 16), block_size="16"),
    ]


def stored_by_sglang(pod, counters):
    """The same as SGLang names it."""
    own = {"namespace": "shop", "pod": pod, "model_name": "llama", "engine_type": "unified", "tp_rank": "0"}

    def series(name, value, **more):
        values = [[each.at, repr(value(each))] for each in counters]
        return {"metric": {"__name__": f"sglang:{name}", **own, **more}, "values": values}

    return [
        series("prompt_tokens_total", lambda each: each.request_prompt_tokens),
        series("generation_tokens_total", lambda each: each.request_output_tokens),
        series("num_requests_total", lambda each: each.requests / 2, is_streaming="true"),
        series("num_requests_total", lambda each: each.requests / 2, is_streaming="false"),
        series("inter_token_latency_seconds_sum", lambda each: each.gap_seconds),
        series("inter_token_latency_seconds_count", lambda each: each.gaps),
        series("token_usage", lambda each: each.kv_share),
        series("max_total_num_tokens", lambda _: float(PROFILE.kv_tokens)),
        series("num_running_reqs", lambda each: float(each.running)),
        series("num_queue_reqs", lambda each: float(each.waiting)),
    ]
