"""The digital twin: an event heap that drives the real Batcher against a simulated device.

Time is virtual, so an hour takes seconds. Arrivals are an argument, and with equal seeds a replica's k-th batch has the
same noise under all parameters: two settings do not differ by chance (common random numbers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from heapq import heappop, heappush, heapreplace
from math import inf, log, sqrt
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from carpool.batching.batcher import Batcher
from carpool.batching.counters import Stats
from carpool.batching.requests import (
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
    seldom_exceeded,
    time_of,
)
from carpool.policy.parameters import Parameters
from carpool.policy.plain import Frozen
from carpool.policy.spec import Admission
from carpool.simulation.outcome import ENDS, End, Outcome, Setting

if TYPE_CHECKING:
    from carpool.batching.model_state import ModelState

ServiceSeconds: TypeAlias = Callable[[int, int], float]
"""Seconds that a batch takes at a free server, by (rows, length bucket)."""


def linear(fixed: float, per_row: float) -> ServiceSeconds:
    """Return the batch latency fixed + per_row * rows seconds, the same in every length bucket."""
    return lambda rows, bucket: fixed + per_row * rows  # noqa: ARG005 - lengths play no part


def table(times: Sequence[float]) -> ServiceSeconds:
    """Return the batch latency times[rows] seconds (index 0 unused), beyond the table along its last step."""
    known = tuple(times)
    return lambda rows, bucket: time_of(known, rows)  # noqa: ARG005 - lengths play no part


class Noise(StrEnum):
    """Distribution of a batch's service time around its mean."""

    GAMMA = "gamma"
    LOGNORMAL = "lognormal"


class Device(Frozen, frozen=True):
    """The true upstream; the Batcher only has an ``Estimate`` of it.

    Batches beyond ``executors`` wait their turn there, first come, first served. All times in seconds.
    """

    times: ServiceSeconds
    executors: int = 1
    cv: float = 0.0
    """Coefficient of variation of single batches around ``times``."""
    noise: Noise = Noise.GAMMA
    drift: tuple[tuple[float, float], ...] = ()
    """(from when, factor on ``times``), ascending; a batch has the last factor that began before it started."""
    cold: float = 1.0
    """Factor on the first batch of each (rows, bucket)."""
    largest: int | None = None
    """Rows above which a batch fails for its size."""
    stalls: tuple[tuple[float, float], ...] = ()
    """(from when, for how long) the sidecar's host pauses, ascending and not overlapping: the device goes on, but
    arrivals, answers and timers are only handled afterwards."""

    def estimate(self, largest: int = 64, bucket: int = 0) -> Estimate:
        """Return the estimate of a perfect profile of this device before any drift, up to ``largest`` rows."""
        times = tuple(self.times(max(rows, 1), bucket) for rows in range(largest + 1))
        return Estimate(times, tuple(value * seldom_exceeded(self.cv) for value in times), self.executors, self.cv)


class Arrival(NamedTuple):
    """One request to come. Durations in seconds, counted from ``time``."""

    time: float
    rows: int = 1
    length: int = 0
    priority: int = Priority.NORMAL
    deadline: float = inf
    patience: float = inf
    """The caller leaves after this."""
    poisoned: bool = False
    """Makes every batch that it is in fail, and fails alone."""
    key: int = 0
    """Only requests of equal keys, and of one length bucket, are batched."""
    short: bool = False
    """The answer to a batch with it has one row too few; alone it is answered correctly."""
    hangs: bool = False
    """A batch with it is never answered, and does not occupy the device."""
    model: str = ""
    caller: int | None = None


Hook: TypeAlias = Callable[[float, list[Stats]], list[Setting] | None]
"""Called with the time and each replica's counters; returns one setting for all replicas, one for each, or none."""


class Dispatcher(Protocol):
    """The interface of a replica's Batcher, or of a rule in its place.

    Its batches and its ``model("")`` have the counters for answers.
    """

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Admit a request or refuse it; start what is due."""

    def poll(self, now: float) -> list[Action]:
        """Do what time alone makes due."""

    def complete(self, batch: Batch, now: float, *, fault: Fault | None = None, stalled: bool = False) -> list[Action]:
        """Take a batch's outcome."""

    def cancel(self, request: Request, now: float) -> list[Action]:
        """Forget a request whose caller has left."""

    def configure(self, parameters: Parameters, now: float) -> list[Action]:
        """Replace the parameters."""

    def learn(self, model: str, estimate: Estimate | None, now: float, *, shed_slo: bool = False) -> list[Action]:
        """Plan with an estimate of the service time."""

    def wake_at(self) -> float:
        """When ``poll`` is next needed; ``inf``: not before another event."""

    def model(self, name: str) -> ModelState:
        """Return a model's state, with the counters of its answers."""

    def stats(self, now: float) -> Stats:
        """Snapshot the counters."""


