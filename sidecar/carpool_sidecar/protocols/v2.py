"""Open Inference Protocol V2 over REST: ``POST /v2/models/M[/versions/V]/infer``, JSON and binary tensors.

The rules:

- ``id``, Triton's ``timeout`` and ``priority`` are the caller's: they are not part of the key and never sent with a
  batch; the ``id`` is returned in the caller's answer. Everything else is part of the key and sent once for the batch.
- Forwarded alone and unchanged: sequences, shared memory, classification, inputs that differ in dim 0, scalars, JSON
  elements of another kind than their datatype's, and everything that can't be read or exceeds the limits.
- An answer's other fields and parameters are about the batch and go to every request unchanged, unless they contain an
  array. An answer assembled from several has those of the first. An ``id`` that the server made belongs to one
  request: if several share the answer, those without an ``id`` get distinct ones made from it.

Sources: the protocol's ``inference_rest.md``; Triton's extensions ``binary_data``, ``schedule_policy``, ``sequence``,
``shared_memory``, ``classification``, ``parameters``.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING
from uuid import UUID, uuid5

import msgspec

from carpool_sidecar.protocols import json_scan, padding, tensors
from carpool_sidecar.protocols.common import (
    UNREADABLE,
    Buffer,
    Endpoint,
    Message,
    Parsed,
    Piece,
    Portion,
    TooLarge,
    WrongRows,
    alone,
    check_shareable,
    joined,
    longest,
    pieces_of,
    short,
    total_rows,
)
from carpool_sidecar.protocols.headers import find
from carpool_sidecar.protocols.limits import DEFAULT
from carpool_sidecar.protocols.padding import Fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_sidecar.protocols.headers import Facts, Headers
    from carpool_sidecar.protocols.json_scan import Span
    from carpool_sidecar.protocols.limits import Limits
    from carpool_sidecar.protocols.padding import Sequence as SequenceAxis
    from carpool_sidecar.protocols.tensors import Tensor

HEADER_LENGTH = b"inference-header-content-length"
_LENGTH = re.compile(rb"\d{1,12}")
_NOT_BY_ROWS = re.compile(rb"classification|shared_memory|\\")
_UUID = re.compile(rb'"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"')
_PER_TENSOR, _PER_CUT = 800, 40
"""Bytes of memory for one tensor, and for the position of one row in it."""


class Request:
    """Inputs of a request; ``rest``: the members after them as sent with a batch; ``id``: a JSON string or empty."""

    __slots__ = ("id", "inputs", "rest")

    def __init__(self, inputs: list[Tensor], rest: bytes, own: bytes) -> None:
        self.inputs = inputs
        self.rest = rest
        self.id = own


class Answer:
    """The outputs of an answer; ``fields``: the members before them; ``id``: the server's, or empty.

    ``several``: whether more than one request shares it. ``first_row``: its first row in the batch, if it is one
    portion's answer.
    """

    __slots__ = ("fields", "first_row", "id", "outputs", "several")

    def __init__(self, outputs: list[Tensor], fields: bytes, own: bytes, several: bool, first_row: int = 0) -> None:
        self.outputs = outputs
        self.fields = fields
        self.id = own
        self.several = several
        self.first_row = first_row


def parse(endpoint: Endpoint, facts: Facts, body: Buffer, limits: Limits = DEFAULT) -> Parsed[Request] | Parsed[None]:
    """Find the tensors of an ``infer`` body. Large ones stay views of ``body``."""
    if facts.clash:
        return alone(endpoint, facts, body, "malformed", facts.clash)
    if facts.content_encoding not in {b"", b"identity"}:
        return alone(endpoint, facts, body, "encoded")
    if facts.header_length == b"0":
        return alone(endpoint, facts, body, "raw")  # Triton's raw binary request: the body is the only input's data
    try:
        # 1. The JSON header, and the binary data after it
        size = _text_size(facts.header_length, body)
        json_scan.check_size(size, "body", "max_text", limits)
        text, tail = _message(size, body, binary=bool(facts.header_length))
        json_scan.check(text, "body", limits)
        fields = json_scan.members(text, "body", limits)
        inputs = tensors.parse("inputs", text, _needed("inputs", fields), tail, limits)
        parameters = (
            json_scan.members(text, "parameters", limits, fields.pop("parameters")) if "parameters" in fields else {}
        )
        # 2. The caller's own fields
        own = json_scan.string_text(json_scan.cut(text, fields.pop("id")), "id") if "id" in fields else b""
        timeout = _whole("parameters.timeout", text, parameters.pop("timeout", None))
        priority = _whole("parameters.priority", text, parameters.pop("priority", None))
        parameters.pop("binary_data_size", None)
        # 3. Whether it may share a batch
        reason = _why_alone(inputs, text, parameters, fields.get("outputs"), limits)
    except json_scan.Malformed as error:
        return alone(endpoint, facts, body, error.reason, str(error))
    # 4. The members after `inputs`, and the key
    rest = b""
    if parameters or fields:
        others = {name: text[start:stop] for name, (start, stop) in fields.items()}
        if parameters:
            values = {name: text[start:stop] for name, (start, stop) in parameters.items()}
            others["parameters"] = b"{%b}" % tensors.join_members(values)
        rest = b"," + tensors.join_members(others)
    # Only elements in the body count: a shape without any, or in shared memory, may claim 2^63 rows in 100 bytes.
    shapes = [tensor.shape for tensor in inputs if tensor.data and 0 not in tensor.shape]
    return Parsed(
        endpoint,
        b"\x00".join([b"v2", endpoint.target, facts.key, short(rest), *[tensor.key for tensor in inputs]]),
        max((shape[0] for shape in shapes if shape), default=1),
        len(body),
        max(map(prod, shapes), default=1),
        Request(inputs, rest, own),
        reason,
        expansion=len(rest)
        + len(own)
        + (0 if text is body else len(text))
        + sum([_PER_TENSOR + _PER_CUT * len(tensor.cuts or ()) for tensor in inputs]),
        form=b"".join([rest, *[tensor.head for tensor in inputs]]),
        timeout_s=timeout / 1e6 if timeout else None,
        priority=priority or None,
    )


def fit(parsed: Parsed[Request], sequence: SequenceAxis) -> Fit:
    """Find the length of a request's inputs along the sequence axis; all padded inputs have the same."""
    axis, inputs = sequence.axis, parsed.state.inputs
    named = [tensor for tensor in inputs if tensor.name in sequence.pad]
    lengths = {tensor.shape[axis] if axis < len(tensor.shape) else 0 for tensor in named}
    length = max(lengths, default=0)
    units = {tensor.name: tensor.unit(axis, sequence.pad[tensor.name]) for tensor in named} if length else {}
    if len(lengths) != 1 or not units:
        return Fit(sequence, why=padding.NOT_PADDABLE)
    if not sequence.fits(length):
        return Fit(sequence, length=length, why=padding.TOO_LONG)
    known = {name: unit for name, unit in units.items() if unit is not None}
    if len(known) < len(units):
        return Fit(sequence, length=length, why=padding.NOT_PADDABLE)
    top = sequence.bucket(length)
    growth = 0
    for tensor in named:
        rows, added = tensor.shape[0], tensor.growth(axis, top - length, known[tensor.name])
        if len(tensor.data) + rows * added > rows * padding.LARGEST_ROW:
            return Fit(sequence, length=length, why=padding.TOO_LARGE)
        growth += rows * added
    keys = b"\x00".join([tensor.key for tensor in inputs])
    others = [tensor.bucket_key(axis, top) if tensor.name in known else tensor.key for tensor in inputs]
    return Fit(
        sequence,
        length=length,
        key=b"\x00".join([parsed.key[: len(parsed.key) - len(keys)], *others, sequence.mark]),
        units=known,
        growth=growth,
    )


