"""Cilium's policies, of a namespace and of the cluster. They are combined with NetworkPolicies; a deny always wins.

Field semantics: https://docs.cilium.io/en/stable/security/policy/, ``pkg/policy/api`` and
``pkg/k8s/apis/cilium.io/utils``.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from carpool_cli.manifest_checks.findings import json_patch
from carpool_cli.manifest_checks.network.rules import (
    BEYOND,
    DEFAULT,
    EGRESS,
    INGRESS,
    Closing,
    Policies,
    Rule,
    namespace_of,
    requirements,
)
from carpool_cli.manifest_checks.objects import NAME, Around, Json, Peer, Subject, peer_of
from carpool_operator.workloads.metadata import Selector

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMESPACE = "io.kubernetes.pod.namespace"
"""Label that Cilium adds to pods, and that selectors name."""
OF_NAMESPACE = "io.cilium.k8s.namespace.labels."
"""Prefix of a namespace's labels when Cilium adds them to its pods."""
ACCOUNT = "io.cilium.k8s.policy.serviceaccount"
"""Label for a pod's service account."""
UNKNOWN = frozenset({"io.cilium.k8s.policy.cluster"})
"""Labels whose values are unknown here."""

_NOBODY = Peer({NAME: ""}, {})
_EVERY_POD = {"matchLabels": {}, "matchExpressions": [{"key": NAMESPACE, "operator": "Exists"}]}


class CiliumRule(NamedTuple):
    """One rule. ``spec``: the policy's spec, or one of several; ``path``: the place of the rule.

    ``way``: ``ingress`` or ``egress``. ``body``: its content.
    """

    policy: Json
    spec: Json
    path: str
    way: str
    body: Json
    denies: bool
    certain: bool = True
    passes: bool = False
    tier: float = DEFAULT
    pods: list[Json] | None = None
    """None: its selectors differ from those of Kubernetes, and may use what only Cilium knows."""

    @property
    def title(self) -> str:
        """Kind and name of its policy."""
        return title(self.policy)

    @property
    def namespace(self) -> str:
        """The namespace of its policy; ``""`` for the whole cluster."""
        return namespace_of(self.policy)

    @property
    def order(self) -> tuple[float, str]:
        """A deny always wins."""
        return (-inf if self.denies else inf), ""

    @property
    def peers(self) -> dict[str, list[Any]]:
        """The peers, by field: ``fromEndpoints``, ``toCIDR``. Everyone if it names none."""
        prefix = "from" if self.way == INGRESS else "to"
        return {
            key: value
            for key, value in self.body.items()
            if key.startswith(prefix) and key not in {"toPorts", "fromRequires", "toRequires"} and value is not None
        }

    @property
    def open_to_all(self) -> bool:
        """Whether it matches every peer."""
        return not self.peers or "all" in self._entities

    @property
    def by_address(self) -> bool:
        """Return False: blocks of addresses match only peers outside the cluster."""
        return False

    def covers(self, port: int, named: dict[str, int]) -> bool:
        """Whether it matches a port of a pod. An empty rule matches none."""
        listed = self.body.get("toPorts") or []
        if not listed:
            return bool(self.peers) and not self.body.get("icmps")
        return any(not each.get("ports") or any(_covers(one, port, named) for one in each["ports"]) for each in listed)

    def leaves_out(self, port: int) -> bool:  # noqa: ARG002 - as of other kinds
        """Return False: it has no list of excluded ports."""
        return False

    def includes(self, other: Rule) -> bool:
        """Whether it surely matches all peers of ``other``, too."""
        if self.open_to_all or not isinstance(other, CiliumRule):
            return self.open_to_all
        return bool(other.peers) and all(
            self._has(field, each, other.namespace) for field, listed in other.peers.items() for each in listed
        )

    def reaches(self, pod: Peer) -> bool:
        """Whether it surely matches a pod as peer."""
        if self.open_to_all or "cluster" in self._entities:
            return True
        return any(each is True for each in self.matched(pod))

    def may_reach(self, pod: Peer) -> bool:
        """Whether it may match a pod as peer, as far as known."""
        return self.reaches(pod) or any(each is None for each in self.matched(pod))

    def for_all_pods_of(self, other: Rule) -> bool:
        """Whether its policy surely selects all pods that the policy of ``other`` selects."""
        if not isinstance(other, CiliumRule):
            return False
        outer, inner = (_selector(each.spec["endpointSelector"], each.namespace) for each in (self, other))
        return requirements(outer) <= requirements(inner)

    def patched(self, port: int, like: int, named: dict[str, int]) -> str:
        """Return the command that adds a port to it, beside another port: further conditions may apply to some."""
        place = next(
            index
            for index, each in enumerate(self.body["toPorts"])
            if any(_covers(one, like, named) for one in each.get("ports") or [])
        )
        value = {"port": str(port), "protocol": "TCP"}
        return json_patch(self.namespace, _resource(self.policy), "add", f"{self.path}/toPorts/{place}/ports/-", value)

    @property
    def _entities(self) -> list[str]:
        return self.peers.get("fromEntities" if self.way == INGRESS else "toEntities") or []

    @property
    def _endpoints(self) -> list[Json]:
        return self.peers.get("fromEndpoints" if self.way == INGRESS else "toEndpoints") or []

    def matched(self, pod: Peer) -> Iterator[bool | None]:
        """Yield for each of its selectors whether it matches a pod; None if unknown."""
        labels = _labels(pod)
        return (_matches(_selector(each, self.namespace), labels) for each in self._endpoints)

    def _has(self, field: str, member: Any, namespace: str) -> bool:  # noqa: ANN401 - a selector, or a word
        """Whether a peer of another rule, whose policy is in some namespace, is surely among the peers of this one."""
        mine = self.peers.get(field) or []
        if not field.endswith("Endpoints"):
            return member in mine
        inner = requirements(_selector(member, namespace))
        return "cluster" in self._entities or any(
            requirements(_selector(each, self.namespace)) <= inner for each in mine
        )


