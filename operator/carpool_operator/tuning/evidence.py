"""Evidence from a fleet's counters: differences pod by pod, rejected if implausible, and summed where allowed.

No decision uses a counter by itself. Each reading of a pod is compared with the one before it. It needs the same
process, elapsed time, plausible numbers, one configuration for the whole interval, and a host that did not pause. Valid
differences are summed, because counters are additive; each rejected one has a reason, which the policy's status
reports.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from math import inf, isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from carpool.batching.counters import DURATION_BOUNDS, LONGEST_GAP, ROW_BOUNDS, WINDOW, ModelStats, Stats, combine
from carpool.exchange.decision import STALLED_SHARE
from carpool.exchange.token_streams import TokenStreams
from carpool_operator.tuning.token_streams import difference

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from carpool.exchange.report import Report, RolledBack
    from carpool.policy.parameters import Parameters
    from carpool_operator.api.model import Pod, Reading
    from carpool_operator.tuning.token_streams import StreamSample

MOST_PER_SECOND = 1e6
"""Most plausible requests per second of one pod: fifty times what a sidecar's core can pass on."""

LONGEST_BATCH = 3600.0
"""Longest plausible batch in seconds; no upstream may be silent for so long."""

CLOCKS_APART = 1.0
"""Seconds by which a process's uptime may grow less than its clock, and still be the same process."""

QUORUM = 0.5
"""Least share of the ready pods that must be readable: the few that answer may be better or worse than the others."""

_COUNTS = (
    "arrivals", "batchable", "arrivals_squared", "windows", "rows", "dispatched", "served", "hits", "limited",
    "limited_rows", "cold", "stalled", "bisections",
)  # fmt: skip


class Rates(NamedTuple):
    """Requests per second of a model that a pod can serve within the SLO."""

    best: float
    """0: no load is forecast to meet it."""
    lower: float
    """At the upper confidence of batch latency."""
    zero_wait: float
    """If requests never wait for others."""
    alone: float
    """Without batching."""
    by_hand: float | None = None
    """With the policy's baseline; ``None``: there is none, or the pod does not report it."""


class Sample(NamedTuple):
    """What one pod counted between two readings."""

    uid: str
    generation: int
    """Of the configuration in use for the whole interval; 0 where it changed."""
    seconds: float
    """Of the pod's own clock."""
    stalled: bool
    """Whether its host paused for so long that the interval shows nothing about the model."""
    models: dict[str, ModelStats]
    passing: dict[str, bool]
    queued_rows: int
    paused: float = 0.0
    """Seconds that its host paused."""
    device_busy: float = 0.0
    """Seconds with at least one batch in flight, of any model."""
    capacities: Mapping[str, Rates] = MappingProxyType({})
    """By model, as far as the pod knows them."""
    streams: StreamSample | None = None
    """Token streams; ``None`` where it has none, or they are unknown."""
    partial: bool = False
    """Whether it may have token streams whose load is unknown."""
    in_force: Mapping[str, Parameters] = MappingProxyType({})
    """By model: the parameters that its batches use now. First calls change them, without a document."""


class Sum(NamedTuple):
    """One model over several pods."""

    pods: int
    seconds: float
    """Of all pods together, so that a quotient by it is per replica."""
    stats: ModelStats
    passing: bool
    """Whether its requests pass through one by one on most of the pods."""
    queued_rows: int
    """Mean of the pods' queues, rounded up."""
    paused: float = 0.0
    """Seconds that the pods' hosts paused, in total."""
    device_busy: float = 0.0
    """Seconds with at least one batch of any model in flight, of all pods in total."""
    others: tuple[float, float] = (0.0, 0.0)
    """What other models used (``Stats.others``)."""
    in_force: Parameters | None = None
    """Parameters on most of the pods; ``None``: none knows the model."""


