"""Parameters from outside are on probation: where they miss the SLO that those before them met, those come back."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from carpool.learning.miss_test import MissTest

if TYPE_CHECKING:
    from carpool.policy.parameters import Parameters

PROVEN_AFTER = 10.0
"""Seconds with traffic that parameters have to last before they count as good: a queue that grows takes its time."""

SUSTAINED = 5.0
"""Seconds over which a load is more than a burst."""

COMPARABLE = 1.25
"""Load, in terms of the highest that was coped with, up to which parameters that were chosen well go on to cope."""

UPSTREAMS = 0.02
"""Share of failed requests in an interval from which the upstream is at fault for what was late beside them, too."""


class Verdict(NamedTuple):
    """Go back."""

    rejected: Parameters
    generation: int
    """The one that brought them."""
    back_to: Parameters
    back_to_generation: int
    reason: str


class _Standing:
    """What is known of one set of parameters."""

    def __init__(self, parameters: Parameters, generation: int, quantile: float) -> None:
        self.parameters = parameters
        self.generation = generation
        self.against = MissTest(quantile)
        self.proof = MissTest(quantile)
        self.seconds = 0.0
        self.good = False
        self.peak = 0.0
        """Rows per second of the busiest interval in which the SLO was met."""
        self.sustained = 0.0
        """The same over ``SUSTAINED`` seconds."""

    def copes(self, rate: float, sustained: float) -> bool:
        """Whether these ought to cope with a load, rows per second, if they are good."""
        return rate <= COMPARABLE * self.peak and sustained <= COMPARABLE * self.sustained


class Probation:
    """One model's. Good are parameters that were seen to meet the SLO, by a test as sure as the one of misses.

    New ones that fail before they are good are taken back, if those before them were good at a comparable load.
    Evidence against is taken only from intervals in which no more rows came than ``COMPARABLE`` times what the good
    ones coped with, in a single interval and over ``SUSTAINED`` seconds; evidence for, at any load.
    """

    def __init__(self, quantile: float, parameters: Parameters, generation: int) -> None:
        """Begin with the parameters in force, of which nothing is known. ``quantile``: of the SLO, 0.99 for p99."""
        self._quantile = quantile
        self._now = _Standing(parameters, generation, quantile)
        self._before: _Standing | None = None
        """The good ones, while those in force are not."""
        self._recent: deque[tuple[float, int]] = deque()

    @property
    def parameters(self) -> Parameters:
        """Those in force."""
        return self._now.parameters

    @property
    def generation(self) -> int:
        """The change that named those in force last."""
        return self._now.generation

    @property
    def good(self) -> bool:
        """Whether those in force were seen to meet the SLO."""
        return self._now.good

    def change(self, parameters: Parameters, generation: int) -> None:
        """Take note of a change; one that names the same parameters goes on with what is known of them."""
        if parameters == self._now.parameters:
            self._now.generation = generation
            return
        if self._now.good:
            self._before = self._now
        if self._before is not None and self._before.parameters == parameters:
            self._return()
            self._now.generation = generation
        else:
            self._now = _Standing(parameters, generation, self._quantile)

    def lead_to(self, parameters: Parameters) -> None:
        """Take note of what first calls led to: what is known of them is of that."""
        self._now.parameters = parameters

    def forget(self) -> None:
        """Forget what was good: the model, its server, or the SLO is another one."""
        self._now = _Standing(self._now.parameters, self._now.generation, self._quantile)
        self._before = None
        self._recent.clear()

    def observe(self, seconds: float, rows: int, hits: int, late: int, failed: int) -> Verdict | None:
        """Take what was counted in an interval; return whether to go back, having done so here.

        ``rows`` arrived; ``hits`` requests were answered in time, ``late`` ones missed as other parameters might have
        avoided, ``failed`` ones by the upstream's fault.
        """
        now = self._now
        requests = hits + late
        self._recent.append((seconds, rows))
        lasted = sum(each for each, _ in self._recent)
        while lasted - self._recent[0][0] >= SUSTAINED:
            lasted -= self._recent.popleft()[0]
        rate, sustained = rows / seconds, sum(each for _, each in self._recent) / lasted
        if not requests or failed > UPSTREAMS * (requests + failed):
            return None
        # 1. For them: at whatever load it was.
        now.seconds += seconds
        now.proof.observe(hits, late)
        if late <= now.proof.bad * requests:
            now.peak, now.sustained = max(now.peak, rate), max(now.sustained, sustained)
        if now.proof.is_met and now.seconds >= PROVEN_AFTER and not now.good:
            now.good = True
            self._before = None
        # 2. Against them: not at a load that may be too high for any parameters.
        good = now if now.good else self._before
        if good is not None and not good.copes(rate, sustained):
            now.against.restart()
            return None
        if not now.against.observe(hits, late):
            return None
        # 3. They are not good, or no more.
        counted = now.against
        reason = f"{counted.misses} of {counted.requests} requests were late where {1 - self._quantile:.3g} may be"
        if self._before is None:
            self._now = _Standing(now.parameters, now.generation, self._quantile)
            return None
        self._return()
        return Verdict(now.parameters, now.generation, self._now.parameters, self._now.generation, reason)

    def _return(self) -> None:
        """Have the good ones in force again."""
        assert self._before is not None  # noqa: S101 - for the type checker: asked before
        self._now, self._before = self._before, None
        self._now.against.restart()
