"""Messages between the engine's server and the computing process: length-prefixed MessagePack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec import Struct, field

from carpool_sidecar.frames import framed

if TYPE_CHECKING:
    from collections.abc import Callable


class Sampling(Struct, frozen=True):
    """How tokens are chosen. ``temperature`` 0: the most probable one. ``top_k`` 0: all."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: bool = False


class Add(Struct, tag=True, frozen=True):
    """Begin an answer: to ``messages`` of a chat, else to a ``prompt``, text or token ids.

    ``max_tokens`` None: as many as the model's context has room for.
    """

    key: int
    prompt: str | list[int]
    messages: list[dict[str, Any]]
    max_tokens: int | None
    stops: list[str]
    sampling: Sampling


class Cancel(Struct, tag=True, frozen=True):
    """Stop computing an answer; no more replies are about it."""

    key: int


class Ping(Struct, tag=True, frozen=True):
    """Ask for a ``Pong``, which comes after the present step at the latest."""


Message: TypeAlias = Add | Cancel | Ping


class Ready(Struct, tag=True, frozen=True):
    """The model is loaded. ``longest_text``: tokens of the longest text that it takes, if fewer than its context."""

    context: int
    kv_tokens: int
    longest_text: int | None = None


class Broken(Struct, tag=True, frozen=True):
    """The model can't be loaded: the process ends."""

    why: str


class Refused(Struct, tag=True, frozen=True):
    """An answer can't begin, or go on: ``field`` of the request is wrong; empty: nothing of it is."""

    key: int
    why: str
    field: str = ""


class Accepted(Struct, tag=True, frozen=True):
    """An answer begins. ``prompt_tokens``: of its prompt."""

    key: int
    prompt_tokens: int


class Token(Struct, frozen=True, array_like=True):
    """A token with its logarithmic probability; ``text`` may be a part of a character."""

    text: str
    logprob: float


class Piece(Struct, frozen=True, array_like=True):
    """More of an answer: ``text``, which may be empty, of ``tokens``; ``end``: ``stop`` or ``length`` with the last."""

    key: int
    text: str
    tokens: int
    end: str = ""
    logprobs: list[Token] = field(default_factory=list)


class Stepped(Struct, tag=True, frozen=True):
    """The output of one step of the engine, and its state; ``kv_share``: share of its KV cache in use."""

    pieces: list[Piece]
    running: int
    waiting: int
    kv_share: float


class Pong(Struct, tag=True, frozen=True):
    """The answer to a ``Ping``: the process does not hang."""


Reply: TypeAlias = Ready | Broken | Refused | Accepted | Stepped | Pong

_encoder = msgspec.msgpack.Encoder()


def frame(message: Message | Reply) -> bytes:
    """Return a message with its length before it."""
    return framed(_encoder.encode(message))


read_message: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Add | Cancel | Ping).decode
"""Decodes a message to the computing process, without its length."""

read_reply: Callable[[bytes], Reply] = msgspec.msgpack.Decoder(
    Ready | Broken | Refused | Accepted | Stepped | Pong
).decode
"""Decodes a reply, without its length."""
