"""Token streams of one target: recent counts of its pods, what runs and waits, and whether their SLO is met."""

from __future__ import annotations

from collections import deque
from math import inf, isfinite
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carpool.exchange.token_streams import BOUNDS, quantile
from carpool_operator.api.status import TokenStreamsStatus, duration, figure
from carpool_operator.tuning.slo_status import SloStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from carpool.exchange.token_streams import GateState, TokenStreams
    from carpool_operator.api.status import EngineLimits

SPAN = 60.0
"""Seconds of each pod's own clock over which requests are counted: a p99 at 5 requests/s needs 300 of them."""

SELDOM = 60.0
"""Seconds between two updates of the status: each is a write to the API server."""

MOVED = 0.1
"""Relative change of a figure from which the status is updated."""

QUANTILE = 0.99
"""Quantile of the targets for TTFT and TPOT."""

UNCOUNTED = "cancelled"
"""Outcome of a request that its client cancelled: neither met nor missed."""


class StreamSample(NamedTuple):
    """Counts of one pod's token streams between two readings, and its present state."""

    arrivals: int
    hits: int
    missed: int
    """Answers that were late, rejected requests and errors."""
    output_tokens: int
    ttft: list[int]
    tpot: list[int]
    running: int
    queued: int
    gated: bool
    limit: float | None
    capacity: float | None
    """Requests per second within the targets."""
    capacity_tokens: float | None


def difference(before: TokenStreams, after: TokenStreams) -> StreamSample | None:
    """Return the counts in between; None if that is impossible: another version of the sidecar, or no counters."""
    earlier = {each.model: each for each in before.models}
    hits = ended = tokens = 0
    ttft, tpot = [0] * (len(BOUNDS) + 1), [0] * (len(BOUNDS) + 1)
    for model in after.models:
        first = earlier.get(model.model)
        for found, name in ((ttft, "ttft"), (tpot, "tpot")):
            counts, known = getattr(model, name), [] if first is None else getattr(first, name)
            if len(counts) != len(found) or len(known) not in {0, len(found)}:
                return None
            for place, count in enumerate(counts):
                found[place] += count - (known[place] if known else 0)
        hits += model.hits - (0 if first is None else first.hits)
        tokens += model.output_tokens - (0 if first is None else first.output_tokens)
        ended += _ended(model.ends) - (0 if first is None else _ended(first.ends))
    arrivals = after.arrivals - before.arrivals
    if min(arrivals, hits, ended, tokens, after.running, after.queued, *ttft, *tpot) < 0:
        return None
    gate = after.gate
    return StreamSample(
        arrivals, hits, max(ended - hits, 0), tokens, ttft, tpot, after.running, after.queued, gate is not None,
        *_known(gate),
    )  # fmt: skip


def _ended(ends: dict[str, int]) -> int:
    return sum(count for how, count in ends.items() if how != UNCOUNTED)


def _known(gate: GateState | None) -> tuple[float | None, float | None, float | None]:
    """Return limit, capacity and capacity in tokens, as far as known."""
    if gate is None:
        return None, None, None
    values = (gate.limit, gate.capacity, gate.capacity_tokens)
    known = [value if value is not None and isfinite(value) and value > 0 else None for value in values]
    return known[0], known[1], known[2]


class FleetStreams:
    """Remembers a few readings of each pod, and the last status."""

    def __init__(self) -> None:
        self.slo_status = SloStatus(QUANTILE)
        self._samples: dict[str, deque[tuple[float, StreamSample]]] = {}
        """By pod UID: seconds, and the counts of these."""
        self._said: TokenStreamsStatus | None = None
        self._said_at = -inf

    def recall(self, said: TokenStreamsStatus) -> None:
        """Continue from another operator's status."""
        self._said = said

    def observe(self, now: float, samples: Iterable[tuple[str, float, StreamSample]], ready: Collection[str]) -> None:
        """Add (pod UID, seconds, counts); ``ready``: UIDs of the serving pods."""
        hits = missed = 0
        for uid, seconds, sample in samples:
            kept = self._samples.setdefault(uid, deque())
            kept.append((seconds, sample))
            while len(kept) > 1 and sum(each for each, _ in kept) - kept[0][0] >= SPAN:
                kept.popleft()
            if sample.gated:
                hits, missed = hits + sample.hits, missed + sample.missed
        for uid in self._samples.keys() - set(ready):
            del self._samples[uid]
        if hits or missed:
            self.slo_status.observe(now, hits, missed)

    def status(self, now: float, target: str, recommended: EngineLimits | None = None) -> TokenStreamsStatus | None:
        """Return the status of ``target``; None before the first token stream."""
        found = self._found(target)
        if found is None:
            return self._said
        found, said = replace(found, recommended=recommended), self._said
        first = said is None or (said.recommended is None and recommended is not None)
        differs = said is not None and (_moved(said, found) or said.recommended != recommended)
        if first or (differs and now - self._said_at >= SELDOM):
            self._said, self._said_at = found, now
        return self._said

    def _found(self, target: str) -> TokenStreamsStatus | None:
        pods = [(kept, sum(seconds for seconds, _ in kept)) for kept in self._samples.values()]
        if not any(sample.arrivals or sample.running or sample.queued for kept, _ in pods for _, sample in kept):
            return None

        def rate(name: str) -> float:
            sums = ((sum(getattr(each, name) for _, each in kept), seconds) for kept, seconds in pods)
            return float(sum(count / seconds for count, seconds in sums if seconds > 0))

        every = [sample for kept, _ in pods for _, sample in kept]
        last = [kept[-1][1] for kept, _ in pods]
        ttft, tpot = ([sum(column) for column in zip(*(getattr(each, name) for each in every), strict=True)]
                      for name in ("ttft", "tpot"))  # fmt: skip
        good, bad = rate("hits"), rate("missed")
        limits = [each.limit for each in last if each.limit is not None]
        return TokenStreamsStatus(
            target=target,
            gated=sum(each.gated for each in last),
            requests_per_second=figure(rate("arrivals")),
            goodput=figure(good) if any(each.gated for each in last) else None,
            miss_fraction=figure(bad / (good + bad)) if good + bad else None,
            tokens_per_second=figure(rate("output_tokens")),
            ttft_p50=duration(quantile(ttft, 0.5)),
            ttft_p99=duration(quantile(ttft, QUANTILE)),
            tpot_p50=duration(quantile(tpot, 0.5)),
            tpot_p99=duration(quantile(tpot, QUANTILE)),
            running=sum(each.running for each in last),
            queued=sum(each.queued for each in last),
            limit=round(sum(limits) / len(limits)) if limits else None,
        )


_MOVING = ("requests_per_second", "goodput", "tokens_per_second", "ttft_p99", "tpot_p99", "limit")


def _moved(said: TokenStreamsStatus, found: TokenStreamsStatus) -> bool:
    """Return whether figures differ clearly."""
    for name in _MOVING:
        before, now = getattr(said, name), getattr(found, name)
        if (before is None) != (now is None) or (now is not None and abs(now - before) > MOVED * before):
            return True
    misses = (found.miss_fraction or 0.0) - (said.miss_fraction or 0.0)
    return said.gated != found.gated or bool(said.queued) != bool(found.queued) or abs(misses) > 0.01
