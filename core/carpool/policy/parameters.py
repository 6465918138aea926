"""What the tuner sets: parameters, and the limits inside which it searches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

from carpool.policy.durations import Duration, format_seconds, whole_microseconds
from carpool.policy.plain import Camel

if TYPE_CHECKING:
    from collections.abc import Iterable


class Parameters(Camel, frozen=True, omit_defaults=False):
    """The parameters that the tuner sets: replaced as a whole, between calls."""

    max_batch: Annotated[int, Meta(ge=1, le=65536)] = 32
    """Rows a batch may have."""
    max_wait: Duration = Duration(0.0)
    """Age at which the oldest request stops waiting for others; 0s holds none while a slot is free."""
    max_in_flight: Annotated[int, Meta(ge=1, le=65536)] = 1
    """Batches handed to the upstream at once."""
    pass_through: bool = False
    """Nothing is held, and original bytes are forwarded. Only a backlog of more than ``maxInFlight`` is merged."""

    @property
    def hold(self) -> float:
        """Seconds for which a request is held for others."""
        return 0.0 if self.pass_through else self.max_wait

    def describe(self) -> str:
        """One line for logs and the live view."""
        if self.pass_through:
            return f"pass-through, {self.max_in_flight} in flight"
        return f"batch {self.max_batch}, wait {format_seconds(self.max_wait)}, {self.max_in_flight} in flight"


class Limits(Struct, frozen=True):
    """Bounds with every default filled in: what the tuner searches."""

    min_batch: int
    max_batch: int
    min_wait: float
    max_wait: float
    min_in_flight: int
    max_in_flight: int

    def waits(self, shares: Iterable[float]) -> list[Duration]:
        """List waits at some shares of the longest, within the limits: ascending, whole microseconds."""
        return sorted({Duration(whole_microseconds(max(self.min_wait, share * self.max_wait))) for share in shares})

    def clamp(self, parameters: Parameters) -> Parameters:
        """Return the nearest parameters inside the limits."""
        return msgspec.structs.replace(
            parameters,
            max_batch=min(max(parameters.max_batch, self.min_batch), self.max_batch),
            max_wait=Duration(min(max(parameters.max_wait, self.min_wait), self.max_wait)),
            max_in_flight=min(max(parameters.max_in_flight, self.min_in_flight), self.max_in_flight),
        )
