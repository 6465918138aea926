"""Input and output of the operator's decisions: plain values, without Kubernetes' client."""

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
    """A workload by the identity that its pods get at admission: a Deployment has no UID yet when it is created."""

    namespace: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.kind}/{self.name}"

    @property
    def local(self) -> str:
        """Its name within the namespace: ``Deployment/resnet``."""
        return f"{self.kind}/{self.name}"


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
    """Desired number."""
    created: float
    """Seconds since the epoch."""
    rolling: bool
    """Whether a rollout is under way that ends by itself."""
    refused: str = ""
    """The API server's reason for rejecting its pods; ``""`` where it accepts them."""
    held_back: str = ""
    """What keeps a new template from some pods, with the fix; ``""`` if nothing does."""
    autoscaler: str = ""
    """Kind/name of the autoscaler that follows its Carpool load, if any."""
    full: float | None = None
    """Load at which the autoscaler considers a replica full, if it says."""
    labels: dict[str, str] = field(default_factory=dict)
    """All of its own labels: policies select by these."""


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
    """The model's container; ``""`` where it can't be read."""
    ready_after: float = 0.0
    """Seconds from its creation until it last became ready; 0 while it is not ready."""
    current: bool = False
    """Whether its sidecar has this operator's version."""


class Namespace(Struct, frozen=True):
    """A namespace with annotations of Carpool."""

    name: str
    uid: str
    defaults: dict[str, str]
    """Default annotations for the workloads in it."""
    problems: tuple[str, ...]
    """Problems of its other annotations."""


class Missed(NamedTuple):
    """A pod that should have a sidecar and has none."""

    name: str
    skipped: str = ""
    """The injector's reason for skipping it, and the fix; ``""`` where no sidecar was asked for."""


class Policy(Struct, frozen=True, kw_only=True):
    """A BatchingPolicy as stored on the server, its spec parsed where possible."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: float
    """Seconds since the epoch."""
    spec: PolicySpec | None
    error: str
    """Why parsing the spec failed; ``""`` where there is a spec."""
    status: dict[str, Any]
    """As on the server, ``{}`` before the first."""
    paused: bool = False
    """Whether it carries the annotation ``carpool.dev/paused``."""
    made_for: Target | None = None
    """The workload for whose annotations the operator keeps it; ``None`` for a policy written by a user."""
    orphaned: bool = False
    """Whether the operator made it and it lost its owner, as after ``kubectl delete --cascade=orphan``."""

    @property
    def annotated(self) -> bool:
        """Whether the operator keeps it for a workload's annotations; a policy written by a user takes precedence."""
        return self.made_for is not None


class Reading(Struct, frozen=True):
    """The result of reading one pod."""

    at: float
    """Time on the operator's monotonic clock."""
    report: Report | None
    error: str = ""
    note: str = ""
    """Why a report lacks token streams that the pod has."""


class View(Struct, frozen=True, kw_only=True):
    """All input for one step over one policy."""

    now: float
    """Seconds of the operator's monotonic clock."""
    wall: float
    """Seconds since the epoch."""
    policy: Policy
    owners: Mapping[Target, Policy]
    """The policy that owns each target, as ``assign`` decides."""
    workloads: Mapping[Target, Workload]
    """Existing workloads: at least the targets that the policy names."""
    pods: Mapping[Target, Sequence[Pod]]
    """Pods with a sidecar, by target: at least those of the policy's targets."""
    selected: Sequence[Target] = ()
    """Workloads that the policy selects by label; one more than ``MAX_SELECTED`` where there are too many."""
    readings: Mapping[str, Reading]
    """New readings of pods since the last step, by UID. Pods that Prometheus has not scraped since are missing. An
    error is repeated until the pod can be read."""
    refused: Mapping[str, str]
    """By pod UID: why the last push to it failed. Pods that accepted the last push are missing."""
    missed: Mapping[Target, Sequence[Missed]]
    """Pods that should have a sidecar and have none."""
    workload_events: Mapping[Target, Sequence[Event]]
    """Events about the workloads themselves, repeated while they apply: annotations, Services that bypass sidecars."""
    engines: Mapping[Target, Mapping[str, Counters | str]] = MappingProxyType({})
    """Prometheus' data about engines without a sidecar, by pod, or why there is none. Targets that were not queried are
    missing."""
    keys: tuple[str, ...] = ()
    """Public keys that sidecars should accept; empty: those that they have."""
    hurried: bool = False
    """Whether the previous pass left out policies, so that CPU time is scarce."""


class Document(Struct, frozen=True):
    """A change to sign and send."""

    target: Target
    change: Change
    pods: tuple[str, ...] | None
    """UIDs it is pushed to: canaries, or those behind. ``None``: all, and the ConfigMap."""


LONGEST_NOTE = 1024
"""Most characters of a message in an Event, and of one item in a condition."""


class Event(Struct, frozen=True):
    """To be recorded on a policy or its workload, as a Kubernetes Event."""

    warning: bool
    reason: str
    message: str


class Outcome(Struct, frozen=True):
    """The result of one step over one policy."""

    documents: list[Document]
    status: dict[str, Any]
    """The complete status; written where it differs from the one on the server."""
    events: list[Event]
