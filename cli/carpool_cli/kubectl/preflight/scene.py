"""What a preflight looks at: the workloads of a place, and what refers to them or their pods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from carpool_cli.kubectl.cluster import NotFoundError
from carpool_operator.workloads import registry
from carpool_operator.workloads.metadata import Meta

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from carpool_cli.kubectl.cluster import Cluster
    from carpool_operator.workloads.kind import Kind

Json: TypeAlias = dict[str, Any]

AROUND = ("services", "networkpolicies.networking.k8s.io", "horizontalpodautoscalers.autoscaling")
"""What may know a workload or its pods."""

SYSTEM = ("kube-system", "kube-public", "kube-node-lease")
"""Namespaces in which the webhook is never asked."""


class Around(NamedTuple):
    """One namespace, and what is in it besides workloads."""

    namespace: Json
    services: list[Json]
    policies: list[Json]
    autoscalers: list[Json]


class Subject(NamedTuple):
    """A workload to look at."""

    kind: Kind
    manifest: Json

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.manifest["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return str(self.manifest["metadata"]["namespace"])


def one(cluster: Cluster, kind: Kind, name: str) -> Subject:
    """Return one workload.

    Raises ``click.ClickException`` where there is none.
    """
    found = cluster.run("get", f"{kind.plural}.{kind.group}", name, "--output=json")
    return Subject(kind, msgspec.json.decode(found))


def subjects(cluster: Cluster, *, everywhere: bool) -> list[Subject]:
    """Return the workloads of the namespace, or of all but the system's and Carpool's own, by namespace and name.

    Raises ``click.ClickException``.
    """
    listed = cluster.run("api-resources", "--verbs=list", "--namespaced=true", "--output=name").split()
    kinds = {f"{kind.plural}.{kind.group}": kind for kind in registry.KINDS}
    there = [resource for resource in kinds if resource in listed]
    by_kind = {(kind.group, kind.name): kind for kind in registry.KINDS}
    found = []
    for manifest in _list(cluster, there, everywhere=everywhere):
        kind = by_kind[manifest["apiVersion"].partition("/")[0], manifest["kind"]]
        meta = msgspec.convert(manifest["metadata"], Meta)
        ours = meta.labels.get("app.kubernetes.io/part-of") == "carpool"
        if not registry.is_part(meta) and not ours and not (everywhere and meta.namespace in SYSTEM):
            found.append(Subject(kind, manifest))
    return sorted(found, key=lambda each: (each.namespace, each.kind.name, each.name))


def around(cluster: Cluster, namespace: str) -> Around:
    """Return a namespace and what is in it.

    Raises ``click.ClickException``.
    """
    within = cluster._replace(namespace=namespace)
    services, policies, autoscalers = (_list(within, [resource]) for resource in AROUND)
    try:
        there: Json = msgspec.json.decode(within.run("get", "namespace", namespace, "--output=json"))
    except NotFoundError:
        there = {"metadata": {"name": namespace}}
    return Around(there, services, policies, autoscalers)


def running(cluster: Cluster, subject: Subject) -> Json | None:
    """Return one of a workload's pods; ``None`` where it has none."""
    kind = subject.kind
    selector = kind.state(msgspec.convert(subject.manifest, kind.raw)).selector
    within = cluster._replace(namespace=subject.namespace)
    items: Sequence[Json] = msgspec.json.decode(within.run("get", "pods", f"--selector={selector}", "--output=json"))[
        "items"
    ]
    return next(_alive(items), None)


def _alive(pods: Sequence[Json]) -> Iterator[Json]:
    for pod in pods:
        if not pod["metadata"].get("deletionTimestamp"):
            yield pod


def _list(cluster: Cluster, resources: Sequence[str], *, everywhere: bool = False) -> list[Json]:
    where = ["--all-namespaces"] if everywhere else []
    items: list[Json] = msgspec.json.decode(cluster.run("get", ",".join(resources), *where, "--output=json"))["items"]
    return items
