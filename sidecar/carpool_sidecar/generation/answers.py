"""What the bytes of an answer show as they pass: which events carry tokens, and what is said at the end."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

from carpool_sidecar.generation.requests import Api
from carpool_sidecar.http1.messages import find

if TYPE_CHECKING:
    from carpool_sidecar.http1.messages import Headers

KEPT = 4096
"""Bytes of the end of an answer that are kept: counts and the reason of the end stand there."""

LONGEST_EVENT = 65_536
"""Bytes of an event that is read; longer ones repeat a whole answer."""

_BLANK = re.compile(rb"\r?\n\r?\n")
# A member that is text and not empty. Events that only open or end an answer have none.
_TEXT = re.compile(rb'"(?:content|text|text_output|reasoning_content|reasoning|arguments)"\s*:\s*"[^"]')
_DELTA = re.compile(rb'"delta"\s*:\s*"[^"]')

_USAGE = re.compile(rb'(?<!\\)"(?:usage|timings)"\s*:\s*(?=\{)')
_COUNT = re.compile(rb'(?<!\\)"(tokens_evaluated|tokens_predicted|generated_tokens|input_length)"\s*:\s*(\d{1,9})')
_REASON = re.compile(rb'(?<!\\)"(?:finish_reason|stop_type)"\s*:\s*"([a-z_]{1,32})"|"status"\s*:\s*"(incomplete)"')
_PROMPT = ("prompt_tokens", "input_tokens", "tokens_evaluated", "input_length", "prompt_n")
_OUTPUT = ("completion_tokens", "output_tokens", "tokens_predicted", "generated_tokens", "predicted_n")

STOP, LENGTH = "stop", "length"
REASONS = {
    "stop": STOP, "eos": STOP, "eos_token": STOP, "stop_sequence": STOP, "word": STOP, "tool_calls": STOP,
    "length": LENGTH, "limit": LENGTH, "max_tokens": LENGTH, "incomplete": LENGTH,
}  # fmt: skip
"""Why answers end, by what engines call it."""


class Ending(NamedTuple):
    """What an engine says at the end; None and "" for what it doesn't say."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    reason: str = ""


class Events:
    """Counts the events of a stream that carry tokens. A piece may end anywhere."""

    __slots__ = ("_rest", "_text", "tail")

    def __init__(self, api: Api) -> None:
        self._text = _DELTA if api is Api.RESPONSES else _TEXT
        self._rest = b""
        self.tail = b""
        """The last bytes."""

    def feed(self, chunk: bytes) -> int:
        """Take the next piece; return how many events with a token ended in it."""
        self.tail = (self.tail + chunk)[-KEPT:]
        if not self._rest and chunk.endswith(b"\n\n") and chunk.find(b"\n\n") == len(chunk) - 2:
            return self._text.search(chunk) is not None  # one event, as engines write them
        *events, rest = _BLANK.split(self._rest + chunk)
        # Of an event that is too long each 64 KiB are one event here: at most one token too many.
        self._rest = rest if len(rest) <= LONGEST_EVENT else b":"
        return sum(self._text.search(event) is not None for event in events)


def ending(tail: bytes, headers: Headers = ()) -> Ending:
    """Read the end of an answer, a stream's or a whole one's, and TGI's headers."""
    counts: dict[str, int] = {}
    for name, header in (("prompt_tokens", b"x-prompt-tokens"), ("output_tokens", b"x-generated-tokens")):
        value = find(headers, header)
        if value is not None and value.isdigit():
            counts[name] = int(value[:9])
    counts |= {name.decode(): int(value) for name, value in _COUNT.findall(tail)}
    for found in _USAGE.finditer(tail):
        counts |= _members(tail[found.end() :])
    reasons = [one or other for one, other in _REASON.findall(tail)]
    reason = REASONS.get(reasons[-1].decode(), "other") if reasons else ""
    return Ending(_first(counts, _PROMPT), _first(counts, _OUTPUT), reason)


def _members(text: bytes) -> dict[str, int]:
    """Return the whole numbers of the JSON object that begins here; nothing if it is not whole."""
    try:
        found, _ = json.JSONDecoder().raw_decode(text.decode("utf-8", "replace"))
    except ValueError:
        return {}
    return {name: value for name, value in found.items() if type(value) is int and value >= 0}


def _first(counts: dict[str, int], names: tuple[str, ...]) -> int | None:
    return next((counts[name] for name in names if name in counts), None)
