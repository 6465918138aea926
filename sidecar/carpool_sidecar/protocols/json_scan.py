"""JSON taken apart without being converted: every number keeps its digits, every string its escapes.

msgspec validates the grammar (``Raw`` values included) at about 1.5 GB/s; this module adds what it leaves open: UTF-8,
depth, duplicate members, and the outline of a value (nesting, sizes, kinds of leaves) by a few passes in C.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

# numpy stops at 64 dimensions; nothing served is deeper, and recursive parsers behind us fail at about 1,000.
MAX_DEPTH = 64
WHITESPACE = b" \t\r\n"

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
# Splits into text, string, text, ..., text.
STRING_PARTS = re.compile(rb"(" + STRING.pattern + rb")", re.DOTALL)
_KEY = re.compile(rb'[ \t\r\n]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_NEXT = re.compile(rb"[ \t\r\n]*[,}]")
_OFFSET = re.compile(r"\(byte (\d+)\)")
_NOT_A_NUMBER = re.compile(rb"-?(NaN|Infinity|nan|inf)")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])
_TYPES = {b"{": "an object", b"[": "an array", b'"': "a string", b"t": "a boolean", b"f": "a boolean", b"n": "null"}


class Malformed(ValueError):  # noqa: N818 - reads as the sentence it starts
    """Not JSON as RFC 8259 has it, or contradicting itself. The text says where and what."""


class Surrogates(Malformed):
    r"""Valid but for a surrogate escape (``\ud800``) without its other half, which many servers refuse."""


def kind(value: bytes) -> str:
    """Name the type of a JSON value for an error message: ``an object``, ``a number``, ..."""
    return _TYPES.get(value[:1], "a number")


def check_text(text: bytes, where: str) -> None:
    """Refuse what is not UTF-8, or nests deeper than ``MAX_DEPTH``. O(n) in C; the grammar is checked by decoding."""
    if not text.isascii():
        _check_utf8(text, where)
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and too_deep(text):
        raise Malformed(f"{where}: JSON nested deeper than {MAX_DEPTH} levels")


def _check_utf8(text: bytes, where: str) -> None:
    if text.startswith(b"\xef\xbb\xbf"):
        raise Malformed(f"{where}: JSON starts with a byte order mark; send UTF-8 without one")
    if text.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Malformed(f"{where}: JSON is UTF-16; send UTF-8")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"{where}: JSON is not UTF-8: {error.reason} (byte {error.start})") from None


def too_deep(text: bytes) -> bool:
    """Whether brackets nest deeper than ``MAX_DEPTH``: each pass takes away the innermost level."""
    brackets = STRING.sub(b"", text).translate(_SQUARE, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        outer = brackets.replace(b"[]", b"")
        if len(outer) == len(brackets):
            return False  # all gone, or unbalanced, which the decoder explains better
        brackets = outer
    return bool(brackets)


def members(text: bytes, where: str) -> dict[str, bytes]:
    """Take an object apart: its members, values verbatim, in order; each name may come once."""
    try:
        fields = {name: bytes(value) for name, value in _object.decode(text).items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _explained(text, where, error, _object) from None
    duplicate = _duplicate(text, fields)
    if duplicate is not None:
        raise Malformed(f'{where}: member "{duplicate}" comes twice')
    return fields


def elements(text: bytes, where: str) -> list[msgspec.Raw]:
    """Take an array apart: its elements, verbatim."""
    try:
        return _array.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _explained(text, where, error, _array) from None


def string(value: bytes, where: str) -> str:
    """Decode a JSON value that has to be a string."""
    try:
        return msgspec.json.decode(value, type=str)
    except msgspec.ValidationError:
        raise Malformed(f"{where}: expected a string, got {kind(value)}") from None


def without_arrays(value: bytes) -> bool:
    """Whether no array is anywhere in a JSON value."""
    return b"[" not in value or b"[" not in STRING.sub(b"", value)


def _duplicate(text: bytes, fields: dict[str, bytes]) -> str | None:
    """Find the first name that comes twice. ``fields`` is what the decoder made of ``text``, where the last value wins.

    Without duplicates the decoded members are those in the text, one after the other: so each name and value must stand
    where the walk arrives, and the walk must end at the closing brace.
    """
    expected = iter(fields.items())
    at = text.index(b"{") + 1
    while key := _KEY.match(text, at):  # no name follows the closing brace
        name, value = next(expected, ("", b""))
        after = _NEXT.match(text, key.end() + len(value)) if text.startswith(value, key.end()) else None
        if after is None or (key[1] != name.encode() and string(b'"%b"' % key[1], "") != name):
            return key[1].decode()
        at = after.end()
    return None


def _explained(text: bytes, where: str, error: Exception, decoder: msgspec.json.Decoder[Any]) -> Malformed:
    """Say what the decoder's error means to whoever sent ``text``."""
    if isinstance(error, RecursionError):
        return Malformed(f"{where}: JSON nested deeper than {MAX_DEPTH} levels")
    if isinstance(error, msgspec.ValidationError):
        wanted = "an object" if decoder is _object else "an array"
        return Malformed(f"{where}: expected {wanted}, got {kind(text.lstrip(WHITESPACE))}")
    if not text.strip(WHITESPACE):
        return Malformed(f"{where}: JSON is empty")
    blanked = _SURROGATE.sub(rb"\\u0020", text)  # moves no byte, and is never sent
    if blanked != text:
        try:
            decoder.decode(blanked)
        except (msgspec.DecodeError, RecursionError):
            pass
        else:
            return Surrogates(f"{where}: JSON has a surrogate escape without its other half")
    message = str(error)
    offset = _OFFSET.search(message)
    if offset is not None:
        literal = _NOT_A_NUMBER.match(text, max(int(offset[1]) - 1, 0)) or _NOT_A_NUMBER.match(text, int(offset[1]))
        if literal is not None:
            return Malformed(f"{where}: JSON has no {literal[0].decode()} (byte {literal.start()})")
        return Malformed(f"{where}: {message}")
    return Malformed(f"{where}: JSON ends before it is complete")
