"""Requests of any size and kind, some of them refused: the Batcher's rules, request by request.

Requests of one kind share batches: those with one length bucket and one batch key. Each kind is a queue, and all
queues share the slots. Played as one queue, batches would be several times too large: with a hundred keys the forecast
of a wait saved 94 % of the device time, but in fact it saved nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from functools import lru_cache
from itertools import accumulate, pairwise
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from carpool.batching.requests import ROUNDING
from carpool.forecasting.recursion import Rules, Run

if TYPE_CHECKING:
    from collections.abc import Sequence


MOST = 20_000
"""Batches played one by one. Beyond, those of one request are one: of 2,000 rows each, they would be millions."""


class Kind(NamedTuple):
    """Requests that share batches."""

    share: float
    """Share of all requests."""
    times: tuple[float, ...]
    """Seconds of a batch by its rows, up to the largest batch, or the largest request where they pass one by one."""
    slow: tuple[float, ...]
    """Seconds that such a batch seldom exceeds, up to the largest batch."""


class _Waiting:
    """A request in a queue."""

    __slots__ = ("arrival", "due", "index", "left", "rows")

    def __init__(self, index: int, arrival: float, rows: int, due: float) -> None:
        self.index = index
        self.arrival = arrival
        self.rows = rows
        self.left = rows
        """Rows not in a batch yet."""
        self.due = due
        """When it has to be answered not to be dropped; ``inf``: never dropped."""


class _Queue:
    """The waiting requests of one kind."""

    __slots__ = ("full", "kind", "leaves", "part", "requests", "rows")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.requests: deque[_Waiting] = deque()
        self.rows = 0
        self.leaves = math.inf
        """When its next batch is due, if a slot is free."""
        self.full = self.part = 0.0
        """Seconds that its full batches take, and the one that is not full."""


def replay(arrivals: Sequence[float], rows: Sequence[int] | None, kinds: Sequence[Kind], rules: Rules) -> Run:
    """Serve requests (seconds, ascending) of given ``rows`` (``None``: one each)."""
    player = _Player(kinds, rules, len(arrivals), whole=rows is not None and sum(rows) > MOST * rules.cap)
    members = assigned(len(arrivals), tuple(kind.share for kind in kinds), arrivals[0]) if len(kinds) > 1 else None
    upcoming, count = 0, len(arrivals)
    while True:
        leave = player.next_batch()
        if upcoming < count and (arrivals[upcoming] < leave or arrivals[upcoming] == leave > player.now):
            which = 0 if members is None else members[upcoming]
            player.arrive(upcoming, arrivals[upcoming], 1 if rows is None else rows[upcoming], which)
            upcoming += 1
        elif leave == math.inf:
            break
        else:
            player.dispatch(leave)
    run = player.run
    run.latencies = [finish - arrival for finish, arrival in zip(player.finishes, arrivals, strict=True) if finish]
    return run


class _Player:
    """Queues and device. Times in seconds."""

    __slots__ = ("finishes", "flight", "now", "passing", "queues", "rules", "run", "whole")

    def __init__(self, kinds: Sequence[Kind], rules: Rules, count: int, *, whole: bool) -> None:
        self.rules = rules
        self.whole = whole
        self.queues = [_Queue(kind) for kind in kinds]
        self.passing = rules.passing
        self.now = -math.inf
        self.flight: list[float] = []
        """Finishes of the batches in flight, ascending."""
        self.finishes = [0.0] * count
        """By request; 0: refused."""
        self.run = Run()

    def next_batch(self) -> float:
        """Return when the next batch leaves if no request comes before; ``inf``: nothing waits."""
        queues = self.queues
        leave = queues[0].leaves if len(queues) == 1 else min(queue.leaves for queue in queues)
        flight, slots = self.flight, self.rules.slots
        free = flight[-slots] if len(flight) >= slots else -math.inf
        return max(leave, free, self.now)

    def arrive(self, index: int, now: float, rows: int, which: int) -> None:
        """Admit a request, or refuse it if it would be late behind the queue, with its batch as it would be then."""
        self.now = now
        flight, rules, queue = self.flight, self.rules, self.queues[which]
        del flight[: bisect_right(flight, now)]
        if not flight and not any(each.requests for each in self.queues):
            self.passing = rules.passing
        due = math.inf
        if rules.shed and flight:  # an idle device admits all
            times, cap = queue.kind.times, rules.cap
            alone = times[rows] if rows <= cap else math.ceil(rows / (cap * rules.concurrency)) * times[cap]
            if alone <= rules.target + ROUNDING:
                due = now + rules.target
                if self._start(now) + self._expected(queue, rows, alone) > due + ROUNDING:
                    return
        queue.requests.append(_Waiting(index, now, rows, due))
        queue.rows += rows
        if self.passing and len(flight) >= rules.slots < sum(len(each.requests) for each in self.queues):
            self.passing = False
            for each in self.queues:
                self._changed(each)
        elif queue.rows - rows < rules.cap or rules.shed:
            self._changed(queue)

    def _start(self, at: float) -> float:
        """Return when the device begins a batch that is sent at a time."""
        flight, concurrency = self.flight, self.rules.concurrency
        return max(at, flight[-concurrency]) if len(flight) >= concurrency else at

    def _expected(self, queue: _Queue, rows: int, alone: float) -> float:
        """Return the seconds from when the device is free until a request that comes now would be answered."""
        rules, times = self.rules, queue.kind.times
        cap, waiting = rules.cap, queue.rows
        least = alone if self.passing or rows > cap else 0.0
        if len(self.flight) < rules.slots:
            # Waiting requests are only held for others, and leave in time with this one.
            return max(least, times[min(rows if self.passing else waiting + rows, cap)])
        if self.passing:
            busy = [each for each in self.queues if each.requests]
            ahead = sum(len(one.requests) * one.kind.times[math.ceil(one.rows / len(one.requests))] for one in busy)
            return least * (rules.surely if waiting else 1.0) + ahead / rules.concurrency
        own = max(least, times[min(waiting % cap + rows, cap)]) * (rules.surely if waiting >= cap else 1.0)
        ahead = sum(each.full + each.part for each in self.queues) - queue.part
        return ahead / rules.concurrency + own

    def _changed(self, queue: _Queue) -> None:
        """Compute when a queue's next batch is due: full, or its oldest has waited long enough, or would be late."""
        rules, rows, kind = self.rules, queue.rows, queue.kind
        if rules.shed:
            full, part = divmod(rows, rules.cap)
            queue.full, queue.part = full * kind.times[rules.cap], kind.times[part]
        if not queue.requests:
            queue.leaves = math.inf
        elif rules.wait > 0 and rows < rules.cap and not self.passing:
            queue.leaves = queue.requests[0].arrival + min(rules.wait, rules.target - kind.slow[rows])
        else:
            queue.leaves = -math.inf

    def _most_urgent(self, leave: float) -> _Queue:
        """Return the queue, of those due, whose oldest request would have to start first to be in time."""
        queues = self.queues
        if len(queues) == 1:
            return queues[0]
        cap, passing = self.rules.cap, self.passing

        def start(queue: _Queue) -> float:
            """Return when its oldest request has to start, but for a target that is the same for all."""
            oldest = queue.requests[0]
            return oldest.arrival - queue.kind.times[oldest.rows if passing else min(queue.rows, cap)]

        return min((queue for queue in queues if queue.leaves <= leave), key=start)

    def dispatch(self, leave: float) -> None:
        """Send the next batch; requests that would be late in it are dropped."""
        flight, rules = self.flight, self.rules
        self.now = leave
        del flight[: bisect_right(flight, leave)]
        queue = self._most_urgent(leave)
        start = self._start(leave)
        members, rows = self._compose(queue, start)
        self._changed(queue)
        if not members:
            return
        full, seconds, sizes = max(rows // rules.cap, 1), queue.kind.times[min(rows, rules.cap)], self.run.sizes
        factor = rules.draws[len(sizes) % len(rules.draws)] if full == 1 else math.ceil(full / rules.concurrency)
        finish = start + seconds * factor
        for index in members:
            self.finishes[index] = max(self.finishes[index], finish)
        for _ in range(min(full, rules.concurrency)):
            insort(flight, finish)
        sizes += [0] * (full - 1)
        self.run.batch(len(members), rows, full * seconds, leave, finish)

    def _compose(self, queue: _Queue, start: float) -> tuple[list[int], int]:
        """Take the requests of a batch off a queue; return which, and the batch's rows."""
        requests, times, cap = queue.requests, queue.kind.times, self.rules.cap
        lasting = times[min(queue.rows, cap)]
        members: list[int] = []
        size = 0
        while requests and size < cap:
            request = requests[0]
            take = request.left
            if request.due < math.inf and take == request.rows:
                expected = times[min(take, cap)] if self.passing else lasting
                if queue.rows - take >= (1 if self.passing else cap - size):
                    expected *= self.rules.surely  # others fill the batch: the place is for those surely in time
                if start + expected > request.due + ROUNDING:
                    requests.popleft()
                    queue.rows -= take
                    continue
            if request.rows > cap:
                take = take // cap * cap if self.whole and not size and take > cap else min(take, cap - size)
            elif size + take > cap:
                break
            members.append(request.index)
            size += take
            queue.rows -= take
            request.left -= take
            if not request.left:
                requests.popleft()
            if self.passing:
                break
        return members, size


# For every sample of arrivals that a search may play, at the present load and at higher ones.
@lru_cache(maxsize=32)
def assigned(count: int, shares: tuple[float, ...], seed: float) -> list[int]:
    """Return a kind for each arrival: exact shares of each kind, in an order that depends on ``seed``."""
    bounds = [round(upto / sum(shares) * count) for upto in accumulate(shares, initial=0.0)]
    members = [which for which, (low, high) in enumerate(pairwise(bounds)) for _ in range(high - low)]
    Random(seed).shuffle(members)
    return members
