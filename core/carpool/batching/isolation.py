"""Requests that fail the batches they are in: how small batches become meanwhile, and which callers are kept apart.

An innocent request never fails for another one (``bisection``); here is what bounds the price of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

EXTRA_ROWS = 64
"""Rows that may be served again in search of a culprit before the share below counts."""

EXTRA_SHARE = 0.20
"""Rows that may be served again for each that succeeds. Measured with four shares of poison on two devices: 0.1 carries
up to a fifth less, 0.5 up to a tenth."""

MAX_ISOLATED = 64
"""Batch keys of a model that are watched at a time; callers make keys up."""

FIRST_SPAN, LONGEST_SPAN = 8, 1024
"""Good answers that a caller needs before its requests are batched again: after its first failure, and at most."""

MAX_SUSPECTS = 256
"""Callers that are kept apart at a time."""


class Isolation:
    """What of one model is not batched, or in smaller batches, since requests failed the batches they were in."""

    __slots__ = ("keys", "quarantined", "suspects")

    def __init__(self) -> None:
        self.quarantined = False
        """Whether nothing is batched: the model does not answer by rows."""
        self.keys: dict[Hashable, RetryBudget] = {}
        """Batch keys with failing requests, the latest last."""
        self.suspects = Suspects()

    def keeps_apart(self, caller: Hashable, rows: int, cap: int) -> str:
        """Say why a request is batched with no others; ``""``: it may be. One of over ``cap`` rows is cut anyway."""
        if self.quarantined:
            return "quarantined"
        return "failing-caller" if caller in self.suspects.left and rows <= cap else ""

    def failed(self, key: Hashable, rows: int) -> bool:
        """Note that a batch of ``rows`` failed for one of its requests; return whether to search for it by halves."""
        budget = self.keys.pop(key, None) or RetryBudget()
        self.keys[key] = budget
        if len(self.keys) > MAX_ISOLATED:
            del self.keys[next(iter(self.keys))]
        return budget.failed(rows)

    def succeeded(self, key: Hashable, rows: int, cap: int) -> None:
        """Note that a batch succeeded, ``cap`` rows being the most that any batch may have."""
        budget = self.keys.get(key)
        if budget is not None:
            budget.succeeded(rows)
            if budget.over(cap):
                del self.keys[key]

    def cap(self, key: Hashable, rows: int) -> int:
        """Return how many of ``rows`` a batch of one key may have."""
        budget = self.keys.get(key)
        return rows if budget is None or budget.limit is None else min(rows, budget.limit)

    def forget(self) -> None:
        """Forget what was learned of the model; callers stay what they are."""
        self.quarantined = False
        self.keys.clear()


class RetryBudget:
    """How large a batch of one key may be while some of its requests fail and are searched for.

    Rows that are served again are paid from a credit: ``EXTRA_ROWS`` at most, filled by ``EXTRA_SHARE`` of the rows
    that succeed. Where it does not cover them they are sent again all the same, each request alone, and batches become
    half as large. They double again once the credit would pay for a search at twice the size. With one failing request
    in a hundred a batch of 32 fails every fourth time and costs 64 rows: batches end up at 4 to 8 rows.
    """

    __slots__ = ("credit", "largest", "limit")

    def __init__(self) -> None:
        self.credit = float(EXTRA_ROWS)
        """Rows that may be served again."""
        self.largest = 0
        """Rows of the largest batch that failed."""
        self.limit: int | None = None
        """Rows that a batch may have; ``None``: not limited."""

    def failed(self, rows: int) -> bool:
        """Pay for ``rows`` that are served again; return whether the credit covers a search by halves."""
        covered = self.credit >= rows
        self.credit -= rows
        self.largest = max(self.largest, rows)
        if not covered:
            self.limit = max(1, (self.limit or self.largest) // 2)
        return covered

    def succeeded(self, rows: int) -> None:
        """Earn credit; try larger batches once it pays for one that fails."""
        self.credit = min(float(EXTRA_ROWS), self.credit + EXTRA_SHARE * rows)
        # Halves of a batch with one culprit take about twice its rows: 4 times the limit for one of twice the size.
        if self.limit is not None and rows >= self.limit and self.credit >= min(EXTRA_ROWS, 4 * self.limit):
            self.limit *= 2

    def over(self, cap: int) -> bool:
        """Whether there is nothing left to remember, batches of ``cap`` rows being the largest there are."""
        return (self.limit is None or self.limit >= cap) and self.credit >= EXTRA_ROWS


class Suspects:
    """Callers whose requests failed by themselves: they are not batched with others for a while.

    One caller in ten with nothing but bad requests would otherwise cost all others their batches. Behind a gateway all
    requests come from one caller: of those, 8 in a hundred go alone where one in a hundred fails.
    """

    __slots__ = ("_answers", "_spans", "left")

    def __init__(self) -> None:
        self._answers = True  # anybody, since a request last failed: while the model fails all, no caller is to blame
        self.left: dict[Hashable, int] = {}
        """Good answers still needed, by caller, the latest failure last."""
        self._spans: dict[Hashable, int] = {}
        """As many as were needed after the last failure."""

    def failed(self, caller: Hashable) -> None:
        """Note that a request of this caller failed alone; the second time in a row it takes twice as long."""
        span = self._spans.pop(caller, 0)
        if self._answers or not span:
            span = min(2 * span or FIRST_SPAN, LONGEST_SPAN)
        self._answers = False
        self.left.pop(caller, None)
        self.left[caller] = self._spans[caller] = span
        if len(self.left) > MAX_SUSPECTS:
            self._forget(next(iter(self.left)))

    def succeeded(self, caller: Hashable) -> None:
        """Note a good answer to this caller."""
        self._answers = True
        if self.left.get(caller) == 1:
            self._forget(caller)
        elif caller in self.left:
            self.left[caller] -= 1

    def _forget(self, caller: Hashable) -> None:
        del self.left[caller], self._spans[caller]
