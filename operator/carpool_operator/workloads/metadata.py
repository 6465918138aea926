"""The kept parts of an object's metadata, and types that workloads share."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct, field

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Key(NamedTuple):
    """Name of a namespaced object."""

    namespace: str
    name: str


class Owner(Struct, frozen=True, rename="camel"):
    """An owner reference."""

    uid: str = ""
    api_version: str = ""
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
        """Creation time, in seconds since the epoch."""
        return epoch(self.creation_timestamp)

    @property
    def controller(self) -> Owner | None:
        """The object that controls it, if any."""
        return next((each for each in self.owner_references if each.controller), None)


def epoch(written: str) -> float:
    """Return a Kubernetes time as seconds since the epoch."""
    return datetime.fromisoformat(written).replace(tzinfo=UTC).timestamp()


class Requirement(Struct, frozen=True):
    """One of a selector's ``matchExpressions``."""

    key: str
    operator: str
    values: list[str] = field(default_factory=list)

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether labels meet it."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case _:
                return self.key not in labels

    def __str__(self) -> str:
        values = ",".join(self.values)
        match self.operator:
            case "In":
                return f"{self.key} in ({values})"
            case "NotIn":
                return f"{self.key} notin ({values})"
            case "Exists":
                return self.key
            case _:
                return f"!{self.key}"


class Selector(Struct, frozen=True, rename="camel"):
    """A label selector; ``str()`` formats it for the API's ``labelSelector`` parameter."""

    match_labels: dict[str, str] = field(default_factory=dict)
    match_expressions: list[Requirement] = field(default_factory=list)

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether it selects an object with these labels; an empty one selects all."""
        return self.match_labels.items() <= labels.items() and all(
            each.matches(labels) for each in self.match_expressions
        )

    def __str__(self) -> str:
        labels = [f"{key}={value}" for key, value in self.match_labels.items()]
        return ",".join([*labels, *map(str, self.match_expressions)])


class Condition(Struct, frozen=True):
    """One of a status's ``conditions``."""

    type: str = ""
    status: str = ""
    message: str = ""


class UpdateStrategy(Struct, frozen=True):
    """``updateStrategy`` of a StatefulSet or a DaemonSet."""

    type: str = "RollingUpdate"

    @property
    def held_back(self) -> str:
        """What keeps a new template from all pods; ``""`` if nothing does."""
        return "its updateStrategy is OnDelete: delete these pods" if self.type == "OnDelete" else ""


class RollingUpdate(Struct, frozen=True):
    """How far a rolling update goes: pods, or groups of them, below ordinal ``partition`` keep an older template."""

    partition: int = 0

    @property
    def held_back(self) -> str:
        """What keeps a new template from some pods; ``""`` if nothing does."""
        return f"the partition of its rolling update is {self.partition}: lower it to 0" if self.partition else ""


def refused(conditions: Iterable[Condition]) -> str:
    """Return the API server's error for pods that a ReplicaSet could not create; ``""`` if there is none."""
    failures = (each.message for each in conditions if each.type == "ReplicaFailure" and each.status == "True")
    return next(failures, "")


class _TemplateMeta(Struct, frozen=True):
    annotations: dict[str, str] = field(default_factory=dict)


class Template(Struct, frozen=True):
    """A pod template: only its annotations are kept."""

    metadata: _TemplateMeta = _TemplateMeta()

    @property
    def annotations(self) -> dict[str, str]:
        """Its annotations."""
        return self.metadata.annotations
