"""Rows as numpy arrays: generated, read, repeated, and converted to tensors of the protocols."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import numpy as np

from carpool_cli.answers import BadFile
from carpool_cli.load.tensors import Malformed, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from carpool_cli.load.servers import InputSpec

Array: TypeAlias = "npt.NDArray[Any]"
Arrays: TypeAlias = "dict[str, Array]"
"""By input or output name; dim 0 is the rows, with equal numbers in each."""

DTYPES = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64, "INT8": np.int8,
    "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
    "BYTES": np.object_,
}  # fmt: skip


def random_rows(specs: Sequence[InputSpec], rows: int, seed: int) -> Arrays:
    """Generate inputs: standard normal floats, integers below 100, short texts.

    Raises ``click.ClickException`` for a datatype that numpy lacks.
    """
    rng = np.random.default_rng(seed)
    made: Arrays = {}
    for spec in specs:
        shape = (rows, *spec.row)
        if spec.datatype not in DTYPES:
            raise click.ClickException(f"input {spec.name!r} is {spec.datatype}, which can't be made up: give --inputs")
        dtype = np.dtype(DTYPES[spec.datatype])
        if spec.datatype == "BYTES":
            made[spec.name] = np.array([f"text {n}" for n in rng.integers(0, 10_000, shape).flat], object).reshape(
                shape
            )
        elif dtype.kind == "f":
            made[spec.name] = rng.standard_normal(shape).astype(dtype)
        else:
            made[spec.name] = rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
    return made


def load_npz(path: Path) -> Arrays:
    """Read inputs by name from an npz file.

    Raises ``BadFile`` if it is not one, or the arrays differ in rows.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
    except (OSError, EOFError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise BadFile(f"{path} is no npz file of plain arrays: {error}") from None
    rows = {array.shape[0] if array.ndim else 0 for array in arrays.values()}
    if len(rows) != 1 or 0 in rows:
        raise BadFile(f"{path}: every array needs the same number of rows in dim 0, at least one")
    return arrays


def rows_of(arrays: Arrays) -> int:
    """Return the number of rows."""
    return int(next(iter(arrays.values())).shape[0])


def repeated(arrays: Arrays, rows: int) -> Arrays:
    """Return ``rows`` rows, by repeating the given ones."""
    index = np.arange(rows) % rows_of(arrays)
    return {name: np.ascontiguousarray(array[index]) for name, array in arrays.items()}


def to_tensors(arrays: Mapping[str, Array]) -> list[Tensor]:
    """Return binary tensors.

    Raises ``Malformed`` for a dtype the protocol lacks.
    """
    tensors = []
    for name, array in arrays.items():
        if array.dtype.kind in "OUS":
            texts = [text if isinstance(text, bytes) else str(text).encode() for text in array.flat]
            data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
            tensors.append(Tensor(name, "BYTES", array.shape, binary=data))
            continue
        datatype = next((known for known, dtype in DTYPES.items() if array.dtype == dtype), None)
        if datatype is None:
            raise Malformed(f"{name}: {array.dtype} is no datatype of V2")
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        tensors.append(Tensor(name, datatype, array.shape, binary=little.tobytes()))
    return tensors


def from_tensors(tensors: Sequence[Tensor]) -> Arrays:
    """Return tensors as arrays; BYTES as texts.

    Raises ``Malformed`` if numpy lacks the datatype.
    """
    arrays: Arrays = {}
    for tensor in tensors:
        if tensor.datatype == "BYTES":
            arrays[tensor.name] = np.array(tensor.values(), object).reshape(tensor.shape)
        elif tensor.datatype in DTYPES:
            dtype = np.dtype(DTYPES[tensor.datatype]).newbyteorder("<")
            arrays[tensor.name] = np.frombuffer(tensor.as_binary(), dtype).reshape(tensor.shape)
        else:
            raise Malformed(f"{tensor.name}: numpy has no {tensor.datatype}")
    return arrays
