"""Riskier parameters on a few pods first: which pods, and on what evidence they are promoted or rolled back."""

from __future__ import annotations

from enum import StrEnum
from math import ceil, inf, log
from typing import TYPE_CHECKING, NamedTuple

from carpool.learning.miss_test import MOST_AT_ONCE, MissTest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_operator.api.model import Pod

BLAME = log(20.0)
"""Evidence that the canaries miss more than the others, from which their parameters are the cause."""

ODDS = 4.0
"""Ratio of the canaries' misses to the others', if their parameters are the cause: 2 % against 0.5 %."""

LEAST_OTHERS = 50
"""Least number of the others' requests for a comparison."""

LONGEST = 120.0
"""Seconds after which a trial ends, with one exception: ``LOOKS``."""

LOOKS = 3
"""Readings of canaries without counted requests before the trial ends, however long they take. A busy operator may read
once a minute; the first reading finds the change just made, the second one counts."""


class Verdict(StrEnum):
    """The result of a trial."""

    CONTINUE = "Continue"
    PROMOTE = "Promote"
    ROLL_BACK = "RollBack"
    """The parameters caused misses."""
    RETURN = "Return"
    """The parameters caused no known misses, but the evidence does not suffice for them."""


class Comparison:
    """Whether the canaries miss more than the others, by a two-sample sequential test.

    Given a miss, it is the canaries' with probability ``n1 / (n1 + n0)`` if both miss equally often, and ``k n1 / (k n1
    + n0)`` if they miss ``k`` times as often; n1 and n0 are the interval's requests. So a cause common to all pods (a
    load step, a slow database) is no evidence either way: it affects both. With 1 canary in 4 pods and k = 4 a canary's
    miss adds 0.83, another pod's subtracts 0.56.
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
        # Misses come in clusters: one slow batch makes all its requests late.
        self.evidence = max(0.0, self.evidence + min(gained, MOST_AT_ONCE))


class Answers(NamedTuple):
    """Counts of a group's answers in an interval."""

    hits: int
    misses: int


class CanaryTest:
    """Whether the canaries of a trial meet the SLO's ``quantile``, and whether their parameters are at fault if not."""

    def __init__(self, quantile: float, min_requests: int) -> None:
        """``min_requests``: of the canaries, before they can be promoted as soon as the target is met."""
        self._quantile = quantile
        self._min_requests = min_requests
        self._own = MissTest(quantile)
        self._rest = MissTest(quantile)
        self._rest_alarmed = False
        self._compared = Comparison()
        self._heard = False
        """Whether anything was counted on a canary that runs the trial's parameters."""
        self._looks = 0

    def observe(self, canaries: Answers | None, others: Answers | None) -> None:
        """Add the counts of pods that ran the right configuration for the whole interval; ``None``: no such pods."""
        self._looks += 1
        if canaries is not None:
            self._heard = True
            self._own.observe(*canaries)
        if others is not None:
            self._rest_alarmed |= self._rest.observe(*others)
        if canaries is not None and others is not None:
            self._compared.observe(sum(canaries), canaries.misses, sum(others), others.misses)

    def verdict(self, lasted: float) -> tuple[Verdict, str]:
        """Return the result, and why, of a trial that ``lasted`` so many seconds."""
        own, others = self._own, self._compared.others
        counted = f"{own.misses} of {own.requests} requests missed on the canaries"
        if own.alarmed:
            if self._compared.evidence >= BLAME or others < LEAST_OTHERS:
                return Verdict.ROLL_BACK, f"{counted}, {self._rest.misses} of {self._rest.requests} on the other pods"
            if self._rest_alarmed:
                return Verdict.RETURN, f"{counted}, but the other pods miss as many: the cause is elsewhere"
        elif own.requests >= self._min_requests and own.is_met:
            return Verdict.PROMOTE, counted
        if lasted < LONGEST or (not self._heard and self._looks < LOOKS):
            return Verdict.CONTINUE, ""
        if not self._heard:
            return Verdict.RETURN, f"no canary reported that it runs them within {lasted:.0f} s"
        if own.misses <= (1 - self._quantile) * own.requests:
            # With little traffic nothing is ever proven, and little can go wrong: the forecast decides, and the
            # sidecars' own test continues.
            return Verdict.PROMOTE, f"{counted} in {LONGEST:.0f} s: no result against them"
        return Verdict.RETURN, f"{counted} in {LONGEST:.0f} s: too many to continue, too few for a verdict"


def able(pods: Sequence[Pod], template_hash: str | None) -> list[str]:
    """Return the UIDs, sorted, of the pods that can be canaries: ready ones of the present template."""
    return sorted(pod.uid for pod in pods if pod.ready and not pod.deleting and pod.template_hash == template_hash)


def choose(pods: Sequence[str], percent: int) -> list[str]:
    """Choose canaries: a share of those ``able``, rounded up, in order of UID, never all of them.

    Returns no UIDs where fewer than two are.
    """
    return [*pods[: min(ceil(len(pods) * percent / 100), len(pods) - 1)]] if pods else []


RETRY = 60.0
"""Seconds before riskier parameters are tried again after a failed or inconclusive trial; doubled each time."""

LONGEST_RETRY = 16 * RETRY


class Patience:
    """Waits longer after every failed trial: forecasts do not show the cause."""

    def __init__(self) -> None:
        self._until = -inf
        self._next = RETRY

    def failed(self, now: float) -> None:
        """Record a failed trial."""
        self._until = now + self._next
        self._next = min(2 * self._next, LONGEST_RETRY)

    def succeeded(self) -> None:
        """Record a promoted trial."""
        self._next = RETRY

    def over(self, now: float) -> bool:
        """Whether another trial may begin."""
        return now >= self._until
