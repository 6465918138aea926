"""The duration of an engine's step, learned online from streams.

t(B, KV, P) = a + f(B) + c KV + d P, for B sequences that decode, KV tokens in the cache and P prompt tokens in the
step. f is linear between knots and never falls: engines with experts (MoE) load more of them with each sequence, and a
straight line is off by 20 to 39 % there. A window of steps gives one equation, T = a steps + sum f(B) + c sum KV + d
prompt tokens. The coefficients are those of non-negative least squares in relative errors, with older windows fading.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

KNOTS = (0, 8, 16, 32, 64, 128, 256)
"""Knots of f; beyond the last the line continues."""

WIDTHS = [*(high - low for low, high in pairwise(KNOTS)), KNOTS[-1]]

COUNT = len(KNOTS) + 3
"""Coefficients: a, one slope of f per section, c and d."""

FADE = 0.95
"""Weight of a window when the next one comes. With windows of 0.5 s the mean age is 10 s."""

ANCHOR = 0.02
"""Weight of the last coefficients in each fit, relative to the windows: in steady load the columns are nearly
proportional, and without this the coefficients would not be determined."""

STIFFNESS = 0.003
"""Weight of the assumption that a section of f rises like the one before it, as a share of the windows: as if so many
of them had crossed the whole section."""

SWEEPS = 30
"""Sweeps of coordinate descent; each fit starts from the last one."""


class StepModel:
    """The coefficients, and their fit.

    ``coefficients`` are a, the slopes of f, c and d, in seconds per step, sequence and token.
    """

    def __init__(self, base: float, sequence: float, kv_token: float, prompt_token: float) -> None:
        self.coefficients = [base, *([sequence] * len(KNOTS)), kv_token, prompt_token]
        self._normal = [[0.0] * COUNT for _ in range(COUNT)]
        self._right = [0.0] * COUNT

    @property
    def prompt_token(self) -> float:
        """Seconds that a prompt token adds to a step."""
        return self.coefficients[-1]

    def decode_seconds(self, sequences: float, kv: float) -> float:
        """Return the seconds of a step of ``sequences`` that decode, with ``kv`` tokens in the cache."""
        current = self.coefficients
        total = current[0] + current[-2] * kv
        for i, low in enumerate(KNOTS):
            if sequences <= low:
                break
            total += current[i + 1] * (min(sequences, low + WIDTHS[i]) - low if low < KNOTS[-1] else sequences - low)
        return total

    def decoding(self, row: Sequence[float]) -> float:
        """Return the seconds of a window's decode steps, without its prompts."""
        return sum(value * sums for value, sums in zip(self.coefficients[:-1], row, strict=False))

    def first_token_seconds(self, tokens: int, sequences: int, kv: float) -> float:
        """Return the time to a first token: ``tokens`` of prompts, its own the last, and the steps around them."""
        return self.prompt_token * tokens + 2 * self.decode_seconds(sequences, kv)

    def learn(self, row: Sequence[float], seconds: float, fade: float = FADE) -> None:
        """Fit once more, with one more window: its steps, their sections of f, KV tokens and prompt tokens.

        ``fade``: weight that the windows before it keep.
        """
        scaled = [value / seconds for value in row]
        for i, value in enumerate(scaled):
            self._right[i] = self._right[i] * fade + value
            line = self._normal[i]
            for j, other in enumerate(scaled):
                line[j] = line[j] * fade + value * other
        self._fit()

    def _fit(self) -> None:
        """Descend along one coefficient at a time, none below 0 (Franc et al. 2005)."""
        normal, current = self._normal, self.coefficients
        anchored = list(current)
        for _ in range(SWEEPS):
            moved = 0.0
            for i in range(COUNT):
                own = normal[i][i]
                others = sum(n * value for n, value in zip(normal[i], current, strict=True)) - own * current[i]
                pull = ANCHOR * own
                right, left = self._right[i] - others + pull * anchored[i], own + pull
                if 1 < i <= len(KNOTS):
                    # A section that windows barely reach continues the one before it.
                    pull = STIFFNESS * normal[0][0] * WIDTHS[i - 1] ** 2
                    right, left = right + pull * current[i - 1], left + pull
                if not left:
                    continue
                value = max(right / left, 0.0)
                moved += abs(value - current[i]) * left**0.5
                current[i] = value
            if moved < 1e-4:
                break


def sections(sequences: float) -> list[float]:
    """Split a number of sequences by the knots: 40 is 8 + 8 + 16 + 8."""
    return [max(0.0, min(sequences, high) - low) for low, high in pairwise((*KNOTS, inf))]
