"""What a preflight reports."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import NamedTuple


class Effect(StrEnum):
    """What follows if nothing is done about a finding."""

    BREAKS = "breaks"
    """Something that works now would not."""
    NO_BATCHING = "no batching"
    """All works as now, but some or all requests are not batched, or not tuned."""
    NOTE = "note"
    """To be known."""


class Code(StrEnum):
    """What was found. Reasons for which the injector leaves a pod alone are codes, too."""

    REFUSED = "Refused"
    REFUSED_ALREADY = "RefusedAlready"
    NO_ROOM_FOR_DRY_RUN = "NoRoomForDryRun"
    NO_ROOM_FOR_ALL = "NoRoomForAll"
    NOT_ASKED = "NotAsked"
    NO_POD = "NoPod"
    SERVICE_BY_NUMBER = "ServiceByNumber"
    HEADLESS_SERVICE = "HeadlessService"
    INFERENCE_POOL = "InferencePoolByNumber"
    NETWORK_POLICY_BY_NUMBER = "NetworkPolicyByNumber"
    ADMIN_PORT_CLOSED = "AdminPortClosed"
    MESH_POLICY_BY_NUMBER = "MeshPolicyByNumber"
    NOT_LOOKED_AT = "NotLookedAt"
    KSERVE_RAW = "KServeRaw"
    KNATIVE = "Knative"
    MESH = "Mesh"
    HPA_ON_PERCENTAGE = "HPAOnPercentage"
    NO_READINESS_PROBE = "NoReadinessProbe"
    PRE_STOP_KEPT = "PreStopKept"


class Finding(NamedTuple):
    """One line: what is the matter, and the command, or the words, that put it right."""

    code: str
    effect: Effect
    message: str
    fix: str


def compact(plain: object) -> str:
    """Write JSON without blanks, as a command has it."""
    return json.dumps(plain, separators=(",", ":"))


def json_patch(namespace: str, resource: str, operation: str, path: str, value: object) -> str:
    """Return the command that changes one place of an object; ``resource`` names that as kubectl does: ``hpa web``.

    ``namespace``: ``""`` for what is the cluster's.
    """
    change = [{"op": operation, "path": path, "value": value}]
    kubectl = f"kubectl -n {namespace}" if namespace else "kubectl"
    return f"{kubectl} patch {resource} --type=json -p '{compact(change)}'"
