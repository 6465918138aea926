"""Answer lengths: the mean of the output tokens and their survival function, learned online.

Counts are in bins that grow by a quarter, so memory is constant. Prompt lengths are not used: classes by prompt length
were tried, and changed no figure.
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
"""Upper ends of the bins, one bin higher."""

FADE = 0.998
"""Weight of an answer when the next one ends: the last 500 count."""

ENOUGH = 20
"""Answers needed for an estimate."""

UNKNOWN = 512.0
"""Tokens expected of an answer before that."""


class OutputLengths:
    """Output tokens of the last answers."""

    def __init__(self) -> None:
        self._counts = [0.0] * BINS
        self._above: list[float] = []
        """Weight of the answers in each bin and beyond."""
        self._seen = 0
        self._mean = UNKNOWN

    @property
    def known(self) -> bool:
        """Whether enough answers have ended for an estimate."""
        return bool(self._above)

    def add(self, request: Request) -> None:
        """Count the answer of a request that ended by itself."""
        self._counts = [count * FADE for count in self._counts]
        self._counts[min(BINS - 1, bisect_left(EDGES, request.output_tokens))] += 1
        self._seen += 1
        if self._seen >= ENOUGH:
            self._above = list(accumulate(self._counts[::-1]))[::-1]
            total = sum(count * most for count, most in zip(self._counts, EDGES, strict=True))
            self._mean = total / self._above[0]

    def survival(self, request: Request, generated: float, ahead: float) -> float:
        """Return the probability that a request with ``generated`` tokens gets more than ``ahead`` further ones."""
        if request.max_tokens is not None and generated + ahead >= request.max_tokens:
            return 0.0
        if not self._above:
            return 1.0 if generated + ahead < UNKNOWN else 0.0
        i = bisect_left(EDGES, generated + 1)
        if i >= BINS or self._above[i] < 0.5:
            # Longer than nearly all ended answers: it may double.
            return 1.0 if ahead <= max(generated, 16.0) else 0.0
        j = bisect_left(EDGES, generated + ahead + 1)
        return self._above[j] / self._above[i] if j < BINS else 0.0

    def expected(self, request: Request) -> float:
        """Return the tokens expected of an answer."""
        return self._mean if request.max_tokens is None else min(self._mean, request.max_tokens)
