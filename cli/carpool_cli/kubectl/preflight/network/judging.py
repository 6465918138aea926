"""Policies that admit callers to the model and not to the sidecar, or keep the operator from its admin port.

All policies that a cluster has add up, so all rules together are judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_cli.kubectl.preflight.findings import Code, Effect, Finding, json_patch
from carpool_cli.kubectl.preflight.network import calico, cilium, kubernetes
from carpool_cli.kubectl.preflight.network.rules import Policies
from carpool_cli.kubectl.preflight.scene import NAME, OPERATOR, peer_of
from carpool_operator.api.annotations import INJECTED
from carpool_operator.injector.bypass import named_ports

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from carpool_cli.kubectl.preflight.dry_run import Ports
    from carpool_cli.kubectl.preflight.network.rules import Rule
    from carpool_cli.kubectl.preflight.scene import Around, Json, Peer, Subject


def understood(near: Around) -> Around:
    """Return the same without policies that can't be read, and with their titles."""
    readable: dict[str, list[Json]] = {"cilium": [], "calico": []}
    broken = []
    for kind, of, policies in (("cilium", cilium, near.cilium), ("calico", calico, near.calico)):
        for policy in policies:
            if of.is_understood(policy):
                readable[kind].append(policy)
            else:
                broken.append(of.title(policy))
    return near._replace(cilium=readable["cilium"], calico=readable["calico"], not_understood=broken)


def network_policies(
    subject: Subject, pod: Json, found: Ports, near: Around, addresses: Sequence[str]
) -> Iterator[Finding]:
    """Find callers of the model's port, by its number, that the sidecar's port does not admit, or that it lets in.

    ``addresses``: those of the pods that run.
    """
    selecting = _selecting(subject, pod, near)
    if selecting.closing or selecting.perhaps:
        yield from _admitted(selecting, pod, found)
    yield from _denied(selecting, pod, found)
    yield from _closed_to_all(subject, pod, found, near)
    yield from _egress(subject, pod, found, near, addresses)


