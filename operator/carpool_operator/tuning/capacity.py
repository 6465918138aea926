"""How many replicas one target needs: its pods' load, in capacities of one, and what follows from that.

Scale-out is immediate, scale-in waits: the number is the largest of the last five minutes. A pod that starts, or that
nothing was read of twice, is no capacity yet. Its share of the load is with the others meanwhile, and counts there.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from carpool.forecasting.capacity import replicas
from carpool.policy.spec import Objective
from carpool_operator.api.annotations import ASKED, AUTOSCALED, FORBIDDEN
from carpool_operator.api.status import CapacityStatus
from carpool_operator.tuning.evidence import Rates

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from carpool.policy.spec import BatchingPolicy
    from carpool_operator.api.model import Workload
    from carpool_operator.tuning.evidence import Sample

SPAN = 15.0
"""Seconds of each pod's own clock over which its load is counted."""

WINDOW = 300.0
"""Seconds before fewer replicas are said to be enough: as long as an HPA waits by default."""

MOVED, MOVED_REPLICAS = 0.05, 0.1
"""Change of the load, relative and in replicas, from which a status says so: each is a write to the API server."""

LEAST, SELDOM = 10.0, 60.0
"""Seconds between two such changes, upwards and downwards."""


class Fullness(Struct, frozen=True):
    """How full a target is. Loads are in capacities of one replica."""

    load: float
    load_upper: float
    """At the upper confidence of batch latency."""
    load_zero_wait: float
    """In capacities of one that lets no request wait for others."""
    load_alone: float
    """In capacities of one that batches nothing."""
    serving: int
    utilization: float
    """Mean over the pods that serve."""
    rate: float
    """Requests per second of all pods and models."""


class TargetLoad:
    """Remembers a few readings of each pod, and how many replicas were needed lately."""

    def __init__(self) -> None:
        self.now: Fullness | None = None
        """``None``: not known, or nothing is read."""
        self._samples: dict[str, deque[Sample]] = {}
        self._needed: deque[tuple[float, int, int]] = deque()
        """(when, replicas needed, the same by the upper load), of the last ``WINDOW``."""
        self._said: CapacityStatus | None = None
        self._said_at = -inf

    def recall(self, said: CapacityStatus) -> None:
        """Go on from what another operator said: fewer replicas are enough only after the window, here too."""
        self._said = said

    def observe(self, now: float, samples: Sequence[Sample], ready: Collection[str]) -> None:
        """Take what was read; ``ready``: UIDs of the pods that serve."""
        for sample in samples:
            kept = self._samples.setdefault(sample.uid, deque())
            kept.append(sample)
            while len(kept) > 1 and sum(each.seconds for each in kept) - kept[0].seconds >= SPAN:
                kept.popleft()
        for uid in self._samples.keys() - set(ready):
            del self._samples[uid]
        self.now = self._fullness()
        if not self._needed and self._said is not None:
            self._needed.append((now, self._said.replicas, self._said.replicas_upper))
        if self.now is not None and samples:
            self._needed.append((now, replicas(self.now.load), replicas(self.now.load_upper)))
        while self._needed and now - self._needed[0][0] > WINDOW:
            self._needed.popleft()

    def _fullness(self) -> Fullness | None:
        pods = [(kept, sum(each.seconds for each in kept)) for kept in self._samples.values()]
        pods = [(kept, seconds) for kept, seconds in pods if seconds > 0]
        known: dict[str, list[Rates]] = {}
        for kept, _ in pods:
            for name, each in kept[-1].capacities.items():
                known.setdefault(name, []).append(each)
        if not known:
            return None
        loads = [0.0] * len(Rates._fields)
        rate = busy = 0.0
        for kept, seconds in pods:
            busy += sum(each.device_busy for each in kept) / seconds
            for name in {name for each in kept for name in each.models}:
                come = sum(each.models[name].arrivals for each in kept if name in each.models) / seconds
                if not come:
                    continue
                # A pod that has measured nothing yet is as the others are.
                own = kept[-1].capacities.get(name)
                capacities = known.get(name, []) if own is None else [own]
                if not capacities:
                    return None
                rate += come
                for index, rates in enumerate(zip(*capacities, strict=True)):
                    loads[index] += come * len(rates) / sum(rates)
        load, upper, zero_wait, alone = loads
        return Fullness(load, upper, zero_wait, alone, len(pods), min(busy / len(pods), 1.0), rate)

    def status(self, now: float, target: str, lowest: float | None) -> CapacityStatus | None:
        """Return what a status says of ``target``; ``lowest``: utilization within the SLO, by forecast, if known.

        Figures move with the number of replicas, or clearly: a status that differs is written.
        """
        if self.now is None or not self._needed:
            return self._said
        found = self.now
        needed = CapacityStatus(
            target=target,
            load=_figure(found.load),
            load_upper=_figure(found.load_upper),
            replicas=max(count for _, count, _ in self._needed),
            replicas_upper=max(count for _, _, count in self._needed),
            replicas_zero_wait=replicas(found.load_zero_wait),
            replicas_unbatched=replicas(found.load_alone),
            serving=found.serving,
            requests_per_second=_figure(found.rate / found.load) if found.load else None,
            utilization=_figure(found.utilization),
            lowest_utilization=None if lowest is None else _figure(lowest),
        )
        said, ago = self._said, now - self._said_at
        if said is not None:
            alike = (said.replicas, said.replicas_upper, said.serving) == (
                needed.replicas, needed.replicas_upper, needed.serving,
            )  # fmt: skip
            change = needed.load - said.load
            moved = abs(change) > max(MOVED * said.load, MOVED_REPLICAS)
            if alike and not (moved and ago >= (LEAST if change > 0 else SELDOM)):
                return said
        self._said, self._said_at = needed, now
        return needed


def _figure(value: float) -> float:
    """Round to what a person reads: three digits."""
    return float(f"{value:.3g}")


def autoscaler_of(workload: Workload | None) -> str:
    """Return what follows the load of a workload: an autoscaler that was seen, or its annotation; ``""``: nothing.

    The annotation's word counts, either way.
    """
    if workload is None:
        return ""
    said = workload.annotations.get(AUTOSCALED)
    return AUTOSCALED if said == ASKED else "" if said == FORBIDDEN else workload.autoscaler


def for_autoscaler(policy: BatchingPolicy) -> BatchingPolicy:
    """Return a policy for replicas that an autoscaler adds and takes away.

    A replica is to batch as far as the SLO allows before another one is paid for: room on the device has no other use.
    """
    return replace(policy, objective=Objective.EFFICIENCY) if policy.objective is Objective.BALANCED else policy
