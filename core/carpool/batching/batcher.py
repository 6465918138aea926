"""Who rides together, and when: the Batcher, a state machine that the sidecar and the simulator both drive.

Every method takes ``now`` (seconds, any monotonic origin) and returns what to do; nothing here reads a clock or does
anything itself. The driver does the actions in order and calls ``poll`` at ``wake_at()``.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from carpool.batching.batchable import MOSTLY
from carpool.batching.bisection import judge, next_part
from carpool.batching.counters import CANCELLED, MAX_CELLS, SUPPOSED, Stats
from carpool.batching.model_state import Lane
from carpool.batching.queues import Queue
from carpool.batching.requests import (
    Abort,
    Action,
    Batch,
    Estimate,
    Failure,
    Fault,
    FaultKind,
    Finish,
    Priority,
    Refusal,
    Refused,
    Request,
    time_of,
)
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Admission

if TYPE_CHECKING:
    from collections.abc import Iterator

ALONE = object()
"""The key under which a model's requests wait that may not be merged."""

OVERDUE = 4.0
"""Times its forecast duration after which a call gives its slot back: it may never be answered."""

LEAST_OVERDUE = 1.0
"""Seconds before which no call is overdue: hosts pause, and a first batch may compile a kernel."""

OVERDUE_UNKNOWN = 5.0
"""Seconds after which a call of unknown duration is overdue."""

FLOOD = 2
"""Full batches that wait in a queue from which it may be a flood."""

WRONG_ROWS = Fault(FaultKind.ROWS)
"""The fault of an answer to several requests that came after the model was known not to answer by rows."""

UNFORESEEN = 0.001
"""Seconds between a batch's end and its prediction from which those behind it are predicted anew."""

MAX_KINDS = 32
"""Kinds of requests that wait at once, each for others of its kind: what is of yet another kind rides alone. Every
arrival looks at all of them, and callers make kinds up: a header is enough."""

EARLY_REFUSAL = 0.8
"""Share of a queue bound from which classes below normal are refused."""


_GONE = Request(key=None, arrived=0.0, due=0.0)
"""Stands in a batch for a request that is served again elsewhere."""
_GONE.ended = True


