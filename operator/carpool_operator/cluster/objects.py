"""What is kept of the API server's objects: a few fields each, so that thousands fit."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct, field

from carpool.policy.plain import PolicyError
from carpool_operator.api import annotations as names
from carpool_operator.api.injection import injection_of
from carpool_operator.api.model import Pod, Policy, Target, Workload
from carpool_operator.api.spec import read_policy
from carpool_operator.injector.decide import ADMIN_PORT

ANNOTATED = names.PREFIX + "annotated"
"""Label of a policy that is kept for a Deployment's annotations, which owns it. A copy under another name is a
person's."""

LONGEST_REFUSAL = 400
"""Characters kept of why pods are refused."""

PAUSED = names.PREFIX + "paused"
"""Annotation of a policy: nothing changes while it is there."""

T = TypeVar("T")


class Key(NamedTuple):
    """Name of a namespaced object."""

    namespace: str
    name: str


class Owner(Struct, frozen=True):
    """An owner reference."""

    uid: str = ""
    kind: str = ""
    name: str = ""
    controller: bool = False


class Meta(Struct, frozen=True, rename="camel"):
    """``metadata``."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = "0"
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    owner_references: list[Owner] = field(default_factory=list)

    @property
    def key(self) -> Key:
        """Its name, with the namespace."""
        return Key(self.namespace, self.name)

    @property
    def version(self) -> int:
        """Its resource version, as a number."""
        return int(self.resource_version)

    @property
    def created(self) -> float:
        """When it was made, seconds since the epoch."""
        return datetime.fromisoformat(self.creation_timestamp).replace(tzinfo=UTC).timestamp()


class ListMeta(Struct, frozen=True, rename="camel"):
    """``metadata`` of a list's page."""

    resource_version: str = "0"
    continue_: str = field(default="", name="continue")


class Page(Struct, Generic[T], frozen=True):
    """A page of a list."""

    metadata: ListMeta
    items: list[T]


class Change(Struct, frozen=True):
    """A line of a watch."""

    type: str
    object: msgspec.Raw


class Failure(Struct, frozen=True):
    """What a watch says when it ends early."""

    code: int = 0
    message: str = ""


# ------------------------------------------------------------------------------------------------- workloads


class _Requirement(Struct, frozen=True):
    key: str
    operator: str
    values: list[str] = field(default_factory=list)


class _Selector(Struct, frozen=True, rename="camel"):
    match_labels: dict[str, str] = field(default_factory=dict)
    match_expressions: list[_Requirement] = field(default_factory=list)


class _TemplateMeta(Struct, frozen=True):
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)


class _Template(Struct, frozen=True):
    metadata: _TemplateMeta = _TemplateMeta()


class _WorkloadSpec(Struct, frozen=True):
    selector: _Selector = _Selector()
    template: _Template = _Template()
    replicas: int = 1


class _WorkloadCondition(Struct, frozen=True):
    type: str = ""
    status: str = ""
    message: str = ""


class _WorkloadStatus(Struct, frozen=True, rename="camel"):
    observed_generation: int = 0
    replicas: int = 0
    updated_replicas: int = 0
    current_revision: str = ""
    update_revision: str = ""
    conditions: list[_WorkloadCondition] = field(default_factory=list)

    @property
    def refused(self) -> str:
        """What the API server said to the pods that a ReplicaSet could not make."""
        failures = [each for each in self.conditions if each.type == "ReplicaFailure" and each.status == "True"]
        return failures[0].message[:LONGEST_REFUSAL] if failures else ""


