"""Requests that make their batch fail: how small batches become meanwhile, and which callers are kept apart.

An innocent request never fails for another one (``bisection``); this file bounds the cost of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from carpool.batching.requests import Request

EXTRA_ROWS = 64
"""Rows that may be served again in search of a culprit before the share below counts."""

EXTRA_SHARE = 0.20
"""Rows that may be served again for each that succeeds. Measured with four shares of failing requests on two devices:
0.1 carries up to a fifth less load, 0.5 up to a tenth less."""

NEEDED, MOST_NEEDED = 4, 64
"""Good answers that a caller needs after each failure before its requests are batched again, and at most."""

MAX_ISOLATED, MAX_SUSPECTS = 64, 256
"""Batch keys that are watched at a time, and callers that are kept apart; callers can invent keys."""


class Isolation:
    """Which requests of one model are batched with each other only, or in smaller batches, because some failed."""

    __slots__ = ("keys", "quarantined", "suspects", "verifies")

    def __init__(self) -> None:
        self.quarantined = False
        """Whether nothing is batched: the model does not answer by rows."""
        self.verifies = False
        """Whether the next answers may show that requests sent alone can be batched; set when a request comes."""
        self.keys: dict[Hashable, RetryBudget] = {}
        """Batch keys with failing requests, the latest last."""
        self.suspects = Suspects()

    def key_of(self, request: Request) -> Hashable | None:
        """Return what it has in common with the requests of its batch: its key; ``None``: it is in a batch of its own.

        Requests of a caller that had failing ones are batched with each other. Behind a gateway that is all of them.
        """
        if self.quarantined or not request.mergeable:
            return None
        apart = (request.caller, request.key)
        return apart if apart in self.suspects.left else request.key

    def failed(self, key: Hashable, rows: int) -> bool:
        """Note that one request made a batch of ``rows`` fail; return whether to search for it by halves."""
        budget = self.keys.pop(key, None) or RetryBudget(0.0 if self.suspects.left else EXTRA_ROWS)
        self.keys[key] = budget
        if len(self.keys) > MAX_ISOLATED:
            del self.keys[next(iter(self.keys))]
        return budget.failed(rows)

    def succeeded(self, key: Hashable, rows: int, cap: int) -> None:
        """Note that a batch succeeded; ``cap``: the most rows that any batch may have."""
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
        """Forget what was learned of the model, but not of its callers."""
        self.quarantined = self.verifies = False
        self.keys.clear()


class RetryBudget:
    """How large a batch of one key may be while some of its requests fail and are searched for.

    Rows that are served again use up a credit: ``EXTRA_ROWS`` at most, refilled by ``EXTRA_SHARE`` of the rows that
    succeed. If it is too small, each request is sent again alone, and batches become half as large, until it covers a
    search at twice the size. If one request in a hundred fails, every fourth batch of 32 does: they end at 4 to 8 rows.
    """

    __slots__ = ("credit", "largest", "limit")

    def __init__(self, credit: float) -> None:
        self.credit = credit
        """Rows that may be served again: none at first where a failing caller is known, or its would be searched."""
        self.largest = 0
        """Rows of the largest batch that failed."""
        self.limit: int | None = None
        """Rows that a batch may have; ``None``: not limited."""

    def failed(self, rows: int) -> bool:
        """Charge ``rows`` that are served again; return whether the credit covers a search by halves."""
        covered = self.credit >= rows
        self.credit -= rows
        self.largest = max(self.largest, rows)
        if not covered:
            self.limit = max(1, (self.limit or self.largest) // 2)
        return covered

    def succeeded(self, rows: int) -> None:
        """Add credit; try larger batches once it covers one that fails."""
        self.credit = min(float(EXTRA_ROWS), self.credit + EXTRA_SHARE * rows)
        # Halves of a batch with one culprit take about twice its rows: 4 times the limit for one of twice the size.
        if self.limit is not None and rows >= self.limit and self.credit >= min(EXTRA_ROWS, 4 * self.limit):
            self.limit *= 2

    def over(self, cap: int) -> bool:
        """Whether the budget can be dropped; ``cap``: rows of the largest batches allowed."""
        return (self.limit is None or self.limit >= cap) and self.credit >= EXTRA_ROWS


class Suspects:
    """Callers with failed requests, and the key of those: they are kept apart, for good if more than a fifth fail.

    A caller of bad requests only would make all batches fail, but a gateway also has requests of other clients.
    """

    __slots__ = ("_answers", "left")

    def __init__(self) -> None:
        self._answers = True  # to any caller, since the last failure: while all requests fail, no caller is to blame
        self.left: dict[tuple[Hashable, Hashable], int] = {}
        """Good answers still needed, by caller and key, the latest answer last."""

    def failed(self, caller: Hashable, key: Hashable) -> None:
        """Note that a request of this caller failed alone."""
        left = self.left.pop((caller, key), 0)
        self.left[caller, key] = min(left + NEEDED, MOST_NEEDED) if self._answers or not left else left
        self._answers = False
        if len(self.left) > MAX_SUSPECTS:
            del self.left[next(iter(self.left))]

    def succeeded(self, caller: Hashable, key: Hashable) -> None:
        """Note a good answer to this caller."""
        self._answers = True
        if (left := self.left.pop((caller, key), 0)) > 1:
            self.left[caller, key] = left - 1
