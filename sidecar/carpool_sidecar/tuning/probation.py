"""Probation of parameters from outside: if they miss the SLO that the previous ones met, these are restored."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from carpool.learning.miss_test import MissTest

if TYPE_CHECKING:
    from carpool.policy.parameters import Parameters

PROVEN_AFTER = 10.0
"""Seconds with traffic before parameters can count as good: a queue needs time to grow."""

SUSTAINED = 5.0
"""Seconds over which a load is more than a burst."""

COMPARABLE = 1.25
"""Load, relative to the highest at which the SLO was met, up to which good parameters should still meet it."""

UPSTREAMS = 0.02
"""Share of failed requests in an interval from which late requests in it are also the upstream's fault."""


class Verdict(NamedTuple):
    """Roll back."""

    rejected: Parameters
    generation: int
    """The change that brought them."""
    back_to: Parameters
    back_to_generation: int
    reason: str


class Standing:
    """The evidence on one set of parameters."""

    def __init__(self, parameters: Parameters, generation: int, quantile: float) -> None:
        self.parameters = parameters
        self.generation = generation
        """The change that named them last."""
        self.against = MissTest(quantile)
        self.proof = MissTest(quantile)
        self.seconds = 0.0
        self.good = False
        """Whether they have been shown to meet the SLO."""
        self.peak = 0.0
        """Rows per second of the busiest interval in which the SLO was met."""
        self.sustained = 0.0
        """The same over ``SUSTAINED`` seconds."""

    def copes(self, rate: float, sustained: float) -> bool:
        """Whether these parameters should meet the SLO at a load, rows per second, if they are good."""
        return rate <= COMPARABLE * self.peak and sustained <= COMPARABLE * self.sustained


class Probation:
    """Probation of one model. Parameters are good once a test, as sure as that of misses, shows that they meet the SLO.

    New parameters that fail before are rolled back, if the previous ones were good at a comparable load. Evidence
    against is only taken from intervals with at most ``COMPARABLE`` times the rows at which the good ones met the SLO,
    in a single interval and over ``SUSTAINED`` seconds; evidence for is taken at any load.
    """

    def __init__(self, quantile: float, parameters: Parameters, generation: int) -> None:
        """Begin with the parameters in force, without evidence. ``quantile``: of the SLO, 0.99 for p99."""
        self._quantile = quantile
        self.standing = Standing(parameters, generation, quantile)
        """Of the parameters in force."""
        self._before: Standing | None = None
        """The previous, good parameters, while those in force are not good yet."""
        self._recent: deque[tuple[float, int]] = deque()

    def change(self, parameters: Parameters, generation: int) -> None:
        """Note a change; if it names the same parameters, their evidence is kept."""
        if parameters == self.standing.parameters:
            self.standing.generation = generation
            return
        if self.standing.good:
            self._before = self.standing
        if self._before is not None and self._before.parameters == parameters:
            self._return()
            self.standing.generation = generation
        else:
            self.standing = Standing(parameters, generation, self._quantile)

    def lead_to(self, parameters: Parameters) -> None:
        """Note the parameters that first calls led to: the evidence is about these."""
        self.standing.parameters = parameters

    def forget(self) -> None:
        """Forget the good parameters: the model, its server, or the SLO has changed."""
        self.standing = Standing(self.standing.parameters, self.standing.generation, self._quantile)
        self._before = None
        self._recent.clear()

    def observe(self, seconds: float, rows: int, hits: int, late: int, failed: int) -> Verdict | None:
        """Take the counts of an interval; return a verdict if the parameters are rolled back.

        ``rows`` arrived; ``hits`` requests were answered in time, ``late`` ones missed but might not have with other
        parameters, ``failed`` ones failed by the upstream's fault.
        """
        now = self.standing
        requests = hits + late
        self._recent.append((seconds, rows))
        lasted = sum(each for each, _ in self._recent)
        while lasted - self._recent[0][0] >= SUSTAINED:
            lasted -= self._recent.popleft()[0]
        rate, sustained = rows / seconds, sum(each for _, each in self._recent) / lasted
        if not requests or failed > UPSTREAMS * (requests + failed):
            return None
        # 1. Evidence for them: at any load.
        now.seconds += seconds
        now.proof.observe(hits, late)
        if late <= now.proof.bad * requests:
            now.peak, now.sustained = max(now.peak, rate), max(now.sustained, sustained)
        if now.proof.is_met and now.seconds >= PROVEN_AFTER and not now.good:
            now.good = True
            self._before = None
        # 2. Evidence against them: not at a load that may be too high for any parameters.
        good = now if now.good else self._before
        if good is not None and not good.copes(rate, sustained):
            now.against.restart()
            return None
        if not now.against.observe(hits, late):
            return None
        # 3. They are not good, or no longer.
        counted = now.against
        reason = f"{counted.misses} of {counted.requests} requests were late where {1 - self._quantile:.3g} may be"
        if self._before is None:
            self.standing = Standing(now.parameters, now.generation, self._quantile)
            return None
        self._return()
        return Verdict(now.parameters, now.generation, self.standing.parameters, self.standing.generation, reason)

    def _return(self) -> None:
        """Restore the good parameters."""
        assert self._before is not None  # noqa: S101 - for the type checker: asked before
        self.standing, self._before = self._before, None
        self.standing.against.restart()
