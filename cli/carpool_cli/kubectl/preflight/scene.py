"""What a preflight looks at: the workloads of a place, and what refers to them or their pods."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from carpool_cli.kubectl.cluster import AwayError, ForbiddenError, NoKindError, NotFoundError, alive
from carpool_operator.workloads import registry
from carpool_operator.workloads.metadata import Meta

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from carpool_cli.kubectl.cluster import Cluster
    from carpool_operator.workloads.kind import Kind

Json: TypeAlias = dict[str, Any]

SYSTEM = ("kube-system", "kube-public", "kube-node-lease")
"""Namespaces in which the webhook is never asked."""

NAME = "kubernetes.io/metadata.name"
"""Label of each Namespace, which the API server writes."""

POLICIES = "networkpolicies.networking.k8s.io"
AUTHORIZATIONS = "authorizationpolicies.security.istio.io"
SERVERS = "servers.policy.linkerd.io"
CILIUM = ("ciliumnetworkpolicies.cilium.io", "ciliumclusterwidenetworkpolicies.cilium.io")
CALICO = (
    ("networkpolicies.projectcalico.org", "globalnetworkpolicies.projectcalico.org"),
    ("networkpolicies.crd.projectcalico.org", "globalnetworkpolicies.crd.projectcalico.org"),
)
"""As Calico's API server has them; without it, as they are stored."""
TIERS = (("tiers.projectcalico.org",), ("tiers.crd.projectcalico.org",))
"""Of Calico, likewise."""
ADMIN_POLICIES = tuple(
    f"{kind}.policy.networking.k8s.io"
    for kind in ("adminnetworkpolicies", "baselineadminnetworkpolicies", "clusternetworkpolicies")
)
POOLS = ("inferencepools.inference.networking.k8s.io", "inferencepools.inference.networking.x-k8s.io")
"""Of the Gateway API's inference extension: v1, and those before it."""

OPERATOR = {"app.kubernetes.io/name": "carpool", "app.kubernetes.io/component": "operator"}
"""Labels of the operator's pods."""


class Peer(NamedTuple):
    """A pod as a NetworkPolicy sees it. ``addresses``: its own, where they are known; ``account``: it runs as that."""

    namespace: Mapping[str, str]
    labels: Mapping[str, str]
    addresses: tuple[str, ...] = ()
    account: str = "default"


DEFAULT_OPERATOR = Peer(
    {NAME: "carpool-system"}, {**OPERATOR, "app.kubernetes.io/instance": "carpool"}, account="carpool-operator"
)
"""As the chart makes it by default."""


class Around(NamedTuple):
    """One namespace, what is in it besides workloads, and what elsewhere may concern its pods.

    ``policies``, ``authorizations`` (Istio's), ``cilium``, ``calico`` with its ``tiers`` and ``admin`` (policies that
    administrators write, ``policy.networking.k8s.io``) are of all namespaces, where one may read these. ``unread``:
    what could not be read. ``not_understood``: policies that were left out.
    """

    namespace: Json
    services: Sequence[Json] = ()
    policies: Sequence[Json] = ()
    autoscalers: Sequence[Json] = ()
    quotas: Sequence[Json] = ()
    limit_ranges: Sequence[Json] = ()
    authorizations: Sequence[Json] = ()
    servers: Sequence[Json] = ()
    cilium: Sequence[Json] = ()
    calico: Sequence[Json] = ()
    tiers: Sequence[Json] = ()
    admin: Sequence[Json] = ()
    pools: Sequence[Json] = ()
    operators: Sequence[Peer] = (DEFAULT_OPERATOR,)
    unread: Sequence[str] = ()
    not_understood: Sequence[str] = ()

    @property
    def labels(self) -> dict[str, str]:
        """The namespace's labels."""
        metadata = self.namespace["metadata"]
        return {NAME: metadata["name"], **(metadata.get("labels") or {})}

    @property
    def annotations(self) -> dict[str, str]:
        """The namespace's annotations."""
        return self.namespace["metadata"].get("annotations") or {}


class Whole(NamedTuple):
    """What is read once of the whole cluster; ``None`` for what one may not read."""

    policies: list[Json] | None
    authorizations: list[Json] | None
    operators: list[Peer] | None
    cilium: list[Json] | None
    calico: list[Json] | None
    tiers: list[Json] | None
    admin: list[Json] | None


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

    @property
    def kubectl(self) -> str:
        """How a command for its namespace begins."""
        return f"kubectl -n {self.namespace}"

    @property
    def resource(self) -> str:
        """How kubectl names it."""
        return self.kind.resource(self.name)

    def annotate_pods(self, annotations: Mapping[str, str]) -> str:
        """Return how annotations get on its pods."""
        return self.kind.annotate_pods(self.namespace, self.name, annotations, self.manifest)


