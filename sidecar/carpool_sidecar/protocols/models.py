"""The batch axis of a model's tensors, read from its server's metadata.

Merging depends on it: if dim 0 is not the batch, concatenated requests give wrong answers without an error. So the
axis is None unless the server states one, and each result has its reason and, if it is None, the fix.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec


class Axis(NamedTuple):
    """``First``: dim 0 of every input and output is the batch. ``max_batch``: the most rows the server takes, or None.

    ``reason`` is a sentence for people: where this was read and, for ``None``, what to do about it. ``by_file``: it
    comes from the model's own file, which overrides the protocol.
    """

    kind: Literal["First", "None"]
    max_batch: int | None
    reason: str
    by_file: bool = False


class _Tensor(msgspec.Struct):
    name: str = "?"
    shape: list[int] = []


class _Metadata(msgspec.Struct):
    name: str = "?"
    inputs: list[_Tensor] = []
    outputs: list[_Tensor] = []


class _TritonConfig(msgspec.Struct):
    name: str
    max_batch_size: int = 0
    sequence_batching: Any = None


def axis_from_config(config: bytes) -> Axis | None:
    """Read the axis from Triton's ``GET /v2/models/M/config``; None if ``config`` is not such a document.

    Triton, "Model Configuration": with ``max_batch_size`` > 0 it adds the batch as dim 0 of every tensor; with 0 the
    shapes are the model's own, and dim 0 may be anything.
    """
    try:
        model = msgspec.json.decode(config, type=_TritonConfig)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if model.sequence_batching is not None:
        return Axis("None", None, f"Triton schedules {model.name!r} by sequences, which are never batched here")
    if model.max_batch_size > 0:
        return Axis("First", model.max_batch_size, f"Triton's configuration has max_batch_size {model.max_batch_size}")
    return Axis(
        "None",
        None,
        "Triton's configuration has max_batch_size 0: set it to the largest batch in config.pbtxt, "
        f"or, {fix(model.name)}",
    )


def axis_from_metadata(metadata: bytes) -> Axis:
    """Read the axis from ``GET /v2/models/M``: First only if the shape of every input and output starts with -1.

    Ask :func:`axis_from_config` first: Triton shows -1 there too when ``max_batch_size`` > 0, but not its size.
    """
    try:
        model = msgspec.json.decode(metadata, type=_Metadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Axis("None", None, "the model's metadata is unreadable: set `models: [{name: ..., axis: First}]`")
    if not model.inputs or not model.outputs:
        missing = "outputs" if model.inputs else "inputs"
        return Axis("None", None, f"the model's metadata names no {missing}: {fix(model.name)}")
    for side, tensors in (("input", model.inputs), ("output", model.outputs)):
        for tensor in tensors:
            if tensor.shape[:1] != [-1]:
                shown = f"{side} {tensor.name!r} has shape {tensor.shape}, not [-1, ...]"
                return Axis(
                    "None", None, f"{shown}: export the model with a dynamic first dimension, or {fix(model.name)}"
                )
    return Axis("First", None, "the shapes of all inputs and outputs start with -1 in the model's metadata")


def fix(name: str) -> str:
    """Return what to do about an unknown axis, and when."""
    return (
        "if dim 0 of every tensor is the batch and rows do not affect each other, "
        f"set `models: [{{name: {name}, axis: First}}]`"
    )