def ingress(subject: Subject, pod: Json, near: Around) -> Policies:
    """Return the policies that select a pod."""
    labels = _labels(peer_of(near.labels, pod))
    closing: list[Closing] = []
    perhaps: list[Closing] = []
    rules: list[Rule] = []
    for policy, path, spec in _specs(near):
        selects = _selects(policy, spec, labels)
        if namespace_of(policy) not in {"", subject.namespace} or selects is False:
            continue
        said = (spec.get("enableDefaultDeny") or {}).get(INGRESS)
        if said is True or (said is None and (spec.get("ingress") or spec.get("ingressDeny"))):
            (closing if selects else perhaps).append(Closing(title(policy)))
        rules += _rules(policy, path, spec, INGRESS, certain=bool(selects))
    return Policies(closing, rules, perhaps)


def egress(near: Around) -> list[Rule]:
    """Return the rules for the egress of pods of any namespace."""
    return [rule for policy, path, spec in _specs(near) for rule in _rules(policy, path, spec, EGRESS)]


def is_understood(policy: Json, near: Around) -> bool:  # noqa: ARG001 - as of other kinds
    """Whether every field of a policy is supported here."""
    try:
        for spec in _specs_of(policy):
            _selects(policy, spec[1], {})
            for way in (INGRESS, EGRESS):
                for rule in _rules(policy, *spec, way):
                    rule.covers(BEYOND, {})
                    rule.includes(rule)
                    list(rule.matched(_NOBODY))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return True


def _specs(near: Around) -> Iterator[tuple[Json, str, Json]]:
    """Yield the specs of policies that apply to pods, with their place."""
    for policy in near.cilium:
        for path, spec in _specs_of(policy):
            yield policy, path, spec


def _specs_of(policy: Json) -> Iterator[tuple[str, Json]]:
    """Yield a policy's specs for pods, with their place: it may have several. Specs for nodes are left out."""
    specs = [("/spec", policy.get("spec") or {})]
    specs += [(f"/specs/{index}", spec) for index, spec in enumerate(policy.get("specs") or [])]
    return ((path, spec) for path, spec in specs if spec.get("endpointSelector") is not None)


def _rules(policy: Json, path: str, spec: Json, way: str, *, certain: bool = True) -> Iterator[CiliumRule]:
    for section, denies in ((way, False), (f"{way}Deny", True)):
        for place, body in enumerate(spec.get(section) or []):
            yield CiliumRule(policy, spec, f"{path}/{section}/{place}", way, body, denies, certain)


def _selects(policy: Json, spec: Json, labels: dict[str, str]) -> bool | None:
    return _matches(_selector(spec["endpointSelector"], namespace_of(policy)), labels)


def _covers(entry: Json, port: int, named: dict[str, int]) -> bool:
    if entry.get("protocol", "ANY") not in {"TCP", "ANY", ""}:
        return False
    first = str(entry.get("port", "0"))
    if not first.isdecimal():
        return named.get(first) == port
    # 0 means all ports.
    return int(first) == 0 or int(first) <= port <= int(entry.get("endPort") or first)


def _labels(pod: Peer) -> dict[str, str]:
    """Return a pod's labels for Cilium."""
    of_namespace = {f"{OF_NAMESPACE}{key}": value for key, value in pod.namespace.items()}
    return {**pod.labels, **of_namespace, NAMESPACE: pod.namespace[NAME], ACCOUNT: pod.account}


def _selector(written: Json, namespace: str) -> Json:
    """Return a selector without its keys' prefixes, and with the default namespace if it names none."""
    labels = {_plain(key): value for key, value in (written.get("matchLabels") or {}).items()}
    expressions = [{**each, "key": _plain(each["key"])} for each in written.get("matchExpressions") or []]
    keys = [*labels, *(each["key"] for each in expressions)]
    if not any(key == NAMESPACE or (namespace and key.startswith(OF_NAMESPACE)) for key in keys):
        if namespace:
            labels[NAMESPACE] = namespace
        else:
            expressions += _EVERY_POD["matchExpressions"]
    return {"matchLabels": labels, "matchExpressions": expressions}


def _plain(key: str) -> str:
    """Return a label's key without its source; a source other than Kubernetes stays, and no pod has it."""
    return key.removeprefix("k8s:").removeprefix("any:")


def _matches(selector: Json, labels: dict[str, str]) -> bool | None:
    """Whether a selector matches these labels; None if it uses unknown ones."""
    known = {
        "matchLabels": {key: value for key, value in selector["matchLabels"].items() if key not in UNKNOWN},
        "matchExpressions": [each for each in selector["matchExpressions"] if each["key"] not in UNKNOWN],
    }
    if not msgspec.convert(known, Selector).matches(labels):
        return False
    return True if known == selector else None


def title(policy: Json) -> str:
    """Return kind and name of a policy, for a message."""
    return f"{policy['kind']} {policy['metadata']['name']}"


def _resource(policy: Json) -> str:
    plural = "ciliumnetworkpolicies" if namespace_of(policy) else "ciliumclusterwidenetworkpolicies"
    return f"{plural}.cilium.io {policy['metadata']['name']}"
