"""Service meshes: those with a proxy outside the pod, and mesh rules that name the model's port by number."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from carpool_cli.kubectl.preflight.scene import AUTHORIZATIONS, SERVERS
from carpool_cli.manifest_checks.findings import Code, Effect, Finding, compact, json_patch
from carpool_cli.manifest_checks.objects import NAME, Around, Json, Ports, Subject
from carpool_operator.injector.bypass import named_ports, port_name
from carpool_operator.injector.meshes import ISTIO, LINKERD, meshes_of
from carpool_operator.workloads.metadata import Selector

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = "istio-system"
"""Namespace whose AuthorizationPolicies apply to all namespaces, unless Istio is configured otherwise."""

JUDGING = frozenset({"ALLOW", "DENY", "CUSTOM"})
"""Actions that admit or reject requests; AUDIT only logs them."""

OF_PORT = "destination.port"
"""Key of a condition on the port."""


class Listed(NamedTuple):
    """Ports that a rule of an AuthorizationPolicy lists. ``path``: the place of the list."""

    path: str
    ports: list[str]
    rule: Json
    operation: Json | None = None
    """The operation with these ``ports``; ``None`` for excluded ports, or a condition's."""


def ambient(pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    """Find a mesh with a proxy outside the pod; for other meshes the injector excludes the admin port."""
    labels = {**near.labels, **(pod["metadata"].get("labels") or {})}
    if labels.get("istio.io/dataplane-mode") == "ambient":
        yield Finding(
            Code.MESH,
            Effect.NOTE,
            "Istio's ambient mode stands before the pod: where mTLS is STRICT, the operator can't reach port "
            f"{found.admin}",
            "have the operator's namespace in the mesh: kubectl label namespace "
            f"{near.operators[0].namespace[NAME]} istio.io/dataplane-mode=ambient",
        )


def authorizations(subject: Subject, pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    """Find Istio's rules for the model's port, by number, that don't apply to the sidecar's."""
    if ISTIO not in meshes_of(pod, near.labels, near.annotations):
        return
    labels = pod["metadata"].get("labels") or {}
    model, data = str(found.model), str(found.data)
    policies = [each for each in near.authorizations if _concerns(each, subject, labels)]
    for policy in policies:
        alike = [
            rule for each in policies if _action(each) == _action(policy) for rule in each["spec"].get("rules") or []
        ]
        for listed in _lists(policy):
            if model not in listed.ports or data in listed.ports:
                continue
            if listed.operation is not None and any(_as_wide(rule, listed, data) for rule in alike):
                continue
            namespace, name = policy["metadata"].get("namespace", subject.namespace), policy["metadata"]["name"]
            yield Finding(
                Code.MESH_POLICY_BY_NUMBER,
                Effect.BREAKS,
                f"Istio's AuthorizationPolicy {name} ({_action(policy)}) names port {model} and not {data}, to which "
                "requests come then",
                json_patch(namespace, f"{AUTHORIZATIONS} {name}", "add", f"{listed.path}/-", data),
            )


def servers(subject: Subject, pod: Json, found: Ports, near: Around) -> Iterator[Finding]:
    """Find Linkerd's Servers for the model's port, by number, if none is for the sidecar's."""
    if LINKERD not in meshes_of(pod, near.labels, near.annotations):
        return
    labels = pod["metadata"].get("labels") or {}
    names = named_ports(pod)
    mine = [
        each
        for each in near.servers
        if "podSelector" in each["spec"]
        and msgspec.convert(each["spec"]["podSelector"] or {}, Selector).matches(labels)
    ]
    by_port = {each["metadata"]["name"]: each["spec"]["port"] for each in mine}
    if any(names.get(port, port) == found.data for port in by_port.values()):
        return
    # A changed number would remove it from the model's port: the namespace's default policy would apply there until the
    # pods roll.
    leads = port_name(pod, subject.namespace, subject.manifest)
    change = compact({"spec": {"port": leads.name}})
    for name, port in by_port.items():
        if port == found.model:
            yield Finding(
                Code.MESH_POLICY_BY_NUMBER,
                Effect.BREAKS,
                f"Linkerd's Server {name} is for port {found.model} and none is for {found.data}, to which requests "
                "come then: what it allows is not allowed there",
                f"{leads.first}{subject.kubectl} patch {SERVERS} {name} --type=merge -p '{change}'",
            )


def _concerns(policy: Json, subject: Subject, labels: Json) -> bool:
    """Whether a policy applies to a pod itself, and not to a gateway or a waypoint before it."""
    spec, namespace = policy.get("spec") or {}, policy["metadata"].get("namespace", subject.namespace)
    if namespace not in {subject.namespace, ROOT} or spec.get("targetRef") or spec.get("targetRefs"):
        return False
    selector = (spec.get("selector") or {}).get("matchLabels") or {}
    return bool(spec.get("rules")) and _action(policy) in JUDGING and selector.items() <= labels.items()


def _action(policy: Json) -> str:
    return str(policy["spec"].get("action") or "ALLOW")


def _lists(policy: Json) -> Iterator[Listed]:
    for index, rule in enumerate(policy["spec"]["rules"]):
        path = f"/spec/rules/{index}"
        for place, to in enumerate(rule.get("to") or []):
            operation = to.get("operation") or {}
            where = f"{path}/to/{place}/operation"
            yield Listed(f"{where}/ports", operation.get("ports") or [], rule, operation)
            yield Listed(f"{where}/notPorts", operation.get("notPorts") or [], rule)
        for place, condition in enumerate(rule.get("when") or []):
            if condition.get("key") == OF_PORT:
                for key in ("values", "notValues"):
                    yield Listed(f"{path}/when/{place}/{key}", condition.get(key) or [], rule)


def _as_wide(rule: Json, listed: Listed, port: str) -> bool:
    """Whether a rule covers for a port all that another rule covers for its listed ports."""
    if any(rule.get(key) and rule[key] != listed.rule.get(key) for key in ("from", "when")):
        return False
    operations: list[Json] = [each.get("operation") or {} for each in rule.get("to") or [{}]]
    return any(_operation_as_wide(each, listed.operation or {}, port) for each in operations)


def _operation_as_wide(outer: Json, inner: Json, port: str) -> bool:
    others = {key: value for key, value in outer.items() if key != "ports" and value}
    admits = not outer.get("ports") or port in outer["ports"]
    return (
        admits
        and port not in (outer.get("notPorts") or [])
        and all(inner.get(key) == each for key, each in others.items())
    )
