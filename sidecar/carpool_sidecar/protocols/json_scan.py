"""Splits JSON without converting it: every number keeps its digits, every string its escapes.

msgspec validates the grammar (``Raw`` values included) at about 1.5 GB/s; this module adds what it does not check:
UTF-8, duplicate members, limits, and the outline of a value (nesting, sizes, kinds of leaves), in a few passes in C.
Time and memory are linear in the text, with small factors: no object is made for each element of a tensor.
"""

from __future__ import annotations

import re
from array import array
from functools import lru_cache
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import msgspec

from carpool_sidecar.protocols.limits import FREE, setting

if TYPE_CHECKING:
    from carpool_sidecar.protocols.limits import Limits

WHITESPACE: Final = b" \t\r\n"

_KEY = re.compile(rb'[ \t\r\n]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_NEXT = re.compile(rb"[ \t\r\n]*[,}]")
_CLOSING = ord("}")
_OFFSET = re.compile(r"\(byte (\d+)\)")
_NOT_A_NUMBER = re.compile(rb"-?(NaN|Infinity|nan|inf)")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_NOT_COUNTED = bytes(set(range(256)) - set(b'"\\,[{'))
_STEPS = bytes.maketrans(b"[]", b"\x01\xff")
"""As signed bytes: one level up, one level down."""

_NO_MEMBER = ("", msgspec.Raw(b""))
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array: Final = msgspec.json.Decoder(list[msgspec.Raw])
_any = msgspec.json.Decoder(msgspec.Raw)
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_TYPES = {b"{": "an object", b"[": "an array", b'"': "a string", b"t": "a boolean", b"f": "a boolean", b"n": "null"}


class Malformed(ValueError):  # noqa: N818 - reads as the sentence it starts
    """Not JSON by RFC 8259, or ambiguous. The text says where and what.

    ``reason`` is the code under which a request with it is forwarded alone.
    """

    reason: ClassVar[str] = "malformed"


class Surrogates(Malformed):
    r"""Valid except for a surrogate escape (``\ud800``) without its other half, which many servers refuse."""

    reason: ClassVar[str] = "surrogates"


class Beyond(Malformed):
    """Larger than a limit allows, but perhaps valid."""

    reason: ClassVar[str] = "limits"

    def __init__(self, where: str, name: str, limits: Limits, got: int | None = None) -> None:
        limit = getattr(limits, name)
        super().__init__(f"{where}: {f'over {limit}' if got is None else got}; {setting(name)} is {limit}")


def kind(value: bytes) -> str:
    """Name the type of a JSON value for an explanation: ``an object``, ``a number``, ..."""
    return _TYPES.get(value[:1], "a number")


def check_size(size: int, where: str, name: str, limits: Limits) -> None:
    """Raise ``Beyond`` for a text of more bytes than the limit of that name allows."""
    if size > getattr(limits, name):
        raise Beyond(where, name, limits, size)


def check(text: bytes, where: str, limits: Limits) -> None:
    """Raise ``Malformed`` if the text is not UTF-8, and ``Beyond`` if it would take too long or nests too deep.

    This takes a few passes in C and comes first. Decoding checks the grammar later.
    """
    if not text.isascii():
        check_utf8(text, where)
    # One pass: twice as fast as counting one bracket after the other.
    arrays = len(text) - len(text.translate(None, b"[{")) if len(text) <= FREE else _count(text, where, limits)
    if arrays > limits.max_depth and _deeper(text, limits.max_depth):
        raise Beyond(where, "max_depth", limits)


def _count(text: bytes, where: str, limits: Limits) -> int:
    """Check the counts in a text against the limits; return the number of arrays and objects."""
    counted = text.translate(None, _NOT_COUNTED)
    arrays = counted.count(b"[") + counted.count(b"{")
    for name, got in (
        ("max_strings", counted.count(b'"') // 2),
        ("max_escapes", counted.count(b"\\")),
        ("max_arrays", arrays),
        ("max_elements", counted.count(b",")),
    ):
        if got > getattr(limits, name):
            raise Beyond(where, name, limits, got)
    return arrays


def check_utf8(text: bytes, where: str) -> None:
    """Raise ``Malformed`` if the text is not UTF-8 or begins with a byte order mark. Not needed for ASCII."""
    if text.startswith(b"\xef\xbb\xbf"):
        raise Malformed(f"{where}: JSON starts with a byte order mark")
    if text.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Malformed(f"{where}: JSON is UTF-16")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"{where}: JSON is not UTF-8: {error.reason} (byte {error.start})") from None


def parts(text: bytes) -> list[bytes]:
    """Split valid JSON into text, string, text, ..., text: strings without their quotes, and equal only if they are.

    In escapes, two bytes stand for quotes and backslashes that no JSON has.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"\x01\x01").replace(b'\\"', b"\x02\x02")
    return text.split(b'"')


def outside(text: bytes) -> bytes:
    """Return a JSON text with an ``s`` in place of each string."""
    return b"s".join(parts(text)[::2])


def _deeper(text: bytes, depth: int) -> bool:
    """Whether brackets nest deeper than ``depth``.

    Brackets inside strings are only skipped if they would make a difference. A caller can hide depth with them on
    purpose; the server then refuses the request, like any other bad one.
    """
    brackets = text.translate(_SQUARE, _NOT_BRACKETS)
    if _depth(brackets) <= depth:
        return False
    return b'"' not in text or _depth(outside(text).translate(_SQUARE, _NOT_BRACKETS)) > depth


def _depth(brackets: bytes) -> int:
    """Count the levels of ``[[][]]``.

    A pass removes the innermost level. If a pass does not halve the rest, there would be too many passes.
    """
    levels = 0
    while brackets:
        outer = brackets.replace(b"[]", b"")
        if 2 * len(outer) > len(brackets):
            return levels + max(accumulate(array("b", brackets.translate(_STEPS))), default=0)
        brackets = outer
        levels += 1
    return levels


Span: TypeAlias = tuple[int, int]
"""The position of a value in a text: its first byte, and the one after its last."""


def cut(text: bytes, span: Span) -> bytes:
    """Return the value at a span."""
    # not `text[slice(*span)]`: mypyc takes that slice for an index
    start, stop = span
    return text[start:stop]


def members(text: bytes, where: str, limits: Limits, span: Span | None = None) -> dict[str, Span]:
    """Split an object: return the spans of its members' values in ``text``, in order; each name may come once."""
    fields = _decoded(_object, text, where, span)
    if len(fields) > limits.max_keys:
        raise Beyond(where, "max_keys", limits, len(fields))
    return _spans(text, 0 if span is None else span[0], fields, where)[0]


def objects(text: bytes, where: str, limits: Limits, span: Span) -> list[dict[str, Span]]:
    """Split an array of objects, each as ``members`` does. Stops at the first element that is no object."""
    most = limits.max_tensors
    if span[1] - span[0] <= 3 * most:  # {},
        found = _decoded(_objects, text, where, span)
    else:
        found = _at_most(most, text, where, span, of_objects=True)
        if found is None:
            raise Beyond(where, "max_tensors", limits)
    if len(found) > most:
        raise Beyond(where, "max_tensors", limits, len(found))
    keys = sum(map(len, found))
    if keys > limits.max_keys:
        raise Beyond(where, "max_keys", limits, keys)
    at, spans = span[0], list[dict[str, Span]]()
    for index, fields in enumerate(found):
        one, at = _spans(text, at, fields, f"{where}[{index}]")
        spans.append(one)
    return spans


def elements(text: bytes, where: str, span: Span, most: int) -> list[msgspec.Raw] | None:
    """Split an array: return its elements, verbatim; None if there are far more than ``most``."""
    start, stop = span
    if stop - start > 2 * most:  # 1,
        return _at_most(_rounded(most), text, where, span)
    try:
        return _array.decode(text[start:stop] if stop - start <= FREE else memoryview(text)[start:stop])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _explained(text, where, error, span) from None


def prepare(limits: Limits) -> None:
    """Create the decoders that take milliseconds to make, before the first request needs them."""
    _bounded(limits.max_tensors, of_objects=True)
    _bounded(_rounded(limits.max_rows))


def string(value: bytes, where: str) -> str:
    """Decode a JSON value that must be a string."""
    try:
        return msgspec.json.decode(value, type=str)
    except msgspec.DecodeError:
        raise Malformed(f"{where}: expected a string, got {kind(value)}") from None


def string_text(value: bytes, where: str) -> bytes:
    """Return the unchanged text of a JSON value that must be a string."""
    if not value.startswith(b'"'):
        raise Malformed(f"{where}: expected a string, got {kind(value)}")
    return value


def repeats(array: bytes, unit: bytes, count: int) -> bool:
    """Whether an array, without spaces, has ``count`` equal elements; at least one."""
    # The size first: a long one times their number may be gigabytes.
    return len(array) == count * (len(unit) + 1) + 1 and array == b"[%b]" % b",".join([unit] * count)


def without_arrays(value: bytes) -> bool:
    """Whether a JSON value contains no array."""
    return b"[" not in value or b"[" not in outside(value)


def _rounded(most: int) -> int:
    """Round a largest number of elements up, so that few decoders are needed."""
    return max(1024, 1 << (most - 1).bit_length())


@lru_cache(8)
def _bounded(most: int, *, of_objects: bool = False) -> msgspec.json.Decoder[Any]:
    """Make a decoder of an array that stops at the element after ``most``.

    msgspec would check ``max_length`` only after making all elements.
    """
    element: Any = dict[str, msgspec.Raw] if of_objects else msgspec.Raw
    fields = [(f"at{index}", element, msgspec.UNSET) for index in range(most)]
    return msgspec.json.Decoder(msgspec.defstruct("AtMost", fields, array_like=True, forbid_unknown_fields=True))


def _at_most(most: int, text: bytes, where: str, span: Span, *, of_objects: bool = False) -> list[Any] | None:
    decoder = _bounded(most, of_objects=of_objects)
    try:
        found = decoder.decode(memoryview(text)[span[0] : span[1]])
    except msgspec.ValidationError as unfit:
        if "at most length" in str(unfit):
            return None
        raise _explained(text, where, unfit, span) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _explained(text, where, error, span) from None
    return list(takewhile(lambda element: element is not msgspec.UNSET, msgspec.structs.astuple(found)))


def _decoded(decoder: msgspec.json.Decoder[Any], text: bytes, where: str, span: Span | None) -> Any:  # noqa: ANN401 - of the decoder
    try:
        if span is None:
            return decoder.decode(text)
        start, stop = span
        return decoder.decode(text[start:stop] if stop - start <= FREE else memoryview(text)[start:stop])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _explained(text, where, error, span) from None


def _spans(text: bytes, at: int, fields: dict[str, msgspec.Raw], where: str) -> tuple[dict[str, Span], int]:
    """Return the spans of the next object's members, and its end; ``Malformed`` if a name comes twice.

    ``fields`` are its decoded members, in which the last value of a name wins. Without duplicates the decoded
    members are those in the text, in the same order: so each name and value must be where the walk arrives, and
    the walk must end at the closing brace.
    """
    expected = iter(fields.items())
    spans: dict[str, Span] = {}
    at = text.index(b"{", at) + 1
    while key := _KEY.match(text, at):
        name, raw = next(expected, _NO_MEMBER)
        value, start = bytes(raw), key.end()
        after = _NEXT.match(text, start + len(value)) if text.startswith(value, start) else None
        if after is None or (key[1] != name.encode() and string(b'"%b"' % key[1], "") != name):
            raise Malformed(f'{where}: member "{key[1][:40].decode(errors="replace")}" comes twice')
        spans[name] = (start, start + len(value))
        at = after.end()
        if text[at - 1] == _CLOSING:
            return spans, at
    return spans, text.index(b"}", at) + 1


def _explained(text: bytes, where: str, error: Exception, span: Span | None) -> Malformed:
    """Return the decoder's error in plain words."""
    if isinstance(error, RecursionError):
        return Malformed(f"{where}: JSON is nested too deep to be read")
    if isinstance(error, msgspec.ValidationError):
        return Malformed(f"{where}: {_lowered(str(error))}")
    part = text if span is None else text[span[0] : span[1]]
    if not part.strip(WHITESPACE):
        return Malformed(f"{where}: JSON is empty")
    blanked = _SURROGATE.sub(rb"\\u0020", part)  # moves no byte, and is never sent
    if blanked != part:
        try:
            _any.decode(blanked)
        except (msgspec.DecodeError, RecursionError):
            pass
        else:
            return Surrogates(f"{where}: JSON has a surrogate escape without its other half")
    message = str(error)
    offset = _OFFSET.search(message)
    if offset is not None:
        literal = _NOT_A_NUMBER.match(part, max(int(offset[1]) - 1, 0)) or _NOT_A_NUMBER.match(part, int(offset[1]))
        if literal is not None:
            return Malformed(f"{where}: JSON has no {literal[0].decode()} (byte {literal.start()})")
        return Malformed(f"{where}: {message}")
    return Malformed(f"{where}: JSON ends before it is complete")


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:].replace("`", "")
