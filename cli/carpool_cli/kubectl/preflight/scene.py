"""The objects of a preflight: the workloads of a namespace, and what refers to them or their pods."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from carpool_cli.kubectl.cluster import (
    AwayError,
    Cluster,
    ForbiddenError,
    NoKindError,
    NotFoundError,
    alive,
    read_object,
)
from carpool_cli.manifest_checks.objects import DEFAULT_OPERATOR, NAME, OPERATOR, Around, Json, Peer, Subject, peer_of
from carpool_operator.workloads import registry
from carpool_operator.workloads.metadata import Meta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_operator.workloads.kind import Kind

SYSTEM = ("kube-system", "kube-public", "kube-node-lease")
"""Namespaces in which the webhook is never called."""

POLICIES = "networkpolicies.networking.k8s.io"
AUTHORIZATIONS = "authorizationpolicies.security.istio.io"
SERVERS = "servers.policy.linkerd.io"
CILIUM = ("ciliumnetworkpolicies.cilium.io", "ciliumclusterwidenetworkpolicies.cilium.io")
CALICO = (
    ("networkpolicies.projectcalico.org", "globalnetworkpolicies.projectcalico.org"),
    ("networkpolicies.crd.projectcalico.org", "globalnetworkpolicies.crd.projectcalico.org"),
)
"""Kinds of Calico's API server; without it, the stored kinds."""
TIERS = (("tiers.projectcalico.org",), ("tiers.crd.projectcalico.org",))
"""Calico's tiers, likewise."""
ADMIN_POLICIES = tuple(
    f"{kind}.policy.networking.k8s.io"
    for kind in ("adminnetworkpolicies", "baselineadminnetworkpolicies", "clusternetworkpolicies")
)
POOLS = ("inferencepools.inference.networking.k8s.io", "inferencepools.inference.networking.x-k8s.io")
"""Kinds of the Gateway API's inference extension: v1, and its predecessors."""


class Whole(NamedTuple):
    """Objects of the whole cluster, read once; ``None`` for those that the user may not read."""

    policies: list[Json] | None
    authorizations: list[Json] | None
    operators: list[Peer] | None
    cilium: list[Json] | None
    calico: list[Json] | None
    tiers: list[Json] | None
    admin: list[Json] | None


def one(cluster: Cluster, kind: Kind, name: str) -> Subject:
    """Return one workload.

    Raises ``click.ClickException`` if there is none.
    """
    found = cluster.run("get", f"{kind.plural}.{kind.group}", name, "--output=json")
    return Subject(kind, read_object(found))


def whole(cluster: Cluster) -> Whole:
    """Read the objects of the whole cluster once.

    Raises ``click.ClickException``.
    """
    selector = ",".join(f"{key}={value}" for key, value in OPERATOR.items())
    pods = _readable(cluster, "pods", "--all-namespaces", f"--selector={selector}")
    operators = None if pods is None else [_peer(cluster, pod) for pod in alive(pods)]
    return Whole(
        policies=_readable(cluster, POLICIES, "--all-namespaces"),
        authorizations=_readable(cluster, AUTHORIZATIONS, "--all-namespaces"),
        operators=operators,
        cilium=_everywhere(cluster, CILIUM),
        calico=_everywhere(cluster, *CALICO),
        tiers=_everywhere(cluster, *TIERS),
        admin=_everywhere(cluster, ADMIN_POLICIES),
    )


def subjects(cluster: Cluster, *, everywhere: bool) -> list[Subject]:
    """Return the workloads of one or all namespaces, except the system's and Carpool's own, by namespace and name.

    Raises ``click.ClickException``.
    """
    try:
        listed = cluster.run("api-resources", "--verbs=list", "--namespaced=true", "--output=name").split()
    except AwayError as error:  # an aggregated API, such as that of metrics, has no workloads
        listed = error.printed.split()
    kinds = {f"{kind.plural}.{kind.group}": kind for kind in registry.KINDS}
    there = [resource for resource in kinds if resource in listed]
    by_kind = {(kind.group, kind.name): kind for kind in registry.KINDS}
    found = []
    for manifest in cluster.items(",".join(there), *(["--all-namespaces"] if everywhere else [])):
        kind = by_kind[manifest["apiVersion"].partition("/")[0], manifest["kind"]]
        meta = msgspec.convert(manifest["metadata"], Meta)
        ours = meta.labels.get("app.kubernetes.io/part-of") == "carpool"
        if not registry.is_part(meta) and not ours and not (everywhere and meta.namespace in SYSTEM):
            found.append(Subject(kind, manifest))
    return sorted(found, key=lambda each: (each.namespace, each.kind.name, each.name))


