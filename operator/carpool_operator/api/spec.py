"""The BatchingPolicy resource: what its spec adds to the policy that a sidecar reads.

The CRD and its reference page are generated from it and from the status. The server validates what it can of a spec
before anything here reads it. ``read_policy`` validates again, because a CRD may be older or newer than the operator.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec
from msgspec import Meta, Struct, field

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.plain import Camel, PolicyError, from_plain, to_plain
from carpool.policy.spec import BatchingPolicy
from carpool_operator.workloads import registry
from carpool_operator.workloads.metadata import Requirement, Selector

if TYPE_CHECKING:
    from collections.abc import Mapping

GROUP = "carpool.dev"
VERSION = "v1alpha1"
PLURAL = "batchingpolicies"
KIND = "BatchingPolicy"
API_VERSION = f"{GROUP}/{VERSION}"

STALE_AFTER = 30.0
"""Age in seconds from which a sidecar's report is not used for decisions; sidecars are polled every two."""
STALE_SCRAPES = 4.0
"""The same in scrape intervals of a Prometheus: it allows two failed scrapes in a row, and waits for the third."""

URL = r"^https?://[^\s/?#]+(/[^\s?#]*)?$"
LABEL = r"^[a-zA-Z_][a-zA-Z0-9_]*$"

RESERVED = frozenset({"authorization", "host", "content-type", "content-length", "accept", "accept-encoding",
                      "connection", "transfer-encoding", "cookie"})  # fmt: skip
"""Headers that the operator sets itself, or that determine how a message is parsed."""

MAX_TARGETS = 16
"""Workloads of one policy."""
MAX_SELECTED = 100
"""Workloads that one policy may select: its status lists each of them."""
MAX_MODELS = 64
"""Models of one policy that are named; the others share the settings of `*`."""


_NAME = r"([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]"
LABEL_KEY = rf"^([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_NAME}$"
"""Pattern of a label's name in Kubernetes: a DNS name and a slash, if any, and a name."""
LabelValue = Annotated[str, Meta(max_length=63, pattern=rf"^({_NAME})?$")]
Group = Annotated[str, Meta(extra_json_schema={"enum": sorted({kind.group for kind in registry.KINDS})})]
TargetKind = Annotated[str, Meta(extra_json_schema={"enum": sorted(registry.BY_NAME)})]


class TargetRef(Camel, frozen=True, kw_only=True):
    """A workload in the policy's own namespace."""

    group: Group = registry.DEFAULT.group
    """API group of the kind."""
    kind: TargetKind = registry.DEFAULT.name
    """What kind of workload it is."""
    name: Annotated[str, Meta(min_length=1, max_length=253)]
    """Its name; the workload may be created after the policy."""
    container: Annotated[str, Meta(min_length=1, max_length=63)] | None = None
    """The model's container. If sidecars serve another one, the status reports it (`Programmed`, `WrongContainer`).
    `carpool.dev/container` in the pod template chooses; by default it is the one that asks for a GPU, else the only one
    that may be a model. Unset: any."""


class LabelOperator(StrEnum):
    """How a label is compared; ``In`` and ``NotIn`` need values, the others take none."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class LabelRequirement(Camel, frozen=True, kw_only=True):
    """A condition on one label."""

    key: Annotated[str, Meta(min_length=1, max_length=317, pattern=LABEL_KEY)]
    """The label."""
    operator: LabelOperator
    """How it is compared."""
    values: Annotated[tuple[LabelValue, ...], Meta(max_length=32)] = ()
    """The values to compare with."""


class TargetSelector(Camel, frozen=True, kw_only=True):
    """Workloads of one kind in the policy's own namespace, by their labels."""

    group: Group = registry.DEFAULT.group
    """API group of the kind."""
    kind: TargetKind = registry.DEFAULT.name
    """What kind of workload it selects."""
    match_labels: Annotated[dict[str, LabelValue], Meta(max_length=16)] = field(default_factory=dict)
    """Labels that a workload must have; its own, not those of its pods."""
    match_expressions: Annotated[tuple[LabelRequirement, ...], Meta(max_length=16)] = ()
    """Further conditions; all have to be met."""

    def selects(self, kind: str, labels: Mapping[str, str]) -> bool:
        """Return whether it selects a workload."""
        asked = [Requirement(each.key, str(each.operator), list(each.values)) for each in self.match_expressions]
        return kind == self.kind and Selector(self.match_labels, asked).matches(labels)


