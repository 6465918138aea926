"""Requests of one row in one queue: the loops that a search spends its time in.

Where none is refused it is played batch by batch. A batch leaves at d = max(first free slot, a0, min(a0 + W, aB)): when
a slot is free and it is full, or its oldest request has waited W = ``max_wait``, or more waiting would make that one
late. The loop takes one turn per batch, not per request. Refusals are played request by request. What neither loop can
play (requests of several rows or kinds) is played by ``replay``.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from heapq import heapreplace
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

from carpool.batching.requests import ROUNDING
from carpool.policy.plain import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Rules(Frozen, frozen=True):
    """How requests are batched, all times in seconds."""

    cap: int
    """Rows of a batch at most."""
    wait: float
    slots: int
    passing: bool
    """Whether requests pass one by one until more wait than slots serve."""
    concurrency: int
    """Batches that the device computes at once, at most ``slots``."""
    target: float
    """Seconds from arrival until which a request has to be answered."""
    shed: bool = False
    """Whether requests that would be late are refused."""
    surely: float = 1.0
    """Factor on a batch's mean time that it seldom exceeds."""
    draws: "Sequence[float]" = (1.0,)
    """Multipliers of batch times, one per batch, over and over."""


class Run(NamedTuple):
    """What became of the requests; latencies in order of service."""

    latencies: list[float]
    sizes: list[int]
    """Requests of each batch."""
    rows: int
    """Rows in all batches."""
    busy: float
    """Seconds with a batch in flight."""
    work: float
    """Seconds that batches take in the mean of their noise, in sum: 300 that spread by 40 % take 2 % more or less."""
    end: float


