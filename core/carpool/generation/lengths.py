"""How long answers get: the mean and quantiles of output tokens by class, learned online.

A class is a range of prompt lengths. Counts lie in bins that grow by a quarter, so they take the same memory whatever
comes.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.generation.requests import Request

GROWTH = 1.25
BINS = 48
"""The last begins at 1.25^47 = 36,000 tokens."""

EDGES = [ceil(GROWTH**i) for i in range(BINS)]
"""What an answer in each bin has at most, one bin higher."""

FADE = 0.998
"""Weight of an answer when the next of its class ends: the last 500 count."""

ENOUGH = 20
"""Answers from which a class speaks for itself."""

UNKNOWN = 512.0
"""Tokens expected of an answer before any ended."""


class _Class:
    """Counts of one class. ``above[i]``: weight of answers beyond bin i; ``tokens[i]``: their tokens."""

    __slots__ = ("above", "counts", "seen", "tokens")

    def __init__(self) -> None:
        self.counts = [0.0] * BINS
        self.seen = 0
        self.above: list[float] = []
        self.tokens: list[float] = []

    def add(self, output_tokens: int) -> None:
        self.counts = [count * FADE for count in self.counts]
        self.counts[_bin(output_tokens)] += 1
        self.seen += 1
        backwards = self.counts[::-1]
        self.above = list(accumulate(backwards))[::-1]
        self.tokens = list(accumulate(c * e for c, e in zip(backwards, EDGES[::-1], strict=True)))[::-1]

    def remaining(self, generated: float) -> float:
        i = min(_bin(generated + 1), BINS - 1)
        if self.above[i] < 0.5:
            # Longer than nearly all that ended: it may well double.
            return max(generated, 16.0)
        return max(1.0, self.tokens[i] / self.above[i] - generated)

    def survival(self, generated: float, ahead: float) -> float:
        i = bisect_left(EDGES, generated + 1)
        if i >= BINS or self.above[i] < 0.5:
            return 1.0 if ahead <= max(generated, 16.0) else 0.0
        j = bisect_left(EDGES, generated + ahead + 1)
        return self.above[j] / self.above[i] if j < BINS else 0.0


class OutputLengths:
    """Output tokens by class of prompt length: powers of two from 64 to 32,768."""

    def __init__(self) -> None:
        self._all = _Class()
        self._classes = [_Class() for _ in range(10)]

    def add(self, request: Request) -> None:
        """Count the answer of a request that ended by itself."""
        self._all.add(request.output_tokens)
        self._classes[_prompt_class(request.prompt_tokens)].add(request.output_tokens)

    def survival(self, request: Request, generated: float, ahead: float) -> float:
        """Return the probability that a request with ``generated`` tokens gets more than ``ahead`` further ones."""
        if request.max_tokens is not None and generated + ahead >= request.max_tokens:
            return 0.0
        known = self._known(request)
        if known is None:
            return 1.0 if generated + ahead < UNKNOWN else 0.0
        return known.survival(generated, ahead)

    def remaining(self, request: Request, generated: float) -> float:
        """Return the tokens expected after ``generated``, of a request that goes on."""
        known = self._known(request)
        expected = max(UNKNOWN - generated, 16.0) if known is None else known.remaining(generated)
        return expected if request.max_tokens is None else min(expected, max(0.0, request.max_tokens - generated))

    def _known(self, request: Request) -> _Class | None:
        known = self._classes[_prompt_class(request.prompt_tokens)]
        if known.seen < ENOUGH:
            known = self._all
        return known if known.seen >= ENOUGH else None


def _bin(tokens: float) -> int:
    return min(BINS - 1, bisect_left(EDGES, tokens))


def _prompt_class(tokens: int) -> int:
    return min(9, max(0, tokens.bit_length() - 6))
