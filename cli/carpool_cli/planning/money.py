"""What replicas cost. The only place in which money is computed."""

from __future__ import annotations

from msgspec import Struct

MONTH = 730.0
"""Hours: 365 days over 12."""


class Price(Struct, frozen=True):
    """Of one replica."""

    hour: float
    """Of the accelerator that each replica has, by the hour."""

    def month(self, replicas: float) -> float:
        """Return what so many replicas (in the mean) cost in a month."""
        return self.hour * MONTH * replicas


def written(amount: float) -> str:
    """Write an amount as a person reads it: ``1,825.00``, ``-912.50``. The currency is that of the price."""
    return f"{amount:,.2f}"