def add_up(samples: Iterable[Sample]) -> dict[str, Sum]:
    """Sum over pods, by model; pods that do not know a model yet add no traffic."""
    chosen = list(samples)
    if not chosen:
        return {}
    seconds = sum(sample.seconds for sample in chosen)
    paused = sum(sample.paused for sample in chosen)
    busy = sum(sample.device_busy for sample in chosen)
    queued = -(-sum(sample.queued_rows for sample in chosen) // len(chosen))
    names = dict.fromkeys(name for sample in chosen for name in sample.models)
    sums = {}
    for name in names:
        passing = [sample.passing[name] for sample in chosen if name in sample.passing]
        stats = combine([sample.models[name] for sample in chosen if name in sample.models])
        work, wall = zip(*(Stats(0.0, one.device_busy, one.models).others(name) for one in chosen), strict=True)
        passes = 2 * sum(passing) >= len(passing)
        in_force = _most([sample.in_force[name] for sample in chosen if name in sample.in_force])
        sums[name] = Sum(len(chosen), seconds, stats, passes, queued, paused, busy, (sum(work), sum(wall)), in_force)
    return sums


def _most(parameters: Sequence[Parameters]) -> Parameters | None:
    """Return the parameters of most pods; if equal, those with more in flight."""
    counts = Counter(parameters)
    return max(counts, key=lambda each: (counts[each], each.max_in_flight, each.max_batch), default=None)


class Seen(Struct):
    """State of a pod: its last good reading, and the results of later ones."""

    name: str
    template_hash: str
    since: float
    """When it was first expected to be readable; on the operator's clock, as ``at``."""
    read_at: float = -inf
    """Time of the last reading, good or bad."""
    at: float = -inf
    """Time of the last good one."""
    error: str = ""
    """Error of the last one; ``""``: none."""
    note: str = ""
    """Why the last good one lacked token streams."""
    generation: int = 0
    running: int = 0
    change_error: str = ""
    uptime: float = 0.0
    stalled: float = 0.0
    replaced: dict[str, int] = field(default_factory=dict)
    counters: bytes = b""
    """Its counters as MessagePack: a fifth of the memory of the objects, because thousands of pods are remembered."""
    streams: bytes = b""
    """Its token streams as MessagePack; ``b""`` where it has none."""

    def record(self, reading: Reading, report: Report) -> None:
        """Record a good reading."""
        self.at, self.note = reading.at, reading.note
        self.generation, self.running = report.generation, report.running
        self.change_error = report.change_error or ""
        self.uptime, self.stalled = report.uptime_seconds, report.stalls.seconds
        self.replaced = {name: lane.replaced for name, lane in report.lanes.items()}
        self.counters = msgspec.msgpack.encode(report.stats)
        streams = report.token_streams
        self.streams = msgspec.msgpack.encode(streams) if streams.arrivals or streams.models else b""


class Gathered(NamedTuple):
    """The result of a fleet's readings."""

    samples: list[Sample]
    failing: dict[str, str]
    """Ready pods that cannot be read, by name, and why."""
    expected: int
    """Pods that should have been readable."""
    fresh: bool
    """Whether there was any new reading."""
    replaced: list[tuple[str, str]]
    """(pod UID, model) whose model was replaced since the previous reading."""
    rolled_back: list[tuple[str, RolledBack]]
    """By pod UID: what sidecars rolled back of the newest document they have."""

    @property
    def readable(self) -> bool:
        """Whether enough pods answer to represent all."""
        return len(self.failing) <= QUORUM * self.expected and len(self.failing) < max(self.expected, 1)


class Evidence:
    """The memory of a target's pods. Bounded by their number: missing pods are forgotten."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.pods: dict[str, Seen] = {}
        self.hash: str | None = None
        """Hash of the pod template that is learned from: that of most pods."""

    @property
    def heard(self) -> bool:
        """Whether any pod was ever read."""
        return any(seen.at > -inf for seen in self.pods.values())

    @property
    def newest(self) -> float:
        """Time of the last good reading."""
        return max((seen.at for seen in self.pods.values()), default=-inf)

    def turn(self, pods: Sequence[Pod]) -> bool:
        """Follow a rollout: learn from the template of most ready pods; returns whether it changed."""
        hashes = Counter(pod.template_hash for pod in pods if pod.ready and not pod.deleting)
        if not hashes:
            return False
        # While two have equally many pods, it keeps the present one.
        most = max(hashes, key=lambda each: (hashes[each], each == self.hash))
        before, self.hash = self.hash, most
        return before is not None and most != before

    def gather(self, now: float, pods: Sequence[Pod], readings: Mapping[str, Reading], stale_after: float) -> Gathered:
        """Add the readings since the last time."""
        for uid in self.pods.keys() - {pod.uid for pod in pods}:
            del self.pods[uid]
        gathered = Gathered([], {}, 0, False, [], [])
        fresh, expected = False, 0
        for pod in pods:
            seen = self.pods.get(pod.uid)
            if seen is None:
                seen = self.pods[pod.uid] = Seen(pod.name, pod.template_hash, now)
            reading = readings.get(pod.uid)
            if reading is not None and reading.at > seen.read_at:
                fresh = True
                seen.read_at = reading.at
                sample = self._read(pod.uid, seen, reading, gathered)
                if sample is not None and pod.template_hash == self.hash and not pod.deleting:
                    gathered.samples.append(sample)
            if pod.ready and not pod.deleting:
                expected += 1
                if seen.error:
                    gathered.failing[pod.name] = seen.error
                elif now - max(seen.at, seen.since) > stale_after:
                    gathered.failing[pod.name] = "nothing was read of it for too long"
        return gathered._replace(fresh=fresh, expected=expected)

    def _read(self, uid: str, seen: Seen, reading: Reading, gathered: Gathered) -> Sample | None:
        report = reading.report
        if report is None:
            seen.error = reading.error or "no answer"
            return None
        seen.error = self._wrong(report)
        if seen.error:
            return None
        before = copy(seen)
        seen.record(reading, report)
        gathered.rolled_back.extend((uid, each) for each in report.rolled_back)
        if not before.counters:
            return None
        earlier = msgspec.msgpack.decode(before.counters, type=Stats)
        seconds = report.stats.at - earlier.at
        if report.uptime_seconds - before.uptime < seconds - CLOCKS_APART:
            # Another process: its counters began at 0, at an unknown time.
            return None
        if seconds <= 0:
            return None  # the snapshot is already known
        since = report.stats.since(earlier)
        models = since.models
        seen.error = next(
            (f"{wrong} (model {name!r})" for name, s in models.items() if (wrong := _absurd(s, seconds))), ""
        )
        if seen.error:
            seen.counters = b""  # it is unknown which of the two is wrong, so the next one is compared with neither
            return None
        replaced = {
            name for name, count in seen.replaced.items() if name in before.replaced and count != before.replaced[name]
        }
        gathered.replaced.extend((uid, name) for name in sorted(replaced))
        for name in replaced & models.keys():
            # Some of these service times belong to the other model.
            models[name] = replace(models[name], cells=[])
        # Token streams that were left out have no previous counts.
        streams = None if before.note else _streams(before.streams, report.token_streams, seconds)
        stalled = report.stalls.seconds - before.stalled
        return Sample(
            uid=uid,
            generation=report.running if report.running == before.running else 0,
            seconds=seconds,
            stalled=stalled > STALLED_SHARE * seconds,
            models=models,
            passing={name: lane.pass_through for name, lane in report.lanes.items()},
            queued_rows=report.queue.rows,
            paused=max(stalled, 0.0),
            device_busy=since.device_busy,
            capacities=_capacities(report),
            streams=streams,
            partial=bool(reading.note)
            or (streams is None and bool(seen.streams) and report.token_streams.gate is not None),
            in_force={name: lane.parameters for name, lane in report.lanes.items()},
        )

    def _wrong(self, report: Report) -> str:
        """Return what makes a report implausible by itself; ``""``: nothing."""
        if report.target not in {"", self._target}:  # Prometheus does not report it
            return f"its sidecar takes changes for {report.target}: restart the pod"
        stats = report.stats
        if not all(map(_real, (stats.at, stats.device_busy, report.uptime_seconds, report.stalls.seconds))):
            return "its clock is no number"
        if report.queue.rows < 0:
            return "its queue is negative"
        for name, model in stats.models.items():
            if len(model.durations) != len(DURATION_BOUNDS) + 1:
                return (
                    f"its histogram has {len(model.durations)} parts: another version of the sidecar; restart the pod"
                )
            if model.request_rows and len(model.request_rows) != len(ROW_BOUNDS) + 1:
                return f"its histogram of rows has {len(model.request_rows)} parts: restart the pod"
            counts = (*(getattr(model, count) for count in _COUNTS), *model.misses.values(), *model.request_rows)
            if any(count < 0 for count in counts):
                return f"its counters are negative (model {name!r})"
            if not _real(model.gaps_squared):
                return f"the gaps between its arrivals are no numbers (model {name!r})"
            for cell in model.cells:
                busy, squared = cell[5], cell[6]
                if not (_real(busy) and _real(squared)) or min(cell[:5]) < 0:
                    return f"its service times are no numbers (model {name!r})"
        return ""


def _streams(before: bytes, after: TokenStreams, seconds: float) -> StreamSample | None:
    """Return the token streams counted in ``seconds``; the first ones are counted from 0."""
    if not after.arrivals and not after.models:
        return None
    found = difference(msgspec.msgpack.decode(before, type=TokenStreams) if before else TokenStreams(), after)
    possible = found is not None and found.arrivals <= MOST_PER_SECOND * max(seconds, 1.0)
    return found if possible else None


def _capacities(report: Report) -> dict[str, Rates]:
    """Return the capacities, as far as known; those that a pod does not report equal its best.

    A best of 0 is known, too: no load is forecast to meet the SLO.
    """
    found = {}
    for name, lane in report.lanes.items():
        best = lane.capacity
        if best is not None and isfinite(best) and best >= 0:
            others = (lane.capacity_lower, lane.capacity_zero_wait, lane.capacity_alone)
            hand = lane.capacity_by_hand
            lower, zero_wait, alone = (min(each, best) if each and each > 0 else best for each in others)
            found[name] = Rates(best, lower, zero_wait, alone, min(hand, best) if hand and hand > 0 else None)
    return found


def _real(value: float) -> bool:
    return isfinite(value) and value >= 0


def _absurd(stats: ModelStats, seconds: float) -> str:
    """Return what is implausible in an interval; ``""``: nothing."""
    if stats.arrivals > MOST_PER_SECOND * max(seconds, 1.0):
        return f"{stats.arrivals} requests in {seconds:.3g} s"
    if stats.batchable > stats.arrivals:
        return f"{stats.batchable} batchable requests of {stats.arrivals}"
    if stats.gaps_squared > 1.01 * LONGEST_GAP**2 * stats.arrivals:  # differences of sums are rounded
        return f"{stats.arrivals} gaps between arrivals whose squares sum up to {stats.gaps_squared:.3g} s2"
    if sum(stats.request_rows) > stats.arrivals:
        return f"{sum(stats.request_rows)} requests by rows, of {stats.arrivals}"
    if stats.limited_rows < stats.limited:
        return f"{stats.limited} limited batches with {stats.limited_rows} rows allowed"
    if stats.windows * WINDOW > 2 * seconds + 1.0:
        return f"{stats.windows} windows of {WINDOW} s in {seconds:.3g} s"
    for cell in stats.cells:
        batches, busy, squared = cell[4:]
        # The mean of squares is never below the square of the mean; rounding may violate that in the last bits.
        if busy < 0 or squared < 0 or busy > LONGEST_BATCH * batches or squared * batches < 0.99 * busy * busy - 1e-9:
            return f"{batches} batches that took {busy:.3g} s"
    return ""
