"""A driver with an upstream of its own around the Batcher, which checks every action: for Hypothesis and for the soak.

``Driver`` plays the sidecar: it carries out actions, keeps its own account of the requests that wait, are in flight and
have ended, and fails an assertion at the first that does not add up. It also plays the upstream: a poisoned request
fails every batch that it is in, so a request may fail only if it would fail alone. ``random_step`` draws one stimulus.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Any

from carpool.batching.batcher import Batcher
from carpool.batching.calls import latest_end
from carpool.batching.isolation import EXTRA_ROWS, EXTRA_SHARE
from carpool.batching.queue_set import ALONE
from carpool.batching.requests import (
    Abort,
    Action,
    Batch,
    Estimate,
    Failure,
    Fault,
    FaultKind,
    Finish,
    Refusal,
    Refused,
    Request,
    Slice,
)
from carpool.policy.durations import Duration, Quantity
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Admission

if TYPE_CHECKING:
    from random import Random

MODELS = ("a", "b")
LARGEST = 12
"""Rows beyond which the upstream refuses a batch for its size."""
ADMISSION = Admission(max_queued_rows=60, max_queued_bytes=Quantity(4000), max_queued_tokens=3000)


def estimate(base: float = 0.005, row: float = 0.0005, executors: int = 1) -> Estimate:
    times = tuple(base + row * rows for rows in range(65))
    return Estimate(times, tuple(time * 1.1 for time in times), executors)


class Driver:
    """Carries out what a Batcher asks for and holds it to its word."""

    def __init__(self, *, retry_transport: bool = True, admission: Admission = ADMISSION) -> None:
        self.now = 0.0
        self.admission = admission
        self.retry_transport = retry_transport
        self.batcher = Batcher(admission=admission, ageing=0.2, retry_transport=retry_transport)
        self.live: dict[Request, list[tuple[int, int]]] = {}
        """Every request that has not ended, with the spans of it that were answered."""
        self.sent: dict[Request, int] = {}
        """Rows of each live request that were dispatched for the first time, in order from 0."""
        self.calls: dict[Batch, Fault | None] = {}
        """Every call under way, with what the upstream makes of it."""
        self.ended: Counter[str] = Counter()
        self.arrivals = 0
        self.again_rows = 0
        self.size_rows = 0

    # ------------------------------------------------------------------------------------------------- stimuli

    def arrive(self, **fields: Any) -> Request:
        request = Request(arrived=self.now, **fields)
        self.arrivals += 1
        self.live[request] = []
        self.sent[request] = 0
        self.obey(self.batcher.arrive(request, self.now))
        return request

    def cancel(self, request: Request) -> None:
        del self.live[request]
        self.ended["cancelled"] += 1
        self.obey(self.batcher.cancel(request, self.now))
        assert self.batcher.cancel(request, self.now) == []

    def advance(self, seconds: float) -> None:
        """Let time pass, polling whenever the Batcher wants it."""
        until = self.now + seconds
        while (wake := self.batcher.wake_at()) <= until:
            assert wake > self.now, "poll left something due"
            self.now = wake
            self.obey(self.batcher.poll(self.now))
        self.now = until

    def skip(self, seconds: float) -> None:
        """Let time pass without a poll, as when the host pauses."""
        self.now += seconds
        self.obey(self.batcher.poll(self.now))

    def complete(self, batch: Batch, failure: Fault | None = None, *, stalled: bool = False) -> None:
        """Answer as the upstream would, or with a ``failure`` that has nothing to do with the batch's requests."""
        truth = self.calls.pop(batch)
        fault = failure or truth
        self.obey(
            self.batcher.complete(batch, self.now, fault=fault, stalled=stalled),
            completed=batch if fault is None else None,
        )

    def configure(self, parameters: Parameters, model: str | None = None) -> None:
        self.obey(self.batcher.configure(parameters, self.now, model=model))

    def learn(self, model: str, belief: Estimate | None, *, shed_slo: bool) -> None:
        self.obey(self.batcher.learn(model, belief, self.now, shed_slo=shed_slo))

    def restarted(self) -> None:
        self.obey(self.batcher.restarted(self.now))

    def quiesce(self) -> None:
        """Complete every call and poll on time, with no new stimulus: everything must end."""
        for _ in range(10_000):
            if self.calls:
                self.complete(next(iter(self.calls)))
            elif self.batcher.wake_at() < inf:
                self.advance(self.batcher.wake_at() - self.now)
            else:
                break
        assert not self.live, "requests were forgotten"
        assert self.batcher.idle
        assert (
            self.batcher.in_flight
            == self.batcher.queued_rows
            == sum(each.load.size for each in self.batcher.models())
            == 0
        )

    # ------------------------------------------------------------------------------------------------- effects

    def obey(self, actions: list[Action], *, completed: Batch | None = None) -> None:
        for action in actions:
            match action:
                case Batch():
                    self._send(action)
                case Finish():
                    assert action.batch is completed
                    self._answer(action)
                case Failure():
                    assert action.requests
                    for request in action.requests:
                        assert self._fails_alone(request, action.fault.kind), "an innocent request failed"
                        self._end(request, "failed")
                        self.batcher.model(request.model).counters.answered(
                            request.arrived, request.due, self.now, ok=False
                        )
                case Refusal():
                    self._end(action.request, action.reason.value)
                    assert action.reason is not Refused.EXPIRED or action.request.deadline <= self.now
                    assert not (action.reason is Refused.LATE and action.request.exempt), (
                        "shed though it met an idle upstream"
                    )
                    assert 0 <= action.retry_after < inf
                case Abort():
                    del self.calls[action.batch]
                    assert all(request not in self.live for request, _, _ in action.batch.slices)
        self.check()

    def _end(self, request: Request, how: str) -> None:
        assert request.ended
        del self.live[request]  # KeyError: it ended twice
        self.ended[how] += 1

    def _send(self, batch: Batch) -> None:
        state = batch.state
        slices = batch.slices
        assert slices
        assert batch.rows == sum(stop - start for _, start, stop in slices)
        # Only equal keys are batched together, each request once, and only those that still wait for an answer.
        assert len({(request.model, request.key, request.mergeable) for request, _, _ in slices}) == 1
        assert len({request for request, _, _ in slices}) == len(slices)
        assert all(request in self.live and request.deadline > self.now for request, _, _ in slices)
        uncut = state.isolation.quarantined or batch.key == (state.name, ALONE)
        if uncut:
            assert len(slices) == 1
        else:
            isolation = state.isolation.keys.get(batch.key)
            assert (
                len(slices) == 1 or isolation is None or self._is_part(slices) or batch.rows <= (isolation.limit or 64)
            )
            largest = state.parameters.max_batch
            assert batch.rows <= min(
                bound for bound in (largest, state.limits.max_rows, state.limits.ceiling) if bound is not None
            )
        if batch.whole and self.sent[slices[0][0]]:
            request = slices[0][0]
            self.sent[request] = request.rows  # served anew: its rows that were answered before are void
            self.live[request] = []
        fresh = [portion for portion in slices if portion[1] == self.sent[portion[0]]]
        if fresh:
            # Rows go out in order and without gaps; only retries and parts of failed batches repeat rows.
            assert fresh == slices
            assert not state.passing or len(slices) == 1
            for request, start, stop in slices:
                assert 0 <= start < stop <= request.rows
                self.sent[request] = stop
            assert state.load.taken <= state.parameters.max_in_flight
        else:
            for request, _, stop in slices:
                assert stop <= self.sent[request]
        self.calls[batch] = self._fault(batch)

    def _is_part(self, slices: list[Slice]) -> bool:
        return any(start < self.sent[request] for request, start, _ in slices)

    def _fault(self, batch: Batch) -> Fault | None:
        """Return what the upstream makes of a call."""
        kinds = {request.payload for request, _, _ in batch.slices}
        if FaultKind.ITEM in kinds:
            return Fault(FaultKind.ITEM)
        if FaultKind.ROWS in kinds and not batch.whole:
            return Fault(FaultKind.ROWS)
        return Fault(FaultKind.SIZE) if batch.rows > LARGEST else None

    def _fails_alone(self, request: Request, kind: FaultKind) -> bool:
        """Whether a request that failed with this kind of fault fails without any other request too."""
        if kind is FaultKind.ITEM:
            return request.payload is FaultKind.ITEM
        if kind is FaultKind.SIZE:
            return request.rows > LARGEST
        return kind in {FaultKind.SHARED, FaultKind.TRANSPORT}

    def _answer(self, finish: Finish) -> None:
        complete = []
        for request, start, stop in finish.batch.slices:
            if request not in self.live:
                continue
            spans = self.live[request]
            spans.append((start, stop))
            if sum(end - begin for begin, end in spans) == request.rows:
                complete.append(request)
                # Every row exactly once.
                assert [row for begin, end in sorted(spans) for row in range(begin, end)] == list(range(request.rows))
        assert list(finish.requests) == complete
        for request in complete:
            self._end(request, "answered")
            self.batcher.model(request.model).counters.answered(request.arrived, request.due, self.now, ok=True)

    def check(self) -> None:
        """Compare the Batcher's account with the driver's."""
        batcher = self.batcher
        waiting = [request for request in self.live if request.taken < request.rows]
        assert batcher.queued_rows == sum(request.rows - request.taken for request in waiting)
        assert sum(each.load.size for each in batcher.models()) == sum(request.size for request in waiting)
        assert sum(state.load.tokens for state in batcher.models()) == sum(request.tokens for request in waiting)
        assert len(batcher._slots.in_flight) == len(self.calls)
        taken = [batch.state for batch in batcher._slots.in_flight if not batch.overdue]
        taken += [batch.state for batch in batcher._slots.all() if batch.aborted]
        assert batcher._slots.taken == len(taken)
        for state in batcher.models():
            assert state.load.taken == taken.count(state)
            assert state.load.overdue == sum(
                batch.overdue for batch in batcher._slots.in_flight if batch.state is state
            )
        for request in self.live:
            # All of it is taken also where it is to be served anew, behind another part in its slot.
            assert request.taken in {self.sent[request], request.rows}, "rows were skipped"
        assert all(any(request in self.live for request, _, _ in batch.slices) for batch in self.calls)
        for request in waiting:
            end = latest_end(request, batcher.model(request.model))
            assert end > self.now, "a late request waits for a stuck model"

    def check_totals(self) -> None:
        """Hits, misses and the living add up to arrivals; what was served twice stays within its budget."""
        self.sent = {request: self.sent[request] for request in self.live}
        stats = self.batcher.stats(self.now)
        hits = sum(model.hits for model in stats.models.values())
        misses = sum(sum(model.misses.values()) for model in stats.models.values())
        assert self.arrivals == sum(model.arrivals for model in stats.models.values())
        assert self.arrivals == hits + misses + len(self.live) == sum(self.ended.values()) + len(self.live)
        assert 0.0 <= stats.device_busy <= self.now + 1e-6
        for state in self.batcher.models():
            assert state.limits.again_rows <= EXTRA_ROWS + EXTRA_SHARE * state.limits.served_rows
            assert state.load.requests == sum(r.taken < r.rows and r.model == state.name for r in self.live)