def merge(portions: Sequence[Portion]) -> Message:
    """Merge the rows of all portions into one request, tensor by tensor; only padded binary data are copied."""
    length = longest(portions)
    if length:
        return _padded(portions, length)
    inputs = [
        (tensor, [portion.parsed.state.inputs[index].slice(portion.start, portion.stop) for portion in portions])
        for index, tensor in enumerate(portions[0].parsed.state.inputs)
    ]
    return _written([b'"inputs":['], inputs, total_rows(portions), portions[0].parsed.state.rest)


def _padded(portions: Sequence[Portion], length: int) -> Message:
    """Merge portions whose rows are padded to ``length``."""
    inputs: list[tuple[Tensor, list[Buffer]]] = []
    first = portions[0].parsed
    for index, tensor in enumerate(first.state.inputs):
        buffers = list[Buffer]()
        shape = [*tensor.shape]
        for portion in portions:
            own: Tensor = portion.parsed.state.inputs[index]
            fits = portion.parsed.fit
            unit = None if fits is None else fits.units.get(tensor.name)
            if fits is None or unit is None:
                buffers.append(own.slice(portion.start, portion.stop))
            else:
                shape[fits.sequence.axis] = length
                buffers.append(own.padded(portion.start, portion.stop, fits.sequence.axis, length, unit))
        head = tensors.Tensor(tensor.name, shape, tensor.form, b"", tensor.head, tensor.parameters)
        inputs.append((head, buffers))
    return _written([b'"inputs":['], inputs, total_rows(portions), first.state.rest)


