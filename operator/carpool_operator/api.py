"""The BatchingPolicy resource: what its spec adds to the policy that a sidecar reads, and what its status says.

Single source of the CRD and of its reference page. The server checks what it can of a spec before anything here reads
it; ``read_policy`` checks it again, because a CRD may be older or newer than the operator.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta, Struct, field

from carpool.policy import BatchingPolicy, Camel, Duration, Parameters, PolicyError, from_plain, to_plain

GROUP = "carpool.dev"
VERSION = "v1alpha1"
PLURAL = "batchingpolicies"
KIND = "BatchingPolicy"
API_VERSION = f"{GROUP}/{VERSION}"

MAX_TARGETS = 16
"""Workloads of one policy."""
MAX_MODELS = 64
"""Models of one policy that are named; the rest share what ``*`` gets."""
MAX_HISTORY = 10
"""Changes that a status remembers."""


# ------------------------------------------------------------------------------------------------- spec


class TargetKind(StrEnum):
    """Workloads whose pods may have sidecars."""

    DEPLOYMENT = "Deployment"
    STATEFUL_SET = "StatefulSet"


class TargetRef(Camel, frozen=True, kw_only=True):
    """A workload in the policy's own namespace."""

    group: Literal["apps"] = "apps"
    """API group of the workload."""
    kind: TargetKind = TargetKind.DEPLOYMENT
    """What kind of workload it is."""
    name: Annotated[str, Meta(min_length=1, max_length=253)]
    """Its name; it may come after the policy."""
    container: Annotated[str, Meta(min_length=1, max_length=63)] | None = None
    """The model's container, to be told (`Programmed`, `WrongContainer`) where sidecars stand before another: which one
    that is, `carpool.dev/container` in the pod template chooses, by default the first with a port. Unset: any."""


class MetricsSource(StrEnum):
    """Where the counters come from: ``Sidecar`` asks each pod, ``Prometheus`` a server that scrapes them."""

    SIDECAR = "Sidecar"
    PROMETHEUS = "Prometheus"


class KeyRef(Camel, frozen=True):
    """A key of a Secret or ConfigMap in the policy's own namespace."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]
    """The object's name."""
    key: Annotated[str, Meta(min_length=1, max_length=253)]
    """The key inside it."""


class Basic(Camel, frozen=True):
    """HTTP basic authentication."""

    username: KeyRef
    """Key of a Secret that holds the user's name."""
    password: KeyRef
    """Key of a Secret that holds the password."""


class Auth(Camel, frozen=True):
    """How the operator shows who it is; one of the two."""

    bearer: KeyRef | None = None
    """Key of a Secret that holds a bearer token."""
    basic: Basic | None = None
    """User and password."""


class CA(Camel, frozen=True):
    """Certificate authorities in PEM; one of the two."""

    secret: KeyRef | None = None
    """Key of a Secret."""
    config_map: KeyRef | None = None
    """Key of a ConfigMap."""


class TLS(Camel, frozen=True):
    """How the server's certificate is checked."""

    ca: CA | None = None
    """Whom to trust; unset: the operator image's authorities. It has to be granted `get` on what is named here."""
    server_name: Annotated[str, Meta(min_length=1, max_length=253)] | None = None
    """Name in the certificate, where it is not the URL's."""
    insecure_skip_verify: bool = False
    """Take any certificate. Whoever answers then tunes the fleet."""


