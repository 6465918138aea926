"""Calico's policies, of a namespace and of the cluster.

Field semantics: https://docs.tigera.io/calico/latest/reference/resources/networkpolicy.
"""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address, ip_network
from math import inf, nextafter
from typing import TYPE_CHECKING, NamedTuple

from carpool_cli.manifest_checks.findings import json_patch
from carpool_cli.manifest_checks.network import calico_selector
from carpool_cli.manifest_checks.network.calico_selector import both, negated
from carpool_cli.manifest_checks.network.rules import (
    ADMIN,
    BASELINE,
    BEYOND,
    DEFAULT,
    EGRESS,
    INGRESS,
    Closing,
    Policies,
    Rule,
    namespace_of,
)
from carpool_cli.manifest_checks.objects import NAME, Around, Json, Peer, Subject, peer_of

if TYPE_CHECKING:
    from collections.abc import Iterator

PORTS, NOT_PORTS = "ports", "notPorts"

LAST = 1e300
"""Order of a tier without a number; several tiers may have it."""

ADMITTING = frozenset({"Allow", "Pass"})
"""Actions that let a connection go on. ``Pass`` leaves it to the next tier."""

_PODS = frozenset({"selector", "namespaceSelector", "serviceAccounts"})
"""Fields of an endpoint that select pods: of the policy's own namespace, unless they name another."""
_ENDS = _PODS | {"notSelector", "nets"}
"""Supported fields of an endpoint; with any other field it is unknown whether it matches a pod."""
_ANYBODY = Peer({NAME: ""}, {})


class CalicoRule(NamedTuple):
    """One rule. ``way``: ``ingress`` or ``egress``; ``place``: its index there."""

    policy: Json
    way: str
    place: int
    tier: float
    certain: bool = True
    pods: list[Json] | None = None
    """None: its selectors differ from those of Kubernetes."""

    @property
    def title(self) -> str:
        """Kind and name of its policy."""
        return title(self.policy)

    @property
    def namespace(self) -> str:
        """The namespace of its policy; ``""`` for the whole cluster."""
        return namespace_of(self.policy)

    @property
    def body(self) -> Json:
        """Its content."""
        rule: Json = self.policy["spec"][self.way][self.place]
        return rule

    @property
    def denies(self) -> bool:
        """Whether it rejects the traffic that it matches."""
        return self.body["action"] not in ADMITTING

    @property
    def passes(self) -> bool:
        """Whether it leaves the traffic that it matches to the next tier."""
        return bool(self.body["action"] == "Pass")

    @property
    def order(self) -> tuple[float, str]:
        """Order of its policy in its tier: without a number it is last; among equals, names decide."""
        return _order(self.policy["spec"]), f"{self.namespace}/{self.policy['metadata']['name']}"

    @property
    def peer(self) -> Json:
        """The peer, without ports; everyone if it names none."""
        return _end(self.body, "source" if self.way == INGRESS else "destination")

    @property
    def near_end(self) -> Json:
        """Those of its policy's pods that it applies to; all if it names none."""
        return _end(self.body, "destination" if self.way == INGRESS else "source")

    @property
    def open_to_all(self) -> bool:
        """Whether it matches every peer."""
        return not self.peer

    @property
    def by_address(self) -> bool:
        """Whether it names addresses."""
        return "nets" in self.peer

    def covers(self, port: int, named: dict[str, int]) -> bool:
        """Whether it matches a port of a pod; ``named``: that pod's ports by name."""
        body, ports = self.body, self.ports
        is_tcp = body.get("protocol") in {None, "TCP", 6} and body.get("notProtocol") not in {"TCP", 6}
        listed = ports.get(PORTS) or []
        in_list = not listed or any(_covers(each, port, named) for each in listed)
        return is_tcp and in_list and not any(_covers(each, port, named) for each in ports.get(NOT_PORTS) or [])

    def leaves_out(self, port: int) -> bool:
        """Whether it matches all ports except some, and this one is among those."""
        ports = self.ports
        return not ports.get(PORTS) and any(_covers(each, port, {}) for each in ports.get(NOT_PORTS) or [])

    def includes(self, other: Rule) -> bool:
        """Whether it surely matches all peers of ``other``, too."""
        if self.open_to_all or not isinstance(other, CalicoRule):
            return self.open_to_all
        same_place = self.namespace == other.namespace or "namespaceSelector" in self.peer
        return self.peer == other.peer and (same_place or "nets" in self.peer)

    def reaches(self, pod: Peer) -> bool:
        """Whether it surely matches a pod as peer."""
        return _is_at(self.peer, self.namespace, pod) is True

    def may_reach(self, pod: Peer) -> bool:
        """Whether it may match a pod as peer, as far as known."""
        return _is_at(self.peer, self.namespace, pod) is not False

    def for_all_pods_of(self, other: Rule) -> bool:
        """Whether its policy surely selects all pods that the policy of ``other`` selects."""
        if not isinstance(other, CalicoRule) or _selectors(self.policy) != _selectors(other.policy):
            return False
        return not self.near_end or self.near_end == other.near_end

    def patched(self, port: int, like: int, named: dict[str, int]) -> str:  # noqa: ARG002 - as of other kinds
        """Return the command that treats one more port like those that it lists."""
        field = NOT_PORTS if self.leaves_out(port) or not self.ports.get(PORTS) else PORTS
        path = f"/spec/{self.way}/{self.place}/destination/{field}/-"
        return json_patch(self.namespace, _resource(self.policy), "add", path, port)

    @property
    def ports(self) -> Json:
        """Ports that it lists, or excludes, for the receiving end."""
        return self.body.get("destination") or {}


