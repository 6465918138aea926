"""Connects the Batcher to the event loop: exchanges come in, upstream calls go out, answers go back.

The Batcher decides; the driver executes its actions. One timer implements ``wake_at()``. All runs on the loop's thread.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, Any

from carpool.batching.counters import CANCELLED, FAILED, REJECTED
from carpool.batching.requests import Abort, Batch, Failure, Finish, Priority, Refusal, Request
from carpool_sidecar.axis_verification.verifier import Verifier
from carpool_sidecar.dispatch.alarm import Alarm
from carpool_sidecar.dispatch.answers import callers_fault
from carpool_sidecar.dispatch.flights import Flights
from carpool_sidecar.dispatch.merging import UNCHARGED, Merging
from carpool_sidecar.dispatch.request_counts import RequestCounts
from carpool_sidecar.dispatch.sending_answers import answer, fail, refuse
from carpool_sidecar.dispatch.terms import Terms
from carpool_sidecar.dispatch.trials import Trials
from carpool_sidecar.dispatch.waiters import Waiter
from carpool_sidecar.protocols import CODECS
from carpool_sidecar.protocols.common import WrongRows, alone

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable

    from carpool.batching.batcher import Batcher
    from carpool.batching.requests import Action
    from carpool.policy.spec import BatchingPolicy
    from carpool_sidecar.backends.base import Backend
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.models import ModelTable
    from carpool_sidecar.protocols.common import Endpoint, Parsed
    from carpool_sidecar.protocols.headers import Facts


APART = 10.0
"""Seconds after a request of a failing caller was kept apart in which a refusal names that as its cause."""


class Driver:
    """Drives a Batcher for one upstream. ``clock`` returns monotonic seconds, used as the Batcher's ``now``.

    ``largest(model)`` returns the most rows that any parameters can give a batch. ``stalled(start, end)`` returns
    whether this host paused in between. ``unreachable`` is called when the upstream refuses connections.
    """

    def __init__(
        self,
        batcher: Batcher,
        backend: Backend,
        models: ModelTable,
        policy: BatchingPolicy,
        *,
        clock: Callable[[], float],
        largest: Callable[[str], int],
        stalled: Callable[[float, float], bool],
        unreachable: Callable[[], None],
        log: logging.Logger,
    ) -> None:
        self.batcher = batcher
        self.terms = Terms(policy)
        self.counts = RequestCounts()
        trials = Trials(batcher, models, self.terms, clock=clock, largest=largest, do=self.do)
        self.verifier = Verifier(trials, policy, clock, log)
        self._models = models
        self._clock = clock
        self._merging = Merging(self.verifier, self.counts, clock, log)
        self._flights = Flights(
            batcher,
            backend,
            models,
            self.terms,
            self.counts,
            self.verifier,
            do=self.do,
            clock=clock,
            stalled=stalled,
            unreachable=unreachable,
            log=log,
        )
        self._to_do: deque[Action] = deque()
        self._doing = False
        self._alarm = Alarm(self._poll, clock)

    # ------------------------------------------------------------------------------------------------- requests

    def infer(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Take a request for inference whose body is complete."""
        now = self._clock()
        facts = self._facts(exchange)
        parsed = CODECS[endpoint.protocol].parse(endpoint, facts, exchange.body, self.terms.limits)
        if parsed.expansion > UNCHARGED and not exchange.charge(parsed.expansion):
            why = f"body: {parsed.expansion} bytes more to read it, and bodies.maxBuffered leaves no room"
            parsed = alone(endpoint, facts, exchange.body, "limits", why)
        entry = self._models.entry(endpoint)
        state = self.batcher.model(entry.lane)
        # 1. Decide whether it may be merged.
        mergeable, key, check = self._merging.key(exchange, entry, parsed, state)
        if parsed.alone is None:
            state.isolation.verifies = not mergeable and self.verifier.goes_on(entry)
        entry.headers.requests += 1
        if facts.key != entry.headers.key:
            self._merging.note_fragments(entry, facts.key)
        # 2. Set its due time. A request that only uses spare capacity has no SLO, so it has none.
        waits = facts.batch
        entry.waiters += 1
        arrived = exchange.received_at
        request = exchange.context = Request(
            key=key,
            arrived=arrived,
            due=inf if waits else arrived + self.terms.due,
            rows=parsed.rows,
            deadline=arrived + self._timeout(facts, parsed),
            model=entry.lane,
            priority=(
                Priority.LOW if waits else min(parsed.priority, Priority.LOW) if parsed.priority else Priority.NORMAL
            ),
            shadow=waits,
            size=parsed.size,
            tokens=parsed.tokens,
            bucket=0 if parsed.fit is None else parsed.fit.bucket,
            mergeable=mergeable,
            caller=exchange.peer,
            payload=Waiter(exchange, entry, state.counters, facts, parsed, check),
        )
        self.do(self.batcher.arrive(request, now))

    def _facts(self, exchange: Exchange) -> Facts:
        """Read the headers; the result is kept for a caller that sends the same head again."""
        known: Facts | None = exchange.headers.facts
        if known is None or known.reader is not self.terms.reader:
            known = exchange.headers.facts = self.terms.reader.read(exchange.headers)
        return known

    def _timeout(self, facts: Facts, parsed: Parsed[Any]) -> float:
        """Return the seconds that a request may wait: the smallest of the caller's and the policy's limits."""
        timeout = inf if facts.batch else self.terms.timeout
        if facts.deadline_s is not None and facts.deadline_s < timeout:
            timeout = facts.deadline_s
        if parsed.timeout_s and parsed.timeout_s < timeout:
            timeout = parsed.timeout_s
        return timeout

    def sends_alone(self, endpoint: Endpoint) -> bool:
        """Whether requests of a model now go to the upstream one by one, and no parameters are set for them."""
        entry = self._models.entry(endpoint)
        return self.batcher.undecided > 0 and (entry.alone is not None or self.batcher.model(entry.lane).passing)

    def sent(self, exchange: Exchange) -> None:
        """Count an answer after its last byte was handed to the transport."""
        request: Request = exchange.context
        waiter: Waiter = request.payload
        status = exchange.status
        model = self._models.label(request.model)
        if waiter.answered and not request.shadow:
            ok = 200 <= status < 300
            if ok:
                self.counts.took(model, exchange.sent_at - request.arrived)
            failure = REJECTED if callers_fault(status) else FAILED
            waiter.counters.answered(request.arrived, request.due, exchange.sent_at, ok, failure)
        self.counts.answered(model, waiter.parsed.endpoint.protocol, status)
        self._models.left(waiter.entry)
        exchange.context = None

    def disconnected(self, exchange: Exchange) -> None:
        """Cancel the request of a caller that disconnected before its answer was complete."""
        request: Request = exchange.context
        if not request.ended:
            self.do(self.batcher.cancel(request, self._clock()))
        elif request.payload.answered and not request.shadow:
            request.payload.counters.missed(CANCELLED)
        self._models.left(request.payload.entry)
        exchange.context = None

    def forget(self, model: str) -> None:
        """Forget a model that does not exist."""
        self.batcher.forget(model)
        self.counts.forget(model)

    # ------------------------------------------------------------------------------------------------- actions

    def do(self, actions: Iterable[Action]) -> None:
        """Execute the Batcher's actions, and set the timer to its next ``wake_at()``."""
        self._to_do.extend(actions)
        if self._doing:
            return  # an action caused further actions at once: they are executed after it, not inside it
        self._doing = True
        try:
            while self._to_do:
                action = self._to_do.popleft()
                match action:
                    case Batch():
                        self._flights.send(action)
                    case Finish():
                        for request in action.requests:
                            answer(request, action.batch)
                    case Failure():
                        for request in action.requests:
                            fail(request.payload, action.fault, unresolved=action.unresolved)
                        if action.unresolved and isinstance(action.fault.detail, WrongRows):
                            # Isolating the rows that caused it was too costly: this model's answers can't be merged.
                            self.batcher.model(action.requests[0].model).isolation.quarantined = True
                    case Refusal():
                        refuse(action, isolating=self._isolates(action.request.model))
                    case Abort():
                        self._flights.cancel(action.batch)
        finally:
            self._doing = False
        wake = self.batcher.wake_at()
        if wake < self._alarm.at:
            self._alarm.set(wake)

    def _isolates(self, model: str) -> bool:
        """Whether requests of a model that fail were kept apart lately."""
        isolation = self.batcher.model(model).isolation
        apart_at = self.counts.apart_at.get(model, -inf)
        return not isolation.quarantined and (bool(isolation.keys) or self._clock() - apart_at < APART)

    def _poll(self) -> None:
        self.do(self.batcher.poll(self._clock()))

    def stop(self) -> None:
        """Cancel the timer."""
        self._alarm.stop()
