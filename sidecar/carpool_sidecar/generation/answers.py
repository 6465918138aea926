"""Reads an answer's bytes as they pass: which events carry tokens, and the counts and reason at the end."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

from msgspec import MsgspecError, Raw, Struct, field
from msgspec.json import decode

from carpool_sidecar.generation.requests import Api
from carpool_sidecar.http1.messages import find

if TYPE_CHECKING:
    from carpool_sidecar.http1.messages import Headers

KEPT = 4096
"""Bytes at the beginning and at the end of an answer that are kept: counts and the reason of the end stand there.

llama.cpp writes a whole answer's reason before its text; Anthropic's API counts a prompt in a stream's first event.
"""

LONGEST_WHOLE = 262_144
"""Bytes of an answer that comes whole, up to which the lengths of its choices are compared."""

LONGEST_EVENT = 65_536
"""Bytes of an event that is read; longer ones repeat a whole answer."""

_BLANK = re.compile(rb"\r?\n\r?\n")
# A member that is text and not empty. Events that only open or end an answer have none.
_TEXT = re.compile(
    rb'"(?:content|text|text_output|reasoning_content|reasoning|arguments|thinking|partial_json)"\s*:\s*"[^"]'
)
_DELTA = re.compile(rb'"delta"\s*:\s*"[^"]')

# ``meta_info`` is SGLang's own.
_USAGE = re.compile(rb'(?<!\\)"(usage|timings|meta_info)"\s*:\s*(?=\{)')
# A number cut by the end of the kept bytes is not used.
_COUNT = re.compile(
    rb'(?<!\\)"(tokens_evaluated|tokens_predicted|generated_tokens|input_length)"\s*:\s*(\d{1,9})(?=[\s,}\]])'
)
_REASON = re.compile(rb'(?<!\\)"(?:finish_reason|stop_type)"\s*:\s*(?:\{\s*"type"\s*:\s*)?"([a-z_]{1,32})"')
# Of Anthropic's API; vLLM's chats have the stop string in a member of this name.
_STOPPED = re.compile(rb'(?<!\\)"stop_reason"\s*:\s*"(end_turn|max_tokens|stop_sequence|tool_use|pause_turn|refusal)"')
_STATUS = re.compile(rb'(?<!\\)"status"\s*:\s*"(incomplete|failed|completed)"')
_ERROR = re.compile(
    rb'(?:^|\n)(?:error:\s*\{|data:\s*\{\s*(?:"error"\s*:\s*[{"]|"type"\s*:\s*"(?:error|response\.failed)"))'
)
_PROMPT = ("prompt_tokens", "input_tokens", "tokens_evaluated", "input_length", "prompt_n")
_OUTPUT = ("completion_tokens", "output_tokens", "tokens_predicted", "generated_tokens", "predicted_n")
# Parts of a prompt that these counts leave out: they were in the engine's cache.
_CACHED = {"input_tokens": ("cache_read_input_tokens", "cache_creation_input_tokens"), "prompt_n": ("cache_n",)}

STOP, LENGTH, ERROR = "stop", "length", "error"
REASONS = {
    "stop": STOP, "eos": STOP, "eos_token": STOP, "stop_sequence": STOP, "word": STOP, "tool_calls": STOP,
    "end_turn": STOP, "tool_use": STOP, "pause_turn": STOP, "completed": STOP,
    "length": LENGTH, "limit": LENGTH, "max_tokens": LENGTH, "incomplete": LENGTH,
    "error": ERROR, "failed": ERROR,
}  # fmt: skip
"""Why answers end, by the engines' names. ``ERROR``: they had begun with success, and failed."""


class Ending(NamedTuple):
    """The engine's report at the end; None and "" for missing parts."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    reason: str = ""


class Message(Struct):
    """The parts of a chat's message that the model wrote."""

    content: Raw = Raw()
    reasoning: Raw = Raw()
    reasoning_content: Raw = Raw()
    tool_calls: Raw = Raw()


class Choice(Struct):
    """One choice of an answer that came whole: a completion's text, or a chat's message."""

    text: Raw = Raw()
    message: Message = field(default_factory=Message)

    @property
    def size(self) -> int:
        """Bytes that the model wrote."""
        message = self.message
        parts = (self.text, message.content, message.reasoning, message.reasoning_content, message.tool_calls)
        return sum(len(part) for part in parts)


class Choices(Struct):
    """An answer that came whole, of OpenAI's API."""

    choices: list[Choice]


class Ends:
    """The first and the last bytes of an answer."""

    __slots__ = ("_head", "_tail", "size")

    def __init__(self) -> None:
        self._head = b""
        self._tail = b""
        self.size = 0
        """Bytes of the whole answer so far."""

    def add(self, chunk: bytes) -> None:
        """Take the next piece."""
        if self.size < KEPT:
            self._head += chunk[: KEPT - self.size]
        self.size += len(chunk)
        self._tail = (self._tail + chunk[-KEPT:])[-KEPT:]

    def text(self) -> bytes:
        """Return the kept bytes: all of a short answer; of a long one both ends, with a zero between them."""
        if self.size <= KEPT:
            return self._tail
        if self.size <= 2 * KEPT:
            return self._head + self._tail[2 * KEPT - self.size :]
        return self._head + b"\0" + self._tail


