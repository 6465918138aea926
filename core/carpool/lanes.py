"""A lane is what the Batcher knows of one model; a queue is what waits in it under one key."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.company import Company
from carpool.poison import EXTRA_ROWS, EXTRA_SHARE, MAX_ISOLATED, Isolation, Suspects
from carpool.riding import PROBES, Request, Ride, time_of
from carpool.statistics import Counters

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from carpool.policy import Parameters
    from carpool.riding import Batch, Estimate

HOPELESS = 1.5
"""Times what a batch seldom exceeds, from which it has waited for an executor that was only hoped for."""

SLOW = 3.0
"""Times what a batch seldom exceeds, from which a first one is slow for being the first."""

PROBE_AFTER = 50
"""Full batches served at a lowered ceiling before one more row is tried; doubled whenever the try fails."""


class Backlog:
    """What waits in all queues of a model together."""

    __slots__ = ("rows", "size", "tokens")

    def __init__(self) -> None:
        self.rows = 0
        self.size = 0
        self.tokens = 0


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


class Lane:
    """One model: its parameters, what is believed of its service time, what went wrong with it, and its counters."""

    __slots__ = (
        "at_ceiling", "backlog", "ceiling", "cold_batches", "cold_slow", "company", "counters",
        "estimate", "extra_rows", "gave_back", "hopeless", "isolated", "max_batch", "max_tokens", "most_served", "name",
        "overdue", "parameters", "passing", "probe_after", "probing", "proven", "quarantined", "queued", "seen",
        "served_rows", "shed_slo", "since_probe", "suspects", "taken",
    )  # fmt: skip

    def __init__(self, name: str, parameters: Parameters) -> None:
        self.name = name
        self.parameters = parameters
        self.passing = parameters.pass_through
        """Whether requests pass one by one now; a backlog ends it until the next parameters come."""
        self.estimate: Estimate | None = None
        self.hopeless = (0, 0)
        """Executors that were hoped for in vain, those known among them; and how many were known."""
        self.max_batch: int | None = None
        """The model's own cap on rows."""
        self.max_tokens: int | None = None
        """Budget of a batch, in the requests' tokens."""
        self.shed_slo = False
        self.quarantined = False
        self.ceiling: int | None = None
        """Rows above which a batch is believed to be too large for the upstream, from size faults."""
        self.at_ceiling = 0
        self.proven = 0
        """The ceiling before the last try of a higher one, which ``PROBE_AFTER`` batches proved; 0: none tried."""
        self.probe_after = PROBE_AFTER
        self.most_served = 0
        """Rows of the largest batch that succeeded, since one as large failed for its size."""
        self.extra_rows = 0
        self.served_rows = 0
        self.queued = 0
        """Requests waiting."""
        self.backlog = Backlog()
        self.taken = 0
        """Slots taken: by calls under way that are not overdue, and by abandoned ones that the upstream computes."""
        self.overdue = 0
        """Calls under way that gave their slots back, since they take far longer than forecast."""
        self.gave_back = 0
        """Calls that ever did so."""
        self.isolated: dict[Hashable, Isolation] = {}
        """Batch keys with poisoned requests, the latest last."""
        self.suspects = Suspects()
        self.probing = 0
        """Rows with which the next batch is full, where it is one that tells what they take; else 0."""
        self.since_probe = 0
        """Batches since the last of these."""
        self.seen: set[tuple[int, int]] = set()
        """(bucket, rows) served at least once: the first of each is cold."""
        self.cold_batches = 0
        self.cold_slow = 0
        """First batches whose time was foreseen, and those of them that took ``SLOW`` times as long."""
        self.counters = Counters()
        self.company = Company()

    def obey(self, parameters: Parameters) -> None:
        """Run with other parameters from here on; what was to be probed was chosen for those before."""
        if parameters != self.parameters:
            self.probing = 0
            if self.estimate is not None and self.estimate.probed:
                self.estimate = replace(self.estimate, probed=0)
        self.parameters = parameters
        self.passing = parameters.pass_through

    def believe(self, estimate: Estimate | None) -> None:
        """Plan by an estimate from here on, less the hope that was disappointed already."""
        self.estimate = estimate
        if estimate is None or estimate.probed != self.probing:
            self.probing = 0
        if estimate is not None and estimate.hoped:
            known = estimate.executors - estimate.hoped
            if self.hopeless == (estimate.executors, known):
                self.estimate = estimate.computed(known)

    def came(self, batch: Batch, now: float) -> None:
        """Give up hope for more executors where a batch that met others has waited for one.

        Sampling tells after dozens of batches whether there are four executors or one. By then everybody whom four
        could have answered in time has been admitted, and been late.
        """
        estimate = self.estimate
        if estimate is None or not estimate.hoped:
            return
        known = estimate.executors - estimate.hoped
        seldom = time_of(estimate.of(batch.bucket).upper, batch.rows)
        if batch.in_flight > known and now - batch.dispatched > HOPELESS * seldom:
            self.hopeless = (estimate.executors, known)
            self.estimate = estimate.computed(known)

    @property
    def picky(self) -> bool:
        """Whether sizes are slow the first time, as where kernels are chosen or compiled for each shape."""
        return self.cold_slow > 1 and 2 * self.cold_slow > self.cold_batches

    def familiar(self, bucket: int, rows: int) -> int:
        """Return the most rows, up to ``rows``, that were served before or are worth it to be, in half octaves.

        1, 2, 3, 4, 6, 8, 12, ...: a dozen first batches up to 64 rows instead of 64, for a third of a batch left
        behind at most, and who is has waited least.
        """
        octave = 1 << (rows.bit_length() - 1)
        step = octave + octave // 2 if rows >= octave + octave // 2 else octave
        return next((size for size in range(rows, step, -1) if (bucket, size) in self.seen), step)

    def warmed(self, batch: Batch, now: float) -> float:
        """Learn how long the first batch of a size took; return seconds beyond belief, 0 where it was not ``SLOW``."""
        if self.estimate is None:
            return 0.0
        estimate = self.estimate.of(batch.bucket)
        # One that began before anything was measured is judged by what has been since.
        foreseen = batch.finish if batch.finish < inf else batch.dispatched + time_of(estimate.times, batch.rows)
        excess = now - foreseen
        slow = excess > (SLOW - 1) * time_of(estimate.upper, batch.rows)
        self.cold_batches += 1
        self.cold_slow += slow
        return excess if slow else 0.0

    @property
    def cap(self) -> int:
        """Rows that a batch may have now."""
        cap = self.parameters.max_batch
        if self.max_batch is not None and self.max_batch < cap:
            cap = self.max_batch
        if self.ceiling is not None and self.ceiling < cap:
            cap = self.ceiling
        return cap

    @property
    def full(self) -> int:
        """Rows with which the next batch is full."""
        if not self.probing:
            return self.cap
        return min(bound for bound in (self.probing, self.max_batch, self.ceiling) if bound is not None)

    def begun(self) -> None:
        """Count a batch that was composed, and say whether the next one is to tell what another size takes."""
        estimate = self.estimate
        self.probing = 0
        if estimate is None or not estimate.probed:
            return
        self.since_probe += 1
        if self.since_probe >= PROBES:
            self.since_probe = 0
            self.probing = estimate.probed

    @property
    def free(self) -> bool:
        """Whether a slot is free."""
        return self.taken < self.parameters.max_in_flight

    @property
    def stuck(self) -> bool:
        """Whether its calls are not answered, so that nothing of what waits for it reaches the upstream."""
        return self.overdue > 0 and not self.free

    def isolate(self, key: Hashable, rows: int) -> bool:
        """Note that a batch of ``rows`` failed for one of its requests; return whether to search for it by halves."""
        isolation = self.isolated.pop(key, None) or Isolation()
        self.isolated[key] = isolation
        if len(self.isolated) > MAX_ISOLATED:
            del self.isolated[next(iter(self.isolated))]
        return isolation.failed(rows)

    def may_serve_again(self, rows: int) -> bool:
        """Whether the budget for finding a size that fits covers ``rows`` more; takes them from it when it does."""
        if self.extra_rows + rows > EXTRA_ROWS + EXTRA_SHARE * self.served_rows:
            return False
        self.extra_rows += rows
        return True

    def too_large(self, rows: int, *, works: int) -> None:
        """Learn that ``rows`` at once is too much, while ``works`` is not.

        What was served before works too, until as much fails: halves of the first to fail may be half of what fits.
        """
        if rows <= self.most_served:
            self.most_served = works
        works = max(works, self.most_served)
        if 0 < self.proven < rows:
            # The try of a row more failed: back to where it started, and longer until the next.
            self.ceiling = self.proven
            self.probe_after *= 2
        else:
            self.ceiling = works if self.ceiling is None else min(works, self.ceiling)
            self.proven = 0
        self.at_ceiling = 0

    def served(self, key: Hashable, rows: int) -> None:
        """Count a success, and after many at the ceiling try a row more than it."""
        self.served_rows += rows
        if self.isolated and (isolation := self.isolated.get(key)) is not None:
            isolation.succeeded(rows)
            if isolation.over(self.cap):
                del self.isolated[key]
        self.most_served = max(self.most_served, rows)
        if self.ceiling is not None and rows >= self.ceiling:
            self.at_ceiling += 1
            if self.at_ceiling >= self.probe_after:
                self.at_ceiling = 0
                self.proven = self.ceiling
                self.ceiling += max(1, self.ceiling // 8)
                if self.ceiling >= self.parameters.max_batch:
                    self.ceiling = None

    def forget(self) -> None:
        """Forget what was learned of the model: its server was replaced."""
        self.seen.clear()
        self.cold_batches = self.cold_slow = 0
        self.estimate = None
        self.probing = 0
        self.hopeless = (0, 0)
        self.ceiling = None
        self.at_ceiling = self.proven = self.most_served = 0
        self.probe_after = PROBE_AFTER
        self.quarantined = False
        self.isolated.clear()
