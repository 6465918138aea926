"""Converts requests to arrays and arrays to answers, for a model file served in this process. Pure; needs numpy.

V1: an instance is the value of a model's only input, or an object of values by input name; predictions likewise.
V2: JSON or little-endian binary tensors; outputs in the requested order, or all; BYTES are UTF-8 strings.
A float32 is written as the digits of its exact double; JSON has no NaN and no infinity, so these become null.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from carpool_sidecar.http1.messages import Buffer, Headers

_TYPES = (
    ("BOOL", "?", "tensor(bool)"),
    ("UINT8", "u1", "tensor(uint8)"),
    ("UINT16", "<u2", "tensor(uint16)"),
    ("UINT32", "<u4", "tensor(uint32)"),
    ("UINT64", "<u8", "tensor(uint64)"),
    ("INT8", "i1", "tensor(int8)"),
    ("INT16", "<i2", "tensor(int16)"),
    ("INT32", "<i4", "tensor(int32)"),
    ("INT64", "<i8", "tensor(int64)"),
    ("FP16", "<f2", "tensor(float16)"),
    ("FP32", "<f4", "tensor(float)"),
    ("FP64", "<f8", "tensor(double)"),
    ("BYTES", "O", "tensor(string)"),
)
"""V2's, numpy's and ONNX's names. BF16 is missing: numpy has none."""

DTYPES = {datatype: dtype for datatype, dtype, _ in _TYPES}
DATATYPES = {onnx: datatype for datatype, _, onnx in _TYPES}

HEADER_LENGTH = b"inference-header-content-length"
JSON = (b"content-type", b"application/json")
BINARY = (b"content-type", b"application/octet-stream")

LARGEST_EMPTY = 8192
"""Product of the sizes of an input without elements that neither its data nor the model prove; zeros aside."""


class Invalid(Exception):  # noqa: N818 - named after the status it becomes
    """The request does not fit the model: 400, and the text names the place."""

    status = 400


class TooLong(Invalid):
    """The request's text, or the answer to it, is larger than the limit: 413, which halves a batch."""

    status = 413


class Spec(NamedTuple):
    """One input or output: V2 datatype and shape, -1 for any size. Empty: a scalar, or its file gives no shape."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: Any = None
    parameters: dict[str, Any] = {}


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Request(msgspec.Struct):
    inputs: list[_Input]
    outputs: list[_Output] = []
    parameters: dict[str, Any] = {}
    id: str | None = None


_requests = msgspec.json.Decoder(_Request)


class Asked(NamedTuple):
    """The outputs that a V2 request asks for, each with whether in binary, and its id."""

    outputs: list[tuple[str, bool]]
    id: str | None


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def text_size(header_length: bytes | None, body: bytes) -> int:
    """Return how many bytes of a body are JSON: all, or the number in Inference-Header-Content-Length."""
    if not header_length:
        return len(body)
    if not header_length.isdigit() or len(header_length) > 12 or int(header_length) > len(body):
        shown = header_length[:40].decode("latin-1")
        raise Invalid(f"Inference-Header-Content-Length: {shown!r} for a body of {len(body)} bytes")
    return int(header_length)


def read_v1(body: bytes, inputs: Sequence[Spec]) -> tuple[dict[str, NDArray[Any]], bool]:
    """Read a ``:predict`` body; also returns whether its columns were named (``inputs``), as its answer's will be."""
    try:
        request = msgspec.json.decode(body)
    except _UNREADABLE as error:
        raise Invalid(f"body: {error}") from None
    if not isinstance(request, dict) or len(request.keys() & {"instances", "inputs"}) != 1:
        raise Invalid("body: expected an object with either `instances` or `inputs`")
    if "inputs" in request:
        columns = request["inputs"]
        if not isinstance(columns, dict):
            columns = {inputs[0].name: columns}
        return _columns(columns, inputs, "inputs"), True
    rows = request["instances"]
    if not isinstance(rows, list) or not rows:
        raise Invalid("instances: expected an array of at least one row")
    names = {spec.name for spec in inputs}
    first = rows[0]
    if isinstance(first, dict) and first.keys() & names:
        for index, row in enumerate(rows):
            if not isinstance(row, dict) or row.keys() != first.keys():
                raise Invalid(f"instances[{index}]: every row needs the inputs {sorted(first)} only, as the first has")
        columns = {name: [row[name] for row in rows] for name in first}
    elif len(inputs) == 1:
        columns = {inputs[0].name: rows}
    else:
        raise Invalid(f"instances: expected objects with the inputs {sorted(names)}")
    return _columns(columns, inputs, "instances"), False


def write_v1(outputs: Mapping[str, NDArray[Any]], *, columns: bool) -> tuple[Headers, bytes]:
    """Write the answer: ``predictions`` by row, or ``outputs`` by column.

    Raises ``Invalid`` if rows are requested and the outputs have no common number of rows.
    """
    rows = {array.shape[:1] for array in outputs.values()}
    if not columns and len(outputs) > 1 and (len(rows) > 1 or rows == {()}):
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
        raise Invalid(f"instances: the model's outputs have no rows in common ({shapes}): send `inputs` instead")
    values = {name: array.tolist() for name, array in outputs.items()}
    answer: Any = next(iter(values.values())) if len(values) == 1 else values
    if not columns and len(values) > 1:
        answer = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return [JSON], msgspec.json.encode({"outputs" if columns else "predictions": answer})