def one(cluster: Cluster, kind: Kind, name: str) -> Subject:
    """Return one workload.

    Raises ``click.ClickException`` where there is none.
    """
    found = cluster.run("get", f"{kind.plural}.{kind.group}", name, "--output=json")
    return Subject(kind, msgspec.json.decode(found))


def whole(cluster: Cluster) -> Whole:
    """Return what is read once of the whole cluster.

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
    """Return the workloads of the namespace, or of all but the system's and Carpool's own, by namespace and name.

    Raises ``click.ClickException``.
    """
    try:
        listed = cluster.run("api-resources", "--verbs=list", "--namespaced=true", "--output=name").split()
    except AwayError as error:  # such as one of metrics; workloads are not served by it
        listed = error.printed.split()
    kinds = {f"{kind.plural}.{kind.group}": kind for kind in registry.KINDS}
    there = [resource for resource in kinds if resource in listed]
    by_kind = {(kind.group, kind.name): kind for kind in registry.KINDS}
    found = []
    for manifest in _list(cluster, ",".join(there), *(["--all-namespaces"] if everywhere else [])):
        kind = by_kind[manifest["apiVersion"].partition("/")[0], manifest["kind"]]
        meta = msgspec.convert(manifest["metadata"], Meta)
        ours = meta.labels.get("app.kubernetes.io/part-of") == "carpool"
        if not registry.is_part(meta) and not ours and not (everywhere and meta.namespace in SYSTEM):
            found.append(Subject(kind, manifest))
    return sorted(found, key=lambda each: (each.namespace, each.kind.name, each.name))


def around(cluster: Cluster, namespace: str, of_all: Whole) -> Around:
    """Return a namespace, what is in it, and what elsewhere may concern its pods.

    Raises ``click.ClickException``.
    """
    within = cluster._replace(namespace=namespace)
    try:
        there: Json = msgspec.json.decode(within.run("get", "namespace", namespace, "--output=json"))
    except NotFoundError:
        there = {"metadata": {"name": namespace}}
    unread = []
    policies = of_all.policies
    if policies is None:
        unread.append("NetworkPolicies of other namespaces, whose egress rules may keep callers out")
        policies = _list(within, POLICIES)
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
        services=_list(within, "services"),
        policies=policies,
        autoscalers=_list(within, "horizontalpodautoscalers.autoscaling"),
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
    """Return a workload's pods; ``None`` where one may not read them.

    Raises ``click.ClickException``.
    """
    kind = subject.kind
    selector = kind.state(msgspec.convert(subject.manifest, kind.raw)).selector
    within = cluster._replace(namespace=subject.namespace)
    found = _readable(within, "pods", f"--selector={selector}")
    return None if found is None else list(alive(found))


def addresses(pod: Json) -> tuple[str, ...]:
    """Return a pod's own, where they are known."""
    return tuple(each["ip"] for each in (pod.get("status") or {}).get("podIPs") or [])


def peer_of(namespace: Mapping[str, str], pod: Json) -> Peer:
    """Return a pod as policies see it; ``namespace``: the labels of its namespace."""
    account = (pod.get("spec") or {}).get("serviceAccountName") or "default"
    return Peer(namespace, pod["metadata"].get("labels") or {}, addresses(pod), account)


def _peer(cluster: Cluster, pod: Json) -> Peer:
    metadata = pod["metadata"]
    try:
        text = cluster.run("get", "namespace", metadata["namespace"], "--output=json")
        labels = msgspec.json.decode(text)["metadata"].get("labels") or {}
    except (ForbiddenError, NotFoundError):
        labels = {}
    return peer_of({NAME: metadata["namespace"], **labels}, pod)


def _readable(cluster: Cluster, resource: str, *flags: str) -> list[Json] | None:
    """Return objects: none where the cluster has no such kind, and ``None`` where one may not read them."""
    try:
        return _list(cluster, resource, *flags)
    except NoKindError:
        return []
    except ForbiddenError:
        return None


def _everywhere(cluster: Cluster, *groups: Sequence[str]) -> list[Json] | None:
    """Return objects of all namespaces, by the first group of kinds that the cluster has and one may read.

    It may have some kinds of a group only. None where it has no such group, and ``None`` where one may not read all
    that it has of it, or that is away.
    """
    unread = False
    for kinds in groups:
        listed = []
        try:
            for kind in kinds:
                with suppress(NoKindError):
                    listed.append(_list(cluster, kind, "--all-namespaces"))
        except (ForbiddenError, AwayError):
            unread = True
            continue
        if listed:
            return [each for found in listed for each in found]
    return None if unread else []


def _list(cluster: Cluster, resources: str, *flags: str) -> list[Json]:
    items: list[Json] = msgspec.json.decode(cluster.run("get", resources, *flags, "--output=json"))["items"]
    return items
