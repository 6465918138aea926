"""Tensors of the Open Inference Protocol as they travel: JSON text or little-endian binary, sliced along dim 0.

Format: the protocol's REST specification (``inference_rest.md``: data flat in row-major order, or nested) and Triton's
binary tensor data extension (``extension_binary_data.md``: ``binary_data_size``; BYTES elements have a 4-byte length).
No element is converted; binary slices are memoryviews of the body they came in.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import msgspec

from carpool_sidecar.protocols import json_scan
from carpool_sidecar.protocols.json_scan import Malformed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_sidecar.protocols.common import Buffer

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
# The leaves that JSON data of a datatype consists of: String, Bool, Null, Integer or Real numbers. Servers differ about
# anything else (0 for false, "NaN" for NaN, FP16 at all), so a request with it rides alone and its server decides.
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
_LEAF = re.compile(rb"[^\[\], \t\r\n]+")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[],"))
_length_at = struct.Struct("<I").unpack_from
_integers = msgspec.json.Decoder(list[int])


@dataclass(slots=True)
class Tensor:
    """One input or output: ``data`` is the inside of the JSON array, or the binary buffer.

    ``form``: ``binary``, ``flat`` or ``nested`` (the latter two JSON). ``key``: all but rows and data. ``alone``: why a
    request with this input must ride alone. ``cuts``: where rows of binary BYTES begin, with the end (bytes).
    """

    name: str
    shape: list[int]
    form: str
    data: Buffer
    head: bytes
    parameters: bytes
    alone: str | None = None
    cuts: list[int] | None = None
    rows: list[Buffer] = field(default_factory=list)

    @property
    def key(self) -> bytes:
        """What must be equal to concatenate two tensors."""
        trailing = ",".join(map(str, self.shape[1:]))
        return b"%b:%b:%b:%b" % (self.head, trailing.encode(), self.form.encode(), self.parameters)

    def slice(self, start: int, stop: int) -> Buffer:
        """Rows ``start`` to ``stop`` of the data; no copy of binary data."""
        count = self.shape[0]
        if stop - start == count or not self.data:  # flat rows without elements are no text at all
            return self.data
        if self.form == "binary":
            if self.cuts is not None:
                return self.data[self.cuts[start] : self.cuts[stop]]
            width = len(self.data) // count
            return self.data[start * width : stop * width]
        if not self.rows:
            self.rows = self._json_rows()
        return b",".join(self.rows[start:stop])

    def write(self, buffers: Sequence[Buffer], count: int, binary: list[Buffer]) -> bytes:
        """Write the JSON object of this tensor with ``count`` rows in ``buffers``; binary ones go to ``binary``."""
        shape = ",".join(map(str, [count, *self.shape[1:]])).encode()
        parameters = self.parameters
        if self.form == "binary":
            size = b'"binary_data_size":%d' % sum(map(len, buffers))
            parameters = parameters + b"," + size if parameters else size
            binary += buffers
            return b'%b,"shape":[%b],"parameters":{%b}}' % (self.head, shape, parameters)
        described = b',"parameters":{%b}' % parameters if parameters else b""
        data = b",".join([buffer for buffer in buffers if buffer])
        return b'%b,"shape":[%b]%b,"data":[%b]}' % (self.head, shape, described, data)

    def _json_rows(self) -> list[Buffer]:
        count, width = self.shape[0], prod(self.shape[1:])
        text = bytes(self.data)
        leaves: list[Buffer]
        if self.form == "flat" and b'"' not in text:
            leaves = list(text.split(b","))
        else:
            leaves = [memoryview(element) for element in json_scan.elements(b"[%b]" % text, "data")]
        if len(leaves) == count:
            return leaves
        return [b",".join(leaves[at : at + width]) for at in range(0, len(leaves), width)]


def parse(where: str, array: bytes, tail: memoryview | None, *, any_datatype: bool = False) -> list[Tensor]:
    """Take apart ``inputs`` or ``outputs`` (``where``); binary data stands one after the other in ``tail``.

    ``tail`` is None if the message has no binary part. ``any_datatype`` accepts datatypes that the specification does
    not know, for answers: their width follows from their size.
    """
    at, tensors = 0, list[Tensor]()
    for index, raw in enumerate(json_scan.elements(array, where)):
        tensor, at = _tensor(f"{where}[{index}]", bytes(raw), tail, at, any_datatype)
        tensors.append(tensor)
    if tail is not None and at != len(tail):
        raise Malformed(f"binary data: {len(tail)} bytes follow the JSON header, its {where} name {at}")
    names = [tensor.name for tensor in tensors]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise Malformed(f"{where}[{index}].name: {name!r} comes twice")
    return tensors


def join_members(fields: dict[str, bytes]) -> bytes:
    """``"a":1,"b":2``, in order of names, so that equal objects are equal text."""
    return b",".join([msgspec.json.encode(name) + b":" + value for name, value in sorted(fields.items())])


def _tensor(where: str, text: bytes, tail: memoryview | None, at: int, any_datatype: bool) -> tuple[Tensor, int]:
    """One tensor whose binary data, if it has any, begins at ``at``; with where the next one's begins."""
    fields = json_scan.members(text, where)
    # 1. Name, datatype, shape
    missing = next((name for name in ("name", "datatype", "shape") if name not in fields), None)
    if missing is not None:
        raise Malformed(f"{where}.{missing}: missing")
    name, datatype = (
        json_scan.string(fields.pop("name"), f"{where}.name"),
        json_scan.string(fields.pop("datatype"), f"{where}.datatype"),
    )
    if datatype not in WIDTHS and not any_datatype:
        raise Malformed(f"{where}.datatype: {datatype[:40]!r}, expected one of {', '.join(WIDTHS)}")
    shape = _shape(f"{where}.shape", fields.pop("shape"))
    size = prod(shape)
    if size > _MAX_DIM:
        raise Malformed(f"{where}.shape: more than 2^63-1 elements")
    # 2. Everything else but the data
    parameters = json_scan.members(fields.pop("parameters", b"{}"), f"{where}.parameters")
    length = parameters.pop("binary_data_size", None)
    data = fields.pop("data", None)
    head = b'{"name":%b,"datatype":%b' % (msgspec.json.encode(name), msgspec.json.encode(datatype))
    if fields:
        head += b"," + join_members(fields)
    tensor = Tensor(name, shape, "binary", b"", head, join_members(parameters))
    if not shape:
        tensor.alone = "scalar"
    elif size == 0:
        tensor.alone = "empty"
    # 3. The data
    if any(parameter.startswith("shared_memory") for parameter in parameters):
        tensor.alone = "shared-memory"
        return tensor, at
    if (data is None) == (length is None):
        both = "both" if data is not None else "neither"
        raise Malformed(f"{where}: expected either data or parameters.binary_data_size, got {both}")
    if length is None:
        assert data is not None  # noqa: S101 - for the type checker: one of the two is there
        _json(where, tensor, data, datatype, size)
        return tensor, at
    end = at + _size(f"{where}.parameters.binary_data_size", length)
    if tail is None:
        raise Malformed(f"{where}.parameters.binary_data_size: needs the header Inference-Header-Content-Length")
    if end > len(tail):
        raise Malformed(f"{where}: binary data ends {end - len(tail)} bytes beyond the body")
    tensor.data = tail[at:end]
    _check_binary(where, tensor, datatype, size)
    return tensor, end


