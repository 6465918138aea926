"""AIMD on the batch size: a row more while the SLO is met, a share less when it is missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool.batching.counters import combine
from proof.rivals.settings import half_slo_batch, setting

if TYPE_CHECKING:
    from random import Random

    from carpool.batching.counters import ModelStats, Stats
    from carpool.simulation.outcome import Setting
    from carpool.simulation.simulator import Dispatcher
    from proof.world import Knowledge

DECREASE = 0.9
TOLERATED = 0.01

ENOUGH = 300
"""Requests to have ended before it moves: three may miss."""


class Aimd:
    """Additive increase and multiplicative decrease of the batch size, against the p99 that is promised.

    Chiu and Jain, "Analysis of the increase and decrease algorithms for congestion avoidance in computer networks",
    1989. Unlike Clipper's, which looks at what a batch takes, it looks at who was late.

    In its favour: a tenth less, as in Clipper (NSDI 2017, section 4.3.1), where TCP would halve; counts of misses,
    which are exact, instead of a percentile; enough answers to see one in a hundred before it moves; requests are held
    for half the SLO, as by the half-SLO rule, so that a size means something at low load; it begins with that rule's
    batch, and goes back there where even the smallest misses, since a smaller one may be just what serves too few.
    """

    interval = 1.0

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self.batch = half_slo_batch(knowledge)
        self._seen: ModelStats | None = None
        self._before: list[Stats] | None = None

    def start(self) -> Setting:
        """Return the half-SLO rule's batch."""
        return self._setting()

    def observe(self, now: float, stats: list[Stats]) -> list[Setting] | None:  # noqa: ARG002 - the counts have times
        """Grow or shrink by what became of enough requests."""
        if self._before is None:
            self._before = stats
            return None
        parts = [after.since(before).models.get("") for after, before in zip(stats, self._before, strict=True)]
        counted = combine([part for part in parts if part is not None])
        ended = counted.hits + counted.missed
        if ended < ENOUGH:
            return None
        self._before = stats
        limits, batch = self._knowledge.limits, self.batch
        if counted.missed <= TOLERATED * ended:
            self.batch = min(batch + 1, limits.max_batch)
        elif batch > limits.min_batch:
            self.batch = max(int(DECREASE * batch), limits.min_batch)
        else:
            self.batch = half_slo_batch(self._knowledge)
        return [self._setting()] if self.batch != batch else None

    def dispatcher(self) -> Dispatcher | None:
        """Run on Carpool's Batcher."""
        return None

    def _setting(self) -> Setting:
        return setting(self._knowledge, self.batch, self._knowledge.slo / 2)


def contender(knowledge: Knowledge, _rng: Random) -> Aimd:
    """AIMD against the SLO."""
    return Aimd(knowledge)
