"""Requests to language models: their parameters are found near the ends of the body, which is never fully parsed."""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from msgspec import MsgspecError, Raw, Struct, defstruct, json
from msgspec.structs import astuple

if TYPE_CHECKING:
    from carpool_sidecar.http1.messages import Buffer

ENDS = 4096
"""Bytes at the beginning and at the end of a body that are searched for parameters; prompts are between them."""

MOST_EMBEDDED = 64
"""Most images, or the like, whose bytes are not counted as text."""

MOST_CHOICES = 128
"""Answers to one request; OpenAI's own limit."""

LONGEST_NUMBER = 32
"""Bytes of a number that is read."""

PIECE = 65_536
"""Bytes in which one is looked for at a time."""


class Api(Enum):
    """The protocol, which defines the form of events, counts and errors."""

    OPENAI = "openai"
    """``/v1/chat/completions``, ``/v1/completions``."""
    RESPONSES = "responses"
    """``/v1/responses``."""
    MESSAGES = "messages"
    """Anthropic's ``/v1/messages``, which vLLM and llama.cpp answer as well."""
    TGI = "tgi"
    """``/generate``, ``/generate_stream``; the former is SGLang's, too, where ``stream`` says how it answers."""
    LLAMA = "llama"
    """llama.cpp's ``/completion``."""
    TRITON = "triton"
    """``/v2/models/m/generate``, ``.../generate_stream``."""


class Endpoint(NamedTuple):
    """The endpoint of a request. ``streams``, ``model``: given by the path; None: by the body."""

    api: Api
    streams: bool | None = None
    model: str = ""


class Asked(NamedTuple):
    """The parameters of a request.

    ``prompt_bytes``: of the body, without embedded images. ``prompt_tokens``: where the prompt is given as token ids.
    ``flexible``: its caller can wait (OpenAI's ``service_tier: flex``). ``prompts``: in a list of them, and
    ``choices``: answers, ``n`` for each prompt. Each is a sequence of the engine.
    """

    model: str
    streams: bool
    max_tokens: int | None
    prompt_bytes: int
    prompt_tokens: int | None
    flexible: bool
    prompts: int = 1
    choices: int = 1


class Several(Struct):
    """Fields that ask for several answers. They stay unparsed: building a list of 10 MB would take seconds."""

    n: Raw = Raw(b"1")
    best_of: Raw = Raw(b"1")
    prompt: Raw = Raw(b"")


_Prompts = defstruct("_Prompts", [(f"prompt_{index}", Raw, Raw(b"")) for index in range(MOST_CHOICES)], array_like=True)
"""The first prompts of a list, to count them: further ones are skipped. A list of all would take 28 times the body."""

_OPENAI = re.compile(rb"(?:/openai)?(?:/v[0-9])?/(?:chat/completions|completions|(responses))(?:\?.*)?")
_MESSAGES = re.compile(rb"/v1/messages(?:\?.*)?")
_PLAIN = re.compile(rb"/(?:(completion)|generate(_stream)?)(?:\?.*)?")
_TRITON = re.compile(rb"/v2/models/([^/?#]+)(?:/versions/[^/?#]+)?/generate(_stream)?(?:\?.*)?")

# A quote inside a JSON string is escaped. So a name between quotes that are not is a member's, whatever prompts say.
_MEMBERS = re.compile(
    rb'(?<!\\)"(model|stream|service_tier'
    rb"|max_tokens|max_completion_tokens|max_output_tokens|max_new_tokens|n_predict"
    rb')"\s*:\s*("(?:[^"\\]|\\.){0,256}"|true|false|\d{1,9}(?=[\s,}\]]))'
)
_SEVERAL = re.compile(rb'(?<!\\)"(?:(?:n|best_of)"\s*:\s*"?\d|prompt"\s*:\s*\[\s*["\[])')
_LIST = re.compile(rb'\[\s*["\[]')
_IDS = re.compile(rb'(?<!\\)"prompt"\s*:\s*(\[)\s*\d')
_URL, _DATA = b";base64,", b'"data"'
_ENCODED = re.compile(rb'"data"\s*:\s*"(?=[A-Za-z0-9+/_-]{256})')
_LIMITS = (b"max_completion_tokens", b"max_tokens", b"max_output_tokens", b"max_new_tokens", b"n_predict")


