"""The Batcher's input and output: requests, estimates, batches, faults, and the actions to do."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import IntEnum, StrEnum
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from msgspec.structs import replace

from carpool.policy.plain import Frozen, FrozenCamel

if TYPE_CHECKING:
    from carpool.batching.model_state import ModelState


class Priority(IntEnum):
    """Classes, most urgent first. A request without one is ``NORMAL``."""

    HIGH = 1
    NORMAL = 2
    LOW = 3


class Request:
    """One caller's request while it waits and is served.

    ``key``: only requests with equal keys are batched together. ``rows`` along the batch axis. ``size`` in bytes,
    ``tokens`` in payload elements. ``arrived``, ``due`` (arrival plus the SLO's target) and ``deadline`` (when the
    caller stops waiting) are seconds of the clock of every ``now``. ``mergeable`` requests may be merged and split;
    others are sent alone, whole. ``caller``: its sender, where known. A ``shadow`` is the driver's own request, or a
    job in spare capacity: it takes a slot like any other, and is not counted. ``payload`` belongs to the driver.
    """

    __slots__ = (
        "arrived", "bucket", "caller", "deadline", "due", "ended", "exempt", "hold_until", "key", "mergeable", "model",
        "payload", "priority", "rows", "shadow", "sheddable", "size", "taken", "tokens", "unserved",
    )  # fmt: skip

    def __init__(
        self,
        *,
        key: Hashable,
        arrived: float,
        due: float,
        rows: int = 1,
        deadline: float = inf,
        model: str = "",
        priority: int = Priority.NORMAL,
        size: int = 0,
        tokens: int = 0,
        bucket: int = 0,
        mergeable: bool = True,
        caller: Hashable = None,
        shadow: bool = False,
        payload: Any = None,  # noqa: ANN401 - opaque here
    ) -> None:
        self.key = key
        self.arrived = arrived
        self.due = due
        self.rows = rows
        self.deadline = deadline
        self.model = model
        self.priority = priority
        self.size = size
        self.tokens = tokens
        self.bucket = bucket
        self.mergeable = mergeable
        self.caller = caller
        self.shadow = shadow
        self.payload = payload
        self.hold_until = arrived
        """When it stops waiting for others; set on admission, later only moved to an earlier time."""
        self.exempt = False
        """Whether it is never shed: at an idle upstream, set on admission. Set before, no full queue refuses it."""
        self.sheddable = False
        """Whether it could have met its due time alone, so that missing it may shed it. Set when shedding begins, or on
        admission from then on."""
        self.taken = 0
        """Rows handed to the upstream so far."""
        self.unserved = rows
        """Rows not answered yet."""
        self.ended = False


Slice: TypeAlias = tuple[Request, int, int]
"""Rows ``start:stop`` of a request, in one batch."""


class Batch:
    """Rows that go to the upstream in one call. As an action: send it, then report it ``complete``."""

    __slots__ = (
        "aborted", "attempt", "bucket", "cold", "completed_before", "dispatched", "finish", "halves", "in_flight",
        "key", "number", "overdue", "overdue_at", "rest", "rows", "slices", "state",
    )  # fmt: skip

    def __init__(self, state: ModelState, key: Hashable, bucket: int, slices: list[Slice], rows: int) -> None:
        self.state = state
        self.key = key
        self.bucket = bucket
        self.slices = slices
        self.rows = rows
        self.number = 0
        """Counts dispatches of this Batcher."""
        self.dispatched = 0.0
        self.in_flight = 1
        """Batches in flight at its dispatch, itself included."""
        self.completed_before = 0
        """Calls that had ended by then."""
        self.finish = inf
        """Forecast; ``inf`` while its service time is unknown."""
        self.overdue = False
        """Whether it gave its slot back because it takes far longer than forecast."""
        self.overdue_at = inf
        self.cold = False
        """Whether it is the first of its size."""
        self.aborted = False
        self.attempt = 1
        self.rest: list[Batch] = []
        """What its slot serves next: the remaining parts of a batch that failed."""
        self.halves: Halves | None = None
        """The pair of halves that it belongs to."""

    @property
    def model(self) -> str:
        """Name of the model it calls."""
        return self.state.name

    @property
    def whole(self) -> bool:
        """Whether it is one request, entire: its original bytes can be sent."""
        return len(self.slices) == 1 and self.slices[0][2] - self.slices[0][1] == self.slices[0][0].rows

    def answered(self) -> list[Request]:
        """Count its rows as answered; return the requests that are complete with them."""
        finished = []
        for request, start, stop in self.slices:
            if not request.ended:
                request.unserved -= stop - start
                if not request.unserved:
                    request.ended = True
                    finished.append(request)
        return finished


class Halves:
    """The two halves of a batch that failed: if both succeed, the batch was too large."""

    __slots__ = ("_succeeded", "largest", "rows")

    def __init__(self, rows: int, largest: int) -> None:
        self.rows = rows
        """Rows of the batch that failed."""
        self.largest = largest
        """Rows of the larger half."""
        self._succeeded = 0

    def succeed(self) -> bool:
        """Note that one half succeeded; return whether both have."""
        self._succeeded += 1
        return self._succeeded == 2


class FaultKind(StrEnum):
    """The cause of a failed batch, which decides what is done with it."""

    ITEM = "item"
    """One request: bisect."""
    SIZE = "size"
    """The batch is too large: halve it, through a request if need be; lower the ceiling when both halves succeed."""
    SHARED = "shared"
    """All requests alike: all get the answer."""
    ROWS = "rows"
    """The answer has the wrong number of rows: the model can't be batched."""
    UNREADABLE = "unreadable"
    """The answer can't be read and split: bisect; a request that was sent alone gets the answer unchanged."""
    TRANSPORT = "transport"
    """The upstream: never bisected; retried once if no answer began and the policy allows it."""