FAILURES = (Fault(FaultKind.SHARED), Fault(FaultKind.TRANSPORT), Fault(FaultKind.TRANSPORT, retryable=True))
"""What may happen to any call, whatever requests are in it."""


def random_parameters(random: Random) -> Parameters:
    return Parameters(
        max_batch=random.choice((1, 2, 4, 8, 16)),
        max_wait=Duration(random.choice((0.0, 0.005, 0.05))),
        max_in_flight=random.choice((1, 1, 2, 4)),
        pass_through=random.random() < 0.15,
    )


def random_request(random: Random, now: float) -> dict[str, Any]:
    mergeable = random.random() < 0.9
    rows = random.choice((1, 1, 1, 2, 3, 7, 20))
    return {
        "key": random.choice(("k", "l")),
        "caller": random.choice((None, 1, 2, 3)),
        "model": random.choice(MODELS),
        "rows": rows,
        "due": now + 0.05,
        "deadline": now + random.choice((0.004, 0.03, 0.2, 10.0, inf)),
        "priority": random.choice((1, 2, 2, 3)),
        "size": random.choice((0, 100, 1000)),
        "tokens": rows * random.choice((0, 1, 30)),
        "mergeable": mergeable,
        # A model that answers with a wrong number of rows is not batched until a restart: seldom.
        "payload": random.choice((FaultKind.ITEM, *[None] * 30)) if random.random() < 0.99 else FaultKind.ROWS,
    }


def random_step(driver: Driver, random: Random) -> None:
    """Do one thing that can happen to a Batcher."""
    draw = random.random()
    if draw < 0.45:
        driver.arrive(**random_request(random, driver.now))
    elif draw < 0.70 and driver.calls:
        batch = random.choice(list(driver.calls))
        failure = random.choice(FAILURES) if random.random() < 0.05 else None
        driver.complete(batch, failure, stalled=random.random() < 0.05)
    elif draw < 0.90:
        driver.advance(random.choice((0.0, 0.0004, 0.002, 0.01, 0.1)))
    elif draw < 0.93:
        driver.skip(random.choice((0.001, 0.02, 0.3)))
    elif draw < 0.96 and driver.live:
        driver.cancel(random.choice(list(driver.live)))
    elif draw < 0.975:
        driver.configure(random_parameters(random), random.choice((None, *MODELS)))
    elif draw < 0.99:
        belief = random.choice((None, estimate(), estimate(0.001, 0.004), estimate(executors=4)))
        driver.learn(random.choice(MODELS), belief, shed_slo=random.random() < 0.5)
    elif draw < 0.997:
        driver.restarted()
    elif draw < 0.9985:
        driver.check_totals()
    else:
        driver.quiesce()
        driver.check_totals()
