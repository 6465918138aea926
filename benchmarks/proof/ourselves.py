"""Carpool as a contender: sidecars with their tuner, which know nothing but the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool.policy.durations import Duration
from carpool.policy.spec import SLO, BatchingPolicy, Bounds, IntRange, Latency, Objective
from carpool.simulation.outcome import Setting
from carpool.tuning.tuner import INTERVAL, Tuner
from carpool_cli.planning.twin import Sidecars
from proof.world import Rival

if TYPE_CHECKING:
    from random import Random

    from carpool.batching.counters import Stats
    from carpool.exchange.decision import Decision
    from carpool.learning.latency_model import LatencyLearner
    from carpool.learning.load import Load
    from carpool_cli.planning.sidecar_batcher import SidecarBatcher
    from proof.world import Knowledge


class Carpool:
    """The tuner in the loop, by the same path as ``carpool simulate --tune``; ``decisions`` are kept."""

    interval = INTERVAL

    def __init__(self, known: Knowledge, *, load: Load | None = None, learner: LatencyLearner | None = None) -> None:
        policy = BatchingPolicy(
            slo=SLO(latency=Latency(p99=Duration(known.slo))),
            objective=Objective.EFFICIENCY,
            bounds=Bounds(max_in_flight=IntRange(max=known.limits.max_in_flight)),
            admission=known.admission,
        )
        tuner = Tuner(policy)
        tuner.belief.load, tuner.belief.learner = load or tuner.belief.load, learner or tuner.belief.learner
        self._sidecars = Sidecars(policy, tuner, replicas=known.replicas)

    @property
    def decisions(self) -> list[Decision]:
        """Every decision so far."""
        return self._sidecars.decisions

    def start(self) -> Setting:
        """Begin like a sidecar with a p99: from the default parameters, without measurements."""
        return Setting(self._sidecars.tuner.parameters)

    def observe(self, now: float, stats: list[Stats]) -> list[Setting] | None:
        """Give the tuner the counters, and apply its decision."""
        return self._sidecars.observe(now, stats)

    def dispatcher(self) -> SidecarBatcher:
        """Return one replica's Batcher, with what a sidecar does around it."""
        return self._sidecars.dispatcher()


def _maker(known: Knowledge, rng: Random) -> Carpool:  # noqa: ARG001 - the tuner leaves nothing to chance
    return Carpool(known)


CARPOOL = Rival("Carpool", "this project: core/carpool/tuning/tuner.py", _maker)
