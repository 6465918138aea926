"""Trials: requests that the sidecar sends itself through the Batcher to verify batches."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from carpool.batching.requests import Priority, Request, time_of
from carpool.tuning.exploration import TAKES
from carpool_sidecar.axis_verification.check import LEAST_ROWS, TRIAL_ROWS, Kind
from carpool_sidecar.axis_verification.delays import Delays
from carpool_sidecar.dispatch.waiters import Shadow, Waiter
from carpool_sidecar.http1.messages import size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from carpool.batching.batcher import Batcher
    from carpool.batching.model_state import ModelState
    from carpool.batching.requests import Action
    from carpool_sidecar.axis_verification.check import Check, Trial
    from carpool_sidecar.dispatch.answers import UpstreamAnswer
    from carpool_sidecar.dispatch.terms import Terms
    from carpool_sidecar.models import Entry, ModelTable
    from carpool_sidecar.protocols.common import Message, Parsed
    from carpool_sidecar.protocols.limits import Limits

BEFORE_ALL = -1_000_000
"""A priority above those of requests that have waited for long: until a trial is answered, none of them is batched."""

_PRIORITY = {
    Kind.MIXED: BEFORE_ALL,
    Kind.SAME: BEFORE_ALL,
    Kind.COPIES: Priority.HIGH,
    Kind.LIVE: Priority.NORMAL,
}


def harms(state: ModelState, bucket: int, rows: int, due: float, waited: float) -> bool:
    """Whether a batch of copies would make requests late that wait or come meanwhile, ``due`` seconds after arrival.

    ``waited``: for how many seconds the first of them waits already. Two have to be served after the copies.
    """
    return seconds_of(state, bucket, rows) > min(TAKES * due, due - waited - 2 * seconds_of(state, bucket, 1))


def seconds_of(state: ModelState, bucket: int, rows: int) -> float:
    """Return how long a batch is expected to take, as the first of its size if it is; ``inf`` if unknown."""
    if (estimate := state.belief.estimate) is None:
        return inf
    return time_of(estimate.of(bucket).times, rows) + state.first_batches.excess(bucket, rows)


def arrivals_at(batcher: Batcher) -> int:
    """Return the requests of all models that have arrived."""
    return sum(state.counters.arrivals for state in batcher.models())


def concurrency_of(state: ModelState) -> int:
    """Return the server concurrency: so many servers take the requests that come while one serves a batch."""
    estimate = state.belief.estimate
    return 1 if estimate is None else estimate.executors


class Trials:
    """The verifier's interface to the Batcher. ``do`` executes the Batcher's actions.

    ``largest(model)`` returns the most rows that any parameters can give a batch.
    """

    def __init__(
        self,
        batcher: Batcher,
        models: ModelTable,
        terms: Terms,
        *,
        clock: Callable[[], float],
        largest: Callable[[str], int],
        do: Callable[[Iterable[Action]], None],
    ) -> None:
        self._batcher = batcher
        self._models = models
        self._terms = terms
        self._clock = clock
        self._largest = largest
        self._do = do
        self._delays = Delays()

    @property
    def limits(self) -> Limits:
        """Limits for reading answers."""
        return self._terms.limits

    def carry(
        self, entry: Entry, trial: Trial, message: Message, answered: Callable[[UpstreamAnswer | None], None]
    ) -> None:
        """Send a trial through the Batcher, as a request without a caller that is not counted in metrics."""
        state = self._batcher.model(entry.lane)
        arrivals = arrivals_at(self._batcher) if trial.kind is Kind.COPIES else 0

        def ended(answer: UpstreamAnswer | None) -> None:
            if trial.kind is Kind.COPIES and answer is not None:
                self._delays.add((arrivals_at(self._batcher) - arrivals) / concurrency_of(state), seconds)
            self._models.left(entry)
            answered(answer)

        now = self._clock()
        parsed = trial.portions[0].parsed
        bucket = 0 if parsed.fit is None else parsed.fit.bucket
        seconds = seconds_of(state, bucket, trial.rows)
        entry.waiters += 1
        shadow = Shadow(message, trial.facts, ended)
        request = Request(
            key=parsed.key,
            arrived=now,
            due=now + self._terms.due,
            rows=trial.rows,
            deadline=now + self._terms.timeout,
            model=entry.lane,
            priority=_PRIORITY[trial.kind],
            size=size_of(message.parts),
            bucket=bucket,
            mergeable=False,
            shadow=True,
            payload=Waiter(shadow, entry, state.counters, trial.facts, parsed, None),
        )
        # In an overload that only batches can end, it would be refused again and again.
        request.exempt = trial.kind in {Kind.MIXED, Kind.SAME}
        self._do(self._batcher.arrive(request, now))

    def cap(self, entry: Entry) -> int:
        """Return the most rows that a batch of a model may have, independent of the tuner's present parameters."""
        limits = self._batcher.model(entry.lane).limits
        return min(bound for bound in (self._largest(entry.lane), limits.max_rows, limits.ceiling) if bound is not None)

    def quick(self, entry: Entry) -> int:
        """Return the rows of a trial: as many as take half the SLO by the latency model, if known; at least 4."""
        estimate, rows = self._batcher.model(entry.lane).belief.estimate, TRIAL_ROWS
        while estimate is not None and rows > LEAST_ROWS and time_of(estimate.times, rows) > self._terms.due / 2:
            rows -= 1
        return rows

    def delays(self, entry: Entry, parsed: Parsed[Any], rows: int) -> bool:
        """Whether a batch with the rows of a request repeated would delay others for too long, or too many others."""
        bucket, state = 0 if parsed.fit is None else parsed.fit.bucket, self._batcher.model(entry.lane)
        now = self._clock()
        allowed = self._delays.allow(arrivals_at(self._batcher), now)
        return not allowed or harms(state, bucket, rows, self._terms.due, self._batcher.waited(state, now))

    def served(self, entry: Entry) -> int:
        """Return the number of rows that a model has served."""
        return self._batcher.model(entry.lane).limits.served_rows

    def quarantine(self, entry: Entry, *, on: bool) -> None:
        """Stop merging requests of a model, waiting ones included; or allow it again."""
        isolation = self._batcher.model(entry.lane).isolation
        isolation.quarantined, isolation.verifies = on, False

    def merge(self, entry: Entry, check: Check) -> None:
        """Merge those of a model's requests that wait to be sent alone because ``check`` had not ended."""

        def key_of(request: Request) -> bytes | None:
            waiter: Waiter = request.payload
            # Padding takes memory that was not reserved for these.
            return check.key_of(waiter.parsed) if waiter.check is check and waiter.parsed.fit is None else None

        self._do(self._batcher.merge(entry.lane, key_of, self._clock()))
