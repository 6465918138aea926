"""How many replicas one target needs, from its pods' load in capacities of one replica.

Scale-out is immediate, scale-in waits: the number is the largest of the last five minutes. A pod that starts, or that
has fewer than two readings, adds no capacity yet. The other pods serve its share of the load meanwhile, and it counts
there. If a part of a pod's load can't be read, its last load is used. Without one, the target's load is unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from carpool.forecasting.capacity import FULL, replicas
from carpool.policy.durations import Duration
from carpool.policy.spec import Objective
from carpool_operator.api.annotations import ASKED, AUTOSCALED, FORBIDDEN
from carpool_operator.api.status import CapacityStatus, figure
from carpool_operator.tuning.evidence import Rates

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from carpool.policy.spec import BatchingPolicy
    from carpool_operator.api.model import Workload
    from carpool_operator.tuning.evidence import Sample

SPAN = 15.0
"""Seconds of each pod's own clock over which its load is measured."""

WINDOW = 300.0
"""Seconds before fewer replicas are reported as enough: as long as an HPA waits by default."""

MOVED, MOVED_REPLICAS = 0.05, 0.1
"""Change of the load, relative and in replicas, from which the status is updated: each update is a write to the API
server."""

LEAST, SELDOM = 10.0, 60.0
"""Seconds between two such updates, upwards and downwards."""


WAYS = 4
"""The capacities of a pod that every sidecar reports."""

STREAMS = "<token streams>"
"""In place of a model's name: all token streams of a pod. No model has this name."""


class Fullness(Struct, frozen=True):
    """How full a target is. Loads are in capacities of one replica."""

    load: float
    load_upper: float
    """At the upper confidence of batch latency."""
    load_zero_wait: float
    """In capacities of a replica where requests never wait for others."""
    load_alone: float
    """In capacities of a replica without batching."""
    load_by_hand: float | None
    """In capacities of a replica that uses the policy's baseline; ``None``: there is none, or not all pods report
    it."""
    full: float
    """Load at which a replica counts as full."""
    serving: int
    utilization: float
    """Mean over the serving pods."""
    rate: float
    """Requests per second of all pods and models."""
    tokens: float | None = None
    """Output tokens per second that one replica can serve, of token streams."""


class Needed(NamedTuple):
    """Replicas that a load needs."""

    best: int
    upper: int
    """At the upper confidence of batch latency."""
    zero_wait: int
    unbatched: int
    by_hand: int | None


class _Counted(Struct, frozen=True):
    """The part of a sample that is kept: a tenth of its memory, because thousands of pods are remembered."""

    seconds: float
    busy: float
    arrivals: tuple[tuple[str, int], ...]
    """By model; token streams only where a gate has targets for them."""


class _PodLoad(Struct):
    """The last ``SPAN`` seconds of a pod, and its capacity by model."""

    counted: list[_Counted]
    """A short list: a deque would take six times the memory."""
    capacities: Mapping[str, Rates]
    tokens: float | None = None
    """Output tokens per second that it can serve, for token streams."""

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.counted)

    @property
    def arrivals(self) -> dict[str, int]:
        """In these seconds, by model."""
        found: dict[str, int] = {}
        for each in self.counted:
            for name, count in each.arrivals:
                found[name] = found.get(name, 0) + count
        return found


