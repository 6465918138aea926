"""Is the forecast right? Answers are compared with what was forecast, and a lasting difference raises an alarm.

Quantiles are compared by counts, never by a measured p99: of 500 answers, five are expected beyond a forecast p99.
Too many beyond 1.2 times the forecast show that it is off by more than 20 %. How many are too many by chance shows in
how much half seconds differ: a burst makes one of them slow, a wrong forecast nearly all.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import stdev
from typing import TYPE_CHECKING, NamedTuple

from carpool.batching.counters import DURATION_BOUNDS, ModelStats
from carpool.policy.durations import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from carpool.forecasting.refinement import Expected

LASTING = 10.0
"""Seconds with steady parameters and load over which answers are compared."""

SETTLED_AFTER = 2.0
"""Seconds after a change that are left out: what was queued before is still being served."""

RESUMED_AFTER = 0.5
"""Seconds after a pause of the host that are left out with it."""

PAUSED = 0.005
"""Share of an interval that the host may have paused for it to count: one request in a hundred is late then."""

ANSWERS = 100
"""Answers from which they are compared."""

FEWEST = 10
"""Answers beyond a limit that are evidence: fewer may be one slow batch."""

CERTAIN = 4.0
"""Standard errors beyond the forecast share that are no matter of chance: a tail that is slow in every other half
second for 10 s is 4.5 off."""

HOLDS = 60.0
"""Seconds for which an alarm lasts at least; doubled with each that follows within ``FORGIVEN`` times as long."""

FORGIVEN = 10.0
"""Times as long as an alarm without another one after which the next one is short again."""

SLOW = 1.2
"""Factor on the forecast from which answers are too slow for it to be right."""

QUICK = 2.0
"""Factor by which the median has to be below the forecast. Quicker answers harm nobody, and may have a harmless reason:
the largest batch that fits into the server's memory is smaller than the parameters say."""

OWN = 0.002
"""Seconds that the sidecar itself may take for a request; forecasts leave them out."""


class Alarm(NamedTuple):
    """A forecast is wrong."""

    message: str
    slow: bool
    """Whether answers take longer than forecast, not less."""


class _Limit(NamedTuple):
    """A quantile of the forecast, and what shows that it is wrong."""

    quantile: float
    forecast: float
    """Seconds."""
    seconds: float
    """Too many answers beyond it (too few, where it is below ``forecast``) show that the forecast is off."""
    lasting: float
    """Share of the intervals that have to show it: a quick median shows in most, a slow tail in one of three."""


class ForecastCheck:
    """Compares one model's answers with the forecast. States: collecting a window; alarmed, until ``_until``.

    Times in seconds of the observations' clock.
    """

    __slots__ = ("_holds", "_since", "_until", "_window", "alarm")

    def __init__(self) -> None:
        self._window: deque[tuple[float, Sequence[int]]] = deque()
        """(seconds, answers by duration) of each interval."""
        self._since = -math.inf
        """When parameters or load last changed."""
        self._until = -math.inf
        """When the last alarm is, or was, over."""
        self._holds = HOLDS
        self.alarm: Alarm | None = None

    def changed(self, now: float) -> None:
        """Begin anew: parameters or load changed."""
        self._window.clear()
        self._since = now

    def paused(self, now: float) -> None:
        """Leave out what was answered until now, and shortly after: the host paused, and others waited for that."""
        self._since = max(self._since, now - SETTLED_AFTER + RESUMED_AFTER)

    def forget(self, now: float) -> None:
        """End the alarm: it was about another model, or another policy."""
        self.changed(now)
        self.alarm, self._until, self._holds = None, -math.inf, HOLDS

    def observe(
        self, now: float, seconds: float, durations: Sequence[int], expected: Callable[[], Expected | None]
    ) -> bool:
        """Compare what was answered in the last ``seconds`` on the clock; return whether an alarm began or ended.

        ``durations``: answers by duration, as ``ModelStats``. ``expected``: asked for what the forecast for what is in
        force says, once there are enough answers.
        """
        if now - seconds < self._since + SETTLED_AFTER - 1e-9:
            return False
        self._window.append((seconds, durations))
        lasted = sum(each for each, _ in self._window)
        if lasted < LASTING or sum(sum(counts) for _, counts in self._window) < ANSWERS:
            return False
        parts = [counts for _, counts in self._window if any(counts)]
        self._window.clear()
        known = expected()
        if known is None:
            return False
        limits = (
            _Limit(0.99, known.p99, SLOW * known.p99 + OWN, 0.33),
            _Limit(0.5, known.p50, known.p50 / QUICK, 0.75),
        )
        found = next((alarm for limit in limits if (alarm := _off(limit, parts, lasted)) is not None), None)
        if found is None:
            if self.alarm is None or now < self._until:
                return False
            self.alarm = None
            return True
        if self.alarm is None:
            recent = now - self._until < FORGIVEN * self._holds
            self._holds = 2 * self._holds if recent else HOLDS
            self._until = now + self._holds
        began = self.alarm is None or self.alarm.slow != found.slow
        self.alarm = found
        return began


def _off(limit: _Limit, parts: Sequence[Sequence[int]], lasted: float) -> Alarm | None:
    """Return an alarm where answers show that a quantile is not what was forecast."""
    slow = limit.seconds > limit.forecast
    sign = 1.0 if slow else -1.0
    allowed = 1 - limit.quantile
    counts = [(_beyond(part, limit.seconds), sum(part)) for part in parts]
    total = sum(count for _, count in counts)
    seen = sum(beyond for beyond, _ in counts)
    # 1. Off by more than 20 %, by more than one slow batch?
    if sign * (seen / total - allowed) <= 0 or (seen if slow else total - seen) < FEWEST:
        return None
    # 2. By more than chance, all the time?
    excess = [beyond - allowed * count for beyond, count in counts]
    error = stdev(excess) * math.sqrt(len(excess)) if len(excess) > 1 else math.inf
    error = max(error, math.sqrt(allowed * (1 - allowed) * total))
    if sign * sum(excess) <= CERTAIN * error or sum(sign * each > 0 for each in excess) < limit.lasting * len(counts):
        return None
    merged = [sum(column) for column in zip(*parts, strict=True)]
    observed = _rounded(ModelStats(durations=merged).quantile(limit.quantile) or 0.0)
    text = f"p{100 * limit.quantile:g} {observed} observed for {lasted:.0f} s, {_rounded(limit.forecast)} forecast"
    if not slow:
        return Alarm(f"{text}: answers are quicker than that", slow)
    return Alarm(
        f"{text} ({seen / total:.0%} of {total} answers took longer than {_rounded(limit.seconds)}; "
        f"{allowed:.0%} were expected at most)",
        slow,
    )


def _beyond(counts: Sequence[int], seconds: float) -> float:
    """Return how many answers took longer; of the part of the histogram that it lies in, by its place in there."""
    low = 0.0
    beyond: float = 0
    for high, count in zip((*DURATION_BOUNDS, math.inf), counts, strict=True):
        if low >= seconds:
            beyond += count
        elif high > seconds and count and high < math.inf and low > 0:
            beyond += count * math.log(high / seconds) / math.log(high / low)
        low = high
    return beyond


def _rounded(seconds: float) -> str:
    return format_seconds(float(f"{seconds:.3g}"))
