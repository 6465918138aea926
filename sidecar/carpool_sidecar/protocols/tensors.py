"""Tensors of the Open Inference Protocol in their wire format: JSON text or little-endian binary, sliced along dim 0.

Format: the protocol's REST specification (``inference_rest.md``: data flat in row-major order, or nested) and Triton's
binary tensor data extension (``extension_binary_data.md``: ``binary_data_size``; BYTES elements have a 4-byte length).
No element is converted; slices of large tensors are memoryviews of the original body.
"""

from __future__ import annotations

import re
import struct
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

import msgspec

from carpool_sidecar.protocols import json_scan, padding
from carpool_sidecar.protocols.common import JOINED, short
from carpool_sidecar.protocols.json_scan import Beyond, Malformed
from carpool_sidecar.protocols.limits import FREE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from carpool_sidecar.protocols.common import Buffer
    from carpool_sidecar.protocols.json_scan import Span
    from carpool_sidecar.protocols.limits import Limits

# Bytes an element in binary form; BYTES elements differ.
WIDTHS: dict[str, int | None] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
    "BYTES": None,
}
# The kinds of leaves in JSON data of a datatype: String, Bool, Null, Integer or Real numbers. Servers differ about
# anything else (0 for false, "NaN" for NaN, FP16 at all), so a request with it is forwarded and the server decides.
_LEAVES = {
    "BOOL": {"B"},
    "BYTES": {"S"},
    "FP16": set[str](),
    "BF16": set[str](),
    "FP32": {"I", "R"},
    "FP64": {"I", "R"},
}
_INTEGER_LEAVES = {"I"}
_MAX_DIM = 2**63 - 1
_EMPTY = re.compile(rb"\[[ \t\r\n]*\]")
_DIGIT = re.compile(rb"\d")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[],"))
_length_at = struct.Struct("<I").unpack_from
_integers = msgspec.json.Decoder(list[int])


_MAX_DIMS = 64
"""numpy's bound on dimensions."""


