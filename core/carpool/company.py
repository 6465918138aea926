"""Company: which share of a model's requests can share a batch with another one.

Only requests with equal keys are batched. A hundred callers with an `Authorization` header of their own have a hundred
keys: holding their requests costs latency and saves nothing. So the share is observed, one comparison an arrival. The
Batcher holds nothing without company (``Company``), and the tuner forecasts with the share (``Sharing``).
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
held for company, and what a backlog merges is little."""


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
        low, high = sorted((max(measured, NONE), max(self.share, NONE)))
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
    if share <= NONE:
        return "hardly any arrival can share a batch; see carpool_alone_total and carpool_key_fragments_total"
    return (
        f"{share:.0%} of arrivals can share a batch: as with {round(1 / share)} different keys; "
        "see carpool_key_fragments_total"
    )
