"""A queue is what waits in a lane under one key."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from carpool.batching.requests import Request, Ride, time_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from carpool.batching.model_state import Lane
    from carpool.batching.requests import Estimate


class Boarding(NamedTuple):
    """The next batch of a queue, taken off it."""

    rides: list[Ride]
    rows: int
    begun: int
    """Requests of which nothing was dispatched before."""
    waited: float
    """Seconds that those have waited, in sum."""
    dropped: list[Request]
    """Who was taken off because this batch would make them late."""


class Queue:
    """Requests with one key, by priority class, first come, first served."""

    __slots__ = (
        "_class_rows",
        "_hold",
        "_soonest",
        "_stale",
        "bucket",
        "classes",
        "key",
        "lane",
        "merge",
        "rows",
        "tokens",
    )

    def __init__(self, key: Hashable, lane: Lane, *, merge: bool, bucket: int | None = None) -> None:
        self.key = key
        self.bucket = bucket
        """Length bucket of all its requests; ``None``: of several."""
        self.lane = lane
        self.merge = merge
        self.classes: dict[int, deque[Request]] = {}
        self.rows = 0
        self.tokens = 0
        self._hold = inf
        self._soonest = inf
        self._stale = False
        self._class_rows: dict[int, int] | None = None  # None: to be summed up

    def __iter__(self) -> Iterator[Request]:
        for waiting in self.classes.values():
            yield from waiting

    @property
    def alone(self) -> bool:
        """Whether each of its requests makes a batch of its own now."""
        return not self.merge or self.lane.passing or self.lane.quarantined

    @property
    def estimate(self) -> Estimate | None:
        """What is believed of its requests' service time."""
        estimate = self.lane.estimate
        return estimate.of(self.bucket) if estimate is not None and estimate.buckets else estimate

    @property
    def cap(self) -> int:
        """Rows that a batch of its requests may have now."""
        lane = self.lane
        return self._isolated(lane.cap) if lane.isolated else lane.cap

    @property
    def full(self) -> int:
        """Rows with which its next batch is full."""
        lane = self.lane
        return self._isolated(lane.full) if lane.isolated else lane.full

    def _isolated(self, rows: int) -> int:
        """Return ``rows``, or what poison among its requests leaves of them; a larger request is not cut for that."""
        isolation = self.lane.isolated.get(self.key)
        return rows if isolation is None or isolation.limit is None else min(rows, isolation.limit)

    @property
    def splits(self) -> bool:
        """Whether requests larger than a batch may be cut."""
        return self.merge and not self.lane.quarantined

    def add(self, request: Request) -> None:
        """Append at the end of its class."""
        priority = request.priority
        waiting = self.classes.get(priority)
        if waiting is None:
            waiting = self.classes[priority] = deque()
        waiting.append(request)
        self.rows += request.rows
        self.tokens += request.tokens
        self.lane.queued += 1
        backlog = self.lane.backlog
        backlog.rows += request.rows
        backlog.size += request.size
        backlog.tokens += request.tokens
        self._class_rows = None
        if not self._stale:
            limit = min(request.deadline, request.due)
            self._soonest = min(self._soonest, limit)
            self._hold = min(self._hold, request.hold_until)

    def remove(self, request: Request) -> None:
        """Take a request off, undispatched rows and all."""
        waiting = self.classes[request.priority]
        waiting.remove(request)
        if not waiting:
            del self.classes[request.priority]
        left = request.rows - request.taken
        self.rows -= left
        self.lane.backlog.rows -= left
        self._off(request)
        self.changed()

    def _off(self, request: Request) -> None:
        self.tokens -= request.tokens
        self.lane.queued -= 1
        self.lane.backlog.size -= request.size
        self.lane.backlog.tokens -= request.tokens

    def board(self, start: float, now: float, ageing: float) -> Boarding:
        """Take the next batch off, to be served from ``start``, leaving behind whom it would make late."""
        lane = self.lane
        cap = lane.cap
        alone = self.alone
        splits = self.splits
        room = full = self.full
        if lane.picky and not alone:
            room = lane.familiar(next(iter(self)).bucket, min(self.rows, full))
        budget = lane.max_tokens
        shed_slo = lane.shed_slo
        estimate = self.estimate
        times = None if estimate is None else estimate.times
        # Who can't make it with the batch as large as it would be is dropped: late riders only delay the others.
        lasting = -inf if times is None else time_of(times, min(self.rows, room))
        surely = 1.0 if estimate is None or alone else estimate.surely
        rides: list[Ride] = []
        dropped: list[Request] = []
        rows = tokens = begun = 0
        waited = 0.0
        classes = self.classes
        while classes:
            waiting = self.first(now, ageing) if len(classes) > 1 else next(iter(classes.values()))
            request = waiting[0]
            first_row = request.taken
            left = request.rows - first_row
            if alone and times is not None:
                lasting = time_of(times, min(left, cap) if splits else left)
            # 1. Late? Where others fill the batch, the seat is for who will surely be in time.
            slack = surely if self.rows - left >= full else 1.0
            if (
                (
                    start + lasting > request.deadline
                    or (shed_slo and request.sheddable and start + slack * lasting > request.due)
                )
                and not request.exempt
                and not first_row
            ):
                self.remove(request)
                dropped.append(request)
                continue
            # 2. Room? A request larger than a batch fills what there is; any other waits for room for all its rows.
            if splits and request.rows > cap:
                left = min(left, room - rows)
            elif rides and rows + left > room:
                break
            if budget is not None and request.tokens:
                share = left * request.tokens // request.rows
                if tokens + share > budget and splits and request.tokens > budget:
                    left = min(left, (budget - tokens) * request.rows // request.tokens)
                    if not rides:
                        left = max(left, 1)  # a row is served whatever its tokens
                    share = left * request.tokens // request.rows
                if not left or (rides and tokens + share > budget):
                    break
                tokens += share
            # 3. On board.
            rides.append((request, first_row, first_row + left))
            rows += left
            if not first_row:
                waited += now - request.arrived
                begun += 1
            request.taken += left
            if request.taken == request.rows:
                waiting.popleft()
                if not waiting:
                    del classes[request.priority]
                self._off(request)
            elif rows < room:
                break  # the token budget cut it
            if alone or rows >= room:
                break
        self.rows -= rows
        self.lane.backlog.rows -= rows
        self.changed()
        return Boarding(rides, rows, begun, waited, dropped)

    def shed(self, span: Callable[[Queue, Request, Estimate], float]) -> None:
        """Let those be shed too who came before shedding began: late anyway, they would make late who comes after.

        ``span``: service time of a request alone.
        """
        estimate = self.estimate
        if estimate is None:
            return
        for request in self:
            if not request.sheddable:
                request.sheddable = request.arrived + span(self, request, estimate) <= request.due

    def changed(self) -> None:
        """Note that requests left or that what they wait for changed."""
        self._stale = True
        self._class_rows = None

    def due_at(self, upper: tuple[float, ...]) -> float:
        """When holding ends: with the first hold, or where longer would make a rider late (service: ``upper``)."""
        if self._stale:
            self._hold = min(request.hold_until for request in self)
            self._soonest = min(min(request.due, request.deadline) for request in self)
            self._stale = False
        return min(self._hold, self._soonest - time_of(upper, self.rows))

    def first(self, now: float, ageing: float) -> deque[Request]:
        """Return the class whose head goes first: by priority, one class up for every ``ageing`` seconds waited."""
        if len(self.classes) == 1:
            return next(iter(self.classes.values()))
        return min(
            self.classes.values(),
            key=lambda waiting: (waiting[0].priority - (now - waiting[0].arrived) / ageing, waiting[0].arrived),
        )

    def _rows_by_class(self) -> dict[int, int]:
        if self._class_rows is None:
            self._class_rows = {
                level: sum(request.rows - request.taken for request in waiting)
                for level, waiting in self.classes.items()
            }
        return self._class_rows

    def work(self, times: tuple[float, ...], *, priority: int | None = None, joins: bool = False) -> float:
        """Device seconds of what waits, or of that in classes up to ``priority``.

        ``joins``: for a request that will itself be in the last, partial batch, so that only full ones go before it.
        """
        if self.alone:
            count = sum(
                len(waiting) for level, waiting in self.classes.items() if priority is None or level <= priority
            )
            return count * time_of(times, -(-self.rows // count)) if count else 0.0
        rows = self.rows
        if priority is not None and (len(self.classes) > 1 or priority not in self.classes):
            rows = sum(waiting for level, waiting in self._rows_by_class().items() if level <= priority)
        cap = self.cap
        full, part = divmod(rows, cap)
        ahead = full * time_of(times, cap) if full else 0.0
        return ahead + time_of(times, part) if part and not joins else ahead
