"""Requests that make their batch fail: how small batches become meanwhile, and which callers are kept apart.

An innocent request never fails for another one (``bisection``); this file bounds the cost of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

EXTRA_ROWS = 64
"""Rows that may be served again in search of a culprit before the share below counts."""

EXTRA_SHARE = 0.20
"""Rows that may be served again for each that succeeds. Measured with four shares of failing requests on two devices:
0.1 carries up to a fifth less load, 0.5 up to a tenth less."""

MAX_ISOLATED = 64
"""Batch keys of a model that are watched at a time; callers can invent keys."""

FIRST_SPAN, LONGEST_SPAN = 8, 1024
"""Good answers that a caller needs before its requests are batched again: after its first failure, and at most."""

MAX_SUSPECTS = 256
"""Callers that are kept apart at a time."""


class Isolation:
    """Which requests of one model are not batched, or in smaller batches, because some made their batch fail."""

    __slots__ = ("keys", "quarantined", "suspects")

    def __init__(self) -> None:
        self.quarantined = False
        """Whether nothing is batched: the model does not answer by rows."""
        self.keys: dict[Hashable, RetryBudget] = {}
        """Batch keys with failing requests, the latest last."""
        self.suspects = Suspects()

    def keeps_apart(self, caller: Hashable, rows: int, cap: int) -> str:
        """Return why a request may not be batched; ``""``: it may. A request of over ``cap`` rows is cut anyway."""
        if self.quarantined:
            return "quarantined"
        return "failing-caller" if caller in self.suspects.left and rows <= cap else ""

    def failed(self, key: Hashable, rows: int) -> bool:
        """Note that one request made a batch of ``rows`` fail; return whether to search for it by halves."""
        budget = self.keys.pop(key, None) or RetryBudget()
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
        self.quarantined = False
        self.keys.clear()


class RetryBudget:
    """How large a batch of one key may be while some of its requests fail and are searched for.

    Rows that are served again use up a credit: ``EXTRA_ROWS`` at most, refilled by ``EXTRA_SHARE`` of the rows that
    succeed. If it is too small, they are still sent again, each request alone, and batches become
    half as large. They double again once the credit covers a search at twice the size. With one failing request
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
    """Callers whose requests failed by themselves: they are not batched with others for a while.

    If one caller in ten sent only bad requests, batches of all others would otherwise fail. Behind a gateway all
    requests come from one caller: where one in a hundred fails, 8 in a hundred are sent alone.
    """

    __slots__ = ("_answers", "_spans", "left")

    def __init__(self) -> None:
        self._answers = True  # to any caller, since the last failure: while all requests fail, no caller is to blame
        self.left: dict[Hashable, int] = {}
        """Good answers still needed, by caller, the latest failure last."""
        self._spans: dict[Hashable, int] = {}
        """By caller: how many were needed after the last failure."""

    def failed(self, caller: Hashable) -> None:
        """Note that a request of this caller failed alone; a second failure in a row doubles the answers needed."""
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
