"""Finds policies that treat callers of the sidecar differently from callers of the model, or block the operator.

All policies of a cluster are evaluated together: tier by tier, and in each tier's order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_cli.manifest_checks.findings import Code, Effect, Finding, json_patch
from carpool_cli.manifest_checks.network import admin, calico, cilium, kubernetes
from carpool_cli.manifest_checks.network.rules import DEFAULT, Rule
from carpool_cli.manifest_checks.network.tiers import (
    Tier,
    decides,
    gets_in,
    is_let_in_before,
    may_be_refused_later,
    reached,
    tiers_of,
)
from carpool_cli.manifest_checks.objects import NAME, OPERATOR, Around, Json, Peer, Ports, Subject, peer_of
from carpool_operator.api.annotations import INJECTED
from carpool_operator.injector.bypass import named_ports

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def understood(near: Around) -> Around:
    """Return the policies without unsupported ones, and the titles of those."""
    readable, broken = [], []
    for of, policies in ((cilium, near.cilium), (calico, near.calico), (admin, near.admin)):
        readable.append([policy for policy in policies if of.is_understood(policy, near)])
        broken += [of.title(policy) for policy in policies if not of.is_understood(policy, near)]
    return near._replace(cilium=readable[0], calico=readable[1], admin=readable[2], not_understood=broken)


def network_policies(
    subject: Subject, pod: Json, found: Ports, near: Around, addresses: Sequence[str]
) -> Iterator[Finding]:
    """Find callers that reach the model's port, by its number, but not the sidecar's port, or only the latter.

    ``addresses``: those of the running pods.
    """
    tiers = tiers_of(subject, pod, near)
    yield from _treated_otherwise(tiers, pod, found)
    yield from _closed_to_all(subject, pod, found, near)
    yield from _egress(subject, pod, found, near, addresses)


def admin_port(subject: Subject, pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    """Find policies that block the operator from the sidecar's admin port."""
    tiers, named = tiers_of(subject, pod, near), named_ports(pod)
    for operator in near.operators:
        outcome = reached(tiers, operator, found.admin, named)
        if not outcome.refused:
            continue
        home = operator.namespace[NAME]
        message = (
            f"the operator, in namespace {home}, can't reach port {found.admin} of the sidecar: {outcome.refused}, so "
            "nothing is tuned"
        )
        fix = f"let {outcome.by} admit it" if outcome.by else _admitting(subject, pod, found, near, home)
        if outcome.admitted:
            yield Finding(Code.ADMIN_PORT_CLOSED, Effect.NOTE, *_unless(message, fix))
        else:
            yield Finding(Code.ADMIN_PORT_CLOSED, Effect.NO_BATCHING, message, fix)
        return


def _admitting(subject: Subject, pod: Json, found: Ports, near: Around, home: str) -> str:
    """Return how the operator can reach the admin port, by the pod's own policy or the chart's."""
    value = f"add {{name: {subject.namespace}, callers: []}} to the chart's value networkPolicy.sidecarNamespaces"
    own = next(kubernetes.selecting(subject, pod, near), None)
    if own is None:
        return value
    peer = {"namespaceSelector": {"matchLabels": {NAME: home}}, "podSelector": {"matchLabels": OPERATOR}}
    rule = {"ports": [{"port": found.admin, "protocol": "TCP"}], "from": [peer]}
    resource = f"networkpolicy {own['metadata']['name']}"
    return f"{json_patch(subject.namespace, resource, 'add', *_added(own, rule))}; or {value}"


def _treated_otherwise(tiers: list[Tier], pod: Json, found: Ports) -> Iterator[Finding]:
    """Find rules by number that treat callers of the sidecar's port differently from those of the model's."""
    named = named_ports(pod)
    rules = [rule for tier in tiers for rule in tier.rules]
    for rule in sorted(rules, key=lambda rule: rule.denies):
        words = _differs(rule, found, named)
        if not words:
            continue
        if rule.covers(found.model, named):
            before = _named_before(found, named)
            does_decide, sure = decides(tiers, rule, found.model, before)
            get_in, surely = gets_in(tiers, rule, found.model, found.data, named, before)
            left = may_be_refused_later(tiers, rule, found.model, before)
        else:
            does_decide, sure = decides(tiers, rule, found.data, named)
            get_in, surely = gets_in(tiers, rule, found.data, found.model, named)
            left = False
        if does_decide and get_in and left and is_let_in_before(tiers, rule, found.data, named):
            words = (
                f"leaves port {found.model} to later policies and not {found.data}, at which the sidecar is: callers "
                "that those keep out would get in"
            )
        elif not does_decide or get_in != rule.denies:
            continue
        yield _by_number(f"{rule.title} {words}", _patched(rule, found, named), sure=sure and surely)


