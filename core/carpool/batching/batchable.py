"""Company: which share of a model's requests can share a batch with another one.

Only requests with equal keys are batched. A hundred callers with an `Authorization` header of their own have a hundred
keys: holding their requests costs latency and saves nothing. So the share is observed, one comparison an arrival. The
Batcher holds nothing without company (``Company``), and the tuner forecasts with the share
(``learning.batchable_share``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

RECENT = 13
"""Arrivals whose keys are remembered: about as many as come while a request is held. A prime, so that callers who take
turns do not fall in step with the comparisons."""

STRIDE = 5
"""Step from one comparison's distance to the next one's, so that neighbours are not all compared with the same one."""

ARRIVALS = 32
"""Arrivals over which the share of matches is averaged, exponentially."""

SECONDS = 1.0
WAITS = 3.0
"""Seconds over which the pace of matches is averaged, or as many waits where that is longer: one match by chance then
promises a third of a request, which is not enough to hold for."""

LIKELY = math.log(2.0)
"""Requests to be expected within the wait from which holding is worth it: with 0.69 of a Poisson process one comes in
every second wait."""

MOSTLY = 0.9
"""Share of arrivals that can share a batch from which keys play no part: how many come within a wait is then for the
tuner to weigh, by the load."""


CERTAIN = 0.999
"""Share from which the next arrival of the only key in sight need not be weighed: the usual case costs one comparison.
"""


class Company:
    """What the Batcher observes of one model: whether others come that a held request could share its batch with.

    Each arrival's key is compared with that of one of the ``RECENT`` arrivals of its length bucket before it. With keys
    of probabilities p they match with probability sum(p^2), which is the chance that the next arrival can join a batch.
    """

    __slots__ = ("_at", "_pace", "_recent", "share")

    def __init__(self) -> None:
        self._recent: dict[int, _Recent] = {}
        """By length bucket: texts of another length are no other caller."""
        self._pace = 0.0
        """Matches per second."""
        self._at = 0.0
        self.share = 1.0
        """Of the last ``ARRIVALS`` or so; 1 until arrivals say otherwise."""

    def arrived(self, key: Hashable | None, bucket: int, now: float, wait: float) -> bool:
        """Note an arrival; return whether it could share a batch. ``key`` ``None``: it may not be batched.

        ``wait``: seconds for which requests are held.
        """
        known = hash(key) if key is not None else None
        recent = self._recent.get(bucket)
        if recent is None:
            recent = self._recent[bucket] = _Recent()
        if known == recent.only is not None:
            return True
        matches = recent.matches(known)
        lasting = max(SECONDS, WAITS * wait)
        self._pace *= math.exp((self._at - now) / lasting)
        self._at = now
        if matches:
            self._pace += 1 / lasting
            self.share += (1 - self.share) / ARRIVALS
            if self.share >= CERTAIN and recent.settles(known):
                self.share = 1.0
        else:
            self.share -= self.share / ARRIVALS
            for each in self._recent.values():
                each.only = None
        return matches

    def likely(self, wait: float) -> bool:
        """Whether it is worth it to hold a request for so many seconds."""
        return self.share >= MOSTLY or self._pace * wait >= LIKELY


class _Recent:
    """The keys of the last arrivals, as hashes: what callers send is not kept."""

    __slots__ = ("_at", "_keys", "only")

    def __init__(self) -> None:
        self._keys: list[int | None] = []
        self._at = 0
        self.only: int | None = None
        """What all of them are, while every arrival of the model matches."""

    def matches(self, key: int | None) -> bool:
        """Compare a key with one before it, and remember it."""
        at, keys = self._at, self._keys
        if len(keys) < RECENT:
            # The first of all is as good as any.
            matches = key is not None and (not keys or keys[-1] == key)
            keys.append(key)
            return matches
        # 1 + 5 at: every distance from 1 to 13 once in 13 arrivals.
        matches = key is not None and keys[(at - 1 - STRIDE * at) % RECENT] == key
        keys[at] = key
        self._at = (at + 1) % RECENT
        return matches

    def settles(self, key: int | None) -> bool:
        """Note that no other key is in sight, if that is so; return whether it is."""
        if self._keys.count(key) < RECENT:
            return False
        self.only = key
        return True
