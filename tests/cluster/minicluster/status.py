"""What a node says of a pod: the state of its containers, conditions and phase. Pure."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minicluster.client import Object


def stamp(seconds: float) -> str:
    """Return a time (epoch seconds) as the API writes it."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Container:
    """How a container of a pod does. ``state`` and ``last`` are as in its status."""

    def __init__(self, spec: Object, *, init: bool) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.init = init
        self.sidecar = init and spec.get("restartPolicy") == "Always"
        self.state: Object = {"waiting": {"reason": "PodInitializing"}}
        self.last: Object = {}
        self.restarts = 0
        self.started = False
        self.ready = False

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return "running" in self.state

    @property
    def exit_code(self) -> int | None:
        """Its exit code, None while it has none."""
        code: int | None = self.state.get("terminated", {}).get("exitCode")
        return code

    def wait(self, reason: str, message: str = "") -> None:
        """It does not run, and why."""
        if "terminated" in self.state:
            self.last = self.state
        self.state = {"waiting": {"reason": reason, "message": message} if message else {"reason": reason}}

    def run(self, now: float) -> None:
        """Its process has started."""
        self.state = {"running": {"startedAt": stamp(now)}}

    def end(self, code: int, now: float) -> None:
        """Its process has ended."""
        began = self.state.get("running", {}).get("startedAt", stamp(now))
        reason = "Error" if code else "Completed"
        self.state = {
            "terminated": {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": stamp(now)},
        }
        self.started = False
        # An init container that has done its work stays ready; all others are as long as they run.
        self.ready = self.init and not self.sidecar and code == 0

    def status(self) -> Object:
        """Return its entry in the pod's status."""
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": f"local://{self.spec['image']}",
            "state": self.state,
            "lastState": self.last,
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
        }


def pod_status(pod: Object, containers: Sequence[Container], ip: str, host: str, now: float, *, over: bool) -> Object:
    """Return a pod's status; ``over``: nothing of it runs or will."""
    inits = [one for one in containers if one.init]
    mains = [one for one in containers if not one.init]
    initialized = all(one.started if one.sidecar else one.exit_code == 0 for one in inits)
    ready = not over and initialized and all(one.ready for one in containers if not one.init or one.sidecar)
    gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates", ())]
    before = {one["type"]: one for one in pod.get("status", {}).get("conditions", ())}
    gated = all(before.get(gate, {}).get("status") == "True" for gate in gates)
    waiting = [one.name for one in containers if not one.ready and (not one.init or one.sidecar)]
    facts = {
        "PodReadyToStartContainers": (bool(ip) and not over, ""),
        "Initialized": (initialized or over, ""),
        "ContainersReady": (ready, f"containers with unready status: [{' '.join(waiting)}]"),
        "Ready": (ready and gated, f"containers with unready status: [{' '.join(waiting)}]"),
    }
    conditions = []
    for kind, (holds, message) in facts.items():
        word = "True" if holds else "False"
        old = before.get(kind, {})
        since = old["lastTransitionTime"] if old.get("status") == word else stamp(now)
        condition = {"type": kind, "status": word, "lastTransitionTime": since, "reason": None, "message": None}
        if message and not holds:
            condition |= {"reason": "ContainersNotReady", "message": message}
        conditions.append(condition)
    status: Object = {
        "phase": _phase(mains, over=over),
        "conditions": conditions,
        "hostIP": host,
        "hostIPs": [{"ip": host}],
        "startTime": pod.get("status", {}).get("startTime") or stamp(now),
        "initContainerStatuses": [one.status() for one in inits],
        "containerStatuses": [one.status() for one in mains],
    }
    if ip:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    return status


def _phase(mains: Sequence[Container], *, over: bool) -> str:
    if over:
        return "Succeeded" if all(one.exit_code == 0 for one in mains) else "Failed"
    begun = all(one.running or one.exit_code is not None or one.last for one in mains)
    return "Running" if begun else "Pending"
