"""The tuner's estimate of the batchable share, from counters (``recent_keys``), and how a forecast uses it."""

from __future__ import annotations

import math

from carpool.batching.recent_keys import LIKELY, MOSTLY

ALIKE = 1.2
"""Two shares within this factor do not justify another search."""

FORGETS = 30.0
"""Seconds in which old counts of the share lose half of their weight."""

CONTRADICTS = 4.0
"""Standard errors between the estimated share and that of the last arrivals which show a change."""

CLUSTERED = 2.0
"""Variance of the number of matches, relative to independent ones: neighbours are compared with some of the same."""

ENOUGH = 50
"""Arrivals after which the share is tested for a change."""

NONE = 0.005
"""Share up to which nothing is batched at all."""

MOST_GROUPS = 100
"""Queues that a forecast plays at most: 25 ms of CPU for 4,000 requests. With more keys than that, hardly anything is
held for others, and what a backlog merges is little."""


class Sharing:
    """The tuner's estimate of the share, kept until the counters contradict it."""

    def __init__(self) -> None:
        self._arrivals = 0.0
        self._matches = 0.0
        self._fresh = (0, 0)
        """Arrivals, and matches among them, that are not added to the estimate yet."""
        self.share = 1.0
        """1 from ``MOSTLY`` on: the few others make no difference to a forecast."""

    def observe(self, seconds: float, arrivals: int, batchable: int) -> bool:
        """Add the counts of the last ``seconds`` on the clock; return whether the estimated share changed."""
        keep = 0.5 ** (seconds / FORGETS)
        self._arrivals *= keep
        self._matches *= keep
        count, matches = self._fresh[0] + arrivals, self._fresh[1] + batchable
        self._fresh = (count, matches)
        off = abs(matches - count * self.share)
        if off > CONTRADICTS * math.sqrt(CLUSTERED * count * self.share * (1 - self.share) + 1):
            # The earlier arrivals were another mix of callers.
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
    """Return the shares of as few groups of requests as possible, where only members of one group share a batch.

    All are equal except the last, which is smaller; their squares sum up to ``share``; at most ``most``. If nothing is
    batched there is one group, and batches have one request.
    """
    number = math.ceil(1 / max(share, 1 / most) - 1e-9)
    if share >= MOSTLY or share <= NONE or number < 2:
        return (1.0,)
    others = number - 1
    # others a^2 + (1 - others a)^2 = share
    equal = (1 + math.sqrt(max((number * share - 1) / others, 0.0))) / number
    return (*[equal] * others, 1 - others * equal)


def explained(share: float) -> str:
    """Return a text on what a share means, and where to look for the reason."""
    which = "hardly any" if share <= NONE else f"{share:.0%}"
    return f"{which} of the last requests could share a batch: see carpool_alone_total, carpool_key_fragments_total"
