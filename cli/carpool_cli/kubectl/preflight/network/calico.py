"""Calico's policies, of a namespace and of the cluster. Rules are compared one by one, and their order is not.

Field semantics: https://docs.tigera.io/calico/latest/reference/resources/networkpolicy.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, NamedTuple

from carpool_cli.kubectl.preflight.findings import json_patch
from carpool_cli.kubectl.preflight.network import calico_selector
from carpool_cli.kubectl.preflight.network.rules import EGRESS, INGRESS, Policies
from carpool_cli.kubectl.preflight.scene import NAME, Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from carpool_cli.kubectl.preflight.network.rules import Rule
    from carpool_cli.kubectl.preflight.scene import Around, Json, Subject

PORTS, NOT_PORTS = "ports", "notPorts"

ADMITTING = frozenset({"Allow", "Pass"})
"""Actions by which a connection goes on. ``Pass`` leaves it to the next tier."""

_PODS = frozenset({"selector", "namespaceSelector"})
_PEERS = _PODS | {"nets"}
"""Fields of a peer that are understood; one with others is surely nobody's."""


class CalicoRule(NamedTuple):
    """One rule. ``way``: ``ingress`` or ``egress``; ``place``: its index there."""

    policy: Json
    way: str
    place: int

    @property
    def title(self) -> str:
        """Kind and name of its policy."""
        return _title(self.policy)

    @property
    def namespace(self) -> str:
        """The namespace of its policy; ``""`` where that is for the whole cluster."""
        return _namespace(self.policy)

    @property
    def body(self) -> Json:
        """What it says."""
        rule: Json = self.policy["spec"][self.way][self.place]
        return rule

    @property
    def denies(self) -> bool:
        """Whether it refuses what it is for."""
        return self.body["action"] not in ADMITTING

    @property
    def peer(self) -> Json:
        """Who is at the other end, without ports; everybody where it names none."""
        named = self.body.get("source" if self.way == INGRESS else "destination") or {}
        return {key: value for key, value in named.items() if key not in {PORTS, NOT_PORTS} and value}

    @property
    def open_to_all(self) -> bool:
        """Whether it is for everybody at the other end."""
        return not self.peer

    @property
    def by_address(self) -> bool:
        """Whether it names addresses."""
        return "nets" in self.peer

    def covers(self, port: int, named: dict[str, int]) -> bool:
        """Whether it is for a port of a pod; ``named``: that pod's ports by name."""
        body, ports = self.body, self._ports
        is_tcp = body.get("protocol") in {None, "TCP", 6} and body.get("notProtocol") not in {"TCP", 6}
        listed = ports.get(PORTS) or []
        in_list = not listed or any(_covers(each, port, named) for each in listed)
        return is_tcp and in_list and not any(_covers(each, port, named) for each in ports.get(NOT_PORTS) or [])

    def leaves_out(self, port: int) -> bool:
        """Whether it is for all ports but some, and this one is among those."""
        ports = self._ports
        return not ports.get(PORTS) and any(_covers(each, port, {}) for each in ports.get(NOT_PORTS) or [])

    def includes(self, other: Rule) -> bool:
        """Whether everyone at the other end of ``other`` is surely at the end of this, too."""
        if self.open_to_all or not isinstance(other, CalicoRule):
            return self.open_to_all
        same_place = self.namespace == other.namespace or "namespaceSelector" in self.peer
        return self.peer == other.peer and (same_place or "nets" in self.peer)

    def reaches(self, pod: Peer) -> bool:
        """Whether a pod is surely at the other end."""
        peer = self.peer
        if not peer.keys() <= _PEERS:
            return False
        if "nets" in peer and not _holds(peer["nets"], pod.addresses):
            return False
        at_home = not self.namespace or not _PODS & peer.keys() or pod.namespace[NAME] == self.namespace
        if "namespaceSelector" not in peer and not at_home:
            return False
        of_namespace = {**pod.namespace, "projectcalico.org/name": pod.namespace[NAME]}
        return calico_selector.matches(peer.get("selector", ""), _labels(pod)) and calico_selector.matches(
            peer.get("namespaceSelector", ""), of_namespace
        )

    def for_all_pods_of(self, other: Rule) -> bool:
        """Whether its policy surely selects all pods that the policy of ``other`` does."""
        return isinstance(other, CalicoRule) and _selectors(self.policy) == _selectors(other.policy)

    def patched(self, port: int) -> str:
        """Return the command by which it treats one more port as those that it lists."""
        field = NOT_PORTS if self.leaves_out(port) or not self._ports.get(PORTS) else PORTS
        path = f"/spec/{self.way}/{self.place}/destination/{field}/-"
        return json_patch(self.namespace, _resource(self.policy), "add", path, port)

    @property
    def _ports(self) -> Json:
        return self.body.get("destination") or {}


