"""A queue: a model's waiting requests with one key, and which of them make the next batch."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from carpool.batching.first_calls import ENOUGH, SLOW
from carpool.batching.requests import ROUNDING, Estimate, Request, Slice, seldom_exceeded, time_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from carpool.batching.model_state import ModelState


class Queue:
    """Requests with one key, by priority class, first come, first served."""

    __slots__ = ("_class_rows", "_hold", "_soonest", "_stale", "bucket", "classes", "key", "merge", "rows", "state")

    def __init__(self, key: Hashable, state: ModelState, *, merge: bool, bucket: int | None = None) -> None:
        self.key = key
        self.state = state
        self.merge = merge
        self.bucket = bucket
        """Length bucket of all its requests; ``None``: of several."""
        self.classes: dict[int, deque[Request]] = {}
        self.rows = 0
        self._hold = inf
        """The first end of a hold, and the first time by which an answer has to be there ..."""
        self._soonest = inf
        self._stale = False
        """... and whether both have to be computed again."""
        self._class_rows: dict[int, int] | None = None
        """Rows by class; ``None``: not summed up yet."""

    def __iter__(self) -> Iterator[Request]:
        for waiting in self.classes.values():
            yield from waiting

    @property
    def alone(self) -> bool:
        """Whether each of its requests is now sent in a batch of its own."""
        return not self.merge or self.state.passing or self.state.isolation.quarantined

    @property
    def grows(self) -> bool:
        """Whether the next of its first batches shows what a larger one takes: until then, that is a guess.

        Of a slow model, all that waits for batches to be verified counts: with batches it may be answered in time.
        """
        first, estimate = self.state.first_calls, self.estimate
        if not self.merge and self.state.isolation.verifies and estimate is not None:
            return self.rows > 0 and time_of(estimate.times, 1) >= SLOW
        if first is None or first.ended or first.since >= ENOUGH or not self.rows:
            return False
        return 1 < first.shares < 2 * self.cap and self.splits

    @property
    def splits(self) -> bool:
        """Whether requests larger than a batch may be cut."""
        return self.merge and not self.state.isolation.quarantined

    @property
    def estimate(self) -> Estimate | None:
        """The estimate of its requests' service time."""
        estimate = self.state.belief.estimate
        return estimate.of(self.bucket) if estimate is not None and estimate.buckets else estimate

    @property
    def cap(self) -> int:
        """Rows that a batch of its requests may have now; a larger request is not cut for a failing one's sake."""
        cap, isolation = self.state.cap, self.state.isolation
        return isolation.cap(self.key, cap) if isolation.keys else cap

    def add(self, request: Request) -> None:
        """Append at the end of its class."""
        waiting = self.classes.get(request.priority)
        if waiting is None:
            waiting = self.classes[request.priority] = deque()
        waiting.append(request)
        self.rows += request.rows
        load = self.state.load
        load.requests += 1
        load.rows += request.rows
        load.size += request.size
        load.tokens += request.tokens
        self._class_rows = None
        if not self._stale:
            self._soonest = min(self._soonest, min(request.deadline, request.due))  # noqa: PLW3301 - see `wake_at`
            self._hold = min(self._hold, request.hold_until)

    def remove(self, request: Request) -> None:
        """Take a request off, with its rows that were not dispatched."""
        waiting = self.classes[request.priority]
        waiting.remove(request)
        if not waiting:
            del self.classes[request.priority]
        left = request.rows - request.taken
        self.rows -= left
        self.state.load.rows -= left
        self._off(request)
        self.changed()

    def _off(self, request: Request) -> None:
        load = self.state.load
        load.requests -= 1
        load.size -= request.size
        load.tokens -= request.tokens

    def take(self, start: float, now: float, ageing: float) -> tuple[list[Slice], int, list[Request]]:
        """Take the next batch off, to be served from ``start``, and count it.

        Return its slices, its rows, and the requests that it would have made late: they are not in it.
        """
        state, estimate, alone, splits, cap = self.state, self.estimate, self.alone, self.splits, self.state.cap
        times = None if estimate is None else estimate.times
        room = full = self.cap
        if (first := state.first_calls) is not None and first.shares > 1 and self.splits:
            alone, room = False, int(min(room, first.shares * next(iter(self)).rows))
        if not alone and state.first_batches.slow:
            room = state.first_batches.known_size(next(iter(self)).bucket, min(self.rows, room))
        # All are to be in time with the batch as large as it would be: late ones only delay the others.
        # What more requests take than have shared a call is a guess.
        most = inf if alone or first is None or first.shares == inf else first.half
        seconds = -inf if times is None else min(time_of(times, min(self.rows, room)), most)
        surely = 1.0 if estimate is None else seldom_exceeded(estimate.noise)
        shed_slo = state.belief.shed_slo
        slices: list[Slice] = []
        dropped: list[Request] = []
        rows = 0
        counters = state.counters
        classes = self.classes
        while classes:
            waiting = self.first(now, ageing) if len(classes) > 1 else next(iter(classes.values()))
            request = waiting[0]
            first_row, left = request.taken, request.rows - request.taken
            if alone and times is not None:
                seconds = time_of(times, min(left, cap) if splits else left)
            # 1. Late? If others would fill the batch, or go instead, only those that are surely in time have the place.
            if not first_row and not request.exempt:
                factor = surely if self.rows - left >= (1 if alone else full) else 1.0
                end, surely_end = start + seconds - ROUNDING, start + factor * seconds - ROUNDING
                if end > request.deadline or (shed_slo and request.sheddable and surely_end > request.due):
                    self.remove(request)
                    dropped.append(request)
                    continue
            # 2. Room? A request larger than a batch fills what there is; any other waits for room for all its rows.
            if splits and request.rows > cap:
                left = min(left, room - rows)
            elif slices and rows + left > room:
                break
            # 3. In the batch.
            slices.append((request, first_row, first_row + left))
            rows += left
            if not first_row:
                counters.dispatched += 1
                counters.queue_seconds += now - request.arrived
            request.taken += left
            if request.taken == request.rows:
                waiting.popleft()
                if not waiting:
                    del classes[request.priority]
                self._off(request)
            if alone or rows >= room:
                break
        self.rows -= rows
        state.load.rows -= rows
        self.changed()
        return slices, rows, dropped

    def changed(self) -> None:
        """Note that requests left, or that the time they wait for changed."""
        self._stale = True
        self._class_rows = None

    def due_at(self, upper: tuple[float, ...]) -> float:
        """When holding ends: with the first hold, or where longer would make a request late (service: ``upper``)."""
        if self._stale:
            self._hold = min(request.hold_until for request in self)
            self._soonest = min(min(request.due, request.deadline) for request in self)
            self._stale = False
        return min(self._hold, self._soonest - time_of(upper, self.rows))

    def first(self, now: float, ageing: float) -> deque[Request]:
        """Return the class whose head goes first: by priority, one class up for every ``ageing`` seconds waited."""
        return min(
            self.classes.values(),
            key=lambda waiting: (waiting[0].priority - (now - waiting[0].arrived) / ageing, waiting[0].arrived),
        )

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
            if self._class_rows is None:
                self._class_rows = {
                    level: sum(request.rows - request.taken for request in waiting)
                    for level, waiting in self.classes.items()
                }
            rows = sum(waiting for level, waiting in self._class_rows.items() if level <= priority)
        cap = self.cap
        full, part = divmod(rows, cap)
        ahead = full * time_of(times, cap) if full else 0.0
        return ahead + time_of(times, part) if part and not joins else ahead

    def span(self, request: Request, estimate: Estimate) -> float:
        """Service time of a request alone, in as many batches as it needs."""
        cap = self.state.cap
        if request.rows <= cap or not self.splits:
            return time_of(estimate.times, request.rows)
        servers = min(estimate.executors, self.state.slots)
        return -(-request.rows // (cap * servers)) * time_of(estimate.times, cap)

    def shed(self) -> None:
        """Allow shedding of requests that came before shedding began: late anyway, they would make later ones late."""
        estimate = self.estimate
        if estimate is not None:
            for request in self:
                if not request.sheddable:
                    request.sheddable = request.arrived + self.span(request, estimate) <= request.due + ROUNDING
