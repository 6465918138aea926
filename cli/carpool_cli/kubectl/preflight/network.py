"""NetworkPolicies that admit callers to the model and not to the sidecar, or keep the operator from its admin port.

Policies add up, so all rules together are judged. A port by name is the sidecar's as soon as there is one.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from carpool_cli.kubectl.preflight.dry_run import named_ports
from carpool_cli.kubectl.preflight.findings import Code, Effect, Finding, json_patch
from carpool_cli.kubectl.preflight.scene import NAME, OPERATOR, Peer
from carpool_operator.api.annotations import INJECTED
from carpool_operator.workloads.metadata import Selector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from carpool_cli.kubectl.preflight.dry_run import Ports
    from carpool_cli.kubectl.preflight.scene import Around, Json, Subject


class Rule(NamedTuple):
    """One rule of a policy. ``way``: ``ingress`` or ``egress``; ``path``: where it is in the policy."""

    policy: Json
    namespace: str
    way: str
    place: int

    @property
    def body(self) -> Json:
        """What it says."""
        rule: Json = self.policy["spec"][self.way][self.place]
        return rule

    @property
    def peers(self) -> list[Json]:
        """Who is at the other end; everybody where it names none."""
        return self.body.get("from" if self.way == "ingress" else "to") or []

    def admits(self, port: int, named: dict[str, int]) -> bool:
        """Whether it admits a port of a pod; ``named``: that pod's ports by name."""
        listed = self.body.get("ports") or []
        return not listed or any(_covers(each, port, named) for each in listed)

    def includes(self, other: Rule) -> bool:
        """Whether everyone at the other end of ``other`` is at the end of this, too."""
        return not self.peers or (
            bool(other.peers)
            and all(
                any(_includes(self._whole(outer), other._whole(inner)) for outer in self.peers) for inner in other.peers
            )
        )

    def selects(self, peer: Json, pod: Peer) -> bool:
        """Whether one of its peers is a pod; an address that is not known is in no block but the one of all."""
        block = peer.get("ipBlock")
        if block:
            return any(_holds(block, each) for each in pod.addresses) or (not pod.addresses and _is_all(block))
        whole = self._whole(peer)
        of_namespace, of_pods = whole["namespaceSelector"], whole["podSelector"]
        return _selector(of_namespace).matches(pod.namespace) and _selector(of_pods).matches(pod.labels)

    def patched(self, port: int) -> str:
        """Return the command by which it admits one more port."""
        path, value = f"/spec/{self.way}/{self.place}/ports/-", {"port": port, "protocol": "TCP"}
        return json_patch(self.namespace, f"networkpolicy {self.policy['metadata']['name']}", "add", path, value)

    def _whole(self, peer: Json) -> Json:
        """Return a peer with the namespace that it means where it names none: the policy's."""
        if peer.get("ipBlock"):
            return peer
        own = {"matchLabels": {NAME: self.namespace}}
        of_namespace = peer.get("namespaceSelector")
        return {
            "namespaceSelector": own if of_namespace is None else of_namespace,
            "podSelector": peer.get("podSelector") or {},
        }


def network_policies(
    subject: Subject, pod: Json, found: Ports, near: Around, addresses: Sequence[str]
) -> Iterator[Finding]:
    """Find callers of the model's port, by its number, that the sidecar's port does not admit.

    ``addresses``: those of the pods that run.
    """
    yield from _ingress(subject, pod, found, near)
    yield from _closed_to_all(subject, pod, found, near)
    yield from _egress(subject, pod, found, near, addresses)


