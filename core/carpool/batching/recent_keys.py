"""Which share of a model's requests can share a batch with another one.

Only requests with equal keys are batched. A hundred callers, each with its own `Authorization` header, have a hundred
keys: holding their requests costs latency and saves nothing. So the share is observed, by one comparison per arrival.
Where it is too small, the Batcher holds no requests; the tuner forecasts with it (``learning.batchable_share``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable

RECENT = 13
"""Arrivals whose keys are remembered: about as many as come while a request is held. A prime, so that callers in
turn do not fall in step with the comparisons."""

STRIDE = 5
"""Step from one comparison's distance to the next one's, so that neighbours are not all compared with the same one."""

ARRIVALS = 32
"""Arrivals over which the share of matches is averaged, exponentially."""

SECONDS, WAITS = 1.0, 3.0
"""The rate of matches is averaged over so many seconds, or so many waits where that is longer: one match by chance
then predicts a third of a request, which is not enough to hold for."""

LIKELY = math.log(2.0)
"""Matching requests expected within the wait from which holding is worth it: with 0.69 of a Poisson process one comes
in every second wait."""

MOSTLY: Final = 0.9
"""Batchable share from which keys are ignored: the tuner then decides whether enough requests come within a wait."""

CERTAIN: Final = 0.999
"""Share from which arrivals of the only key in sight are not compared any more: the usual case costs nothing."""


class BatchableShare:
    """The share of one model's arrivals that could share a batch, and how often such arrivals come.

    Each arrival's key is compared with that of one of the ``RECENT`` arrivals of its length bucket before it. With keys
    of probabilities p they match with probability sum(p^2), which is the chance that the next arrival can join a batch.
    """

    __slots__ = ("_at", "_rate", "_recent", "share")

    def __init__(self) -> None:
        self._recent: dict[int, _RecentKeys] = {}
        """By length bucket: another text length does not mean another caller."""
        self._rate = 0.0
        """Matches per second."""
        self._at = 0.0
        self.share = 1.0
        """Share over about the last ``ARRIVALS``; 1 until arrivals show a lower one."""

    def arrived(self, key: Hashable | None, bucket: int, now: float, wait: float) -> bool:
        """Note an arrival; return whether it could share a batch. ``key`` ``None``: it may not be batched.

        ``wait``: seconds for which requests are held.
        """
        known = hash(key) if key is not None else None
        recent = self._recent.get(bucket)
        if recent is None:
            recent = self._recent[bucket] = _RecentKeys()
        if known == recent.only is not None:
            return True
        matches = recent.matches(known)
        span = max(SECONDS, WAITS * wait)
        self._rate *= math.exp((self._at - now) / span)
        self._at = now
        if matches:
            self._rate += 1 / span
            self.share += (1 - self.share) / ARRIVALS
            if self.share >= CERTAIN and recent.all_equal(known):
                self.share = 1.0
        else:
            self.share -= self.share / ARRIVALS
            for each in self._recent.values():
                each.only = None
        return matches

    def worth_holding(self, wait: float) -> bool:
        """Whether a request held for ``wait`` seconds can probably be batched with another one."""
        return self.share >= MOSTLY or self._rate * wait >= LIKELY


class _RecentKeys:
    """Hashes of the keys of the last arrivals: what callers send is not kept."""

    __slots__ = ("_at", "_keys", "only")

    def __init__(self) -> None:
        self._keys: list[int | None] = []
        self._at = 0
        self.only: int | None = None
        """The one key of all of them, while every arrival of the model matches."""

    def matches(self, key: int | None) -> bool:
        """Compare a key with one before it, and remember it."""
        at, keys = self._at, self._keys
        if len(keys) < RECENT:
            # The very first counts as a match.
            matches = key is not None and (not keys or keys[-1] == key)
            keys.append(key)
            return matches
        # 1 + 5 at: every distance from 1 to 13 once in 13 arrivals.
        matches = key is not None and keys[(at - 1 - STRIDE * at) % RECENT] == key
        keys[at] = key
        self._at = (at + 1) % RECENT
        return matches

    def all_equal(self, key: int | None) -> bool:
        """Return whether no other key is in sight, and note that."""
        if self._keys.count(key) < RECENT:
            return False
        self.only = key
        return True