def split(portions: Sequence[Portion], headers: Headers, body: Buffer, limits: Limits = DEFAULT) -> list[Piece]:
    """Check that each output has the batch's rows in dim 0, and split them."""
    total = total_rows(portions)
    try:
        header_length = find(headers, HEADER_LENGTH) or b""
        size = _text_size(header_length, body)
        json_scan.check_size(size, "answer", "max_answer_text", limits)
        text, tail = _message(size, body, binary=bool(header_length))
        json_scan.check(text, "answer", limits)
        spans = json_scan.members(text, "answer", limits)
        if "outputs" not in spans:
            raise WrongRows("answer has no `outputs`", reason=UNREADABLE)
        outputs = tensors.parse("outputs", text, spans.pop("outputs"), tail, limits, any_datatype=True)
        fields = {name: text[start:stop] for name, (start, stop) in spans.items()}
    except json_scan.Beyond as beyond:
        raise TooLarge(str(beyond)) from None
    except json_scan.Malformed as error:
        raise WrongRows(f"answer: {error}", reason=UNREADABLE) from None
    for tensor in outputs:
        if not tensor.shape or tensor.shape[0] != total or tensor.alone in {"nesting", "shared-memory"}:
            raise WrongRows(f"output {tensor.name!r} has shape {tensor.shape} for {total} rows")
    own = fields.pop("id", b"")
    several = len({id(portion.parsed) for portion in portions}) > 1
    if several:
        check_shareable(fields | {tensor.name: tensor.head + tensor.parameters for tensor in outputs}, total)
    before = b"".join([b"%b:%b," % (msgspec.json.encode(name), value) for name, value in fields.items()])
    length = longest(portions)
    if not length:
        return pieces_of(Answer(outputs, before, own, several), portions)
    # Cut back: each portion then has its own answer.
    pieces = list[Piece]()
    at = 0
    for portion in portions:
        rows = portion.stop - portion.start
        parts = [_cut_back(tensor, at, at + rows, portion.parsed.fit, length) for tensor in outputs]
        pieces.append(Piece(Answer(parts, before, own, several, at), 0, rows))
        at += rows
    return pieces


def _cut_back(tensor: Tensor, start: int, stop: int, fits: Fit | None, length: int) -> Tensor:
    """Return rows of an output from a batch padded to ``length``, cut back if the output has that length, too."""
    if fits is None or tensor.name not in fits.sequence.outputs:
        return tensor.part(start, stop)
    axis = fits.sequence.axis
    if tensor.shape[axis : axis + 1] != [length]:
        raise WrongRows(
            f"output {tensor.name!r} has shape {tensor.shape}, but sequence.outputs says that its dimension {axis} is "
            f"the length of the inputs, which is {length}",
            reason=padding.WRONG_LENGTH,
        )
    return tensor.part(start, stop, axis, fits.length)


def agree(one: Piece, other: Piece) -> bool:
    """Whether both can be pieces of one answer: they have equal outputs, but for the rows."""
    return [tensor.key for tensor in one.answer.outputs] == [tensor.key for tensor in other.answer.outputs]