_HIT, _LATE, _FAILED, _CANCELLED = (ENDS.index(end) for end in (End.HIT, End.LATE, End.FAILED, End.CANCELLED))
_REFUSED = {
    Refused.LATE: ENDS.index(End.SHED),
    Refused.QUEUE_FULL: ENDS.index(End.QUEUE_FULL),
    Refused.EXPIRED: ENDS.index(End.EXPIRED),
}


class Simulation:
    """One load on one device per replica, from the first arrival until the last request has ended.

    ``arrivals``: times (seconds, ascending), or ``Arrival`` tuples, which may be cut short from the right; one kind
    throughout. ``slo``: seconds from arrival to due time. ``estimate``: the Batchers' estimate at the start
    (``None``: none, and then nothing is held or shed). ``bucket`` maps a length to its bucket; only equal buckets
    merge. Requests without a deadline have ``admission.timeout``. ``seconds``: how long hooks are called,
    at least until the last arrival.

    ``device``: one kind for all replicas, or one for each; all have the host, and so the ``stalls``, of the first. An
    arrival goes to the replica with the fewest requests. ``dispatcher`` makes what replaces a replica's Batcher;
    without it, the Batcher gets ``parameters`` and ``admission``.
    """

    def __init__(
        self, arrivals: Iterable[float | tuple[float, ...]], device: Device | Sequence[Device], *, slo: float,
        parameters: Parameters | None = None, estimate: Estimate | None = None, shed_slo: bool = False,
        dispatcher: Callable[[], Dispatcher] | None = None, admission: Admission | None = None,
        bucket: Callable[[int], int] = lambda length: length, replicas: int = 1, seed: int = 0, seconds: float = 0.0,
    ) -> None:  # fmt: skip
        self._load = _Load(arrivals, slo, (admission or Admission()).seconds(slo), bucket)
        self._devices = [device] * replicas if isinstance(device, Device) else [*device]
        self._parameters = parameters or Parameters()
        self._seed = seed
        self._seconds = max(seconds, self._load.times[-1] if self._load.times else 0.0)
        self._hooks: list[tuple[float, Hook]] = []

        def batcher() -> Dispatcher:
            made = dispatcher() if dispatcher else Batcher(self._parameters, admission=admission)
            for model in self._load.models:
                made.learn(model, estimate, 0.0, shed_slo=shed_slo)
            return made

        self._batcher = batcher

    def every(self, seconds: float, hook: Hook) -> Simulation:
        """Call ``hook`` every ``seconds`` during the run, and apply the settings it returns. Returns itself."""
        self._hooks.append((seconds, hook))
        return self

    def run(self) -> Outcome:
        """Simulate. The same arguments give the same outcome, to the last bit."""
        outcome = Outcome(self._load.times, self._seconds, self._parameters)
        replicas = [
            _Replica(index, self._batcher(), device, outcome, self._seed) for index, device in enumerate(self._devices)
        ]
        run = _Run(self._load, outcome, replicas, Random(f"{self._seed} balancer"))
        for hook in self._hooks:
            run.schedule(hook[0], replicas[0], hook)
        run.play(iter(self._devices[0].stalls))
        ended = max([self._seconds, *(replica.busy_until for replica in replicas)])
        outcome.final = [replica.batcher.stats(ended) for replica in replicas]
        return outcome