def read_v2(
    header_length: bytes | None,
    body: bytes,
    inputs: Sequence[Spec],
    outputs: Sequence[Spec],
    *,
    max_text: float = math.inf,
) -> tuple[dict[str, NDArray[Any]], Asked]:
    """Read an ``infer`` body. Binary tensors become views of it, but for BYTES: each element is an object, as in JSON.

    ``max_text``: bytes of JSON and of binary BYTES at most. Raises ``Invalid``.
    """
    size = text_size(header_length, body)
    if not size:
        raise Invalid("Inference-Header-Content-Length: a body without JSON is not served here: describe its inputs")
    try:
        request = _requests.decode(memoryview(body)[:size])
    except _UNREADABLE as error:
        raise Invalid(f"body: {error}") from None
    specs = {spec.name: spec for spec in inputs}
    arrays: dict[str, NDArray[Any]] = {}
    at = texts = size
    for index, tensor in enumerate(request.inputs):
        name, datatype, shape = tensor.name, tensor.datatype, tensor.shape
        spec = specs.get(name)
        if spec is None:
            raise Invalid(f"inputs[{index}].name: the model has no input {name!r}, it has {sorted(specs)}")
        if spec.datatype != datatype:
            raise Invalid(f"inputs[{index}].datatype: {name!r} is {spec.datatype}, not {datatype}")
        if any(size < 0 for size in shape):
            raise Invalid(f"inputs[{index}].shape: {shape} has a negative size: send the shape of the data")
        length = tensor.parameters.get("binary_data_size")
        if length is None and tensor.data is None:
            raise Invalid(f"inputs[{index}]: shared memory is not served here: send the data")
        if length is None:
            read = array(tensor.data, spec, f"inputs[{index}].data", shape)
        else:
            where = f"inputs[{index}].parameters.binary_data_size"
            if type(length) is not int or not 0 <= length <= len(body) - at:
                raise Invalid(f"{where}: {length!r}, and {len(body) - at} bytes are left of the body")
            texts += length if datatype == "BYTES" else 0
            if texts > max_text:
                raise TooLong(f"{where}: {texts} bytes of JSON and BYTES; onnx.maxText is {max_text}: raise it")
            try:
                read = _from_binary(memoryview(body)[at : at + length], spec, shape)
            except (ValueError, struct.error):
                raise Invalid(f"{where}: {length} bytes are no {datatype} {shape}") from None
            at += length
        if name in arrays:
            raise Invalid(f"inputs[{index}].name: {name!r} comes twice")
        arrays[name] = _fitting(read, spec, f"inputs[{index}]")
        declared = spec.shape or [-1] * len(shape)
        claimed = math.prod(size for size, want in zip(shape, declared, strict=True) if size and want == -1)
        if 0 in shape and claimed > LARGEST_EMPTY:
            raise Invalid(f"inputs[{index}].shape: {shape} has no elements: send {LARGEST_EMPTY} such rows at most")
    _complete(arrays, specs)
    if at != len(body):
        raise Invalid(f"body: {len(body) - at} bytes follow the binary data that its inputs name")
    return arrays, _asked(request, outputs)


def _asked(request: _Request, outputs: Sequence[Spec]) -> Asked:
    """Check the outputs that a request asks for; raises ``Invalid``."""
    binary = request.parameters.get("binary_data_output", False)
    for index, output in enumerate(request.outputs):
        if "classification" in output.parameters:
            raise Invalid(f"outputs[{index}].parameters: classification is not served here: take the largest yourself")
    asked = [(output.name, output.parameters.get("binary_data", binary)) for output in request.outputs]
    if len({name for name, _ in asked}) < len(asked):
        raise Invalid("outputs: an output comes twice: name each once")
    if unknown := sorted({name for name, _ in asked} - {spec.name for spec in outputs}):
        raise Invalid(f"outputs: the model has no output {', '.join(unknown)}")
    return Asked(asked or [(spec.name, binary) for spec in outputs], request.id)


def write_v2(
    model: str, outputs: Mapping[str, NDArray[Any]], specs: Sequence[Spec], asked: Asked
) -> tuple[Headers, bytes]:
    """Write the answer, binary data behind its JSON header."""
    datatypes = {spec.name: spec.datatype for spec in specs}
    tail: list[Buffer] = []
    described = []
    for name, binary in asked.outputs:
        output, datatype = outputs[name], datatypes[name]
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": output.shape}
        if binary or datatype == "FP16":
            data = _to_binary(output, datatype)
            entry["parameters"] = {"binary_data_size": len(data)}
            tail.append(data)
        else:
            entry["data"] = output.ravel().tolist()
        described.append(entry)
    answer: dict[str, Any] = {"model_name": model, "model_version": "1", "outputs": described}
    if asked.id is not None:
        answer["id"] = asked.id
    head = msgspec.json.encode(answer)
    if not tail:
        return [JSON], head
    return [BINARY, (HEADER_LENGTH, b"%d" % len(head))], b"".join([head, *tail])


