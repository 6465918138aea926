"""Checks that need a list: pods that lack their sidecar, or are rejected; Services that bypass it.

Pods without a sidecar are not watched. They are listed, workload by workload, where the counts differ, and each not too
often. The same holds for Services, and for Events of the controllers that create pods.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct, field

from carpool_operator.api import annotations as names
from carpool_operator.api.model import Event, Missed
from carpool_operator.api.status import SERVICE_BYPASSED
from carpool_operator.cluster.kube import path_of
from carpool_operator.cluster.objects import LONGEST_REFUSAL
from carpool_operator.injector.bypass import bypasses
from carpool_operator.injector.decide import SIDECAR, self_tuned
from carpool_operator.reporting.conditions import asks
from carpool_operator.workloads import deployment
from carpool_operator.workloads.metadata import Meta
from carpool_operator.workloads.registry import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from carpool_operator.api.model import Pod, Target, Workload
    from carpool_operator.cluster.writing import Writer

AGAIN = 30.0
"""Seconds between two lists of one workload's pods, while some lack a sidecar; and of its Services, while one bypasses
it."""

SERVICES = 600.0
"""Seconds between two checks of a workload's Services, unless its pod template has changed."""

MOST = 50
"""Most names of pods without their sidecar in a message."""

MADE = frozenset({"SuccessfulCreate", "CreatedHeadPod", "CreatedWorkerPod"})
NOT_MADE = frozenset({"FailedCreate", "FailedToCreateHeadPod", "FailedToCreateWorkerPod"})
"""Reasons of Events of controllers that create pods: Kubernetes' own, and KubeRay's."""

LONGEST = 300
"""Most characters kept of why a pod was skipped; anyone who creates pods can write that annotation."""


class _Seen(NamedTuple):
    """The result of checking the Services of a workload."""

    at: float
    template: str
    events: tuple[Event, ...]

    def good(self, template: str, now: float) -> bool:
        """Whether it is too early for another check."""
        return template == self.template and now < self.at + (AGAIN if self.events else SERVICES)


class _PodStatus(Struct):
    phase: str = ""


class _Container(Struct):
    name: str = ""


class _PodSpec(Struct, rename="camel"):
    containers: list[_Container] = field(default_factory=list)
    init_containers: list[_Container] = field(default_factory=list)


class _Pod(Struct):
    metadata: Meta
    status: _PodStatus
    spec: _PodSpec = field(default_factory=_PodSpec)

    @property
    def has_sidecar(self) -> bool:
        """Whether it has a sidecar, though without the label of those that an operator tunes."""
        return any(each.name == SIDECAR for each in (*self.spec.init_containers, *self.spec.containers))


class _Pods(Struct):
    items: list[_Pod]


_pods = msgspec.json.Decoder(_Pods)


class _Involved(Struct):
    kind: str = ""
    name: str = ""


class _Series(Struct, rename="camel"):
    last_observed_time: str | None = None


class _Event(Struct, rename="camel"):
    involved_object: _Involved
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None
    event_time: str | None = None
    series: _Series | None = None

    @property
    def at(self) -> datetime:
        """Time of its last occurrence; there are three fields for it, all in use."""
        series = None if self.series is None else self.series.last_observed_time
        written = [each for each in (series, self.last_timestamp, self.event_time) if each]
        return max(map(datetime.fromisoformat, written), default=NEVER)


class _Events(Struct):
    items: list[_Event]


_events = msgspec.json.Decoder(_Events)
NEVER = datetime.min.replace(tzinfo=UTC)


class _Deployments(Struct):
    items: list[deployment.Raw]


_deployments = msgspec.json.Decoder(_Deployments)


