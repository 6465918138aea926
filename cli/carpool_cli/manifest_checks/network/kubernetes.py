"""Kubernetes' own NetworkPolicies. They add up; a port name refers to the sidecar's port once there is one."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from carpool_cli.manifest_checks.findings import json_patch
from carpool_cli.manifest_checks.network.rules import (
    DEFAULT,
    EGRESS,
    INGRESS,
    Closing,
    Policies,
    Rule,
    all_in,
    requirements,
)
from carpool_cli.manifest_checks.objects import NAME, Around, Json, Peer, Subject
from carpool_operator.workloads.metadata import Selector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class KubernetesRule(NamedTuple):
    """One rule of a NetworkPolicy. ``way``: ``ingress`` or ``egress``; ``place``: its index there."""

    policy: Json
    namespace: str
    way: str
    place: int
    denies: bool = False
    """It has no deny rules."""
    certain: bool = True
    """It uses only labels."""
    passes: bool = False
    tier: float = DEFAULT

    @property
    def title(self) -> str:
        """Kind and name of its policy."""
        return f"NetworkPolicy {self.policy['metadata']['name']}"

    @property
    def body(self) -> Json:
        """Its content."""
        rule: Json = self.policy["spec"][self.way][self.place]
        return rule

    @property
    def peers(self) -> list[Json]:
        """The peers; everyone if it names none."""
        return self.body.get("from" if self.way == INGRESS else "to") or []

    @property
    def order(self) -> tuple[float, str]:
        """Its order in a tier for Calico; elsewhere such policies have no order."""
        return 1000.0, f"{self.namespace}/knp.default.{self.policy['metadata']['name']}"

    @property
    def pods(self) -> list[Json] | None:
        """Selectors of the peers; None if a peer is anyone, or an address."""
        return None if self.open_to_all or self.by_address else [self.whole(each) for each in self.peers]

    @property
    def open_to_all(self) -> bool:
        """Whether it matches every peer."""
        return not self.peers

    @property
    def by_address(self) -> bool:
        """Whether it names addresses."""
        return any(peer.get("ipBlock") for peer in self.peers)

    def covers(self, port: int, named: dict[str, int]) -> bool:
        """Whether it matches a port of a pod; ``named``: that pod's ports by name."""
        listed = self.body.get("ports") or []
        return not listed or any(_covers(each, port, named) for each in listed)

    def leaves_out(self, port: int) -> bool:  # noqa: ARG002 - as of other kinds
        """Return False: it has no list of excluded ports."""
        return False

    def includes(self, other: Rule) -> bool:
        """Whether it surely matches all peers of ``other``, too."""
        if self.open_to_all or not isinstance(other, KubernetesRule):
            return self.open_to_all or all_in(other.pods or [], self.pods or [])
        return bool(other.peers) and all(
            any(_includes(self.whole(outer), other.whole(inner)) for outer in self.peers) for inner in other.peers
        )

    def reaches(self, pod: Peer) -> bool:
        """Whether it surely matches a pod as peer; a pod without known addresses, wherever it runs."""
        return self.open_to_all or any(self._selects(peer, pod) for peer in self.peers)

    def may_reach(self, pod: Peer) -> bool:
        """Return the same as ``reaches``: everything it depends on is known."""
        return self.reaches(pod)

    def for_all_pods_of(self, other: Rule) -> bool:
        """Whether its policy surely selects all pods that the policy of ``other`` selects."""
        if not isinstance(other, KubernetesRule) or other.namespace != self.namespace:
            return False
        outer, inner = (each.policy["spec"].get("podSelector") or {} for each in (self, other))
        return requirements(outer) <= requirements(inner)

    def patched(self, port: int, like: int, named: dict[str, int]) -> str:  # noqa: ARG002 - as of other kinds
        """Return the command that adds a port to it."""
        path, value = f"/spec/{self.way}/{self.place}/ports/-", {"port": port, "protocol": "TCP"}
        return json_patch(self.namespace, f"networkpolicy {self.policy['metadata']['name']}", "add", path, value)

    def _selects(self, peer: Json, pod: Peer) -> bool:
        """Whether one of its peers is a pod; an unknown address is only in the block of all addresses."""
        block = peer.get("ipBlock")
        if block:
            return any(_holds(block, each) for each in pod.addresses) or (not pod.addresses and _is_all(block))
        whole = self.whole(peer)
        of_namespace, of_pods = whole["namespaceSelector"], whole["podSelector"]
        return _selector(of_namespace).matches(pod.namespace) and _selector(of_pods).matches(pod.labels)

    def whole(self, peer: Json) -> Json:
        """Return a peer with its default namespace, the policy's, if it names none."""
        if peer.get("ipBlock"):
            return peer
        own = {"matchLabels": {NAME: self.namespace}}
        of_namespace = peer.get("namespaceSelector")
        return {
            "namespaceSelector": own if of_namespace is None else of_namespace,
            "podSelector": peer.get("podSelector") or {},
        }


