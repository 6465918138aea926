"""What batches of copies may take: little of the device, and so few delayed requests that the p99 stays."""

from __future__ import annotations

FIRST_SECONDS, FIRST_DELAYED = 60.0, 100
"""Requests that batches of copies may delay in the first seconds, when most sizes are unknown."""
DELAYED = 25
"""Requests that they may delay afterwards within a short time."""
DELAYED_SHARE = 0.001
"""Share of all requests that they may delay: a tenth of those that decide the p99."""
FREE_SECONDS, BUSY_SHARE = 1.0, 0.05
"""Seconds of the device that batches of copies may take: at first, and as a share of the time since then."""


class Delays:
    """Counts the requests, of all models, that arrived while a batch of copies was served and so had to wait for it.

    And the seconds that these batches took: at 0.3 s each, they would fill a device that is half busy.
    """

    __slots__ = ("_arrivals", "_busy", "_delayed", "_until")

    def __init__(self) -> None:
        self._arrivals = 0
        self._busy = 0.0
        self._delayed = 0.0
        """Less what the share has allowed since."""
        self._until = 0.0
        """End of the first seconds."""

    def add(self, requests: float, seconds: float) -> None:
        """Count a batch: the seconds it was forecast to take, and requests that it delayed.

        If it hangs, they count as no more than copies may delay at first.
        """
        self._delayed += min(requests, FIRST_DELAYED)
        self._busy += seconds

    def allow(self, arrivals: int, now: float) -> bool:
        """Whether another batch of copies may delay requests, after so many arrivals in all."""
        self._delayed = max(self._delayed - DELAYED_SHARE * (arrivals - self._arrivals), 0.0)
        self._arrivals = arrivals
        self._until = self._until or now + FIRST_SECONDS
        since = now - self._until + FIRST_SECONDS
        if self._busy > FREE_SECONDS + BUSY_SHARE * since:
            return False
        return self._delayed <= (FIRST_DELAYED if since < FIRST_SECONDS else DELAYED)
