"""The batch axis of an ONNX model, from the names of its first dimensions. Pure.

Exporters name dynamic dimensions, and so do people (``dynamic_axes={"x": {0: "batch"}}``). A name that people wrote is
accepted as proof that dim 0 is not the batch. It is no proof that it is the batch: answers have to be compared
for that.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from carpool_sidecar.protocols.models import Axis, fix

if TYPE_CHECKING:
    from collections.abc import Sequence


class Dimension(NamedTuple):
    """Dim 0 of one input or output: its size, its name, or None if it has neither; ``scalar``: no dim 0 is known."""

    tensor: str
    size: int | None
    name: str | None
    scalar: bool = False


_BATCH = re.compile(r"(?i)n|b|bs|bsz|.*batch.*|(num_?)?(samples|examples|rows|requests|instances|images)")
# tf2onnx: unk__615. paddle2onnx: DynamicDimension.0. torch: x_dynamic_axes_1, s0, Concatoutput_dim_0. Others: ?, None.
_GENERATED = re.compile(
    r"(?i)|\?|-1|none|unknown.*|unk_*\d*|(.*\.)?dynamicdimension\.?\d*|.*_dynamic_axes_\d+|.*_dim_?\d+|(d|s|u|x|dim|dyn)_?\d+"
)
_NO_BATCH = re.compile(
    r"(?i)t|l|h|w|c|k|m|.*(time|seq|len|step|frame|token|word|char|box|det|anchor|object|class|candidate|proposal|point"
    r"|node|edge|vertex|height|width|channel|selected|nms|layer|head|state|past|cache).*"
)
_EXPRESSION = re.compile(r"[*+/() -]")


def axis_of(model: str, inputs: Sequence[Dimension], outputs: Sequence[Dimension]) -> Axis:
    """Return First only if dim 0 of all inputs and outputs is dynamic, and no name shows that it is no batch."""
    for side, dimensions in (("input", inputs), ("output", outputs)):
        for dim in dimensions:
            if dim.scalar:
                return _none(
                    model, f"{side} {dim.tensor!r} is a scalar, or the file gives no shape for it: no batch is known"
                )
            if dim.size is not None:
                why = (
                    f"dim 0 of {side} {dim.tensor!r} is fixed to {dim.size}: export the model with a dynamic first "
                    f'dimension (torch.onnx.export(..., dynamic_axes={{"{dim.tensor}": {{0: "batch"}}}}))'
                )
                # The runtime takes inputs of no other size, so naming the axis is no way out. Outputs may have others.
                return Axis("None", None, why, by_file=True) if side == "input" else _none(model, why)
            if dim.name is not None and _meaning(dim.name) == "other":
                return _none(model, f"dim 0 of {side} {dim.tensor!r} is named {dim.name!r}, which is no batch")
    named = [(side, dim) for side, dims in (("input", inputs), ("output", outputs)) for dim in dims if _said(dim)]
    for side, dim in named[1:]:
        first_side, first = named[0]
        if _meaning(dim.name or "") != _meaning(first.name or "") or (
            _meaning(dim.name or "") == "unknown" and dim.name != first.name
        ):
            return _none(
                model,
                f"dim 0 of {side} {dim.tensor!r} is named {dim.name!r}, and that of {first_side} {first.tensor!r} "
                f"{first.name!r}: they are not the same",
            )
    return Axis("First", None, "dim 0 of all inputs and outputs is dynamic, and their names don't contradict")


def _said(dim: Dimension) -> bool:
    return dim.name is not None and _meaning(dim.name) != "nothing"


def _meaning(name: str) -> str:
    """Classify a name: ``batch``, ``other`` than a batch, ``unknown``, or ``nothing`` if a program generated it."""
    if _GENERATED.fullmatch(name):
        return "nothing"
    if _EXPRESSION.search(name):
        return "other"  # batch*seq: rows that were flattened
    if _BATCH.fullmatch(name):
        return "batch"
    return "other" if _NO_BATCH.fullmatch(name) else "unknown"


def _none(model: str, why: str) -> Axis:
    return Axis(
        "None",
        None,
        f"{why}; or, {fix(model)}",
        by_file=True,
    )
