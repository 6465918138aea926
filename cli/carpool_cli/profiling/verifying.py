"""Checks whether batching is safe for a model: compares rows answered alone with the same rows batched."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from carpool_cli.profiling.arrays import Array, Arrays, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable


class Verdict(NamedTuple):
    """``worst``: the largest difference, relative to the answer's own scale. ``why`` is empty if batching is safe."""

    rows: int
    worst: float
    same_argmax: bool
    why: str


def compare(run: Callable[[Arrays], Arrays], inputs: Arrays, tolerance: float) -> Verdict:
    """Run each row alone, then all in one batch, forwards and backwards, and compare.

    Float sums differ in their last bits with the batch, so floats are compared within ``tolerance`` of the largest
    value of the output, and by argmax over the last axis; everything else must be equal.
    """
    rows = rows_of(inputs)
    alone = [run({name: array[row : row + 1] for name, array in inputs.items()}) for row in range(rows)]
    worst, same = 0.0, True
    for order in (np.arange(rows), np.arange(rows)[::-1]):
        merged = run({name: np.ascontiguousarray(array[order]) for name, array in inputs.items()})
        for name, answer in merged.items():
            if not answer.ndim or answer.shape[0] != rows:
                why = f"output {name!r} of {rows} rows has shape {list(answer.shape)}: its first axis is not the rows"
                return Verdict(rows, worst, same, why)
            for place, row in enumerate(order):
                one, many = alone[row][name][0], answer[place]
                if np.shape(one) != np.shape(many):
                    why = f"output {name!r} has rows of shape {np.shape(one)} alone and {np.shape(many)} merged"
                    return Verdict(rows, worst, same, why)
                worst = max(worst, _difference(np.asarray(one), np.asarray(many)))
                same = same and _same_argmax(np.asarray(one), np.asarray(many))
    if worst > tolerance:
        why = f"merged answers differ by {worst:.2g} of the largest value, more than --tolerance {tolerance:g}"
    elif not same:
        why = "merged answers have another argmax"
    else:
        why = ""
    return Verdict(rows, worst, same, why)


def _difference(one: Array, many: Array) -> float:
    if one.dtype.kind != "f":
        return 0.0 if np.array_equal(one, many) else float("inf")
    if not one.size or np.array_equal(one, many, equal_nan=True):
        return 0.0
    scale = float(np.max(np.abs(one))) or 1.0
    difference = float(np.max(np.abs(one.astype(np.float64) - many))) / scale
    return difference if difference == difference else float("inf")  # noqa: PLR0124 - NaN on one side only


def _same_argmax(one: Array, many: Array) -> bool:
    return one.dtype.kind != "f" or not one.ndim or not one.size or bool(np.all(one.argmax(-1) == many.argmax(-1)))
