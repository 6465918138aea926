"""HorizontalPodAutoscalers whose figures a sidecar changes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from carpool_cli.manifest_checks.findings import Code, Effect, Finding, json_patch
from carpool_operator.api import annotations as names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from carpool_cli.manifest_checks.objects import Around, Json, Subject


def autoscalers(subject: Subject, pod: Json, near: Around) -> Iterator[Finding]:
    """Find HPAs on a percentage of all containers' requests: the sidecar adds its own request."""
    container = json.loads(pod["metadata"]["annotations"][names.STATUS])["container"]
    for scaler in near.autoscalers:
        target, name = scaler["spec"]["scaleTargetRef"], scaler["metadata"]["name"]
        if (target["kind"], target["name"]) != subject.kind.scaled(subject.name):
            continue
        for index, metric in enumerate(scaler["spec"].get("metrics") or []):
            resource = metric.get("resource") or {}
            if metric["type"] != "Resource" or resource["target"]["type"] != "Utilization":
                continue
            value = {"type": "ContainerResource", "containerResource": {**resource, "container": container}}
            yield Finding(
                Code.HPA_ON_PERCENTAGE,
                Effect.BREAKS,
                f"HorizontalPodAutoscaler {name} scales by a percentage of the {resource['name']} that all containers "
                "request: the sidecar's request changes that",
                json_patch(subject.namespace, f"hpa {name}", "replace", f"/spec/metrics/{index}", value),
            )
