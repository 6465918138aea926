"""The engine's own ``/metrics``: read once a second while it has requests."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import TYPE_CHECKING

from carpool.exchange.token_streams import EngineSays

if TYPE_CHECKING:
    from carpool_sidecar.backends.base import Backend
    from carpool_sidecar.generation.engine_streams import Streams

INTERVAL = 1.0
"""Seconds between two reads."""

UNKNOWN = 60.0
"""Seconds until a server without useful metrics is asked again."""

LONGEST = 2 * 2**20
"""Bytes of an answer that is read: 2 ms."""

_NAMES = {
    b"vllm:kv_cache_usage_perc": "kv_share",
    b"vllm:gpu_cache_usage_perc": "kv_share",  # before 0.10
    b"sglang:token_usage": "kv_share",
    b"llamacpp:kv_cache_usage_ratio": "kv_share",
    b"vllm:num_preemptions_total": "preemptions",
    b"vllm:num_requests_running": "running",
    b"sglang:num_running_reqs": "running",
    b"llamacpp:requests_processing": "running",
    b"tgi_batch_current_size": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"sglang:num_queue_reqs": "waiting",
    b"llamacpp:requests_deferred": "waiting",
    b"tgi_queue_size": "waiting",
    b"llamacpp:n_busy_slots_per_decode": "busy_slots",
}
"""The metrics that are read, by the engines' names."""

_CACHE = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_SIZES = re.compile(rb'(?<![a-z_])(kv_cache_size_tokens|num_gpu_blocks|block_size)="(\d{1,12})"')
"""Labels with the size of vLLM's cache; older versions have no tokens, only blocks and the tokens of each."""

_POOL = re.compile(rb"^sglang:max_total_num_tokens(?:\{([^\n]*)\})?[ \t]+([0-9.e+]+)", re.MULTILINE)
_RANK = re.compile(rb'(?<![a-z_])(?!dp_)[a-z_]+_rank="[^"]*",?')
"""Ranks of SGLang that share one cache, and each report all of it. Those of data parallelism have one each."""

_LINE = re.compile(rb"^(" + b"|".join(_NAMES) + rb")(?:\{[^\n]*\})?[ \t]+([0-9.eE+-]+)", re.MULTILINE)


def parse(text: bytes) -> EngineSays | None:
    """Read an exposition; None: it has no useful metrics.

    Several engines behind one port: counts are summed, of shares the highest counts.
    """
    found: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        field = _NAMES[name]
        try:
            number = float(value)
        except ValueError:
            continue
        found[field] = max(found.get(field, 0.0), number) if field == "kv_share" else found.get(field, 0.0) + number
    pools: dict[bytes, float] = {}
    for labels, value in _POOL.findall(text):
        of = _RANK.sub(b"", labels)
        with suppress(ValueError):
            pools[of] = max(pools.get(of, 0.0), float(value))
    if pools:
        found["kv_tokens"] = sum(pools.values())
    for each in _CACHE.findall(text):
        size = {name: int(value) for name, value in _SIZES.findall(each)}
        tokens = size.get(b"kv_cache_size_tokens") or size.get(b"num_gpu_blocks", 0) * size.get(b"block_size", 0)
        if tokens:
            found["kv_tokens"] = found.get("kv_tokens", 0.0) + tokens
    return EngineSays(**found) if found else None


class EngineMetrics:
    """Reads the metrics, and passes those that the gate needs on."""

    def __init__(self, backend: Backend, streams: Streams) -> None:
        self._backend = backend
        self._streams = streams

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            delay = await self.look()
            await asyncio.sleep(delay)

    async def look(self) -> float:
        """Ask once, if there are requests; return the seconds until the next time."""
        streams = self._streams
        if not streams.running:
            return INTERVAL
        answer = await self._backend.ask(b"/metrics")
        readable = answer.status == 200 and len(answer.body) <= LONGEST
        streams.engine = parse(answer.body) if readable else None
        if streams.engine is None:
            return UNKNOWN
        streams.gatekeeper.report(streams.engine.kv_share, streams.engine.kv_tokens)
        return INTERVAL
