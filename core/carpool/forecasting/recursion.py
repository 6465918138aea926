"""Requests of one row in one queue: the loops that a search spends its time in.

Without refusals it is played batch by batch. A batch leaves at d = max(first free slot, a0, min(a0 + W, aB)): when
a slot is free and it is full, or its oldest request has waited W = ``max_wait``, or more waiting would make that one
late. The loop has one iteration per batch, not per request. Refusals are played request by request. Requests of
several rows or kinds are played by ``replay``.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from heapq import heapreplace
from itertools import cycle
from typing import TYPE_CHECKING

from carpool.batching.requests import ROUNDING
from carpool.policy.plain import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence


class Rules(Frozen, frozen=True):
    """How requests are batched, all times in seconds."""

    cap: int
    """Rows of a batch at most."""
    wait: float
    slots: int
    passing: bool
    """Whether requests are sent one by one, unless more wait than there are slots: then until no batch is in flight."""
    concurrency: int
    """Batches that the device computes at once, at most ``slots``."""
    target: float
    """Seconds from arrival until which a request has to be answered: batches leave in time for it."""
    margin: float = 1.0
    """Share of the target within which an answer counts as in time."""
    shed: bool = False
    """Whether requests that would be late are refused."""
    surely: float = 1.0
    """Factor on a batch's mean time that it seldom exceeds."""
    draws: "tuple[float, ...]" = (1.0,)
    """Multipliers of batch times, one per batch, repeated."""


