"""Checks `carpool savings`: its forecast for the present parameters against the device's count."""

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

    from carpool_cli.demo.observed import Choice, Count
    from carpool_cli.live.running import Running

SHORTEST = 4.0
"""Least seconds with one setting and load for a comparison: 640 requests at noon."""


class Compared(NamedTuple):
    """Device seconds per hour."""

    seconds: float
    """The duration of the counts."""
    counted: float
    """By the device itself."""
    forecast: float
    seen: float = 0.0
    """By the sidecar, from sending a batch to its answer; 0: not known."""

    @property
    def error(self) -> float:
        """Of the forecast against the device's own count, relative."""
        return self.forecast / self.counted - 1

    @property
    def error_of_seen(self) -> float:
        """Of the forecast against the sidecar's count, from which it is made."""
        return self.forecast / self.seen - 1

    def in_words(self) -> str:
        """Describe the forecast, and the counts as far as known."""
        sidecar = f"The sidecar counted {self.seen:,.0f} ({self.error_of_seen:+.1%}), the" if self.seen else "The"
        return (
            f"of what was in force longest, {self.seconds:.0f} s, the forecast is {self.forecast:,.0f} device seconds "
            f"per hour. {sidecar} device itself counted {self.counted:,.0f} ({self.error:+.1%})"
        )


def compare(
    admin: str, model: str, counts: Sequence[Count], choices: Sequence[Choice], edges: Sequence[float]
) -> Compared | None:
    """Compare where one setting lasted longest between two ``edges``, seconds of the day at which the load changes.

    ``None`` if none lasted for long enough. Raises ``DemoError``.
    """
    changes = [after.at for before, after in pairwise(choices) if before.parameters != after.parameters]
    ends = sorted({*edges, *(at for at in changes if edges[0] < at < edges[-1])})
    first, last = max(pairwise(ends), key=lambda each: each[1] - each[0])
    within = [count for count in counts if first <= count.at <= last]
    setting = next((choice for choice in choices if first <= choice.at <= last), None)
    if setting is None or len(within) < 2 or within[-1].at - within[0].at < SHORTEST:
        return None
    host, _, port = admin.rpartition(":")
    try:
        found = running.read(AdminClient(Address(host, int(port), "")), model)
    except AdminError as error:
        raise DemoError(str(error)) from None
    ago = counts[-1].at - within[-1].at
    return compared(found._replace(parameters=setting.parameters), within, ago, _seen(choices, within))


def _seen(choices: Sequence[Choice], within: Sequence[Count]) -> float:
    """Return the device seconds per hour that the sidecar counted in the time of some counts."""
    looks = [each for each in choices if within[0].at <= each.at <= within[-1].at]
    return 3600 * (looks[-1].busy - looks[0].busy) / (looks[-1].at - looks[0].at) if len(looks) > 1 else 0.0


def compared(found: Running, counts: Sequence[Count], ago: float = 0.0, seen: float = 0.0) -> Compared | None:
    """Compare the counts, up to ``ago`` seconds before now, with the forecast for the arrivals of that time.

    ``seen``: device seconds per hour that the sidecar counted meanwhile.
    """
    first, last = counts[0], counts[-1]
    seconds = last.at - first.at
    end = found.arrivals[-1][0] + found.since_last - ago
    recent = [each for each in found.arrivals if end - seconds <= each[0] <= end]
    counted = 3600 * (last.busy - first.busy) / seconds
    if len(recent) < 2 or not counted:
        return None
    situation = situation_of(found._replace(arrivals=recent))
    rate = situation.process.rate
    forecast = replica.fixed(situation, found.parameters, [rate]).utilization(rate)
    return Compared(seconds, counted, 3600 * forecast, seen)
