"""A Batcher as a sidecar drives it by default: it begins with first calls, and batches of copies measure sizes.

Both are the sidecar's, and not in the tuner: without them, virtual time would show a sidecar that nobody runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool.batching.batcher import Batcher
from carpool.batching.requests import Failure, Finish, Priority, Refusal, Request
from carpool.tuning.exploration import TAKES
from carpool_sidecar.axis_verification.check import TRIAL_ROWS, TRIALS
from carpool_sidecar.axis_verification.delays import Delays
from carpool_sidecar.axis_verification.record import Record
from carpool_sidecar.dispatch.trials import arrivals_at, concurrency_of, seconds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.batching.requests import Action, Batch, Estimate, Fault
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

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Admit a request or refuse it; let a batch of copies follow, if one is wanted and there is room for it."""
        found = self._batcher.arrive(request, now)
        state, record = self._batcher.model(request.model), self._record
        rows = 0
        if self.wanted and self._delays.allow(arrivals_at(self._batcher), now):
            rows = next((each for each in self.wanted if not self._is_harmful(request, each)), 0)
        if 0 < rows <= record.room(state.limits.served_rows):
            record.rows += rows
            self.wanted = ()
            copies = Request(
                key=request.key, arrived=now, due=request.due, deadline=request.deadline, rows=rows, mergeable=False,
                shadow=True, tokens=request.tokens // request.rows * rows, bucket=request.bucket, model=request.model,
                payload=arrivals_at(self._batcher), priority=Priority.HIGH,
            )  # fmt: skip
            found = [*found, *self._batcher.arrive(copies, now)]
        return self._of_callers(found)

    def poll(self, now: float) -> list[Action]:
        """Do what time alone makes due."""
        return self._of_callers(self._batcher.poll(now))

    def complete(self, batch: Batch, now: float, *, fault: Fault | None = None, stalled: bool = False) -> list[Action]:
        """Take a batch's outcome."""
        if (first := batch.slices[0][0]).shadow:
            self._delays.add((arrivals_at(self._batcher) - first.payload) / concurrency_of(batch.state))
        return self._of_callers(self._batcher.complete(batch, now, fault=fault, stalled=stalled))

    def cancel(self, request: Request, now: float) -> list[Action]:
        """Forget a request whose caller has left."""
        return self._of_callers(self._batcher.cancel(request, now))

    def configure(self, parameters: Parameters, now: float) -> list[Action]:
        """Replace the parameters."""
        return self._of_callers(self._batcher.configure(parameters, now))

    def learn(self, model: str, estimate: Estimate | None, now: float, *, shed_slo: bool = False) -> list[Action]:
        """Plan with an estimate of the service time."""
        return self._of_callers(self._batcher.learn(model, estimate, now, shed_slo=shed_slo))

    def _is_harmful(self, request: Request, rows: int) -> bool:
        """Whether a batch of copies would fail, or take too much of the SLO from other requests."""
        if self._record.refused is not None and rows >= self._record.refused:
            return True
        seconds = seconds_of(self._batcher.model(request.model), request.bucket, rows)
        return seconds > TAKES * (request.due - request.arrived)

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
