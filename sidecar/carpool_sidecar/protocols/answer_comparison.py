"""Whether two answers to the same rows agree: one without batching, and one in a batch.

These must be equal: the outputs, their datatypes, trailing shapes and structure, texts, booleans and integers. Numbers
with a fraction, and 8-bit ones, which are rounded numbers, may differ by a share of the largest number of their row:
in a batch, sums of floats differ in the last bits. NaN equals NaN.

The work is bounded. Equal bytes agree at once; of large rows the same part of both is compared. Nothing here needs
numpy, which the sidecar does not depend on.
"""

from __future__ import annotations

import json
import struct
from math import inf, isfinite, isnan, prod
from operator import sub
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec

from carpool_sidecar.protocols.headers import find

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from carpool_sidecar.protocols.common import Message

ELEMENTS = 16384
"""Most elements compared at a time, over all rows and outputs: 1 ms of binary data, 5 ms of JSON."""

TEXT = 16
"""Most bytes of JSON read for each of them."""

SMALL = 1e-3
"""Share of the largest number ever seen in an output, below which a row's own largest number is too small a scale: a
logit near 0 is a difference of large sums, and 1 % of it is less than their rounding."""

Scales: TypeAlias = dict[str, float]
"""The largest absolute number seen, by output: kept by the caller, and updated here."""

