"""The cluster at the beginning of a pass, and what a decision needs to know besides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool_operator.api.model import View
from carpool_operator.cluster.autoscalers import followed
from carpool_operator.cluster.kube import ApiError
from carpool_operator.reporting.conditions import asks
from carpool_operator.reporting.events import LASTING, About
from carpool_operator.tuning.assignment import targets_of
from carpool_operator.tuning.engines import watches_engines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from carpool.generation.observed import Counters
    from carpool_operator.api.model import Event, Missed, Pod, Policy, Target, Workload
    from carpool_operator.cluster.autoscalers import Autoscaler
    from carpool_operator.loop.parts import Parts


@dataclass(frozen=True)
class Scene:
    """The cluster at the beginning of a pass."""

    owners: Mapping[Target, Policy]
    owned: Mapping[str, Sequence[Target]]
    """By UID of the policy that they belong to."""
    selected: Mapping[str, Sequence[Target]]
    """By UID of the policy that selects them."""
    pods: Mapping[Target, Sequence[Pod]]
    fleet: int
    workload_events: Mapping[Target, Sequence[Event]]
    """Events about annotations, by their workload."""
    autoscalers: Mapping[Target, Autoscaler]
    """Autoscalers that follow the load of workloads."""


async def look(parts: Parts, policy: Policy, scene: Scene, refused: Mapping[str, str]) -> View:
    """Read the pods and engines of a policy, and check its workloads.

    ``refused``: why pods did not take their last document, by UID.
    """
    targets, selected = scene.owned.get(policy.uid, ()), scene.selected.get(policy.uid, ())
    named = targets if policy.spec is None else targets_of(policy.namespace, policy.spec, selected)
    workloads = {
        target: followed(each, scene.autoscalers.get(target))
        for target in named
        if (each := parts.fleet.workload(target)) is not None
    }
    pods = {target: scene.pods.get(target, ()) for target in named}
    mine = [pod for target in targets for pod in pods[target]]
    readings = await parts.sources.read(policy, mine, fleet=scene.fleet)
    for reading in readings.values():
        parts.metrics.count("readings", "error" if reading.report is None else "ok")
    engines = await _engines(parts, policy, workloads, pods)
    missed, workloads = await _inspect(parts, targets, workloads, pods)
    return View(
        now=parts.clock(),
        wall=parts.wall(),
        policy=policy,
        owners=scene.owners,
        selected=selected,
        workloads=workloads,
        pods=pods,
        readings=readings,
        refused={pod.uid: refused[pod.uid] for pod in mine if pod.uid in refused},
        missed=missed,
        workload_events={
            target: (*scene.workload_events.get(target, ()), *parts.inspector.bypassed(target)) for target in targets
        },
        engines=engines,
        keys=parts.signer.announced,
    )


async def _engines(
    parts: Parts, policy: Policy, workloads: Mapping[Target, Workload], pods: Mapping[Target, Sequence[Pod]]
) -> dict[Target, dict[str, Counters | str]]:
    """Read the engines of targets without sidecars, if the policy only recommends."""
    if policy.spec is None or not watches_engines(policy.spec):
        return {}
    bare: dict[Target, tuple[str, ...]] = {}
    for target, workload in workloads.items():
        if pods[target] or asks(workload):
            continue
        try:
            bare[target] = await parts.inspector.bare(workload, parts.clock())
        except ApiError as error:
            parts.log.warning("can't list pods", extra={"target": str(target), "error": str(error)})
    found = await parts.sources.engines(policy, [pod for names in bare.values() for pod in names])
    if found is None:
        return {}
    return {target: {pod: found[pod] for pod in names} for target, names in bare.items()}


async def _inspect(
    parts: Parts, targets: Sequence[Target], workloads: Mapping[Target, Workload], pods: Mapping[Target, Sequence[Pod]]
) -> tuple[dict[Target, tuple[Missed, ...]], dict[Target, Workload]]:
    """Look for pods without a sidecar, for rejected pods, and for Services that bypass sidecars.

    Returns the first by target, and the workloads with the rejections.
    """
    inspector = parts.inspector
    missed: dict[Target, tuple[Missed, ...]] = {}
    known = dict(workloads)
    for target in targets:
        workload = workloads.get(target)
        if workload is None:
            continue
        try:
            refused = await inspector.refused(workload, pods[target], parts.clock())
            known[target] = replace(workload, refused=refused)
            if not workload.rolling:
                missed[target] = await inspector.missed(workload, pods[target], parts.clock())
            await inspector.look_at_services(workload, pods[target], parts.clock())
            for event in inspector.bypassed(target):
                parts.recorder.record(About.of(workload), event, parts.wall(), LASTING)
        except ApiError as error:
            parts.log.warning("can't read a workload", extra={"target": str(target), "error": str(error)})
    return missed, known