def ingress(subject: Subject, pod: Json, near: Around) -> Policies:
    """Return the policies that select a pod."""
    peer = peer_of(near.labels, pod)._replace(addresses=())
    closing: list[Closing] = []
    perhaps: list[Closing] = []
    tiers = tiers_of(near)
    rules: list[Rule] = []
    for policy in _of_pods(near):
        selects = _selects(policy, peer)
        if INGRESS not in _types(policy) or namespace_of(policy) not in {"", subject.namespace} or selects is False:
            continue
        tier, closes = tiers[_tier(policy)]
        if closes:
            (closing if selects else perhaps).append(Closing(title(policy), tier))
        for rule in _rules(policy, INGRESS, tier):
            is_for = both(selects, _is_at(rule.near_end, rule.namespace, peer))
            if is_for is not False:
                rules.append(rule._replace(certain=bool(is_for)))
    return Policies(closing, rules, perhaps)


def egress(near: Around) -> list[Rule]:
    """Return the rules for the egress of pods of any namespace."""
    tiers = tiers_of(near)
    policies = [policy for policy in _of_pods(near) if EGRESS in _types(policy)]
    return [rule for policy in policies for rule in _rules(policy, EGRESS, tiers[_tier(policy)][0])]


def tiers_of(near: Around) -> dict[str, tuple[float, bool]]:
    """Return the tiers by name: order, and whether its policies isolate the pods that they select."""
    found = {
        "default": (DEFAULT, True),
        "adminnetworkpolicy": (ADMIN, False),
        "baselineadminnetworkpolicy": (BASELINE, False),
    }
    read = {}
    for tier in near.tiers:
        spec = tier.get("spec") or {}
        with suppress(ValueError, TypeError):
            read[tier["metadata"]["name"]] = _order(spec), spec.get("defaultAction") != "Pass"
    # Names decide among equals. If Calico's own tiers have no number, as before 3.29, they have the place of
    # NetworkPolicies.
    place = -inf
    for name, (order, closes) in sorted(read.items(), key=lambda each: (each[1][0], each[0])):
        place = max(min(order, LAST), nextafter(place, inf))
        found[name] = found[name][0] if name in found else place, closes
    return found