_HEADER_LENGTH = b"inference-header-content-length"
_FLOATS = {"FP16": "e", "FP32": "f", "FP64": "d"}
_ROUNDED = {"INT8": "b", "UINT8": "B"}
_EXACT = {
    "BOOL": "?", "INT16": "h", "UINT16": "H", "INT32": "i", "UINT32": "I", "INT64": "q", "UINT64": "Q",
}  # fmt: skip
_NUMBERS = {int, float}
_CELLS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""``memoryview`` formats by width, to take every n-th element."""


class Difference(NamedTuple):
    """Where two answers differ first. ``row`` counts from 0 among the rows compared."""

    output: str
    row: int
    alone: str
    batched: str

    def __str__(self) -> str:
        return f"output {self.output!r}, row {self.row}: {self.alone} alone, {self.batched} in a batch"


class Tolerance:
    """How much numbers may differ: by a ``share`` (0.01 is 1 %) of the largest number of their row."""

    __slots__ = ("scales", "share")

    def __init__(self, share: float, scales: Scales | None = None) -> None:
        self.share = share
        self.scales: Scales = {} if scales is None else scales

    def of(self, output: str, own: float) -> float:
        """Return the difference allowed between numbers of a row; ``own``: its largest without batching."""
        seen = self.scales[output] = max(self.scales.get(output, 0.0), own)
        return self.share * max(own, SMALL * seen)


class _Output(msgspec.Struct):
    name: str = ""
    datatype: str = ""
    shape: list[int] = []
    parameters: dict[str, Any] = {}
    data: msgspec.Raw = msgspec.Raw(b"")


class _V2(msgspec.Struct):
    outputs: list[_Output] = []


class _Column(NamedTuple):
    """One output: ``data`` is JSON text, or binary where ``is_binary``."""

    datatype: str
    shape: list[int]
    data: memoryview | bytes
    is_binary: bool


def disagreement(
    protocol: str, alone: Message, batched: Message, tolerance: Tolerance, elements: int = ELEMENTS
) -> Difference | None:
    """Compare two answers to the same rows, as a codec assembled them; the first difference, or None.

    At most ``elements`` of each are compared.
    """
    if protocol == "v1":
        return _rows(_v1(alone), _v1(batched), tolerance, elements)
    before, after = _v2(alone), _v2(batched)
    if before.keys() != after.keys():
        return Difference("*", 0, f"outputs {sorted(before)}", f"outputs {sorted(after)}")
    elements = max(elements // max(len(before), 1), 16)
    for name, column in before.items():
        difference = _columns(name, column, after[name], tolerance, elements)
        if difference is not None:
            return difference
    return None


# ------------------------------------------------------------------------------------------------------------ answers


def _v1(answer: Message) -> tuple[str, list[bytes]]:
    """Return the name and the rows, as JSON texts, of a V1 answer."""
    body = b"".join(answer.parts)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        name = "predictions" if "predictions" in fields else "outputs"
        return name, [bytes(row) for row in msgspec.json.decode(fields[name], type=list[msgspec.Raw])]
    except msgspec.DecodeError:  # NaN, which is not JSON and is written all the same
        plain = json.loads(body)
        name = "predictions" if "predictions" in plain else "outputs"
        return name, [json.dumps(row).encode() for row in plain[name]]


def _v2(answer: Message) -> dict[str, _Column]:
    """Return the outputs of a V2 answer by name."""
    body = b"".join(answer.parts)
    length = find(answer.headers, _HEADER_LENGTH)
    end = len(body) if length is None else int(length)
    try:
        outputs = msgspec.json.decode(body[:end], type=_V2).outputs
        texts = [bytes(one.data) for one in outputs]
    except msgspec.DecodeError:
        plain = json.loads(body[:end])["outputs"]
        outputs = [_Output(one["name"], one["datatype"], one["shape"], one.get("parameters", {})) for one in plain]
        texts = [json.dumps(one["data"]).encode() if "data" in one else b"" for one in plain]
    columns = dict[str, _Column]()
    at, tail = 0, memoryview(body)[end:]
    for output, text in zip(outputs, texts, strict=True):
        size = output.parameters.get("binary_data_size")
        if isinstance(size, int):
            data: memoryview | bytes = tail[at : at + size]
            at += size
        else:
            data = text
        columns[output.name] = _Column(output.datatype, output.shape, data, isinstance(size, int))
    return columns


# --------------------------------------------------------------------------------------------------------- comparing


def _rows(
    alone: tuple[str, list[bytes]], batched: tuple[str, list[bytes]], tolerance: Tolerance, elements: int
) -> Difference | None:
    (name, before), (_, after) = alone, batched
    if len(before) != len(after):
        return Difference(name, 0, f"{len(before)} rows", f"{len(after)} rows")
    limit = max(TEXT * elements // max(len(before), 1), 256)
    for row, (one, other) in enumerate(zip(before, after, strict=True)):
        if one != other:
            found = _texts(name, one, other, limit, tolerance)
            if found is not None:
                return Difference(name, row, *found)
    return None


def _columns(name: str, alone: _Column, batched: _Column, tolerance: Tolerance, elements: int) -> Difference | None:
    for one, other in ((alone.datatype, batched.datatype), (alone.shape, batched.shape)):
        if one != other:
            return Difference(name, 0, str(one), str(other))
    if alone.is_binary != batched.is_binary:
        return (
            Difference(name, 0, "binary data", "JSON data")
            if alone.is_binary
            else Difference(name, 0, "JSON data", "binary data")
        )
    if alone.data == batched.data:
        return None
    count, width = alone.shape[0], prod(alone.shape[1:])
    if alone.is_binary:
        return _binary(name, alone, batched, tolerance, elements)
    # JSON data, flat or nested: its leaves in order, from both ends if there are many.
    total = prod(alone.shape)
    try:
        parts = [_ends(bytes(each.data), TEXT * elements) for each in (alone, batched)]
    except _TooLarge:
        return Difference(name, 0, *_unread(len(alone.data), len(batched.data)))
    (head, tail), (other_head, other_tail) = parts
    last = min(len(tail), len(other_tail))
    for start, before, after in ((0, head, other_head), (total - last, _last(tail, last), _last(other_tail, last))):
        at, size = 0, min(len(before), len(after))
        while at < size:
            row = (start + at) // max(width, 1)
            stop = min((row + 1) * max(width, 1) - start, size)
            found = _values(name, before[at:stop], after[at:stop], tolerance, rounded=alone.datatype in _ROUNDED)
            if found is not None:
                return Difference(name, min(row, count - 1), *found)
            at = stop
    return None


def _binary(name: str, alone: _Column, batched: _Column, tolerance: Tolerance, elements: int) -> Difference | None:
    count, width = alone.shape[0], prod(alone.shape[1:])
    before, after = memoryview(alone.data), memoryview(batched.data)
    size = prod(alone.shape)
    cell = len(before) // size if size and len(before) == len(after) else 0
    numbers = {**_FLOATS, **_ROUNDED}.get(alone.datatype)
    if cell not in _CELLS or (numbers is None and alone.datatype != "BF16"):
        # Elements that have to be equal, and are not: find the first, for the sentence.
        at = next(at for at in range(0, len(before) + 1024, 1024) if before[at : at + 1024] != after[at : at + 1024])
        row = min(at // max(len(before) // max(count, 1), 1), count - 1)
        exact = _EXACT.get(alone.datatype)
        if exact is None or not cell:
            return Difference(name, row, *_unread(len(before), len(after)))
        one, other = (_unpacked(exact, bytes(each[at : at + 1024])) for each in (before, after))
        index = next(index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
        return Difference(name, (at // cell + index) // max(width, 1), str(one[index]), str(other[index]))
    step = -(-width // max(elements // count, 16))
    for row in range(count):
        cells = slice(row * width, (row + 1) * width, step | 1)  # an odd step: sizes of layers are even
        picked = [bytes(each.cast(_CELLS[cell])[cells]) for each in (before, after)]
        if picked[0] != picked[1]:
            one, other = (_brain(each) if numbers is None else _unpacked(numbers, each) for each in picked)
            found = _numbers(name, one, other, tolerance)
            if found is not None:
                return Difference(name, row, *found)
    return None


def _unpacked(kind: str, data: bytes) -> tuple[Any, ...]:
    """Read little-endian numbers."""
    return struct.unpack(f"<{len(data) // struct.calcsize(f'<{kind}')}{kind}", data)


def _brain(data: bytes) -> tuple[float, ...]:
    """Read BF16: the upper half of a float32."""
    return _unpacked("f", struct.pack(f"<{len(data) // 2}I", *(half << 16 for half in _unpacked("H", data))))


def _texts(output: str, alone: bytes, batched: bytes, limit: int, tolerance: Tolerance) -> tuple[str, str] | None:
    """Compare two JSON texts that are not equal."""
    if max(len(alone), len(batched)) <= limit:
        return _values(output, _decoded(alone), _decoded(batched), tolerance)
    try:
        (head, tail), (other_head, other_tail) = (_ends(text, limit) for text in (alone, batched))
    except _TooLarge:
        return _unread(len(alone), len(batched))
    # For the parts not read only the size is compared: hidden states may have been padded with their inputs.
    sizes = [f"{text.count(b',') + 1} elements" for text in (alone, batched)]
    if sizes[0] != sizes[1]:
        return sizes[0], sizes[1]
    first, last = min(len(head), len(other_head)), min(len(tail), len(other_tail))
    before, after = head[:first] + _last(tail, last), other_head[:first] + _last(other_tail, last)
    return _values(output, before, after, tolerance)


class _TooLarge(Exception):  # noqa: N818 - a finding, not an error
    """The text is too large to read, and has more than numbers, so no part of it can be compared."""


def _ends(text: bytes, limit: int) -> tuple[list[Any], list[Any]]:
    """Decode nested arrays of numbers into their leaves; of large ones only both ends, within ``limit``.

    The end counts as much as the beginning: a model without a mask may show padding in the last position alone.
    """
    if len(text) <= limit:
        return list(_leaves(_decoded(text))), []
    head, tail = text[: limit // 2], text[-(limit // 2) :]
    if b'"' in head or b"{" in head:
        raise _TooLarge
    head, tail = head[: head.rfind(b",")], tail[tail.find(b",") + 1 :]
    closed = _decoded(head + b"]" * (head.count(b"[") - head.count(b"]")))
    if b'"' in tail or b"}" in tail:
        return list(_leaves(closed)), []
    opened = _decoded(b"[" * (tail.count(b"]") - tail.count(b"[")) + tail)
    return list(_leaves(closed)), list(_leaves(opened))


def _last(leaves: list[Any], count: int) -> list[Any]:
    return leaves[len(leaves) - count :]


def _decoded(text: bytes) -> Any:  # noqa: ANN401 - any JSON
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)  # which reads NaN


def _leaves(value: Any) -> Iterator[Any]:  # noqa: ANN401 - any JSON
    """Yield what is in nested arrays, in order."""
    if isinstance(value, list):
        for each in value:
            if isinstance(each, list):
                yield from _leaves(each)
            else:
                yield each
    else:
        yield value


def _values(
    output: str,
    alone: Any,  # noqa: ANN401 - any JSON
    batched: Any,  # noqa: ANN401 - any JSON
    tolerance: Tolerance,
    *,
    rounded: bool = False,
) -> tuple[str, str] | None:
    """Compare two JSON values; return both texts at the first difference, for messages, or None."""
    if _is_number(alone) and _is_number(batched):
        alone, batched = [alone], [batched]
    match alone, batched:
        case list(), list():
            kinds = {*map(type, alone), *map(type, batched)}
            if kinds <= _NUMBERS and len(alone) == len(batched):
                exact = kinds == {int} and not rounded
                return _first(alone, batched) if exact else _numbers(output, alone, batched, tolerance)
            if _outline(alone) == _outline(batched) and _is_tensor(alone) and _is_tensor(batched):
                one, other = list(_leaves(alone)), list(_leaves(batched))
                exact = not rounded and {type(each) for each in one} | {type(each) for each in other} == {int}
                return _first(one, other) if exact else _numbers(output, one, other, tolerance)
            if len(alone) != len(batched):
                return f"{len(alone)} elements", f"{len(batched)} elements"
            pairs: Any = zip(alone, batched, strict=True)
            return next(filter(None, (_values(output, one, other, tolerance) for one, other in pairs)), None)
        case dict(), dict():
            if alone.keys() != batched.keys():
                return f"fields {sorted(alone)}", f"fields {sorted(batched)}"
            fields = ((f"{output}.{name}", value, batched[name]) for name, value in alone.items())
            return next(filter(None, (_values(*field, tolerance) for field in fields)), None)
    return None if type(alone) is type(batched) and alone == batched else (_shown(alone), _shown(batched))


def _numbers(
    output: str, alone: Sequence[float], batched: Sequence[float], tolerance: Tolerance
) -> tuple[str, str] | None:
    """Compare a row of numbers."""
    try:
        largest, apart = max(map(abs, alone), default=0.0), max(map(abs, map(sub, alone, batched)), default=0.0)
        if not isfinite(sum(map(abs, alone)) + sum(map(abs, batched))):  # NaN has no place in an order
            largest, apart = max((abs(number) for number in alone if isfinite(number)), default=0.0), inf
        allowed = tolerance.of(output, largest)
        if apart <= allowed:
            return None
    except OverflowError:  # integers beyond 1e308
        return _first(alone, batched)
    for one, other in zip(alone, batched, strict=True):
        near = one == other or abs(one - other) <= allowed or (isnan(one) and isnan(other))
        if not near:
            return _shown(one), _shown(other)
    return None


def _first(alone: Sequence[Any], batched: Sequence[Any]) -> tuple[str, str] | None:
    pairs = zip(alone, batched, strict=True)
    return next(((_shown(one), _shown(other)) for one, other in pairs if one != other), None)


def _is_number(value: Any) -> bool:  # noqa: ANN401 - any JSON
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_tensor(value: list[Any]) -> bool:
    """Whether nested arrays hold numbers alone."""
    return all(_is_tensor(each) if isinstance(each, list) else _is_number(each) for each in value)


def _outline(value: Any) -> Any:  # noqa: ANN401 - nested lists as deep as the value
    """Return the lengths of nested arrays."""
    inner = [_outline(each) for each in value if isinstance(each, list)]
    return (len(value), inner) if inner else len(value)


def _shown(value: Any) -> str:  # noqa: ANN401 - any JSON
    """Return a value for a message. Texts are callers' data and are not shown."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    return str(value)[:40]


def _unread(alone: int, batched: int) -> tuple[str, str]:
    return f"{alone} bytes", f"{batched} other bytes" if alone == batched else f"{batched} bytes"
