"""The checks that need no cluster, for the objects that come with a workload in one input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_cli.manifest_checks.autoscalers import autoscalers
from carpool_cli.manifest_checks.network.judging import network_policies
from carpool_cli.manifest_checks.objects import Around, Json, Subject, ports
from carpool_operator.api.injection import injection_of
from carpool_operator.injector.decide import annotations_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from carpool_cli.manifest_checks.findings import Finding
    from carpool_operator.workloads.kind import Kind

NETWORK_POLICY, AUTOSCALER = "NetworkPolicy", "HorizontalPodAutoscaler"


def is_looked_at(thing: Json) -> bool:
    """Whether an object is of a kind that these checks know; others may share the name of a kind."""
    group = str(thing.get("apiVersion")).partition("/")[0]
    return (thing.get("kind"), group) in {(NETWORK_POLICY, "networking.k8s.io"), (AUTOSCALER, "autoscaling")}


def findings(kind: Kind, workload: Json, pod: Json, namespace: str | None, others: Sequence[Json]) -> Iterator[Finding]:
    """Find NetworkPolicies and HorizontalPodAutoscalers that the sidecar of ``pod``, a template, would break.

    ``namespace``: the workload's, which objects without one share; ``None`` where it is not known.
    """
    found = ports(pod)
    if found is None:
        return
    if namespace is None:
        named = (each["metadata"].get("namespace") for each in others)
        namespace = next((each for each in named if each), "")
    metadata = {**workload["metadata"], "namespace": namespace}
    subject = Subject(kind, {**workload, "metadata": metadata})
    here = [each for each in others if each["metadata"].get("namespace", namespace) == namespace]
    near = Around(
        namespace={"metadata": {"name": namespace}},
        policies=[each for each in others if each["kind"] == NETWORK_POLICY],
        autoscalers=[_second(each) for each in here if each["kind"] == AUTOSCALER],
    )
    # With a captured port, calls by its number reach the sidecar.
    if not injection_of(annotations_of(pod)).capture:
        yield from network_policies(subject, pod, found, near, [])
    yield from autoscalers(subject, pod, near)


def _second(scaler: Json) -> Json:
    """Return an autoscaler of autoscaling/v1 as one of v2: its percentage is of the CPU requests."""
    percent = scaler["spec"].get("targetCPUUtilizationPercentage")
    if percent is None:
        return scaler
    target = {"type": "Utilization", "averageUtilization": percent}
    metric = {"type": "Resource", "resource": {"name": "cpu", "target": target}}
    return {**scaler, "spec": {**scaler["spec"], "metrics": [metric]}}
