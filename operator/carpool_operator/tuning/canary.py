"""Riskier parameters on a few pods first: who tries them, and by what evidence the others follow or the few go back."""

from __future__ import annotations

from enum import StrEnum
from math import ceil, inf, log
from typing import TYPE_CHECKING, NamedTuple

from carpool.learning.miss_test import MOST_AT_ONCE, MissTest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from carpool.exchange.decision import Decision
    from carpool.policy.parameters import Parameters
    from carpool_operator.api.model import Pod

BLAME = log(20.0)
"""Evidence that they miss more than the others at which it is their parameters' doing."""

ODDS = 4.0
"""How many times as often canaries are supposed to miss where their parameters are to blame: 2 % against 0.5 %."""

COMPANY = 50
"""Requests of the others below which there is nobody to compare with."""

LONGEST = 120.0
"""Seconds after which a trial ends in any case but one: ``LOOKS``."""

LOOKS = 3
"""Times that canaries nobody heard of are looked at before they are called back, however long that takes. An operator
with too much to do comes by once a minute; the first look finds the change just made, the second one counts."""


class Verdict(StrEnum):
    """What becomes of a trial."""

    CONTINUE = "Continue"
    PROMOTE = "Promote"
    ROLL_BACK = "RollBack"
    """The parameters are to blame."""
    RETURN = "Return"
    """Nothing is known against the parameters, but not enough for them."""


class Comparison:
    """Who misses more, the canaries or the others? A two-sample sequential test.

    Conditional on a miss, the canaries had it with probability ``n1 / (n1 + n0)`` if both miss equally often, and
    ``k n1 / (k n1 + n0)`` if they miss ``k`` times as often; n1 and n0 are the interval's requests. So what all pods
    have in common (a jump of the load, a slow database) is no evidence either way: it moves both. With 1 canary in 4
    pods and k = 4 a canary's miss adds 0.83, another pod's takes 0.56.
    """

    def __init__(self) -> None:
        self.evidence = 0.0
        self.others = 0

    def observe(self, requests: int, misses: int, others: int, others_misses: int) -> None:
        """Add one interval."""
        self.others += others
        if not requests or not others:
            return
        equal = requests / (requests + others)
        worse = ODDS * requests / (ODDS * requests + others)
        gained = misses * log(worse / equal) + others_misses * log((1 - worse) / (1 - equal))
        # Misses come in clusters: one slow batch makes all its waiters late.
        self.evidence = max(0.0, self.evidence + min(gained, MOST_AT_ONCE))


class Answers(NamedTuple):
    """How a group's requests ended in an interval."""

    hits: int
    misses: int


class Trial:
    """One model's riskier parameters on some of the pods."""

    def __init__(
        self,
        model: str,
        decision: Decision,
        pods: Iterable[str],
        *,
        since: float,
        wall: float,
        quantile: float,
        min_requests: int,
        beyond: int = 0,
    ) -> None:
        """``beyond``: rows of the largest batch that was well measured, below the size that is explored."""
        self.model = model
        self.beyond = beyond
        self.decision = decision
        """That brought it about."""
        self.pods = frozenset(pods)
        """UIDs."""
        self.since = since
        self.wall = wall
        """Seconds since the epoch when it began."""
        self._min_requests = min_requests
        self._quantile = quantile
        self._own = MissTest(quantile)
        self._rest = MissTest(quantile)
        self._rest_alarmed = False
        self._compared = Comparison()
        self.heard = False
        """Whether anything was counted on a canary that runs what it is to try."""
        self._looks = 0

    @property
    def parameters(self) -> Parameters:
        """What is tried."""
        return self.decision.parameters

    def observe(self, canaries: Answers | None, others: Answers | None) -> None:
        """Add what was counted on pods that ran what they should from end to end; ``None``: no such pods."""
        self._looks += 1
        if canaries is not None:
            self.heard = True
            self._own.observe(*canaries)
        if others is not None:
            self._rest_alarmed |= self._rest.observe(*others)
        if canaries is not None and others is not None:
            self._compared.observe(sum(canaries), canaries.misses, sum(others), others.misses)

    def verdict(self, now: float) -> tuple[Verdict, str]:
        """Say what becomes of it, and why."""
        own, others = self._own, self._compared.others
        counted = f"{own.misses} of {own.requests} requests missed on the canaries"
        if own.alarmed:
            if self._compared.evidence >= BLAME or others < COMPANY:
                return Verdict.ROLL_BACK, f"{counted}, {self._rest.misses} of {self._rest.requests} on the other pods"
            if self._rest_alarmed:
                return Verdict.RETURN, f"{counted}, but the other pods miss as many: the cause is elsewhere"
        elif own.requests >= self._min_requests and own.is_met:
            return Verdict.PROMOTE, counted
        if now - self.since < LONGEST or (not self.heard and self._looks < LOOKS):
            return Verdict.CONTINUE, ""
        if not self.heard:
            return Verdict.RETURN, f"no canary reported that it runs them within {now - self.since:.0f} s"
        if own.misses <= (1 - self._quantile) * own.requests:
            # At little traffic nothing is ever proven, and little can go wrong: the forecast decides, and the
            # sidecars' own test watches on.
            return Verdict.PROMOTE, f"{counted} in {LONGEST:.0f} s: no result against them"
        return Verdict.RETURN, f"{counted} in {LONGEST:.0f} s: too many to continue, too few for a verdict"


def choose(pods: Sequence[Pod], template_hash: str | None, percent: int) -> list[str]:
    """Choose canaries among ready pods of the present template: a share rounded up, by UID, never all of them.

    Returns no UIDs where there are fewer than two such pods.
    """
    able = sorted(pod.uid for pod in pods if pod.ready and not pod.deleting and pod.template_hash == template_hash)
    if len(able) < 2:
        return []
    return able[: min(ceil(len(able) * percent / 100), len(able) - 1)]


RETRY = 60.0
"""Seconds that riskier parameters wait after a trial that failed or proved nothing; doubled each time."""

LONGEST_RETRY = 16 * RETRY


class Patience:
    """Waits longer after every trial that came to nothing: what else is the matter shows in no forecast."""

    def __init__(self) -> None:
        self._until = -inf
        self._next = RETRY

    def failed(self, now: float) -> None:
        """Take note of a trial that came to nothing."""
        self._until = now + self._next
        self._next = min(2 * self._next, LONGEST_RETRY)

    def succeeded(self) -> None:
        """Take note of one that was promoted."""
        self._next = RETRY

    def over(self, now: float) -> bool:
        """Whether another one may begin."""
        return now >= self._until
