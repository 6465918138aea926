"""Whether `carpool savings` is right: its forecast of what is in force, and what the device counted."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from carpool_cli.demo.processes import DemoError
from carpool_cli.live import running
from carpool_cli.live.admin_client import AdminClient, AdminError
from carpool_cli.options import Address
from carpool_cli.planning import replica
from carpool_cli.planning.savings import situation_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_cli.demo.day import Choice, Count
    from carpool_cli.live.running import Running

SHORTEST = 8.0
"""Seconds with one setting from which the two are compared: 250 requests of the evening."""


class Compared(NamedTuple):
    """Device seconds per hour."""

    seconds: float
    """For which they were counted."""
    counted: float
    forecast: float

    @property
    def error(self) -> float:
        """Of the forecast, relative."""
        return self.forecast / self.counted - 1


def compare(
    admin: str, model: str, counts: Sequence[Count], choices: Sequence[Choice], start: float
) -> Compared | None:
    """Compare from ``start`` on, seconds of the day; ``None`` where no setting lasted to the end for long enough.

    Raises ``DemoError``.
    """
    changes = [after.at for before, after in pairwise(choices) if before.parameters != after.parameters]
    since = max([start, *changes])
    within = [count for count in counts if count.at >= since]
    if not within or within[-1].at - within[0].at < SHORTEST:
        return None
    host, _, port = admin.rpartition(":")
    try:
        return compared(running.read(AdminClient(Address(host, int(port), "")), model), within)
    except AdminError as error:
        raise DemoError(str(error)) from None


def compared(found: Running, counts: Sequence[Count]) -> Compared | None:
    """Compare what was counted with the forecast for the arrivals of that time; ``None`` without any."""
    first, last = counts[0], counts[-1]
    seconds = last.at - first.at
    end = found.arrivals[-1][0] + found.since_last
    recent = [each for each in found.arrivals if each[0] >= end - seconds]
    counted = 3600 * (last.busy - first.busy) / seconds
    if len(recent) < 2 or not counted:
        return None
    situation = situation_of(found._replace(arrivals=recent))
    rate = situation.process.rate
    forecast = replica.fixed(situation, found.parameters, [rate]).utilization(rate)
    return Compared(seconds, counted, 3600 * forecast)
