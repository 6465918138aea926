"""Slots: which batches are with the upstream, when each is forecast to end, and how long the device was busy."""

from __future__ import annotations

from bisect import insort
from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from carpool.batching.counters import SUPPOSED
from carpool.batching.requests import Batch, time_of

if TYPE_CHECKING:
    from carpool.batching.model_state import ModelState

OVERDUE, LEAST_OVERDUE, OVERDUE_UNKNOWN = 4.0, 1.0, 5.0
"""A call may never be answered. So it gives its slot back after so many times its forecast, but not before so many
seconds (hosts pause, first batches compile kernels); and after so many seconds if its duration is unknown."""

COMPLETIONS = 256
"""How many times of slots given back are remembered."""


class Slots:
    """The slots of all models."""

    __slots__ = (
        "_busy", "_busy_since", "_completed", "_completions", "_dispatched", "abandoned", "in_flight", "overdue_at",
        "taken",
    )  # fmt: skip

    def __init__(self) -> None:
        self.in_flight: dict[Batch, None] = {}
        """Calls under way, in the order of their dispatch."""
        self.abandoned: list[tuple[float, int, Batch]] = []
        """Heap of calls without callers, by when the upstream will have computed them: (time, number, batch)."""
        self.taken = 0
        self.overdue_at = inf
        """A lower bound of when the next call under way is overdue."""
        self._dispatched = 0
        self._completed = 0
        self._completions: deque[float] = deque(maxlen=COMPLETIONS)
        """When the last slots were given back: batches that waited in the upstream began then."""
        self._busy = 0.0
        self._busy_since = 0.0

    def occupy(self, batch: Batch, start: float, now: float) -> None:
        """Give a batch a slot; the upstream begins it at ``start``."""
        if not self.taken:
            self._busy_since = now
        state = batch.state
        state.load.taken += 1
        self.taken += 1
        self._dispatched += 1
        batch.number = self._dispatched
        batch.dispatched = now
        batch.in_flight = self.taken
        batch.completed_before = self._completed
        estimate = state.belief.estimate
        if estimate is not None:
            batch.finish = start + time_of(estimate.of(batch.bucket).times, batch.rows)
            batch.overdue_at = now + max(OVERDUE * (batch.finish - now), LEAST_OVERDUE)
        else:
            batch.overdue_at = now + OVERDUE_UNKNOWN
        self.overdue_at = min(self.overdue_at, batch.overdue_at)
        self.in_flight[batch] = None

    def end(self, batch: Batch, now: float) -> None:
        """Remove a call that has ended, and free its slot unless that was given back before.

        If it took far longer than forecast, it began when the upstream ended an overdue call, if it did meanwhile.
        """
        del self.in_flight[batch]
        waited = batch.state.load.overdue_ended - batch.dispatched
        if waited > 0 and now - batch.dispatched > 2 * (batch.finish - batch.dispatched):
            batch.dispatched += waited
            batch.finish += waited
        if batch.overdue:
            batch.state.load.overdue -= 1
            batch.state.load.overdue_ended = self.overdue_at = now  # another one may be overdue now
        else:
            self._vacate(batch.state, now)

    def _vacate(self, state: ModelState, now: float) -> None:
        state.load.taken -= 1
        self.taken -= 1
        if not self.taken:
            self._busy += now - self._busy_since

    def note_end(self, now: float) -> None:
        """Remember when a slot was given back."""
        self._completed += 1
        self._completions.append(now)

    def give_back(self, now: float) -> None:
        """Free the slots of calls that take far longer than forecast; at most as many more as a model has."""
        for batch in self.in_flight:
            if not batch.overdue and batch.overdue_at <= now:
                state = batch.state
                if state.load.overdue < state.slots:
                    batch.overdue, batch.overdue_at = True, inf
                    state.load.overdue += 1
                    state.load.gave_back += 1
                    self._vacate(state, now)
                    self.note_end(now)
        self.overdue_at = min((each.overdue_at for each in self.in_flight if each.overdue_at > now), default=inf)

    # ------------------------------------------------------------------------------------------- abandoned calls

    def abandon(self, batch: Batch, now: float) -> bool:
        """Forget a call; return whether its slot stays taken: the upstream may compute it to its end."""
        if not batch.overdue and now < batch.finish < inf:
            del self.in_flight[batch]
            heappush(self.abandoned, (batch.finish, batch.number, batch))
            return True
        self.end(batch, now)
        return False

    def computed(self, now: float) -> Batch | None:
        """Free the slot of the next abandoned call that the upstream has finished by now, and return it."""
        if not self.abandoned or self.abandoned[0][0] > now:
            return None
        ended, _, batch = heappop(self.abandoned)
        self._vacate(batch.state, ended)
        self.note_end(ended)
        return batch

    def all(self) -> list[Batch]:
        """Return the calls under way, overdue ones included, and the abandoned ones."""
        return [*self.in_flight, *(batch for _, _, batch in self.abandoned)]

    # ------------------------------------------------------------------------------------------- times

    def wake_at(self) -> float:
        """When the next slot is freed without an answer."""
        wake = self.overdue_at if self.in_flight else inf
        return min(wake, self.abandoned[0][0]) if self.abandoned else wake

    def busy(self, now: float) -> float:
        """Return the wall seconds with a slot taken."""
        if self.taken > len(self.abandoned):
            return self._busy + (now - self._busy_since)
        if self.abandoned:
            return self._busy + (min(now, max(self.abandoned)[0]) - self._busy_since)
        return self._busy

    def start(self, servers: int, now: float) -> float:
        """When the upstream would begin a batch sent now, if it computes ``servers`` batches at a time."""
        taken = self.taken
        if taken < servers:
            return now
        finishes = []
        for batch in self.in_flight:
            if not batch.overdue:
                finishes.append(batch.finish)  # noqa: PERF401 - every arrival comes here: a loop costs less
        if self.abandoned:
            finishes.extend(each[0] for each in self.abandoned)
        if taken > 1:
            finishes.sort()
        start = finishes[taken - servers]
        # Those of unknown end come last.
        return start if now < start and finishes[-1] < inf else now

    def forecast_again(self, now: float) -> None:
        """Forecast the end of batches that queue in the upstream again, after one took longer: the first begins now."""
        estimate = next(iter(self.in_flight)).state.belief.estimate if self.in_flight else None
        if estimate is None or self.taken < estimate.executors:
            return
        line = [batch for batch in self.in_flight if not batch.overdue]
        if self.abandoned:
            line = sorted([*line, *(batch for _, _, batch in self.abandoned)], key=lambda batch: batch.number)
        finishes: list[float] = []
        for ahead, batch in enumerate(line):
            estimate = batch.state.belief.estimate
            if estimate is not None and not batch.aborted and estimate.executors <= min(ahead + 1, batch.in_flight - 1):
                start = finishes[ahead - estimate.executors] if ahead >= estimate.executors else now
                batch.finish = max(now, start) + time_of(estimate.of(batch.bucket).times, batch.rows)
            insort(finishes, batch.finish)

    def sample(self, batch: Batch, now: float) -> None:
        """Count a service time as observed, and as it would be if the server computes fewer batches than it had.

        The n-th batch sent to a server that computes e at once began when n - e of those before it had completed. If
        fewer have, e is refuted, and the time counts as zero.
        """
        taken, seconds = batch.in_flight, now - batch.dispatched
        cells = batch.state.counters.cells_of(batch.bucket, batch.rows, taken)
        if not cells:
            return
        cells[0].add(seconds)
        since, completions = self._completed - batch.completed_before, self._completions
        if since < taken - 1:
            cells[1].add(seconds)
        for index, servers in enumerate(SUPPOSED[: len(cells) - 2]):
            before = taken - servers
            known = before <= since <= len(completions)
            cells[index + 2].add(now - completions[before - since - 1] if known else 0.0)
