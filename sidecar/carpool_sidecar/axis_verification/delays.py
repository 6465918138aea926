"""How many requests batches of copies may delay: so few that they don't change the p99."""

from __future__ import annotations

FIRST_SECONDS, FIRST_DELAYED = 60.0, 100
"""Requests that batches of copies may delay in the first seconds, when most sizes are unknown."""
DELAYED = 25
"""Requests that they may delay afterwards within a short time."""
DELAYED_SHARE = 0.001
"""Share of all requests that they may delay: a tenth of those that decide the p99."""


class Delays:
    """Counts the requests, of all models, that arrived while a batch of copies was served and so had to wait for it."""

    __slots__ = ("_arrivals", "_delayed", "_until")

    def __init__(self) -> None:
        self._arrivals = 0
        self._delayed = 0.0
        """Less what the share has allowed since."""
        self._until = 0.0
        """End of the first seconds."""

    def add(self, requests: float) -> None:
        """Count requests that were delayed; behind a batch that hangs, not more than copies may delay at first."""
        self._delayed += min(requests, FIRST_DELAYED)

    def allow(self, arrivals: int, now: float) -> bool:
        """Whether another batch of copies may delay requests, after so many arrivals in all."""
        self._delayed = max(self._delayed - DELAYED_SHARE * (arrivals - self._arrivals), 0.0)
        self._arrivals = arrivals
        self._until = self._until or now + FIRST_SECONDS
        return self._delayed <= (FIRST_DELAYED if now < self._until else DELAYED)