class TargetLoad:
    """Remembers a few readings of each pod, and the numbers of replicas needed recently."""

    def __init__(self) -> None:
        self.now: Fullness | None = None
        """``None``: unknown, nothing was read, or ``unmet``."""
        self.unmet: str | None = None
        """A model with requests for which no number of replicas meets the SLO, by what most of its pods report."""
        self._pods: dict[str, _PodLoad] = {}
        self._needed: deque[tuple[float, Needed]] = deque()
        """Times and numbers of replicas needed, of the last ``WINDOW``."""
        self._said: CapacityStatus | None = None
        self._said_at = -inf

    def recall(self, said: CapacityStatus) -> None:
        """Continue from another operator's status: here, too, fewer replicas are enough only after the window."""
        self._said = said

    def observe(self, now: float, samples: Sequence[Sample], ready: Collection[str], full: float = FULL) -> None:
        """Add readings; ``ready``: UIDs of the serving pods; ``full``: load of a full replica."""
        for sample in samples:
            pod = self._pods.setdefault(sample.uid, _PodLoad([], {}))
            if sample.partial:
                continue  # the known part would be too low: its last load is used
            pod.capacities = sample.capacities
            arrivals = {name: stats.arrivals for name, stats in sample.models.items()}
            # Token streams are one more load on the same device: their gate learns one capacity for all of them, not by
            # model.
            streams = sample.streams
            pod.tokens = None if streams is None else streams.capacity_tokens
            if streams is not None and (streams.gated or streams.capacity):
                arrivals[STREAMS] = streams.arrivals
            if streams is not None and streams.capacity:
                each = Rates(*[streams.capacity] * WAYS)
                pod.capacities = {**sample.capacities, STREAMS: each}
            pod.counted.append(_Counted(sample.seconds, sample.device_busy, tuple(arrivals.items())))
            while len(pod.counted) > 1 and pod.seconds - pod.counted[0].seconds >= SPAN:
                del pod.counted[0]
        for uid in self._pods.keys() - set(ready):
            del self._pods[uid]
        self.now = self._fullness(full)
        if not self._needed and self._said is not None:
            said = self._said
            before = Needed(
                said.replicas, said.replicas_upper, said.replicas_zero_wait, said.replicas_unbatched,
                said.replicas_by_hand,
            )  # fmt: skip
            self._needed.append((now, before))
        if self.now is not None and samples:
            found = self.now
            loads = found.load, found.load_upper, found.load_zero_wait, found.load_alone
            best, upper, zero_wait, unbatched = (replicas(load, full) for load in loads)
            hand = None if found.load_by_hand is None else replicas(found.load_by_hand, full)
            self._needed.append((now, Needed(best, upper, zero_wait, unbatched, hand)))
        while self._needed and now - self._needed[0][0] > WINDOW:
            self._needed.popleft()

    def _fullness(self, full: float) -> Fullness | None:
        self.unmet = None
        pods = list(self._pods.values())
        if not all(pod.counted for pod in pods):
            return None  # a load with an unknown part
        known: dict[str, list[Rates]] = {}
        for pod in pods:
            for name, rates in pod.capacities.items():
                known.setdefault(name, []).append(rates)
        if not known:
            return None
        # One pod may forecast less than the others; it is assumed to be like them.
        never = {name for name, rates in known.items() if 2 * sum(each.best == 0 for each in rates) > len(rates)}
        known = {name: [each for each in rates if each.best > 0] for name, rates in known.items()}
        loads = [0.0] * WAYS
        by_hand = 0.0 if any(each.by_hand is not None for some in known.values() for each in some) else None
        rate = busy = 0.0
        for pod in pods:
            busy += sum(each.busy for each in pod.counted) / pod.seconds
            for name, count in pod.arrivals.items():
                if not (come := count / pod.seconds):
                    continue
                if name in never:
                    self.unmet = name
                    return None
                # A pod without measurements yet is assumed to be like the others.
                own = pod.capacities.get(name)
                capacities = known.get(name, []) if own is None or own.best == 0 else [own]
                if not capacities:
                    return None
                rate += come
                *ways, hands = zip(*capacities, strict=True)
                for index, each in enumerate(ways):
                    loads[index] += come * len(each) / sum(each)
                by_hand = None if by_hand is None or None in hands else by_hand + come * len(hands) / sum(hands)
        load, upper, zero_wait, alone = loads
        tokens = [pod.tokens for pod in pods if pod.tokens]
        mean = sum(tokens) / len(tokens) if tokens else None
        busy = min(busy / len(pods), 1.0)
        return Fullness(load, upper, zero_wait, alone, by_hand, full, len(pods), busy, rate, mean)

    def status(
        self, now: float, target: str, lowest: float | None, cold_start: float | None = None
    ) -> CapacityStatus | None:
        """Return the status of ``target``; ``None`` if it is unknown, or ``unmet``.

        ``lowest``: forecast utilization within the SLO, if known.
        ``cold_start``: seconds from its pods' creation until they were ready, if observed.

        Figures change with the number of replicas, or when they differ clearly: a status that differs is written.
        """
        if self.unmet is not None:
            return None  # the last figures were another SLO's, or another model's
        if self.now is None or not self._needed:
            return self._said
        found = self.now
        # All over the same time: after a peak, zero wait would otherwise look better only because the load fell.
        *ways, hands = zip(*(each for _, each in self._needed), strict=True)
        by_hand = max((each for each in hands if each is not None), default=None)
        best, upper, zero_wait, unbatched = map(max, ways)
        most = Needed(best, upper, zero_wait, unbatched, by_hand)
        needed = CapacityStatus(
            target=target,
            load=figure(found.load),
            load_upper=figure(found.load_upper),
            replicas=most.best,
            replicas_upper=most.upper,
            replicas_zero_wait=most.zero_wait,
            replicas_unbatched=most.unbatched,
            replicas_by_hand=None if found.load_by_hand is None else most.by_hand,
            target_load=None if found.full == FULL else figure(found.full),
            serving=found.serving,
            requests_per_second=figure(found.rate / found.load) if found.load else None,
            tokens_per_second=None if found.tokens is None else figure(found.tokens),
            utilization=figure(found.utilization),
            lowest_utilization=None if lowest is None else figure(lowest),
            cold_start=self._cold_start(cold_start),
        )
        said, ago = self._said, now - self._said_at
        if said is not None:
            alike = _counted(said) == _counted(needed)
            change = needed.load - said.load
            moved = abs(change) > max(MOVED * said.load, MOVED_REPLICAS)
            if alike and not (moved and ago >= (LEAST if change > 0 else SELDOM)):
                return said
        self._said, self._said_at = needed, now
        return needed

    def _cold_start(self, seen: float | None) -> Duration | None:
        """Return the observed time; before any start, the one in the previous status."""
        if seen is not None:
            return Duration(figure(seen))
        return None if self._said is None else self._said.cold_start


def _counted(said: CapacityStatus) -> tuple[object, ...]:
    """Return the part that is written as soon as it differs."""
    known = said.replicas_by_hand is not None, said.cold_start is not None
    return said.replicas, said.replicas_upper, said.target_load, said.serving, *known


def autoscaler_of(workload: Workload | None) -> str:
    """Return what follows the load of a workload: an autoscaler, or the annotation; ``""``: nothing.

    The annotation takes precedence, either way.
    """
    if workload is None:
        return ""
    said = workload.annotations.get(AUTOSCALED)
    return AUTOSCALED if said == ASKED else "" if said == FORBIDDEN else workload.autoscaler


def full_of(workload: Workload | None) -> float:
    """Return the load at which a replica of a workload is full: the autoscaler's target, else 0.9."""
    return workload.full or FULL if workload is not None and autoscaler_of(workload) else FULL


def for_autoscaler(policy: BatchingPolicy) -> BatchingPolicy:
    """Return a policy for replicas that an autoscaler adds and removes.

    A replica should batch as far as the SLO allows before another one is added: free device time has no other use.
    """
    return replace(policy, objective=Objective.EFFICIENCY) if policy.objective is Objective.BALANCED else policy
