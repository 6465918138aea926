"""What holds for every request, until the configuration changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_sidecar.protocols.headers import Reader
from carpool_sidecar.protocols.limits import DEFAULT

if TYPE_CHECKING:
    from carpool.policy.spec import BatchingPolicy


class Terms:
    """By when requests are answered, and how what is sent is read. All of it may be replaced at any time."""

    __slots__ = ("due", "limits", "reader", "timeout")

    def __init__(self, policy: BatchingPolicy) -> None:
        self.due = policy.slo.due
        """Seconds from arrival to due time: the SLO's target."""
        self.timeout = policy.admission.seconds(policy.slo.due)
        """Seconds that the policy lets a request wait."""
        self.reader = Reader()
        """Reads headers."""
        self.limits = DEFAULT
        """Of what is read of bodies."""

    def follow(self, policy: BatchingPolicy) -> None:
        """Take the times of another policy."""
        self.due = policy.slo.due
        self.timeout = policy.admission.seconds(policy.slo.due)
