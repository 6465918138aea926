"""How many calls an unknown server gets at once: more as long as answers take no longer.

More calls slow down a server that computes one batch at a time; fewer slow down one with sixteen workers. Nothing is
merged until measurements show which it is: workers that compute the rows of a batch one after another would take 32
times as long. The number doubles each time, as in TCP's slow start (RFC 5681).
"""

from __future__ import annotations

from math import inf

ENOUGH = 4
"""Answers per call at once that show the latency at a number of calls; half as many show that at fewer."""

LONGER = 1.5
"""If answers take so many times as long as with fewer calls at once, calls wait for one another."""


class FirstCalls:
    """The answers of a model whose parameters are not decided yet."""

    __slots__ = ("_answers", "allowed", "merges", "most")

    def __init__(self, most: int) -> None:
        self.allowed = 1
        """Calls at once; ``most`` in the end."""
        self.merges = False
        """Whether more calls at once took longer, so that requests should share batches."""
        self.most = most
        self._answers: dict[int, tuple[int, float]] = {}
        """By calls at once (1, 2, 4, ...): number of answers, and the sum of their seconds."""

    def answered(self, in_flight: int, seconds: float) -> None:
        """Count an answer; ``in_flight``: calls under way when its call was sent, itself included."""
        # Those of other models are among them. Only more of its own show what more do: at most as many as it may have.
        calls = 1 << (min(in_flight, self.allowed) - 1).bit_length()
        count, total = self._answers.get(calls, (0, 0.0))
        self._answers[calls] = count, total = count + 1, total + seconds
        if self.merges or calls < self.allowed or count < (ENOUGH if calls > 1 else ENOUGH / 2):
            return
        known = [took / n for fewer, (n, took) in self._answers.items() if fewer < calls and n >= ENOUGH / 2]
        self.merges = total > LONGER * count * min(known, default=inf)
        self.allowed = max(self.allowed // 2, 1) if self.merges else min(2 * self.allowed, self.most)
