"""A policy's requirements for one model, ready to compute with."""

from __future__ import annotations

from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from carpool.policy.parameters import Limits, Parameters
from carpool.policy.spec import BatchingPolicy, Model, TuningMode


class Requirements(Struct, frozen=True):
    """The SLO, the limits, and how the tuner may move."""

    policy: BatchingPolicy
    limits: Limits
    quantile: float
    """The SLO's highest percentile, 0 to 1."""
    target: float
    """The latency (seconds) that it allows."""
    quantiles: tuple[tuple[float, float], ...]
    """The other percentiles as (quantile, seconds)."""

    @classmethod
    def of(cls, policy: BatchingPolicy, model: Model | None) -> Self:
        """Collect them from a policy."""
        *others, (quantile, target) = policy.slo.percentiles
        return cls(policy, policy.limits(model), quantile, target, tuple(others))

    @property
    def budget(self) -> float:
        """Fraction of requests that a setting may be forecast to miss: half of what the SLO allows."""
        return (1 - self.quantile) / 2

    @property
    def held(self) -> bool:
        """Whether nothing may be changed."""
        return self.policy.tuning.mode is TuningMode.HOLD

    def clamp(self, parameters: Parameters) -> Parameters:
        """Return the nearest parameters within the limits; if nothing may be changed, the given ones."""
        return parameters if self.held else self.limits.clamp(parameters)

    def by_hand(self, largest: int) -> Parameters | None:
        """Return the baseline if the policy has one, with batches up to ``largest``; else ``None``."""
        known = replace(self.policy.baseline, max_batch=min(self.policy.baseline.max_batch, largest))
        return self.limits.clamp(known) if self.policy.baseline != Parameters() else None

    @property
    def recommends(self) -> bool:
        """Whether changes are only recommended."""
        return self.policy.tuning.mode is TuningMode.RECOMMEND