class Tensor:
    """One input or output: ``data`` is the inside of the JSON array, or the binary buffer.

    ``form``: ``binary``, ``flat`` or ``nested`` (the latter two JSON). ``key``: all but rows and data. ``alone``: why a
    request with this input is not batched. ``cuts``: where rows begin in ``data``, with the end after a separator
    (bytes): for binary BYTES, and for flat JSON once needed. ``rows``: the rows of other JSON, once needed.
    """

    __slots__ = ("alone", "cuts", "data", "form", "head", "name", "parameters", "rows", "shape")

    def __init__(self, name: str, shape: list[int], form: str, data: Buffer, head: bytes, parameters: bytes) -> None:
        self.name = name
        self.shape = shape
        self.form = form
        self.data = data
        self.head = head
        self.parameters = parameters
        self.alone: str | None = None
        self.cuts: list[int] | None = None
        self.rows: list[Buffer] = []

    @property
    def key(self) -> bytes:
        """What must be equal to concatenate two tensors."""
        trailing = ",".join(map(str, self.shape[1:]))
        return b"%b:%b:%b:%b" % (short(self.head), trailing.encode(), self.form.encode(), short(self.parameters))

    @property
    def datatype(self) -> str:
        """Its datatype, as named in the head."""
        start = len(b'{"name":%b,"datatype":"' % msgspec.json.encode(self.name))
        return self.head[start : self.head.index(b'"', start)].decode()

    def bucket_key(self, axis: int, top: int) -> bytes:
        """Return the key of a padded tensor: lengths up to ``top`` count as equal."""
        trailing = [str(dim) for dim in self.shape[1:]]
        trailing[axis - 1] = f"<={top}"
        return b"%b:%b:%b:%b" % (
            short(self.head),
            ",".join(trailing).encode(),
            self.form.encode(),
            short(self.parameters),
        )

    def unit(self, axis: int, value: float) -> bytes | None:
        """Write one position of padding along an axis, in the data's format; None: not possible."""
        inner = self.shape[axis + 1 :]
        if self.form == "binary":
            element = padding.element(self.datatype, value)
            return None if element is None else element * prod(inner)
        element = padding.text(self.datatype, value)
        if element is None or self.form == "flat":
            return None if element is None else b",".join([element] * prod(inner))
        for dim in reversed(inner):
            element = b"[" + b",".join([element] * dim) + b"]"
        return element

    def growth(self, axis: int, count: int, unit: bytes) -> int:
        """Bytes that ``count`` positions of padding add to a row."""
        return (len(unit) + (self.form != "binary")) * count * prod(self.shape[1:axis])

    def padded(self, start: int, stop: int, axis: int, length: int, unit: bytes) -> Buffer:
        """Rows ``start`` to ``stop`` with ``unit`` after their last position along an axis, up to ``length``."""
        count = length - self.shape[axis]
        if not count:
            return self.slice(start, stop)
        tail = unit * count if self.form == "binary" else (b"," + unit) * count
        if self.form == "nested":
            return b",".join([_extended(bytes(self.slice(row, row + 1)), axis, tail) for row in range(start, stop)])
        runs = self._runs(start, stop, axis)
        if self.form == "binary":
            return b"".join([part for run in runs for part in (run, tail)])
        return b",".join([bytes(run) + tail for run in runs])

    def part(self, start: int, stop: int, axis: int = 0, length: int = 0) -> Tensor:
        """Rows ``start`` to ``stop`` as a tensor of its own; with an ``axis``, its first ``length`` positions of it."""
        shape = [stop - start, *self.shape[1:]]
        if axis:
            shape[axis] = length
        if shape[1:] == self.shape[1:] or not self.data:
            part = Tensor(self.name, shape, self.form, self.slice(start, stop), self.head, self.parameters)
            if self.cuts is not None and self.form == "binary":
                part.cuts = [cut - self.cuts[start] for cut in self.cuts[start : stop + 1]]
            return part
        kept = prod(shape[axis:])
        data: Buffer
        cuts: list[int] | None = None
        if self.form == "nested":
            data = b",".join([_shortened(bytes(self.slice(row, row + 1)), axis, length) for row in range(start, stop)])
        elif self.form == "flat":
            data = b",".join([_first(bytes(run), kept) for run in self._runs(start, stop, axis)])
        else:
            runs = self._runs(start, stop, axis)
            if self.cuts is None:
                size = len(runs[0]) // self.shape[axis] * length if runs else 0
                kept_runs = [run[:size] for run in runs]
            else:
                kept_runs = [_first_strings(run, kept) for run in runs]
                each = prod(shape[1:axis])
                sizes = [sum(map(len, kept_runs[at : at + each])) for at in range(0, len(kept_runs), each)]
                cuts = [0, *accumulate(sizes)]
            data = kept_runs[0] if len(kept_runs) == 1 else b"".join(kept_runs)
        part = Tensor(self.name, shape, self.form, data, self.head, self.parameters)
        part.cuts = cuts
        return part

    def _runs(self, start: int, stop: int, axis: int) -> list[Buffer]:
        """Cut the flat data of some rows before an axis: each run is contiguous along it."""
        outer = prod(self.shape[1:axis])
        width = prod(self.shape[axis:])
        rows = [self.slice(row, row + 1) for row in range(start, stop)]
        if outer == 1:
            return rows
        if self.form == "flat":
            return [run for row in rows for run in _texts(bytes(row), outer, width)]
        if self.cuts is None:
            size = len(self.data) // (self.shape[0] * outer)
            return [row[at : at + size] for row in rows for at in range(0, len(row), size)]
        return [run for row in rows for run in _strings(row, outer, width)]

    def slice(self, start: int, stop: int) -> Buffer:
        """Rows ``start`` to ``stop`` of the data; nothing large is copied."""
        count = self.shape[0]
        if stop - start == count or not self.data:  # flat rows without elements are no text at all
            return self.data
        if self.form == "binary":
            if self.cuts is not None:
                return self.data[self.cuts[start] : self.cuts[stop]]
            width = len(self.data) // count
            return self.data[start * width : stop * width]
        if self.cuts is None and not self.rows:
            self._cut()
        if self.cuts is not None:
            return self.data[self.cuts[start] : self.cuts[stop] - 1]
        return b",".join(self.rows[start:stop])

    def write(self, buffers: Sequence[Buffer], count: int, parts: list[Buffer], binary: list[Buffer]) -> None:
        """Write the JSON of this tensor with ``count`` rows in ``buffers`` to ``parts``, binary data to ``binary``.

        What is large is not copied.
        """
        shape = ",".join(map(str, [count, *self.shape[1:]])).encode()
        parameters = self.parameters
        if self.form == "binary":
            size = b'"binary_data_size":%d' % sum(map(len, buffers))
            parameters = parameters + b"," + size if parameters else size
            binary += buffers
            parts.append(b'%b,"shape":[%b],"parameters":{%b}}' % (self.head, shape, parameters))
            return
        described = b',"parameters":{%b}' % parameters if parameters else b""
        parts.append(b'%b,"shape":[%b]%b,"data":[' % (self.head, shape, described))
        rows = [buffer for buffer in buffers if buffer]
        if sum(map(len, rows)) <= JOINED:
            parts.append(b",".join(rows))
        else:
            for index, row in enumerate(rows):
                parts += (b",", row) if index else (row,)
        parts.append(b"]}")

    def _cut(self) -> None:
        """Find the rows of JSON data."""
        count, width = self.shape[0], prod(self.shape[1:])
        text = bytes(self.data)
        if self.form == "flat" and b'"' not in text:
            self.cuts = list(_ends(text, count, width))
            return
        array = b"[%b]" % text
        leaves = json_scan.elements(array, "data", (0, len(array)), len(array)) or []
        if len(leaves) == count:
            self.rows = [memoryview(leaf) for leaf in leaves]
        else:
            self.rows = [b",".join(leaves[at : at + width]) for at in range(0, len(leaves), width)]


