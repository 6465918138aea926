"""First come, first served: a dispatcher without its decision, for rivals with their own dispatch rule.

What a server would do about failed batches is no part of any rival's rule: they are all given Carpool's, halving and
the lowered ceiling included. Requests are cut where a batch is full.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from carpool.batching.bisection import judge, next_part
from carpool.batching.counters import CANCELLED, Stats
from carpool.batching.model_state import ModelState
from carpool.batching.requests import Action, Batch, Estimate, Failure, Fault, Finish, Refusal, Refused, Request, Slice
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Admission

if TYPE_CHECKING:
    from collections.abc import Hashable


class Late(NamedTuple):
    """Requests at a line's head that are too late for anything."""

    requests: int
    rows: int


class Line:
    """What waits under one key, oldest first."""

    __slots__ = ("key", "requests", "rows")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.requests: deque[Request] = deque()
        self.rows = 0
        """Of them, not dispatched yet."""

    @property
    def head(self) -> Request:
        """The request that has waited longest."""
        return self.requests[0]

    def late(self, since: float) -> Late:
        """Count those from the head on that came at ``since`` or before, but for one that is partly served."""
        requests = rows = 0
        for request in self.requests:
            if request.arrived > since or request.taken:
                break
            requests += 1
            rows += request.rows
        return Late(requests, rows)


class Verdict(NamedTuple):
    """What to do with a line, now that a slot is free."""

    rows: int = 0
    """To send at once; 0: none yet."""
    again: float = inf
    """When to ask again if nothing happens before; later than now. Of use where nothing is sent."""
    late: int = 0
    """Requests to refuse first, from the head on."""


