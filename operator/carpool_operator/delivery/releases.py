"""Pods whose policy is gone: they return to the state of a sidecar that has not had one.

By state, as everything that the leader does: a pod without a policy is read once, and gets a last document if it runs
one. So a restart of the operator between the deletion and the document loses nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool.exchange.change import Change
from carpool_operator.api.injection import STANDBY, STANDBY_SLO
from carpool_operator.delivery.documents import EVERY, VALID

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from carpool.exchange.report import Report
    from carpool_operator.api.model import Pod, Target

GRACE = 10.0
"""Seconds that a target has to be without a policy. One that is replaced, or follows annotations, is back sooner."""


class Releases:
    """Chooses the pods to release, and remembers those that need it no more."""

    def __init__(self) -> None:
        self._since: dict[Target, float] = {}
        """Targets without a policy, and since when."""
        self._had: set[Target] = set()
        """Targets that had a policy in this life of the operator."""
        self._done: set[str] = set()
        """UIDs of pods without a policy that run none."""

    def due(
        self, now: float, pods: Mapping[Target, Sequence[Pod]], owned: Collection[Target], unread: Collection[str]
    ) -> list[Pod]:
        """Return the pods to release.

        ``owned``: targets that have a policy. ``unread``: namespaces with a policy that can't be read. It may be that
        of any target there, so nothing there is released.
        """
        self._had = (self._had | set(owned)) & pods.keys()
        without = [target for target in pods if target not in owned and target.namespace not in unread]
        self._since = {target: self._since.get(target, now) for target in without}
        self._done &= {pod.uid for target in without for pod in pods[target]}
        return [
            pod
            for target, since in self._since.items()
            if now - since >= GRACE
            for pod in pods[target]
            if pod.ip and not pod.deleting and pod.uid not in self._done
        ]

    def is_without(self, target: Target) -> bool:
        """Whether a target has had no policy since the last pass."""
        return target in self._since

    def had(self, target: Target) -> bool:
        """Whether a target had a policy in this life of the operator."""
        return target in self._had

    def done(self, uid: str) -> None:
        """Record that a pod runs no policy."""
        self._done.add(uid)


def is_standby(report: Report) -> bool:
    """Whether a sidecar runs no policy: no document has arrived, or the last one was a release."""
    return not report.generation or (
        report.slo_seconds == STANDBY_SLO and all(lane.parameters.pass_through for lane in report.lanes.values())
    )


def release(target: Target, generation: int, wall: float, keys: tuple[str, ...]) -> Change:
    """Make the last document for a pod that runs ``generation``: the policy is the one that it was started with."""
    return Change(
        target=str(target),
        generation=max(generation + 1, int(wall * 1000)),
        expires=wall + VALID,
        parameters={EVERY: STANDBY},
        keys=keys,
    )
