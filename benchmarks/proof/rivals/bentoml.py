"""BentoML's CORK dispatcher: a line through the last batches decides whether to wait for one more request."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from proof.rivals.fifo import Fifo, Verdict
from proof.rivals.settings import Still, setting

if TYPE_CHECKING:
    from random import Random

    from carpool.batching.requests import Batch
    from proof.rivals.fifo import Line
    from proof.world import Knowledge

KEPT = 50
"""Batches that the line is drawn through."""

SKIPPED = 2
"""Batches at the start that are no samples: the model is warming up."""

REFRESH = 5.0
"""Seconds between two lines."""

DECAY = 0.95
TICK = 0.001


class Step(NamedTuple):
    """A part of the training that comes before the rule proper."""

    needed: int
    """Requests that are kept for it even when they are late."""
    calls: int
    size: int
    """Requests to wait for."""


TRAINING = (Step(2, 8, 1), Step(6, 1, 1), Step(5, 1, 2), Step(3, 1, 3))


class Optimizer:
    """Takes a batch of n requests to last ``slope`` * n + ``fixed`` seconds, by least squares."""

    def __init__(self, max_latency: float) -> None:
        self.slope = min(2.0, max_latency * 2 / 30)
        self.fixed = min(1.0, max_latency / 30)
        self.wait = 0.01
        """Mean seconds that a batch's first request had waited when it left."""
        self._samples: deque[tuple[int, float, float]] = deque(maxlen=KEPT)
        self._seen = 0
        self._refreshed = -inf

    def log(self, requests: int, wait: float, seconds: float, now: float) -> None:
        """Take in a batch: its requests, how long the first had waited, and how long it took."""
        self._seen += 1
        if self._seen <= SKIPPED:
            return
        self._samples.append((requests, seconds, wait))
        if now >= self._refreshed + REFRESH:
            self._refreshed = now
            self.refresh()

    def refresh(self) -> None:
        """Draw the line anew, and average the waits."""
        count = len(self._samples)
        if not count:
            return
        mean_n = sum(n for n, _, _ in self._samples) / count
        mean_s = sum(seconds for _, seconds, _ in self._samples) / count
        spread = sum((n - mean_n) ** 2 for n, _, _ in self._samples)
        if spread:
            slope = sum((n - mean_n) * (seconds - mean_s) for n, seconds, _ in self._samples) / spread
            fixed = mean_s - slope * mean_n
        else:
            # Of all the lines through one size, lstsq returns the shortest vector (slope, fixed).
            slope = mean_s * mean_n / (mean_n**2 + 1)
            fixed = mean_s / (mean_n**2 + 1)
        self.slope, self.fixed = max(1e-6, slope), max(0.0, fixed)
        self.wait = sum(wait for _, _, wait in self._samples) / count


class BentoML(Fifo):
    """bentoml/BentoML at 32230a5, src/bentoml/_internal/marshal/dispatcher.py, ``CorkDispatcher``.

    With n requests waiting, the first for w0 and the last for wn: the first is cancelled where w0 + a n + b reaches the
    latency allowed; they wait on while n (wn + dt + a) is at most 0.95 of the usual wait; and otherwise all leave.

    In its favour: the latency allowed is the SLO, not its default of a minute; as many calls at a time as the device
    computes, not one; its ticks of 1 ms don't delay what a call's end or a request makes due.
    """

    def __init__(self, *, slots: int, max_batch: int, max_latency: float) -> None:
        """Start empty and untrained. ``max_latency`` in seconds."""
        self._max_latency = max_latency
        self.optimizer = Optimizer(max_latency)
        self._steps = deque(TRAINING)
        self._calls = 0
        self._patience = 0.0
        super().__init__(slots=slots, max_batch=max_batch)

    def decide(self, line: Line, now: float) -> Verdict:
        """Train on the first batches, then cork and release."""
        return self._train(line, now) if self._steps else self._release(line, now)

    def _train(self, line: Line, now: float) -> Verdict:
        step = self._steps[0]
        size = min(step.size, self.cap)
        count = len(line.requests)
        # Only where more wait than the training needs is anybody cancelled, and only who is late already.
        spare = min(count - step.needed + self._calls, count)
        late = 0
        for request in line.requests:
            if late >= spare or now < request.arrived + self._max_latency or request.taken:
                break
            late += 1
        if late == count:
            return Verdict(late=late)
        if size > 1 and count - late < size:
            expected = size * self.optimizer.slope + self.optimizer.fixed
            until = line.requests[late].arrived + self._patience - expected
            if now < until:
                return Verdict(again=until, late=late)
        return Verdict(self._batch(line, late), late=late)

    def _release(self, line: Line, now: float) -> Verdict:
        slope, fixed = self.optimizer.slope, self.optimizer.fixed
        count = len(line.requests)
        late = 0
        for request in line.requests:
            left = count - late
            latency = now - request.arrived + slope * left + fixed
            # A single one is only cancelled while all slots are taken: what it was then, it is now.
            doomed = latency >= self._max_latency if left > 1 else now >= request.arrived + self._max_latency
            if not doomed or request.taken:
                break
            late += 1
        if late == count:
            return Verdict(late=late)
        left = count - late
        if left < self.cap:
            until = line.requests[-1].arrived + DECAY * self.optimizer.wait / left - TICK - slope
            if now < until:
                return Verdict(again=until, late=late)
        return Verdict(self._batch(line, late), late=late)

    def _batch(self, line: Line, late: int) -> int:
        dropped = sum(request.rows for request, _ in zip(line.requests, range(late), strict=False))
        return min(line.rows - dropped, self.cap)

    def completed(self, batch: Batch, now: float) -> None:
        """Log the call; a step of the training ends with the last of its calls."""
        wait = 0.0 if self._steps else batch.dispatched - batch.slices[0][0].arrived
        self.optimizer.log(len(batch.slices), wait, now - batch.dispatched, now)
        if not self._steps:
            return
        self._calls += 1
        if self._calls == self._steps[0].calls:
            self._steps.popleft()
            self._calls = 0
            self.optimizer.refresh()
            if self._steps:
                # Fixed here for the whole step, while slope and intercept may change: what 2 n + 1 requests would take.
                expected = (2 * self._steps[0].size + 1) * self.optimizer.slope + self.optimizer.fixed
                self._patience = min(0.95 * self._max_latency, expected)


def contender(knowledge: Knowledge, _rng: Random) -> Still:
    """CORK with the largest batch allowed, and the SLO for its latency."""
    chosen = setting(knowledge, knowledge.limits.max_batch, 0.0)
    return Still(
        chosen,
        lambda: BentoML(
            slots=chosen.parameters.max_in_flight,
            max_batch=chosen.parameters.max_batch,
            max_latency=knowledge.slo,
        ),
    )
