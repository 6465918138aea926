"""TensorFlow Serving's adaptive shared batch scheduler: how many batches are in flight is tuned by their latency."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proof.rivals.fifo import Fifo, Verdict
from proof.rivals.settings import Still, half_slo_batch, latencies, setting

if TYPE_CHECKING:
    from random import Random

    from carpool.batching.requests import Batch
    from proof.rivals.fifo import Line
    from proof.world import Knowledge

LARGEST_STEP = 1 / 8
SMALLEST_STEP = 1 / 128
"""Of the limit on batches in flight, by which it is changed."""

AVERAGED = 1000
"""Batches between two changes: ``batches_to_average_over``."""


class InFlightLimit:
    """Moves on while the mean latency falls, turns back when it rises, with steps that halve around the best."""

    def __init__(self, low: float, high: float, averaged: int = AVERAGED) -> None:
        """Start at ``low``."""
        self.limit = low
        self._low, self._high = low, high
        self._averaged = averaged
        self._step, self._direction = LARGEST_STEP, 1
        self._last, self._fell = 0.0, False
        self._batches, self._latency = 0, 0.0

    def completed(self, latency: float) -> None:
        """Count a batch, ``latency`` seconds from its first request to its end; move when enough were."""
        self._batches += 1
        self._latency += latency
        if self._batches < self._averaged:
            return
        mean = self._latency / self._batches
        fell = mean < self._last
        if fell:
            # Because the way is right, or because it was turned back on: then the best is near.
            self._step = min(max(self._step * (2 if self._fell else 0.5), SMALLEST_STEP), LARGEST_STEP)
        else:
            self._direction = -self._direction
        self.limit = min(max(self.limit + self._direction * self.limit * self._step, self._low), self._high)
        self._last, self._fell = mean, fell
        self._batches, self._latency = 0, 0.0


class AdaptiveShared(Fifo):
    """tensorflow/tensorflow at 457db0a8, tensorflow/core/kernels/batching_util/adaptive_shared_batch_scheduler.h.

    The batch begun first leaves while fewer are in flight than the limit; its fraction is the chance of one more, drawn
    once for each batch that is begun or ends.

    In its favour: as many threads as the file's comments advise, twice the best limit (as many batches as the device
    computes at once); never fewer in flight than that, and begun there; the largest batch as Nexus would have it; no
    more batches enqueued than can be served within the SLO, where 10 is the default; of what later versions added,
    ``batch_timeout_micros``, half the SLO, before which only full batches leave, but not that full ones leave on any
    free thread, which under load would fill them all whatever the limit has learned.
    """

    def __init__(self, *, slots: tuple[int, int], max_batch: int, enqueued: int, timeout: float, rng: Random) -> None:
        """Start empty. ``slots``: fewest and most batches in flight; ``enqueued`` batches; ``timeout`` in seconds."""
        self._timeout = timeout
        self._rng = rng
        self.limit = InFlightLimit(*slots)
        self._sent = 0
        self._ended = 0
        self._drawn = (0, 0)
        super().__init__(slots=slots[1], max_batch=max_batch, max_queued_rows=enqueued * max_batch)

    def decide(self, line: Line, now: float) -> Verdict:
        """Send a batch that is full or has timed out, where the limit allows one more."""
        due = line.head.arrived + self._timeout
        if line.rows < self.cap and now < due:
            return Verdict(again=due)
        if not self._allows(line):
            return Verdict()
        self._sent += 1
        return Verdict(min(line.rows, self.cap))

    def _allows(self, line: Line) -> bool:
        room = self.limit.limit - len(self.in_flight)
        if room >= 1:
            return True
        event = (self._sent + -(-line.rows // self.cap), self._ended)
        if room <= 0 or event == self._drawn:
            return False
        self._drawn = event
        return self._rng.random() <= room

    def completed(self, batch: Batch, now: float) -> None:
        """Feed the limit with the latency from the first request on."""
        self._ended += 1
        self.limit.completed(now - batch.slices[0][0].arrived)


def contender(knowledge: Knowledge, rng: Random) -> Still:
    """Half the SLO for gathering a batch and half for computing it; how many at once is learned."""
    batch, fewest = half_slo_batch(knowledge), knowledge.executors
    most = min(2 * fewest, max(knowledge.limits.max_in_flight, fewest))
    chosen = setting(knowledge, batch, knowledge.slo / 2, in_flight=most)
    takes = latencies(knowledge)[batch]
    enqueued = max(1, int((knowledge.slo - takes) / takes * fewest))
    return Still(
        chosen,
        lambda: AdaptiveShared(
            slots=(fewest, most), max_batch=batch, enqueued=enqueued, timeout=float(chosen.parameters.max_wait), rng=rng
        ),
    )
