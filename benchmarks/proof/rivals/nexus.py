"""Nexus: a batch for the rate, collected for a duty cycle; requests that would be late in a full batch are dropped."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from proof.rivals.fifo import Fifo, Verdict
from proof.rivals.settings import Still, half_slo_batch, latencies, setting

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from carpool.batching.requests import Action, Request
    from proof.rivals.fifo import Line
    from proof.world import Knowledge

EPOCH = 5.0
"""Seconds over which the rate is averaged: uwsampl/nexus, ``backend_avg_interval``. The paper's schedules change less
often; a rate that is known sooner is in its favour."""


def residual(latency: Sequence[float], slo: float, largest: int, rate: float) -> tuple[int, float]:
    """Return the batch and the duty cycle (seconds) for a rate (requests per second) on one GPU.

    A rate that ``largest`` rows at a time can't serve, and one unknown (0), takes the largest, back to back. Any other:
    the largest b whose last request still comes in time, (b - 1) / rate + l(b) <= SLO, once every b / rate seconds.
    """
    if not rate or rate >= largest / latency[largest]:
        return largest, 0.0
    fits = [rows for rows in range(1, largest + 1) if (rows - 1) / rate + latency[rows] <= slo]
    batch = max(fits, default=1)
    return batch, max(min(slo - latency[batch], batch / rate), 0.0)


class Nexus(Fifo):
    """Shen et al., "Nexus: A GPU Cluster Engine for Accelerating DNN-Based Video Analysis", SOSP 2019.

    The batch of a session that fills a GPU and of one that does not: ScheduleSaturate and ScheduleResidue, as in
    uwsampl/nexus at b436191, src/nexus/scheduler/backend_delegate.cpp, ``ComputeBatchSize``. Early drop: there in
    src/nexus/backend/model_exec.cpp, ``GetBatchTaskSlidingWindow``: a window of a batch's length slides over the queue
    past all that would be late in a batch of that length.

    In its favour:

    - It knows the true l(b), and the network takes no time before or after the model.
    - The rate is measured where the requests come in.
    - A session has each GPU to itself.
    - A batch starts as soon as it is full or its head has waited for a duty cycle, whatever the cycle's phase.
    - If more requests wait than the batch for the rate has, they join it, up to the batch that takes half the SLO.

    No request waits longer than the policy's bounds allow: half the SLO. They bind all other rules and the oracle, too.
    Without them its cycles at 10 to 35 % load take up to a fifth less device time than any rule within half the SLO.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        self._latency = latencies(knowledge)
        self._slo = knowledge.slo
        self._longest = knowledge.limits.max_wait
        self._largest = half_slo_batch(knowledge)
        self._batch, self._cycle = self._largest, 0.0
        self._epoch = inf
        self._rows = 0
        super().__init__(slots=knowledge.executors, max_batch=self._largest)

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Count it, too: an epoch's rate decides the next epoch's batch."""
        if self._epoch == inf:
            self._epoch = now + EPOCH
        elif now >= self._epoch:
            # More than one epoch may have passed without an arrival.
            rate = self._rows / (now - self._epoch + EPOCH) / self.slots
            self._batch, cycle = residual(self._latency, self._slo, self._largest, rate)
            self._cycle = min(cycle, self._longest)
            self._epoch, self._rows = now + EPOCH, 0
        self._rows += request.rows
        return super().arrive(request, now)

    def decide(self, line: Line, now: float) -> Verdict:
        """Send a window's batch when it is full or its head has waited for a cycle."""
        largest = self.cap
        rows, late = line.rows, 0
        for request in line.requests:
            if now + self._latency[min(rows, largest)] <= request.due or request.taken:
                due = request.arrived + self._cycle
                if rows >= self._batch or now >= due:
                    return Verdict(min(rows, largest), late=late)
                return Verdict(again=due, late=late)
            rows -= request.rows
            late += 1
        return Verdict(late=late)


def contender(knowledge: Knowledge, _rng: Random) -> Still:
    """Nexus with its dispatch rule."""
    return Still(setting(knowledge, half_slo_batch(knowledge), 0.0), lambda: Nexus(knowledge))
