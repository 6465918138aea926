"""The computing process: OpenVINO GenAI's continuous batching, step by step.

``python -m carpool_sidecar.llm.worker CONFIG``: requests on standard input, answers on standard output (see
``messages``). It ends with its input. A process of its own, since a step holds Python's lock: 50 ms with a model of
100 million weights, a second with its prompts.
"""

from __future__ import annotations

import os
import select
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from carpool_sidecar.config.settings import Llm
from carpool_sidecar.frames import LENGTH
from carpool_sidecar.llm.messages import (
    Accepted,
    Add,
    Broken,
    Cancel,
    Piece,
    Ping,
    Pong,
    Ready,
    Refused,
    Sampling,
    Stepped,
    Token,
    frame,
    read_message,
)
from carpool_sidecar.llm.model_file import describe
from carpool_sidecar.llm.requests import LARGEST_BODY
from carpool_sidecar.llm.sequences import PATIENCE, Lasting, Patience
from carpool_sidecar.llm.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from carpool_sidecar.llm.messages import Message, Reply
    from carpool_sidecar.llm.sequences import Handle

BLOCK = 32
"""Tokens of a block of OpenVINO's KV cache on a CPU; on a GPU it is 16, so that there is less room."""

READ = 1 << 16
"""Bytes read at a time."""

MOST_READ = 1 << 20
"""Bytes of messages after which a step is due: about 0.1 s of making tokens of text. A longer message is read whole."""

DEFAULT_CACHE = 1 << 30
"""Bytes of the KV cache at 16 bits a value, unless its tokens are set."""


class Wrong(Exception):  # noqa: N818 - of a request, not a fault of this program
    """A request that can't be answered; ``field`` is what to change in it."""

    def __init__(self, why: str, field: str = "") -> None:
        super().__init__(why)
        self.field = field


class Machine(Protocol):
    """What computes."""

    context: int
    kv_tokens: int

    def encode(self, add: Add) -> list[int]:
        """Return the tokens of a prompt. Raises ``Wrong``."""

    def decode(self, lists: list[list[int]]) -> list[str]:
        """Return the text of each list of tokens."""

    def begin(self, key: int, ids: list[int], max_tokens: int, sampling: Sampling) -> Handle:
        """Take a sequence. Raises ``Wrong``."""

    def step(self) -> None:
        """Give every sequence that decodes a token, and compute prompts."""

    @property
    def load(self) -> tuple[int, float]:
        """Sequences computed in the last step, and the share of the KV cache in use then."""


class _Live:
    """One answer under way."""

    __slots__ = ("handle", "logprobs", "text")

    def __init__(self, handle: Handle, text: Text, *, logprobs: bool) -> None:
        self.handle = handle
        self.text = text
        self.logprobs = logprobs


