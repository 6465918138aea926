"""One replica's queue in virtual time: loops over given arrivals, from which forecasts are made.

``recursion`` takes a turn a batch, where nobody is refused; ``refusing`` one a slot, where requests are of one row;
``with_queue`` one an arrival, for all the rest. Each does what the Batcher does
(tests/carpool/forecasting/test_queueing.py).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import heapreplace
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

from carpool.batching.requests import seldom_exceeded
from carpool.forecasting.mixed import Kind, due_with, serve
from carpool.policy.plain import Frozen

if TYPE_CHECKING:
    from carpool.learning.latency_model import ServiceTime
    from carpool.policy.parameters import Parameters


class Setting(Frozen, frozen=True):
    """All that the loops below look at, besides arrivals."""

    cap: int
    wait: float
    slots: int
    passing: bool
    executors: int
    times: tuple[float, ...]
    slow: tuple[float, ...]
    target: float
    deadline: float
    shed: bool
    surely: float
    draws: Sequence[float]

    @classmethod
    def of(
        cls,
        service: ServiceTime,
        parameters: Parameters,
        target: float,
        executors: int | None,
        draws: Sequence[float] | None,
        *,
        deadline: float = math.inf,
        shed: bool = False,
        largest: int = 0,
    ) -> Setting:
        """Gather it; ``largest``: rows of the largest request."""
        return cls(
            cap=parameters.max_batch,
            wait=parameters.max_wait,
            slots=parameters.max_in_flight,
            passing=parameters.pass_through,
            executors=min(executors or service.executors, parameters.max_in_flight),
            times=_times(service, max(parameters.max_batch, largest)),
            slow=_slow(service, parameters.max_batch),
            target=target,
            deadline=deadline,
            shed=shed,
            surely=seldom_exceeded(service.noise),
            draws=draws or (1.0,),
        )


# A search asks for the same few again and again, of every length bucket.
@lru_cache(maxsize=256)
def _times(service: ServiceTime, largest: int) -> tuple[float, ...]:
    return service.table(largest)


@lru_cache(maxsize=256)
def _slow(service: ServiceTime, largest: int) -> tuple[float, ...]:
    return tuple(service.slow(size) for size in range(largest + 1))


class Run(NamedTuple):
    """What the loops below bring back; ``latencies`` in order of arrival, of a mix in order of service."""

    latencies: list[float]
    sizes: list[int]
    """Rows of each batch."""
    device_busy: float
    work: float
    end: float


def mixed(
    arrivals: Sequence[float], service: ServiceTime, setting: Setting, groups: Sequence[float] = (1.0,), rows: int = 1
) -> Run:
    """Serve requests of equal ``rows``, at most a batch's, of which only those of one kind share a batch.

    A kind is a length bucket, and in it one of ``groups`` of callers, whose shares of the requests are given.
    """
    cap, full = setting.cap // rows, -(-setting.cap // rows)
    kinds = [
        Kind(share * group, _times(own, setting.cap)[::rows], _slow(own, full * rows)[::rows])
        for share, own in service.mix or ((1.0, service),)
        for group in groups
    ]
    served = serve(
        arrivals, kinds, cap=cap, full=full, wait=setting.wait, slots=setting.slots, executors=setting.executors,
        target=setting.target, draws=setting.draws, shed=setting.shed, passing=setting.passing, surely=setting.surely,
    )  # fmt: skip
    run = Run(*served)
    return run if rows == 1 else run._replace(sizes=[rows * size for size in run.sizes])


class Course(NamedTuple):
    """What became of requests of one row that were all served, batch by batch."""

    ends: list[int]
    """Of each batch, the index behind its last request."""
    leaves: list[float]
    finishes: list[float]

    def run(self, arrivals: Sequence[float], setting: Setting) -> Run:
        """Work out the latencies."""
        latencies: list[float] = []
        sizes: list[int] = []
        work = 0.0
        first = 0
        for beyond, finish, draw in zip(self.ends, self.finishes, cycle(setting.draws), strict=False):
            latencies += [finish - arrival for arrival in arrivals[first:beyond]]
            sizes.append(beyond - first)
            work += setting.times[beyond - first] * draw
            first = beyond
        return Run(latencies, sizes, self.busy(), work, max(self.finishes))

    def sums(self, arrivals: Sequence[float], setting: Setting) -> tuple[float, float]:
        """Sum up the latencies of all requests, and the times of all batches (seconds)."""
        answered = work = 0.0
        first = 0
        for beyond, finish, draw in zip(self.ends, self.finishes, cycle(setting.draws), strict=False):
            answered += (beyond - first) * finish
            work += setting.times[beyond - first] * draw
            first = beyond
        return answered - math.fsum(arrivals), work

    def late(self, arrivals: Sequence[float], limit: float) -> tuple[int, int]:
        """Count requests that took longer than ``limit``, and sum the squares of how many did so in a row of batches.

        By batch, since the first to come is the latest.
        """
        return in_runs(
            bisect_left(arrivals, finish - limit, first, beyond) - first if finish - arrivals[first] > limit else 0
            for first, beyond, finish in zip([0, *self.ends], self.ends, self.finishes, strict=False)
        )

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


def in_runs(late: Iterable[int]) -> tuple[int, int]:
    """Sum up how many were late of each batch, and the squares of these sums over batches in a row that had some."""
    total = squares = run = 0
    for count in late:
        if count:
            run += count
        elif run:
            total += run
            squares += run * run
            run = 0
    return total + run, squares + run * run


def recursion(arrivals: Sequence[float], setting: Setting) -> Course:
    """Serve requests of one row, none refused: one turn of a loop a batch, and every search waits for these loops."""
    count, cap, slots, times = len(arrivals), setting.cap, setting.slots, setting.times
    wait = setting.wait if setting.wait > 0 else -math.inf
    draws = cycle(setting.draws)
    # How long the oldest may wait, by rows waiting with it: W, or until it would be late.
    patience = min(setting.target, setting.deadline)
    holds = [min(setting.wait, patience - slow) for slow in setting.slow]
    shortest = holds[-2] if cap > 1 else setting.wait
    patient = shortest >= wait
    # Nobody comes after the last, so that the loops need not look for the end.
    padded = [*arrivals, *[math.inf] * max(cap, slots)]
    # Heaps of the latest finishes: one a slot, of which the first frees a slot; one an executor, if there are fewer.
    flight = [-math.inf] * slots
    computing = [-math.inf] * setting.executors
    queues = setting.executors < slots
    ends: list[int] = []
    leaves: list[float] = []
    finishes: list[float] = []
    first = 0
    # 1. One by one, until more wait than are served: company costs them nothing then.
    if setting.passing:
        for oldest, pressing in zip(arrivals, padded[slots:], strict=False):
            leave = flight[0]
            if leave < oldest:
                leave = oldest
            elif pressing < leave:
                break
            start = computing[0] if queues and computing[0] > leave else leave
            finish = start + times[1] * next(draws)
            heapreplace(flight, finish)
            if queues:
                heapreplace(computing, finish)
            leaves.append(leave)
            finishes.append(finish)
        first = len(finishes)
        ends += range(1, first + 1)
    # 2. In batches.
    while first < count:
        oldest = padded[first]
        leave = flight[0]
        full = first + cap
        # By comparisons, not by `max` and `min`: their calls took a third of the time.
        if leave < oldest + wait:
            if patient:
                due = oldest + wait
                riders = 0
            else:
                # Nobody leaves before `shortest`.
                riders = max(bisect_right(padded, oldest + shortest, first, full) - first, 1)
                riders = due_with(padded, first, holds, riders, cap)
                due = max(oldest + holds[riders], padded[first + riders - 1])
            if padded[full - 1] < due:
                due = padded[full - 1]
                riders = cap
            if leave <= due:
                leave = due
            else:
                riders = 0
            # Who comes at the very moment a batch leaves for another reason misses it.
            beyond = first + riders if riders else bisect_right(padded, leave, first, full)
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
    return Course(ends, leaves, finishes)


def refusing(arrivals: Sequence[float], setting: Setting) -> Run:
    """Do as ``with_queue`` where requests are of one row and who would be late is refused, in a third of the time.

    Most of the arrivals of an overload meet all slots taken, and nothing changes for them but how many wait.
    """
    cap, wait, slots, target = setting.cap, setting.wait, setting.slots, setting.target
    times, slow, draws, executors = setting.times, setting.slow, setting.draws, setting.executors
    padded = [*arrivals, math.inf]  # nobody comes after the last
    came: list[float] = []  # who was admitted, and until when each must be answered
    limits: list[float] = []
    first = upcoming = 0  # who waits: came[first:]
    behind: list[float] = []  # seconds from a free executor to an answer, by how many wait, with all slots taken
    flight: list[float] = []  # finishes of batches in flight, ascending
    latencies: list[float] = []
    sizes: list[int] = []
    device_busy = work = now = 0.0
    busy_until = -math.inf

    def one_more() -> None:
        queued = len(behind)
        own = times[queued % cap + 1] * (setting.surely if queued >= cap else 1.0)
        behind.append(own + queued // cap * times[cap] / executors)

    one_more()
    while True:
        queued = len(came) - first
        if queued == len(behind):
            one_more()
        # 1. When the next batch leaves, if nobody else comes.
        leave = math.inf
        if queued:
            due = -math.inf
            if wait > 0 and queued < cap:
                due = min(came[first] + wait, came[first] + target - slow[queued])
            leave = max(now, due, flight[0] if len(flight) == slots else -math.inf)
        # 2. Somebody comes: admit them, or refuse them when predicted late.
        arrival = padded[upcoming]
        if arrival < leave or arrival == leave > now:
            if arrival == math.inf:
                break
            if len(flight) == slots and arrival < flight[0]:
                # Until a slot is free all meet the same.
                free, start = flight[0], flight[-executors]
                while arrival < free:
                    limit = arrival + target
                    if start + behind[queued] <= limit:
                        came.append(arrival)
                        limits.append(limit)
                        queued += 1
                        if queued == len(behind):
                            one_more()
                    now = arrival
                    upcoming += 1
                    arrival = padded[upcoming]
                continue
            now = arrival
            upcoming += 1
            del flight[: bisect_right(flight, now)]
            limit = math.inf
            if flight:  # an idle device admits all
                limit = now + target
                start = max(now, flight[-executors]) if len(flight) >= executors else now
                # While a slot is free nothing waits but what is held for company, and leaves in time with this request.
                lasting = times[min(queued + 1, cap)] if len(flight) < slots else behind[queued]
                if start + lasting > limit:
                    continue
            came.append(now)
            limits.append(limit)
            continue
        # 3. Compose: who would be late in a batch as large as it would be stays behind.
        now = leave
        del flight[: bisect_right(flight, now)]
        start = max(now, flight[-executors]) if len(flight) >= executors else now
        lasting = times[min(queued, cap)]
        riders: list[float] = []
        while first < len(came) and len(riders) < cap:
            others = len(came) - first - 1 >= cap - len(riders)
            if start + (setting.surely if others else 1.0) * lasting > limits[first]:
                first += 1
                continue
            # All behind it came later, and are in time as well, but for whom an idle device met.
            beyond = first + 1 if limits[first] == math.inf else first + cap - len(riders)
            riders += came[first:beyond]
            first = min(beyond, len(came))
        if not riders:
            continue
        # 4. Serve.
        duration = times[len(riders)] * draws[len(sizes) % len(draws)]
        finish = start + duration
        latencies += [finish - rider for rider in riders]
        insort(flight, finish)
        sizes.append(len(riders))
        work += duration
        device_busy += max(finish - max(busy_until, now), 0.0)
        busy_until = max(busy_until, finish)
    return Run(latencies, sizes, device_busy, work, busy_until)


class _Waiting:
    """A request in the queue of the loop below."""

    __slots__ = ("arrival", "due", "index", "left", "limit", "rows")

    def __init__(self, index: int, arrival: float, rows: int, limit: float, due: float) -> None:
        self.index = index
        self.arrival = arrival
        self.rows = rows
        self.left = rows
        self.limit = limit
        """When it must be finished not to be dropped."""
        self.due = due
        """When it must surely be, where others wait for its seat."""


def with_queue(arrivals: Sequence[float], rows: Sequence[int], setting: Setting) -> Run:
    """Serve requests of any size, some refused: one turn of the loop an arrival or a batch."""
    count, cap, wait, slots = len(arrivals), setting.cap, setting.wait, setting.slots
    times, slow, draws, executors = setting.times, setting.slow, setting.draws, setting.executors
    target, deadline, passing = setting.target, setting.deadline, setting.passing
    patience = min(target, deadline)
    queue: deque[_Waiting] = deque()
    queued = 0
    flight: list[float] = []  # finishes of batches in flight, ascending
    finishes = [0.0] * count  # 0 for who is refused
    sizes: list[int] = []
    upcoming = 0
    device_busy = work = now = 0.0
    busy_until = -math.inf

    def service_start(at: float) -> float:
        return max(at, flight[-executors]) if len(flight) >= executors else at

    while True:
        # 1. When the next batch leaves, if nothing else comes.
        leave = math.inf
        if queue:
            due = -math.inf
            if wait > 0 and queued < cap and not passing:
                oldest = queue[0].arrival
                due = min(oldest + wait, oldest + patience - slow[queued])
            leave = max(now, due, flight[-slots] if len(flight) >= slots else -math.inf)
        # 2. Something else comes: admit it, or refuse it when predicted late behind full batches, its own as it is.
        if upcoming < count and (arrivals[upcoming] < leave or arrivals[upcoming] == leave > now):
            now, size = arrivals[upcoming], rows[upcoming]
            del flight[: bisect_right(flight, now)]
            limit, due, expected = math.inf, math.inf, 0.0
            if flight:  # an idle device admits all
                alone = times[size] if size <= cap else math.ceil(size / (cap * executors)) * times[cap]
                sheddable = setting.shed and alone <= target
                limit = now + (patience if sheddable else deadline)
                due = now + target if sheddable else math.inf
                expected = alone if passing or size > cap else 0.0
                if len(flight) < slots:
                    # Nothing waits but what is held for company, and leaves in time with this request.
                    expected = max(expected, times[min(size if passing else queued + size, cap)])
                elif not passing:
                    own = max(expected, times[min(queued % cap + size, cap)])
                    if sheddable and queued >= cap:
                        own *= setting.surely
                    expected = own + queued // cap * times[cap] / executors
                elif queue:
                    expected += len(queue) * times[math.ceil(queued / len(queue))] / executors
            if service_start(now) + expected <= limit:
                queue.append(_Waiting(upcoming, now, size, limit, due))
                queued += size
                if passing and len(flight) >= slots and len(queue) > slots:
                    passing = False
            upcoming += 1
            continue
        if not queue:
            break
        # 3. Compose: who would be late in a batch as large as it would be stays behind.
        now = leave
        del flight[: bisect_right(flight, now)]
        start = service_start(now)
        lasting = times[min(queued, cap)]
        size = 0
        riders: list[int] = []
        while queue and size < cap:
            request = queue[0]
            take = request.left
            if passing:
                lasting = times[min(take, cap)]
            late = start + lasting > request.limit
            if not passing and queued - take >= cap - size:
                late = late or start + setting.surely * lasting > request.due
            if take == request.rows and late:
                queue.popleft()
                queued -= take
                continue
            if request.rows > cap:
                take = min(take, cap - size)
            elif size + take > cap:
                break
            riders.append(request.index)
            size += take
            queued -= take
            request.left -= take
            if not request.left:
                queue.popleft()
            if passing:
                break
        if not riders:
            continue
        # 4. Serve.
        duration = times[size] * draws[len(sizes) % len(draws)]
        finish = start + duration
        for index in riders:
            finishes[index] = max(finishes[index], finish)
        insort(flight, finish)
        sizes.append(size)
        work += duration
        device_busy += max(finish - max(busy_until, now), 0.0)
        busy_until = max(busy_until, finish)
    # A device that was idle takes who can't be in time as well; no answer comes after the deadline.
    latencies = [
        finish - arrival
        for finish, arrival in zip(finishes, arrivals, strict=True)
        if finish and finish - arrival <= deadline
    ]
    return Run(latencies, sizes, device_busy, work, busy_until)