class MetricsSource(StrEnum):
    """Where the counters come from: ``Sidecar`` reads each pod, ``Prometheus`` queries a server that scrapes them."""

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


class CA(Camel, frozen=True):
    """Certificate authorities in PEM; one of the two."""

    secret: KeyRef | None = None
    """Key of a Secret."""
    config_map: KeyRef | None = None
    """Key of a ConfigMap."""


class OAuth2(Camel, frozen=True):
    """OAuth 2.0 client credentials: a token is fetched, and renewed before it expires."""

    token_url: Annotated[str, Meta(pattern=URL, max_length=1024)]
    """URL that issues tokens."""
    client_id: KeyRef
    """Key of a Secret that holds the client's id."""
    client_secret: KeyRef
    """Key of a Secret that holds the client's secret."""
    scopes: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=16)] = ()
    """Scopes of the token."""
    audience: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """Audience of the token, for servers that ask for it."""
    ca: CA | None = None
    """Authorities to trust for the token URL; unset: the operator image's authorities."""


class Auth(Camel, frozen=True):
    """How the operator authenticates; one of these."""

    bearer: KeyRef | None = None
    """Key of a Secret that holds a bearer token."""
    basic: Basic | None = None
    """User and password."""
    oauth2: OAuth2 | None = None
    """Client credentials, for which a token is fetched."""


class ClientCertificate(Camel, frozen=True):
    """The operator's certificate for authentication (mTLS), in PEM."""

    certificate: KeyRef
    """Key of a Secret that holds the certificate and its chain."""
    key: KeyRef
    """Key of a Secret that holds its private key."""


class TLS(Camel, frozen=True):
    """How the server's certificate is checked, and which certificate the operator shows."""

    ca: CA | None = None
    """Authorities to trust; unset: the operator image's authorities. The operator needs `get` on the objects named
    here."""
    client: ClientCertificate | None = None
    """The operator's own certificate, for a server that requires one."""
    server_name: Annotated[str, Meta(min_length=1, max_length=253)] | None = None
    """Name in the certificate, where it is not the URL's."""
    insecure_skip_verify: bool = False
    """Accept any certificate. Then anyone who intercepts the connection can tune the fleet."""


class LabelMatcher(Camel, frozen=True):
    """A label that series have to have."""

    label: Annotated[str, Meta(pattern=LABEL, max_length=128)]
    """The label's name: `cluster`."""
    value: Annotated[str, Meta(max_length=1024)]
    """Its value, exactly."""


class Labels(Camel, frozen=True):
    """The names of the labels that identify a series' pod."""

    namespace: Annotated[str, Meta(pattern=LABEL, max_length=128)] = "namespace"
    """Of the pod's namespace."""
    pod: Annotated[str, Meta(pattern=LABEL, max_length=128)] = "pod"
    """Of the pod's name."""


class Header(Camel, frozen=True):
    """A header of the operator's requests, with its value or a reference to it."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9-]*$", max_length=128)]
    """The header's name: `X-Scope-OrgID`."""
    value: Annotated[str, Meta(pattern=r"^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$", max_length=1024)] | None = None
    """Its value, visible to everyone who may read the policy."""
    secret: KeyRef | None = None
    """Key of a Secret that holds the value."""