class Course(NamedTuple):
    """The batches of a run, in order."""

    ends: list[int]
    """Of each batch, the index behind its last request."""
    leaves: list[float]
    finishes: list[float]

    def run(self, arrivals: Sequence[float], times: Sequence[float]) -> Run:
        """Work out the latencies."""
        latencies: list[float] = []
        sizes: list[int] = []
        work = 0.0
        first = 0
        for beyond, finish in zip(self.ends, self.finishes, strict=True):
            latencies += [finish - arrival for arrival in arrivals[first:beyond]]
            sizes.append(beyond - first)
            work += times[beyond - first]
            first = beyond
        return Run(latencies, sizes, len(arrivals), self.busy(), work, max(self.finishes))

    def sums(self, arrivals: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
        """Sum up the latencies of all requests, and the mean times of all batches."""
        answered = work = 0.0
        first = 0
        for beyond, finish in zip(self.ends, self.finishes, strict=True):
            answered += (beyond - first) * finish
            work += times[beyond - first]
            first = beyond
        return answered - math.fsum(arrivals), work

    def late(self, arrivals: Sequence[float], limit: float) -> Iterator[int]:
        """Count the requests of each batch that took longer than ``limit``: its first ones, which came first."""
        first = 0
        for beyond, finish in zip(self.ends, self.finishes, strict=True):
            late = finish - arrivals[first] > limit
            yield bisect_left(arrivals, finish - limit, first, beyond) - first if late else 0
            first = beyond

    def busy(self) -> float:
        """Return the seconds with a batch in flight."""
        busy, until = 0.0, -math.inf
        for leave, finish in zip(self.leaves, self.finishes, strict=True):
            if leave >= until:
                busy += finish - leave
                until = finish
            elif finish > until:
                busy += finish - until
                until = finish
        return busy


def in_bursts(late: Iterable[int]) -> tuple[int, int]:
    """Sum up the late requests of each batch, and the squares of these sums over batches in a row that had some."""
    total = squares = burst = 0
    for count in late:
        if count:
            burst += count
        elif burst:
            total += burst
            squares += burst * burst
            burst = 0
    return total + burst, squares + burst * burst


def due_with(arrivals: Sequence[float], first: int, holds: Sequence[float], least: int, most: int) -> int:
    """Return how many requests, from ``least`` to ``most``, leave together when the oldest is ``first``.

    ``holds``: how long the oldest may wait, by the requests that wait. Each arrival makes the batch slower, so that it
    has to leave earlier.
    """
    oldest = arrivals[first]
    while least < most:
        middle = (least + most) // 2
        if arrivals[first + middle] <= oldest + holds[middle]:
            least = middle + 1
        else:
            most = middle
    return least


def recursion(arrivals: Sequence[float], times: Sequence[float], slow: Sequence[float], rules: Rules) -> Course:
    """Serve all requests; ``times`` and ``slow``: seconds of a batch by its rows, and what it seldom exceeds."""
    count, cap, slots = len(arrivals), rules.cap, rules.slots
    wait = rules.wait if rules.wait > 0 else -math.inf
    # How long the oldest may wait, by rows that wait: W, or until it would be late.
    holds = [min(rules.wait, rules.target - each) for each in slow]
    shortest = holds[-2] if cap > 1 else rules.wait
    patient = shortest >= wait
    # Nothing comes after the last request, so that the loop need not look for the end.
    padded = [*arrivals, *[math.inf] * max(cap, slots)]
    # Heaps of the latest finishes: one per slot, and one per batch computed at once, if that is fewer.
    flight = [-math.inf] * slots
    computing = [-math.inf] * rules.concurrency
    queues = rules.concurrency < slots
    draws = cycle(rules.draws)
    course = Course([], [], [])
    ends, leaves, finishes = course
    if rules.passing:
        _one_by_one(padded, count, slots, times[1], draws, flight, computing if queues else None, course)
    first = len(ends)
    while first < count:
        oldest = padded[first]
        leave = flight[0]
        full = first + cap
        # By comparisons, not by `max` and `min`: their calls took a third of the time.
        if leave < oldest + wait:
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
            # A request that comes at the very moment a batch leaves for another reason misses it.
            beyond = first + batched if batched else bisect_right(padded, leave, first, full)
        elif leave <= oldest:  # nothing to wait for
            leave, beyond = oldest, first + 1
        else:
            beyond = bisect_right(padded, leave, first, full)
        start = computing[0] if queues and computing[0] > leave else leave
        finish = start + times[beyond - first] * next(draws)
        heapreplace(flight, finish)
        if queues:
            heapreplace(computing, finish)
        ends.append(beyond)
        leaves.append(leave)
        finishes.append(finish)
        first = beyond
    return course


def _one_by_one(
    padded: Sequence[float],
    count: int,
    slots: int,
    seconds: float,
    draws: Iterator[float],
    flight: list[float],
    computing: list[float] | None,
    course: Course,
) -> None:
    """Pass requests through, each in a batch of its own, until more wait than there are slots."""
    for index in range(count):
        oldest = padded[index]
        leave = flight[0]
        if leave < oldest:
            leave = oldest
        elif padded[index + slots] < leave:
            break
        start = computing[0] if computing is not None and computing[0] > leave else leave
        finish = start + seconds * next(draws)
        heapreplace(flight, finish)
        if computing is not None:
            heapreplace(computing, finish)
        course.ends.append(index + 1)
        course.leaves.append(leave)
        course.finishes.append(finish)


def refusing(arrivals: Sequence[float], times: Sequence[float], slow: Sequence[float], rules: Rules) -> Run:
    """Serve all but those that would be late: these are refused on arrival, or dropped when their batch leaves.

    ``replay`` does the same for requests of any size and kind, and passes them one by one; it takes ten times as long.
    """
    count, cap, slots, concurrency = len(arrivals), rules.cap, rules.slots, rules.concurrency
    wait, target, surely = rules.wait, rules.target, rules.surely
    draws = cycle(rules.draws)
    queue: list[float] = []  # arrivals of those not refused on arrival, from ``head`` on not served yet
    dues: list[float] = []  # when each of them has to be answered not to be dropped; ``inf``: never dropped
    flight: list[float] = []  # finishes of the batches in flight, ascending
    latencies: list[float] = []
    sizes: list[int] = []
    busy = work = 0.0
    now = until = -math.inf
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
            if flight and times[1] <= target:
                due = now + target
                start = now if len(flight) < concurrency else max(now, flight[-concurrency])
                if start + _expected(waiting, len(flight) < slots, times, cap, concurrency, surely) > due:
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
        latencies += [finish - arrival for arrival in members]
        insort(flight, finish)
        sizes.append(len(members))
        work += times[len(members)]
        busy += max(finish - max(until, now), 0.0)
        until = max(until, finish)
    return Run(latencies, sizes, sum(sizes), busy, work, until)


def _expected(waiting: int, is_free: bool, times: Sequence[float], cap: int, concurrency: int, surely: float) -> float:
    """Return the seconds from when the device is free until a request that comes now would be answered."""
    if is_free:  # what waits is only held for other requests, and leaves in time with this one
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
        # Where others fill the batch the place is for those surely in time.
        fills = beyond - head - 1 >= cap - len(members)
        if start + (lasting * surely if fills else lasting) <= dues[head] + ROUNDING:
            members.append(queue[head])
        head += 1
    return members, head