class Batcher:
    """Merges requests of equal key into batches, at most ``max_in_flight`` of each model with the upstream at once.

    Slots and queue bounds belong to a model: one that is slow, or never answers, takes none of another's. A call that
    takes far longer than forecast gives its slot back; as many may do so as the model has slots.
    """

    def __init__(
        self,
        parameters: Parameters | None = None,
        *,
        admission: Admission | None = None,
        ageing: float = 1.0,
        retry_transport: bool = False,
        idempotent: bool = True,
    ) -> None:
        """Start empty.

        ``parameters`` hold for every model until it is configured itself. ``ageing``: seconds of waiting that lift a
        request by one priority class. ``retry_transport``: whether a batch that the upstream never began to answer is
        sent once more. ``idempotent``: whether requests of a failed batch may be sent again, in search of the culprit.
        """
        self._default = parameters or Parameters()
        self._admission = admission or Admission()
        self._ageing = ageing
        self._retry_transport = retry_transport
        self.idempotent = idempotent
        self._lanes: dict[str, Lane] = {}
        self._waiting: dict[object, Queue] = {}
        self._in_flight: dict[Batch, None] = {}
        self._taken = 0  # slots of all models
        # Heap of abandoned calls by when their slots free: (time, batch number, batch).
        self._ghosts: list[tuple[float, int, Batch]] = []
        self._batches = 0
        self._completed = 0
        self._completions: deque[float] = deque(maxlen=256)  # when the last slots were given back
        self._hold_until = inf
        self._deadline = inf  # no deadline of a live request is earlier
        self._overdue_at = inf  # no call under way is overdue earlier
        self._device_busy = 0.0
        self._busy_since = 0.0
        self._draining = False
        self._closed = False

    # ------------------------------------------------------------------------------------------------- stimuli

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Admit a request or refuse it; start what is due."""
        # What time made due comes first, so that nobody is refused for a slot or a place that is free by now.
        late = self._deadline <= now or self._overdue_at <= now or (self._ghosts and self._ghosts[0][0] <= now)
        actions = self.poll(now) if late else []
        lane = self._lanes.get(request.model) or self.lane(request.model)
        merge = request.mergeable and not lane.quarantined
        known = request.key if merge else None
        key = (request.model, known if merge else ALONE)
        suspects = lane.suspects.left
        # One larger than a batch has to be cut, whatever it is.
        if merge and (suspects or len(self._waiting) >= MAX_KINDS) and request.rows <= lane.cap:
            if request.caller in suspects:
                merge, key, known = False, (request.model, ALONE), None
            elif len(self._waiting) >= MAX_KINDS and key not in self._waiting:
                merge, key = False, (request.model, ALONE)  # it is of a kind all the same, which is counted
        if not request.shadow:
            shares = lane.company.arrived(known, request.bucket, now, lane.parameters.max_wait)
            lane.counters.arrived(now, request.rows, shares)
        queue = self._waiting.get(key)
        is_new = queue is None
        if queue is None:
            queue = Queue(key, lane, merge=merge, bucket=request.bucket if merge else None)
        refused = self._refuses(queue, request, now)
        if refused is Refused.QUEUE_FULL:
            refused = self._refuses_even(queue, request, now, actions)
        if refused is not None:
            request.ended = True
            if not request.shadow:
                lane.counters.refused(refused, now)
            actions.append(Refusal(request, refused, self._drain_time(now)))
            return actions
        if is_new:
            self._waiting[key] = queue
        request.hold_until = request.arrived + lane.parameters.max_wait
        queue.add(request)
        self._deadline = min(self._deadline, request.deadline)
        if lane.taken < lane.parameters.max_in_flight:
            # Slots are free, so what waited is held, until then; only this queue has changed.
            lane.counters.excess_until = 0.0  # nobody is behind a cold batch any more
            due = self._due_at(queue)
            if due <= now or self._hold_until <= now:
                self._start(now, actions)
            else:
                self._hold_until = min(self._hold_until, due)
        elif lane.passing and lane.queued > lane.parameters.max_in_flight:
            lane.passing = False  # as many wait as are served: company costs them nothing
        return actions

    def poll(self, now: float) -> list[Action]:
        """Do what time alone makes due."""
        actions: list[Action] = []
        self._release(now, actions)
        self._start(now, actions)
        return actions

    def complete(self, batch: Batch, now: float, *, fault: Fault | None = None, stalled: bool = False) -> list[Action]:
        """Take a batch's outcome; the slot goes to what is left of a failed batch, then to what waits.

        ``stalled``: this host paused meanwhile, so the service time is no sample of the upstream's.
        """
        actions: list[Action] = []
        if batch.aborted:
            return actions
        self._release(now, actions)
        self._over(batch, now)
        if fault is None and batch.lane.quarantined and not batch.whole:
            fault = WRONG_ROWS  # it was sent before the model was known not to answer by rows
        if fault is None:
            self._succeeded(batch, now, actions, stalled=stalled)
        else:
            if fault.kind is FaultKind.ITEM and len(batch.rides) == 1 and batch.rides[0][0].caller is not None:
                batch.lane.suspects.failed(batch.rides[0][0].caller)
            verdict = judge(
                batch, fault, retry_transport=self._retry_transport and self.idempotent, idempotent=self.idempotent
            )
            batch.rest[:0] = verdict.parts
            for request in verdict.restarted:
                batch.rest.append(self._restarted(request, batch, now, actions))
            if verdict.failed:
                actions.append(Failure(verdict.failed, fault, verdict.unresolved))
                self._depart(verdict.failed, now, actions)
        if not batch.overdue:
            self._note_end(now)
        if self._in_flight and abs(now - batch.finish) > UNFORESEEN:
            self._begin_next(now)
        self._resume(batch, now, actions)
        self._start(now, actions)
        return actions

    def cancel(self, request: Request, now: float) -> list[Action]:
        """Forget a request whose caller has left. No other rider is touched."""
        actions: list[Action] = []
        if request.ended:
            return actions
        self._release(now, actions)
        self._lanes[request.model].counters.missed(CANCELLED)
        self._depart([request], now, actions)
        self._start(now, actions)
        return actions

    def configure(self, parameters: Parameters, now: float, *, model: str | None = None) -> list[Action]:
        """Replace parameters whole: one model's, or everybody's. What already waits is never postponed by it."""
        if model is None:
            self._default = parameters
        lanes = list(self._lanes.values()) if model is None else [self.lane(model)]
        for queue in self._waiting.values():
            if queue.lane in lanes:
                due = self._due_at(queue) <= now
                for request in queue:
                    hold = now if due else request.arrived + parameters.max_wait
                    request.hold_until = min(request.hold_until, hold)
                queue.changed()
        for lane in lanes:
            lane.obey(parameters)
        return self.poll(now)

    def learn(self, model: str, estimate: Estimate | None, now: float, *, shed_slo: bool = False) -> list[Action]:
        """Install what is believed of a model's service time (``None``: nothing).

        ``shed_slo``: whether being late for the SLO refuses a request, or only being late for its deadline.
        """
        lane = self.lane(model)
        lane.believe(estimate)
        lane.shed_slo = shed_slo
        if shed_slo:
            for queue in (each for each in self._waiting.values() if each.lane is lane):
                queue.shed(self._span)
        return self.poll(now)

    def restarted(self, now: float, *, model: str | None = None) -> list[Action]:
        """Forget what was learned of the upstream, or of one model there: it was replaced or restarted."""
        for lane in self._lanes.values() if model is None else [self.lane(model)]:
            lane.forget()
        return self.poll(now)

    def drain(self, now: float) -> list[Action]:
        """Hold nothing any more: the process is about to end."""
        self._draining = True
        return self.poll(now)

    def close(self) -> None:
        """Refuse what arrives from here on."""
        self._closed = True

    def admit(self, admission: Admission) -> None:
        """Replace the queue's bounds; what already waits stays."""
        self._admission = admission

    def forget(self, model: str) -> None:
        """Drop a model's lane, counters and all, unless something of it waits or is under way."""
        lane = self._lanes.get(model)
        if lane is not None and not lane.queued and not any(batch.lane is lane for batch in self._in_flight):
            del self._lanes[model]

    # ------------------------------------------------------------------------------------------------- questions

    def wake_at(self) -> float:
        """When ``poll`` is next needed; ``inf``: not before another event."""
        wake = min(self._deadline, self._hold_until)
        if self._in_flight:
            wake = min(wake, self._overdue_at)
        return min(wake, self._ghosts[0][0]) if self._ghosts else wake

    def lane(self, model: str) -> Lane:
        """Return a model's lane, made with the default parameters on first use."""
        lane = self._lanes.get(model)
        if lane is None:
            lane = self._lanes[model] = Lane(model, self._default)
        return lane

    def stats(self, now: float) -> Stats:
        """Snapshot the counters."""
        busy = self._device_busy
        if self._taken > len(self._ghosts):
            busy += now - self._busy_since
        elif self._ghosts:
            busy += min(now, max(self._ghosts)[0]) - self._busy_since
        models = {name: lane.counters.snapshot(now) for name, lane in self._lanes.items()}
        return Stats(now, busy, models, self.queued_rows)

    @property
    def queued_rows(self) -> int:
        """Rows waiting."""
        return sum(lane.backlog.rows for lane in self._lanes.values())

    @property
    def queued_bytes(self) -> int:
        """Bytes waiting."""
        return sum(lane.backlog.size for lane in self._lanes.values())

    @property
    def in_flight(self) -> int:
        """Calls under way, overdue ones included, and abandoned ones that the upstream is still computing."""
        return len(self._in_flight) + len(self._ghosts)

    @property
    def overdue(self) -> int:
        """Calls under way that gave their slots back."""
        return sum(lane.overdue for lane in self._lanes.values())

    @property
    def slots(self) -> int:
        """Batches that may be with the upstream at once, of all models together."""
        return sum(lane.parameters.max_in_flight for lane in self._lanes.values()) or self._default.max_in_flight

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        return not self._waiting and not self._in_flight and not any(ghost.rest for _, _, ghost in self._ghosts)

    def lanes(self) -> Iterator[Lane]:
        """Every model seen so far."""
        return iter(self._lanes.values())

    # ------------------------------------------------------------------------------------------------- admission

    def _refuses(self, queue: Queue, request: Request, now: float) -> Refused | None:
        if self._closed:
            return Refused.DRAINING
        if request.deadline <= now:
            return Refused.EXPIRED
        request.exempt = not self._taken
        # 1. Room. Alone in the queue, a request larger than the bounds is still served.
        if queue.lane.queued:
            share = EARLY_REFUSAL if request.priority > Priority.NORMAL else 1.0
            bounds = self._admission
            backlog = queue.lane.backlog
            if (
                backlog.rows + request.rows > bounds.max_queued_rows * share
                or backlog.size + request.size > bounds.max_queued_bytes * share
                or (
                    bounds.max_queued_tokens is not None
                    and backlog.tokens + request.tokens > bounds.max_queued_tokens * share
                )
            ):
                return Refused.QUEUE_FULL
        # 2. Time. An idle upstream admits all, an unknown service time refuses none, and who would be late even on an
        # idle upstream is not refused for the SLO: nobody could serve it better.
        lane = queue.lane
        estimate = queue.estimate
        if request.exempt or estimate is None:
            return None
        if lane.shed_slo:
            request.sheddable = now + self._span(queue, request, estimate) <= request.due
        limit = min(request.due, request.deadline) if request.sheddable else request.deadline
        if limit < inf and self._predicted_finish(queue, request, estimate, now) > limit:
            return Refused.LATE
        return None

    def _floods(self, queue: Queue, newcomer: Queue | None = None) -> bool:
        """Whether a queue holds most of what waits for its model, and more than leaves soon: other keys go before it.

        Two keys that wait for as much are served by urgency. A length bucket is no other key: the same callers fill it.
        ``newcomer``: the queue of a request that arrives, which may not wait yet.
        """
        rows = queue.rows
        if rows <= FLOOD * queue.cap:
            return False
        bucket = queue.bucket or 0
        rivals = [*self._waiting.values()] if newcomer is None else [*self._waiting.values(), newcomer]
        others = [
            other.rows
            for other in rivals
            if other is not queue and other.lane is queue.lane and (other.bucket or 0) == bucket
        ]
        return bool(others) and rows > sum(others)

    def _refuses_even(self, queue: Queue, request: Request, now: float, actions: list[Action]) -> Refused | None:
        """Say why a request is refused for which the queue is full, even if a flood makes room for it."""
        refused: Refused | None = Refused.QUEUE_FULL
        for _ in range(request.rows):
            if refused is not Refused.QUEUE_FULL or not self._pushes_out(queue, request, now, actions):
                break
            refused = self._refuses(queue, request, now)
        return refused

    def _pushes_out(self, queue: Queue, request: Request, now: float, actions: list[Action]) -> bool:
        """Refuse a flood's latest request in favor of another key's, of no lower class; say whether there was one."""
        for flood in self._waiting.values():
            if flood.lane is queue.lane and flood is not queue and self._floods(flood, queue):
                latest = flood.classes[max(flood.classes)][-1]
                if latest.taken or latest.priority < request.priority:
                    return False
                flood.remove(latest)
                if not flood.classes:
                    del self._waiting[flood.key]
                latest.ended = True
                queue.lane.counters.refused(Refused.QUEUE_FULL, now)
                actions.append(Refusal(latest, Refused.QUEUE_FULL, self._drain_time(now)))
                return True
        return False

    def _span(self, queue: Queue, request: Request, estimate: Estimate) -> float:
        """Service time of a request alone, in as many batches as it needs."""
        lane = queue.lane
        cap = lane.cap
        if request.rows <= cap or not queue.splits:
            return time_of(estimate.times, request.rows)
        rounds = -(-request.rows // (cap * min(estimate.executors, lane.parameters.max_in_flight)))
        return rounds * time_of(estimate.times, cap)

    def _predicted_finish(self, queue: Queue, request: Request, estimate: Estimate, now: float) -> float:
        """Predict an arriving request's completion at its position, behind full batches, in its own as it is by now.

        What makes that batch larger comes later, and is refused or dropped first; taking it to be full from the start
        refuses whom the model has time for (decision 8). The drop at dispatch, with the real batch, is the exact half
        of the rule. While a slot is free nothing waits but what is held for company: it leaves in time with this one.
        Models take turns, and so do keys with a flood: another one's queue delays this one's by as much as waits here,
        and one batch.
        """
        lane = queue.lane
        servers = min(estimate.executors, lane.parameters.max_in_flight)
        start = self._service_start(servers, now)
        cap = queue.cap
        alone = queue.alone
        own = self._span(queue, request, estimate) if alone or request.rows > cap else 0.0
        if lane.free:
            rows = request.rows if alone else queue.rows + request.rows
            return start + max(own, time_of(estimate.times, min(rows, cap)))
        if not alone:
            own = max(own, time_of(estimate.times, min(queue.rows % cap + request.rows, cap)))
        ahead = 0.0
        turns: dict[Lane | Queue, float] = {}
        for other in self._waiting.values():
            known = other.estimate
            if known is not None:
                work = other.work(known.times, priority=request.priority, joins=other is queue)
                if other.lane is not lane:
                    turns[other.lane] = turns.get(other.lane, 0.0) + work
                elif other is not queue and self._floods(other, queue):
                    turns[other] = work
                else:
                    ahead += work
        if turns:
            own_work = ahead
            for each, work in turns.items():
                other_lane = each if isinstance(each, Lane) else each.lane
                if other_lane.estimate is not None and not other_lane.stuck:
                    ahead += min(work, own_work + time_of(other_lane.estimate.times, each.cap))
        if request.sheddable and not alone and queue.rows >= cap:
            own *= estimate.surely  # it is not the one that fills the batch
        return start + ahead / servers + own

    def _service_start(self, servers: int, now: float) -> float:
        """When the upstream would begin a batch sent now, ``servers`` at a time: more than those only queue there."""
        taken = self._taken
        if taken < servers:
            return now
        finishes = [batch.finish for batch in self._in_flight if not batch.overdue]
        if self._ghosts:
            finishes.extend(ghost[0] for ghost in self._ghosts)
        if taken > 1:
            finishes.sort()
        # Those of unknown end come last.
        return max(now, finishes[taken - servers]) if finishes[-1] < inf else now

    def _drain_time(self, now: float) -> float:
        """Predict how long what waits and what is under way will take; a second where that is unknown."""
        total = 0.0
        servers = 1
        for queue in self._waiting.values():
            estimate = queue.estimate
            if estimate is None:
                return 1.0
            total += queue.work(estimate.times)
            servers = max(servers, min(estimate.executors, queue.lane.parameters.max_in_flight))
        return self._service_start(servers, now) - now + total / servers

    # ------------------------------------------------------------------------------------------------- dispatch

    def _due_at(self, queue: Queue) -> float:
        """When a queue's next batch is due: ``-inf`` for at once."""
        lane = queue.lane
        estimate = queue.estimate
        if (
            lane.parameters.max_wait <= 0.0
            or estimate is None
            or queue.rows >= queue.full
            or queue.alone
            or self._draining
            or (lane.company.share < MOSTLY and not lane.company.likely(lane.parameters.max_wait))
            or (lane.max_tokens is not None and queue.tokens >= lane.max_tokens)
        ):
            return -inf
        return queue.due_at(estimate.upper)

    def _start(self, now: float, actions: list[Action]) -> None:
        """Compose and dispatch while a model has a slot free and something due, the most urgent first."""
        if self._deadline <= now:
            self._expire(now, actions)
        if self._overdue_at <= now:
            self._give_back(now)
        self._hold_until = inf
        while self._waiting:
            chosen: Queue | None = None
            urgency = wake = inf
            for queue in self._waiting.values():
                if not queue.lane.free:
                    continue
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
        """When a queue's first request must start to be in time; classes above go before.

        A flood's requests count as if they had come just now: those of other keys have waited longer.
        """
        head = queue.first(now, self._ageing)[0]
        limit = min(head.deadline, head.due)
        estimate = queue.estimate
        if estimate is not None:
            limit -= time_of(estimate.times, head.rows if queue.alone else min(queue.rows, queue.cap))
        if self._floods(queue):
            limit += now - head.arrived
        return limit + (head.priority - Priority.NORMAL) * self._ageing

    def _compose(self, queue: Queue, now: float, actions: list[Action]) -> None:
        """Take the next batch from a queue and dispatch it, leaving behind whom it would make late."""
        lane = queue.lane
        estimate = queue.estimate
        start = now if estimate is None else self._service_start(estimate.executors, now)
        boarding = queue.board(start, now, self._ageing)
        if not queue.classes:
            del self._waiting[queue.key]
        for request in boarding.dropped:
            request.ended = True
            if not request.shadow:
                lane.counters.refused(Refused.LATE, now)
            actions.append(Refusal(request, Refused.LATE, self._drain_time(now)))
        rides = boarding.rides
        if rides:
            lane.begun()
            if (cap := queue.cap) < lane.parameters.max_batch and queue.merge:
                lane.counters.limited += 1
                lane.counters.limited_rows += cap
            lane.counters.dispatched += boarding.begun
            lane.counters.queue_seconds += boarding.waited
            self._dispatch(Batch(lane, queue.key, rides[0][0].bucket, rides, boarding.rows), start, now, actions)

    def _dispatch(self, batch: Batch, start: float, now: float, actions: list[Action]) -> None:
        """Hand a batch to the upstream, which begins it at ``start``."""
        lane = batch.lane
        if not self._taken:
            self._busy_since = now
        lane.taken += 1
        self._taken += 1
        self._batches += 1
        batch.number = self._batches
        batch.dispatched = now
        batch.in_flight = self._taken
        batch.completed_before = self._completed
        if lane.estimate is not None:
            batch.finish = start + time_of(lane.estimate.of(batch.bucket).times, batch.rows)
            batch.overdue_at = now + max(OVERDUE * (batch.finish - now), LEAST_OVERDUE)
        else:
            batch.overdue_at = now + OVERDUE_UNKNOWN
        self._overdue_at = min(self._overdue_at, batch.overdue_at)
        if (batch.bucket, batch.rows) not in lane.seen and len(lane.seen) < MAX_CELLS:
            lane.seen.add((batch.bucket, batch.rows))
            batch.cold = True
        self._in_flight[batch] = None
        actions.append(batch)

    # ------------------------------------------------------------------------------------------------- outcomes

    def _sample(self, batch: Batch, now: float) -> None:
        """Count a service time as it was seen, and as it was if the upstream has fewer executors than were in flight.

        Dispatched as the n-th, with e executors it began when n - e of those before it had completed; when fewer have,
        e is refuted, and no time at all is counted.
        """
        sample, taken = batch.lane.counters.sample, batch.in_flight
        sample((batch.bucket, batch.rows, taken, 0), now - batch.dispatched)
        if taken == 1:
            return
        completions = self._completions
        since = self._completed - batch.completed_before
        for executors in SUPPOSED:
            if executors >= taken:
                return
            before = taken - executors
            seconds = now - completions[before - since - 1] if before <= since <= len(completions) else 0.0
            sample((batch.bucket, batch.rows, taken, executors), seconds)

    def _succeeded(self, batch: Batch, now: float, actions: list[Action], *, stalled: bool) -> None:
        lane = batch.lane
        if stalled:
            lane.counters.stalled += 1
        elif batch.cold:
            lane.counters.cold += 1
            if excess := lane.warmed(batch, now):
                for each in self._lanes.values():
                    each.counters.exceeded(excess, now)
        else:
            self._sample(batch, now)
            lane.came(batch, now)
        lane.served(batch.key, batch.rows)
        finished = []
        suspects = lane.suspects.left
        for request, start, stop in batch.rides:
            if request.ended:
                continue
            request.unserved -= stop - start
            if not request.unserved:
                request.ended = True
                finished.append(request)
                if suspects:
                    lane.suspects.succeeded(request.caller)
        actions.append(Finish(batch, finished))
        if batch.family is not None:
            batch.family.succeeded += 1
            if batch.family.succeeded == 2:
                lane.too_large(batch.family.rows, works=batch.family.largest)

    def _resume(self, batch: Batch, now: float, actions: list[Action]) -> None:
        """Give the slot to what is left of a batch that failed."""
        if batch.rest and self._deadline <= now:
            left = {id(one): one for part in batch.rest for one, _, _ in part.rides if not one.ended}
            self._refuse_expired([one for one in left.values() if one.deadline <= now], now, actions)
        part = next_part(batch.rest)
        if part is not None:
            part.rest = batch.rest
            estimate = part.lane.estimate
            start = now if estimate is None else self._service_start(estimate.executors, now)
            self._dispatch(part, start, now, actions)

    # ------------------------------------------------------------------------------------------------- departures

    def _end(self, request: Request) -> None:
        """End a request; what of it still waits is taken out of its queue."""
        request.ended = True
        self._unqueue(request)

    def _unqueue(self, request: Request) -> None:
        """Take what of a request still waits out of its queue."""
        if request.taken < request.rows:
            for key in ((request.model, request.key), (request.model, ALONE)):
                queue = self._waiting.get(key)
                if queue is not None and request in queue.classes.get(request.priority, ()):
                    queue.remove(request)
                    if not queue.classes:
                        del self._waiting[key]
                    return

    def _restarted(self, request: Request, batch: Batch, now: float, actions: list[Action]) -> Batch:
        """Take a request out of its queue and of every batch; return a batch that serves it from its first row, alone.

        Rows of it that were answered before came from a model that does not answer by rows: they are void.
        """
        self._unqueue(request)
        for other in (batch, *self._in_flight, *(ghost for _, _, ghost in self._ghosts)):
            for part in (other, *other.rest):
                if part is not batch:
                    # Its place stays: how many requests a call was made for says whose fault its failure is.
                    part.rides = [(_GONE, *ride[1:]) if ride[0] is request else ride for ride in part.rides]
            if other is not batch and not other.aborted and all(one.ended for one, _, _ in other.rides):
                self._abort(other, now, actions)
        request.taken = request.unserved = request.rows
        request.mergeable = False
        return Batch(batch.lane, (request.model, ALONE), request.bucket, [(request, 0, request.rows)], request.rows)

    def _depart(self, requests: list[Request], now: float, actions: list[Action]) -> None:
        """End requests wherever they are; abort calls that nobody waits for, their slots taken until they would end."""
        riding = False
        for request in requests:
            self._end(request)
            riding = riding or request.taken > 0
        if not riding:
            return
        for batch in [*self._in_flight]:
            if all(rider.ended for rider, _, _ in batch.rides):
                self._abort(batch, now, actions)

    def _abort(self, batch: Batch, now: float, actions: list[Action]) -> None:
        """Give up a call; its slot stays taken until the upstream would have computed it."""
        batch.aborted = True
        actions.append(Abort(batch))
        if not batch.overdue and now < batch.finish < inf:
            del self._in_flight[batch]
            heappush(self._ghosts, (batch.finish, batch.number, batch))
        else:
            self._over(batch, now)
            self._resume(batch, now, actions)

    def _expire(self, now: float, actions: list[Action]) -> None:
        """End every request whose deadline has passed, waiting or riding, and find the next deadline."""
        live = {id(request): request for queue in self._waiting.values() for request in queue}
        for batch in (*self._in_flight, *(ghost for _, _, ghost in self._ghosts)):
            for part in (batch, *batch.rest):
                live.update({id(request): request for request, _, _ in part.rides if not request.ended})
        self._refuse_expired([request for request in live.values() if request.deadline <= now], now, actions)
        self._deadline = min((request.deadline for request in live.values() if request.deadline > now), default=inf)

    def _refuse_expired(self, expired: list[Request], now: float, actions: list[Action]) -> None:
        for request in expired:
            if not request.shadow:
                self._lanes[request.model].counters.missed(Refused.EXPIRED)
            actions.append(Refusal(request, Refused.EXPIRED))
        self._depart(expired, now, actions)

    def _release(self, now: float, actions: list[Action]) -> None:
        """Free the slots of abandoned calls that the upstream has finished by now."""
        while self._ghosts and self._ghosts[0][0] <= now:
            ended, _, batch = heappop(self._ghosts)
            self._vacate(batch.lane, ended)
            self._note_end(ended)
            self._resume(batch, now, actions)

    def _note_end(self, now: float) -> None:
        """Remember when a slot was given back: others began then that had waited for it in the upstream."""
        self._completed += 1
        self._completions.append(now)

    def _begin_next(self, now: float) -> None:
        """Predict anew when those end that queue in the upstream: the first of them begins now.

        Without this, one batch that took longer than believed would leave every later prediction too early by as much.
        """
        line = [batch for batch in self._in_flight if not batch.overdue]
        if not line:
            return
        estimate = line[0].lane.estimate
        if estimate is None or len(line) + len(self._ghosts) < estimate.executors:
            return
        if self._ghosts:
            line = sorted([*line, *(ghost for _, _, ghost in self._ghosts)], key=lambda batch: batch.number)
        finishes: list[float] = []
        for ahead, batch in enumerate(line):
            estimate = batch.lane.estimate
            if estimate is not None and not batch.aborted and estimate.executors <= min(ahead + 1, batch.in_flight - 1):
                start = finishes[ahead - estimate.executors] if ahead >= estimate.executors else now
                batch.finish = max(now, start) + time_of(estimate.of(batch.bucket).times, batch.rows)
            insort(finishes, batch.finish)

    def _over(self, batch: Batch, now: float) -> None:
        """Take a call off that is under way no more; its slot is free, unless it gave it back before."""
        del self._in_flight[batch]
        if batch.overdue:
            batch.lane.overdue -= 1
        else:
            self._vacate(batch.lane, now)

    def _vacate(self, lane: Lane, now: float) -> None:
        """Free a slot, and stop the device clock with the last one."""
        lane.taken -= 1
        self._taken -= 1
        if not self._taken:
            self._device_busy += now - self._busy_since

    def _give_back(self, now: float) -> None:
        """Free the slots of calls that take far longer than forecast; at most as many more as the model has."""
        for batch in self._in_flight:
            if not batch.overdue and batch.overdue_at <= now:
                lane = batch.lane
                batch.overdue_at = inf
                if lane.overdue < lane.parameters.max_in_flight:
                    batch.overdue = True
                    lane.overdue += 1
                    lane.gave_back += 1
                    self._vacate(lane, now)
                    self._note_end(now)
        self._overdue_at = min((batch.overdue_at for batch in self._in_flight if not batch.overdue), default=inf)
