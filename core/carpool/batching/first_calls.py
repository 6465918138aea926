"""How many calls an unknown server gets at once, and how many requests share one.

More calls slow down a server that computes one batch at a time; fewer slow down one with sixteen workers. So they are
doubled as long as answers take no longer, as in TCP's slow start (RFC 5681). Workers that compute the rows of a batch
one after another would take 32 times as long for 32 of them. So requests of slow models share calls step by step, once
one that waits or comes would be late one by one: first two, and twice as many as long as that takes clearly less than
twice as long.
"""

from __future__ import annotations

from math import inf, log2

ENOUGH = 4
"""Answers per call at once that show the latency at a number of calls; half as many show that at fewer."""

PAIR, DOUBLE = 1.3, 1.75
"""Two requests share a call if it takes less than so many times as long as one; then twice as many as before."""

SLOW = 0.1
"""Seconds of an answer from which requests share calls step by step. Quicker ones show all in less than a second."""

LONGER = 1.5
"""If answers take so many times as long as with fewer calls at once, calls wait for one another."""


class FirstCalls:
    """The answers of a model whose parameters are not decided yet."""

    __slots__ = ("_answers", "allowed", "ended", "half", "merges", "most", "shares", "since")

    def __init__(self, most: int) -> None:
        self.allowed = 1
        """Calls at once; ``most`` in the end."""
        self.merges = False
        """Whether more calls at once took longer, or shared ones did not, so that requests should share batches."""
        self.most = most
        self.shares: float = 1
        """Requests that may share a call."""
        self.ended = False
        """Whether no more will."""
        self.since = 0
        """Answers since more may."""
        self._answers: dict[int, tuple[int, float]] = {}
        """By calls at once (1, 2, 4, ...): number of answers, and the sum of their seconds."""
        self.half = 0.0
        """Seconds of a call of half as many requests as may share one."""

    def answered(
        self, in_flight: int, seconds: float, requests: int = 1, *, waiting: int = 0, due: float = inf,
        cold: bool = False, alone: bool = False,
    ) -> bool:  # fmt: skip
        """Count an answer; ``in_flight``: calls under way when its call was sent, itself included.

        ``waiting``: requests that could share a call, each to be answered ``due`` seconds after it came. ``cold``: the
        call was the first of its size. ``alone``: none may share one yet. Returns whether it was clearly not slow for
        being the first.
        """
        # Those of other models are among them. Only more of its own show what more do: at most as many as it may have.
        calls = 1 << (min(in_flight, self.allowed) - 1).bit_length()
        self.since += 1
        if requests > 1:
            return self._grow(calls, seconds, requests, cold=cold)
        if cold:
            return False
        count, total = self._answers.get(calls, (0, 0.0))
        self._answers[calls] = count, total = count + 1, total + seconds
        if (waiting + 1) * seconds > due * calls and (self.allowed == 1 or not alone):
            self.share()
        if self.merges or calls < self.allowed or count < (ENOUGH if calls > 1 else ENOUGH / 2):
            return False
        if self.shares == 2 and not alone:
            return False  # two that wait share the next call: that shows more
        known = [took / n for fewer, (n, took) in self._answers.items() if fewer < calls and n >= ENOUGH / 2]
        self.merges = total > LONGER * count * min(known, default=inf)
        self.allowed = max(self.allowed // 2, 1) if self.merges else min(2 * self.allowed, self.most)
        if self.merges:
            # Two that shared a call before may have been slow because they were the first.
            self.half, self.since = min(known), 0
            self.ended = self.half < SLOW or self.allowed > 1 or (waiting + 1) * self.half <= due
            self.shares = inf if self.ended else 2
        return False

    def share(self) -> bool:
        """Let two requests share a call, since those that wait would be late one by one; return whether they may now.

        More than two calls at once are allowed only if two did not wait for one another: then more of them are tried.
        """
        count, total = self._answers.get(1, (0, 0.0))
        if self.shares > 1 or self.ended or self.allowed > 2 or not count or total < SLOW * count:
            return False
        self.shares, self.half, self.since, self.allowed = 2, total / count, 0, 1
        return True

    def _grow(self, calls: int, seconds: float, requests: int, *, cold: bool) -> bool:
        """Let twice as many requests share a call if so many did not take much longer than half as many."""
        if self.ended or self.shares < 2 or 2 * requests <= self.shares or calls > 1:
            return False
        often = max(log2(2 * requests / self.shares), 1)
        if seconds < (PAIR if self.shares == 2 else DOUBLE) * DOUBLE ** (often - 1) * self.half:
            self.merges = self.merges or self.shares > 2
            self.shares, self.half, self.since = 2 * requests, seconds, 0
            return True
        if not self.merges:
            self.ended, self.shares, self.allowed = True, 1, min(2, self.most)
        elif self.shares > 2 and not cold:
            self.ended, self.shares = True, inf
        return False