class Fault(Frozen, frozen=True):
    """Why a batch failed. ``detail`` belongs to the driver and comes back with the requests."""

    kind: FaultKind
    retryable: bool = False
    detail: Any = None


class Refused(StrEnum):
    """Why a request was not served."""

    QUEUE_FULL = "queue-full"
    LATE = "predicted-late"
    """It is forecast to be late; answers that came late are counted separately."""
    EXPIRED = "expired"
    """Its deadline passed."""
    DRAINING = "draining"


class Refusal(Frozen, frozen=True):
    """Action: answer the request with a refusal. ``retry_after``: forecast seconds until the queue is served."""

    request: Request
    reason: Refused
    retry_after: float = 0.0


class Finish(Frozen, frozen=True):
    """Action: the batch succeeded. Split its answer among its requests; ``requests`` are now complete."""

    batch: Batch
    requests: Sequence[Request]


class Failure(Frozen, frozen=True):
    """Action: answer ``requests`` with the fault; ``unresolved``: not sent again, so innocents may be among them."""

    requests: Sequence[Request]
    fault: Fault
    unresolved: bool = False


class Abort(Frozen, frozen=True):
    """Action: no caller waits for this batch any more; cancel the call and don't report it ``complete``."""

    batch: Batch


Action: TypeAlias = Batch | Finish | Failure | Refusal | Abort


ROUNDING: Final = 1e-9
"""Seconds by which sums of floats may miss a due time."""


def seldom_exceeded(noise: float) -> float:
    """Return the factor on a mean time that single batches seldom exceed: two standard deviations, ``noise`` each.

    If more requests wait than fit in a batch, each takes another's place, and half of those that are just in time by
    the mean are late: the factor is used. If no other request needs the place, the mean decides.
    """
    return 1 + 2 * noise


class Estimate(FrozenCamel, frozen=True, rename="camel"):
    """The estimate of a model's service time.

    ``times[b]`` is the seconds a batch of b rows takes (index 0 unused), ``upper[b]`` what it seldom exceeds, used
    where being late costs a request its SLO; ``executors`` is the server concurrency; ``noise`` is the coefficient of
    variation of single batches. ``buckets`` has the same for each length bucket, where there are several: a row of
    eight times the length takes eight times as long.
    """

    times: "tuple[float, ...]"  # noqa: UP037 - see Frozen
    upper: "tuple[float, ...]"  # noqa: UP037
    executors: int = 1
    noise: float = 0.0
    assumed: int = 0
    """How much of the server concurrency is assumed, not measured."""
    buckets: "dict[int, Estimate]" = {}  # noqa: RUF012, UP037

    def of(self, bucket: int | None) -> Estimate:
        """Return the estimate of one length bucket; of an unknown one, and of several together, that of all."""
        return self.buckets.get(bucket, self) if bucket is not None else self

    def computed(self, executors: int, assumed: int = 0) -> Estimate:
        """Return the same with another server concurrency."""
        buckets = {bucket: each.computed(executors, assumed) for bucket, each in self.buckets.items()}
        return replace(self, executors=executors, assumed=assumed, buckets=buckets)

    def flat_beyond(self, measured: int, target: float) -> Estimate:
        """Return the same with constant times above ``measured``, if the line puts all of them above ``target``.

        With the line, all requests in such a batch would be late and refused: no larger size could ever be measured.
        """
        buckets = {bucket: each.flat_beyond(measured, target) for bucket, each in self.buckets.items()}
        times = self.times
        if measured + 1 < len(times) and times[measured + 1] > target:
            times = (*times[: measured + 1], *[self.upper[measured]] * (len(times) - measured - 1))
        return replace(self, times=times, buckets=buckets)


def time_of(table: tuple[float, ...], rows: int) -> float:
    """Service time of ``rows``; beyond the table along its last step."""
    if rows < len(table):
        return table[rows]
    slope = max(table[-1] - table[-2], 0.0) if len(table) > 2 else table[-1]
    return table[-1] + slope * (rows - len(table) + 1)