def parse(
    where: str, text: bytes, span: Span, tail: memoryview | None, limits: Limits, *, any_datatype: bool = False
) -> list[Tensor]:
    """Read the array ``inputs`` or ``outputs`` (``where``); binary data follow one another in ``tail``.

    ``tail`` is None if the message has no binary part. ``any_datatype``, for answers, accepts datatypes that are not in
    the specification: their width follows from their size.
    """
    reader = _Reader(text, tail, limits, any_datatype=any_datatype)
    tensors, names = list[Tensor](), set[str]()
    for index, fields in enumerate(json_scan.objects(text, where, limits, span)):
        tensor = reader.tensor(f"{where}[{index}]", fields)
        if tensor.name in names:
            raise Malformed(f"{where}[{index}].name: {tensor.name[:40]!r} comes twice")
        names.add(tensor.name)
        tensors.append(tensor)
    if tail is not None and reader.at != len(tail):
        raise Malformed(f"binary data: {len(tail)} bytes follow the JSON header, its {where} name {reader.at}")
    return tensors


def join_members(fields: dict[str, bytes]) -> bytes:
    """``"a":1,"b":2``, in order of names, so that equal objects are equal text."""
    return b",".join([msgspec.json.encode(name) + b":" + value for name, value in sorted(fields.items())])