class _Load:
    """The requests to come, by number."""

    __slots__ = ("_bucket", "_timeout", "details", "models", "slo", "times")

    def __init__(
        self, arrivals: Iterable[float | tuple[float, ...]], slo: float, timeout: float, bucket: Callable[[int], int]
    ) -> None:
        listed = list(arrivals)
        self.details: list[Arrival] | None = None
        """By number; ``None``: all requests are alike."""
        if listed and isinstance(listed[0], tuple):
            self.details = [Arrival(*each) for each in listed]  # type: ignore[misc] # one kind throughout
            self.times = [each.time for each in self.details]
        else:
            self.times = listed  # type: ignore[assignment] # one kind throughout
        self.models = {"", *(each.model for each in self.details or ())}
        self.slo = slo
        self._timeout = timeout
        self._bucket = bucket

    def request(self, number: int, detail: Arrival | None, now: float) -> Request:
        """Make the request that arrives ``now``."""
        due = now + self.slo
        if detail is None:
            return Request(key=0, arrived=now, due=due, deadline=now + self._timeout, payload=number)
        bucket = self._bucket(detail.length)
        return Request(
            key=(bucket, detail.key) if detail.key else bucket, arrived=now, due=due, rows=detail.rows,
            deadline=now + min(detail.deadline, self._timeout), priority=detail.priority,
            tokens=detail.length * detail.rows, bucket=bucket, model=detail.model, caller=detail.caller, payload=number,
        )  # fmt: skip


class _Run:
    """The event heap: a batch's end, a caller's leaving, or a hook, each with its time and replica."""

    __slots__ = ("_balance", "_heap", "_load", "_outcome", "_replicas", "_serial", "_wakes")

    def __init__(self, load: _Load, outcome: Outcome, replicas: list[_Replica], balance: Random) -> None:
        self._load = load
        self._outcome = outcome
        self._replicas = replicas
        self._balance = balance
        self._heap: list[tuple[float, int, _Replica, Batch | Request | tuple[float, Hook]]] = []
        self._serial = 0
        self._wakes = [inf] * len(replicas)

    def schedule(self, at: float, replica: _Replica, what: Batch | Request | tuple[float, Hook]) -> None:
        """Schedule an event; a hook not after the run's last second."""
        if not isinstance(what, tuple) or at <= self._outcome.seconds:
            self._serial += 1
            heappush(self._heap, (at, self._serial, replica, what))

    def play(self, stalls: Iterator[tuple[float, float]]) -> None:
        """Handle all events in order; at equal times first the heap's events, then a wake, then an arrival."""
        heap, wakes, replicas, times = self._heap, self._wakes, self._replicas, self._load.times
        stall = next(stalls, (inf, 0.0))
        resumed = 0.0  # when the host's last pause ended
        number = 0
        while True:
            next_event = heap[0][0] if heap else inf
            next_wake = min(wakes)
            at = min(next_event, next_wake, times[number] if number < len(times) else inf)
            if at == inf:
                return
            while at >= stall[0]:
                resumed = stall[0] + stall[1]
                stall = next(stalls, (inf, 0.0))
            now = max(at, resumed)
            if at == next_event:
                _, _, replica, what = heappop(heap)
                actions = self._happens(replica, what, at, now, resumed)
            elif at == next_wake:
                replica = replicas[wakes.index(at)]
                actions = replica.batcher.poll(now)
            else:
                replica = replicas[0] if len(replicas) == 1 else self._choose()
                actions = self._arrives(replica, number, at, now)
                number += 1
            if actions:
                self._carry_out(replica, actions, now)
            wakes[replica.index] = replica.batcher.wake_at()

    def _happens(
        self, replica: _Replica, what: Batch | Request | tuple[float, Hook], at: float, now: float, resumed: float
    ) -> list[Action]:
        if isinstance(what, Batch):
            return replica.batcher.complete(what, now, fault=replica.fault(what), stalled=what.dispatched < resumed)
        if isinstance(what, Request):
            if what.ended:
                return []
            replica.outstanding -= 1
            self._outcome.ends[what.payload] = _CANCELLED
            return replica.batcher.cancel(what, now)
        self.schedule(at + what[0], replica, what)
        settings = what[1](now, [each.batcher.stats(now) for each in self._replicas]) or ()
        for each, setting in zip(self._replicas, settings * len(self._replicas), strict=False):
            self._outcome.changes.append((now, each.index, setting))
            state = each.batcher.model("")
            first, is_same = state.first_calls, setting.parameters == state.parameters
            if setting.decided and (first is None or first.merges or not is_same):
                self._carry_out(each, each.batcher.configure(setting.parameters, now), now)
            self._carry_out(each, each.batcher.learn("", setting.estimate, now, shed_slo=setting.shed_slo), now)
            self._wakes[each.index] = each.batcher.wake_at()
        return []

    def _arrives(self, replica: _Replica, number: int, at: float, now: float) -> list[Action]:
        replica.outstanding += 1
        detail = None if self._load.details is None else self._load.details[number]
        request = self._load.request(number, detail, now)
        if detail is not None:
            if detail.poisoned or detail.short or detail.hangs:
                replica.harmful[request] = detail
            if detail.patience < inf:
                self.schedule(at + detail.patience, replica, request)
        return replica.batcher.arrive(request, now)

    def _carry_out(self, replica: _Replica, actions: list[Action], now: float) -> None:
        outcome, times, slo = self._outcome, self._load.times, self._load.slo
        for action in actions:
            if isinstance(action, Batch):
                if not replica.hangs(action):
                    self.schedule(replica.serve(action, now), replica, action)
            elif isinstance(action, Finish):
                answered = action.batch.state.counters.answered
                replica.outstanding -= len(action.requests)
                for request in action.requests:
                    number = request.payload
                    arrived = times[number]
                    outcome.latencies[number] = now - arrived
                    # Added up as the Batcher does: the difference could make a request late by the last bit.
                    outcome.ends[number] = _HIT if now <= arrived + slo else _LATE
                    answered(request.arrived, request.due, now, ok=True)
            elif isinstance(action, Refusal):
                replica.outstanding -= 1
                outcome.ends[action.request.payload] = _REFUSED[action.reason]
            elif isinstance(action, Failure):
                replica.outstanding -= len(action.requests)
                for request in action.requests:
                    outcome.ends[request.payload] = _FAILED
                    counters = replica.batcher.model(request.model).counters
                    counters.answered(request.arrived, request.due, now, ok=False)

    def _choose(self) -> _Replica:
        least = min(replica.outstanding for replica in self._replicas)
        replicas = [replica for replica in self._replicas if replica.outstanding == least]
        return replicas[int(self._balance.random() * len(replicas))]


