"""Whether there is evidence to decide on: checks, each with a reason, and the result when there is none for long."""

from __future__ import annotations

from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from carpool.exchange.decision import Reason
from carpool.policy.spec import FallbackBehavior

if TYPE_CHECKING:
    from carpool_operator.api.spec import PolicySpec
    from carpool_operator.tuning.evidence import Gathered


class Blind(NamedTuple):
    """Why there is no evidence."""

    reason: str
    message: str


class Turn(Enum):
    """What the evidence allows."""

    SEEING = auto()
    BLIND = auto()
    """There is nothing to decide on now."""
    LOST = auto()
    """There has been nothing for too long: fall back. Reported once."""
    RECOVERED = auto()
    """There is evidence again after that. Reported once."""


class Trust:
    """Remembers how long evidence has been missing.

    One lost answer has no effect. Evidence is lost when it is older than ``metrics.staleAfter`` and
    ``fallback.failureThreshold`` readings in a row have failed.
    """

    def __init__(self) -> None:
        self.blind: Blind | None = None
        """``None`` while there is evidence."""
        self.good_at = inf
        """Time of the last evidence, or since when some was expected; the operator's clock."""
        self._failures = 0
        self._lost = False

    def take(self, now: float, spec: PolicySpec, gathered: Gathered, newest: float, *, frozen: bool = False) -> Turn:
        """Check what was gathered; ``newest``: time of the last good reading.

        ``frozen``: whether parameters have to stay. A fallback that would change them waits until they need not.
        """
        if not gathered.expected:
            self.blind = Blind("NoPodsReady", "no pod with a sidecar is ready")
            self.good_at = now  # nothing is expected
            return Turn.BLIND
        self.good_at = min(self.good_at, now)
        if not gathered.readable:
            name, error = min(gathered.failing.items())
            count = f"{len(gathered.failing)} of {gathered.expected} pods cannot be read"
            self.blind = Blind(Reason.METRICS_STALE, f"{count}, among them {name}: {error}")
            stale = now - self.good_at > spec.metrics.stale_seconds
            self._failures += gathered.fresh or stale
            if self._lost or not stale or self._failures < spec.fallback.failure_threshold:
                return Turn.BLIND
            if frozen and spec.fallback.behavior is FallbackBehavior.BASELINE:
                return Turn.BLIND
            self._lost = True
            return Turn.LOST
        if not gathered.fresh:
            return Turn.BLIND
        if gathered.samples and all(sample.stalled for sample in gathered.samples):
            message = "the pods' hosts paused; what was measured meanwhile is not used"
            self.blind = Blind(Reason.HOST_STALLED, message)
            return Turn.BLIND
        self.blind = None
        self.good_at = max(self.good_at, newest)
        self._failures = 0
        if self._lost and gathered.samples:
            self._lost = False
            return Turn.RECOVERED
        return Turn.SEEING
