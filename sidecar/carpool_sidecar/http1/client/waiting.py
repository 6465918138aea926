"""Calls that wait for a connection."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool_sidecar.http1.client.calls import Call
    from carpool_sidecar.http1.memory import Budget


class WaitingCalls:
    """The calls that wait for a connection, first come, first served: `queue`.

    Each waits for at most `max_wait` seconds, and not longer than its own timeout. At most `limit` of them may wait for
    another call to end. The bytes of their streamed bodies count as held in the `budget`.
    """

    __slots__ = ("_budget", "_counted", "_max_wait", "limit", "queue")

    def __init__(self, limit: float, max_wait: float, budget: Budget) -> None:
        self._max_wait = max_wait
        self._budget = budget
        self._counted = 0  # bytes of streamed bodies that are counted as held
        self.limit = limit
        self.queue: deque[Call] = deque()

    def is_full(self, free: int) -> bool:
        """Whether no further call may wait; `free`: connections that may still be opened, for a call each."""
        return len(self.queue) >= self.limit + free

    def append(self, call: Call, now: float) -> None:
        """Add a call behind all others."""
        call.expires = now + self.longest_wait(call)
        self.queue.append(call)
        self.count(call.waiting_bytes)

    def prepend(self, call: Call, now: float) -> None:
        """Add a call before all others."""
        call.expires = now + self.longest_wait(call)
        self.queue.appendleft(call)

    def take(self) -> Call:
        """Remove the first call; what its connection can't send at once is counted there."""
        call = self.queue.popleft()
        self.count(-call.waiting_bytes)
        return call

    def count(self, more: int) -> None:
        """Count so many more bytes of streamed bodies as held."""
        self._counted += more
        self._budget.held += more

    def remove(self, call: Call) -> None:
        """Remove a call, if it waits."""
        with suppress(ValueError):
            self.queue.remove(call)

    def longest_wait(self, call: Call) -> float:
        """Return the seconds that a call may wait."""
        return min(call.timeout, self._max_wait)

    def expire(self, now: float) -> None:
        """Fail the calls that have waited for too long, and count the others again: cancelled ones have left."""
        for call in tuple(self.queue):
            if now >= call.expires and not call.done:
                self.queue.remove(call)
                call.fail("timeout", f"no connection to the upstream was free within {self.longest_wait(call):g} s")
        self.count(sum(call.waiting_bytes for call in self.queue) - self._counted)

    def fail_all(self, text: str) -> None:
        """Fail all calls with "reset"."""
        for call in tuple(self.queue):
            call.fail("reset", text)
        self.queue.clear()
        self.count(-self._counted)