def _columns(columns: Mapping[str, Any], inputs: Sequence[Spec], where: str) -> dict[str, NDArray[Any]]:
    specs = {spec.name: spec for spec in inputs}
    arrays = {}
    for name, values in columns.items():
        spec = specs.get(name)
        if spec is None:
            raise Invalid(f"{where}: the model has no input {name!r}, it has {sorted(specs)}")
        arrays[name] = _fitting(array(values, spec, where), spec, where)
    _complete(arrays, specs)
    return arrays


def _complete(arrays: Mapping[str, object], specs: Mapping[str, Spec]) -> None:
    if missing := sorted(specs.keys() - arrays.keys()):
        raise Invalid(f"inputs: {', '.join(missing)} missing")


def array(values: object, spec: Spec, where: str, shape: Sequence[int] | None = None) -> NDArray[Any]:
    """Make an array of JSON values. Values that don't fit the datatype are an error: nothing is cut or wrapped."""
    if unfit := _leaves(values) - _FROM_JSON[spec.datatype]:
        got = " and ".join(sorted(_JSON[each] for each in unfit))
        raise Invalid(f"{where}: {spec.name!r} is {spec.datatype}, got {got}")
    try:
        made = _of_texts(values) if spec.datatype == "BYTES" else _of_numbers(values, np.dtype(DTYPES[spec.datatype]))
        return made if shape is None else made.reshape(shape)
    except (ValueError, OverflowError, TypeError) as error:
        raise Invalid(f"{where}: {error}") from None


_JSON = {str: "text", bool: "bool", int: "int", float: "float", dict: "object", type(None): "null"}
"""Names of JSON's types."""

_BY_KIND: Mapping[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}, "O": {str}}
_FROM_JSON = {datatype: _BY_KIND[np.dtype(dtype).kind] for datatype, dtype in DTYPES.items()}
"""Types of JSON values that a datatype takes: no fraction is cut off, and no text is read as a number."""


def _leaves(values: object) -> set[type]:
    """Return the types of what is in nested lists.

    Before numpy looks at them: of one long text and many short ones it would make an array of long ones.
    """
    found, lists = set[type](), [values]
    while lists:
        one = lists.pop()
        if type(one) is not list:
            found.add(type(one))
            continue
        types = set(map(type, one))
        if list in types:
            lists += [each for each in one if type(each) is list]
        found |= types - {list}
    return found


def _of_texts(values: object) -> NDArray[Any]:
    # As objects: numpy's own strings end at their last NUL, and are each as long as the longest.
    made = np.asarray(values, dtype="O")
    if any(type(each) is list for each in made.ravel()):  # which numpy takes for elements where lengths differ
        raise ValueError("arrays of different lengths or depths: give all rows the same shape")
    return made


def _of_numbers(values: object, wanted: np.dtype[Any]) -> NDArray[Any]:
    if wanted.kind in "iub":
        return np.asarray(values, dtype=wanted)  # through Python's numbers: one out of range is an error, not wrapped
    with np.errstate(over="ignore"):
        made = np.asarray(values, dtype="f8").astype(wanted)
    if np.isinf(made).any():  # JSON has none
        raise OverflowError(f"a number is out of bounds for {wanted.name}")
    return made


def _fitting(array: NDArray[Any], spec: Spec, where: str) -> NDArray[Any]:
    """Check an array's shape against the model's, if its file gives one."""
    if spec.shape and (
        len(array.shape) != len(spec.shape)
        or any(want not in {-1, have} for want, have in zip(spec.shape, array.shape, strict=True))
    ):
        raise Invalid(f"{where}: {spec.name!r} takes shape {list(spec.shape)}, got {list(array.shape)}")
    return array


def _from_binary(data: memoryview, spec: Spec, shape: Sequence[int]) -> NDArray[Any]:
    """Make an array of a buffer. Raises ``ValueError`` or ``struct.error`` if they don't fit."""
    if spec.datatype != "BYTES":
        return np.frombuffer(data, dtype=DTYPES[spec.datatype]).reshape(shape)
    strings, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        element = data[at + 4 : at + 4 + length]
        if len(element) < length:  # a slice ends with the buffer, without an error
            raise Invalid(f"{spec.name}: an element of {length} bytes, and {len(element)} bytes are left")
        try:
            strings.append(str(element, "utf-8"))
        except UnicodeDecodeError as error:
            raise Invalid(f"{spec.name}: an element is not UTF-8: {error}") from None
        at += 4 + length
    return np.array(strings, dtype="O").reshape(shape)


def _to_binary(output: NDArray[Any], datatype: str) -> Buffer:
    if datatype != "BYTES":
        # Flat: a memoryview with a zero in its shape can't be cast.
        return np.ascontiguousarray(output, dtype=DTYPES[datatype]).reshape(-1).view("u1").data
    texts = [str(text).encode() for text in output.ravel()]
    return b"".join([len(text).to_bytes(4, "little") + text for text in texts])
