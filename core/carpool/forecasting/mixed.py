"""Requests of several kinds, of which only those of one kind share a batch: the batch recursion for all of them.

A kind is a length bucket, with a t(b) of its own, or a group of callers with one key (``batchable_share``). Each is a
queue, and all queues share the slots. Played as one queue, in which any two share a batch, batches come out several
times too large: with four buckets of heavy-tailed texts the device time a request was forecast at a third of what it
is, and the largest batches seemed to be the best. With a hundred keys a wait seemed to save 94 %, and saved nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from heapq import heapreplace
from itertools import accumulate, cycle, pairwise
from math import inf
from random import Random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDING = 1e-9
"""Seconds by which sums of floats may miss a due time that was kept to the letter."""


FEW = 8
"""Kinds up to which each is looked at for every batch."""


class Kind(NamedTuple):
    """One length bucket, or one group of callers in it."""

    share: float
    """Of the requests, all of equally many rows."""
    times: tuple[float, ...]
    """Seconds by requests, up to the largest batch."""
    slow: tuple[float, ...]
    """What such a batch seldom exceeds."""


class Served(NamedTuple):
    """What came of it; latencies in the order of service."""

    latencies: list[float]
    sizes: list[int]
    """Requests of each batch."""
    device_busy: float
    work: float
    end: float


def serve(
    arrivals: Sequence[float],
    kinds: Sequence[Kind],
    *,
    cap: int,
    full: int,
    wait: float,
    slots: int,
    executors: int,
    target: float,
    draws: Sequence[float],
    shed: bool,
    passing: bool,
    surely: float,
) -> Served:
    """Serve requests of equally many rows, ``cap`` a batch, the most urgent kind first.

    A batch is due with ``full`` requests: one more than ``cap`` where those do not fill it to the last row.

    Of those that are due, the kind goes first whose oldest would have to start first to be in time at ``target``
    seconds of age. ``shed``: whoever is predicted late is refused, and dropped whom a batch would make late. Arguments
    as of ``queueing.forecast``; one turn of the loop a batch, or an arrival that may be refused.
    """
    line = _Line(arrivals, kinds, cap, full, wait, target, shed=shed)
    queues, first, dues = line.queues, line.first, line.dues
    flight, computing = [-inf] * slots, [-inf] * executors
    multipliers = cycle(draws)
    latencies: list[float] = []
    sizes: list[int] = []
    gone = upcoming = 0
    busy = work = 0.0
    until = -inf
    while True:
        free = flight[0]
        leave = max(min(line.heads() if passing else dues), free)
        # 1. Somebody comes who may be refused: predicted late behind all that waits.
        if shed and upcoming < len(arrivals) and arrivals[upcoming] <= leave:
            now, which = arrivals[upcoming], line.members[upcoming]
            start = max(now, computing[0])
            if until <= now or start + line.expected(which, executors, surely, alone=free <= now) <= now + target:
                line.admit(which, now)
            else:
                gone += 1
            upcoming += 1
            continue
        if leave == inf:
            break
        # 2. One by one, until more wait than are served.
        if passing and gone + slots < len(arrivals) and arrivals[gone + slots] < leave:
            passing = False
            continue
        # 3. Who must start first to be in time.
        room = 1 if passing else cap
        chosen = line.most_urgent(leave, room, passing=passing)
        queue, at, kind = queues[chosen], first[chosen], kinds[chosen]
        beyond = bisect_right(queue, leave, at, min(at + room, len(queue)))
        start = max(computing[0], leave)
        if shed and kind.times[1] <= target:
            lasting = kind.times[beyond - at] * (surely if beyond - at == cap else 1.0)
            # Whom an idle device met is served.
            while at < beyond and start + lasting > queue[at] + target + ROUNDING and until > queue[at]:
                at += 1
                beyond = bisect_right(queue, leave, at, min(at + room, len(queue)))
        # 4. Serve.
        size = beyond - at
        if size:
            duration = kind.times[size] * next(multipliers)
            finish = start + duration
            heapreplace(flight, finish)
            heapreplace(computing, finish)
            latencies += [finish - arrival for arrival in queue[at:beyond]]
            sizes.append(size)
            work += duration
            busy += max(finish - max(until, leave), 0.0)
            until = max(until, finish)
        gone += beyond - first[chosen]
        first[chosen] = beyond
        line.changed(chosen)
    return Served(latencies, sizes, busy, work, until)


def due_with(arrivals: Sequence[float], first: int, holds: Sequence[float], least: int, most: int) -> int:
    """Return how many ride when the oldest, ``first``, may wait ``holds`` by riders: from ``least`` to ``most``.

    Each arrival makes the batch slower, so that it must leave earlier; who is yet to come does not.
    """
    oldest = arrivals[first]
    while least < most:
        middle = (least + most) // 2
        if arrivals[first + middle] <= oldest + holds[middle]:
            least = middle + 1
        else:
            most = middle
    return least


class _Line:
    """What waits in all queues, and what is still to come where nobody is refused."""

    def __init__(
        self,
        arrivals: Sequence[float],
        kinds: Sequence[Kind],
        cap: int,
        full: int,
        wait: float,
        target: float,
        *,
        shed: bool,
    ) -> None:
        self._kinds = kinds
        self._cap = cap
        self._until_full = full
        self._holds = [[min(wait, target - slow) for slow in kind.slow] for kind in kinds]
        """How long the oldest may wait, by rows waiting with it: until it would be late."""
        self._shed = shed
        self.members = _members(len(arrivals), tuple(kind.share for kind in kinds), arrivals[0])
        """The bucket of each arrival: the same ones for every candidate that meets these arrivals."""
        self.queues: list[list[float]] = [[] for _ in kinds]
        self.first = [0] * len(kinds)
        """Index of the oldest who waits, by queue."""
        self._oldest = [inf] * len(kinds)
        """When that one came; ``inf`` where there is none, or it is yet to come and nobody looked for it."""
        self._alike = len(kinds) > FEW and all(kind.times == kinds[0].times for kind in kinds)
        """Whether kinds differ by who asks alone."""
        self.dues = [inf] * len(kinds)
        """When the next batch of each leaves, if a slot is free."""
        self._full = [0.0] * len(kinds)
        """Seconds that the full batches of each take, and the one that is not, where somebody may be refused."""
        self._part = [0.0] * len(kinds)
        if not shed:
            for arrival, which in zip(arrivals, self.members, strict=True):
                self.queues[which].append(arrival)
            for which in range(len(kinds)):
                self.changed(which)

    def heads(self) -> list[float]:
        """Return when the oldest of each queue came; ``inf`` of none."""
        return [queue[at] if at < len(queue) else inf for queue, at in zip(self.queues, self.first, strict=True)]

    def admit(self, which: int, now: float) -> None:
        """Let somebody wait."""
        queue = self.queues[which]
        queue.append(now)
        if len(queue) - self.first[which] <= self._until_full:
            self.changed(which)
        else:  # behind a full batch, which leaves when it does
            self._counted(which)

    def changed(self, which: int) -> None:
        """Work out anew when a queue's next batch is due: full, or its oldest has waited, or would be late."""
        queue, at, full = self.queues[which], self.first[which], self._until_full
        number = len(queue) - at
        self._oldest[which] = queue[at] if number else inf
        if self._shed:
            self._counted(which)
        if not number:
            self.dues[which] = inf
            return
        oldest, holds = queue[at], self._holds[which]
        riders = due_with(queue, at, holds, 1, min(number, full))
        due = max(oldest + holds[riders], queue[at + riders - 1])
        self.dues[which] = min(due, queue[at + full - 1]) if number >= full else due

    def _counted(self, which: int) -> None:
        """Work out anew what device time waits in a queue."""
        full, part = divmod(len(self.queues[which]) - self.first[which], self._cap)
        times = self._kinds[which].times
        self._full[which], self._part[which] = full * times[self._cap], times[part]

    def most_urgent(self, leave: float, room: int, *, passing: bool) -> int:
        """Return the queue, of those that are due, whose oldest would have to start first to be in time."""
        if self._alike:
            # Batches of many kinds are small, so that the oldest decides, but for what a few rows more take.
            chosen = self._oldest.index(min(self._oldest))
            if passing or self.dues[chosen] <= leave:
                return chosen
        chosen, urgency = -1, inf
        for which, due in enumerate(self.heads() if passing else self.dues):
            if due <= leave:
                queue, at = self.queues[which], self.first[which]
                riders = bisect_right(queue, leave, at, min(at + room, len(queue))) - at
                limit = queue[at] - self._kinds[which].times[riders]
                if limit < urgency:
                    chosen, urgency = which, limit
        return chosen

    def expected(self, which: int, executors: int, surely: float, *, alone: bool) -> float:
        """Seconds from when the device is free to when somebody who came would be served.

        ``alone``: nothing waits but what is held for company, and leaves in time with this one.
        """
        times, cap = self._kinds[which].times, self._cap
        queued = len(self.queues[which]) - self.first[which]
        if alone:
            return times[min(queued + 1, cap)]
        own = times[queued % cap + 1] * (surely if queued >= cap else 1.0)
        return (sum(self._full, 0.0) + sum(self._part, 0.0) - self._part[which]) / executors + own


# Of every lot of arrivals that a search may play, at the load there is and at more.
@lru_cache(maxsize=32)
def _members(count: int, shares: tuple[float, ...], seed: float) -> list[int]:
    """Return a bucket for each arrival: as many of each as its share says, in an order that ``seed`` tells."""
    bounds = [round(upto / sum(shares) * count) for upto in accumulate(shares, initial=0.0)]
    members = [which for which, (low, high) in enumerate(pairwise(bounds)) for _ in range(high - low)]
    Random(seed).shuffle(members)
    return members