def is_understood(policy: Json, near: Around) -> bool:
    """Whether every field of a policy is supported here, and the order of its tier is known."""
    try:
        known = _tier(policy) in tiers_of(near)
        _selects(policy, _ANYBODY)
        for way in _types(policy):
            for rule in _rules(policy, way, DEFAULT):
                for each in [*(rule.ports.get(PORTS) or []), *(rule.ports.get(NOT_PORTS) or [])]:
                    _covers(each, BEYOND, {})
                for end in (rule.near_end, rule.peer):
                    _is_at(end, "", _ANYBODY)
        _order(policy["spec"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return known


def _of_pods(near: Around) -> Iterator[Json]:
    """Yield the policies that may apply to pods: those before connection tracking and before DNAT are for nodes."""
    for policy in near.calico:
        if not policy["spec"].get("doNotTrack") and not policy["spec"].get("preDNAT"):
            yield policy


def _rules(policy: Json, way: str, tier: float) -> Iterator[CalicoRule]:
    for place, body in enumerate(policy["spec"].get(way) or []):
        if body["action"] in ADMITTING | {"Deny"}:
            yield CalicoRule(policy, way, place, tier)


def _tier(policy: Json) -> str:
    return str(policy["spec"].get("tier") or "default")


def _types(policy: Json) -> list[str]:
    spec = policy["spec"]
    if spec.get("types"):
        return [each.lower() for each in spec["types"]]
    return [way for way in (INGRESS, EGRESS) if spec.get(way) or (way == INGRESS and not spec.get(EGRESS))]


def _selects(policy: Json, pod: Peer) -> bool | None:
    """Whether a policy applies to a pod; None if unknown: labels of service accounts are not read."""
    spec = policy["spec"]
    own = calico_selector.matches(spec.get("selector") or "", _labels(pod))
    of_namespace = calico_selector.matches(spec.get("namespaceSelector") or "", _labels_of_namespace(pod))
    of_account = calico_selector.matches(spec.get("serviceAccountSelector") or "", None)
    return both(both(own, of_namespace), of_account)


def _end(body: Json, name: str) -> Json:
    return {key: value for key, value in (body.get(name) or {}).items() if key not in {PORTS, NOT_PORTS} and value}


def _is_at(end: Json, home: str, pod: Peer) -> bool | None:
    """Whether a pod is at an end of a rule; None if unknown. ``home``: the namespace of its policy."""
    found: bool | None = True if end.keys() <= _ENDS else None
    if home and end.keys() & _PODS and "namespaceSelector" not in end:
        found = both(found, pod.namespace[NAME] == home)
    if "nets" in end:
        found = both(found, _holds(end["nets"], pod.addresses))
    if "serviceAccounts" in end:
        accounts = end["serviceAccounts"]
        found = both(found, pod.account in (accounts.get("names") or [pod.account]))
        found = both(found, calico_selector.matches(accounts.get("selector") or "", None))
    found = both(found, calico_selector.matches(end.get("selector") or "", _labels(pod)))
    found = both(found, calico_selector.matches(end.get("namespaceSelector") or "", _labels_of_namespace(pod)))
    if "notSelector" in end:
        found = both(found, negated(calico_selector.matches(end["notSelector"], _labels(pod))))
    return found


def _order(spec: Json) -> float:
    """Return the order of a policy in its tier: without a number it is last."""
    order = spec.get("order")
    return inf if order is None else float(order)


def _selectors(policy: Json) -> tuple[str, ...]:
    said = (policy["spec"].get(each) or "" for each in ("selector", "namespaceSelector", "serviceAccountSelector"))
    return (namespace_of(policy), *said)


def _labels(pod: Peer) -> dict[str, str]:
    """Return a pod's labels for Calico: those of its namespace have a prefix."""
    of_namespace = {f"pcns.{key}": value for key, value in pod.namespace.items()}
    own = {
        "projectcalico.org/namespace": pod.namespace[NAME],
        "projectcalico.org/orchestrator": "k8s",
        "projectcalico.org/serviceaccount": pod.account,
    }
    return {**of_namespace, **pod.labels, **own}


def _labels_of_namespace(pod: Peer) -> dict[str, str]:
    return {**pod.namespace, "projectcalico.org/name": pod.namespace[NAME]}


def _covers(entry: int | str, port: int, named: dict[str, int]) -> bool:
    """Whether a number, a range ``8000:9000`` or a name matches a port."""
    first, _, last = str(entry).partition(":")
    if not first.isdecimal():
        return named.get(str(entry)) == port
    return int(first) <= port <= int(last or first)


def _holds(nets: list[str], addresses: tuple[str, ...]) -> bool | None:
    """Whether one of a pod's addresses is in the blocks; None if they are unknown."""
    blocks = [ip_network(each, strict=False) for each in nets]
    if any(block.prefixlen == 0 for block in blocks):
        return True
    if not addresses:
        return None
    return any(ip_address(each) in block for block in blocks for each in addresses)


def title(policy: Json) -> str:
    """Return kind and name of a policy, for a message."""
    return f"Calico's {policy['kind']} {policy['metadata']['name']}"


def _resource(policy: Json) -> str:
    group = policy["apiVersion"].partition("/")[0]
    plural = "networkpolicies" if namespace_of(policy) else "globalnetworkpolicies"
    return f"{plural}.{group} {policy['metadata']['name']}"