class RawWorkload(Struct, frozen=True):
    """A Deployment or StatefulSet as the server writes it."""

    metadata: Meta
    spec: _WorkloadSpec = _WorkloadSpec()
    status: _WorkloadStatus = _WorkloadStatus()

    def workload(self, kind: str) -> Workload | None:
        """Return what is kept of it; nothing of one on its way out: what is made for it now is collected with it."""
        meta, spec, status = self.metadata, self.spec, self.status
        if meta.deletion_timestamp:
            return None
        behind = status.observed_generation < meta.generation
        if kind == "StatefulSet":
            rolling = behind or status.current_revision != status.update_revision
        else:
            # Pods of the old template are there, or some of the new one are not.
            rolling = behind or status.updated_replicas < max(spec.replicas, status.replicas)
        return Workload(
            target=Target(meta.namespace, kind, meta.name),
            uid=meta.uid,
            generation=meta.generation,
            annotations=_ours(meta.annotations),
            template_annotations=_ours(spec.template.metadata.annotations),
            selector=",".join([f"{key}={value}" for key, value in spec.selector.match_labels.items()]
                + [_written(each) for each in spec.selector.match_expressions]),
            replicas=spec.replicas,
            created=meta.created,
            rolling=rolling,
            refused=status.refused,
        )  # fmt: skip


def _ours(given: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in given.items() if key.startswith(names.PREFIX)}


def _written(requirement: _Requirement) -> str:
    values = ",".join(requirement.values)
    match requirement.operator:
        case "In":
            return f"{requirement.key} in ({values})"
        case "NotIn":
            return f"{requirement.key} notin ({values})"
        case "Exists":
            return requirement.key
        case _:
            return f"!{requirement.key}"


# ------------------------------------------------------------------------------------------------- pods


class _Condition(Struct, frozen=True):
    type: str
    status: str


class _PodStatus(Struct, frozen=True):
    phase: str = ""
    pod_ip: str = field(default="", name="podIP")
    conditions: list[_Condition] = field(default_factory=list)


class RawPod(Struct, frozen=True):
    """A pod as the server writes it."""

    metadata: Meta
    status: _PodStatus = _PodStatus()

    def pod(self) -> Pod | None:
        """Return what is kept of it; nothing of one that has ended or that belongs to nothing we know."""
        meta = self.metadata
        kind, _, name = meta.annotations.get(names.TARGET, "").partition("/")
        if not name or self.status.phase in {"Succeeded", "Failed"}:
            return None
        injection = injection_of(meta.annotations)
        return Pod(
            namespace=meta.namespace,
            name=meta.name,
            uid=meta.uid,
            target=Target(meta.namespace, kind, name),
            ip=self.status.pod_ip,
            admin_port=injection.admin_port or ADMIN_PORT,
            ready=any(each.type == "Ready" and each.status == "True" for each in self.status.conditions),
            deleting=bool(meta.deletion_timestamp),
            # Of a Deployment's ReplicaSet, else of a StatefulSet.
            template_hash=meta.labels.get("pod-template-hash") or meta.labels.get("controller-revision-hash", ""),
            container=injection.container[:63],
        )


# ------------------------------------------------------------------------------------------------- policies


class RawPolicy(Struct, frozen=True):
    """A BatchingPolicy as the server writes it."""

    metadata: Meta
    spec: Any = None
    status: dict[str, Any] = field(default_factory=dict)

    def policy(self) -> Policy:
        """Return it with its spec read, or with what is wrong with that."""
        meta, spec, error = self.metadata, None, ""
        try:
            spec = read_policy({"spec": self.spec})
        except PolicyError as wrong:
            error = str(wrong)
        return Policy(
            namespace=meta.namespace,
            name=meta.name,
            uid=meta.uid,
            generation=meta.generation,
            created=meta.created,
            spec=spec,
            error=error,
            annotated=meta.labels.get(ANNOTATED) == "true"
            and any(
                each.controller and meta.name == names.policy_name(each.kind, each.name)
                for each in meta.owner_references
            ),
            status=self.status,
            paused=PAUSED in meta.annotations,
        )


# ------------------------------------------------------------------------------------------------- configurations


class RawConfigMap(Struct, frozen=True):
    """A ConfigMap as the server writes it."""

    metadata: Meta
    data: dict[str, str] = field(default_factory=dict)
