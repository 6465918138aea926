"""Settings that apply to every request until the configuration changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_sidecar.protocols.headers import Reader
from carpool_sidecar.protocols.limits import DEFAULT

if TYPE_CHECKING:
    from carpool.policy.spec import BatchingPolicy
    from carpool_sidecar.protocols.limits import Limits


class Terms:
    """Time limits of requests, and how requests are read. Each attribute may be replaced at any time."""

    __slots__ = ("_readers", "due", "limits", "reader", "timeout")

    def __init__(self, policy: BatchingPolicy) -> None:
        self.due = policy.slo.due
        """Seconds from arrival to due time: the SLO's target."""
        self.timeout = policy.admission.seconds(policy.slo.due)
        """Seconds that a request may wait according to the policy."""
        self.reader = Reader()
        """Reads the headers of requests."""
        self.limits = DEFAULT
        """Limits for reading bodies."""
        self._readers = 0
        """How often the rules changed for which headers may differ in a batch."""

    def follow(self, policy: BatchingPolicy, limits: Limits) -> None:
        """Apply another version of the configuration."""
        self.due = policy.slo.due
        self.timeout = policy.admission.seconds(policy.slo.due)
        self.limits = limits
        if self.reader.across != {name.encode() for name in policy.batch_across}:
            self._readers += 1
            self.reader = Reader(policy.batch_across, self._readers)
