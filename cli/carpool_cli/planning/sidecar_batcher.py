"""A Batcher as a sidecar drives it by default: it begins with first calls, and batches of copies measure sizes.

Both are the sidecar's, and not in the tuner: without them, virtual time would show a sidecar that nobody runs.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from carpool.batching.batcher import Batcher
from carpool.batching.requests import Action, Batch, Estimate, Failure, Fault, Finish, Priority, Refusal, Request
from carpool_sidecar.axis_verification.check import TRIAL_ROWS, TRIALS
from carpool_sidecar.axis_verification.delays import Delays
from carpool_sidecar.axis_verification.record import Record
from carpool_sidecar.dispatch.trials import arrivals_at, concurrency_of, harms, seconds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.batching.model_state import ModelState
    from carpool.policy.parameters import Parameters
    from carpool.policy.spec import Admission


class SidecarBatcher:
    """The Batcher of one replica, as a ``Dispatcher`` of the simulator. Not a subclass: the Batcher may be compiled."""

    def __init__(self, parameters: Parameters, *, undecided: int, admission: Admission | None = None) -> None:
        """Begin with first calls, ``undecided`` at once at most (0: none), then with ``parameters``."""
        self._batcher = batcher = Batcher(parameters, admission=admission, undecided=undecided)
        self.wanted: Sequence[int] = ()
        """Rows of batches of copies that the tuner wants; one of them is sent."""
        self._record = Record()
        self._record.rows = TRIALS * TRIAL_ROWS  # batches were verified before
        self._delays = Delays()
        self.model, self.stats, self.wake_at = batcher.model, batcher.stats, batcher.wake_at
        self.grows = batcher.grows

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Admit a request or refuse it."""
        return self._of_callers(self._batcher.arrive(request, now))

    def poll(self, now: float) -> list[Action]:
        """Do what time alone makes due."""
        return self._of_callers(self._batcher.poll(now))

    def complete(self, batch: Batch, now: float, *, fault: Fault | None = None, stalled: bool = False) -> list[Action]:
        """Take a batch's outcome; let a batch of copies follow, if one is wanted and there is room for it."""
        found = self._batcher.complete(batch, now, fault=fault, stalled=stalled)
        if (first := batch.slices[0][0]).shadow:
            delayed = (arrivals_at(self._batcher) - first.payload) / concurrency_of(batch.state)
            self._delays.add(delayed, seconds_of(batch.state, first.bucket, first.rows))
        elif self.wanted and fault is None:
            found = [*found, *self._copy(batch.state, first, now)]
        return self._of_callers(found)

    def _copy(self, state: ModelState, request: Request, now: float) -> list[Action]:
        """Send a batch of copies of a request that was answered: the first wanted size that does no harm."""
        record, due = self._record, request.due - request.arrived
        most = inf if record.refused is None else record.refused - 1
        if not self._delays.allow(arrivals_at(self._batcher), now):
            return []
        fits = (rows for rows in self.wanted if rows <= most)
        waited = self._batcher.waited(state, now)
        rows = next((rows for rows in fits if not harms(state, request.bucket, rows, due, waited)), 0)
        if not 0 < rows <= record.room(state.limits.served_rows):
            return []
        record.rows += rows
        self.wanted = ()
        copies = Request(
            key=request.key, arrived=now, due=now + due, deadline=now + request.deadline - request.arrived, rows=rows,
            mergeable=False, shadow=True, tokens=request.tokens // request.rows * rows, bucket=request.bucket,
            model=request.model, payload=arrivals_at(self._batcher), priority=Priority.HIGH,
        )  # fmt: skip
        return self._batcher.arrive(copies, now)

    def cancel(self, request: Request, now: float) -> list[Action]:
        """Forget a request whose caller has left."""
        return self._of_callers(self._batcher.cancel(request, now))

    def configure(self, parameters: Parameters, now: float) -> list[Action]:
        """Replace the parameters."""
        return self._of_callers(self._batcher.configure(parameters, now))

    def learn(self, model: str, estimate: Estimate | None, now: float, *, shed_slo: bool = False) -> list[Action]:
        """Plan with an estimate of the service time."""
        return self._of_callers(self._batcher.learn(model, estimate, now, shed_slo=shed_slo))

    def _of_callers(self, actions: list[Action]) -> list[Action]:
        """Leave out what is about copies, which have a batch of their own, but for that batch."""
        found: list[Action] = []
        for action in actions:
            match action:
                case Failure(requests=[Request(shadow=True, rows=rows)]):
                    self._record.refused = min(rows, self._record.refused or rows)
                case Finish(requests=[Request(shadow=True)]) | Refusal(request=Request(shadow=True)):
                    pass
                case _:
                    found.append(action)
        return found