class Run:
    """The result for the requests, batch by batch."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.sizes: list[int] = []
        """Requests of each batch."""
        self.rows = 0
        """Rows in all batches."""
        self.busy = 0.0
        """Seconds with a batch in flight."""
        self.work = 0.0
        """Seconds of all batches without noise: with a CV of 40 %, the sum of 300 batches varies by 2 %."""
        self.end = -math.inf
        self.misses = 0
        """Late requests."""
        self.squares = 0
        """Sum of squares of the late requests in each run of late batches."""
        self._burst = 0

    def batch(self, size: int, rows: int, seconds: float, leave: float, finish: float) -> None:
        """Add a batch of ``size`` requests, which takes ``seconds`` in the mean."""
        self.sizes.append(size)
        self.rows += rows
        self.work += seconds
        self.busy += max(finish - max(self.end, leave), 0.0)
        self.end = max(self.end, finish)

    def missed(self, late: int) -> None:
        """Count the late requests of the next batch."""
        self.squares += late * (2 * self._burst + late)  # the increase of the burst's square
        self._burst = self._burst + late if late else 0
        self.misses += late


class Tally(Run):
    """The same for requests of one row, in order of arrival; latencies and sizes only if ``keeps`` is set."""

    def __init__(self, arrivals: Sequence[float], times: tuple[float, ...], limit: float, *, keeps: bool) -> None:
        super().__init__()
        self._arrivals = arrivals
        self._times = times
        self._limit = limit
        self._keeps = keeps
        self.waited = -sum(arrivals)
        """Seconds from arrival to answer, of all requests, once all are served."""

    def add(self, beyond: int, leave: float, finish: float) -> None:
        """Serve the requests before index ``beyond``; late ones of a batch are its first, which came first."""
        first, arrivals = self.rows, self._arrivals
        self.rows = beyond
        self.waited += (beyond - first) * finish
        self.work += self._times[beyond - first]
        if finish > self.end:
            self.busy += finish - max(leave, self.end)
            self.end = finish
        if self._keeps:
            self.latencies += [finish - arrival for arrival in arrivals[first:beyond]]
            self.sizes.append(beyond - first)
        is_late = finish - arrivals[first] > self._limit
        self.missed(bisect_left(arrivals, finish - self._limit, first, beyond) - first if is_late else 0)


def due_with(arrivals: Sequence[float], first: int, holds: Sequence[float], least: int, most: int) -> int:
    """Return how many requests, from ``least`` to ``most``, leave together when the oldest is ``first``.

    ``holds``: how long the oldest may wait, by the number of waiting requests. Each arrival makes the batch slower, so
    it has to leave earlier.
    """
    oldest = arrivals[first]
    while least < most:
        middle = (least + most) // 2
        if arrivals[first + middle] <= oldest + holds[middle]:
            least = middle + 1
        else:
            most = middle
    return least


def recursion(
    arrivals: Sequence[float], times: tuple[float, ...], slow: tuple[float, ...], rules: Rules, *, keeps: bool = False
) -> Tally:
    """Serve all requests; ``times`` and ``slow``: seconds of a batch by its rows, and what it seldom exceeds."""
    count, cap, slots = len(arrivals), rules.cap, rules.slots
    wait = rules.wait if rules.wait > 0 else -math.inf
    # How long the oldest may wait, by waiting rows: W, or until it would be late.
    holds = [min(rules.wait, rules.target - each) for each in slow]
    shortest = holds[-2] if cap > 1 else rules.wait
    patient = shortest >= wait
    # Nothing comes after the last request, so that the loop need not look for the end.
    padded = [*arrivals, *[math.inf] * max(cap, slots)]
    # Heaps of the latest finishes: one per slot, and one per batch computed at once, if that is fewer.
    flight = [-math.inf] * slots
    computing = [-math.inf] * rules.concurrency
    queues = rules.concurrency < slots
    draws, varied = rules.draws, len(rules.draws)
    tally = Tally(arrivals, times, rules.margin * rules.target + ROUNDING, keeps=keeps)
    passing = passes = rules.passing
    first = turn = 0
    while first < count:
        oldest = padded[first]
        leave = flight[0]
        full = first + cap
        if passing and padded[first + slots] < leave:
            passing = False  # more wait than there are slots
        elif passes and oldest >= tally.end:
            passing = True  # none waits, and no batch is in flight
        # By comparisons, not by `max` and `min`: their calls took a third of the time.
        if leave < oldest + wait and not passing:
            if patient:
                due = oldest + wait
                batched = 0
            else:
                # No batch leaves before `shortest`.
                batched = max(bisect_right(padded, oldest + shortest, first, full) - first, 1)
                batched = due_with(padded, first, holds, batched, cap)
                due = max(oldest + holds[batched], padded[first + batched - 1])
            if padded[full - 1] < due:
                due = padded[full - 1]
                batched = cap
            if leave <= due:
                leave = due
            else:
                batched = 0
            # A request that arrives exactly when a batch leaves for another reason is not in it.
            beyond = first + batched if batched else _behind(padded, leave, first, full)
        elif leave <= oldest:  # nothing to wait for
            leave, beyond = oldest, first + 1
        else:
            beyond = first + 1 if passing else _behind(padded, leave, first, full)
        start = computing[0] if queues and computing[0] > leave else leave
        finish = start + times[beyond - first] * draws[turn % varied]
        turn += 1
        heapreplace(flight, finish)
        if queues:
            heapreplace(computing, finish)
        tally.add(beyond, leave, finish)
        first = beyond
    return tally


def _behind(padded: list[float], moment: float, first: int, full: int) -> int:
    """Return the first request from ``first`` on, and ``full`` at most, that comes after a moment."""
    while first < full and padded[first] <= moment:
        first += 1
    return first


def refusing(arrivals: Sequence[float], times: Sequence[float], slow: Sequence[float], rules: Rules) -> Run:
    """Serve all requests but those that would be late: refused on arrival, or dropped when their batch leaves.

    ``replay`` does the same for requests of any size and kind, and can send them one by one, but is ten times slower.
    """
    count, cap, slots, concurrency = len(arrivals), rules.cap, rules.slots, rules.concurrency
    wait, target, surely = rules.wait, rules.target, rules.surely
    draws = cycle(rules.draws)
    queue: list[float] = []  # arrivals of those not refused on arrival, from ``head`` on not served yet
    dues: list[float] = []  # when each of them has to be answered not to be dropped; ``inf``: never dropped
    flight: list[float] = []  # finishes of the batches in flight, ascending
    run = Run()
    now = -math.inf
    upcoming = head = 0
    while True:
        waiting = len(queue) - head
        leave = now if waiting else math.inf
        if waiting:
            if wait > 0 and waiting < cap:
                leave = max(leave, queue[head] + min(wait, target - slow[waiting]))
            if len(flight) >= slots and flight[-slots] > leave:
                leave = flight[-slots]
        if upcoming < count and (arrivals[upcoming] < leave or arrivals[upcoming] == leave > now):
            now = arrivals[upcoming]
            upcoming += 1
            while flight and flight[0] <= now:
                del flight[0]
            # An idle device admits all, and drops none of them.
            due = math.inf
            if flight and times[1] <= target + ROUNDING:
                due = now + target
                start = now if len(flight) < concurrency else max(now, flight[-concurrency])
                answered = start + _expected(waiting, len(flight) < slots, times, cap, concurrency, surely)
                if answered > due + ROUNDING:
                    if len(flight) >= concurrency:  # until a batch leaves or ends, nothing changes but the time
                        upcoming = bisect_left(arrivals, min(answered - target - ROUNDING, leave, flight[0]), upcoming)
                    continue
            queue.append(now)
            dues.append(due)
            continue
        if not waiting:
            break
        now = leave
        while flight and flight[0] <= now:
            del flight[0]
        start = now if len(flight) < concurrency else max(now, flight[-concurrency])
        members, head = _members(queue, dues, head, start, times[min(waiting, cap)], cap, surely)
        if not members:
            continue
        finish = start + times[len(members)] * next(draws)
        run.latencies += [finish - arrival for arrival in members]
        insort(flight, finish)
        run.batch(len(members), len(members), times[len(members)], now, finish)
    return run


def _expected(waiting: int, is_free: bool, times: Sequence[float], cap: int, concurrency: int, surely: float) -> float:
    """Return the seconds from when the device is free until a request that comes now would be answered."""
    if is_free:  # waiting requests are only held for others, and leave in time with this one
        return times[min(waiting + 1, cap)]
    if waiting < cap:
        return times[waiting + 1]
    full = waiting // cap
    return full * times[cap] / concurrency + times[waiting - full * cap + 1] * surely


def _members(
    queue: list[float], dues: list[float], head: int, start: float, lasting: float, cap: int, surely: float
) -> tuple[list[float], int]:
    """Return the arrivals of the next batch's requests, and the first that waits then; late ones are dropped."""
    beyond = len(queue)
    members: list[float] = []
    while head < beyond and len(members) < cap:
        # If other requests would fill the batch, the place is for those surely in time.
        fills = beyond - head - 1 >= cap - len(members)
        if start + (lasting * surely if fills else lasting) <= dues[head] + ROUNDING:
            members.append(queue[head])
        head += 1
    return members, head