class Events:
    """Counts the events of a stream that carry tokens. A piece may end anywhere.

    ``several``: there are several choices, so that their ends are counted as well.
    """

    __slots__ = ("_follows", "_rest", "_several", "_text", "ends")

    def __init__(self, api: Api, *, several: bool = False) -> None:
        self._several = several
        self.ends = 0
        """Choices that have ended."""
        self._follows = api is Api.OPENAI
        self._text = _DELTA if api is Api.RESPONSES else _TEXT
        self._rest = b""

    def begins(self, chunk: bytes) -> bool:
        """Whether a piece without text shows that the engine has computed the prompt.

        Events of other APIs, and llama.cpp's on its progress, come before.
        """
        has_event = chunk.startswith(b"data:") or b"\ndata:" in chunk
        return self._follows and has_event and b'"prompt_progress"' not in chunk

    def feed(self, chunk: bytes) -> int:
        """Take the next piece; return how many events with a token ended in it."""
        if not self._rest and chunk.endswith(b"\n\n") and chunk.find(b"\n\n") == len(chunk) - 2:
            if self._several:
                self.ends += len(_REASON.findall(chunk))
            return self._text.search(chunk) is not None  # one event, as engines write them
        *events, rest = _BLANK.split(self._rest + chunk)
        # Of an event that is too long each 64 KiB are one event here: at most one token too many.
        self._rest = rest if len(rest) <= LONGEST_EVENT else b":"
        if self._several:
            self.ends += sum(len(_REASON.findall(event)) for event in events)
        return sum(self._text.search(event) is not None for event in events)


def longest(body: bytes | bytearray, choices: int) -> float:
    """Return the longest choice of a whole answer over the mean of its choices; 1 where that is not visible."""
    try:
        sizes = [choice.size for choice in decode(body, type=Choices).choices]
    except (MsgspecError, ValueError, RecursionError):
        return 1.0
    # An answer with fewer choices than were computed (`best_of`) does not show the longest.
    total = sum(sizes)
    return max(sizes) * choices / total if len(sizes) == choices and total > 0 else 1.0


def ending(text: bytes, headers: Headers = ()) -> Ending:
    """Read the ends of an answer, a stream's or a whole one's, and TGI's headers."""
    counts: dict[str, int] = {}
    for name, header in (("prompt_tokens", b"x-prompt-tokens"), ("output_tokens", b"x-generated-tokens")):
        value = find(headers, header)
        if value is not None and value.isdigit():
            counts[name] = int(value[:9])
    counts |= {name.decode(): int(value) for name, value in _COUNT.findall(text)}
    counts |= _objects(text)
    return Ending(_prompt(counts), _first(counts, _OUTPUT), _reason(text))


def _objects(text: bytes) -> dict[str, int]:
    """Return the counts of the last ``usage``, and the summed ``timings`` of all choices."""
    counts: dict[str, int] = {}
    output = 0
    for found in _USAGE.finditer(text):
        members = _members(text[found.end() :])
        counts |= members
        # llama.cpp has timings at the end of each choice; on demand with each token, too.
        event = text[text.rfind(b"\n\n", 0, found.start()) + 1 : found.start()]
        if found[1] == b"timings" and _REASON.search(event):
            output += members.get("predicted_n", 0)
    return counts | ({"predicted_n": output} if output else {})


def _reason(text: bytes) -> str:
    if _ERROR.search(text):
        return ERROR
    for pattern in (_REASON, _STOPPED):
        if found := pattern.findall(text):
            return REASONS.get(found[-1].decode(), "other")
    # An answer's status is that of its parts, unless it is incomplete or failed.
    statuses = set(_STATUS.findall(text))
    return next((REASONS[each] for each in ("failed", "incomplete", "completed") if each.encode() in statuses), "")


def _prompt(counts: dict[str, int]) -> int | None:
    name = next((name for name in _PROMPT if name in counts), None)
    return None if name is None else counts[name] + sum(counts.get(part, 0) for part in _CACHED.get(name, ()))


def _members(text: bytes) -> dict[str, int]:
    """Return the whole numbers of the JSON object that begins here; nothing if it is not complete."""
    try:
        found, _ = json.JSONDecoder().raw_decode(text.decode("utf-8", "replace"))
    except ValueError:
        return {}
    return {name: value for name, value in found.items() if type(value) is int and value >= 0}


def _first(counts: dict[str, int], names: tuple[str, ...]) -> int | None:
    return next((counts[name] for name in names if name in counts), None)
