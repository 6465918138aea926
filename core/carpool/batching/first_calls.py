"""How many calls an unknown server gets at once: more while answers take no longer for it.

One that computes a single batch at a time would be slowed by more, and one with sixteen workers by fewer. Nothing is
merged until it shows which it is: workers that compute the rows of a batch one after another would take 32 times as
long. Twice as many at a time, as TCP begins (slow start, RFC 5681).
"""

from __future__ import annotations

from math import inf

ENOUGH = 4
"""Answers that show what so many calls at once take; half of them what fewer did."""

LONGER = 1.5
"""Times what fewer at once took, from which calls wait for one another."""


class FirstCalls:
    """The answers of a model for which nobody has decided on parameters."""

    __slots__ = ("_answers", "allowed", "merges", "most")

    def __init__(self, most: int) -> None:
        self.allowed = 1
        """Calls at once; ``most`` in the end."""
        self.merges = False
        """Whether more at once took longer, so that requests are to share batches."""
        self.most = most
        self._answers: dict[int, tuple[int, float]] = {}
        """By calls at once (1, 2, 4, ...): answers, and seconds in sum."""

    def answered(self, in_flight: int, seconds: float) -> None:
        """Take an answer that met so many calls, itself included, when it was sent."""
        calls = 1 << (in_flight - 1).bit_length()
        count, total = self._answers.get(calls, (0, 0.0))
        self._answers[calls] = count, total = count + 1, total + seconds
        if self.merges or calls < self.allowed or count < (ENOUGH if calls > 1 else ENOUGH / 2):
            return
        known = [took / n for fewer, (n, took) in self._answers.items() if fewer < calls and n >= ENOUGH / 2]
        self.merges = total > LONGER * count * min(known, default=inf)
        self.allowed = max(self.allowed // 2, 1) if self.merges else min(2 * self.allowed, self.most)