def admin_port(subject: Subject, pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    """Find policies that keep the operator from the sidecar's admin port."""
    closing, named = list(_selecting(subject, pod, near)), named_ports(pod)
    open_to = [rule for policy in closing for rule in _rules(policy, subject, "ingress")]
    open_to = [rule for rule in open_to if rule.admits(found.admin, named)]
    kept_out = [
        each
        for each in near.operators
        if not any(not rule.peers or any(rule.selects(peer, each) for peer in rule.peers) for rule in open_to)
    ]
    if not closing or not kept_out:
        return
    home = kept_out[0].namespace[NAME]
    peer = {"namespaceSelector": {"matchLabels": {NAME: home}}, "podSelector": {"matchLabels": OPERATOR}}
    rule = {"ports": [{"port": found.admin, "protocol": "TCP"}], "from": [peer]}
    policy = closing[0]
    resource = f"networkpolicy {policy['metadata']['name']}"
    names = ", ".join(each["metadata"]["name"] for each in closing)
    command = json_patch(subject.namespace, resource, "add", *_added(policy, rule))
    yield Finding(
        Code.ADMIN_PORT_CLOSED,
        Effect.NO_BATCHING,
        f"the operator, in namespace {home}, can't reach port {found.admin} of the sidecar: no rule of the "
        f"NetworkPolicies that select the pod ({names}) admits it, so nothing is tuned",
        f"{command}; or add {{name: {subject.namespace}, callers: []}} to the chart's value "
        "networkPolicy.sidecarNamespaces",
    )


def _ingress(subject: Subject, pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    named = named_ports(pod)
    rules = [rule for policy in _selecting(subject, pod, near) for rule in _rules(policy, subject, "ingress")]
    enough = [rule for rule in rules if rule.admits(found.data, named)]
    for rule in rules:
        if not rule.admits(found.model, named) or any(other.includes(rule) for other in enough):
            continue
        yield Finding(
            Code.NETWORK_POLICY_BY_NUMBER,
            Effect.BREAKS,
            f"NetworkPolicy {rule.policy['metadata']['name']} admits port {found.model} and not {found.data}, at which "
            "the sidecar is",
            rule.patched(found.data),
        )


def _closed_to_all(subject: Subject, pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    """Find policies that select a pod for its sidecar alone, where they let no caller in: before, everybody could."""
    metadata = pod["metadata"]
    labels = {key: value for key, value in (metadata.get("labels") or {}).items() if key != INJECTED}
    before = {**pod, "metadata": {**metadata, "labels": labels}}
    closing, named = list(_selecting(subject, pod, near)), named_ports(pod)
    rules = [rule for policy in closing for rule in _rules(policy, subject, "ingress")]
    if not closing or any(_selecting(subject, before, near)) or any(rule.admits(found.data, named) for rule in rules):
        return
    name = closing[0]["metadata"]["name"]
    rule = {"ports": [{"port": found.data, "protocol": "TCP"}]}
    command = json_patch(subject.namespace, f"networkpolicy {name}", "add", *_added(closing[0], rule))
    yield Finding(
        Code.NETWORK_POLICY_BY_NUMBER,
        Effect.BREAKS,
        f"NetworkPolicy {name} selects pods for their sidecar, and no policy admits a caller to port {found.data}; "
        "without a sidecar these pods are open to all",
        f"{command}; or name the callers in the chart's value networkPolicy.sidecarNamespaces",
    )


def _added(policy: Json, rule: Json) -> tuple[str, object]:
    """Return path and value by which a policy gets one more rule."""
    return ("/spec/ingress/-", rule) if policy["spec"].get("ingress") else ("/spec/ingress", [rule])


def _egress(subject: Subject, pod: Json, found: Ports, near: Around, addresses: Sequence[str]) -> Iterator[Finding]:
    """Find callers, of any namespace, that may send to the model's port and not to the sidecar's.

    Blocks of addresses are for this model where they hold a pod that runs; where none runs, nobody knows.
    """
    named, anywhere = named_ports(pod), Peer(near.labels, pod["metadata"].get("labels") or {})
    running = anywhere._replace(addresses=tuple(addresses))
    rules = [
        rule
        for policy in near.policies
        if "Egress" in _types(policy)
        for rule in _rules(policy, subject, "egress")
        if _leads_to(rule, running) or (not addresses and any(peer.get("ipBlock") for peer in rule.peers))
    ]
    for rule in rules:
        if not rule.admits(found.model, named):
            continue
        others = [each for each in rules if each.admits(found.data, named) and _same_callers(each, rule)]
        if any(_leads_to(each, anywhere) or each.includes(rule) for each in others):
            continue
        message = (
            f"the pods that NetworkPolicy {rule.policy['metadata']['name']} of namespace {rule.namespace} selects may "
            f"send to port {found.model} and not to {found.data}, to which Services by name lead then"
        )
        effect, fix = Effect.BREAKS, rule.patched(found.data)
        if not _leads_to(rule, running):
            effect, message = Effect.NOTE, f"{message}. That is for addresses; those of the model's pods are not known"
            fix = f"if its pods get such addresses: {fix}"
        yield Finding(Code.NETWORK_POLICY_BY_NUMBER, effect, message, fix)


def _leads_to(rule: Rule, pod: Peer) -> bool:
    """Whether a rule surely admits a pod; of one without addresses, wherever it runs."""
    return not rule.peers or any(rule.selects(each, pod) for each in rule.peers)


def _same_callers(other: Rule, rule: Rule) -> bool:
    """Whether the policy of ``other`` selects all pods that the policy of ``rule`` does."""
    outer, inner = (each.policy["spec"].get("podSelector") or {} for each in (other, rule))
    return other.namespace == rule.namespace and _requirements(outer) <= _requirements(inner)


def _selecting(subject: Subject, pod: Json, near: Around) -> Iterator[Json]:
    """Yield the policies by which a pod admits only what they name."""
    labels = pod["metadata"].get("labels") or {}
    for policy in near.policies:
        here = "Ingress" in _types(policy) and _namespace(policy, subject) == subject.namespace
        if here and _selector(policy["spec"].get("podSelector")).matches(labels):
            yield policy


def _rules(policy: Json, subject: Subject, way: str) -> Iterator[Rule]:
    for place in range(len(policy["spec"].get(way) or [])):
        yield Rule(policy, _namespace(policy, subject), way, place)


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
    """Whether one peer is surely part of another. A selector that demands less selects more."""
    if "ipBlock" in outer or "ipBlock" in inner:
        return "ipBlock" in outer and "ipBlock" in inner and _block_includes(outer["ipBlock"], inner["ipBlock"])
    return all(
        _requirements(outer[each]) <= _requirements(inner[each]) for each in ("namespaceSelector", "podSelector")
    )


def _requirements(selector: Json) -> set[tuple[str, str, tuple[str, ...]]]:
    labels = {(key, "In", (value,)) for key, value in (selector.get("matchLabels") or {}).items()}
    return labels | {
        (each["key"], each["operator"], tuple(sorted(each.get("values") or [])))
        for each in selector.get("matchExpressions") or []
    }


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
