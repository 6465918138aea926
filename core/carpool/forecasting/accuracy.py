"""Forecast check: answers are compared with the forecast; if they stay slower, an alarm is raised.

Quantiles are compared by counts, never by a measured p99: of 500 answers, five are expected beyond a forecast p99.
Too many beyond 1.2 times the forecast show that it is off by more than 20 %. The variation between half seconds shows
what chance explains: a burst makes one of them slow, a wrong forecast nearly all.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import stdev
from typing import TYPE_CHECKING

from carpool.batching.counters import DURATION_BOUNDS, ModelStats
from carpool.policy.durations import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


LASTING = 10.0
"""Seconds with steady parameters and load over which answers are compared."""

SETTLED_AFTER = 2.0
"""Seconds after a change that are left out: requests queued before it are still being served."""

RESUMED_AFTER = 0.5
"""Seconds after a pause of the host that are left out with it."""

PAUSED = 0.005
"""An interval is left out if the host paused for a larger share of it: one request in a hundred is late then."""

ANSWERS = 100
"""Answers needed for a comparison."""

FEWEST = 10
"""Answers beyond a limit that are evidence: fewer may be one slow batch."""

CERTAIN = 4.0
"""Standard errors beyond the forecast share that chance does not explain: a tail that is slow in every other half
second for 10 s is 4.5 off."""

HOLDS = 60.0
"""Shortest duration of an alarm, seconds; doubled if another follows within ``FORGIVEN`` times as long."""

FORGIVEN = 10.0
"""After so many times an alarm's duration without another one, the next one is short again."""

LASTS = 0.33
"""Share of the intervals that must be slow: a slow tail shows in one of three."""

SLOW = 1.2
"""Factor on the forecast from which answers are too slow for it to be right."""

OWN = 0.002
"""Seconds that the sidecar itself may take for a request; forecasts leave them out."""


class ForecastCheck:
    """Compares one model's answers with the forecast. States: collecting a window; alarmed, until ``_until``.

    Times in seconds of the observations' clock.
    """

    def __init__(self) -> None:
        self._window: deque[tuple[float, Sequence[int]]] = deque()
        """(seconds, answers by duration) of each interval."""
        self._since = -math.inf
        """When parameters or load last changed."""
        self._until = -math.inf
        """When the last alarm is, or was, over."""
        self._holds = HOLDS
        self.alarm = ""
        """A text on how answers are slower than forecast; ``""``: they are not."""

    def changed(self, now: float) -> None:
        """Restart: parameters or load changed."""
        self._window.clear()
        self._since = now

    def paused(self, now: float) -> None:
        """Leave out answers until shortly from now: the host paused, and requests waited for it."""
        self._since = max(self._since, now - SETTLED_AFTER + RESUMED_AFTER)

    def forget(self, now: float) -> None:
        """End the alarm: it was about another model, or another policy."""
        self.changed(now)
        self.alarm, self._until, self._holds = "", -math.inf, HOLDS

    def observe(
        self, now: float, seconds: float, durations: Sequence[int], expected_p99: Callable[[], float | None]
    ) -> bool:
        """Compare the answers of the last ``seconds`` on the clock; return whether an alarm began or ended.

        ``durations``: as ``ModelStats``. ``expected_p99``: called, once there are enough answers, for the forecast.
        """
        if now - seconds < self._since + SETTLED_AFTER - 1e-9:
            return False
        self._window.append((seconds, durations))
        lasted = sum(each for each, _ in self._window)
        if lasted < LASTING or sum(sum(counts) for _, counts in self._window) < ANSWERS:
            return False
        parts = [counts for _, counts in self._window if any(counts)]
        self._window.clear()
        forecast = expected_p99()
        if forecast is None:
            return False
        before, found = self.alarm, _slower(forecast, parts, lasted)
        if found and not before:
            recent = now - self._until < FORGIVEN * self._holds
            self._holds = 2 * self._holds if recent else HOLDS
            self._until = now + self._holds
        if found or now >= self._until:
            self.alarm = found
        return bool(self.alarm) != bool(before)


def _slower(forecast: float, parts: Sequence[Sequence[int]], lasted: float) -> str:
    """Return a text if answers contradict the ``forecast`` p99 (seconds); ``""``: they don't."""
    limit, allowed = SLOW * forecast + OWN, 0.01
    counts = [(_beyond(part, limit), sum(part)) for part in parts]
    total = sum(count for _, count in counts)
    seen = sum(beyond for beyond, _ in counts)
    # 1. Off by more than 20 %, by more than one slow batch?
    if seen <= allowed * total or seen < FEWEST:
        return ""
    # 2. By more than chance, all the time?
    excess = [beyond - allowed * count for beyond, count in counts]
    error = stdev(excess) * math.sqrt(len(excess)) if len(excess) > 1 else math.inf
    error = max(error, math.sqrt(allowed * (1 - allowed) * total))
    if sum(excess) <= CERTAIN * error or sum(each > 0 for each in excess) < LASTS * len(counts):
        return ""
    merged = [sum(column) for column in zip(*parts, strict=True)]
    observed = _rounded(ModelStats(durations=merged).quantile(0.99) or 0.0)
    return (
        f"p99 {observed} observed for {lasted:.0f} s, {_rounded(forecast)} forecast ({seen / total:.0%} of {total} "
        f"answers took longer than {_rounded(limit)}; {allowed:.0%} were expected at most)"
    )


def _beyond(counts: Sequence[int], seconds: float) -> float:
    """Return how many answers took longer than ``seconds``, interpolated inside its bin of the histogram."""
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