def _differs(rule: Rule, found: Ports, named: dict[str, int]) -> str:
    """Return how a rule matches only one of the two ports; ``""``: it does not, or only to open the sidecar's."""
    model, data = (rule.covers(port, named) for port in (found.model, found.data))
    if model and not data:
        if rule.denies:
            return (
                f"denies port {found.model} and not {found.data}, at which the sidecar is: callers that it keeps out "
                "would get in"
            )
        return f"admits port {found.model} and not {found.data}, at which the sidecar is"
    if data and not model:
        if rule.denies and _by_name(rule, found):
            return (
                f"denies the port by its name, which is the sidecar's then, and not port {found.model}: callers that "
                "it keeps out would get in"
            )
        if rule.denies:
            all_but = f"all but port {found.model}, and so {found.data}" if rule.leaves_out(found.model) else ""
            return f"denies {all_but or f'port {found.data} and not {found.model}'}, at which the sidecar is"
        if rule.leaves_out(found.model):
            return (
                f"leaves out port {found.model} and not {found.data}, at which the sidecar is: callers that it keeps "
                "out would get in"
            )
    return ""


def _named_before(found: Ports, named: dict[str, int]) -> dict[str, int]:
    """Return a pod's ports by name without a sidecar: the name on the sidecar's port was on the model's."""
    return {name: found.model if port == found.data else port for name, port in named.items()}


def _by_name(rule: Rule, found: Ports) -> bool:
    """Whether a rule matches the sidecar's port by its name."""
    return not rule.covers(found.data, {})


def _patched(rule: Rule, found: Ports, named: dict[str, int]) -> str:
    """Return the fix for a rule that matches only one of the two ports."""
    if not rule.denies or rule.covers(found.model, named) or rule.leaves_out(found.model):
        return rule.patched(found.data, found.model, named)
    if _by_name(rule, found):
        return rule.patched(found.model, found.data, named)
    return f"change {rule.title} so that it does not deny port {found.data}"


def _by_number(message: str, fix: str, *, sure: bool = True) -> Finding:
    if sure:
        return Finding(Code.NETWORK_POLICY_BY_NUMBER, Effect.BREAKS, message, fix)
    return Finding(Code.NETWORK_POLICY_BY_NUMBER, Effect.NOTE, *_unless(message, fix))


def _unless(message: str, fix: str) -> tuple[str, str]:
    """Return message and fix for an uncertain finding."""
    return (
        f"{message}. That may be otherwise: policies go by what is not looked at, such as labels of service accounts",
        f"if that is so: {fix}",
    )


