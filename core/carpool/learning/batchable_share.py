"""The batchable share as the tuner believes it, from counters; and what a forecast makes of it.

The Batcher observes it (``batchable.BatchableShare``); the tuner forecasts with the share (``Sharing``).
"""

from __future__ import annotations

import math

from carpool.batching.batchable import LIKELY, MOSTLY

ALIKE = 1.2
"""Factor between two shares that make no difference worth another search."""

FORGETS = 30.0
"""Seconds in which what is known of the share loses half of its weight."""

CONTRADICTS = 4.0
"""Standard errors between the believed share and that of the last arrivals that make it another one."""

CLUSTERED = 2.0
"""Variance of the number of matches, relative to independent ones: neighbours are compared with some of the same."""

ENOUGH = 50
"""Arrivals by which another share is looked for."""

NONE = 0.005
"""Share from which nothing is batched at all."""

MOST_GROUPS = 100
"""Queues that a forecast plays at most: 25 ms of CPU for 4,000 requests. With more keys than that, hardly anything is
held for others, and what a backlog merges is little."""


class Sharing:
    """The share as the tuner believes it, from counters: until they contradict it."""

    __slots__ = ("_arrivals", "_fresh", "_matches", "share")

    def __init__(self) -> None:
        self._arrivals = 0.0
        self._matches = 0.0
        self._fresh = (0, 0)
        """Arrivals, and matches among them, that are not settled yet."""
        self.share = 1.0
        """1 from ``MOSTLY`` on: what few others do makes no difference to a forecast."""

    def observe(self, seconds: float, arrivals: int, batchable: int) -> bool:
        """Add what was counted in the last ``seconds`` on the clock; return whether another share is believed now."""
        keep = 0.5 ** (seconds / FORGETS)
        self._arrivals *= keep
        self._matches *= keep
        count, matches = self._fresh[0] + arrivals, self._fresh[1] + batchable
        self._fresh = (count, matches)
        off = abs(matches - count * self.share)
        if off > CONTRADICTS * math.sqrt(CLUSTERED * count * self.share * (1 - self.share) + 1):
            # Those before were of another mix of callers.
            self._arrivals, self._matches, self._fresh = float(count), float(matches), (0, 0)
            return self._believe(self._measured())
        if count < ENOUGH:
            return False
        self._arrivals += count
        self._matches += matches
        self._fresh = (0, 0)
        measured = self._measured()
        error = math.sqrt(CLUSTERED * measured * (1 - measured) / self._arrivals)
        low, high = sorted((max(measured, NONE / 2), max(self.share, NONE / 2)))
        return high > ALIKE * low and high - low > 2 * error and self._believe(measured)

    def _measured(self) -> float:
        share = self._matches / self._arrivals
        # Of few arrivals that had none, the next may be the first.
        return share if share >= MOSTLY else (self._matches + 0.5) / (self._arrivals + 1)

    def _believe(self, measured: float) -> bool:
        before, self.share = self.share, 1.0 if measured >= MOSTLY else 0.0 if measured <= NONE else measured
        return self.share != before


def pays_to_hold(share: float, rate: float, wait: float) -> bool:
    """Whether the Batcher holds requests for so many seconds at ``rate`` requests per second."""
    return share >= MOSTLY or share * rate * wait >= LIKELY


def groups(share: float, most: int = MOST_GROUPS) -> tuple[float, ...]:
    """Return the shares of as few groups of requests as possible, of which only members of one share a batch.

    Equal ones but for the last, which is smaller, with squares that sum up to ``share``; at most ``most``. One group
    where nothing is batched: batches of one request say so then.
    """
    number = math.ceil(1 / max(share, 1 / most) - 1e-9)
    if share >= MOSTLY or share <= NONE or number < 2:
        return (1.0,)
    others = number - 1
    # others a^2 + (1 - others a)^2 = share
    equal = (1 + math.sqrt(max((number * share - 1) / others, 0.0))) / number
    return (*[equal] * others, 1 - others * equal)


def explained(share: float) -> str:
    """Say what a share means, and where to look for the reason."""
    why = "carpool_alone_total and carpool_key_fragments_total say why"
    if share <= NONE:
        return f"hardly any arrival can share a batch: {why}"
    return f"{share:.0%} of arrivals can share a batch, as with {round(1 / share)} different keys: {why}"