class _Reader:
    """Reads the tensors of one message. Counts are over all of them."""

    __slots__ = ("_any_datatype", "_elements", "_keys", "_limits", "_tail", "_text", "at")

    def __init__(self, text: bytes, tail: memoryview | None, limits: Limits, *, any_datatype: bool) -> None:
        self._text = text
        self._tail = tail
        self._limits = limits
        self._any_datatype = any_datatype
        self._keys = 0
        self._elements = 0
        self.at = 0
        """Where the next tensor's binary data begins."""

    def tensor(self, where: str, fields: dict[str, Span]) -> Tensor:
        """Read one tensor."""
        text = self._text
        # 1. Name, datatype, shape
        spelt = []
        for field_name in ("name", "datatype", "shape"):
            span = fields.pop(field_name, None)
            if span is None:
                raise Malformed(f"{where}.{field_name}: missing")
            spelt.append(text[span[0] : span[1]])
        name, datatype = json_scan.string(spelt[0], f"{where}.name"), json_scan.string(spelt[1], f"{where}.datatype")
        if datatype not in WIDTHS and not self._any_datatype:
            raise Malformed(f"{where}.datatype: {datatype[:40]!r}, expected one of {', '.join(WIDTHS)}")
        shape = _shape(f"{where}.shape", spelt[2])
        size = prod(shape)
        if size > _MAX_DIM:
            raise Malformed(f"{where}.shape: more than 2^63-1 elements")
        # 2. Everything else but the data
        parameters = self._parameters(f"{where}.parameters", fields.pop("parameters", None))
        length = parameters.pop("binary_data_size", None)
        data = fields.pop("data", None)
        head = b'{"name":%b,"datatype":%b' % (msgspec.json.encode(name), msgspec.json.encode(datatype))
        if fields:
            head += b"," + join_members({name: text[start:stop] for name, (start, stop) in fields.items()})
        tensor = Tensor(name, shape, "binary", b"", head, join_members(parameters))
        if not shape:
            tensor.alone = "scalar"
        elif size == 0:
            tensor.alone = "empty"
        # 3. The data
        if any(parameter.startswith("shared_memory") for parameter in parameters):
            tensor.alone = "shared-memory"
        elif (data is None) == (length is None):
            both = "both" if data is not None else "neither"
            raise Malformed(f"{where}: expected either data or parameters.binary_data_size, got {both}")
        elif data is not None:
            _json(where, tensor, text, data, datatype, size)
        else:
            tensor.data = self._binary(f"{where}.parameters.binary_data_size", length or b"")
            self._check_binary(where, tensor, datatype, size)
        return tensor

    def _parameters(self, where: str, span: Span | None) -> dict[str, bytes]:
        if span is None:
            return {}
        spans = json_scan.members(self._text, where, self._limits, span)
        self._keys += len(spans)
        if self._keys > self._limits.max_keys:
            raise Beyond(where, "max_keys", self._limits)
        return {name: self._text[start:stop] for name, (start, stop) in spans.items()}

    def _binary(self, where: str, length: bytes) -> memoryview:
        """Take the next bytes after the JSON."""
        try:
            size = msgspec.json.decode(length, type=int)
        except msgspec.DecodeError:
            size = -1
        if not 0 <= size <= _MAX_DIM:
            raise Malformed(f"{where}: expected a number of bytes, got {length[:40].decode(errors='replace')}")
        if self._tail is None:
            raise Malformed(f"{where}: needs the header Inference-Header-Content-Length")
        start, self.at = self.at, self.at + size
        if self.at > len(self._tail):
            raise Malformed(f"{where}: the data ends {self.at - len(self._tail)} bytes beyond the body")
        return self._tail[start : self.at]

    def _check_binary(self, where: str, tensor: Tensor, datatype: str, size: int) -> None:
        """Check that the buffer has as many elements as the shape; finds the rows of BYTES."""
        got = len(tensor.data)
        if datatype == "BYTES":
            self._elements += min(size, got)
            if self._elements > self._limits.max_strings:
                raise Beyond(where, "max_strings", self._limits)
            tensor.cuts = _cuts(where, tensor, size)
            return
        width = WIDTHS.get(datatype)
        if width is not None and got != size * width:
            raise Malformed(
                f"{where}: {got} bytes of binary data for {datatype} {tensor.shape}, expected {size * width}"
            )
        if width is None and (got % size if size else got):
            raise Malformed(f"{where}: {got} bytes of binary data are no multiple of {size} elements")


