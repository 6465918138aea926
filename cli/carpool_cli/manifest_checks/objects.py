"""The objects that the checks look at: a workload, its pod, and what refers to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from carpool_operator.api.injection import injection_of
from carpool_operator.injector.decide import annotations_of, has_sidecar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from carpool_operator.workloads.kind import Kind

Json: TypeAlias = dict[str, Any]

NAME = "kubernetes.io/metadata.name"
"""Label that the API server sets on each Namespace."""

OPERATOR = {"app.kubernetes.io/name": "carpool", "app.kubernetes.io/component": "operator"}
"""Labels of the operator's pods."""


class Peer(NamedTuple):
    """A pod from a NetworkPolicy's view. ``addresses``: its own, if known; ``account``: its service account."""

    namespace: Mapping[str, str]
    labels: Mapping[str, str]
    addresses: tuple[str, ...] = ()
    account: str = "default"


DEFAULT_OPERATOR = Peer(
    {NAME: "carpool-system"}, {**OPERATOR, "app.kubernetes.io/instance": "carpool"}, account="carpool-operator"
)
"""Created by the chart's defaults."""


class Around(NamedTuple):
    """One namespace, its objects besides workloads, and objects elsewhere that may affect its pods.

    ``policies``, ``authorizations`` (Istio's), ``cilium``, ``calico`` with its ``tiers`` and ``admin`` (administrators'
    policies, ``policy.networking.k8s.io``) are of all namespaces that the user may read. ``unread``: what could not be
    read. ``not_understood``: policies that were left out.
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


class Subject(NamedTuple):
    """A workload to check."""

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
        """The beginning of a command for its namespace."""
        return f"kubectl -n {self.namespace}"

    @property
    def resource(self) -> str:
        """Its name for kubectl."""
        return self.kind.resource(self.name)

    def annotate_pods(self, annotations: Mapping[str, str]) -> str:
        """Return how to annotate its pods."""
        return self.kind.annotate_pods(self.namespace, self.name, annotations, self.manifest)


class Ports(NamedTuple):
    """Ports of an injected pod."""

    model: int
    data: int
    admin: int


def ports(pod: Json) -> Ports | None:
    """Return the ports of a pod with a sidecar; ``None`` without one."""
    written = injection_of(annotations_of(pod))
    if not has_sidecar(pod):
        return None
    if written.port is None or written.data_port is None or written.admin_port is None:
        return None
    return Ports(written.port, written.data_port, written.admin_port)


def addresses(pod: Json) -> tuple[str, ...]:
    """Return a pod's own addresses, if known."""
    return tuple(each["ip"] for each in (pod.get("status") or {}).get("podIPs") or [])


def peer_of(namespace: Mapping[str, str], pod: Json) -> Peer:
    """Return a pod from policies' view; ``namespace``: the labels of its namespace."""
    account = (pod.get("spec") or {}).get("serviceAccountName") or "default"
    return Peer(namespace, pod["metadata"].get("labels") or {}, addresses(pod), account)