class Worker:
    """All answers under way on one machine. Methods return the replies to send."""

    def __init__(
        self, machine: Machine, *, patience: float = PATIENCE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._machine = machine
        self._patience = Patience(patience, clock)
        self._live: dict[int, _Live] = {}

    @property
    def busy(self) -> bool:
        """Whether there is something to compute."""
        return bool(self._live)

    def take(self, message: Message) -> Reply | None:
        """Begin an answer or end one."""
        if isinstance(message, Ping):
            return Pong()
        if isinstance(message, Cancel):
            gone = self._live.pop(message.key, None)
            if gone is not None:
                gone.handle.cancel()
            return None
        try:
            ids = self._machine.encode(message)
            room = self._room(len(ids), message.max_tokens)
            begin = partial(self._machine.begin, message.key)
            handle = Lasting(begin, ids, room, message.sampling, patience=self._patience)
        except Wrong as error:
            return Refused(message.key, str(error), error.field)
        except Exception as error:  # noqa: BLE001 - whatever the runtime raises is this request's, and nobody else's
            return Refused(message.key, f"the engine can't take this request: {_short(error)}")
        self._live[message.key] = _Live(handle, Text(message.stops), logprobs=message.sampling.logprobs)
        return Accepted(message.key, len(ids))

    def step(self) -> Iterator[Reply]:
        """Compute a step; yield its results."""
        self._machine.step()
        # 1. What is new, and its text: of all answers at once, since that is one run of the detokenizer
        new = []
        for key, live in self._live.items():
            ids, logprobs, end = live.handle.read()
            if ids or end:
                new.append((key, live, ids, logprobs, end))
        texts = self._machine.decode([live.text.add(ids) for _, live, ids, _, _ in new]) if new else []
        pieces = []
        for (key, live, ids, logprobs, end), decoded in zip(new, texts, strict=True):
            text = live.text.take(decoded, end=bool(end))
            # 2. Those that end
            if live.text.stopped and not end:
                live.handle.cancel()
            why = "stop" if live.text.stopped else end
            if why:
                del self._live[key]
            if why == "lost":
                yield Refused(
                    key, f"the KV cache has had no room for it for {self._patience.seconds:g} s: raise llm.kvTokens"
                )
            else:
                pieces.append(Piece(key, text, len(ids), why, self._tokens(live, ids, logprobs)))
        # 3. Windows that are long
        long = [live.text for live in self._live.values() if live.text.long]
        for each, context in zip(
            long, self._machine.decode([one.context() for one in long]) if long else (), strict=True
        ):
            each.move(context)
        running, share = self._machine.load
        running = min(running, len(self._live))
        yield Stepped(pieces, running, len(self._live) - running, share if self._live else 0.0)

    def _room(self, prompt: int, asked: int | None) -> int:
        """Return the tokens that an answer may have. Raises ``Wrong``."""
        for most, what, change in (
            (self._machine.context, "the model's context", "shorten the prompt or lower max_tokens"),
            (self._machine.kv_tokens, "the KV cache", "lower max_tokens, or raise llm.kvTokens on the server"),
        ):
            if prompt + (asked or 1) > most:
                raise Wrong(
                    f"{prompt} tokens of prompt and {asked or 1} of answer are over {what}, {most}: {change}",
                    "max_tokens",
                )
        return min(self._machine.context, self._machine.kv_tokens) - prompt if asked is None else asked

    def _tokens(self, live: _Live, ids: Sequence[int], logprobs: Sequence[float]) -> list[Token]:
        if not live.logprobs:
            return []
        texts = self._machine.decode([[each] for each in ids])
        return [Token(text, value) for text, value in zip(texts, logprobs, strict=False)]


class OpenVino:
    """OpenVINO GenAI's pipeline, with the tokenizer of the model."""

    def __init__(self, config: Llm) -> None:
        """Load the model. Raises what OpenVINO raises."""
        import openvino_genai  # noqa: PLC0415 - only this process needs its 300 MB

        self._genai = openvino_genai
        known = describe(Path(config.path))
        self.context = config.context or known.context
        fits = DEFAULT_CACHE // known.kv_token_bytes if known.kv_token_bytes else 0
        blocks = -(-(config.kv_tokens or max(self.context, fits)) // BLOCK)
        self.kv_tokens = blocks * BLOCK
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = blocks
        scheduler.max_num_seqs = config.max_running
        scheduler.max_num_batched_tokens = config.max_batched_tokens
        scheduler.dynamic_split_fuse = True  # decoding first, prompts in pieces
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": config.threads} if config.threads else {}
        if (config.threads or len(os.sched_getaffinity(0))) == 1:
            # OpenVINO 2026.4 divides by zero with one thread and AMX, which it uses for bf16 only: the default there.
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        try:
            pipeline = openvino_genai.ContinuousBatchingPipeline(config.path, scheduler, config.device, properties)
        except RuntimeError as error:
            if "more memory" not in str(error):
                raise
            size = f", {self.kv_tokens * known.kv_token_bytes / 2**30:,.0f} GiB" if known.kv_token_bytes else ""
            raise MemoryError(
                f"{_short(error)} Lower llm.kvTokens, now {self.kv_tokens} tokens{size}: unset, it follows llm.context"
            ) from error
        self._pipeline = pipeline
        self._tokenizer = self._pipeline.get_tokenizer()
        self._vocabulary = len(self._tokenizer.get_vocab())
        self._cut = {special: cut_at(partial(self._count, special), self.context) for special in (False, True)}
        """Tokens at which it cuts texts, with and without special tokens."""

    @property
    def longest_text(self) -> int | None:
        """Tokens of the longest text that is not cut; ``None``: as many as the context has."""
        return min((each - 1 for each in self._cut.values() if each is not None), default=None)

    def encode(self, add: Add) -> list[int]:
        """Return the tokens of a prompt."""
        prompt = add.prompt
        try:
            if add.messages:
                prompt = self._tokenizer.apply_chat_template(add.messages, add_generation_prompt=True)
        except RuntimeError as error:
            raise Wrong(
                f"the model's chat template does not take these messages: {_short(error)}", "messages"
            ) from None
        if isinstance(prompt, str):
            # A chat's template has the special tokens that it needs.
            special = not add.messages
            ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=special).input_ids.data[0].tolist()
            most = self._cut[special]
            if most is not None and len(ids) >= most:
                raise Wrong(
                    f"a text may have {most - 1} tokens, since this model's tokenizer in OpenVINO cuts longer ones: "
                    "shorten it, or send token ids as the prompt to /v1/completions",
                    "messages" if add.messages else "prompt",
                )
        else:
            ids = prompt
        wrong = [each for each in ids if not 0 <= each < self._vocabulary]
        if wrong:
            raise Wrong(f"there is no token {wrong[0]}: the vocabulary has {self._vocabulary}", "prompt")
        if not ids:
            raise Wrong("the prompt is empty: give at least one token", "messages" if add.messages else "prompt")
        return ids

    def _count(self, special: bool, text: str) -> int:
        return int(self._tokenizer.encode(text, add_special_tokens=special).input_ids.shape[-1])

    def decode(self, lists: list[list[int]]) -> list[str]:
        """Return the text of each list of tokens; special ones have none."""
        full = [each for each in lists if each]  # the runtime takes no empty ones
        texts = iter(self._tokenizer.decode(full) if full else ())
        return [next(texts) if each else "" for each in lists]

    def begin(self, key: int, ids: list[int], max_tokens: int, sampling: Sampling) -> OpenVinoHandle:
        """Take a sequence."""
        import numpy as np  # noqa: PLC0415 - likewise
        import openvino  # noqa: PLC0415 - likewise

        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.min_new_tokens = min(sampling.min_tokens, max_tokens)
        config.ignore_eos = sampling.ignore_eos
        config.do_sample = sampling.temperature > 0
        if config.do_sample:
            config.temperature, config.top_p, config.min_p = sampling.temperature, sampling.top_p, sampling.min_p
            config.rng_seed = sampling.seed
            if sampling.top_k:
                config.top_k = sampling.top_k
        config.presence_penalty = sampling.presence_penalty
        config.frequency_penalty = sampling.frequency_penalty
        config.repetition_penalty = sampling.repetition_penalty
        config.logprobs = int(sampling.logprobs)
        tensor = openvino.Tensor(np.array([ids], dtype=np.int64))
        try:
            return OpenVinoHandle(self._pipeline.add_request(key, tensor, config), self._genai.GenerationStatus.RUNNING)
        except RuntimeError as error:
            why = _short(error)
            # A value that is 0 as a float of 32 bits, or min_p 1: the runtime names it.
            raise Wrong(why, next((name for name in Sampling.__struct_fields__ if name in why), "")) from None

    def step(self) -> None:
        """Compute."""
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()

    @property
    def load(self) -> tuple[int, float]:
        """Sequences of the last step, share of the cache."""
        metrics = self._pipeline.get_metrics()
        return metrics.scheduled_requests, metrics.cache_usage / 100


class OpenVinoHandle:
    """A ``GenerationHandle``."""

    __slots__ = ("_handle", "_running")

    def __init__(self, handle: Any, running: Any) -> None:  # noqa: ANN401 - the package is an extra
        self._handle = handle
        self._running = running

    def read(self) -> tuple[list[int], list[float], str]:
        """Return what is new."""
        ids: list[int] = []
        logprobs: list[float] = []
        end = ""
        status = self._handle.get_status()  # before reading: what comes later is read with the next step
        while self._handle.can_read():
            for output in self._handle.read().values():
                ids += output.generated_ids
                logprobs += output.generated_log_probs
                end = {"STOP": "stop", "LENGTH": "length"}.get(output.finish_reason.name, end)
        if not end and status != self._running:
            end = "lost"
        return ids, logprobs, end

    def cancel(self) -> None:
        """Compute no more."""
        self._handle.cancel()


def cut_at(count: Callable[[str], int], context: int) -> int | None:
    """Return the number of tokens at which a tokenizer cuts a text, without an error; ``None``: not within the context.

    OpenVINO makes one of a GGUF file that keeps the last 8,192, whatever it is asked for. ``count``: tokens of a text.
    """
    few, words, before = count("la "), min(context, 1 << 14), 0
    # Twice the text has as many tokens: it is cut. Never more than a word has: the tokenizer does not know the words.
    while few < (now := count("la " * words)) < context and 3 * words < LARGEST_BODY:
        if now == before:
            return now
        words, before = 2 * words, now
    return None


def _short(error: Exception) -> str:
    """Return the last line of an exception of OpenVINO's: what it is about; those before name its source files."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def serve(worker: Worker, source: int, sink: int) -> None:
    """Answer every message until the source ends."""
    held = bytearray()
    while True:
        # 1. What was asked meanwhile: between two steps nothing waits, without any work all does
        more = bool(held) or bool(select.select([source], [], [], 0 if worker.busy else None)[0])
        taken, complete = 0, False
        while more:
            chunk = os.read(source, READ)
            if not chunk:
                return
            held += chunk
            taken += len(chunk)
            while len(held) >= LENGTH and len(held) >= (end := LENGTH + int.from_bytes(held[:LENGTH], "little")):
                reply = worker.take(read_message(bytes(held[LENGTH:end])))
                del held[:end]
                complete = True
                if reply is not None:
                    _write(sink, frame(reply))
            # What has begun is read to its end, instead of a piece after each step.
            more = bool(held) and (taken < MOST_READ or not complete)
        # 2. A step
        if worker.busy:
            _write(sink, b"".join(frame(each) for each in worker.step()))


def _write(sink: int, data: bytes) -> None:
    while data:
        data = data[os.write(sink, data) :]


def main(argument: str) -> int:
    """Load the model and serve; returns the exit code."""
    # Text that the runtime prints must not mix with messages.
    sink = os.dup(1)
    os.dup2(2, 1)
    config = Llm.of_argument(argument)
    try:
        machine = OpenVino(config)
    except Exception as error:  # noqa: BLE001 - the runtime raises what it likes, and the user is to know
        _write(sink, frame(Broken(f"{config.path} can't be loaded: {_short(error)}")))
        return 2
    _write(sink, frame(Ready(machine.context, machine.kv_tokens, machine.longest_text)))
    serve(Worker(machine, patience=min(PATIENCE, config.timeout)), 0, sink)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except BrokenPipeError:
        os._exit(0)  # the sidecar has ended