def _shape(where: str, value: bytes) -> list[int]:
    dims = value.count(b",") + 1
    if dims > _MAX_DIMS:
        raise Malformed(f"{where}: {dims} dimensions, expected at most {_MAX_DIMS}")
    try:
        shape = _integers.decode(value)
    except msgspec.DecodeError:
        raise Malformed(f"{where}: expected an array of integers, got {value[:40].decode(errors='replace')}") from None
    for dim in shape:
        if not 0 <= dim <= _MAX_DIM:
            raise Malformed(f"{where}: dimension {_short(dim)}, expected 0 to 2^63-1")
    return shape


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**20 else "of more than 20 digits"


def _cuts(where: str, tensor: Tensor, size: int) -> list[int] | None:
    """Return where each row begins: each element is a little-endian uint32 length and as many bytes."""
    data, end = tensor.data, len(tensor.data)
    if size * 4 > end or (size == 0 and end):
        raise Malformed(f"{where}: {end} bytes of binary data for BYTES {tensor.shape}")
    if size == 0:
        return None  # rows of no bytes
    at, cuts, width = 0, [0], prod(tensor.shape[1:])
    for element in range(1, size + 1):
        if at + 4 > end:
            raise Malformed(f"{where}: binary data ends before the length of element {element - 1}")
        at += 4 + _length_at(data, at)[0]
        if element % width == 0:
            cuts.append(at)
    if at != end:
        raise Malformed(f"{where}: {size} BYTES elements take {at} bytes of binary data, got {end}")
    return cuts


def _json(where: str, tensor: Tensor, text: bytes, span: Span, datatype: str, size: int) -> None:
    """Check the number of elements of JSON data, flat or nested, against the shape, and their kinds."""
    data = json_scan.cut(text, span)
    if data[:1] != b"[":
        raise Malformed(f"{where}.data: expected an array, got {json_scan.kind(data)}")
    bare = json_scan.outside(data) if b'"' in data else data
    if b"{" in bare:
        raise Malformed(f"{where}.data: expected elements of {datatype}, got an object")
    bones = bare.translate(None, _NOT_STRUCTURE)
    hollow = b"[]" in bones and _EMPTY.search(bare) is not None
    tensor.data, tensor.form = _inside(text, span, data), "flat"
    if bones.count(b"[") == 1:
        got = 0 if hollow else bones.count(b",") + 1
        if got != size:
            raise Malformed(f"{where}.data: {got} values for shape {tensor.shape}, expected {size}")
    elif hollow == (size == 0) and _is_nested(bones, tensor.shape):
        tensor.form = "nested"
    else:
        # Servers read any nesting row by row, but such data can't be split into rows.
        tensor.alone = tensor.alone or "nesting"
    if not _leaves(data, bare) <= _LEAVES.get(datatype, _INTEGER_LEAVES):
        tensor.alone = tensor.alone or "kinds"


def _inside(text: bytes, span: Span, data: bytes) -> Buffer:
    """Return the content of an array's brackets; of a large one as a view of the text."""
    if len(data) <= FREE:
        return data[1:-1].strip(json_scan.WHITESPACE)
    start, stop = span[0] + 1, span[1] - 1
    if data[1] in json_scan.WHITESPACE or data[-2] in json_scan.WHITESPACE:
        start += len(data) - 1 - len(data[1:].lstrip(json_scan.WHITESPACE))
        stop -= len(data) - 1 - len(data[:-1].rstrip(json_scan.WHITESPACE))
    return memoryview(text)[start : max(start, stop)]