def ingress(subject: Subject, pod: Json, near: Around) -> Policies:
    """Return the policies that select a pod."""
    found = list(selecting(subject, pod, near))
    rules: list[Rule] = [rule for policy in found for rule in _rules(policy, subject, INGRESS)]
    return Policies([Closing(f"NetworkPolicy {policy['metadata']['name']}") for policy in found], rules)


def egress(subject: Subject, near: Around) -> list[Rule]:
    """Return the rules for callers' egress, of any namespace."""
    return [rule for policy in near.policies if "Egress" in _types(policy) for rule in _rules(policy, subject, EGRESS)]


def selecting(subject: Subject, pod: Json, near: Around) -> Iterator[Json]:
    """Yield the policies that isolate a pod: it admits only what they match."""
    labels = pod["metadata"].get("labels") or {}
    for policy in near.policies:
        here = "Ingress" in _types(policy) and _namespace(policy, subject) == subject.namespace
        if here and _selector(policy["spec"].get("podSelector")).matches(labels):
            yield policy


def _rules(policy: Json, subject: Subject, way: str) -> Iterator[KubernetesRule]:
    for place in range(len(policy["spec"].get(way) or [])):
        yield KubernetesRule(policy, _namespace(policy, subject), way, place)


def _types(policy: Json) -> Iterable[str]:
    spec = policy["spec"]
    return spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]


def _namespace(policy: Json, subject: Subject) -> str:
    return str(policy["metadata"].get("namespace", subject.namespace))


def _covers(entry: Json, port: int, named: dict[str, int]) -> bool:
    if entry.get("protocol", "TCP") != "TCP":
        return False
    first: int | str | None = entry.get("port")
    if first is None:
        return True
    if isinstance(first, str):
        return named.get(first) == port
    return first <= port <= int(entry.get("endPort", first))


def _selector(written: Json | None) -> Selector:
    return msgspec.convert(written or {}, Selector)


def _includes(outer: Json, inner: Json) -> bool:
    """Whether one peer is surely part of another."""
    if "ipBlock" in outer or "ipBlock" in inner:
        return "ipBlock" in outer and "ipBlock" in inner and _block_includes(outer["ipBlock"], inner["ipBlock"])
    return all(requirements(outer[each]) <= requirements(inner[each]) for each in ("namespaceSelector", "podSelector"))


def _block_includes(outer: Json, inner: Json) -> bool:
    if not set(outer.get("except") or []) <= set(inner.get("except") or []):
        return False
    wide, narrow = ip_network(outer["cidr"], strict=False), ip_network(inner["cidr"], strict=False)
    return wide.version == narrow.version and narrow.network_address in wide and narrow.prefixlen >= wide.prefixlen


def _holds(block: Json, address: str) -> bool:
    where = ip_address(address)
    excepted = any(where in ip_network(each, strict=False) for each in block.get("except") or [])
    return where in ip_network(block["cidr"], strict=False) and not excepted


def _is_all(block: Json) -> bool:
    return ip_network(block["cidr"], strict=False).prefixlen == 0 and not block.get("except")
