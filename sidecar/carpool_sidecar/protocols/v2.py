"""Open Inference Protocol V2 over REST: ``POST /v2/models/M[/versions/V]/infer``, JSON and binary tensors.

What decides:

- ``id``, Triton's ``timeout`` and ``priority`` are the caller's: they are not part of the key, never sent with a batch,
  and the ``id`` comes back in the caller's answer. Everything else is part of the key and sent once for the batch.
- Sequences, shared memory, classification, inputs that differ in dim 0, scalars, and JSON whose elements are of another
  kind than their datatype's ride alone, untouched.
- Of an answer, other fields and parameters are about the batch and go to every rider as they are, unless they hold an
  array. Of an answer put together from several they are those of the first.

Sources: the protocol's ``inference_rest.md``; Triton's extensions ``binary_data``, ``schedule_policy``, ``sequence``,
``shared_memory``, ``classification``, ``parameters``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import msgspec

from carpool_sidecar.protocols import json_scan, tensors
from carpool_sidecar.protocols.common import (
    UNREADABLE,
    BadRequest,
    Buffer,
    Endpoint,
    Message,
    Parsed,
    Piece,
    Ride,
    WrongRows,
    check_shareable,
    pieces_of,
    total_rows,
)
from carpool_sidecar.protocols.headers import find

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_sidecar.protocols.common import Headers
    from carpool_sidecar.protocols.headers import Facts
    from carpool_sidecar.protocols.tensors import Tensor

HEADER_LENGTH = b"inference-header-content-length"
_LENGTH = re.compile(rb"\d{1,12}")
_NOT_BY_ROWS = re.compile(rb"classification|shared_memory|\\")


@dataclass(slots=True)
class Request:
    """Inputs of a request; ``rest``: the members after them as sent with a batch; ``id``: a JSON string or empty."""

    inputs: list[Tensor]
    rest: bytes
    id: bytes


@dataclass(slots=True)
class Answer:
    """The outputs of an answer; ``fields``: the members before them; ``id``: the server's own, or empty."""

    outputs: list[Tensor]
    fields: bytes
    id: bytes


def parse(endpoint: Endpoint, facts: Facts, body: Buffer) -> Parsed[Request | None]:
    """Validate an ``infer`` body and find its tensors. Binary tensors stay views of ``body``."""
    if facts.content_encoding not in {b"", b"identity"}:
        return _alone(endpoint, facts, body, "encoded")
    if facts.header_length == b"0":
        return _alone(endpoint, facts, body, "raw")  # Triton's raw binary request: the body is the only input's data
    try:
        # 1. The JSON header, and the binary data after it
        fields, tail = _message(facts.header_length, body)
        if "inputs" not in fields:
            raise BadRequest("inputs: missing")
        inputs = tensors.parse("inputs", fields.pop("inputs"), tail)
        parameters = json_scan.members(fields.pop("parameters", b"{}"), "parameters")
        # 2. What is the caller's own
        name = json_scan.string(fields.pop("id"), "id") if "id" in fields else None
        timeout = _whole("parameters.timeout", parameters.pop("timeout", b"0"))
        priority = _whole("parameters.priority", parameters.pop("priority", b"0"))
        parameters.pop("binary_data_size", None)
        # 3. Whether it may share a batch
        alone = _why_alone(inputs, parameters, fields.get("outputs"))
    except json_scan.Surrogates:
        return _alone(endpoint, facts, body, "surrogates")
    except json_scan.Malformed as error:
        raise BadRequest(str(error)) from None
    # 4. The members after `inputs`, and the key
    if parameters:
        fields["parameters"] = b"{%b}" % tensors.join_members(parameters)
    rest = b"," + tensors.join_members(fields) if fields else b""
    # Only elements that came count: a shape without any, or in shared memory, may claim 2^63 rows in 100 bytes.
    shapes = [tensor.shape for tensor in inputs if tensor.data and 0 not in tensor.shape]
    return Parsed(
        endpoint,
        b"\x00".join([b"v2", endpoint.target, facts.key, rest, *[tensor.key for tensor in inputs]]),
        max((shape[0] for shape in shapes if shape), default=1),
        len(body),
        max(map(prod, shapes), default=1),
        Request(inputs, rest, msgspec.json.encode(name) if name is not None else b""),
        alone,
        form=b"".join([rest, *[tensor.head for tensor in inputs]]),
        id=name,
        timeout_s=timeout / 1e6 if timeout else None,
        priority=priority or None,
    )


def merge(rides: Sequence[Ride]) -> Message:
    """One request with the rows of all rides: tensor by tensor, no binary data copied."""
    inputs = [
        (tensor, [ride.parsed.state.inputs[index].slice(ride.start, ride.stop) for ride in rides])
        for index, tensor in enumerate(rides[0].parsed.state.inputs)
    ]
    return _written([b'"inputs":['], inputs, total_rows(rides), rides[0].parsed.state.rest)