def _ends(text: bytes, count: int, width: int) -> Iterator[int]:
    """Find where rows of ``width`` elements between commas begin, and where a last comma would end.

    It jumps over as many bytes as the row before had, counts the commas, and then advances in steps that can't go too
    far. So each byte is read at most twice, and no object is made for an element.
    """
    at, mean = 0, 2.0
    yield at
    for _ in range(count - 1):
        start, left, careful = at, width, False
        while left > 16:
            jump = 2 * left - 1 if careful else int(left * mean)  # "1,1,1,": the nth comma is no earlier
            found = text.count(b",", at, at + jump)
            if found > left:
                careful = True
                continue
            at += jump
            left -= found
        for _ in range(left):
            at = text.index(b",", at) + 1
        if not left:
            at = text.rindex(b",", start, at) + 1
        mean = (at - start) / width
        yield at
    yield len(text) + 1


def _texts(row: bytes, count: int, width: int) -> list[bytes]:
    """Cut flat JSON into ``count`` runs of ``width`` elements."""
    if b'"' in row:  # a comma may be in a string
        elements = json_scan.elements(b"[%b]" % row, "data", (0, len(row) + 2), len(row) + 2) or []
        return [b",".join(elements[at : at + width]) for at in range(0, len(elements), width)]
    cuts = list(_ends(row, count, width))
    return [row[cuts[at] : cuts[at + 1] - 1] for at in range(count)]


def _first(run: bytes, count: int) -> bytes:
    """Return the first elements of flat JSON that has more."""
    if b'"' in run:
        elements = json_scan.elements(b"[%b]" % run, "data", (0, len(run) + 2), len(run) + 2) or []
        return b",".join(elements[:count])
    return run[: list(_ends(run, 2, count))[1] - 1]


def _strings(row: Buffer, count: int, width: int) -> list[Buffer]:
    """Cut binary BYTES into ``count`` runs of ``width`` elements."""
    at = 0
    runs: list[Buffer] = []
    for _ in range(count):
        run = _first_strings(row[at:], width)
        runs.append(run)
        at += len(run)
    return runs


def _first_strings(run: Buffer, count: int) -> Buffer:
    """Return the first elements of binary BYTES."""
    at = 0
    for _ in range(count):
        at += 4 + _length_at(run, at)[0]
    return run[:at]


def _extended(array: bytes, depth: int, tail: bytes) -> bytes:
    """Write ``tail`` before the closing bracket of each array at a depth; 1 is the outermost."""
    if depth == 1:
        return array.rstrip(json_scan.WHITESPACE)[:-1] + tail + b"]"
    inner = json_scan.elements(array, "data", (0, len(array)), len(array)) or []
    return b"[%b]" % b",".join([_extended(bytes(each), depth - 1, tail) for each in inner])


def _shortened(array: bytes, depth: int, length: int) -> bytes:
    """Leave the first ``length`` elements of each array at a depth; 1 is the outermost."""
    inner = json_scan.elements(array, "data", (0, len(array)), len(array)) or []
    if depth == 1:
        return b"[%b]" % b",".join(inner[:length])
    return b"[%b]" % b",".join([_shortened(bytes(each), depth - 1, length) for each in inner])


def _is_nested(bones: bytes, shape: list[int]) -> bool:
    """Whether brackets and commas are those of nested arrays of this shape."""
    if 0 in shape:
        shape = shape[: shape.index(0) + 1]  # an empty array has no inner ones, however many the shape promises
    length = 0
    for dim in reversed(shape):
        length = 2 + dim * length + max(dim - 1, 0)
    if length != len(bones):
        return False  # before building what may be huge
    unit = b""
    for dim in reversed(shape):
        unit = b"[" + b",".join([unit] * dim) + b"]"
    return unit == bones


def _leaves(data: bytes, text: bytes) -> set[str]:
    """Find the kinds of leaves in JSON data; ``text`` is the data with each string an ``s``."""
    kinds = set[str]()
    if text is not data:
        kinds.add("S")
    if b"t" in text or b"f" in text:
        kinds.add("B")
        text = text.replace(b"true", b"").replace(b"false", b"")
    if b"n" in text:
        kinds.add("N")
    if b"." in text or b"e" in text or b"E" in text:
        kinds.add("R")
    elif _DIGIT.search(text):
        kinds.add("I")
    return kinds
