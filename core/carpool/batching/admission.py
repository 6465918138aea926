"""Admission: which requests are refused because the queue is full or because they would be late."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from carpool.batching.queues import Queue
from carpool.batching.requests import ROUNDING, Priority, Refusal, Refused, seldom_exceeded, time_of

if TYPE_CHECKING:
    from carpool.batching.model_state import ModelState
    from carpool.batching.queue_set import QueueSet
    from carpool.batching.requests import Action, Estimate, Request
    from carpool.batching.slots import Slots
    from carpool.policy.spec import Admission

EARLY_REFUSAL = 0.8
"""Share of a queue bound from which classes below normal are refused."""


class AdmissionControl:
    """Refuses requests, by the bounds of a model's queues and by when their answer is forecast."""

    __slots__ = ("_queues", "_slots", "bounds", "closed")

    def __init__(self, bounds: Admission, queues: QueueSet, slots: Slots) -> None:
        self.bounds = bounds
        self.closed = False
        """Whether everything is refused."""
        self._queues = queues
        self._slots = slots

    def reason(self, queue: Queue, request: Request, now: float) -> Refused | None:
        """Return why a request is refused; ``None``: it is admitted."""
        if self.closed:
            return Refused.DRAINING
        if request.deadline <= now:
            return Refused.EXPIRED
        # 1. Room. Alone in the queue, a request larger than the bounds is still served.
        load = queue.state.load
        if load.requests and not request.exempt:
            share = EARLY_REFUSAL if request.priority > Priority.NORMAL else 1.0
            bounds = self.bounds
            if (
                load.rows + request.rows > bounds.max_queued_rows * share
                or load.size + request.size > bounds.max_queued_bytes * share
                or (
                    bounds.max_queued_tokens is not None
                    and load.tokens + request.tokens > bounds.max_queued_tokens * share
                )
            ):
                return Refused.QUEUE_FULL
        # 2. Time. An idle upstream admits all, and an unknown service time refuses none. A request that would be late
        # even on an idle upstream is not refused for the SLO: nobody could serve it better.
        request.exempt = request.exempt or not (self._slots.taken or self._slots.in_flight)
        estimate = queue.estimate
        if request.exempt or estimate is None:
            return None
        if queue.state.belief.shed_slo:
            request.sheddable = now + queue.span(request, estimate) <= request.due + ROUNDING
        if queue.grows:
            return None
        limit = min(request.due, request.deadline) if request.sheddable else request.deadline
        if limit == inf or self._finish(queue, request, estimate, now) <= limit + ROUNDING:
            return None
        if (first := queue.state.first_calls) is not None and queue.splits and first.share():
            queue.state.follow(first)
            return None
        return Refused.LATE

    def refuse(self, request: Request, state: ModelState, reason: Refused, now: float, actions: list[Action]) -> None:
        """Refuse a request, and count that."""
        request.ended = True
        if not request.shadow:
            state.counters.refused(reason, now)
        actions.append(Refusal(request, reason, self._drain_time(now)))

    def make_room(self, queue: Queue, request: Request, now: float, actions: list[Action]) -> Refused | None:
        """Refuse a flood's latest requests to admit one of another key; return why that one is refused even so."""
        reason: Refused | None = Refused.QUEUE_FULL
        for _ in range(request.rows):
            if reason is not Refused.QUEUE_FULL or not self._displace(queue, request, now, actions):
                break
            reason = self.reason(queue, request, now)
        return reason

    def _displace(self, queue: Queue, request: Request, now: float, actions: list[Action]) -> bool:
        for flood in self._queues.by_key.values():
            if flood.state is queue.state and flood is not queue and self._queues.floods(flood, queue):
                latest = flood.classes[max(flood.classes)][-1]
                if latest.taken or latest.priority < request.priority:
                    return False
                self._queues.take_off(flood, latest)
                self.refuse(latest, queue.state, Refused.QUEUE_FULL, now, actions)
                return True
        return False

    def _finish(self, queue: Queue, request: Request, estimate: Estimate, now: float) -> float:
        """Forecast the end of an arriving request at its position: behind full batches, in its own as it is by now.

        Requests that make that batch larger come later, and are refused or dropped first; if it counted as full from
        the start, requests would be refused that the model has time for (decision 8). The drop at dispatch, with the
        real batch, is exact. While a slot is free, requests only wait to be batched: they leave with this one.
        """
        state = queue.state
        servers = min(estimate.executors, state.slots)
        start = self._slots.start(servers, now)
        cap, alone, free = queue.cap, queue.alone, state.free
        if alone or request.rows > cap:
            own = queue.span(request, estimate)
        else:
            own = time_of(estimate.times, min((queue.rows if free else queue.rows % cap) + request.rows, cap))
        if free:
            return start + own
        if request.sheddable and queue.rows >= (1 if alone else cap):
            own *= seldom_exceeded(estimate.noise)  # those before it fill batches: it takes another's place
        return start + self._ahead(queue, request) / servers + own

    def _ahead(self, queue: Queue, request: Request) -> float:
        """Seconds of device time that go before an arriving request.

        Models take turns, and so do keys with a flood: another's queue delays this by what waits here, and a batch.
        """
        ahead = 0.0
        turns: dict[ModelState | Queue, float] = {}
        for other in self._queues.by_key.values():
            known = other.estimate
            if known is not None:
                work = other.work(known.times, priority=request.priority, joins=other is queue)
                if other.state is not queue.state:
                    turns[other.state] = turns.get(other.state, 0.0) + work
                elif other is not queue and self._queues.floods(other, queue):
                    turns[other] = work
                else:
                    ahead += work
        own = ahead
        for each, work in turns.items():
            state = each.state if isinstance(each, Queue) else each
            if state.belief.estimate is not None and not state.stuck:
                ahead += min(work, own + time_of(state.belief.estimate.times, each.cap))
        return ahead

    def _drain_time(self, now: float) -> float:
        """Forecast the seconds until all waiting and running requests are served; 1 where that is unknown."""
        total, servers = 0.0, 1
        for queue in self._queues.by_key.values():
            estimate = queue.estimate
            if estimate is None:
                return 1.0
            total += queue.work(estimate.times)
            servers = max(servers, min(estimate.executors, queue.state.slots))
        return self._slots.start(servers, now) - now + total / servers
