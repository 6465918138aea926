"""The estimates of one model's load and device, from its counters."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from carpool.learning.arrivals import WindowCounts
from carpool.learning.batchable_share import Sharing
from carpool.learning.change_detection import has_changed, is_another_model
from carpool.learning.latency_model import LatencyLearner, ServiceTime
from carpool.learning.load import ENOUGH_REQUESTS, Load
from carpool.learning.size_limit import SizeLimit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.batching.requests import Estimate
    from carpool.exchange.decision import Observation
    from carpool.policy.parameters import Parameters


REST_OVER, LEAST_REST = 10.0, 0.1
"""Seconds over which the use of the device by other models is averaged; the least that they are taken to leave."""


class Moved(NamedTuple):
    """What has clearly changed."""

    load: bool
    model: bool
    share: bool
    """The share of arrivals that can share a batch."""
    limit: bool
    """The limit on a batch's rows."""


class Belief:
    """The load, batch latency, the batchable share, and the limit on batch sizes."""

    def __init__(self) -> None:
        self.load = Load()
        self.learner = LatencyLearner()
        self.sharing = Sharing()
        self.size_limit = SizeLimit()
        self.in_force: ServiceTime | None = None
        """The latency model that the Batcher's tables were last made from."""
        self.row_shares: tuple[float, ...] = ()
        """Shares of the requests by rows, in powers of two; empty: all have about the same number."""
        self.rest = 1.0
        """Share of the device's capacity that other models behind the same sidecars leave."""
        self._rest_for = 0.0
        self._row_counts: list[float] = []
        self._estimate: Estimate | None = None
        self._at_epoch: ServiceTime | None = None

    def observe(self, observation: Observation) -> Moved:
        """Learn from an observation; return what changed."""
        stats, seconds = observation.stats, observation.seconds / observation.replicas
        counts = WindowCounts(stats.windows, stats.arrivals, stats.arrivals_squared, gaps_squared=stats.gaps_squared)
        self._count_rows(stats.request_rows)
        moved = Moved(
            load=self.load.observe(observation.seconds, counts, stats.rows, observation.replicas),
            model=self.learner.observe(observation.now, stats.samples()) != 1.0,
            share=self.sharing.observe(seconds, stats.arrivals, stats.batchable),
            limit=self.size_limit.observe(seconds, stats),
        )
        # A server that computes several batches at once is not full with one; in a full one batches wait for others.
        work, wall = observation.others
        busy = min(work / self.service.executors, wall) if self.service is not None else wall
        self._rest_for += seconds
        self.rest += (1 - busy / observation.seconds - self.rest) * min(seconds / min(REST_OVER, self._rest_for), 1.0)
        self.rest = max(self.rest, LEAST_REST)
        return moved

    def _count_rows(self, counts: Sequence[int]) -> None:
        """Learn how many rows requests have: one request in a hundred may be so large that it makes the others late."""
        if not any(counts):
            return
        known = self._row_counts or [0.0] * len(counts)
        keep = 1.0 if sum(known) < ENOUGH_REQUESTS else 1 - min(sum(counts) / ENOUGH_REQUESTS, 0.5)
        self._row_counts = [keep * before + count for before, count in zip(known, counts, strict=True)]
        total = sum(self._row_counts)
        shares = tuple(round(count / total, 3) for count in self._row_counts)
        self.row_shares = shares if sum(share > 0 for share in shares) > 1 else ()

    @property
    def service(self) -> ServiceTime | None:
        """The latency model; ``None`` before any batch was measured."""
        return self.learner.estimate()

    @property
    def has_changed(self) -> bool:
        """Whether batch latency differs from that in force."""
        service = self.service
        return service is not None and has_changed(service, self.in_force)

    def is_another_model(self) -> bool:
        """Whether batch latency is another model's than when the epoch of the explored settings began."""
        service = self.service
        return service is not None and is_another_model(service, self._at_epoch)

    def begin_epoch(self) -> bool:
        """Begin another epoch; return whether batch latency is another model's than in the last one."""
        another = self.is_another_model()
        self._at_epoch = self.service
        return another

    def put_in_force(self, max_rows: int) -> None:
        """Make tables of batch latency for the Batcher, up to ``max_rows``."""
        service = self.service
        if service is not None and service is not self.in_force:
            self.in_force = service
            self._estimate = self.learner.believed(max_rows)

    def planned(self, parameters: Parameters, target: float, measured: int | None = None) -> Estimate | None:
        """Return the estimate for the Batcher under some parameters, and a target (seconds).

        ``measured``: if a larger size is explored, the largest well measured size below it.
        """
        service, estimate = self.in_force, self._estimate
        if service is None or estimate is None:
            return None
        executors = service.executors_for(parameters.max_in_flight)
        if measured is not None:
            estimate = estimate.flat_beyond(measured, target)
        return estimate.computed(executors, assumed=executors - service.executors)

    def capacity(self, parameters: Parameters) -> float | None:
        """Return the rows per second at a backlog under some parameters; ``None`` before any batch was measured."""
        service = self.in_force
        return None if service is None else service.capacity(parameters.max_batch, parameters.max_in_flight)
