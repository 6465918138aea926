"""The findings that a preflight reports."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import NamedTuple


class Effect(StrEnum):
    """The effect of ignoring a finding."""

    BREAKS = "breaks"
    """Something that works now would fail."""
    NO_BATCHING = "no batching"
    """Everything works as now, but some or all requests are not batched, or not tuned."""
    NOTE = "note"
    """For information."""


class Code(StrEnum):
    """The kind of finding. The injector's reasons for skipping a pod are codes, too."""

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
    """One line: the problem, and the command or the words that fix it."""

    code: str
    effect: Effect
    message: str
    fix: str


def compact(plain: object) -> str:
    """Format JSON without blanks, for a command."""
    return json.dumps(plain, separators=(",", ":"))


def json_patch(namespace: str, resource: str, operation: str, path: str, value: object) -> str:
    """Return the command that changes one place of an object; ``resource`` is its name for kubectl: ``hpa web``.

    ``namespace``: ``""`` for cluster-wide objects.
    """
    change = [{"op": operation, "path": path, "value": value}]
    kubectl = f"kubectl -n {namespace}" if namespace else "kubectl"
    return f"{kubectl} patch {resource} --type=json -p '{compact(change)}'"
