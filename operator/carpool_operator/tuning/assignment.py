"""Which policy tunes a workload: at most one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_operator.api.annotations import FORBIDDEN, INJECT, SLO_PREFIX, STATUS
from carpool_operator.api.model import Policy, Target
from carpool_operator.api.spec import MAX_SELECTED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from carpool_operator.api.model import Workload
    from carpool_operator.api.spec import PolicySpec


def named(namespace: str, spec: PolicySpec) -> list[Target]:
    """Return the workloads that a spec names, in its order; they are in the policy's own namespace."""
    return [Target(namespace, str(ref.kind), ref.name) for ref in spec.target_refs]


def select(
    policies: Iterable[Policy], workloads: Iterable[Workload], injected: Collection[Target] = ()
) -> dict[str, list[Target]]:
    """Return the workloads that policies select by label, by the policy's UID, in the order of their names.

    Those that opted out of sidecars are left out, once no pod of theirs has one (``injected``: those whose pods have).
    A policy that selects the others is complete without them. Of more than ``MAX_SELECTED``, the first ones are used.
    """
    selecting = [each for each in policies if each.spec is not None and each.spec.target_selector is not None]
    if not selecting:
        return {}
    by_namespace: dict[str, list[Workload]] = {}
    for workload in workloads:
        if not _opts_out(workload) or workload.target in injected:
            by_namespace.setdefault(workload.target.namespace, []).append(workload)
    return {
        policy.uid: sorted(
            each.target
            for each in by_namespace.get(policy.namespace, ())
            if policy.spec is not None
            and policy.spec.target_selector is not None
            and policy.spec.target_selector.selects(each.target.kind, each.labels)
        )[: MAX_SELECTED + 1]
        for policy in selecting
    }


def _opts_out(workload: Workload) -> bool:
    """Whether its annotations forbid a sidecar, and its template has none written by ``carpool inject``."""
    written = workload.template_annotations
    return FORBIDDEN in {workload.annotations.get(INJECT), written.get(INJECT)} and STATUS not in written


def targets_of(namespace: str, spec: PolicySpec, selected: Sequence[Target] = ()) -> list[Target]:
    """Return the workloads that a spec names, and then those that it selects."""
    by_name = named(namespace, spec)
    return by_name + [target for target in selected[:MAX_SELECTED] if target not in by_name]


def assign(policies: Iterable[Policy], selected: Mapping[str, Sequence[Target]] | None = None) -> dict[Target, Policy]:
    """Decide which policy owns each target.

    The more specific policy wins: first one written by a user that names the workload, then one kept for the workload's
    annotations, then one that selects it by label. Then the older one wins, then the name that sorts first: this order
    does not depend on restarts or on the order of events. A policy that cannot be read claims nothing.
    """
    owners: dict[Target, Policy] = {}
    chosen = selected or {}
    for policy in policies:
        if policy.spec is None:
            continue
        for target in targets_of(policy.namespace, policy.spec, chosen.get(policy.uid, ())):
            owner = owners.get(target)
            if owner is None or _precedence(policy, target) < _precedence(owner, target):
                owners[target] = policy
    return owners


def names_it(policy: Policy, target: Target) -> bool:
    """Whether a policy names a target, rather than selecting it."""
    return policy.spec is not None and target in named(policy.namespace, policy.spec)


def _precedence(policy: Policy, target: Target) -> tuple[bool, bool, float, str]:
    return not names_it(policy, target), policy.annotated, policy.created, policy.name


def conflicts(policy: Policy, targets: Iterable[Target], owners: Mapping[Target, Policy]) -> str:
    """Return which of a policy's targets belong to others, why, and the fix; ``""`` where none does.

    A selector does not conflict with more specific policies: it is meant to yield to them.
    """
    lost = [
        (target, owner)
        for target in targets
        if (owner := owners[target]).uid != policy.uid and (names_it(policy, target) or not names_it(owner, target))
    ]
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
        # If deleted, the operator would create it again.
        return f"{'; '.join(parts)}. Delete that one, or take the annotations {SLO_PREFIX}* off the workload"
    return f"{'; '.join(parts)}. Delete one of the two, or take the target out of its targetRefs or targetSelector"