def _closed_to_all(subject: Subject, pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    """Find policies that select a pod because of its sidecar, and admit no caller: before, everyone had access."""
    metadata = pod["metadata"]
    labels = {key: value for key, value in (metadata.get("labels") or {}).items() if key != INJECTED}
    before = {**pod, "metadata": {**metadata, "labels": labels}}
    own, now, named = (
        next(kubernetes.selecting(subject, pod, near), None),
        tiers_of(subject, pod, near),
        named_ports(pod),
    )
    admitted = any(not rule.denies and rule.covers(found.data, named) for tier in now for rule in tier.rules)
    closed = any(tier.closing or tier.perhaps for tier in tiers_of(subject, before, near))
    if own is None or closed or admitted:
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
    """Return path and value that add a rule to a NetworkPolicy."""
    return ("/spec/ingress/-", rule) if policy["spec"].get("ingress") else ("/spec/ingress", [rule])


def _egress(subject: Subject, pod: Json, found: Ports, near: Around, addresses: Sequence[str]) -> Iterator[Finding]:
    """Find callers, of any namespace, whose egress is allowed to one of both ports and not to the other.

    Blocks of addresses match this model if they contain a running pod; if none runs, that is unknown.
    """
    named, anywhere = named_ports(pod), peer_of(near.labels, pod)._replace(addresses=())
    running = anywhere._replace(addresses=tuple(addresses))
    sending = [*kubernetes.egress(subject, near), *cilium.egress(near), *calico.egress(near), *admin.egress(near)]
    rules = sorted(
        (rule for rule in sending if rule.reaches(running) or (not addresses and rule.by_address)),
        key=lambda rule: (rule.tier, rule.order),
    )
    for rule in rules:
        was = _named_before(found, named) if rule.covers(found.model, named) else named
        # Traffic that an administrator's rule passes on is decided by later tiers: they treat both ports alike.
        leaves = rule.passes and isinstance(rule, admin.AdminRule)
        until = [each for each in rules if each.tier <= rule.tier] if leaves else rules
        model = _may_send(rule, until, found.model, was, anywhere)
        data = _may_send(rule, until, found.data, named, anywhere)
        message, sure = _cut_off(rule, rules, found, named, model=model, data=data)
        if not message:
            continue
        whose = f" of namespace {rule.namespace}" if rule.namespace else ""
        message = f"the pods that {rule.title}{whose} selects {message}"
        effect, fix = Effect.BREAKS, _patched(rule, found, named)
        if not rule.reaches(running):
            effect, message = Effect.NOTE, f"{message}. That is for addresses; those of the model's pods are not known"
            fix = f"if its pods get such addresses: {fix}"
        elif not sure:
            effect, message = Effect.NOTE, f"{message}. That may be otherwise: it depends on what else selects them"
            fix = f"if that is so: {fix}"
        yield Finding(Code.NETWORK_POLICY_BY_NUMBER, effect, message, fix)


def _cut_off(
    rule: Rule, rules: Sequence[Rule], found: Ports, named: dict[str, int], *, model: bool | None, data: bool | None
) -> tuple[str, bool]:
    """Return how a rule's callers lose access to the sidecar, or gain it, and whether that is certain.

    ``model``, ``data``: whether they may send to that port; None if only other policies decide.
    """
    covers_model, covers_data = rule.covers(found.model, named), rule.covers(found.data, named)
    if covers_model == covers_data:
        return "", True
    # Pods admit everything not rejected, unless a namespace's policy selects them.
    closed = not isinstance(rule, admin.AdminRule)
    opened = not closed or any(not each.denies and _covers_either(each, found, named) for each in rules)
    leads = "to which Services by name lead then"
    if covers_model and not rule.denies:
        # Without an own rule these ports are open; a pass matters where the tier would otherwise reject.
        open_anyway = not closed and data is None and (rule.passes or rule.tier > DEFAULT)
        cut = model is not False and data is not True and not open_anyway
        words = f"may send to port {found.model} and not to {found.data}, {leads}"
        return words if cut else "", closed or data is False
    if covers_model:
        words = f"may not send to port {found.model}, and may to {found.data}, {leads}: they would get in"
        return words if model is not True and (data or (data is None and opened)) else "", True
    if rule.denies:
        words = f"may not send to port {found.data}, {leads}, and may to {found.model}"
        if _by_name(rule, found):
            words = (
                f"may not send to the port of that name, which is the sidecar's then, and may to {found.model}: they "
                "would get in"
            )
        return words if data is not True and (model or (model is None and opened)) else "", True
    return "", True


def _covers_either(rule: Rule, found: Ports, named: dict[str, int]) -> bool:
    return rule.covers(found.model, named) or rule.covers(found.data, named)


def _may_send(rule: Rule, rules: Sequence[Rule], port: int, named: dict[str, int], pod: Peer) -> bool | None:
    """Whether all pods that a rule matches surely may, or may not, send to a port of this one; None: undecided."""
    left = None
    for each in rules:
        if each.tier == left or not each.covers(port, named):
            continue
        if each is rule or (each.for_all_pods_of(rule) and (each.reaches(pod) or each.includes(rule))):
            if not each.passes or each.tier >= rule.tier:
                return not each.denies
            left = each.tier
    return None