def assemble(parsed: Parsed[Request], pieces: Sequence[Piece]) -> Message:
    """Assemble the answer to one request, with its own ``id``; outputs in the server's order and form."""
    first: Answer = pieces[0].answer
    outputs = [
        (tensor, [piece.answer.outputs[index].slice(piece.start, piece.stop) for piece in pieces])
        for index, tensor in enumerate(first.outputs)
    ]
    row = first.first_row + pieces[0].start
    own = parsed.state.id or (_distinct(first.id, row) if first.several and first.id else first.id)
    before = [first.fields, b'"id":%b,' % own if own else b"", b'"outputs":[']
    return _written(before, outputs, sum(piece.stop - piece.start for piece in pieces), b"")


def _written(before: list[bytes], described: list[tuple[Tensor, list[Buffer]]], rows: int, after: bytes) -> Message:
    """Write a JSON object around tensors, then their binary data; the header has the length of the JSON."""
    binary: list[Buffer] = []
    parts: list[Buffer] = [b"{", *before]
    for index, (tensor, buffers) in enumerate(described):
        if index:
            parts.append(b",")
        tensor.write(buffers, rows, parts, binary)
    parts += (b"]", after, b"}")
    text = joined(parts)
    # Even for an empty binary tensor its size and the header are written.
    has_binary = any(tensor.form == "binary" for tensor, _ in described)
    return Message([(HEADER_LENGTH, b"%d" % sum(map(len, text)))] if has_binary else [], text + binary)


def _text_size(header_length: bytes, body: Buffer) -> int:
    """Return how many bytes of a message are JSON: all, or the number in ``header_length``."""
    if not header_length:
        return len(body)
    if not _LENGTH.fullmatch(header_length) or int(header_length) > len(body):
        shown = header_length[:40].decode("latin-1")
        raise json_scan.Malformed(f"Inference-Header-Content-Length: {shown!r} for a body of {len(body)} bytes")
    return int(header_length)


def _message(size: int, body: Buffer, *, binary: bool) -> tuple[bytes, memoryview | None]:
    """Split a message into its JSON and the rest. Only the JSON is copied, and only if there is a rest."""
    if not binary:
        return body if type(body) is bytes else bytes(body), None
    view = memoryview(body)
    return bytes(view[:size]), view[size:]


def _distinct(server_id: bytes, row: int) -> bytes:
    """Make one request's id (JSON) from the server's id for the whole batch; ``row``: the request's first row."""
    if _UUID.fullmatch(server_id):
        return b'"%b"' % str(uuid5(UUID(server_id[1:-1].decode()), str(row))).encode()
    return b'%b-%d"' % (server_id[:-1], row) if server_id.endswith(b'"') else server_id


def _why_alone(
    inputs: list[Tensor], text: bytes, parameters: dict[str, Span], outputs: Span | None, limits: Limits
) -> str | None:
    """Return why a request cannot share a batch, or None."""
    if not inputs or any(tensor.shape[:1] == [0] for tensor in inputs):
        return "empty"
    if any(name.startswith("sequence_") for name in parameters):
        return "sequence"
    reason = next((tensor.alone for tensor in inputs if tensor.alone), None)
    if reason is None and len({tensor.shape[0] for tensor in inputs}) > 1:
        return "unequal-rows"
    # Parse further only if the text names it at all (or hides it with an escape).
    if reason is None and outputs is not None and _NOT_BY_ROWS.search(text, *outputs):
        for index, fields in enumerate(json_scan.objects(text, "outputs", limits, outputs)):
            if "parameters" in fields:
                for name in json_scan.members(text, f"outputs[{index}].parameters", limits, fields["parameters"]):
                    if name == "classification":
                        return "classification"
                    if name.startswith("shared_memory"):
                        return "shared-memory"
    return reason


def _needed(name: str, fields: dict[str, Span]) -> Span:
    if name not in fields:
        raise json_scan.Malformed(f"{name}: missing")
    return fields.pop(name)


def _whole(where: str, text: bytes, span: Span | None) -> int:
    if span is None:
        return 0
    value = json_scan.cut(text, span)
    try:
        number = msgspec.json.decode(value, type=int)
    except msgspec.DecodeError:
        number = -1
    if not 0 <= number < 2**63:
        raise json_scan.Malformed(f"{where}: expected an integer from 0, got {value[:40].decode(errors='replace')}")
    return number