class Prometheus(Camel, frozen=True):
    """A server that speaks Prometheus' HTTP API."""

    url: Annotated[str, Meta(pattern=URL, max_length=1024)]
    """Its base, without `/api/v1`: `https://prometheus.monitoring:9090`."""
    matchers: Annotated[tuple[LabelMatcher, ...], Meta(max_length=16)] = ()
    """Labels that the series must have besides namespace and pod: that of this cluster, where several share a
    server."""
    labels: Labels = field(default_factory=Labels)
    """Names of the labels with the namespace and the pod."""
    headers: Annotated[tuple[Header, ...], Meta(max_length=16)] = ()
    """Headers of each request: the tenant, for a server that has several."""
    auth: Auth | None = None
    """How the operator authenticates; unset: not at all. The operator needs `get` on the Secrets named here."""
    tls: TLS | None = None
    """How its certificate is checked, for an `https` URL."""
    interval: Duration = Duration(15.0)
    """Its scrape interval; the operator queries it as often."""


class Metrics(Camel, frozen=True):
    """Where the metrics for decisions come from."""

    source: MetricsSource = MetricsSource.SIDECAR
    """Read each pod, or query a Prometheus."""
    stale_after: Duration | None = None
    """Age from which metrics are not used for decisions; unset: 30s, with source Prometheus four times its interval."""
    prometheus: Prometheus | None = None
    """With source Prometheus, and only with it."""

    @property
    def stale_seconds(self) -> float:
        """Return ``stale_after``, or its default."""
        if self.stale_after is not None:
            return float(self.stale_after)
        if self.prometheus is not None:
            return STALE_SCRAPES * float(self.prometheus.interval)
        return STALE_AFTER


class Canary(Camel, frozen=True):
    """A share of the pods tries riskier parameters before the others get them."""

    enabled: bool = True
    """Off: all pods get them at once."""
    percent: Annotated[int, Meta(ge=1, le=50)] = 10
    """Share of the pods, rounded up to whole ones; a single pod gets them at once, without a canary."""
    min_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 300
    """Requests that the canaries must answer before the other pods follow."""


class PolicySpec(BatchingPolicy, frozen=True, kw_only=True):
    """What a user specifies for workloads in a cluster."""

    target_refs: Annotated[tuple[TargetRef, ...], Meta(min_length=1, max_length=MAX_TARGETS)] = ()
    """Workloads that this tunes, by name; this or `targetSelector`, or both. A policy alone injects nothing: annotate
    the workloads with `carpool.dev/inject`."""
    target_selector: TargetSelector | None = None
    """Workloads that this tunes, by label: those that no other policy names and that have no SLO of their own."""
    metrics: Metrics = field(default_factory=Metrics)
    """Where the metrics for decisions come from."""
    canary: Canary = field(default_factory=Canary)
    """Riskier parameters first run on a share of the pods."""

    def policy(self) -> BatchingPolicy:
        """Return the part that a sidecar reads."""
        return BatchingPolicy(**{name: getattr(self, name) for name in BatchingPolicy.__struct_fields__})

    def validate(self) -> Self:
        """Check what types can't express, and return the spec.

        Raises ``PolicyError`` that names the field.
        """
        super().validate()
        seen: set[tuple[str, str]] = set()
        for index, target in enumerate(self.target_refs):
            _validate_kind(f"targetRefs[{index}]", target.group, target.kind)
            if (target.kind, target.name) in seen:
                raise PolicyError(f"targetRefs[{index}]", f"{target.kind} {target.name!r} is named twice")
            seen.add((target.kind, target.name))
        if self.target_selector is not None:
            _validate_selector(self.target_selector)
        elif not self.target_refs:
            raise PolicyError("", "name targetRefs or targetSelector")
        if len(self.models) > MAX_MODELS:
            raise PolicyError("models", f"name at most {MAX_MODELS}")
        _validate_metrics(self.metrics)
        return self


def _validate_kind(path: str, group: str, kind: str) -> None:
    if kind not in registry.BY_NAME:
        raise PolicyError(f"{path}.kind", f"{kind!r} is none of {', '.join(sorted(registry.BY_NAME))}")
    if group != registry.BY_NAME[kind].group:
        raise PolicyError(f"{path}.group", f"{kind} is of the group {registry.BY_NAME[kind].group}: write that")


