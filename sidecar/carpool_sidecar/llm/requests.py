"""What OpenAI's requests ask for: read, checked, and made into messages to the engine. Unknown fields are ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct

from carpool_sidecar.llm.messages import Add, Sampling

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

CHAT, TEXT = b"/v1/chat/completions", b"/v1/completions"
"""The paths that generate."""

DEFAULT_TOKENS = 16
"""Tokens of a completion where ``max_tokens`` is not given, as at OpenAI; a chat goes on as long as there is room."""

LARGEST_BODY = 8 * 2**20
"""Bytes of a request's JSON, which becomes objects: two million tokens of text."""

LARGEST_COPIES = 4 * LARGEST_BODY
"""Bytes of a request times its ``n``: each choice goes to the engine with its prompt."""

MOST_CHOICES = 128
"""Answers to one request, its prompts times ``n``."""
MOST_STOPS = 16
"""Stop strings of a request."""

MOST_TOKENS = 1 << 31
"""Token ids are below; the engine knows how many its model has."""

_AT = " - at `$."


class BadRequest(Exception):  # noqa: N818 - an answer, not a fault of this program
    """A request that can't be answered as it is. ``param`` is the field that is wrong."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class _Message(Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Request(Struct):
    """The fields that are read; None is the same as none."""

    model: str | None = None
    messages: list[_Message] | None = None
    prompt: str | list[Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logit_bias: dict[str, float] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    modalities: list[str] | None = None


class Asked(NamedTuple):
    """A request: ``choices`` are what to compute, by the index of the choice in the answer, their keys still 0."""

    chat: bool
    stream: bool
    include_usage: bool
    choices: list[Add]
    per_prompt: int
    """Choices of one prompt, whose tokens count once."""


_decoder = msgspec.json.Decoder(_Request)

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, 1 << 31),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "min_tokens": (0, 1 << 31),
    "n": (1, MOST_CHOICES),
    "max_tokens": (1, 1 << 31),
    "max_completion_tokens": (1, 1 << 31),
}


def read(path: bytes, body: bytes, model: str, rng: random.Random) -> Asked:
    """Read the body of a request to ``path``; ``rng`` gives seeds where none is asked for.

    Raises ``BadRequest``.
    """
    asked = _decode(body)
    chat = path == CHAT
    if asked.model not in {None, "", model}:
        raise BadRequest(f"there is no model {asked.model!r} here; there is {model!r}", "model", 404)
    _refuse_unsupported(asked, chat=chat)
    for name, (least, most) in _RANGES.items():
        value = getattr(asked, name)
        if value is not None and not least <= value <= most:
            raise BadRequest(f"{name} is {value}: give one from {least:g} to {most:g}", name)
    if asked.top_p is not None and not 0.0 < asked.top_p <= 1.0:
        raise BadRequest(f"top_p is {asked.top_p}: give one above 0, up to 1", "top_p")
    if asked.repetition_penalty is not None and asked.repetition_penalty <= 0.0:
        raise BadRequest(f"repetition_penalty is {asked.repetition_penalty}: give one above 0", "repetition_penalty")
    messages = _messages(asked) if chat else []
    prompts = [""] if chat else list(_prompts(asked))
    copies = asked.n or 1
    if len(prompts) * copies > MOST_CHOICES:
        raise BadRequest(f"{len(prompts)} prompts, n {copies}: a request may have {MOST_CHOICES} choices", "n")
    if len(body) * copies > LARGEST_COPIES and copies > 1:
        raise BadRequest(f"n is {copies}, with a body of {len(body)} bytes: ask for fewer choices at once", "n")
    limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    if limit is None and not chat:
        limit = DEFAULT_TOKENS
    seed = rng.getrandbits(31) if asked.seed is None else asked.seed % (1 << 31)
    stops = _stops(asked)
    # Copies differ by their seeds, and so do they from one request to the next unless one asks for a seed.
    choices = [
        Add(0, prompt, messages, limit, stops, _sampling(asked, seed + copy))
        for prompt in prompts
        for copy in range(copies)
    ]
    usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
    return Asked(chat, bool(asked.stream), usage, choices, copies)


def _decode(body: bytes) -> _Request:
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(_AT)
        name = path.rstrip("`").split(".")[0].split("[")[0] or None
        raise BadRequest(f"{path.rstrip('`') or 'the body'}: {text[:1].lower()}{text[1:]}", name) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from None


def _refuse_unsupported(asked: _Request, *, chat: bool) -> None:
    """Refuse what would change the answer and can't be done."""
    form = (asked.response_format or {}).get("type", "text")
    unsupported = {
        "tools": bool(asked.tools) and asked.tool_choice != "none",
        "functions": bool(asked.functions) and asked.function_call != "none",
        "response_format": form != "text",
        "structured_outputs": asked.structured_outputs is not None,
        "modalities": any(each != "text" for each in asked.modalities or ()),
        "logit_bias": bool(asked.logit_bias),
        "echo": bool(asked.echo),
        "suffix": bool(asked.suffix),
        "best_of": asked.best_of is not None and asked.best_of != (asked.n or 1),
        "top_logprobs": bool(asked.top_logprobs),
        "logprobs": not chat and type(asked.logprobs) is int and asked.logprobs > 1,
    }
    for name, given in unsupported.items():
        if given:
            what = "more than the chosen token's" if "logprobs" in name else "this"
            raise BadRequest(f"{name}: {what} is not supported by this engine: leave it out", name)


def _sampling(asked: _Request, seed: int) -> Sampling:
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return Sampling(
        temperature=given(asked.temperature, 1.0),
        top_p=given(asked.top_p, 1.0),
        top_k=max(0, asked.top_k or 0),
        min_p=given(asked.min_p, 0.0),
        presence_penalty=given(asked.presence_penalty, 0.0),
        frequency_penalty=given(asked.frequency_penalty, 0.0),
        repetition_penalty=given(asked.repetition_penalty, 1.0),
        seed=seed % (1 << 31),
        ignore_eos=bool(asked.ignore_eos),
        min_tokens=asked.min_tokens or 0,
        logprobs=asked.logprobs is not None and asked.logprobs is not False,
    )


def _stops(asked: _Request) -> list[str]:
    stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    if len(stops) > MOST_STOPS or not all(stops):
        raise BadRequest(f"stop: give up to {MOST_STOPS} texts, none of them empty", "stop")
    return stops


def _messages(asked: _Request) -> list[dict[str, Any]]:
    if not asked.messages:
        raise BadRequest('messages: give at least one, such as {"role": "user", "content": "Hello"}', "messages")
    for message in asked.messages:
        if message.tool_calls or message.function_call is not None or message.role in {"tool", "function"}:
            text = "messages: calls of tools and their results are not supported by this engine: leave them out"
            raise BadRequest(text, "messages")
    return [
        {"role": message.role, "content": _text(message.content)}
        | ({"name": message.name} if message.name is not None else {})
        for message in asked.messages
    ]


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f"messages: a part of type {part.get('type')!r}: this model reads text only", "messages")
    return "".join(part["text"] for part in content)


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST_TOKENS


def _prompts(asked: _Request) -> Iterator[str | list[int]]:
    prompt = asked.prompt
    if prompt is None or prompt in ("", []):
        raise BadRequest("prompt: give a text, token ids, or a list of either", "prompt")
    for each in [prompt] if isinstance(prompt, str) or type(prompt[0]) is int else prompt:
        if not isinstance(each, str) and not (isinstance(each, list) and all(map(_is_token, each))):
            raise BadRequest("prompt: give a text, token ids, or a list of either", "prompt")
        yield each
