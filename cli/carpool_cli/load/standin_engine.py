"""A stand-in for an LLM server: it schedules like an engine, sleeps for the step times, and answers with numbers.

Speaks OpenAI's completions and chat completions, in events and whole. A prompt has a token for every four characters;
an answer has ``max_tokens``, 16 unless given.
"""

from __future__ import annotations

import asyncio
import time
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, field

from carpool.generation.engine import Engine, Progress, Sequence

if TYPE_CHECKING:
    from carpool.generation.profiles import EngineProfile
    from carpool_sidecar.http1.parsing import HttpError
    from carpool_sidecar.http1.server.exchange import Exchange

_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


class _Message(Struct):
    content: str = ""


class _StreamOptions(Struct):
    include_usage: bool = False


class _Request(Struct):
    """The used fields of a request."""

    messages: list[_Message] = field(default_factory=list)
    prompt: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None

    @property
    def prompt_tokens(self) -> int:
        return max(1, (len(self.prompt) + sum(len(message.content) for message in self.messages)) // 4)

    @property
    def output_tokens(self) -> int:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return max(1, 16 if limit is None else limit)


class _Answer:
    """One request and its answer so far."""

    def __init__(self, exchange: Exchange, asked: _Request, sequence: Sequence, model: str) -> None:
        self.exchange = exchange
        self.sequence = sequence
        self.tokens = 0
        self._asked = asked
        self._chat = exchange.path.endswith(b"/chat/completions")
        self._base: dict[str, Any] = {
            "id": f"cmpl-{sequence.key}",
            "object": "chat.completion" if self._chat else "text_completion",
        }
        self._base |= {"created": 0, "model": model}
        if self._chat and asked.stream:
            self._base["object"] = "chat.completion.chunk"

    def add(self, tokens: int) -> None:
        """Add tokens to the answer; each is an event of its own."""
        for number in range(self.tokens, self.tokens + tokens):
            if self._asked.stream:
                if not number:
                    self.exchange.start(200, [_EVENTS], None)
                self._event([self._choice({"role": "assistant"} if not number else {}, f" {number}", None)])
        self.tokens += tokens

    def end(self) -> None:
        """Complete the answer."""
        self.add(self.sequence.output_tokens - self.tokens)
        if not self._asked.stream:
            text = "".join(f" {number}" for number in range(self.tokens))
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
            choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            self.exchange.respond(200, [_JSON], msgspec.json.encode(self._whole([choice]) | {"usage": self._usage()}))
            return
        self._event([self._choice({}, "", "length")])
        if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
            self._event([], usage=self._usage())
        self.exchange.write(b"data: [DONE]\n\n")
        self.exchange.end()

    def _choice(self, role: dict[str, str], text: str, reason: str | None) -> dict[str, Any]:
        content = {"delta": role | ({"content": text} if text else {})} if self._chat else {"text": text}
        return {"index": 0, "finish_reason": reason} | content

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._base | {"choices": choices}

    def _event(self, choices: list[dict[str, Any]], **more: object) -> None:
        self.exchange.write(b"data: %b\n\n" % msgspec.json.encode(self._whole(choices) | more))

    def _usage(self) -> dict[str, int]:
        prompt = self.sequence.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.tokens,
            "total_tokens": prompt + self.tokens,
        }


class StandinEngine:
    """The application. ``play`` must run in parallel."""

    def __init__(self, model: str, profile: EngineProfile, seed: int, noise: float = 0.0) -> None:
        self._model = model
        self._profile = profile
        self._engine = Engine(profile, Random(seed), noise=noise)  # noqa: S311 - noise, not a secret
        self._answers: dict[int, _Answer] = {}
        self._decoding: dict[int, _Answer] = {}
        self._work = asyncio.Event()
        self._keys = count()
        self._preempted = 0

    async def play(self) -> None:
        """Run the engine's steps until cancelled."""
        now = time.monotonic()
        while True:
            progress = self._engine.run(now, now)
            if progress is None:
                self._work.clear()
                await self._work.wait()
                now = time.monotonic()
                continue
            now = progress.end
            # After a pause of this machine, catch up on the missed steps.
            await asyncio.sleep(max(0.0, now - time.monotonic()))
            self._advance(progress)

    def _advance(self, progress: Progress) -> None:
        self._preempted += len(progress.preempted)
        for sequence in progress.preempted:
            self._decoding.pop(sequence.key, None)  # the rest of its answer arrives when the answer ends
        for answer in self._decoding.values():
            if progress.decoding and answer.tokens < answer.sequence.output_tokens:
                answer.add(progress.steps)
        for sequence in progress.first:
            if (new := self._answers.get(sequence.key)) is not None:
                self._decoding[sequence.key] = new
                new.add(1)
        for sequence in progress.finished:
            self._decoding.pop(sequence.key, None)
            if (done := self._answers.pop(sequence.key, None)) is not None:
                done.end()

    # Called by the server

    def head(self, exchange: Exchange) -> None:
        """Every body is buffered."""

    def sent(self, exchange: Exchange) -> None:
        """No state is kept per exchange."""

    def disconnected(self, exchange: Exchange) -> None:
        """Stop computing for a client that has disconnected."""
        answer = exchange.context
        if isinstance(answer, _Answer) and self._answers.pop(answer.sequence.key, None) is not None:
            self._decoding.pop(answer.sequence.key, None)
            self._engine.cancel(answer.sequence)

    def refused(self, refusal: HttpError) -> None:
        """Nothing to do: the server has answered."""

    def request(self, exchange: Exchange) -> None:
        """Answer a request: completions as they are computed, everything else at once."""
        if exchange.method == b"POST" and exchange.path in {b"/v1/completions", b"/v1/chat/completions"}:
            self._generate(exchange)
        elif exchange.path == b"/v1/models":
            exchange.respond(200, [_JSON], msgspec.json.encode({"object": "list", "data": [{"id": self._model}]}))
        elif exchange.path == b"/health":
            exchange.respond(200, [_JSON], b"{}")
        elif exchange.path == b"/metrics":
            exchange.respond(200, [(b"content-type", b"text/plain; version=0.0.4")], self._metrics())
        else:
            exchange.fail(404, "path", "there are /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics")

    def _generate(self, exchange: Exchange) -> None:
        try:
            asked = msgspec.json.decode(bytes(exchange.body), type=_Request)
        except msgspec.DecodeError as error:
            _refuse(exchange, "body", str(error))
            return
        if asked.prompt_tokens + asked.output_tokens > self._profile.kv_tokens:
            _refuse(exchange, "length", f"prompt and answer are over {self._profile.kv_tokens} tokens")
            return
        sequence = Sequence(next(self._keys), asked.prompt_tokens, asked.output_tokens)
        exchange.context = self._answers[sequence.key] = _Answer(exchange, asked, sequence, self._model)
        self._engine.submit(sequence)
        self._work.set()

    def _metrics(self) -> bytes:
        """Return these figures in the format of vLLM's ``/metrics``."""
        running, waiting, share = self._engine.load
        labels = f'{{engine="0",model_name="{self._model}"}}'
        lines = (
            f"vllm:num_requests_running{labels} {running}",
            f"vllm:num_requests_waiting{labels} {waiting}",
            f"vllm:kv_cache_usage_perc{labels} {share:.6f}",
            f"vllm:num_preemptions_total{labels} {self._preempted}",
        )
        return "\n".join((*lines, "")).encode()


def _refuse(exchange: Exchange, code: str, message: str) -> None:
    """Answer 400 in OpenAI's format."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    exchange.respond(400, [_JSON], msgspec.json.encode({"error": error}))
