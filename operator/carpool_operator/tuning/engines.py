"""Engines of one target without a sidecar: learned from their own metrics; limits are recommended for them."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from carpool.exchange.token_streams import BOUNDS
from carpool.generation.observed import ObservedEngine
from carpool.generation.requests import Slo
from carpool.policy.spec import TuningMode
from carpool_operator.api.spec import MetricsSource
from carpool_operator.api.status import EngineLimits
from carpool_operator.tuning.evidence import Sample
from carpool_operator.tuning.token_streams import StreamSample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from carpool.generation.observed import Advice, Counters
    from carpool.policy.spec import SLO
    from carpool_operator.api.spec import PolicySpec

MOVED = 0.1
"""Relative change of the number of sequences from which a new recommendation is made."""


def watches_engines(spec: PolicySpec) -> bool:
    """Whether a policy asks for limits of engines without a sidecar, from their metrics in a Prometheus."""
    slo = spec.slo
    return (
        spec.metrics.source is MetricsSource.PROMETHEUS
        and spec.tuning.mode is TuningMode.RECOMMEND
        and slo.ttft is not None
        and slo.tpot is not None
    )


class FleetEngines:
    """Remembers the last scrape of each engine, and the recommendation."""

    def __init__(self) -> None:
        self.engine: ObservedEngine | None = None
        """``None`` until an engine was read: most targets have none."""
        self.errors: dict[str, str] = {}
        """By pod: why it can't be read."""
        self.seen_at = -inf
        """Time of the last new scrape of any, on the operator's clock."""
        self.advice: Advice | None = None
        self._before: dict[str, Counters] = {}
        self._said: EngineLimits | None = None

    def observe(self, now: float, found: Mapping[str, Counters | str], slo: SLO) -> list[Sample]:
        """Add scrapes by pod; return what the pods counted since their previous scrapes."""
        self.errors = {pod: each for pod, each in found.items() if isinstance(each, str)}
        self._before = {pod: each for pod, each in self._before.items() if pod in found}
        targets = _targets(slo)
        samples = []
        for pod, after in found.items():
            if isinstance(after, str):
                continue
            before = self._before.get(pod)
            if before is not None and after.at <= before.at:
                continue
            self._before[pod] = after
            self.seen_at = now
            if before is not None and after.requests >= before.requests:
                self.engine = self.engine or ObservedEngine()
                self.engine.observe(before, after)
                samples.append((pod, before, after))
        if self.engine is not None and samples and targets is not None:
            self.advice = self.engine.advice(targets) or self.advice
        return [self._sample(*each) for each in samples]

    @property
    def pods(self) -> frozenset[str]:
        """Names of the pods queried last."""
        return frozenset(self._before) | frozenset(self.errors)

    def recall(self, said: EngineLimits | None) -> None:
        """Continue from another operator's recommendation until there is enough data."""
        self._said = said

    def limits(self) -> EngineLimits | None:
        """Return the recommendation; its number changes only when it differs clearly."""
        advice = self.advice
        if advice is not None and (
            self._said is None or abs(advice.sequences - self._said.max_num_seqs) > MOVED * self._said.max_num_seqs
        ):
            self._said = EngineLimits(
                max_num_seqs=advice.sequences,
                max_num_batched_tokens=advice.batched_tokens,
                max_num_queued_tokens=advice.queued_tokens,
                max_concurrency=advice.sequences,
                reason=advice.reason,
            )
        return self._said

    def _sample(self, pod: str, before: Counters, after: Counters) -> Sample:
        come = after.requests + after.running + after.waiting - before.requests - before.running - before.waiting
        none, carried = [0] * (len(BOUNDS) + 1), None if self.advice is None else self.advice.carried
        streams = StreamSample(
            arrivals=max(0, round(come)),
            hits=0,
            missed=0,
            output_tokens=round(after.request_output_tokens - before.request_output_tokens),
            ttft=none,
            tpot=none,
            running=round(after.running),
            queued=round(after.waiting),
            gated=False,
            limit=None if carried is None else carried.sequences,
            capacity=None if carried is None else carried.rate,
            capacity_tokens=None if carried is None else carried.tokens,
        )
        seconds = after.at - before.at
        return Sample(pod, 0, seconds, False, {}, {}, 0, streams=streams)


def _targets(slo: SLO) -> Slo | None:
    if slo.ttft is None or slo.tpot is None:
        return None
    return Slo(float(slo.ttft.p99), float(slo.tpot.p99))
