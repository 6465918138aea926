"""Tensors of the Open Inference protocol (V2): JSON values or little-endian bytes, with conversions between them.

Deliberately separate from the sidecar's codec: a test of a proxy must not share its mistakes.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Struct codes; BF16 has none, and JSON can't represent it.
CODES = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i",
    "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
SIZES = {name: struct.calcsize(f"<{code}") for name, code in CODES.items()} | {"BF16": 2}

HEADER_LENGTH = b"inference-header-content-length"


class Malformed(ValueError):  # noqa: N818 - reads as the sentence it starts
    """A message that violates the protocol; the text names the place."""


class Tensor(Struct, frozen=True):
    """A named tensor, dim 0 the rows. Either ``json`` (the ``data`` member, verbatim) or ``binary`` is given."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    json: bytes | None = None
    binary: bytes | None = None

    def as_binary(self) -> bytes:
        """Return the elements as little-endian bytes, C order.

        Raises ``Malformed`` if JSON has a value that the datatype can't represent.
        """
        if self.binary is not None:
            return self.binary
        values = self.values()
        if self.datatype == "BYTES":
            return b"".join(struct.pack("<I", len(text)) + text for text in (value.encode() for value in values))
        try:
            return struct.pack(f"<{len(values)}{_code(self)}", *values)
        except (struct.error, OverflowError, TypeError) as error:
            raise Malformed(f"{self.name}.data: {error}") from None

    def as_json(self) -> bytes:
        """Return the ``data`` member.

        Raises ``Malformed`` if JSON can't represent the datatype.
        """
        if self.json is not None:
            return self.json
        return msgspec.json.encode(self.values())

    def values(self) -> list[Any]:
        """Return the elements, flat."""
        if self.json is not None:
            return list(_flat(msgspec.json.decode(self.json)))
        binary = self.binary or b""
        if self.datatype == "BYTES":
            return [element.decode("utf-8", "replace") for element in byte_elements(binary)]
        return list(struct.unpack(f"<{math.prod(self.shape)}{_code(self)}", binary))


class Message(Struct, frozen=True):
    """The tensors of a request or an answer, and the other fields used here."""

    tensors: tuple[Tensor, ...]
    id: str | None = None
    wanted: tuple[tuple[str, bool], ...] = ()
    """Requested outputs, and whether in binary; empty: all outputs."""
    binary_wanted: bool = False


class _Parameters(Struct):
    binary_data_size: int | None = None
    binary_data: bool = False
    binary_data_output: bool = False


class _Tensor(Struct):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Raw = Raw()
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)


class _Output(Struct):
    name: str
    parameters: _Parameters | None = None


class _Request(Struct):
    inputs: list[_Tensor]
    id: str | None = None
    outputs: list[_Output] = []
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)


class _Answer(Struct):
    outputs: list[_Tensor]
    id: str | None = None


_requests = msgspec.json.Decoder(_Request)
_answers = msgspec.json.Decoder(_Answer)


def decode_request(body: bytes, header_length: bytes | None) -> Message:
    """Read an infer request; ``header_length`` is the value of its ``HEADER_LENGTH`` field.

    Raises ``Malformed``.
    """
    header, tail = _cut(body, header_length)
    try:
        request = _requests.decode(header)
    except msgspec.DecodeError as error:
        raise Malformed(str(error)) from None
    default = request.parameters.binary_data_output
    return Message(
        _tensors(request.inputs, tail),
        request.id,
        tuple(
            (output.name, output.parameters.binary_data if output.parameters else default) for output in request.outputs
        ),
        default,
    )


def decode_answer(body: bytes, header_length: bytes | None) -> Message:
    """Read an answer.

    Raises ``Malformed``.
    """
    header, tail = _cut(body, header_length)
    try:
        answer = _answers.decode(header)
    except msgspec.DecodeError as error:
        raise Malformed(str(error)) from None
    return Message(_tensors(answer.outputs, tail), answer.id)


def encode(fields: dict[str, Any], member: str, tensors: Sequence[tuple[Tensor, bool]]) -> tuple[bytes, int | None]:
    """Return a message's body and, if it has binary tensors, its JSON header's length.

    ``member`` is ``inputs`` or ``outputs``; each tensor comes with whether it goes in binary.
    """
    described, tail = [], []
    for tensor, binary in tensors:
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if binary:
            tail.append(tensor.as_binary())
            entry["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            entry["data"] = Raw(tensor.as_json())
        described.append(entry)
    header = msgspec.json.encode({**fields, member: described})
    return (b"".join((header, *tail)), len(header)) if tail else (header, None)


def byte_elements(data: bytes) -> Iterator[bytes]:
    """Walk a BYTES tensor: 4-byte little-endian lengths, each followed by its element.

    Raises ``Malformed`` if it is truncated.
    """
    position = 0
    while position < len(data):
        stop = position + 4
        length = int.from_bytes(data[position:stop], "little")
        if stop > len(data) or stop + length > len(data):
            raise Malformed(f"BYTES data is cut short at byte {position}")
        yield data[stop : stop + length]
        position = stop + length


def _cut(body: bytes, header_length: bytes | None) -> tuple[bytes, bytes]:
    if header_length is None:
        return body, b""
    if not header_length.isdigit() or int(header_length) > len(body):
        raise Malformed(f"Inference-Header-Content-Length {header_length!r} for a body of {len(body)} bytes")
    return body[: int(header_length)], body[int(header_length) :]


def _tensors(described: list[_Tensor], tail: bytes) -> tuple[Tensor, ...]:
    tensors, position = [], 0
    for entry in described:
        if entry.datatype not in SIZES and entry.datatype != "BYTES":
            raise Malformed(f"{entry.name}: unknown datatype {entry.datatype}")
        if not entry.shape or min(entry.shape) < 0:
            raise Malformed(f"{entry.name}: shape {list(entry.shape)}")
        expected = math.prod(entry.shape)
        size = entry.parameters.binary_data_size
        if size is None:
            if not bytes(entry.data):
                raise Malformed(f"{entry.name}: neither data nor binary_data_size")
            json = bytes(entry.data)
            tensor = Tensor(entry.name, entry.datatype, entry.shape, json=json)
            count = sum(1 for _ in _flat(msgspec.json.decode(json)))
        else:
            binary = tail[position : position + size]
            position += size
            tensor = Tensor(entry.name, entry.datatype, entry.shape, binary=binary)
            count, rest = (
                (sum(1 for _ in byte_elements(binary)), 0)
                if entry.datatype == "BYTES"
                else divmod(len(binary), SIZES[entry.datatype])
            )
            if len(binary) != size or rest:
                raise Malformed(f"{entry.name}: {len(binary)} bytes of {entry.datatype}, announced {size}")
        if count != expected:
            raise Malformed(f"{entry.name}: {count} values for shape {list(entry.shape)}, expected {expected}")
        tensors.append(tensor)
    if position != len(tail):
        raise Malformed(f"{len(tail)} bytes follow the JSON header, the tensors announce {position}")
    return tuple(tensors)


def _code(tensor: Tensor) -> str:
    code = CODES.get(tensor.datatype)
    if code is None:
        raise Malformed(f"{tensor.name}: {tensor.datatype} has no form in JSON; ask for binary output")
    return code


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, list):
        for element in value:
            yield from _flat(element)
    else:
        yield value
