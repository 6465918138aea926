"""Curves through noisy means: shrunk towards lines through their neighbours, and made monotone."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def smoothed(rows: Sequence[int], means: Sequence[float], counts: Sequence[float], noise: float) -> list[float]:
    """Shrink each size's mean towards the line through its neighbours, by as much as chance explains.

    With sixty sizes and a few noisy batches each, the best-looking size is best by chance. This is empirical Bayes
    with a random effect (about lines: Thompson and Sharp 1999): spread about the line beyond the means' own
    errors is real, a step or a bend, and is kept; without noise all of it is. Neighbours are sizes within a factor of
    two: one line through all sizes is far off at the ends of a bent curve.
    """
    if noise <= 0 or len(rows) < _ENOUGH_SIZES:
        return list(means)
    line, _ = _lines(rows, means, counts)
    # Errors are relative: a batch twice as long is off by twice as much.
    line, leverage = _lines(rows, means, [n / value**2 for n, value in zip(counts, line, strict=True)])
    off = [mean / value - 1 for mean, value in zip(means, line, strict=True)]
    precision = [n / noise**2 for n in counts]
    # If a size outweighs its neighbours, the line follows that size and does not show how far sizes lie off it.
    free = [max(1 - share, 0.0) for share in leverage]
    real = _between(off, precision, sum(free))
    # Share of each deviation that is kept: 1 for an exact mean, 0 if the line explains all means.
    return [value * (1 + o * real / (real + 1 / p)) for value, o, p in zip(line, off, precision, strict=True)]


def _between(off: Sequence[float], precision: Sequence[float], freedom: float) -> float:
    """Return the variance that means would have about the line without their errors (Paule and Mandel 1982).

    Weights are by both errors and this variance. Weighted by errors alone (DerSimonian and Laird 1986), thousands
    of small batches, which lie on their own line, would imply that all other sizes do too.
    """
    real = 0.0
    for _ in range(_ROUNDS):
        weights = [1 / (real + 1 / p) for p in precision]
        squares = [w * o * o for w, o in zip(weights, off, strict=True)]
        excess = sum(squares) - freedom
        if excess <= _CLOSE * freedom:
            break
        # Newton's step from below never overshoots, since the excess is convex and falls.
        real += excess / sum(w * square for w, square in zip(weights, squares, strict=True))
    return real


def _lines(rows: Sequence[int], means: Sequence[float], weights: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at each size the line through those within a factor of two, and the weight of its own mean in that."""
    # Prefix sums of w, wb, wbb, wm and wbm: each window's sums are differences.
    sums = [(0.0, 0.0, 0.0, 0.0, 0.0)]
    for b, m, w in zip(rows, means, weights, strict=True):
        before = sums[-1]
        sums.append((before[0] + w, before[1] + w * b, before[2] + w * b * b, before[3] + w * m, before[4] + w * b * m))
    line, leverage = [], []
    for b, mean, weight in zip(rows, means, weights, strict=True):
        low, high = sums[bisect_left(rows, b / 2)], sums[bisect_right(rows, 2 * b)]
        total, first, second, level, product = (upto - before for upto, before in zip(high, low, strict=True))
        middle = first / total
        spread = second - first * middle
        value = level / total
        share = 1 / total
        if spread > 1e-9 * second:
            value += (product - middle * level) / spread * (b - middle)
            share += (b - middle) ** 2 / spread
        # Far from the heavy sizes a line may fall below zero, which is no time.
        line.append(value if value > 0 else mean)
        leverage.append(weight * share)
    return line, leverage


_ENOUGH_SIZES = 4

_ROUNDS = 20
_CLOSE = 1e-3
"""Newton's steps for a variance, at most, and how near it is to be, relative to the degrees of freedom."""


def isotonic(values: Sequence[float], weights: Sequence[float]) -> tuple[list[float], list[float]]:
    """Pool adjacent violators: the non-decreasing values nearest in weighted squares, and each one's pooled weight."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] >= mean:
            before, share, count = blocks.pop()
            mean = (mean * total + before * share) / (total + share)
            total += share
            length += count
        blocks.append((mean, total, length))
    fitted = [mean for mean, _, length in blocks for _ in range(length)]
    return fitted, [total for _, total, length in blocks for _ in range(length)]
