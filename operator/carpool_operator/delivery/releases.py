"""Pods whose policy is gone: they return to the state of a sidecar that has not had one.

By state, as everything that the leader does: a pod without a policy is read, and gets a last document if it runs one.
So a deletion while no operator runs is found. A sidecar that was written by hand may have a policy of its own: it is
read only if its target had one.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from carpool.exchange.change import Change
from carpool_operator.api.injection import STANDBY, STANDBY_SLO
from carpool_operator.delivery.documents import EVERY, VALID

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from carpool.exchange.report import Report
    from carpool_operator.api.model import Pod, Target

AGAIN = 120.0
"""Seconds after which a released pod is read once more: a container that restarts may still have mounted a document."""

GRACE = 10.0
"""Seconds that a target has to be without a policy. One that is replaced, or follows annotations, is back sooner."""


class Releases:
    """Chooses the pods to release, and remembers those that need it no more."""

    def __init__(self) -> None:
        self._since: dict[Target, float] = {}
        """Targets without a policy, and since when."""
        self._had: set[Target] = set()
        """Targets that have or had a policy, until they are forgotten."""
        self._done: dict[str, float] = {}
        """By UID of a pod that runs no policy: when it is read again."""

    def due(
        self,
        now: float,
        pods: Mapping[Target, Sequence[Pod]],
        owned: Collection[Target],
        unread: Collection[str],
        published: Collection[Target] = (),
    ) -> list[Pod]:
        """Return the pods to release.

        ``owned``: targets that have a policy; ``published``: those that have a document. ``unread``: namespaces with a
        policy that can't be read. It may be that of any target there, so nothing there is released.
        """
        self._had.update(owned, published)
        without = [target for target in pods if target not in owned and target.namespace not in unread]
        self._since = {target: self._since.get(target, now) for target in without}
        alive = {pod.uid for target in without for pod in pods[target]}
        self._done = {uid: again for uid, again in self._done.items() if uid in alive}
        return [
            pod
            for target, since in self._since.items()
            if now - since >= GRACE
            for pod in pods[target]
            if pod.ip and not pod.deleting and self._done.get(pod.uid, now) <= now
            if pod.container or target in self._had
        ]

    def is_without(self, target: Target) -> bool:
        """Whether a target has had no policy since the last pass."""
        return target in self._since

    def had(self, target: Target) -> bool:
        """Whether a target is known to have had a policy."""
        return target in self._had

    def forget(self, is_gone: Callable[[Target], bool]) -> None:
        """Forget targets that are gone: each preview of a pull request may be a new one.

        One without pods and without a document may come back: its new pods start without a document, in the state that
        a release leads to.
        """
        self._had = {target for target in self._had if not is_gone(target)}

    def done(self, uid: str, now: float) -> None:
        """Record that a pod runs no policy."""
        self._done[uid] = inf if uid in self._done else now + AGAIN


def is_standby(report: Report) -> bool:
    """Whether a sidecar is as the webhook made it: no document has arrived, or the last one was a release."""
    lanes = report.lanes.values()
    return report.slo_seconds == STANDBY_SLO and all(lane.parameters.pass_through for lane in lanes)


def release(target: Target, generation: int, wall: float, keys: tuple[str, ...]) -> Change:
    """Make the last document for a pod that runs ``generation``: the policy is the one that it was started with."""
    return Change(
        target=str(target),
        generation=max(generation + 1, int(wall * 1000)),
        expires=wall + VALID,
        parameters={EVERY: STANDBY},
        keys=keys,
    )