class _Replica:
    """One dispatcher and its device: how long batches take there, and which of them fail."""

    __slots__ = (
        "_device", "_free", "_means", "_noise", "_outcome", "batcher", "busy_until", "harmful", "index", "outstanding",
    )  # fmt: skip

    def __init__(self, index: int, batcher: Dispatcher, device: Device, outcome: Outcome, seed: int) -> None:
        self.index = index
        self.batcher = batcher
        self.outstanding = 0
        self.busy_until = 0.0
        self.harmful: dict[Request, Arrival] = {}
        """Requests that affect the batches they are in."""
        self._device = device
        self._outcome = outcome
        self._free = [0.0] * device.executors
        """Heap: when each of the device's places is free."""
        self._noise = Random(f"{seed} noise {index}")
        self._means: dict[tuple[int, int], float] = {}
        """Seconds by (rows, bucket), of those served before."""

    def hangs(self, batch: Batch) -> bool:
        """Whether a batch is never answered."""
        return any(self.harmful[each].hangs for each, _, _ in batch.slices if each in self.harmful)

    def serve(self, batch: Batch, now: float) -> float:
        """Take a batch at ``now`` and return when its answer is complete."""
        device = self._device
        size = (batch.rows, batch.bucket)
        is_first = size not in self._means
        if is_first:
            self._means[size] = device.times(batch.rows, batch.bucket)
        seconds = self._means[size]
        start = max(now, self._free[0])
        if device.cv:
            if device.noise is Noise.GAMMA:
                seconds *= self._noise.gammavariate(device.cv**-2, device.cv**2)
            else:
                spread = sqrt(log(1 + device.cv**2))
                seconds *= self._noise.lognormvariate(-(spread**2) / 2, spread)
        for since, factor in reversed(device.drift):
            if start >= since:
                seconds *= factor
                break
        if is_first:
            seconds *= device.cold
        end = start + seconds
        heapreplace(self._free, end)
        outcome = self._outcome
        outcome.batch_dispatched.append(now)
        outcome.batch_busy.append(max(0.0, end - max(now, self.busy_until)))
        outcome.batch_seconds.append(seconds)
        outcome.batch_rows.append(batch.rows)
        self.busy_until = max(self.busy_until, end)
        return end

    def fault(self, batch: Batch) -> Fault | None:
        """Return what is wrong with a batch's answer."""
        largest = self._device.largest
        if largest is not None and batch.rows > largest:
            return Fault(FaultKind.SIZE)
        if self.harmful:
            harmful = [self.harmful[each] for each, _, _ in batch.slices if each in self.harmful]
            if any(each.poisoned for each in harmful):
                return Fault(FaultKind.ITEM)
            if not batch.whole and any(each.short for each in harmful):
                return Fault(FaultKind.ROWS)
        return None
