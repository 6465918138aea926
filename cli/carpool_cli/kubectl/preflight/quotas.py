"""Room in a namespace's quotas for sidecars in all pods of a workload; the injector checks one pod at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from carpool_cli.kubectl.preflight.ways import LEAST
from carpool_cli.manifest_checks.findings import Code, Effect, Finding, compact
from carpool_operator.injector.quotas import counts, hard, measured
from carpool_operator.injector.resources import amount, amount_text, total

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from carpool_cli.manifest_checks.objects import Json, Subject


def room_for_all(
    subject: Subject, plain: Json, pod: Json, least: Json | None, *, pods: Sequence[Json], quotas: Sequence[Json]
) -> Iterator[Finding]:
    """Find quotas that have room for some of a workload's pods with sidecars, but not for all.

    ``plain`` and ``pod``: one without a sidecar and with it; ``least``: with the smallest sidecar. ``pods``: the
    running pods, which the quotas count.
    """
    if not quotas:
        return
    replicas = subject.kind.state(msgspec.convert(subject.manifest, subject.kind.raw)).replicas or len(pods)
    for quota in quotas:
        if not counts(quota, pod["spec"]):
            continue
        limits, used = hard(quota), (quota.get("status") or {}).get("used") or {}
        for key, kind, resource in measured(limits):
            own = sum(total(each["spec"], kind, resource) for each in pods)
            limit = amount(limits[key], resource)
            free = max(0, limit - max(0, amount(used.get(key, 0), resource) - own))
            each, before = total(pod["spec"], kind, resource), total(plain["spec"], kind, resource)
            if each <= before or replicas * each <= free:
                continue
            # As the injector does: a sidecar for each pod while there is room, then pods without one.
            injected = free // each
            others = _fitting(free - injected * each, before, replicas - injected)
            lost = _fitting(free, before, replicas) - injected - others
            name = quota["metadata"]["name"]
            message = (
                f"ResourceQuota {name} leaves {amount_text(free, resource)} of {key} to its {replicas} pods, which "
                f"need {amount_text(replicas * each, resource)} with sidecars: {injected} would get one, {others} "
                f"would start without, and {replicas - injected - others} would be refused"
            )
            more = {"spec": {"hard": {key: amount_text(limit + replicas * each - free, resource)}}}
            fix = f"{subject.kubectl} patch resourcequota {name} --type=merge -p '{compact(more)}'"
            if least is not None and replicas * total(least["spec"], kind, resource) <= free:
                fix = f"{subject.annotate_pods(LEAST)} asks for the least; or {fix}"
            yield Finding(Code.NO_ROOM_FOR_ALL, Effect.BREAKS if lost > 0 else Effect.NO_BATCHING, message, fix)


def _fitting(free: int, each: int, wanted: int) -> int:
    """Return how many of the desired pods fit."""
    return wanted if each <= 0 else min(wanted, free // each)
