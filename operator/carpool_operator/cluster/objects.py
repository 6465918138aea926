"""The parts of the API server's objects that are kept: a few fields each, so that thousands fit in memory."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from msgspec import Struct, field

from carpool.policy.plain import PolicyError
from carpool_operator.api import annotations as names
from carpool_operator.api.injection import injection_of
from carpool_operator.api.model import Namespace, Pod, Policy, Target, Workload
from carpool_operator.api.spec import read_policy
from carpool_operator.injector.decide import ADMIN_PORT
from carpool_operator.workloads.metadata import Key, Meta, epoch
from carpool_operator.workloads.registry import BY_NAME, is_part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from carpool_operator.api.spec import PolicySpec, TargetRef
    from carpool_operator.workloads.kind import Kind
    from carpool_operator.workloads.metadata import Owner

ANNOTATED = names.PREFIX + "annotated"
"""Label of a policy that is kept for a workload's annotations; the workload owns it. A copy under another name belongs
to a user."""

VERSION = version("carpool-serving")

LONGEST_REFUSAL = 400
"""Most characters kept of why pods are rejected."""

PAUSED = names.PREFIX + "paused"
"""Annotation of a policy: while it is set, nothing changes."""

T = TypeVar("T")


class ListMeta(Struct, frozen=True, rename="camel"):
    """``metadata`` of a list's page."""

    resource_version: str = "0"
    continue_: str = field(default="", name="continue")


class ObjectsPage(Struct, Generic[T], frozen=True):
    """A page of a list."""

    metadata: ListMeta
    items: list[T]


class Change(Struct, frozen=True):
    """A line of a watch."""

    type: str
    object: msgspec.Raw


class Failure(Struct, frozen=True):
    """The error with which a watch ends early."""

    code: int = 0
    message: str = ""


# ------------------------------------------------------------------------------------------------- workloads


def workload(kind: Kind, raw: Any) -> Workload | None:  # noqa: ANN401 - what the kind's JSON is decoded to
    """Return the kept part of a workload as the server writes it.

    Returns ``None`` for one that another workload owns, and for one being deleted: objects created for it would be
    garbage-collected with it.
    """
    meta: Meta = raw.metadata
    if meta.deletion_timestamp or is_part(meta):
        return None
    state = kind.state(raw)
    return Workload(
        target=Target(meta.namespace, kind.name, meta.name),
        uid=meta.uid,
        generation=meta.generation,
        labels=meta.labels,
        annotations=_ours(meta.annotations),
        template_annotations=_ours(state.template_annotations),
        selector=state.selector,
        replicas=state.replicas,
        created=meta.created,
        rolling=state.rolling,
        refused=state.refused[:LONGEST_REFUSAL],
        held_back=state.held_back,
    )


def _ours(given: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in given.items() if key.startswith(names.PREFIX)}


# ------------------------------------------------------------------------------------------------- pods


class _Condition(Struct, frozen=True, rename="camel"):
    type: str
    status: str
    last_transition_time: str | None = None


class _PodStatus(Struct, frozen=True):
    phase: str = ""
    pod_ip: str = field(default="", name="podIP")
    conditions: list[_Condition] = field(default_factory=list)


class RawPod(Struct, frozen=True):
    """A pod as the server writes it."""

    metadata: Meta
    status: _PodStatus = _PodStatus()

    def pod(self) -> Pod | None:
        """Return the kept part; ``None`` for a pod that has ended or belongs to no known workload."""
        meta = self.metadata
        kind, _, name = meta.annotations.get(names.TARGET, "").partition("/")
        if not name or kind not in BY_NAME or self.status.phase in {"Succeeded", "Failed"}:
            return None
        injection = injection_of(meta.annotations)
        ready = next((each for each in self.status.conditions if each.type == "Ready" and each.status == "True"), None)
        since = None if ready is None else ready.last_transition_time
        return Pod(
            namespace=meta.namespace,
            name=meta.name,
            uid=meta.uid,
            target=Target(meta.namespace, kind, name),
            ip=self.status.pod_ip,
            admin_port=injection.admin_port or ADMIN_PORT,
            ready=ready is not None,
            ready_after=max(epoch(since) - meta.created, 0.0) if since and meta.creation_timestamp else 0.0,
            deleting=bool(meta.deletion_timestamp),
            template_hash=meta.labels.get(BY_NAME[kind].revision, ""),
            container=injection.container[:63],
            current=injection.version == VERSION,
        )


# ------------------------------------------------------------------------------------------------- policies


class RawPolicy(Struct, frozen=True):
    """A BatchingPolicy as the server writes it."""

    metadata: Meta
    spec: Any = None
    status: dict[str, Any] = field(default_factory=dict)

    def policy(self) -> Policy:
        """Return it with its spec parsed, or with the error."""
        meta, spec, error = self.metadata, None, ""
        try:
            spec = read_policy({"spec": self.spec})
        except PolicyError as wrong:
            error = str(wrong)
        made_for = _made_for(meta, spec)
        return Policy(
            namespace=meta.namespace,
            name=meta.name,
            uid=meta.uid,
            generation=meta.generation,
            created=meta.created,
            spec=spec,
            error=error,
            status=self.status,
            paused=PAUSED in meta.annotations,
            made_for=made_for,
            orphaned=made_for is not None and meta.controller is None,
        )


def _made_for(meta: Meta, spec: PolicySpec | None) -> Target | None:
    """Return the workload for whose annotations the operator keeps a policy; ``None`` for a policy of a user.

    That is the controller. Without one it is the only target: ``kubectl delete --cascade=orphan`` removes the owner
    reference. The label alone does not show it: a user's copy has the label too, but another name.
    """
    if meta.labels.get(ANNOTATED) != "true":
        return None
    owner: Owner | TargetRef | None = meta.controller
    if owner is None and spec is not None and spec.target_selector is None and len(spec.target_refs) == 1:
        owner = spec.target_refs[0]
    if owner is None or meta.name != names.policy_name(owner.kind, owner.name):
        return None
    return Target(meta.namespace, owner.kind, owner.name)


# ------------------------------------------------------------------------------------------------- namespaces


class _NamespaceMeta(Meta, frozen=True):
    """A namespace counts as lying in itself here, so that lookups by namespace work as for any other kind."""

    @property
    def key(self) -> Key:
        """Its name, twice."""
        return Key(self.name, self.name)


class RawNamespace(Struct, frozen=True):
    """A Namespace as the server writes it."""

    metadata: _NamespaceMeta

    def namespace(self) -> Namespace | None:
        """Return the kept part; ``None`` for one without annotations of Carpool."""
        ours = _ours(self.metadata.annotations)
        if not ours:
            return None
        defaults, problems = names.read_defaults(ours)
        return Namespace(self.metadata.name, self.metadata.uid, defaults, problems)


# ------------------------------------------------------------------------------------------------- configurations


class RawConfigMap(Struct, frozen=True):
    """A ConfigMap as the server writes it."""

    metadata: Meta
    data: dict[str, str] = field(default_factory=dict)
