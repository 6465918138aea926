"""Rules that choose a setting of Carpool's Batcher once and keep it, and the advantages that all rivals get.

Every rival knows the true batch latencies, which its users would have to measure. Rivals without a dispatch rule of
their own run on Carpool's Batcher, which gets these latencies as its estimate. So it never holds a request for so long
that the wait alone would make it late, and it refuses requests that it can't serve in time. As many batches are in
flight as the device computes at once, unless the rule says otherwise: more would only queue there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.simulation.outcome import Setting
from proof.world import estimate

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from carpool.batching.counters import Stats
    from carpool.simulation.simulator import Dispatcher
    from proof.world import Knowledge


class Still:
    """A contender whose setting stays; whatever adapts is in its dispatchers."""

    interval = 0.0

    def __init__(self, setting: Setting, dispatcher: Callable[[], Dispatcher] | None = None) -> None:
        self._setting = setting
        self._dispatcher = dispatcher

    def start(self) -> Setting:
        """Return the setting."""
        return self._setting

    def observe(self, now: float, stats: list[Stats]) -> list[Setting] | None:  # noqa: ARG002 - the protocol's
        """Change nothing."""
        return None

    def dispatcher(self) -> Dispatcher | None:
        """Return a dispatch rule of its own for one replica; ``None``: Carpool's Batcher."""
        return None if self._dispatcher is None else self._dispatcher()


def setting(knowledge: Knowledge, batch: int, wait: float, *, in_flight: int | None = None) -> Setting:
    """Return a setting within the limits, with the true batch latencies as its estimate. ``wait`` in seconds."""
    parameters = Parameters(
        max_batch=batch,
        max_wait=Duration(wait),
        max_in_flight=knowledge.executors if in_flight is None else in_flight,
    )
    return Setting(knowledge.limits.clamp(parameters), estimate(knowledge), shed_slo=True)


def latencies(knowledge: Knowledge) -> tuple[float, ...]:
    """Return the seconds to plan a batch with, by rows (index 0 unused): a standard deviation over the mean."""
    return tuple(
        seconds * (1 + knowledge.service.noise) for seconds in knowledge.service.table(knowledge.limits.max_batch)
    )


def half_slo_batch(knowledge: Knowledge) -> int:
    """Return the batch of most throughput that takes half the SLO at most, the largest of equals; 1 where none does.

    Half the time goes into gathering a batch, or waiting for the one before it, and half into computing it: Nexus
    (Shen et al., SOSP 2019), which schedules a session that fills a GPU by the largest b with 2 l(b) <= SLO. l(b) is
    mean plus standard deviation as in uwsampl/nexus at b436191, src/nexus/common/model_db.cpp. In favour of the rule,
    it is not the largest of these batches but the one of most throughput, as there in ``GetMaxThroughput``. Where the
    batch latency bends up, or just behind a step in it, the largest is not the best.
    """
    within = [
        (rows / each, rows) for rows, each in enumerate(latencies(knowledge)) if rows and 2 * each <= knowledge.slo
    ]
    return max(within, default=(0.0, 1))[1]


def fixed_8(knowledge: Knowledge, _rng: Random) -> Still:
    """Up to 8 rows, 2 ms: what is often set for a small model and never touched again."""
    return Still(setting(knowledge, 8, 0.002))


def fixed_32(knowledge: Knowledge, _rng: Random) -> Still:
    """Up to 32 rows, 5 ms: likewise, for more traffic."""
    return Still(setting(knowledge, 32, 0.005))


def half_slo(knowledge: Knowledge, _rng: Random) -> Still:
    """Nexus's rule as people use it: the largest batch with 2 l(b) <= SLO, gathered for the other half of the SLO."""
    return Still(setting(knowledge, half_slo_batch(knowledge), knowledge.slo / 2))


def greedy(knowledge: Knowledge, _rng: Random) -> Still:
    """Hold nobody; when a slot comes free, all that wait leave, up to the largest batch allowed.

    The work-conserving rule of most servers' defaults, e.g. Triton's ``dynamic_batching {}``.
    """
    return Still(setting(knowledge, knowledge.limits.max_batch, 0.0))