def admin_port(subject: Subject, pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    """Find policies that keep the operator from the sidecar's admin port."""
    selecting, named = _selecting(subject, pod, near), named_ports(pod)
    admitting = [rule for rule in selecting.rules if not rule.denies and rule.covers(found.admin, named)]
    closing = [*selecting.closing, *selecting.perhaps]
    shut_out = [each for each in near.operators if not any(rule.may_reach(each) for rule in admitting)]
    # A policy that may be for other pods has nothing to let in where it is.
    sure = [rule for rule in admitting if rule.certain or not selecting.closing]
    kept_out = shut_out or [each for each in near.operators if not any(rule.reaches(each) for rule in sure)]
    if not closing or not kept_out:
        return
    home = kept_out[0].namespace[NAME]
    value = f"add {{name: {subject.namespace}, callers: []}} to the chart's value networkPolicy.sidecarNamespaces"
    own = next(kubernetes.selecting(subject, pod, near), None)
    if own is not None:
        peer = {"namespaceSelector": {"matchLabels": {NAME: home}}, "podSelector": {"matchLabels": OPERATOR}}
        rule = {"ports": [{"port": found.admin, "protocol": "TCP"}], "from": [peer]}
        resource = f"networkpolicy {own['metadata']['name']}"
        value = f"{json_patch(subject.namespace, resource, 'add', *_added(own, rule))}; or {value}"
    message = (
        f"the operator, in namespace {home}, can't reach port {found.admin} of the sidecar: no rule of the policies "
        f"that select the pod ({', '.join(closing)}) admits it, so nothing is tuned"
    )
    if selecting.closing and shut_out:
        yield Finding(Code.ADMIN_PORT_CLOSED, Effect.NO_BATCHING, message, value)
    else:
        yield Finding(Code.ADMIN_PORT_CLOSED, Effect.NOTE, *_unless(message, value))


def _selecting(subject: Subject, pod: Json, near: Around) -> Policies:
    """Return what policies of all kinds say of a pod."""
    kinds = (
        kubernetes.ingress(subject, pod, near),
        cilium.ingress(subject, pod, near),
        calico.ingress(subject, pod, near),
    )
    return Policies(
        [each for kind in kinds for each in kind.closing],
        [each for kind in kinds for each in kind.rules],
        [each for kind in kinds for each in kind.perhaps],
    )


def _admitted(selecting: Policies, pod: Json, found: Ports) -> Iterator[Finding]:
    """Find rules by which callers get to the model's port, and not to the sidecar's."""
    named = named_ports(pod)
    admitting = [rule for rule in selecting.rules if not rule.denies]
    enough = [rule for rule in admitting if rule.covers(found.data, named)]
    for rule in admitting:
        if rule.covers(found.model, named) and not rule.covers(found.data, named):
            including = [other for other in enough if other.includes(rule)]
            if any(other.certain for other in including):
                continue
            message = f"{rule.title} admits port {found.model} and not {found.data}, at which the sidecar is"
            sure = bool(selecting.closing) and rule.certain and not including
            yield _by_number(message, rule.patched(found.data, found.model, named), sure=sure)
        elif rule.leaves_out(found.model) and rule.covers(found.data, named):
            message = (
                f"{rule.title} leaves out port {found.model} and not {found.data}, at which the sidecar is: callers "
                "that it keeps out would get in"
            )
            sure = bool(selecting.closing) and rule.certain
            yield _by_number(message, rule.patched(found.data, found.model, named), sure=sure)


def _denied(selecting: Policies, pod: Json, found: Ports) -> Iterator[Finding]:
    """Find rules that keep callers out of the model's port and not out of the sidecar's, or the other way round."""
    named = named_ports(pod)
    denying = [rule for rule in selecting.rules if rule.denies]
    # One that admits the model's port admits the sidecar's, too, as soon as it is put right.
    admitting = [rule for rule in selecting.rules if not rule.denies and _covers_either(rule, found, named)]
    for rule in denying:
        if any(each.certain and each.covers(found.model, named) and _decides(each, rule) for each in admitting):
            continue
        if rule.covers(found.model, named) and not rule.covers(found.data, named):
            including = [
                other
                for other in denying
                if other.covers(found.data, named)
                and other.includes(rule)
                # Such as a last rule that denies all: these callers were admitted before.
                and not any(each.includes(rule) and other.after(each) for each in admitting)
            ]
            if any(other.certain for other in including):
                continue
            message = (
                f"{rule.title} denies port {found.model} and not {found.data}, at which the sidecar is: callers that "
                "it keeps out would get in"
            )
            fix = rule.patched(found.data, found.model, named)
            yield _by_number(message, fix, sure=rule.certain and not including)
        elif rule.leaves_out(found.model) and rule.covers(found.data, named):
            message = f"{rule.title} denies all but port {found.model}, and so {found.data}, at which the sidecar is"
            yield _by_number(message, rule.patched(found.data, found.model, named), sure=rule.certain)


def _covers_either(rule: Rule, found: Ports, named: dict[str, int]) -> bool:
    return rule.covers(found.model, named) or rule.covers(found.data, named)


def _decides(first: Rule, later: Rule) -> bool:
    """Whether callers that a rule is for are surely treated by another before."""
    return later.after(first) and first.includes(later)


def _by_number(message: str, fix: str, *, sure: bool = True) -> Finding:
    if sure:
        return Finding(Code.NETWORK_POLICY_BY_NUMBER, Effect.BREAKS, message, fix)
    return Finding(Code.NETWORK_POLICY_BY_NUMBER, Effect.NOTE, *_unless(message, fix))


def _unless(message: str, fix: str) -> tuple[str, str]:
    """Return message and fix of what may be so."""
    return (
        f"{message}. That may be otherwise: policies go by what is not looked at, such as labels of service accounts",
        f"if that is so: {fix}",
    )


def _closed_to_all(subject: Subject, pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    """Find policies that select a pod for its sidecar alone, where they let no caller in: before, everybody could."""
    metadata = pod["metadata"]
    labels = {key: value for key, value in (metadata.get("labels") or {}).items() if key != INJECTED}
    before = {**pod, "metadata": {**metadata, "labels": labels}}
    own, now, named = (
        next(kubernetes.selecting(subject, pod, near), None),
        _selecting(subject, pod, near),
        named_ports(pod),
    )
    admitted = any(not rule.denies and rule.covers(found.data, named) for rule in now.rules)
    earlier = _selecting(subject, before, near)
    if own is None or earlier.closing or earlier.perhaps or admitted:
        return
    name = own["metadata"]["name"]
    rule = {"ports": [{"port": found.data, "protocol": "TCP"}]}
    command = json_patch(subject.namespace, f"networkpolicy {name}", "add", *_added(own, rule))
    yield _by_number(
        f"NetworkPolicy {name} selects pods for their sidecar, and no policy admits a caller to port {found.data}; "
        "without a sidecar these pods are open to all",
        f"{command}; or name the callers in the chart's value networkPolicy.sidecarNamespaces",
    )


def _added(policy: Json, rule: Json) -> tuple[str, object]:
    """Return path and value by which a NetworkPolicy gets one more rule."""
    return ("/spec/ingress/-", rule) if policy["spec"].get("ingress") else ("/spec/ingress", [rule])


def _egress(subject: Subject, pod: Json, found: Ports, near: Around, addresses: Sequence[str]) -> Iterator[Finding]:
    """Find callers, of any namespace, that may send to the model's port and not to the sidecar's.

    Blocks of addresses are for this model where they hold a pod that runs; where none runs, nobody knows.
    """
    named, anywhere = named_ports(pod), peer_of(near.labels, pod)._replace(addresses=())
    running = anywhere._replace(addresses=tuple(addresses))
    sending = [*kubernetes.egress(subject, near), *cilium.egress(near), *calico.egress(near)]
    rules = [
        rule for rule in sending if not rule.denies and (rule.reaches(running) or (not addresses and rule.by_address))
    ]
    for rule in rules:
        if not rule.covers(found.model, named) or _may_send_anyway(rule, rules, found.data, named, anywhere):
            continue
        whose = f" of namespace {rule.namespace}" if rule.namespace else ""
        message = (
            f"the pods that {rule.title}{whose} selects may send to port {found.model} and not to {found.data}, to "
            "which Services by name lead then"
        )
        effect, fix = Effect.BREAKS, rule.patched(found.data, found.model, named)
        if not rule.reaches(running):
            effect, message = Effect.NOTE, f"{message}. That is for addresses; those of the model's pods are not known"
            fix = f"if its pods get such addresses: {fix}"
        yield Finding(Code.NETWORK_POLICY_BY_NUMBER, effect, message, fix)


def _may_send_anyway(rule: Rule, rules: Sequence[Rule], port: int, named: dict[str, int], pod: Peer) -> bool:
    """Whether another rule surely lets the same pods send to a port of this one."""
    others = [each for each in rules if each.covers(port, named) and each.for_all_pods_of(rule)]
    return any(each.reaches(pod) or each.includes(rule) for each in others)
