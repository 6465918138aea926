"""The Batcher's state of one model."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool.batching.batch_limits import BatchLimits
from carpool.batching.counters import Counters
from carpool.batching.first_batches import FirstBatches
from carpool.batching.first_calls import FirstCalls
from carpool.batching.isolation import Isolation
from carpool.batching.recent_keys import BatchableShare
from carpool.batching.requests import Batch, Estimate, time_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from carpool.policy.parameters import Parameters

REFUTED = 1.5
"""A batch that takes so many times its upper time has waited: the assumed server concurrency does not exist."""


class Belief:
    """The estimate of a model's service time, and how it is used."""

    __slots__ = ("_refuted", "estimate", "shed_slo")

    def __init__(self) -> None:
        self.estimate: Estimate | None = None
        self.shed_slo = False
        """Whether requests are refused that would miss the SLO, or only those that would miss their deadline."""
        self._refuted = (0, 0)
        """The server concurrency that was refuted, and the measured part of it."""

    def learn(self, estimate: Estimate | None) -> None:
        """Plan with an estimate from now on, without the concurrency that was already refuted."""
        self.estimate = estimate
        if estimate is not None and estimate.assumed:
            known = estimate.executors - estimate.assumed
            if self._refuted == (estimate.executors, known):
                self.estimate = estimate.computed(known)

    def check(self, batch: Batch, now: float) -> None:
        """Stop assuming server concurrency beyond the measured one when a batch had to wait for another.

        Samples show only after dozens of batches whether there are four servers or one. By then every request that
        four servers could have answered in time has been admitted, and was late.
        """
        estimate = self.estimate
        if estimate is None or not estimate.assumed:
            return
        known = estimate.executors - estimate.assumed
        upper = time_of(estimate.of(batch.bucket).upper, batch.rows)
        if batch.in_flight > known and now - batch.dispatched > REFUTED * upper:
            self._refuted = (estimate.executors, known)
            self.estimate = estimate.computed(known)

    def forget(self) -> None:
        """Forget the estimate: the server was replaced."""
        self.estimate = None
        self._refuted = (0, 0)


class Load:
    """A model's load: what waits in all its queues, and what is with the upstream."""

    __slots__ = ("gave_back", "overdue", "overdue_ended", "requests", "rows", "size", "taken", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.rows = 0
        self.size = 0
        self.tokens = 0
        self.taken = 0
        """Slots taken: by calls under way that are not overdue, and by abandoned ones that the upstream computes."""
        self.overdue = 0
        """Calls under way that gave their slots back, since they take far longer than forecast."""
        self.overdue_ended = -inf  # the last one; batches sent before may have waited for it in the upstream
        self.gave_back = 0
        """All calls that ever gave their slots back."""


class ModelState:
    """One model: its parameters, estimate, faults, slots and counters."""

    __slots__ = (
        "batchable", "belief", "counters", "first_batches", "first_calls", "isolation", "limits", "load", "name",
        "parameters", "passing", "slots",
    )  # fmt: skip

    def __init__(self, name: str, parameters: Parameters, undecided: int = 0) -> None:
        self.name = name
        self.first_calls = FirstCalls(undecided) if undecided else None
        self.passing = True
        self.configure(parameters, undecided)
        self.belief = Belief()
        self.limits = BatchLimits()
        self.first_batches = FirstBatches()
        self.isolation = Isolation()
        self.batchable = BatchableShare()
        self.load = Load()
        self.counters = Counters()

    def configure(self, parameters: Parameters, undecided: int = 0) -> None:
        """Use parameters from now on. ``undecided``: they are not decided yet, and first calls go on."""
        self.parameters = parameters
        if undecided and (first := self.first_calls) is not None:
            first.most, first.allowed = undecided, min(first.allowed, undecided)
            self.slots = first.allowed
            return
        self.first_calls = None
        self.slots = parameters.max_in_flight
        """Calls that may be with the upstream at once."""
        self.passing = parameters.pass_through
        """Whether requests are now sent one by one; a backlog ends that until it is gone."""

    @property
    def in_force(self) -> Parameters:
        """The parameters that batches are made with: ``parameters``, as limited by the first calls."""
        if self.first_calls is None:
            return self.parameters
        return replace(self.parameters, max_in_flight=self.slots, pass_through=self.passing)

    @property
    def cap(self) -> int:
        """Rows that a batch may have now."""
        cap, limits = self.parameters.max_batch, self.limits
        if limits.max_rows is not None and limits.max_rows < cap:
            cap = limits.max_rows
        if limits.ceiling is not None and limits.ceiling < cap:
            cap = limits.ceiling
        return cap

    @property
    def free(self) -> bool:
        """Whether a slot is free."""
        return self.load.taken < self.slots

    @property
    def stuck(self) -> bool:
        """Whether its calls are not answered, so that none of its waiting requests reaches the upstream."""
        return self.load.overdue > 0 and not self.free

    def rest(self) -> None:
        """Pass requests through again if that is set: once no call is under way, the backlog that ended it is gone."""
        if not (self.passing or self.load.taken or self.load.requests) and self.first_calls is None:
            self.passing = self.parameters.pass_through

    def follow(self, first: FirstCalls) -> None:
        """Have as many calls at once, and batches, as the first calls show to be right."""
        self.slots, self.passing = first.allowed, not first.merges or first.shares < 2

    def served(self, key: Hashable, rows: int) -> None:
        """Count the success of a batch."""
        if self.isolation.keys:
            self.isolation.succeeded(key, rows, self.cap)
        self.limits.served(rows, self.parameters.max_batch)

    def forget(self) -> None:
        """Forget what was learned of the model: its server was replaced."""
        self.belief.forget()
        self.limits.forget()
        self.first_batches = FirstBatches()
        self.isolation.forget()
