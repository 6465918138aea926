"""Who rides together, and when: the Batcher, a state machine that the sidecar and the simulator both drive.

Every method takes ``now`` (seconds, any monotonic origin) and returns what to do; nothing here reads a clock or does
anything itself. The driver does the actions in order and calls ``poll`` at ``wake_at()``.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from carpool.lanes import Lane, Queue
from carpool.policy import Admission, Parameters
from carpool.riding import (
    Abort,
    Action,
    Batch,
    Estimate,
    Failure,
    Family,
    Fault,
    FaultKind,
    Finish,
    Priority,
    Refusal,
    Refused,
    Request,
    Ride,
    time_of,
)
from carpool.statistics import CANCELLED, Stats

if TYPE_CHECKING:
    from collections.abc import Iterator

ALONE = object()
"""The key under which a model's requests wait that may not be merged."""

EARLY_REFUSAL = 0.8
"""Share of a queue bound from which classes below normal are refused."""


class Batcher:
    """Merges requests of equal key into batches, at most ``max_in_flight`` of them with the upstream at once."""

    def __init__(
        self,
        parameters: Parameters | None = None,
        *,
        admission: Admission | None = None,
        ageing: float = 1.0,
        retry_transport: bool = False,
    ) -> None:
        """Start empty.

        ``parameters`` hold for every model until it is configured itself. ``ageing``: seconds of waiting that lift a
        request by one priority class. ``retry_transport``: whether a batch that the upstream never began to answer is
        sent once more.
        """
        self._default = parameters or Parameters()
        self._admission = admission or Admission()
        self._ageing = ageing
        self._retry_transport = retry_transport
        self._lanes: dict[str, Lane] = {}
        self._slots = self._default.max_in_flight
        self._waiting: dict[object, Queue] = {}
        self._in_flight: dict[Batch, None] = {}
        self._ghosts: list[float] = []  # heap: when slots of abandoned calls free
        self._rows = 0
        self._bytes = 0
        self._tokens = 0
        self._batches = 0
        self._hold_until = inf
        self._deadline = inf  # no deadline of a live request is earlier
        self._device_busy = 0.0
        self._busy_since = 0.0
        self._draining = False
        self._closed = False

    # ------------------------------------------------------------------------------------------------- stimuli

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Admit a request or refuse it; start what is due."""
        if self._ghosts:
            self._release(now)
        lane = self._lanes.get(request.model) or self.lane(request.model)
        lane.counters.arrived(now, request.rows)
        actions: list[Action] = []
        refused = self._refuses(lane, request, now)
        if refused is not None:
            request.ended = True
            lane.counters.missed(refused)
            actions.append(Refusal(request, refused, self._drain_time(now)))
            return actions
        merge = request.mergeable and not lane.quarantined
        key = (request.model, request.key if merge else ALONE)
        queue = self._waiting.get(key)
        if queue is None:
            queue = self._waiting[key] = Queue(key, lane, merge=merge)
        request.hold_until = now + lane.parameters.max_wait
        queue.add(request)
        lane.queued += 1
        self._rows += request.rows
        self._bytes += request.size
        self._tokens += request.tokens
        self._deadline = min(self._deadline, request.deadline)
        if len(self._in_flight) + len(self._ghosts) < self._slots:
            self._start(now, actions)
        elif lane.passing and lane.queued > self._slots:
            lane.passing = False  # as many wait as are served: company costs them nothing
        return actions

    def poll(self, now: float) -> list[Action]:
        """Do what time alone makes due."""
        actions: list[Action] = []
        if self._ghosts:
            self._release(now)
        if self._deadline <= now:
            self._expire(now, actions)
        self._start(now, actions)
        return actions

    def complete(self, batch: Batch, now: float, *, fault: Fault | None = None, stalled: bool = False) -> list[Action]:
        """Take a batch's outcome; the slot goes to what is left of a failed batch, then to what waits.

        ``stalled``: this host paused meanwhile, so the service time is no sample of the upstream's.
        """
        actions: list[Action] = []
        if batch.aborted:
            return actions
        if self._ghosts:
            self._release(now)
        lane = batch.lane
        del self._in_flight[batch]
        self._note_idle(now)
        if fault is None:
            self._succeeded(lane, batch, now, actions, stalled=stalled)
        else:
            self._failed(lane, batch, fault, now, actions)
        self._resume(batch, now, actions)
        self._start(now, actions)
        return actions

    def cancel(self, request: Request, now: float) -> list[Action]:
        """Forget a request whose caller has left. No other rider is touched."""
        actions: list[Action] = []
        if request.ended:
            return actions
        self._lanes[request.model].counters.missed(CANCELLED)
        self._depart(request, now, actions)
        self._start(now, actions)
        return actions

    def configure(self, parameters: Parameters, now: float, *, model: str | None = None) -> list[Action]:
        """Replace parameters whole: one model's, or everybody's. What already waits is never postponed by it."""
        if model is None:
            self._default = parameters
        lanes = list(self._lanes.values()) if model is None else [self.lane(model)]
        for queue in self._waiting.values():
            if queue.lane in lanes and self._due_at(queue) <= now:
                queue.due_at_once = True
        for lane in lanes:
            lane.parameters = parameters
            lane.passing = parameters.pass_through
        self._slots = max(
            [self._default.max_in_flight, *(lane.parameters.max_in_flight for lane in self._lanes.values())]
        )
        return self.poll(now)

    def learn(self, model: str, estimate: Estimate | None, now: float, *, shed_slo: bool = False) -> list[Action]:
        """Install what is believed of a model's service time (``None``: nothing).

        ``shed_slo``: whether being late for the SLO refuses a request, or only being late for its deadline.
        """
        lane = self.lane(model)
        lane.estimate = estimate
        lane.shed_slo = shed_slo
        return self.poll(now)

    def restarted(self, now: float) -> list[Action]:
        """Forget what was learned of the upstream: it was replaced or restarted."""
        for lane in self._lanes.values():
            lane.seen.clear()
            lane.estimate = None
            lane.ceiling = None
            lane.quarantined = False
        return self.poll(now)

    def drain(self, now: float) -> list[Action]:
        """Hold nothing any more: the process is about to end."""
        self._draining = True
        return self.poll(now)

    def close(self) -> None:
        """Refuse what arrives from here on."""
        self._closed = True

    # ------------------------------------------------------------------------------------------------- questions

    def wake_at(self) -> float:
        """When ``poll`` is next needed; ``inf``: not before another event."""
        wake = min(self._deadline, self._hold_until)
        if self._ghosts and self._ghosts[0] < wake:
            wake = self._ghosts[0]
        return wake

    def lane(self, model: str) -> Lane:
        """Return a model's lane, made with the default parameters on first use."""
        lane = self._lanes.get(model)
        if lane is None:
            lane = self._lanes[model] = Lane(model, self._default)
        return lane

    def stats(self, now: float) -> Stats:
        """Snapshot the counters."""
        busy = self._device_busy + (max(0.0, now - self._busy_since) if self._in_flight or self._ghosts else 0.0)
        return Stats(
            at=now, device_busy=busy, models={name: lane.counters.snapshot(now) for name, lane in self._lanes.items()}
        )

    @property
    def queued_rows(self) -> int:
        """Rows waiting."""
        return self._rows

    @property
    def queued_bytes(self) -> int:
        """Bytes waiting."""
        return self._bytes

    @property
    def in_flight(self) -> int:
        """Slots taken, by calls under way and by abandoned ones that the upstream is still computing."""
        return len(self._in_flight) + len(self._ghosts)

    @property
    def slots(self) -> int:
        """Batches that may be with the upstream at once."""
        return self._slots

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._waiting and not self._in_flight

    def lanes(self) -> Iterator[Lane]:
        """Every model seen so far."""
        return iter(self._lanes.values())

    # ------------------------------------------------------------------------------------------------- admission

    def _refuses(self, lane: Lane, request: Request, now: float) -> Refused | None:
        if self._closed:
            return Refused.DRAINING
        if request.deadline <= now:
            return Refused.EXPIRED
        busy = bool(self._in_flight or self._ghosts)
        if not self._waiting and not busy:
            request.exempt = True  # an idle upstream admits all
            return None
        # 1. Room. Alone in the queue, a request larger than the bounds is still served.
        if self._waiting:
            share = EARLY_REFUSAL if request.priority > Priority.NORMAL else 1.0
            bounds = self._admission
            if (
                self._rows + request.rows > bounds.max_queued_rows * share
                or self._bytes + request.size > bounds.max_queued_bytes * share
                or (
                    bounds.max_queued_tokens is not None
                    and self._tokens + request.tokens > bounds.max_queued_tokens * share
                )
            ):
                return Refused.QUEUE_FULL
        # 2. Time. Who would be late even on an idle upstream is not refused for the SLO: nobody could serve it better.
        estimate = lane.estimate
        if estimate is None:
            return None
        alone = now + time_of(estimate.times, request.rows)
        request.sheddable = alone <= request.due
        limit = self._limit(lane, request)
        if limit < inf and self._predicted_finish(lane, estimate, request, now) > limit:
            return Refused.LATE
        return None

    def _limit(self, lane: Lane, request: Request) -> float:
        """Return the time a request must meet not to be shed."""
        if request.exempt:
            return inf
        if lane.shed_slo and request.sheddable and request.due < request.deadline:
            return request.due
        return request.deadline

    def _predicted_finish(self, lane: Lane, estimate: Estimate, request: Request, now: float) -> float:
        """Predict an arriving request's completion at its position, with full batches before it and its own full.

        A full own batch is the pessimistic half of the rule; the drop at dispatch, with the real batch, is the exact
        half.
        """
        cap = lane.cap
        start = self._service_start(estimate.executors, now)
        if not self._waiting and len(self._in_flight) + len(self._ghosts) < self._slots:
            return start + time_of(estimate.times, min(request.rows, cap))
        full = time_of(estimate.times, cap)
        ahead = 0.0
        for queue in self._waiting.values():
            other = queue.lane.estimate
            if other is None:
                continue
            rows = queue.rows
            if len(queue.classes) > 1 or request.priority not in queue.classes:
                rows = sum(waiting.rows - waiting.taken for waiting in queue if waiting.priority <= request.priority)
            mine = queue.merge and queue.key == (request.model, request.key)
            limit = queue.lane.cap if queue.merge else 1
            batches = rows // limit if mine else -(-rows // limit)
            ahead += batches * time_of(other.times, limit)
        batches = -(-request.rows // cap)
        return start + ahead / estimate.executors + batches * full

    def _service_start(self, executors: int, now: float) -> float:
        """When the upstream would begin a batch sent now: slots beyond the executors only queue there."""
        taken = len(self._in_flight) + len(self._ghosts)
        if taken < executors:
            return now
        finishes = sorted([*(batch.finish for batch in self._in_flight), *self._ghosts])
        known = [finish for finish in finishes if finish < inf]
        if len(known) < taken:
            return now
        return max(now, known[taken - executors])

    def _drain_time(self, now: float) -> float:
        """Predict how long what waits and what is under way will take; a second where that is unknown."""
        total = 0.0
        executors = 1
        for queue in self._waiting.values():
            if queue.lane.estimate is None:
                return 1.0
            limit = queue.lane.cap if queue.merge else 1
            total += -(-queue.rows // limit) * time_of(queue.lane.estimate.times, limit)
            executors = max(executors, queue.lane.estimate.executors)
        return self._service_start(executors, now) - now + total / executors

    # ------------------------------------------------------------------------------------------------- dispatch

    def _due_at(self, queue: Queue) -> float:
        """When a queue's next batch is due: ``-inf`` for at once."""
        lane = queue.lane
        estimate = lane.estimate
        wait = lane.parameters.max_wait
        if (
            wait <= 0.0
            or estimate is None
            or lane.passing
            or not queue.merge
            or queue.due_at_once
            or self._draining
            or queue.rows >= lane.cap
            or (lane.max_tokens is not None and queue.tokens >= lane.max_tokens)
        ):
            return -inf
        due = inf
        for head in queue.heads():
            hold = head.arrived + wait
            hold = min(hold, head.hold_until)
            due = min(due, hold)
        latest = queue.soonest() - time_of(estimate.upper, queue.rows)
        return min(latest, due)

    def _start(self, now: float, actions: list[Action]) -> None:
        """Compose and dispatch while a slot is free and something is due, the most urgent first."""
        self._hold_until = inf
        while self._waiting and len(self._in_flight) + len(self._ghosts) < self._slots:
            chosen: Queue | None = None
            urgency = wake = inf
            for queue in self._waiting.values():
                due = self._due_at(queue)
                if due > now:
                    wake = min(wake, due)
                elif chosen is None:
                    chosen = queue
                    urgency = -inf if len(self._waiting) == 1 else self._urgency(queue, now)
                elif (other := self._urgency(queue, now)) < urgency:
                    chosen, urgency = queue, other
            if chosen is None:
                self._hold_until = wake
                return
            self._compose(chosen, now, actions)

    def _urgency(self, queue: Queue, now: float) -> float:
        """When a queue's first request must start to be in time; who is classes above goes before."""
        head = queue.first(now, self._ageing)[0]
        limit = min(head.deadline, head.due)
        estimate = queue.lane.estimate
        if estimate is not None:
            limit -= time_of(estimate.times, min(queue.rows, queue.lane.cap))
        return limit + (head.priority - Priority.NORMAL) * self._ageing

    def _compose(self, queue: Queue, now: float, actions: list[Action]) -> None:
        """Take the next batch from a queue and dispatch it, leaving behind whom it would make late."""
        lane = queue.lane
        cap = lane.cap
        alone = lane.passing or not queue.merge
        budget = lane.max_tokens
        estimate = lane.estimate
        finish = 0.0
        if estimate is not None:
            # Who can't make it with the batch as large as it would be is dropped: late riders only delay the others.
            start = self._service_start(estimate.executors, now)
            finish = start + time_of(estimate.times, 1 if alone else min(queue.rows, cap))
        rides: list[Ride] = []
        rows = tokens = 0
        waited = 0.0
        first_parts = 0
        classes = queue.classes
        while classes:
            waiting = queue.first(now, self._ageing)
            request = waiting[0]
            left = request.rows - request.taken
            if finish > request.due and finish > self._limit(lane, request) and request.taken == 0:
                self._take(queue, request)
                request.ended = True
                lane.counters.missed(Refused.LATE)
                actions.append(Refusal(request, Refused.LATE, self._drain_time(now)))
                continue
            if queue.merge and request.rows > cap:
                left = min(left, cap - rows)
            elif rides and (rows + left > cap or (budget is not None and tokens + request.tokens > budget)):
                break
            start_row = request.taken
            rides.append((request, start_row, start_row + left))
            rows += left
            tokens += request.tokens
            if start_row == 0:
                waited += now - request.arrived
                first_parts += 1
            request.taken += left
            queue.rows -= left
            self._rows -= left
            if request.taken == request.rows:
                waiting.popleft()
                if not waiting:
                    del classes[request.priority]
                queue.tokens -= request.tokens
                lane.queued -= 1
                self._bytes -= request.size
                self._tokens -= request.tokens
            if alone or rows >= cap:
                break
        queue.earliest = None
        if not classes:
            del self._waiting[queue.key]
        if not rides:
            return
        counters = lane.counters
        counters.dispatched += first_parts
        counters.queue_seconds += waited
        self._dispatch(Batch(lane, queue.key, rides[0][0].bucket, rides, rows), now, actions)

    def _take(self, queue: Queue, request: Request) -> None:
        """Take a waiting request out of its queue, undispatched rows and all."""
        waiting = queue.classes[request.priority]
        waiting.remove(request)
        if not waiting:
            del queue.classes[request.priority]
        left = request.rows - request.taken
        queue.rows -= left
        queue.tokens -= request.tokens
        queue.earliest = None
        queue.lane.queued -= 1
        self._rows -= left
        self._bytes -= request.size
        self._tokens -= request.tokens

    def _dispatch(self, batch: Batch, now: float, actions: list[Action]) -> None:
        lane = batch.lane
        taken = len(self._in_flight) + len(self._ghosts)
        if not taken:
            self._busy_since = now
        self._batches += 1
        batch.number = self._batches
        batch.dispatched = now
        batch.in_flight = taken + 1
        if lane.estimate is not None:
            start = self._service_start(lane.estimate.executors, now)
            batch.finish = start + time_of(lane.estimate.times, batch.rows)
        if (batch.bucket, batch.rows) not in lane.seen:
            lane.seen.add((batch.bucket, batch.rows))
            batch.cold = True
        self._in_flight[batch] = None
        actions.append(batch)

    # ------------------------------------------------------------------------------------------------- outcomes

    def _succeeded(self, lane: Lane, batch: Batch, now: float, actions: list[Action], *, stalled: bool) -> None:
        if stalled:
            lane.counters.stalled += 1
        elif batch.cold:
            lane.counters.cold += 1
        else:
            lane.counters.sample((batch.bucket, batch.rows, batch.in_flight), now - batch.dispatched)
        lane.served(batch.rows)
        finished = []
        for request, start, stop in batch.rides:
            if request.ended:
                continue
            request.unserved -= stop - start
            if not request.unserved:
                request.ended = True
                finished.append(request)
        actions.append(Finish(batch, finished))
        if batch.family is not None:
            batch.family.succeeded += 1
            if batch.family.succeeded == 2:
                lane.lower_ceiling(batch.family.largest)

    def _failed(self, lane: Lane, batch: Batch, fault: Fault, now: float, actions: list[Action]) -> None:
        rides = [ride for ride in batch.rides if not ride[0].ended]
        unresolved = False
        if fault.kind is FaultKind.TRANSPORT:
            if fault.retryable and self._retry_transport and batch.attempt == 1 and rides:
                again = self._part(batch, rides)
                again.attempt = 2
                batch.rest.insert(0, again)
                return
        elif fault.kind is FaultKind.SIZE:
            parts = _halve_rows(rides)
            if parts is not None:
                lane.lower_ceiling(batch.rows // 2)
                batch.rest[:0] = [self._part(batch, part) for part in parts]
                return
        elif fault.kind is FaultKind.ITEM and len(rides) > 1:
            if lane.may_serve_again(batch.rows):
                middle = len(rides) // 2
                halves = [self._part(batch, rides[:middle]), self._part(batch, rides[middle:])]
                family = Family(max(half.rows for half in halves))
                for half in halves:
                    half.family = family
                batch.rest[:0] = halves
                lane.counters.bisections += 1
                return
            unresolved = True
        elif fault.kind is FaultKind.ROWS and len(batch.rides) > 1:
            lane.quarantined = True
        requests = list({id(request): request for request, _, _ in rides}.values())
        for request in requests:
            self._depart(request, now, actions)
        if requests:
            actions.append(Failure(requests, fault, unresolved))

    def _part(self, batch: Batch, rides: list[Ride]) -> Batch:
        part = Batch(batch.lane, batch.key, batch.bucket, rides, sum(stop - start for _, start, stop in rides))
        part.attempt = batch.attempt
        return part

    def _resume(self, batch: Batch, now: float, actions: list[Action]) -> None:
        """Give the slot to the next part of a failed batch that still has riders."""
        while batch.rest:
            part = batch.rest.pop(0)
            part.rides = [ride for ride in part.rides if not ride[0].ended]
            if part.rides:
                part.rows = sum(stop - start for _, start, stop in part.rides)
                part.rest = batch.rest
                self._dispatch(part, now, actions)
                return

    # ------------------------------------------------------------------------------------------------- departures

    def _end(self, request: Request) -> None:
        """End a request; what of it still waits is taken out of its queue."""
        request.ended = True
        if request.taken < request.rows:
            for queue in self._waiting.values():
                if request in queue.classes.get(request.priority, ()):
                    self._take(queue, request)
                    if not queue.classes:
                        del self._waiting[queue.key]
                    break

    def _depart(self, request: Request, now: float, actions: list[Action]) -> None:
        """End a request wherever it is; a call that nobody waits for is aborted, its slot taken until it would end."""
        self._end(request)
        if not request.taken:
            return
        for batch in list(self._in_flight):
            if all(rider.ended for rider, _, _ in batch.rides):
                batch.aborted = True
                del self._in_flight[batch]
                actions.append(Abort(batch))
                if now < batch.finish < inf and not batch.rest:
                    heappush(self._ghosts, batch.finish)
                self._note_idle(now)
                self._resume(batch, now, actions)

    def _expire(self, now: float, actions: list[Action]) -> None:
        """End every request whose deadline has passed, waiting or riding, and find the next deadline."""
        live = {id(request): request for queue in self._waiting.values() for request in queue}
        for batch in self._in_flight:
            for part in (batch, *batch.rest):
                live.update({id(request): request for request, _, _ in part.rides if not request.ended})
        self._deadline = inf
        for request in live.values():
            if request.deadline <= now:
                self._lanes[request.model].counters.missed(Refused.EXPIRED)
                self._depart(request, now, actions)
                actions.append(Refusal(request, Refused.EXPIRED))
            elif request.deadline < self._deadline:
                self._deadline = request.deadline

    def _release(self, now: float) -> None:
        """Free the slots of abandoned calls that the upstream has finished by now."""
        while self._ghosts and self._ghosts[0] <= now:
            ended = heappop(self._ghosts)
            self._note_idle(ended)

    def _note_idle(self, now: float) -> None:
        """Stop the device clock when nothing is in flight."""
        if not self._in_flight and not self._ghosts:
            self._device_busy += now - self._busy_since


def _halve_rows(rides: list[Ride]) -> tuple[list[Ride], list[Ride]] | None:
    """Split rides into two halves by rows, through a mergeable request if need be; ``None``: a single row, or whole."""
    total = sum(stop - start for _, start, stop in rides)
    if total < 2 or (len(rides) == 1 and not rides[0][0].mergeable):
        return None
    left: list[Ride] = []
    right: list[Ride] = []
    room = total // 2
    for request, start, stop in rides:
        cut = min(max(start, start + room), stop)
        if cut > start:
            left.append((request, start, cut))
        if cut < stop:
            right.append((request, cut, stop))
        room -= cut - start
    return left, right
