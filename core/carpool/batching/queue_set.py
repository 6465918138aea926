"""All queues: which one a request joins, when each is due, and which one is served next."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from carpool.batching.queues import Queue
from carpool.batching.recent_keys import MOSTLY
from carpool.batching.requests import Priority, Request, time_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from carpool.batching.model_state import ModelState

ALONE: Final = object()
"""The key of requests that may not be batched together."""

FLOOD = 2
"""A queue may be a flood if so many full batches wait in it."""

PATIENCE = 10
"""Times the ageing: after so long a request counts as due, also if it has no deadline."""

MAX_KEYS = 32
"""Most keys that have queues for batching at a time: a request with one more key is not batched. Every arrival looks
at all of them, and callers can invent keys: a header is enough."""


class QueueSet:
    """The queues of all models."""

    __slots__ = ("ageing", "by_key", "draining")

    def __init__(self, ageing: float) -> None:
        self.by_key: dict[object, Queue] = {}
        """By model and key; none is empty."""
        self.ageing = ageing
        """Seconds of waiting that lift a request by one priority class."""
        self.draining = False
        """Whether requests are no longer held."""

    def of(self, state: ModelState) -> list[Queue]:
        """Return a model's queues."""
        return [queue for queue in self.by_key.values() if queue.state is state]

    def get(self, request: Request, state: ModelState, key: Hashable | None) -> Queue:
        """Return the queue for a request with a ``key`` (``None``: sent alone); it joins the set with its first one."""
        queue = self.by_key.get((request.model, ALONE if key is None else key))
        if queue is not None:
            return queue
        # A request larger than a batch has to be cut, whatever its key.
        if key is not None and (len(self.by_key) < MAX_KEYS or request.rows > state.cap):
            return Queue((request.model, key), state, merge=True, bucket=request.bucket)
        alone = (request.model, ALONE)
        return self.by_key.get(alone) or Queue(alone, state, merge=False)

    def add(self, queue: Queue, request: Request) -> None:
        """Append a request to its queue."""
        if not queue.rows:
            self.by_key[queue.key] = queue
        queue.add(request)

    def merge(self, state: ModelState, key_of: Callable[[Request], Hashable | None]) -> None:
        """Move a model's requests that wait to be sent alone, and that ``key_of`` has a key for, to the key's queue."""
        state.isolation.verifies = False
        if state.first_calls is not None:
            state.first_calls.since = 0
        for request in [*self.by_key.get((state.name, ALONE), ())]:
            if not request.mergeable and (key := key_of(request)) is not None:
                self.take_off(self.by_key[state.name, ALONE], request)
                request.key, request.mergeable = key, True
                self.add(self.get(request, state, state.isolation.key_of(request)), request)

    def remove(self, request: Request) -> None:
        """Remove the waiting rows of a request."""
        if request.taken < request.rows:
            for key in (request.key, (request.caller, request.key), ALONE):
                queue = self.by_key.get((request.model, key))
                if queue is not None and request in queue.classes.get(request.priority, ()):
                    self.take_off(queue, request)
                    return

    def take_off(self, queue: Queue, request: Request) -> None:
        """Take a request off its queue."""
        queue.remove(request)
        if not queue.classes:
            del self.by_key[queue.key]

    def due_at(self, queue: Queue) -> float:
        """When a queue's next batch is due: ``-inf`` for at once."""
        state = queue.state
        estimate = queue.estimate
        if (
            state.parameters.max_wait <= 0.0
            or estimate is None
            or queue.rows >= queue.cap
            or queue.alone
            or self.draining
            or (state.batchable.share < MOSTLY and not state.batchable.worth_holding(state.parameters.max_wait))
        ):
            return -inf
        return queue.due_at(estimate.upper)

    def next(self, now: float) -> tuple[Queue | None, float]:
        """Return the most urgent queue that is due and has a free slot; if there is none, when the next one is due."""
        chosen: Queue | None = None
        urgency = wake = inf
        for queue in self.by_key.values():
            if not queue.state.free:
                continue
            due = self.due_at(queue)
            if due > now:
                wake = min(wake, due)
            elif chosen is None:
                chosen = queue
                urgency = -inf if len(self.by_key) == 1 else self._urgency(queue, now)
            elif (other := self._urgency(queue, now)) < urgency:
                chosen, urgency = queue, other
        return chosen, wake

    def _urgency(self, queue: Queue, now: float) -> float:
        """When a queue's most urgent class must start to be in time; higher classes go first.

        Each class counts by its first request, since one that may wait must not hide others behind it. A flood's
        requests count as if they had just arrived: those of other keys have waited longer.
        """
        estimate, floods, urgency = queue.estimate, self.floods(queue), inf
        for waiting in queue.classes.values():
            head = waiting[0]
            limit = min(head.deadline, head.due, head.arrived + PATIENCE * self.ageing)
            if estimate is not None:
                limit -= time_of(estimate.times, head.rows if queue.alone else min(queue.rows, queue.cap))
            if floods:
                limit += now - head.arrived
            urgency = min(urgency, limit + (head.priority - Priority.NORMAL) * self.ageing)
        return urgency

    def floods(self, queue: Queue, newcomer: Queue | None = None) -> bool:
        """Whether a queue holds most of its model's waiting work, and more than leaves soon: other keys go before it.

        Two keys with equal work are served by urgency. A length bucket is no other key: the same callers fill it.
        ``newcomer``: the queue of a request that arrives, which may not wait yet.
        """
        rows = queue.rows
        if rows <= FLOOD * queue.cap:
            return False
        bucket = queue.bucket or 0
        rivals = [*self.by_key.values()] if newcomer is None else [*self.by_key.values(), newcomer]
        others = [
            other.rows
            for other in rivals
            if other is not queue and other.state is queue.state and (other.bucket or 0) == bucket
        ]
        return bool(others) and rows > sum(others)