class Prometheus(Camel, frozen=True):
    """A server that speaks Prometheus' HTTP API."""

    url: Annotated[str, Meta(pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$", max_length=1024)]
    """Its base, without `/api/v1`: `https://prometheus.monitoring:9090`."""
    auth: Auth | None = None
    """How the operator shows who it is; unset: not at all. It has to be granted `get` on the Secrets named here."""
    tls: TLS | None = None
    """How its certificate is checked, for an `https` URL."""
    interval: Duration = Duration(15.0)
    """How often it is asked; asked more often than it scrapes it tells nothing new."""


class Metrics(Camel, frozen=True):
    """Where the evidence comes from."""

    source: MetricsSource = MetricsSource.SIDECAR
    """Ask each pod, or a Prometheus."""
    stale_after: Duration = Duration(30.0)
    """Age from which evidence decides nothing."""
    prometheus: Prometheus | None = None
    """With source Prometheus, and only with it."""


class Canary(Camel, frozen=True):
    """A share of the pods tries riskier parameters before the others get them."""

    enabled: bool = True
    """Off: all pods get them at once."""
    percent: Annotated[int, Meta(ge=1, le=50)] = 10
    """Share of the pods, rounded up to whole ones; a single pod is no canary and gets them at once."""
    min_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 300
    """Requests that the canaries answer at least before the others follow."""


class PolicySpec(BatchingPolicy, frozen=True, kw_only=True):
    """What a user states of workloads in a cluster."""

    target_refs: Annotated[tuple[TargetRef, ...], Meta(min_length=1, max_length=MAX_TARGETS)]
    """Workloads that this tunes. A policy alone injects nothing: annotate them with `carpool.dev/inject`."""
    metrics: Metrics = field(default_factory=Metrics)
    """Where the evidence comes from."""
    canary: Canary = field(default_factory=Canary)
    """Riskier parameters on a share of the pods first."""

    def policy(self) -> BatchingPolicy:
        """Return the part that a sidecar reads."""
        return BatchingPolicy(**{name: getattr(self, name) for name in BatchingPolicy.__struct_fields__})

    def validate(self) -> Self:
        """Check what types can't say, and return the spec.

        Raises ``PolicyError`` that names the field.
        """
        super().validate()
        seen: set[tuple[TargetKind, str]] = set()
        for index, target in enumerate(self.target_refs):
            if (target.kind, target.name) in seen:
                raise PolicyError(f"targetRefs[{index}]", f"{target.kind} {target.name!r} is named twice")
            seen.add((target.kind, target.name))
        if len(self.models) > MAX_MODELS:
            raise PolicyError("models", f"name at most {MAX_MODELS}")
        _validate_metrics(self.metrics)
        return self


def _validate_metrics(metrics: Metrics) -> None:
    prometheus = metrics.prometheus
    if metrics.stale_after <= 0:
        raise PolicyError("metrics.staleAfter", "must be longer than 0s")
    if metrics.source is MetricsSource.SIDECAR:
        if prometheus is not None:
            raise PolicyError("metrics.prometheus", "is for source Prometheus: set that, or drop this")
        return
    if prometheus is None:
        raise PolicyError("metrics.prometheus", "source Prometheus needs it: name its url")
    if prometheus.interval <= 0:
        raise PolicyError("metrics.prometheus.interval", "must be longer than 0s")
    if metrics.stale_after <= prometheus.interval:
        raise PolicyError(
            "metrics.staleAfter",
            f"{metrics.stale_after} is not longer than prometheus.interval {prometheus.interval}: raise it",
        )
    auth, tls = prometheus.auth, prometheus.tls
    if auth is not None and (auth.bearer is None) == (auth.basic is None):
        raise PolicyError("metrics.prometheus.auth", "name one of bearer and basic")
    if tls is None:
        return
    if not prometheus.url.startswith("https://"):
        raise PolicyError("metrics.prometheus.tls", "is for an https url: change url, or drop this")
    if tls.ca is not None and (tls.ca.secret is None) == (tls.ca.config_map is None):
        raise PolicyError("metrics.prometheus.tls.ca", "name one of secret and configMap")
    if tls.ca is not None and tls.insecure_skip_verify:
        raise PolicyError("metrics.prometheus.tls.insecureSkipVerify", "checks nothing, so ca is unused: drop one")


def read_policy(resource: dict[str, Any]) -> PolicySpec:
    """Read the spec of a BatchingPolicy as the server returns it.

    Raises ``PolicyError`` whose ``field`` begins with ``spec``.
    """
    try:
        return from_plain(resource.get("spec"), PolicySpec, what="").validate()
    except PolicyError as error:
        path = f"spec.{error.field}" if error.field else "spec"
        raise PolicyError(path, str(error).partition(": ")[2]) from None


def written(value: Struct) -> dict[str, Any]:
    """Return a spec or status as the server would return it: JSON's own types, so that the two compare equal."""
    resource: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(to_plain(value)))
    if isinstance(value, PolicySpec) and value.baseline == Parameters():
        # Nobody wrote it down, so it follows the bounds, and should not read as if it lay outside of them.
        del resource["baseline"]
    return resource


# ------------------------------------------------------------------------------------------------- status


class Said(Struct, rename="camel", frozen=True, kw_only=True, omit_defaults=True):
    """Base of what a status holds: camelCase outside, and what a newer operator added is passed over.

    Times are RFC 3339 in UTC, whole seconds: ``2026-11-21T17:16:00Z``. What is unknown is left out.
    """


Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
"""RFC 3339, UTC."""


class ConditionType(StrEnum):
    """What is said to be so, or not, or unknown."""

    ACCEPTED = "Accepted"
    """The spec makes sense, and no other policy has its targets."""
    PROGRAMMED = "Programmed"
    """Every pod of every target runs what is applied."""
    METRICS_AVAILABLE = "MetricsAvailable"
    """There is evidence to decide on."""
    SLO_MET = "SLOMet"
    """The share of requests that miss is within the SLO."""
    READY = "Ready"
    """All of these but SLOMet."""


ANNOTATION_INVALID = "AnnotationInvalid"
"""With Accepted: annotations that make no sense, so the policy is as the last ones that did asked for."""
SERVICE_BYPASSED = "ServiceBypassed"
"""With Programmed: callers of a Service get past the sidecars."""
DEFECTS = frozenset({ANNOTATION_INVALID, SERVICE_BYPASSED})
"""Reasons of conditions that are so, with a message of something to put right all the same."""


class ConditionStatus(StrEnum):
    """Kubernetes' own three values."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Said, frozen=True, kw_only=True, omit_defaults=False):
    """A condition as all of Kubernetes writes them."""

    type: Annotated[str, Meta(max_length=316)]
    """Accepted, Programmed, MetricsAvailable, SLOMet or Ready."""
    status: ConditionStatus
    """Whether it is so."""
    reason: Annotated[str, Meta(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, in one word."""
    message: Annotated[str, Meta(max_length=32768)] = ""
    """Why, and what to do about it."""
    last_transition_time: Time
    """When `status` last changed."""
    observed_generation: Annotated[int, Meta(ge=0)] = 0
    """Generation of the spec that this is said of."""


class Figures(Said, frozen=True):
    """A load and how it is served: observed, or predicted. What is unknown is left out."""

    rate: float | None = None
    """Requests per second and replica."""
    p50: Duration | None = None
    """Half of the answers within this."""
    p99: Duration | None = None
    """99 % of the answers within this."""
    miss_fraction: float | None = None
    """Share of requests not answered by their due time: late, refused or failed."""
    goodput: float | None = None
    """Answers by their due time per second and replica."""
    mean_batch: float | None = None
    """Rows of a batch."""
    device_time: Duration | None = None
    """Time with a batch in flight per request."""
    utilization: float | None = None
    """Share of the time in which the device computes."""


class Applied(Said, frozen=True):
    """What is in force for the busiest model; each one's stands under targets."""

    generation: int
    """Of the configuration: milliseconds since the epoch."""
    at: Time
    """When it was published."""
    target: str
    """Kind/name of the workload."""
    model: str
    """Name of the model, or `*` for every one."""
    parameters: Parameters
    """What is in force."""
    batch: str
    """For lists: the rows, or `pass` where nothing is merged."""
    wait: str
    """For lists: the wait, or `pass` where nothing is held."""


class Recommendation(Said, frozen=True):
    """Where the tuner would go."""

    target: str
    """Kind/name of the workload."""
    model: str
    """Name of the model, or `*` for every one."""
    parameters: Parameters
    """The next step."""
    uncapped: Parameters | None = None
    """Where it would be if it could go at once."""
    capped_by: str = ""
    """What keeps it from there."""
    predicted: Figures | None = None
    """What the next step is forecast to bring."""


class LastDecision(Said, frozen=True):
    """What was decided last, and on what evidence."""

    action: str
    """Applied, Recommended, Held, Trying, Promoted, RolledBack or FellBack."""
    reason: str
    """Why, in one word."""
    message: str
    """Why, in a sentence."""
    model: str
    """Name of the model, or `*` for every one."""
    target: str
    """Kind/name of the workload."""
    at: Time
    """When."""
    observed: Figures | None = None
    """What was seen."""
    predicted: Figures | None = None
    """What was forecast for the parameters in force."""


class Trial(Said, frozen=True):
    """Parameters that a share of the pods tries."""

    generation: int
    """Of the configuration that the canaries got."""
    parameters: Parameters
    """What they try."""
    pods: tuple[str, ...]
    """Names of the canaries."""
    since: Time
    """When they began."""


class TargetModel(Said, frozen=True):
    """One model of a workload."""

    name: str
    """As in the request's path, or `*` for every one."""
    generation: int
    """Of the configuration that brought the parameters."""
    parameters: Parameters
    """In force on all pods but canaries."""
    trial: Trial | None = None
    """What canaries try."""


class TargetStatus(Said, frozen=True, omit_defaults=False):
    """One workload, and how far its pods have got."""

    kind: str
    """Deployment or StatefulSet."""
    name: str
    """Its name."""
    replicas: int = 0
    """Pods that it wants."""
    injected: int = 0
    """Pods that have a sidecar."""
    acknowledged: int = 0
    """Pods that run the newest configuration."""
    missed: tuple[str, ...] = ()
    """Pods without a sidecar that should have one; restart the workload to give them theirs."""
    models: tuple[TargetModel, ...] = ()
    """What is in force, by model."""


class HistoryEntry(Said, frozen=True):
    """One change."""

    generation: int
    """Of the configuration: milliseconds since the epoch."""
    at: Time
    """When it was published."""
    target: str
    """Kind/name of the workload."""
    model: str
    """Name of the model, or `*` for every one."""
    parameters: Parameters
    """What came into force."""
    reason: str
    """Why, in one word."""


class Status(Said, frozen=True):
    """What the operator says of a policy."""

    observed_generation: int | None = None
    """Generation of the spec that all this is said of."""
    conditions: tuple[Condition, ...] = ()
    """What is so, and why."""
    applied: Applied | None = None
    """What is in force for the busiest model; nothing before the first configuration is published."""
    recommendation: Recommendation | None = None
    """Where the tuner would go, where it is kept from going there."""
    last_decision: LastDecision | None = None
    """What was decided last, and on what evidence."""
    targets: tuple[TargetStatus, ...] = ()
    """The workloads, and how far their pods have got."""
    history: tuple[HistoryEntry, ...] = ()
    """The last 10 changes, newest first."""