def _validate_selector(selector: TargetSelector) -> None:
    _validate_kind("targetSelector", selector.group, selector.kind)
    if not selector.match_labels and not selector.match_expressions:
        raise PolicyError("targetSelector", "name a label: one without any would select every workload")
    for key in selector.match_labels:
        if re.fullmatch(LABEL_KEY, key) is None:
            raise PolicyError("targetSelector.matchLabels", f"{key!r} is no label: write name or prefix/name")
    for index, each in enumerate(selector.match_expressions):
        if (each.operator in {LabelOperator.IN, LabelOperator.NOT_IN}) != bool(each.values):
            path = f"targetSelector.matchExpressions[{index}].values"
            raise PolicyError(path, "In and NotIn need values, Exists and DoesNotExist take none")


def _validate_metrics(metrics: Metrics) -> None:
    prometheus = metrics.prometheus
    if metrics.stale_after is not None and metrics.stale_after <= 0:
        raise PolicyError("metrics.staleAfter", "must be longer than 0s")
    if metrics.source is MetricsSource.SIDECAR:
        if prometheus is not None:
            raise PolicyError("metrics.prometheus", "is for source Prometheus: set that, or drop this")
        return
    if prometheus is None:
        raise PolicyError("metrics.prometheus", "source Prometheus needs it: name its url")
    if prometheus.interval <= 0:
        raise PolicyError("metrics.prometheus.interval", "must be longer than 0s")
    if metrics.stale_after is not None and metrics.stale_after <= prometheus.interval:
        raise PolicyError(
            "metrics.staleAfter",
            f"{metrics.stale_after} is not longer than prometheus.interval {prometheus.interval}: raise it",
        )
    auth, tls = prometheus.auth, prometheus.tls
    if auth is not None and sum(each is not None for each in (auth.bearer, auth.basic, auth.oauth2)) != 1:
        raise PolicyError("metrics.prometheus.auth", "name one of bearer, basic and oauth2")
    _validate_oauth2(None if auth is None else auth.oauth2)
    for index, header in enumerate(prometheus.headers):
        if header.name.lower() in RESERVED:
            raise PolicyError(f"metrics.prometheus.headers[{index}].name", f"{header.name} is set by the operator")
        if (header.value is None) == (header.secret is None):
            raise PolicyError(f"metrics.prometheus.headers[{index}]", "name one of value and secret")
    if tls is None:
        return
    if not prometheus.url.startswith("https://"):
        raise PolicyError("metrics.prometheus.tls", "is for an https url: change url, or drop this")
    if tls.ca is not None and (tls.ca.secret is None) == (tls.ca.config_map is None):
        raise PolicyError("metrics.prometheus.tls.ca", "name one of secret and configMap")
    if tls.ca is not None and tls.insecure_skip_verify:
        raise PolicyError("metrics.prometheus.tls.insecureSkipVerify", "checks nothing, so ca is unused: drop one")


def _validate_oauth2(oauth2: OAuth2 | None) -> None:
    if oauth2 is None or oauth2.ca is None:
        return
    if not oauth2.token_url.startswith("https://"):
        raise PolicyError("metrics.prometheus.auth.oauth2.ca", "is for an https tokenUrl: change that, or drop this")
    if (oauth2.ca.secret is None) == (oauth2.ca.config_map is None):
        raise PolicyError("metrics.prometheus.auth.oauth2.ca", "name one of secret and configMap")


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
    """Return a spec or status as the server would return it, in JSON's own types, so that the two can be compared."""
    resource: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(to_plain(value)))
    if isinstance(value, PolicySpec) and value.baseline == Parameters():
        # A default baseline follows the bounds, and must not look like a value outside of them.
        del resource["baseline"]
    if isinstance(value, PolicySpec) and not value.target_refs:
        del resource["targetRefs"]  # an explicit list must name something
    return resource