class Inspector:
    """Keeps results, with their times. ``now``: seconds of the monotonic clock."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._missed: dict[Target, tuple[float, tuple[Missed, ...]]] = {}
        self._refused: dict[Target, tuple[float, str]] = {}
        self._services: dict[Target, _Seen] = {}
        self._bare: dict[Target, tuple[float, tuple[str, ...]]] = {}

    async def refused(self, workload: Workload, injected: Sequence[Pod], now: float) -> str:
        """Return the API server's reason for rejecting a workload's pods; ``""`` where it accepts them.

        Raises ``ApiError``.
        """
        target, kind = workload.target, BY_NAME[workload.target.kind]
        if kind.maker is None or not _lacks(workload, injected):
            self._refused.pop(target, None)
            return workload.refused
        listed, found = self._refused.get(target, (-AGAIN, ""))
        if now < listed + AGAIN:
            return found
        # Set before the request, so that a failing server isn't called again at once.
        self._refused[target] = (now, found)
        query: dict[str, str | int] = {"fieldSelector": f"involvedObject.kind={kind.maker[0]}"}
        answer = _events.decode(await self._writer.read(path_of("v1", "events", target.namespace), query))
        related = [
            each
            for each in answer.items
            if each.reason in MADE | NOT_MADE
            and kind.makes(target.name, each.involved_object.kind, each.involved_object.name)
        ]
        # A pod created since then shows that there is room now.
        last = max(related, key=lambda each: each.at, default=None)
        found = "" if last is None or last.reason in MADE else last.message[:LONGEST_REFUSAL]
        self._refused[target] = (now, found)
        return found

    async def missed(self, workload: Workload, injected: Sequence[Pod], now: float) -> tuple[Missed, ...]:
        """Return a workload's pods that should have a sidecar and have none.

        Raises ``ApiError``.
        """
        target = workload.target
        if not _lacks(workload, injected):
            self._missed.pop(target, None)
            return ()
        listed, found = self._missed.get(target, (-AGAIN, ()))
        if now < listed + AGAIN:
            return found
        # Set before the request, so that a failing server isn't called again at once.
        self._missed[target] = (now, found)
        pods = await self._without_sidecar(workload, {"Pending", "Running"})
        found = tuple(Missed(pod.metadata.name, _why(pod, target)) for pod in pods)
        if found and await self._is_rolling(target):
            found = ()
        self._missed[target] = (now, found)
        return found

    async def _is_rolling(self, target: Target) -> bool:
        """Whether the Deployment of a workload that has one is replacing its pods: the workload does not report that.

        Raises ``ApiError``.
        """
        kind = BY_NAME[target.kind]
        if kind.deployment is None:
            return False
        query: dict[str, str | int] = {"fieldSelector": f"metadata.name={kind.scaled(target.name)[1]}"}
        path = path_of(deployment.KIND.api, deployment.KIND.plural, target.namespace)
        found = _deployments.decode(await self._writer.read(path, query)).items
        return any(deployment.state(each).rolling for each in found)

    async def bare(self, workload: Workload, now: float) -> tuple[str, ...]:
        """Return the names of a workload's pods that run without a sidecar: engines that are only watched.

        Raises ``ApiError``.
        """
        listed, found = self._bare.get(workload.target, (-AGAIN, ()))
        if now < listed + AGAIN:
            return found
        self._bare[workload.target] = (now, found)
        found = tuple(pod.metadata.name for pod in await self._without_sidecar(workload, {"Running"}))
        self._bare[workload.target] = (now, found)
        return found

    async def _without_sidecar(self, workload: Workload, phases: Collection[str]) -> list[_Pod]:
        """List a workload's pods without a tuned sidecar, in one of these phases.

        Raises ``ApiError``.
        """
        query: dict[str, str | int] = {"labelSelector": f"{workload.selector},{names.INJECTED}!=true", "limit": MOST}
        answer = _pods.decode(await self._writer.read(path_of("v1", "pods", workload.target.namespace), query))
        return [pod for pod in answer.items if not pod.metadata.deletion_timestamp and pod.status.phase in phases]

    def bypassed(self, target: Target) -> tuple[Event, ...]:
        """Return the Events about Services that bypass a workload's sidecars, from the last check."""
        seen = self._services.get(target)
        return () if seen is None else seen.events

    async def look_at_services(self, workload: Workload, injected: Sequence[Pod], now: float) -> None:
        """Check whether Services bypass a workload's sidecars, if it is time to.

        Raises ``ApiError``.
        """
        target = workload.target
        pods_there = [pod for pod in injected if not pod.deleting]
        if not pods_there:
            self._services.pop(target, None)
        ready = next((pod for pod in pods_there if pod.ready), None)
        if ready is None:
            return
        seen = self._services.get(target)
        if seen is not None and seen.good(ready.template_hash, now):
            return
        # Set before the request, so that a failing server isn't called again at once; the last result holds until then.
        self._services[target] = _Seen(now, ready.template_hash, () if seen is None else seen.events)
        one: dict[str, str | int] = {"fieldSelector": f"metadata.name={ready.name}"}
        pods: list[Any] = json.loads(await self._writer.read(path_of("v1", "pods", target.namespace), one))["items"]
        services: list[Any] = json.loads(await self._writer.read(path_of("v1", "services", target.namespace)))["items"]
        events = tuple(
            Event(
                True,
                SERVICE_BYPASSED,
                f"Service {service['metadata']['name']} port {way.port} bypasses the sidecar. Correct it: "
                f"{way.command}",
            )
            for pod in pods
            for service in services
            for way in bypasses(service, pod)
        )
        self._services[target] = _Seen(now, ready.template_hash, events)

    def forget(self, alive: set[Target]) -> None:
        """Forget workloads that no policy tunes any more."""
        self._missed = {target: each for target, each in self._missed.items() if target in alive}
        self._refused = {target: each for target, each in self._refused.items() if target in alive}
        self._services = {target: each for target, each in self._services.items() if target in alive}
        self._bare = {target: each for target, each in self._bare.items() if target in alive}


def _why(pod: _Pod, target: Target) -> str:
    """Return why a pod has no sidecar that the operator tunes; ``""`` if a restart adds one."""
    if names.SKIPPED in pod.metadata.annotations or not pod.has_sidecar:
        return pod.metadata.annotations.get(names.SKIPPED, "")[:LONGEST]
    return str(self_tuned(target.namespace, BY_NAME[target.kind].resource(target.name)))


def _lacks(workload: Workload, injected: Sequence[Pod]) -> bool:
    """Whether a workload that asks for sidecars has fewer pods with one than it wants."""
    return asks(workload) and sum(not pod.deleting for pod in injected) < workload.replicas