def ingress(subject: Subject, pod: Json, near: Around) -> Policies:
    """Return the policies that select a pod."""
    peer = Peer(near.labels, pod["metadata"].get("labels") or {})
    found = [
        policy
        for policy in _of_pods(near)
        if INGRESS in _types(policy) and _namespace(policy) in {"", subject.namespace} and _selects(policy, peer)
    ]
    rules: list[Rule] = [rule for policy in found for rule in _rules(policy, INGRESS)]
    return Policies([_title(policy) for policy in found], rules)


def egress(near: Around) -> list[Rule]:
    """Return the rules by which pods may send, of any namespace."""
    return [rule for policy in _of_pods(near) if EGRESS in _types(policy) for rule in _rules(policy, EGRESS)]


def _of_pods(near: Around) -> Iterator[Json]:
    """Yield the policies that may be for pods: those before connection tracking and before DNAT are for nodes."""
    for policy in near.calico:
        spec = policy["spec"]
        if not spec.get("doNotTrack") and not spec.get("preDNAT"):
            yield policy


def _rules(policy: Json, way: str) -> Iterator[CalicoRule]:
    for place, body in enumerate(policy["spec"].get(way) or []):
        if body["action"] in ADMITTING | {"Deny"}:
            yield CalicoRule(policy, way, place)


def _types(policy: Json) -> list[str]:
    spec = policy["spec"]
    if spec.get("types"):
        return [each.lower() for each in spec["types"]]
    return [way for way in (INGRESS, EGRESS) if spec.get(way) or (way == INGRESS and not spec.get(EGRESS))]


def _selects(policy: Json, pod: Peer) -> bool:
    """Whether a policy is for a pod. What it says of service accounts' labels is not known, and taken to be so."""
    spec = policy["spec"]
    of_namespace = {**pod.namespace, "projectcalico.org/name": pod.namespace[NAME]}
    return calico_selector.matches(spec.get("selector") or "", _labels(pod)) and calico_selector.matches(
        spec.get("namespaceSelector") or "", of_namespace
    )


def _selectors(policy: Json) -> tuple[str, ...]:
    said = (policy["spec"].get(each) or "" for each in ("selector", "namespaceSelector", "serviceAccountSelector"))
    return (_namespace(policy), *said)


def _labels(pod: Peer) -> dict[str, str]:
    """Return a pod's labels as Calico has them: those of its namespace with a prefix."""
    of_namespace = {f"pcns.{key}": value for key, value in pod.namespace.items()}
    own = {"projectcalico.org/namespace": pod.namespace[NAME], "projectcalico.org/orchestrator": "k8s"}
    return {**of_namespace, **pod.labels, **own}


def _covers(entry: int | str, port: int, named: dict[str, int]) -> bool:
    """Whether a number, a range ``8000:9000`` or a name is for a port."""
    first, _, last = str(entry).partition(":")
    if not first.isdecimal():
        return named.get(str(entry)) == port
    return int(first) <= port <= int(last or first)


def _holds(nets: list[str], addresses: tuple[str, ...]) -> bool:
    blocks = [ip_network(each, strict=False) for each in nets]
    if any(block.prefixlen == 0 for block in blocks):
        return True
    return any(ip_address(each) in block for block in blocks for each in addresses)


def _namespace(policy: Json) -> str:
    return str(policy["metadata"].get("namespace", ""))


def _title(policy: Json) -> str:
    return f"Calico's {policy['kind']} {policy['metadata']['name']}"


def _resource(policy: Json) -> str:
    group = policy["apiVersion"].partition("/")[0]
    plural = "networkpolicies" if _namespace(policy) else "globalnetworkpolicies"
    return f"{plural}.{group} {policy['metadata']['name']}"