def _shape(where: str, value: bytes) -> list[int]:
    try:
        shape = _integers.decode(value)
    except msgspec.DecodeError:
        raise Malformed(f"{where}: expected an array of integers, got {value[:40].decode(errors='replace')}") from None
    if len(shape) > json_scan.MAX_DEPTH:
        raise Malformed(f"{where}: {len(shape)} dimensions, expected at most {json_scan.MAX_DEPTH}")
    for dim in shape:
        if not 0 <= dim <= _MAX_DIM:
            raise Malformed(f"{where}: dimension {_short(dim)}, expected 0 to 2^63-1")
    return shape


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**20 else "of more than 20 digits"


def _size(where: str, value: bytes) -> int:
    try:
        size = msgspec.json.decode(value, type=int)
    except msgspec.DecodeError:
        size = -1
    if not 0 <= size <= _MAX_DIM:
        raise Malformed(f"{where}: expected a number of bytes, got {value[:40].decode(errors='replace')}")
    return size


def _check_binary(where: str, tensor: Tensor, datatype: str, size: int) -> None:
    """Whether the buffer holds as many elements as the shape says; finds the rows of BYTES."""
    got = len(tensor.data)
    if datatype == "BYTES":
        tensor.cuts = _cuts(where, tensor, size)
        return
    width = WIDTHS.get(datatype)
    if width is not None and got != size * width:
        raise Malformed(f"{where}: {got} bytes of binary data for {datatype} {tensor.shape}, expected {size * width}")
    if width is None and (got % size if size else got):
        raise Malformed(f"{where}: {got} bytes of binary data are no multiple of {size} elements")


def _cuts(where: str, tensor: Tensor, size: int) -> list[int] | None:
    """Where each row begins: each element is a little-endian uint32 length and as many bytes."""
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


def _json(where: str, tensor: Tensor, data: bytes, datatype: str, size: int) -> None:
    """Whether JSON data holds as many elements as the shape says, flat or nested, and what kinds they are."""
    if data[:1] != b"[":
        raise Malformed(f"{where}.data: expected an array, got {json_scan.kind(data)}")
    text = json_scan.STRING.sub(b"s", data) if b'"' in data else data
    if b"{" in text:
        raise Malformed(f"{where}.data: expected elements of {datatype}, got an object")
    bones = text.translate(None, _NOT_STRUCTURE)
    hollow = b"[]" in bones and _EMPTY.search(text) is not None
    tensor.data, tensor.form = data[1:-1].strip(json_scan.WHITESPACE), "flat"
    if bones.count(b"[") == 1:
        got = 0 if hollow else bones.count(b",") + 1
    elif hollow == (size == 0) and _is_nested(bones, tensor.shape):
        got, tensor.form = size, "nested"
    else:
        # Servers read any nesting row by row, yet it has no rows to take apart.
        got = len(_LEAF.findall(text))
        tensor.alone = tensor.alone or "nesting"
    if got != size:
        raise Malformed(f"{where}.data: {got} values for shape {tensor.shape}, expected {size}")
    if not _leaves(data, text) <= _LEAVES.get(datatype, _INTEGER_LEAVES):
        tensor.alone = tensor.alone or "kinds"


def _is_nested(bones: bytes, shape: list[int]) -> bool:
    """Whether brackets and commas are those of nested arrays of this shape."""
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
    if data is not text:
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
