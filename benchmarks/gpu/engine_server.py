"""A server of a language model as people run them: OpenAI's `/v1/completions` over transformers' continuous batching.

`python engine_server.py MODEL PORT DEVICE ATTENTION`. The weights are random: a step costs the same. A prompt is an
array of token ids, or a text in which each word is a token. An answer has a word for each token, and `max_tokens` of
them. transformers owns scheduling, KV cache and arithmetic, and computes up to `AT_ONCE` requests at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
import zlib
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import uvloop
from aiohttp import web
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.models import LLAMAS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CONTEXT = 4096
BLOCK = 32
BLOCKS = {"cuda": 4096, "cpu": 512}
"""Of the KV cache, 32 tokens each: 131,072 tokens are 17 GB for the largest model."""

STEP_TOKENS, AT_ONCE = 2048, 256
"""Tokens in a step, and requests in it: vLLM's limits before its version 1."""


def build(name: str, device: str, attention: str) -> Any:  # noqa: ANN401 - transformers' own
    """Return a model of random weights, made on the device: half precision on a GPU."""
    torch.manual_seed(0)
    config = LlamaConfig(**LLAMAS[name], max_position_embeddings=CONTEXT, tie_word_embeddings=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device == "cuda" else torch.float32
        ).eval()
    # Chosen here, or transformers looks for flash attention, and for kernels to download.
    model.set_attn_implementation(attention)
    return model


class Steps:
    """What each step of the engine held, and how long it took; kept until asked for."""

    def __init__(self, processor: Any) -> None:  # noqa: ANN401 - transformers' own
        self._processor = processor
        self._begun = 0.0
        self._prepare, self._update = processor.prepare_next_batch, processor.update_batch
        self.kept: deque[tuple[float, float, int, int, int]] = deque(maxlen=100_000)
        processor.prepare_next_batch, processor.update_batch = self.prepare, self.update

    def prepare(self) -> bool:
        """Begin a step, if there is something to compute."""
        self._begun = time.monotonic()
        return bool(self._prepare())

    def update(self) -> None:
        """End a step. Decoding requests have one token in it, prompts the others."""
        batch = self._processor.inputs_and_outputs
        lengths = [each.query_length for each in batch.requests_in_batch]
        cached = batch.max_kv_read
        self._update()
        decoding = lengths.count(1)
        ended = time.monotonic()
        self.kept.append((ended, ended - self._begun, decoding, cached, sum(lengths) - decoding))

    def take(self) -> list[tuple[float, float, int, int, int]]:
        """Return those since the last time: end, seconds, decoding requests, their KV tokens, prompt tokens."""
        return [self.kept.popleft() for _ in range(len(self.kept))]


