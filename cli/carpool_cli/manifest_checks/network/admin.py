"""Policies by administrators for the whole cluster: AdminNetworkPolicies, and the BaselineAdminNetworkPolicy.

Field semantics: https://network-policy-api.sigs.k8s.io/reference/spec/.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from carpool_cli.manifest_checks.findings import json_patch
from carpool_cli.manifest_checks.network.rules import (
    ADMIN,
    BASELINE,
    BEYOND,
    EGRESS,
    INGRESS,
    Policies,
    Rule,
    all_in,
    requirements,
)
from carpool_cli.manifest_checks.objects import NAME, Around, Json, Peer, Subject, peer_of
from carpool_operator.workloads.metadata import Selector

if TYPE_CHECKING:
    from collections.abc import Iterator

TIERS = {"AdminNetworkPolicy": ADMIN, "BaselineAdminNetworkPolicy": BASELINE}
"""By the supported kinds."""

_PEERS = frozenset({"namespaces", "pods", "networks", "nodes", "domainNames"})
_ANYBODY = Peer({NAME: ""}, {}, ("192.0.2.1",))


class AdminRule(NamedTuple):
    """One rule. ``way``: ``ingress`` or ``egress``; ``place``: its index there."""

    policy: Json
    way: str
    place: int
    namespace: str = ""
    certain: bool = True

    @property
    def title(self) -> str:
        """Kind and name of its policy."""
        return title(self.policy)

    @property
    def body(self) -> Json:
        """Its content."""
        rule: Json = self.policy["spec"][self.way][self.place]
        return rule

    @property
    def denies(self) -> bool:
        """Whether it rejects the traffic that it matches."""
        return bool(self.body["action"] == "Deny")

    @property
    def passes(self) -> bool:
        """Whether it leaves the traffic that it matches to the namespaces' policies."""
        return bool(self.body["action"] == "Pass")

    @property
    def tier(self) -> float:
        """Before or after the namespaces' policies."""
        return TIERS[self.policy["kind"]]

    @property
    def order(self) -> tuple[float, str]:
        """The lower its number, the earlier it decides."""
        return float(self.policy["spec"].get("priority") or 0), str(self.policy["metadata"]["name"])

    @property
    def peers(self) -> list[Json]:
        """The peers; never empty."""
        peers: list[Json] = self.body["from" if self.way == INGRESS else "to"]
        return peers

    @property
    def pods(self) -> list[Json] | None:
        """Selectors of the peers; None if a peer may not be a pod."""
        return None if any(_whole(each) is None for each in self.peers) else self._selectors

    @property
    def _selectors(self) -> list[Json]:
        return [whole for each in self.peers if (whole := _whole(each)) is not None]

    @property
    def open_to_all(self) -> bool:
        """Return False: such policies do not cover peers outside the cluster."""
        return False

    @property
    def by_address(self) -> bool:
        """Whether it names addresses."""
        return any("networks" in each for each in self.peers)

    def covers(self, port: int, named: dict[str, int]) -> bool:
        """Whether it matches a port of a pod; ``named``: that pod's ports by name."""
        listed = self.body.get("ports")
        return listed is None or any(_covers(each, port, named) for each in listed)

    def leaves_out(self, port: int) -> bool:  # noqa: ARG002 - as of other kinds
        """Return False: it has no list of excluded ports."""
        return False

    def includes(self, other: Rule) -> bool:
        """Whether it surely matches all peers of ``other``, too."""
        return self.peers == getattr(other, "peers", None) or all_in(other.pods or [], self._selectors)

    def reaches(self, pod: Peer) -> bool:
        """Whether it surely matches a pod as peer."""
        return any(_is_at(each, pod) for each in self.peers)

    def may_reach(self, pod: Peer) -> bool:
        """Return the same as ``reaches``: everything it depends on is known."""
        return self.reaches(pod)

    def for_all_pods_of(self, other: Rule) -> bool:
        """Whether its policy surely selects all pods that the policy of ``other`` selects."""
        return isinstance(other, AdminRule) and all_in([_subject(other.policy)], [_subject(self.policy)])

    def patched(self, port: int, like: int, named: dict[str, int]) -> str:  # noqa: ARG002 - as of other kinds
        """Return the command that adds a port to it."""
        resource = f"{self.policy['kind'].lower()}.policy.networking.k8s.io {self.policy['metadata']['name']}"
        value = {"portNumber": {"protocol": "TCP", "port": port}}
        return json_patch("", resource, "add", f"/spec/{self.way}/{self.place}/ports/-", value)


def ingress(subject: Subject, pod: Json, near: Around) -> Policies:  # noqa: ARG001 - as of other kinds
    """Return the rules that apply to a pod; none of these policies isolates it."""
    peer = peer_of(near.labels, pod)
    selecting = [policy for policy in near.admin if _is_in(_subject(policy), peer)]
    return Policies([], [rule for policy in selecting for rule in _rules(policy, INGRESS)])


def egress(near: Around) -> list[Rule]:
    """Return the rules for the egress of pods of any namespace."""
    return [rule for policy in near.admin for rule in _rules(policy, EGRESS)]


def is_understood(policy: Json, near: Around) -> bool:  # noqa: ARG001 - as of other kinds
    """Whether every field of a policy is supported here."""
    try:
        requirements(_subject(policy)["podSelector"])
        for way in (INGRESS, EGRESS):
            for rule in _rules(policy, way):
                known = rule.body["action"] in {"Allow", "Deny", "Pass"} and bool(rule.order)
                if not known or not all(each.keys() <= _PEERS and len(each) == 1 for each in rule.peers):
                    return False
                rule.covers(BEYOND, {})
                rule.includes(rule)
                rule.reaches(_ANYBODY)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return policy["kind"] in TIERS


def title(policy: Json) -> str:
    """Return kind and name of a policy, for a message."""
    return f"{policy['kind']} {policy['metadata']['name']}"


def _rules(policy: Json, way: str) -> Iterator[AdminRule]:
    for place in range(len(policy["spec"].get(way) or [])):
        yield AdminRule(policy, way, place)


def _subject(policy: Json) -> Json:
    whole = _whole(policy["spec"]["subject"])
    if whole is None:
        raise ValueError("a subject is of pods")
    return whole


def _whole(peer: Json) -> Json | None:
    """Return selectors of namespaces and pods; None if a peer is named in another way."""
    if "namespaces" in peer:
        return {"namespaceSelector": peer["namespaces"], "podSelector": {}}
    if "pods" in peer:
        return {each: peer["pods"].get(each) or {} for each in ("namespaceSelector", "podSelector")}
    return None


def _is_at(peer: Json, pod: Peer) -> bool:
    whole = _whole(peer)
    if whole is not None:
        return _is_in(whole, pod)
    blocks = [ip_network(each, strict=False) for each in peer.get("networks") or []]
    return any(ip_address(each) in block for block in blocks for each in pod.addresses)


def _is_in(whole: Json, pod: Peer) -> bool:
    selectors = (msgspec.convert(whole[each], Selector) for each in ("namespaceSelector", "podSelector"))
    return all(
        selector.matches(labels) for selector, labels in zip(selectors, (pod.namespace, pod.labels), strict=True)
    )


def _covers(entry: Json, port: int, named: dict[str, int]) -> bool:
    if "namedPort" in entry:
        return named.get(entry["namedPort"]) == port
    said = entry["portNumber"] if "portNumber" in entry else entry["portRange"]
    first, last = (said["port"],) * 2 if "portNumber" in entry else (said["start"], said["end"])
    return said.get("protocol", "TCP") == "TCP" and int(first) <= port <= int(last)
