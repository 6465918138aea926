"""Times of the tuner's last events, in seconds of the observations' clock."""

from __future__ import annotations

from math import inf

from carpool.policy.durations import format_seconds

SILENCE = 30.0
"""Seconds without an arrival after which there is no load."""


class History:
    """The last arrival, the last change, and the arrivals since."""

    def __init__(self) -> None:
        self.now = -inf
        """Time of the last observation."""
        self.started_at = inf
        self.changed_at = -inf
        """Time of the last change of parameters."""
        self.requests = 0
        """Arrivals since then."""
        self.last_arrival = -inf

    def observe(self, now: float, arrivals: int) -> None:
        """Note an observation."""
        self.now = now
        if self.started_at == inf:
            self.started_at = self.changed_at = now
        if arrivals:
            self.last_arrival = now

    def changed(self) -> None:
        """Note that other parameters are in force from now on."""
        self.changed_at = self.now
        self.requests = 0

    @property
    def since_change(self) -> float:
        """Seconds for which the parameters have been in force."""
        return self.now - self.changed_at

    @property
    def is_silent(self) -> bool:
        """Whether no request has come for so long that there is no load."""
        return self.now - max(self.last_arrival, self.started_at) > SILENCE

    @property
    def silence(self) -> str:
        """Return a text on how long no request has come."""
        if self.last_arrival == -inf:
            return "no request yet"
        return f"no request for {format_seconds(round(self.now - self.last_arrival, 1))}"