class Fifo(ABC):
    """A queue for each key and ``slots`` batches in flight; what is sent, and when, is for ``decide`` to say."""

    def __init__(self, *, slots: int, max_batch: int, max_queued_rows: int | None = None) -> None:
        """Start empty; rows beyond ``max_queued_rows`` are refused (Carpool's default bound where it is ``None``)."""
        self.slots = slots
        self.in_flight: dict[Batch, None] = {}
        self._bound = max_queued_rows or Admission().max_queued_rows
        self._state = ModelState("", Parameters(max_batch=max_batch, max_in_flight=slots))
        self._lines: dict[Hashable, Line] = {}
        self._queued = 0
        self._again = inf
        self._expiry = inf
        self._busy = 0.0
        self._busy_since = 0.0

    @abstractmethod
    def decide(self, line: Line, now: float) -> Verdict:
        """Say what becomes of a line that is not empty while a slot is free."""

    def completed(self, batch: Batch, now: float) -> None:  # noqa: B027 - few rules learn
        """Learn from a batch that succeeded; it took ``now - batch.dispatched`` seconds."""

    @property
    def cap(self) -> int:
        """Rows that a batch may have now: size faults lower it."""
        return self._state.cap

    # ------------------------------------------------------------------------------------- as Simulation calls it

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Queue a request, or refuse it where there is no room; start what is due."""
        state = self._state
        state.counters.arrived(now, request.rows)
        if self._queued and self._queued + request.rows > self._bound:
            request.ended = True
            state.counters.missed(Refused.QUEUE_FULL)
            return [Refusal(request, Refused.QUEUE_FULL)]
        line = self._lines.get(request.key)
        if line is None:
            line = self._lines[request.key] = Line(request.key)
        line.requests.append(request)
        line.rows += request.rows
        self._queued += request.rows
        self._expiry = min(self._expiry, request.deadline)
        actions: list[Action] = []
        self._start(now, actions)
        return actions

    def poll(self, now: float) -> list[Action]:
        """Start what is due by time alone."""
        actions: list[Action] = []
        self._start(now, actions)
        return actions

    def complete(self, batch: Batch, now: float, *, fault: Fault | None = None, stalled: bool = False) -> list[Action]:
        """Take a batch's outcome; its slot goes to the rest of it if it failed, then to waiting requests.

        Nothing is learned from a ``stalled`` one, as Carpool learns nothing from it.
        """
        actions: list[Action] = []
        state = self._state
        del self.in_flight[batch]
        if not self.in_flight:
            self._busy += now - self._busy_since
        if fault is None:
            state.served(batch.key, batch.rows)
            if batch.halves is not None and batch.halves.succeed():
                state.limits.too_large(batch.halves.rows, works=batch.halves.largest)
            actions.append(Finish(batch, batch.answered()))
            if not stalled:
                self.completed(batch, now)
        else:
            verdict = judge(batch, fault, retry_transport=False)
            batch.rest[:0] = verdict.parts
            failed = [*verdict.failed, *verdict.restarted]  # they ask nobody again who was answered by the wrong rows
            if failed:
                actions.append(Failure(failed, fault, verdict.unresolved))
                for request in failed:
                    self._leave(request)
        part = next_part(batch.rest)
        if part is not None:
            part.rest = batch.rest
            self._dispatch(part, now, actions)
        self._start(now, actions)
        return actions

    def cancel(self, request: Request, now: float) -> list[Action]:  # noqa: ARG002 - nobody else is touched
        """Forget a request whose caller has left; if it is in a batch, its rows are computed all the same."""
        if not request.ended:
            self._state.counters.missed(CANCELLED)
            self._leave(request)
        return []

    def configure(self, parameters: Parameters, now: float) -> list[Action]:  # noqa: ARG002 - the rule is its own
        """Change nothing."""
        return []

    def learn(self, model: str, estimate: Estimate | None, now: float, *, shed_slo: bool = False) -> list[Action]:  # noqa: ARG002 - the rule is its own
        """Change nothing."""
        return []

    def wake_at(self) -> float:
        """When ``poll`` is next needed."""
        return min(self._again, self._expiry)

    def model(self, model: str) -> ModelState:  # noqa: ARG002 - there is one
        """Return what counts."""
        return self._state

    def stats(self, now: float) -> Stats:
        """Snapshot the counters."""
        busy = self._busy + (now - self._busy_since if self.in_flight else 0.0)
        return Stats(now, busy, {"": self._state.counters.snapshot(now)}, self._queued)

    # ------------------------------------------------------------------------------------------------- dispatch

    def _start(self, now: float, actions: list[Action]) -> None:
        """Do what ``decide`` says as long as a slot is free, the line of who has waited longest first."""
        if self._expiry <= now:
            self._expire(now, actions)
        self._again = inf
        while self._lines and len(self.in_flight) < self.slots:
            sent = False
            lines = list(self._lines.values())
            if len(lines) > 1:
                lines.sort(key=lambda line: line.head.arrived)
            for line in lines:
                verdict = self.decide(line, now)
                for _ in range(verdict.late):
                    request = line.head
                    self._leave(request)
                    self._state.counters.missed(Refused.LATE)
                    actions.append(Refusal(request, Refused.LATE))
                if verdict.rows:
                    self._send(line, verdict.rows, now, actions)
                    sent = True
                    break
                self._again = min(self._again, verdict.again)
            if not sent:
                return

    def _send(self, line: Line, rows: int, now: float, actions: list[Action]) -> None:
        """Take ``rows`` off a line's head, the last request cut where need be, and dispatch them."""
        slices: list[Slice] = []
        left = rows
        while left:
            request = line.head
            start = request.taken
            request.taken = stop = min(start + left, request.rows)
            slices.append((request, start, stop))
            left -= stop - start
            if stop == request.rows:
                line.requests.popleft()
        line.rows -= rows
        self._queued -= rows
        if not line.requests:
            del self._lines[line.key]
        self._dispatch(Batch(self._state, line.key, slices[0][0].bucket, slices, rows), now, actions)

    def _dispatch(self, batch: Batch, now: float, actions: list[Action]) -> None:
        if not self.in_flight:
            self._busy_since = now
        self.in_flight[batch] = None
        batch.dispatched = now
        batch.in_flight = len(self.in_flight)
        actions.append(batch)

    def _leave(self, request: Request) -> None:
        """End a request; what of it still waits is taken out of its line."""
        request.ended = True
        rows = request.rows - request.taken
        if rows:
            line = self._lines[request.key]
            line.requests.remove(request)
            line.rows -= rows
            self._queued -= rows
            if not line.requests:
                del self._lines[line.key]

    def _expire(self, now: float, actions: list[Action]) -> None:
        """Refuse whose callers have stopped waiting before any of it was sent."""
        waiting = [request for line in self._lines.values() for request in line.requests]
        for request in waiting:
            if request.deadline <= now and not request.taken:
                self._leave(request)
                self._state.counters.missed(Refused.EXPIRED)
                actions.append(Refusal(request, Refused.EXPIRED))
        self._expiry = min(
            (request.deadline for line in self._lines.values() for request in line.requests if request.deadline > now),
            default=inf,
        )