def split(rides: Sequence[Ride], headers: Headers, body: Buffer) -> list[Piece]:
    """Check that each output has the batch's rows in dim 0, and share them out."""
    total = total_rows(rides)
    try:
        fields, tail = _message(find(headers, HEADER_LENGTH) or b"", body)
        if "outputs" not in fields:
            raise WrongRows("answer has no `outputs`", reason=UNREADABLE)
        outputs = tensors.parse("outputs", fields.pop("outputs"), tail, any_datatype=True)
    except json_scan.Malformed as error:
        raise WrongRows(f"answer: {error}", reason=UNREADABLE) from None
    for tensor in outputs:
        if not tensor.shape or tensor.shape[0] != total or tensor.alone in {"nesting", "shared-memory"}:
            raise WrongRows(f"output {tensor.name!r} has shape {tensor.shape} for {total} rows")
    own = fields.pop("id", b"")
    if len({id(ride.parsed) for ride in rides}) > 1:
        check_shareable(fields | {tensor.name: tensor.head + tensor.parameters for tensor in outputs})
    before = b"".join([b"%b:%b," % (msgspec.json.encode(name), value) for name, value in fields.items()])
    return pieces_of(Answer(outputs, before, own), rides)


def assemble(parsed: Parsed[Request], pieces: Sequence[Piece]) -> Message:
    """Put together the answer to one request, with its own ``id``; outputs in the server's order and form."""
    first: Answer = pieces[0].answer
    if len(pieces) > 1 and len({tuple(tensor.key for tensor in piece.answer.outputs) for piece in pieces}) > 1:
        raise WrongRows("answers to the parts of one request differ in their outputs", reason="parts")
    outputs = [
        (tensor, [piece.answer.outputs[index].slice(piece.start, piece.stop) for piece in pieces])
        for index, tensor in enumerate(first.outputs)
    ]
    own = parsed.state.id or first.id
    before = [first.fields, b'"id":%b,' % own if own else b"", b'"outputs":[']
    return _written(before, outputs, sum(stop - start for _, start, stop in pieces), b"")


def _written(before: list[bytes], described: list[tuple[Tensor, list[Buffer]]], rows: int, after: bytes) -> Message:
    """Write a JSON object around tensors, then their binary data; the header tells where the former ends."""
    binary: list[Buffer] = []
    objects = b",".join([tensor.write(buffers, rows, binary) for tensor, buffers in described])
    text = b"".join([b"{", *before, objects, b"]", after, b"}"])
    # Even where a binary tensor is empty its size is named, and the header with it.
    has_binary = any(tensor.form == "binary" for tensor, _ in described)
    return Message([(HEADER_LENGTH, b"%d" % len(text))] if has_binary else [], [text, *binary])


def _message(header_length: bytes, body: Buffer) -> tuple[dict[str, bytes], memoryview | None]:
    """Take a message apart: the members of its JSON object, and what follows if ``header_length`` says where."""
    tail: memoryview | None = None
    if header_length:
        if not _LENGTH.fullmatch(header_length) or int(header_length) > len(body):
            shown = header_length[:40].decode("latin-1")
            raise json_scan.Malformed(f"Inference-Header-Content-Length: {shown!r} for a body of {len(body)} bytes")
        body = memoryview(body)
        body, tail = body[: int(header_length)], body[int(header_length) :]
    text = bytes(body)
    json_scan.check_text(text, "body")
    return json_scan.members(text, "body"), tail


def _why_alone(inputs: list[Tensor], parameters: dict[str, bytes], outputs: bytes | None) -> str | None:
    """Say why a request cannot share a batch, or None. One without rows is refused."""
    if not inputs:
        raise BadRequest("inputs: empty, expected at least one tensor", reason="empty")
    for index, tensor in enumerate(inputs):
        if tensor.shape[:1] == [0]:
            raise BadRequest(f"inputs[{index}].shape: {tensor.shape} has no rows", reason="empty")
    if any(name.startswith("sequence_") for name in parameters):
        return "sequence"
    alone = next((tensor.alone for tensor in inputs if tensor.alone), None)
    if alone is None and len({tensor.shape[0] for tensor in inputs}) > 1:
        return "unequal-rows"
    # Named in the text at all (or hidden by an escape)? Only then look closer.
    if alone is None and outputs is not None and _NOT_BY_ROWS.search(outputs):
        for index, output in enumerate(json_scan.elements(outputs, "outputs")):
            fields = json_scan.members(bytes(output), f"outputs[{index}]")
            for name in json_scan.members(fields.get("parameters", b"{}"), f"outputs[{index}].parameters"):
                if name == "classification":
                    return "classification"
                if name.startswith("shared_memory"):
                    return "shared-memory"
    return alone


def _whole(where: str, value: bytes) -> int:
    try:
        number = msgspec.json.decode(value, type=int)
    except msgspec.DecodeError:
        number = -1
    if not 0 <= number < 2**63:
        raise json_scan.Malformed(f"{where}: expected an integer from 0, got {value[:40].decode(errors='replace')}")
    return number


def _alone(endpoint: Endpoint, facts: Facts, body: Buffer, reason: str) -> Parsed[Request | None]:
    """Describe a request forwarded as it is, counted as one row."""
    key = b"\x00".join((b"v2", endpoint.target, facts.key, b"alone"))
    return Parsed(endpoint, key, 1, len(body), 1, None, reason)