def around(cluster: Cluster, namespace: str, of_all: Whole) -> Around:
    """Return a namespace, its objects, and objects elsewhere that may affect its pods.

    Raises ``click.ClickException``.
    """
    within = cluster._replace(namespace=namespace)
    try:
        there = read_object(within.run("get", "namespace", namespace, "--output=json"))
    except NotFoundError:
        there = {"metadata": {"name": namespace}}
    unread = []
    policies = of_all.policies
    if policies is None:
        unread.append("NetworkPolicies of other namespaces, whose egress rules may keep callers out")
        policies = within.items(POLICIES)
    optional = {}
    for resource, hides in (
        ("resourcequotas", "ResourceQuotas"),
        ("limitranges", "LimitRanges"),
        (SERVERS, "Linkerd's Servers"),
        *((pool, "InferencePools") for pool in POOLS),
    ):
        found = _readable(within, resource)
        optional[resource] = found or []
        if found is None and hides not in unread:
            unread.append(hides)
    if of_all.authorizations is None:
        unread.append("Istio's AuthorizationPolicies")
    if of_all.cilium is None:
        unread.append("Cilium's policies")
    if of_all.calico is None:
        unread.append("Calico's policies")
    if of_all.tiers is None:
        unread.append("the order of Calico's tiers")
    if of_all.admin is None:
        unread.append("AdminNetworkPolicies and BaselineAdminNetworkPolicies")
    if of_all.operators is None:
        unread.append("the operator's pods, which are taken to be in namespace carpool-system")
    return Around(
        namespace=there,
        services=within.items("services"),
        policies=policies,
        autoscalers=within.items("horizontalpodautoscalers.autoscaling"),
        quotas=optional["resourcequotas"],
        limit_ranges=optional["limitranges"],
        authorizations=of_all.authorizations or [],
        servers=optional[SERVERS],
        cilium=of_all.cilium or [],
        calico=of_all.calico or [],
        tiers=of_all.tiers or [],
        admin=of_all.admin or [],
        pools=[each for kind in POOLS for each in optional[kind]],
        operators=of_all.operators or [DEFAULT_OPERATOR],
        unread=unread,
    )


def pods(cluster: Cluster, subject: Subject) -> list[Json] | None:
    """Return a workload's pods; ``None`` if the user may not read them.

    Raises ``click.ClickException``.
    """
    kind = subject.kind
    selector = kind.state(msgspec.convert(subject.manifest, kind.raw)).selector
    within = cluster._replace(namespace=subject.namespace)
    found = _readable(within, "pods", f"--selector={selector}")
    return None if found is None else list(alive(found))


def _peer(cluster: Cluster, pod: Json) -> Peer:
    metadata = pod["metadata"]
    try:
        text = cluster.run("get", "namespace", metadata["namespace"], "--output=json")
        labels = read_object(text)["metadata"].get("labels") or {}
    except (ForbiddenError, NotFoundError):
        labels = {}
    return peer_of({NAME: metadata["namespace"], **labels}, pod)


def _readable(cluster: Cluster, resource: str, *flags: str) -> list[Json] | None:
    """Return objects: none if the cluster has no such kind, and ``None`` if the user may not read them."""
    try:
        return cluster.items(resource, *flags)
    except NoKindError:
        return []
    except ForbiddenError:
        return None


def _everywhere(cluster: Cluster, *groups: Sequence[str]) -> list[Json] | None:
    """Return objects of all namespaces, of the first group of kinds that the cluster has and the user may read.

    It may have only some kinds of a group. None if it has no such group. ``None`` if the user may not read all kinds
    that it has, or one is not available.
    """
    unread = False
    for kinds in groups:
        listed = []
        try:
            for kind in kinds:
                with suppress(NoKindError):
                    listed.append(cluster.items(kind, "--all-namespaces"))
        except (ForbiddenError, AwayError):
            unread = True
            continue
        if listed:
            return [each for found in listed for each in found]
    return None if unread else []
