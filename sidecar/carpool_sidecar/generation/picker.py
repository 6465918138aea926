"""The engine's ``/metrics`` on the data port, for an endpoint picker: requests that wait at the gate count, too.

A picker of the Gateway API Inference Extension scrapes the port that it routes to, and reads total queued requests and
the share of the KV cache in use. Behind a gate the engine's own queue is always short. So the gate's is added to it;
everything else is as the engine wrote it. An engine without such metrics gets them, by vLLM's names.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool_sidecar.backends.base import Backend
    from carpool_sidecar.generation.engine_streams import Streams
    from carpool_sidecar.http1.server.exchange import Exchange

PATH = b"/metrics"

TEXT = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]

_WAITING = re.compile(
    rb"^((?:vllm:num_requests_waiting|sglang:num_queue_reqs|trtllm_num_requests_waiting|llamacpp:requests_deferred"
    rb"|tgi_queue_size)(?:\{[^\n]*\})?[ \t]+)([0-9.eE+-]+)",
    re.MULTILINE,
)


def with_queue(text: bytes, queued: int, running: int, kv_share: float | None) -> bytes:
    """Add the gate's queue to an engine's exposition; of several engines behind one port, to the first one's."""
    found = _WAITING.search(text)
    if found is not None:
        try:
            waiting = float(found[2])
        except ValueError:
            return text
        return text[: found.start()] + found[1] + repr(waiting + queued).encode() + text[found.end() :]
    lines = [("vllm:num_requests_waiting", float(queued)), ("vllm:num_requests_running", float(running))]
    if kv_share is not None:
        lines.append(("vllm:kv_cache_usage_perc", kv_share))
    own = "".join(f"# TYPE {name} gauge\n{name} {value!r}\n" for name, value in lines).encode()
    return text + (b"" if not text or text.endswith(b"\n") else b"\n") + own


class PickerMetrics:
    """One answer to ``GET /metrics``."""

    __slots__ = ("_backend", "_exchange", "_streams", "_task")

    def __init__(self, exchange: Exchange, backend: Backend, streams: Streams) -> None:
        self._exchange = exchange
        self._backend = backend
        self._streams = streams
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Read the engine's metrics, and answer."""
        self._task = asyncio.get_running_loop().create_task(self._answer())

    def request(self) -> None:
        """Do nothing: the request has no body."""

    def cancel(self) -> None:
        """Stop: the client has left."""
        if self._task is not None:
            self._task.cancel()

    async def _answer(self) -> None:
        document = await self._backend.ask(PATH)
        if document.status == 0:
            self._exchange.respond(503, TEXT, b"# the engine does not answer\n")
            return
        streams = self._streams
        keeper = streams.gatekeeper
        size = None if keeper.gate is None else keeper.gate.kv.tokens
        share = None if not size else min(1.0, streams.kv_tokens / size)
        text = document.body if document.status == 200 else b""
        self._exchange.respond(200, TEXT, with_queue(bytes(text), keeper.queued, streams.running, share))


def answers(exchange: Exchange, streams: Streams) -> bool:
    """Whether a request is for the engine's metrics while a gate is in front of it."""
    asked = exchange.target == PATH and exchange.method == b"GET" and not exchange.length
    return asked and streams.gatekeeper.gate is not None