def recognise(target: bytes) -> Endpoint | None:
    """Return the endpoint of a ``POST`` target; None if it is not one of a language model."""
    if (found := _OPENAI.fullmatch(target)) is not None:
        return Endpoint(Api.RESPONSES if found[1] else Api.OPENAI)
    if _MESSAGES.fullmatch(target) is not None:
        return Endpoint(Api.MESSAGES)
    if (found := _PLAIN.fullmatch(target)) is not None:
        return Endpoint(Api.LLAMA) if found[1] else Endpoint(Api.TGI, streams=True if found[2] else None)
    if (found := _TRITON.fullmatch(target)) is not None:
        return Endpoint(Api.TRITON, streams=found[2] is not None, model=unquote(found[1].decode("latin-1")))
    return None


def read(endpoint: Endpoint, body: Buffer) -> Asked:
    """Read a request's parameters; those that can't be read count as absent."""
    ends = bytes(body) if len(body) <= 2 * ENDS else bytes(body[:ENDS]) + b"\0" + bytes(body[-ENDS:])
    members: dict[bytes, bytes] = {}
    for name, value in _MEMBERS.findall(ends):
        members.setdefault(name, value)
    limits = (members.get(name, b"") for name in _LIMITS)
    streams = members.get(b"stream") == b"true" if endpoint.streams is None else endpoint.streams
    return Asked(
        endpoint.model or members.get(b"model", b'""')[1:-1].decode("utf-8", "replace"),
        streams,
        next((int(limit) for limit in limits if limit.isdigit()), None),
        _text_bytes(body),
        _token_ids(body, ends),
        members.get(b"service_tier") == b'"flex"',
        *(_several(body, ends) if endpoint.api is Api.OPENAI else (1, 1)),
    )


def _several(body: Buffer, ends: bytes) -> tuple[int, int]:
    """Count prompts and requested answers. Only a parser can decide whether ``n`` is a member of the body itself."""
    if _SEVERAL.search(ends) is None:
        return 1, 1
    try:
        found = json.decode(body, type=Several)
        several = _LIST.match(found.prompt) is not None
        prompts = sum(len(each) > 0 for each in astuple(json.decode(found.prompt, type=_Prompts))) if several else 1
    except (MsgspecError, RecursionError):
        return 1, 1
    each = max(_number(found.n), _number(found.best_of))
    return min(MOST_CHOICES, prompts), min(MOST_CHOICES, prompts * each)


def _number(raw: Raw) -> int:
    """Read a number as engines do, which read 4.0 and "4" as 4; 1 if it is no number."""
    try:
        value = float(bytes(raw).strip(b' "')) if len(raw) <= LONGEST_NUMBER else 1.0
    except ValueError:
        return 1
    return int(min(MOST_CHOICES, value)) if value >= 1 else 1


def _text_bytes(body: Buffer) -> int:
    """Count the bytes of a body without those of images and the like: 500 KB in base64 are no 125,000 tokens."""
    size = len(body)
    if size <= ENDS:
        return size
    whole, at, embedded = bytes(body), 0, 0
    for _ in range(MOST_EMBEDDED):
        begin = _encoded_from(whole, at)
        if begin < 0:
            break
        at = whole.find(b'"', begin)
        if at < 0:
            return begin - embedded
        embedded += at - begin
    return size - embedded


def _encoded_from(whole: bytes, at: int) -> int:
    """Find where the next data in base64 begin, -1 for none.

    They are in URLs, and in the members ``data`` of OpenAI's audio and Anthropic's images. A regular expression would
    take 17 ms a MiB. Pieces are small, so that what is in base64 is not searched: its end is a quote, which is found
    faster.
    """
    while at < len(whole):
        stop = at + PIECE
        url = whole.find(_URL, at, stop)
        if (data := _data_from(whole, at, stop if url < 0 else url)) >= 0:
            return data
        if url >= 0:
            return url + len(_URL)
        at = stop - len(_URL) + 1
    return -1


def _data_from(whole: bytes, at: int, stop: int) -> int:
    for _ in range(MOST_EMBEDDED):
        at = whole.find(_DATA, at, stop)
        if at < 0:
            break
        found = _ENCODED.match(whole, at)
        if found is not None and whole[at - 1 : at] != b"\\":
            return found.end()
        at += len(_DATA)
    return -1


def _token_ids(body: Buffer, ends: bytes) -> int | None:
    """Count the tokens of a prompt that is given as such."""
    found = _IDS.search(ends[:ENDS])
    if found is None:
        return None
    whole = bytes(body)
    stop = whole.find(b"]", found.start(1))
    return whole.count(b",", found.start(1), stop if stop >= 0 else len(whole)) + 1
