"""Whose a workload is: at most one policy tunes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_operator.api.annotations import SLO_PREFIX
from carpool_operator.api.model import Policy, Target

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from carpool_operator.api.spec import PolicySpec


def targets_of(namespace: str, spec: PolicySpec) -> list[Target]:
    """Return the workloads that a spec names, in its order; they lie in the policy's own namespace."""
    return [Target(namespace, str(ref.kind), ref.name) for ref in spec.target_refs]


def assign(policies: Iterable[Policy]) -> dict[Target, Policy]:
    """Say which policy each target belongs to.

    One that a person wrote beats one kept for annotations; then the older wins, then the name that sorts first: an
    order that no restart and no order of events changes. A policy that cannot be read claims nothing.
    """
    owners: dict[Target, Policy] = {}
    for policy in policies:
        if policy.spec is None:
            continue
        for target in targets_of(policy.namespace, policy.spec):
            owner = owners.get(target)
            if owner is None or _precedence(policy) < _precedence(owner):
                owners[target] = policy
    return owners


def _precedence(policy: Policy) -> tuple[bool, float, str]:
    return policy.annotated, policy.created, policy.name


def conflicts(policy: Policy, targets: Iterable[Target], owners: Mapping[Target, Policy]) -> str:
    """Say which of a policy's targets belong to others, why, and what to do; ``""`` where none does."""
    lost = [(target, owner) for target in targets if (owner := owners[target]).uid != policy.uid]
    if not lost:
        return ""
    parts = []
    for target, owner in lost:
        if policy.annotated and not owner.annotated:
            why = "which was written by hand and so takes precedence over this one, made from annotations"
        elif owner.created < policy.created:
            why = "which is older"
        else:
            why = "which is as old and comes first by name"
        parts.append(f"{target.kind} {target.name} belongs to BatchingPolicy {owner.name}, {why}")
    if policy.annotated:
        # Deleted, it would be made again.
        return f"{'; '.join(parts)}. Delete that one, or take the annotations {SLO_PREFIX}* off the workload"
    return f"{'; '.join(parts)}. Delete one of the two, or take the target out of its targetRefs"
