"""One HorizontalPodAutoscaler: computes the number of replicas from its metrics, as kube-controller-manager does.

Rules and their defaults are those of Kubernetes 1.35 (`pkg/controller/podautoscaler`, `pkg/apis/autoscaling/v2`). With
a `behavior` the rules differ: the number stays between the results of two windows, and each policy counts the replicas
added and removed within its own period.
"""

from __future__ import annotations

import math
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLERANCE = 0.1
"""Relative distance from the target within which an HPA does nothing."""

WINDOW = 300.0
"""Seconds for which fewer replicas must have been enough, by default."""

COOLDOWN = 300.0
"""Seconds without a request, served or held, after which KEDA ends the last replica by default."""

FACTOR, AT_LEAST = 2, 4
"""Without a `behavior`: most replicas after one step, as a multiple, but this many are always allowed."""

CPU, REQUESTS, LOAD, NEEDED = "cpu", "requests", "load", "needed"
"""Metrics: percent busy, requests per second and replica, Carpool's load, or its replicas needed."""


class Select(StrEnum):
    """Which of several policies applies."""

    MAX = "Max"
    MIN = "Min"
    DISABLED = "Disabled"


class Unit(StrEnum):
    """Unit of a policy."""

    PODS = "Pods"
    PERCENT = "Percent"


class Policy(Struct, frozen=True):
    """How much may change within a period."""

    unit: Unit
    value: int
    seconds: float

    def bound(self, before: int, sign: int) -> int:
        """Return the limit after a period that began with ``before`` replicas; ``sign``: 1 up, -1 down."""
        if self.unit is Unit.PODS:
            return before + sign * self.value
        reached = before * (1 + sign * self.value / 100)
        return math.ceil(reached) if sign > 0 else int(reached)


class Rules(Struct, frozen=True):
    """One direction of a `behavior`."""

    window: float
    """Seconds for which the change must have been wanted."""
    policies: tuple[Policy, ...]
    select: Select = Select.MAX
    tolerance: float = TOLERANCE


UP = Rules(0.0, (Policy(Unit.PODS, 4, 15.0), Policy(Unit.PERCENT, 100, 15.0)))
DOWN = Rules(WINDOW, (Policy(Unit.PERCENT, 100, 15.0),))


class Behavior(Struct, frozen=True):
    """Both directions, defaults filled in."""

    up: Rules = UP
    down: Rules = DOWN


class Metric(Struct, frozen=True):
    """What replicas are computed from."""

    name: str
    """One of ``CPU``, ``REQUESTS``, ``LOAD`` and ``NEEDED``."""
    target: float
    """Per replica: percent busy, requests per second, share of the capacity, or replicas needed."""

    def wanted(self, total: float, serving: int, current: int, behavior: Behavior) -> int:
        """Return the number of replicas; ``total``: the metric's sum over the ``serving`` ones of ``current``."""
        counted = serving if self.name == CPU else current
        ratio = total / (self.target * counted)
        if _is_within(ratio, behavior):
            return current
        if self.name == CPU and ratio > 1 and current > serving:
            # Starting replicas count as idle, so that the same replica is not requested again and again.
            ratio = total / (self.target * current)
            return current if ratio <= 1 or _is_within(ratio, behavior) else math.ceil(ratio * current)
        return math.ceil(total / self.target - 1e-9)


def _is_within(ratio: float, behavior: Behavior) -> bool:
    return 1 - behavior.down.tolerance <= ratio <= 1 + behavior.up.tolerance


class Autoscaler(Struct, frozen=True, kw_only=True):
    """An autoscaler's settings, from its manifest."""

    metrics: tuple[Metric, ...]
    """One or more: each gives a number of replicas, and the largest counts."""
    least: int = 1
    """0: the last replica ends after ``cooldown``, and the next request starts one. KEDA does both; its HPA keeps 1."""
    most: int = 10
    behavior: Behavior | None = None
    cooldown: float = COOLDOWN
    """Seconds without a request before scaling to 0, where ``least`` is 0."""

    @property
    def window(self) -> float:
        """Seconds for which fewer replicas must have been enough."""
        return WINDOW if self.behavior is None else self.behavior.down.window

    def wanted(self, totals: Sequence[float], serving: int, current: int) -> int:
        """Return the number of replicas; ``totals``: of each metric, its sum over the serving replicas."""
        behavior = self.behavior or Behavior()
        pairs = zip(self.metrics, totals, strict=True)
        return max(metric.wanted(total, serving, current, behavior) for metric, total in pairs)


class Controller:
    """Keeps an HPA's recent recommendations and changes."""

    def __init__(self, scaler: Autoscaler, now: float, replicas: int) -> None:
        self._scaler = scaler
        self._recommended = deque([(now, replicas)])
        """(time, replicas), before any limit; the first entry is the initial number."""
        self._changes: deque[tuple[float, int]] = deque()
        """(time, replicas added)."""

    def decide(self, now: float, wanted: int, current: int) -> int:
        """Return the number of replicas to run, if the metric asks for ``wanted``."""
        stabilized = self._stabilized(now, wanted, current)
        self._recommended.append((now, wanted))
        found = self._limited(now, stabilized, current)
        if found != current:
            self._changes.append((now, found - current))
        return found

    def _stabilized(self, now: float, wanted: int, current: int) -> int:
        """Return the number within the range of all recommendations of a window."""
        behavior = self._scaler.behavior
        longest = WINDOW if behavior is None else max(behavior.up.window, behavior.down.window)
        while self._recommended and now - self._recommended[0][0] > longest:
            self._recommended.popleft()
        if behavior is None:
            return max([wanted, *(count for _, count in self._recommended)])
        least = min([wanted, *(count for at, count in self._recommended if now - at < behavior.up.window)])
        most = max([wanted, *(count for at, count in self._recommended if now - at < behavior.down.window)])
        return min(max(current, least), most)

    def _limited(self, now: float, wanted: int, current: int) -> int:
        """Return a change within bounds and policies."""
        scaler, least = self._scaler, max(self._scaler.least, 1)
        if scaler.behavior is None:
            return max(min(wanted, scaler.most, max(FACTOR * current, AT_LEAST)), least)
        if wanted > current:
            return min(wanted, scaler.most, max(self._bound(scaler.behavior.up, now, current, 1), current))
        if wanted < current:
            return max(wanted, least, min(self._bound(scaler.behavior.down, now, current, -1), current))
        return current

    def _bound(self, rules: Rules, now: float, current: int, sign: int) -> int:
        if rules.select is Select.DISABLED:
            return current
        bounds = []
        for policy in rules.policies:
            before = current - sum(added for at, added in self._changes if now - at < policy.seconds)
            bounds.append(policy.bound(before, sign))
        return max(bounds) if (sign > 0) == (rules.select is Select.MAX) else min(bounds)
