"""The Batcher: which requests are batched together, and when. The sidecar and the simulator drive this very class.

Every method takes ``now`` (seconds, any monotonic origin) and returns what to do; nothing here reads a clock or does
anything itself. The driver does the actions in order and calls ``poll`` at ``wake_at()``.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from carpool.batching.admission import AdmissionControl
from carpool.batching.calls import Calls, latest_end
from carpool.batching.counters import CANCELLED, Stats
from carpool.batching.model_state import ModelState
from carpool.batching.queue_set import QueueSet
from carpool.batching.requests import Action, Batch, Estimate, Fault, Refused, Request
from carpool.batching.slots import Slots
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Admission

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from carpool.batching.queues import Queue


class Batcher:
    """Merges requests of equal key into batches, at most ``max_in_flight`` of each model with the upstream at once.

    Slots and queue bounds belong to a model: a slow one takes none of another's. A call that takes far longer than
    forecast gives its slot back; as many may do so as the model has slots.
    """

    def __init__(
        self,
        parameters: Parameters | None = None,
        *,
        admission: Admission | None = None,
        ageing: float = 1.0,
        retry_transport: bool = False,
        idempotent: bool = True,
        undecided: int = 0,
    ) -> None:
        """Start empty.

        ``parameters`` hold for every model until it is configured itself. ``ageing``: seconds of waiting that lift a
        request by one priority class. ``retry_transport``: whether a batch that the upstream never began to answer is
        sent once more. ``idempotent``: whether requests of a failed batch may be sent again, in search of the culprit.
        ``undecided``: calls at once, at most, while nobody has decided on other ``parameters``; 0: these hold.
        """
        self._default = parameters or Parameters()
        self._models: dict[str, ModelState] = {}
        self._queues = QueueSet(ageing)
        self._slots = Slots()
        self.idempotent, self.undecided = idempotent, undecided
        self._calls = Calls(self._queues, self._slots, retry_transport=retry_transport)
        self._admission = AdmissionControl(admission or Admission(), self._queues, self._slots)
        self._hold_until = inf

    # ------------------------------------------------------------------------------------------------- stimuli

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Admit a request or refuse it; start what is due."""
        # What time made due comes first, so that no request is refused for a slot or a place that is free by now.
        calls, slots = self._calls, self._slots
        late = calls.deadline <= now or slots.overdue_at <= now or (slots.abandoned and slots.abandoned[0][0] <= now)
        actions = self.poll(now) if late else []
        state = self._models.get(request.model) or self.model(request.model)
        key = state.isolation.key_of(request)
        if not request.shadow:
            batchable = state.batchable.arrived(key, request.bucket, now, state.parameters.max_wait)
            state.counters.arrived(now, request.rows, batchable)
        queue = self._queues.get(request, state, key)
        reason = self._admission.reason(queue, request, now)
        if reason is Refused.QUEUE_FULL:
            reason = self._admission.make_room(queue, request, now, actions)
        if reason is not None:
            self._admission.refuse(request, state, reason, now, actions)
            return actions
        request.hold_until = request.arrived + state.parameters.hold
        self._queues.add(queue, request)
        calls.deadline = min(calls.deadline, latest_end(request, state))
        if state.load.taken < state.slots:
            # Slots are free, so the requests that wait are held until then; only this queue has changed.
            state.counters.excess_until = 0.0  # nothing is behind a cold batch any more
            due = self._queues.due_at(queue)
            if due <= now or self._hold_until <= now:
                self._start(now, actions)
            else:
                self._hold_until = min(self._hold_until, due)
        elif state.passing and state.load.requests > state.slots and state.first_calls is None:
            state.passing = False  # as many wait as are served: being batched together costs them nothing
        return actions

    def poll(self, now: float) -> list[Action]:
        """Do what time alone makes due."""
        actions: list[Action] = []
        self._calls.free(now, actions)
        self._start(now, actions)
        return actions

    def complete(self, batch: Batch, now: float, *, fault: Fault | None = None, stalled: bool = False) -> list[Action]:
        """Take a batch's outcome; the slot goes to the rest of a failed batch, then to waiting requests.

        ``stalled``: this host paused meanwhile, so the service time is not counted.
        """
        actions: list[Action] = []
        if batch.aborted:
            return actions
        self._calls.free(now, actions)
        excess = self._calls.ended(batch, fault, now, actions, stalled=stalled, idempotent=self.idempotent)
        for state in self._models.values() if excess else ():
            state.counters.exceeded(excess, now)
        self._calls.resume(batch, now, actions)
        self._start(now, actions)
        batch.state.rest()
        return actions

    def cancel(self, request: Request, now: float) -> list[Action]:
        """Forget a request whose caller has left. No other request of its batch is touched."""
        actions: list[Action] = []
        if request.ended:
            return actions
        self._calls.free(now, actions)
        if not request.shadow:
            self._models[request.model].counters.missed(CANCELLED)
        self._calls.depart([request], now, actions)
        self._start(now, actions)
        return actions

    def configure(
        self, parameters: Parameters, now: float, *, model: str | None = None, undecided: int = 0
    ) -> list[Action]:
        """Replace the parameters of one model or of all; ``undecided``: first calls go on, at most so many at once."""
        if model is None:
            self._default = parameters
        for state in list(self._models.values()) if model is None else [self.model(model)]:
            for queue in self._queues.of(state):
                due = self._queues.due_at(queue) <= now
                for request in queue:
                    request.hold_until = min(request.hold_until, now if due else request.arrived + parameters.hold)
                queue.changed()
            state.configure(parameters, undecided)
        return self.poll(now)

    def learn(self, model: str, estimate: Estimate | None, now: float, *, shed_slo: bool = False) -> list[Action]:
        """Plan with an estimate of a model's service time (``None``: unknown).

        ``shed_slo``: whether being late for the SLO refuses a request, or only being late for its deadline.
        """
        state = self.model(model)
        state.belief.learn(estimate)
        state.belief.shed_slo = shed_slo
        if shed_slo:
            for queue in self._queues.of(state):
                queue.shed()
            self._calls.deadline = now  # some may be late already
        return self.poll(now)

    def merge(self, model: str, key_of: Callable[[Request], Hashable | None], now: float) -> list[Action]:
        """Let requests that wait to be sent alone share batches from now on: those that ``key_of`` has a key for."""
        self._queues.merge(self.model(model), key_of)
        return self.poll(now)

    def grows(self, model: str) -> bool:
        """Whether requests wait for a model's next answers, which show whether or how it can batch them."""
        return any(queue.grows for queue in self._queues.of(self.model(model)))

    def restarted(self, now: float, *, model: str | None = None) -> list[Action]:
        """Forget what was learned of the upstream, or of one model there: it was replaced or restarted."""
        for state in self._models.values() if model is None else [self.model(model)]:
            state.forget()
        return self.poll(now)

    def drain(self, now: float) -> list[Action]:
        """Stop holding requests: the process is about to end."""
        self._queues.draining = True
        return self.poll(now)

    def close(self) -> None:
        """Refuse every later arrival."""
        self._admission.closed = True

    def admit(self, admission: Admission) -> None:
        """Replace the queues' bounds; requests that already wait stay."""
        self._admission.bounds = admission

    def forget(self, model: str) -> None:
        """Drop a model's state, with its counters, unless it has waiting requests or calls under way."""
        state = self._models.get(model)
        if state is not None and not state.load.requests and all(each.state is not state for each in self._slots.all()):
            del self._models[model]

    # ------------------------------------------------------------------------------------------------- questions

    def wake_at(self) -> float:
        """When ``poll`` is next needed; ``inf``: not before another event."""
        return min(min(self._calls.deadline, self._hold_until), self._slots.wake_at())  # noqa: PLW3301 - quick if of two

    def model(self, name: str) -> ModelState:
        """Return a model's state, made with the default parameters on first use."""
        if name not in self._models:
            self._models[name] = ModelState(name, self._default, self.undecided)
        return self._models[name]

    def models(self) -> Iterator[ModelState]:
        """Every model seen so far."""
        return iter(self._models.values())

    def stats(self, now: float) -> Stats:
        """Snapshot the counters."""
        models = {name: state.counters.snapshot(now) for name, state in self._models.items()}
        return Stats(now, self._slots.busy(now), models, self.queued_rows)

    def busy(self, now: float) -> float:
        """Return for how many seconds the device has been busy."""
        return self._slots.busy(now)

    def waited(self, state: ModelState, now: float) -> float:
        """Return for how many seconds the first waiting request of a model waits; 0: none does."""
        return now - min((request.arrived for queue in self._queues.of(state) for request in queue), default=now)

    @property
    def queued_rows(self) -> int:
        """Rows waiting."""
        return sum(state.load.rows for state in self._models.values())

    @property
    def in_flight(self) -> int:
        """Calls under way, overdue ones included, and abandoned ones that the upstream is still computing."""
        return len(self._slots.all())

    @property
    def slots(self) -> int:
        """Batches of all models that may be with the upstream at once."""
        return sum(state.slots for state in self._models.values()) or self._default.max_in_flight

    @property
    def idle(self) -> bool:
        """Whether no request waits and no caller waits for a call under way."""
        return not self._queues.by_key and all(batch.aborted and not batch.rest for batch in self._slots.all())

    # ------------------------------------------------------------------------------------------------- batches

    def _start(self, now: float, actions: list[Action]) -> None:
        """Compose and dispatch batches while a model has a free slot and a queue that is due, the most urgent first."""
        if self._calls.deadline <= now:
            self._calls.expire(now, actions)
        if overdue := self._slots.overdue_at <= now:
            self._slots.give_back(now)
        queue, self._hold_until = self._queues.next(now)
        while queue is not None:
            self._compose(queue, now, actions)
            overdue = overdue or (queue.state.stuck and queue.state.belief.shed_slo)
            queue, self._hold_until = self._queues.next(now)
        if overdue:
            self._calls.expire(now, actions)

    def _compose(self, queue: Queue, now: float, actions: list[Action]) -> None:
        """Take the next batch from a queue and dispatch it, without the requests that it would make late."""
        state = queue.state
        estimate = queue.estimate
        start = now if estimate is None else self._slots.start(estimate.executors, now)
        slices, rows, dropped = queue.take(start, now, self._queues.ageing)
        if not queue.classes:
            del self._queues.by_key[queue.key]
        for request in dropped:
            self._admission.refuse(request, state, Refused.LATE, now, actions)
        if slices:
            counters = state.counters
            if (cap := queue.cap) < state.parameters.max_batch and queue.merge:
                counters.limited += 1
                counters.limited_rows += cap
            batch = Batch(state, queue.key, slices[0][0].bucket, slices, rows)
            self._calls.send(batch, start, now, actions)