class Server:
    """One model."""

    def __init__(self, name: str, device: str, attention: str) -> None:
        self.name = name
        self._vocabulary = LLAMAS[name]["vocab_size"]
        self._numbers = itertools.count()
        self._blocks = BLOCKS[device]
        self.manager = build(name, device, attention).init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=16),
            # Prompts are random: no prefix is found, so none is looked for.
            continuous_batching_config=ContinuousBatchingConfig(
                block_size=BLOCK, num_blocks=self._blocks, max_batch_tokens=STEP_TOKENS,
                max_requests_per_batch=AT_ONCE, allow_block_sharing=False,
            ),
        )  # fmt: skip
        self.manager.warmup()
        self.steps = Steps(self.manager.batch_processor)
        self.manager.start()

    @property
    def alive(self) -> bool:
        """Whether the engine computes."""
        return self.manager.is_running() and self.manager.background_thread_status.fatal_error is None

    def tokens(self, prompt: object) -> list[int] | None:
        """Return the ids of a prompt; None for what is none."""
        if isinstance(prompt, str):
            return [zlib.crc32(word.encode()) % self._vocabulary for word in prompt.split()] or None
        if isinstance(prompt, list) and prompt and all(isinstance(each, int) for each in prompt):
            return [each % self._vocabulary for each in prompt]
        return None

    async def generate(self, prompt: list[int], most: int) -> AsyncIterator[int]:
        """Yield the tokens of an answer; leaving early ends the request in the engine."""
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        number = f"cmpl-{next(self._numbers)}"
        self.manager.register_result_handler(number, outputs.put_nowait)
        ended = False
        try:
            if self.manager.add_request(prompt, request_id=number, max_new_tokens=most, streaming=True) is None:
                raise RuntimeError("the engine takes no requests")
            while not ended:
                output = await outputs.get()
                ended = output.is_finished()
                if output.error:
                    raise RuntimeError(output.error)
                yield output.generated_tokens[-1]
        finally:
            if not ended:
                self.manager.cancel_request(number)
                with self.manager.output_router._lock:  # noqa: SLF001 - a cancelled request gives its handler no end
                    self.manager.output_router.result_handlers.pop(number, None)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer OpenAI's `/v1/completions`, as a stream or whole."""
        try:
            asked = await request.json()
            prompt, most = self.tokens(asked["prompt"]), int(asked.get("max_tokens", 16))
        except (ValueError, KeyError, TypeError, AttributeError):
            prompt, most = None, 0
        if prompt is None or most < 1 or len(prompt) + most > CONTEXT:
            said = f"a prompt and max_tokens of 1 and more are needed, up to {CONTEXT} tokens together"
            return web.json_response({"error": {"message": said, "type": "invalid_request_error"}}, status=400)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": most, "total_tokens": len(prompt) + most}
        head = {"id": "cmpl", "object": "text_completion", "created": int(time.time()), "model": self.name}
        async with contextlib.aclosing(self.generate(prompt, most)) as tokens:
            if not asked.get("stream"):
                text = "".join([f" {token}" async for token in tokens])
                return web.json_response(head | {"choices": [_choice(text, "length")], "usage": usage})
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            count = 0
            async for token in tokens:
                count += 1
                event = head | {"choices": [_choice(f" {token}", "length" if count == most else None)]}
                await response.write(b"data: %b\n\n" % json.dumps(event).encode())
            if (asked.get("stream_options") or {}).get("include_usage"):
                await response.write(b"data: %b\n\n" % json.dumps(head | {"choices": [], "usage": usage}).encode())
            await response.write(b"data: [DONE]\n\n")
            return response

    async def health(self, _: web.Request) -> web.Response:
        """Say whether the engine computes."""
        return web.Response(status=200 if self.alive else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        """Report load, by vLLM's names."""
        processor = self.manager.batch_processor
        scheduler, free = processor.scheduler, processor.cache.get_num_free_blocks()
        waiting = len(scheduler.waiting_requests) + self.manager.input_queue.qsize()
        label = f'{{model_name="{self.name}"}}'
        return web.Response(
            text=f"vllm:num_requests_running{label} {len(scheduler.active_requests)}\n"
            f"vllm:num_requests_waiting{label} {waiting}\n"
            f"vllm:kv_cache_usage_perc{label} {1 - free / self._blocks}\n"
            f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{self._blocks}"}} 1\n'
        )

    async def taken(self, _: web.Request) -> web.Response:
        """Report the steps since the last time."""
        return web.json_response(self.steps.take())


def _choice(text: str, end: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": end}


def main() -> None:
    """Serve until a signal ends it."""
    name, port, device, attention = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
    begun = time.monotonic()
    if device == "cuda":
        # cuDNN would plan attention anew for each length, and lengths differ from step to step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        torch.set_num_threads(1)
    server = Server(name, device, attention)
    print(f"{name} on {device}: ready after {time.monotonic() - begun:.1f} s", flush=True)
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_get("/health", server.health)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_get("/steps", server.taken)
    web.run_app(
        app, host="127.0.0.1", port=port, print=None, access_log=None, backlog=4096, handler_cancellation=True,
        shutdown_timeout=1, loop=uvloop.new_event_loop(),
    )  # fmt: skip
    server.manager.stop(hard_stop=True, timeout=10)


if __name__ == "__main__":
    main()
