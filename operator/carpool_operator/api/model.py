"""What the deciding half of the operator is given, and what it returns: plain values, nothing of Kubernetes' client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec import Struct, field

from carpool.exchange.change import Change
from carpool.exchange.report import Report
from carpool.generation.observed import Counters
from carpool_operator.api.spec import PolicySpec


class Target(NamedTuple):
    """A workload by what its pods are told at admission: a Deployment has no UID yet when it is created."""

    namespace: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.kind}/{self.name}"


class Workload(Struct, frozen=True, kw_only=True):
    """A Deployment, or another kind of the registry (``carpool_operator.workloads``)."""

    target: Target
    uid: str
    generation: int
    annotations: dict[str, str]
    """Ours, of the workload itself."""
    template_annotations: dict[str, str]
    selector: str
    """As the API's ``labelSelector`` parameter takes it."""
    replicas: int
    """How many are wanted."""
    created: float
    """Seconds since the epoch."""
    rolling: bool
    """Whether a rollout is under way."""
    refused: str = ""
    """Why the API server refuses its pods, in the server's words; ``""`` where it does not."""
    autoscaler: str = ""
    """Kind/name of what follows Carpool's load of it, where something does."""
    full: float | None = None
    """Load at which that takes a replica for full, where it says."""
    labels: dict[str, str] = field(default_factory=dict)
    """Its own, all of them: policies select by these."""


class Pod(Struct, frozen=True, kw_only=True):
    """A pod with a sidecar: labelled ``carpool.dev/injected``."""

    namespace: str
    name: str
    uid: str
    target: Target
    ip: str
    admin_port: int
    ready: bool
    deleting: bool
    template_hash: str
    container: str = ""
    """The one that the sidecar stands before; ``""`` where that can't be read."""
    ready_after: float = 0.0
    """Seconds from its creation until it last became ready; 0 while it is not."""
    current: bool = False
    """Whether its sidecar is of this operator's version."""


class Namespace(Struct, frozen=True):
    """A namespace with annotations of ours."""

    name: str
    uid: str
    defaults: dict[str, str]
    """Of the annotations of workloads in it."""
    problems: tuple[str, ...]
    """What is wrong with others of its annotations."""


class Missed(NamedTuple):
    """A pod that should have a sidecar and has none."""

    name: str
    skipped: str = ""
    """Why the injector left it alone, and what to do; ``""`` where it was not asked."""


class Policy(Struct, frozen=True, kw_only=True):
    """A BatchingPolicy as it lies on the server, its spec read where it can be."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: float
    """Seconds since the epoch."""
    spec: PolicySpec | None
    error: str
    """Why there is no spec; ``""`` where there is one."""
    annotated: bool
    """Whether it is kept for a Deployment's annotations; one that a person wrote beats it."""
    status: dict[str, Any]
    """As on the server, ``{}`` before the first."""
    paused: bool = False
    """Whether it carries the annotation ``carpool.dev/paused``."""


class Reading(Struct, frozen=True):
    """What was read of one pod."""

    at: float
    """When, on the operator's monotonic clock."""
    report: Report | None
    error: str = ""
    note: str = ""
    """Why a report is without token streams that the pod has."""


class View(Struct, frozen=True, kw_only=True):
    """All that one step over one policy goes by."""

    now: float
    """Seconds of the operator's monotonic clock."""
    wall: float
    """Seconds since the epoch."""
    policy: Policy
    owners: Mapping[Target, Policy]
    """Whom each target belongs to, as ``assign`` says."""
    workloads: Mapping[Target, Workload]
    """Those that exist, of the targets the policy names at least."""
    pods: Mapping[Target, Sequence[Pod]]
    """Those with a sidecar, by target; likewise."""
    selected: Sequence[Target] = ()
    """Workloads that the policy selects by label; one more than ``MAX_SELECTED`` where there are too many."""
    readings: Mapping[str, Reading]
    """What is new of pods since the last step, by UID: whom a Prometheus has not scraped since is not in here. Why one
    can't be read is said again until it can."""
    refused: Mapping[str, str]
    """By pod UID: why the last push to it failed. Whose last push was taken is not in here."""
    missed: Mapping[Target, Sequence[Missed]]
    """The pods that should have a sidecar and have none."""
    told: Mapping[Target, Sequence[Event]]
    """What is told on the workloads themselves while it lasts: of annotations, of Services that lead past sidecars."""
    engines: Mapping[Target, Mapping[str, Counters | str]] = MappingProxyType({})
    """What a Prometheus has of engines without a sidecar, by pod, or why it has nothing; targets that are not asked of
    are not in here."""
    keys: tuple[str, ...] = ()
    """Public keys that sidecars are told to accept; none: those that they have."""
    hurried: bool = False
    """Whether the pass before left policies out, so that CPU time is scarce."""


class Document(Struct, frozen=True):
    """A change to sign and send."""

    target: Target
    change: Change
    pods: tuple[str, ...] | None
    """UIDs it is pushed to: canaries, or those behind. ``None``: all, and the ConfigMap."""


LONGEST_NOTE = 1024
"""Characters that an Event may tell, and a condition tells of one thing."""


class Event(Struct, frozen=True):
    """To be recorded on a policy or its workload, as a Kubernetes Event."""

    warning: bool
    reason: str
    message: str


class Outcome(Struct, frozen=True):
    """What one step over one policy came to."""

    documents: list[Document]
    status: dict[str, Any]
    """All of it; written where it differs from what lies on the server."""
    events: list[Event]
