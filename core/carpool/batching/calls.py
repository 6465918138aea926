"""Calls to the upstream, from their start to their outcome, and requests that end meanwhile."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from carpool.batching.bisection import judge, next_part
from carpool.batching.queue_set import ALONE, QueueSet
from carpool.batching.requests import Abort, Action, Batch, Failure, Fault, FaultKind, Finish, Refusal, Refused, Request

if TYPE_CHECKING:
    from collections.abc import Iterable

    from carpool.batching.first_calls import FirstCalls
    from carpool.batching.model_state import ModelState
    from carpool.batching.slots import Slots

WRONG_ROWS = Fault(FaultKind.ROWS)
"""The fault of an answer to several requests, when the model is known by then not to answer by rows."""

UNFORESEEN: Final = 0.001
"""If a batch ends so many seconds off its forecast, the batches behind it are forecast again."""

TICK = 1 / 64
"""Seconds within which requests that wait for a stuck model are refused together: each look is at all requests."""

_GONE = Request(key=None, arrived=0.0, due=0.0)
"""Stands in a batch for a request that is served again elsewhere."""
_GONE.ended = True


class Calls:
    """Starts calls, takes their outcomes, continues those that failed, and aborts those that no caller waits for."""

    __slots__ = ("_queues", "_retry_transport", "_slots", "deadline")

    def __init__(self, queues: QueueSet, slots: Slots, *, retry_transport: bool) -> None:
        self._queues = queues
        self._slots = slots
        self._retry_transport = retry_transport
        self.deadline = inf
        """A lower bound of when any live request ends by itself."""

    def send(self, batch: Batch, start: float, now: float, actions: list[Action]) -> None:
        """Hand a batch to the upstream, which begins it at ``start``."""
        self._slots.occupy(batch, start, now)
        batch.state.first_batches.sent(batch)
        actions.append(batch)

    def ended(
        self, batch: Batch, fault: Fault | None, now: float, actions: list[Action], *, stalled: bool, idempotent: bool
    ) -> float:
        """Take a call's outcome, free its slot; return the seconds over its forecast, if the first of its size."""
        excess = 0.0
        self._slots.end(batch, now)
        if fault is None and batch.state.isolation.quarantined and not batch.whole:
            fault = WRONG_ROWS  # it was sent before the model was known not to answer by rows
        if fault is None:
            excess = self._succeeded(batch, now, actions, stalled=stalled)
        else:
            self._failed(batch, fault, now, actions, idempotent=idempotent)
        if not batch.overdue:
            self._slots.note_end(now)
        if abs(now - batch.finish) > UNFORESEEN:
            self._slots.forecast_again(now)
        return excess

    def _succeeded(self, batch: Batch, now: float, actions: list[Action], *, stalled: bool) -> float:
        state, excess = batch.state, 0.0
        if stalled:
            state.counters.stalled += 1
        else:
            quick = state.first_calls is not None and self._first_answer(batch, state.first_calls, now)
            if batch.cold:
                state.counters.cold += 1
                excess = state.first_batches.ended(batch, state.belief.estimate, now)
            if quick or not batch.cold:
                self._slots.sample(batch, now)
                state.belief.check(batch, now)
        state.served(batch.key, batch.rows)
        finished = batch.answered()
        if state.isolation.suspects.left:
            for request in finished:
                state.isolation.suspects.succeeded(request.caller, request.key)
        actions.append(Finish(batch, finished))
        if batch.halves is not None and batch.halves.succeed():
            state.limits.too_large(batch.halves.rows, works=batch.halves.largest)
        return excess

    def _first_answer(self, batch: Batch, first: FirstCalls, now: float) -> bool:
        """Learn from a first answer; return whether its call was clearly not slow as the first of its size."""
        request = batch.slices[0][0]
        queues, verifies = self._queues.of(batch.state), batch.state.isolation.verifies
        requests = len(batch.slices)
        if request.shadow:
            # A trial shows what as many rows of those that wait would take; other copies show nothing.
            requests = batch.rows // next((one.rows for queue in queues for one in queue), batch.rows)
            if requests < 2 or not verifies:
                return False
        quick = first.answered(
            batch.in_flight, now - batch.dispatched, requests, alone=verifies,
            waiting=max((queue.rows for queue in queues if queue.splits or verifies), default=0),
            due=request.due - request.arrived, cold=batch.cold,
        )  # fmt: skip
        batch.state.follow(first)
        return quick

    def _failed(self, batch: Batch, fault: Fault, now: float, actions: list[Action], *, idempotent: bool) -> None:
        first = batch.slices[0][0]
        if fault.kind is FaultKind.ITEM and len(batch.slices) == 1 and first.mergeable and first.caller is not None:
            batch.state.isolation.suspects.failed(first.caller, first.key)
        verdict = judge(batch, fault, retry_transport=self._retry_transport and idempotent, idempotent=idempotent)
        batch.rest[:0] = verdict.parts
        for request in verdict.restarted:
            batch.rest.append(self._serve_anew(request, batch, now, actions))
        if verdict.failed:
            actions.append(Failure(verdict.failed, fault, verdict.unresolved))
            self.depart(verdict.failed, now, actions)

    def resume(self, batch: Batch, now: float, actions: list[Action]) -> None:
        """Give the slot of a failed batch to its remaining parts."""
        if batch.rest and self.deadline <= now:
            self._refuse_expired(_live(batch.rest), now, actions)
        part = next_part(batch.rest)
        if part is not None:
            part.rest = batch.rest
            estimate = part.state.belief.estimate
            self.send(part, now if estimate is None else self._slots.start(estimate.executors, now), now, actions)

    def free(self, now: float, actions: list[Action]) -> None:
        """Free the slots of abandoned calls that the upstream has finished by now."""
        while (batch := self._slots.computed(now)) is not None:
            self.resume(batch, now, actions)

    def depart(self, requests: list[Request], now: float, actions: list[Action]) -> None:
        """End requests wherever they are; abort calls without callers, whose slots stay taken until they would end."""
        sent = False
        for request in requests:
            request.ended = True
            self._queues.remove(request)
            sent = sent or request.taken > 0
        if sent:
            for batch in [*self._slots.in_flight]:
                if all(request.ended for request, _, _ in batch.slices):
                    self._abort(batch, now, actions)

    def _abort(self, batch: Batch, now: float, actions: list[Action]) -> None:
        batch.aborted = True
        actions.append(Abort(batch))
        if not self._slots.abandon(batch, now):
            self.resume(batch, now, actions)

    def expire(self, now: float, actions: list[Action]) -> None:
        """End every request that waits for too long or whose deadline has passed, and find when the next one does."""
        live = {request: queue.state for queue in self._queues.by_key.values() for request in queue}
        live.update(_live(part for batch in self._slots.all() for part in (batch, *batch.rest)))
        self._refuse_expired(live, now, actions)
        self.deadline = min((end for each in live.items() if (end := latest_end(*each)) > now), default=inf)

    def _refuse_expired(self, live: dict[Request, ModelState], now: float, actions: list[Action]) -> None:
        expired = [request for request, state in live.items() if latest_end(request, state) <= now]
        for request in expired:
            reason = Refused.EXPIRED if request.deadline <= now else Refused.LATE
            if not request.shadow:
                live[request].counters.refused(reason, now)
            actions.append(Refusal(request, reason))
        self.depart(expired, now, actions)

    def _serve_anew(self, request: Request, batch: Batch, now: float, actions: list[Action]) -> Batch:
        """Take a request out of its queue and of every batch; return a batch that serves it from its first row, alone.

        Rows of it that were answered before came from a model that does not answer by rows: they are void.
        """
        self._queues.remove(request)
        for other in (batch, *self._slots.all()):
            for part in (other, *other.rest):
                if part is not batch:
                    # Its place stays: the number of requests in a call decides whose fault a failure is.
                    part.slices = [(_GONE, *each[1:]) if each[0] is request else each for each in part.slices]
            if other is not batch and not other.aborted and all(one.ended for one, _, _ in other.slices):
                self._abort(other, now, actions)
        request.taken = request.unserved = request.rows
        request.mergeable = False
        return Batch(batch.state, (request.model, ALONE), request.bucket, [(request, 0, request.rows)], request.rows)


def latest_end(request: Request, state: ModelState) -> float:
    """Return when a request ends at the latest: with a stuck model, at its due time if it would be refused for that."""
    late = state.stuck and state.belief.shed_slo and request.sheddable and not (request.exempt or request.taken)
    return min(-(-request.due // TICK) * TICK, request.deadline) if late else request.deadline


def _live(batches: Iterable[Batch]) -> dict[Request, ModelState]:
    return {request: batch.state for batch in batches for request, _, _ in batch.slices if not request.ended}
