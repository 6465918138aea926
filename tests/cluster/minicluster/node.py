"""The node: says that it is there, takes the pods that no node has yet, runs those that are its own."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from minicluster import kubelet
from minicluster.client import STRATEGIC, Client
from minicluster.controlplane import ADDRESS
from minicluster.pod import Place, PodRunner
from minicluster.sources import Sources
from minicluster.status import stamp

if TYPE_CHECKING:
    from pathlib import Path

NAME = "node-1"
LABELS = {"kubernetes.io/hostname": NAME, "kubernetes.io/os": "linux"}
log = logging.getLogger("node")


class Node:
    """One node, its scheduler included: it has room for every pod whose nodeSelector it fits."""

    def __init__(self, client: Client, folder: Path) -> None:
        self._client = client
        self._place = Place(client, Sources(client), folder, NAME)
        self._runners: dict[str, PodRunner] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def register(self) -> None:
        """Make the Node object. There are no heartbeats: the controller that wants them is not started."""
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NAME, "labels": LABELS}}
        await self._client.call("POST", "/api/v1/nodes", node)
        room = {"cpu": str(1000), "memory": "1Ti", "pods": "10000"}
        now = stamp(time.time())
        ready = {"type": "Ready", "status": "True", "reason": "NodeReady", "lastTransitionTime": now}
        status = {
            "capacity": room,
            "allocatable": room,
            "conditions": [{**ready, "lastHeartbeatTime": now}],
            "addresses": [{"type": "InternalIP", "address": ADDRESS}, {"type": "Hostname", "address": NAME}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet.PORT}},
            "nodeInfo": {"kubeletVersion": "v1.35.4", "operatingSystem": "linux", "architecture": os.uname().machine},
        }
        await self._client.call("PATCH", f"/api/v1/nodes/{NAME}/status", {"status": status}, kind=STRATEGIC)
        # The API server taints what is new; nobody but us would take it off.
        await self._client.call("PATCH", f"/api/v1/nodes/{NAME}", {"spec": {"taints": None}}, kind=STRATEGIC)
        await kubelet.serve(self._place.folder, self._find)

    async def run(self) -> None:
        """Schedule and run pods for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._schedule())
            group.create_task(self._run_pods())

    def _find(self, namespace: str, name: str) -> PodRunner | None:
        for runner in self._runners.values():
            metadata = runner.pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, name):
                return runner
        return None

    async def _schedule(self) -> None:
        async for kind, pod in self._client.follow("/api/v1/pods", fieldSelector="spec.nodeName="):
            if kind not in {"ADDED", "MODIFIED"} or "deletionTimestamp" in pod["metadata"]:
                continue
            spec, metadata = pod["spec"], pod["metadata"]
            if spec.get("schedulingGates") or not spec.get("nodeSelector", {}).items() <= LABELS.items():
                continue
            binding = {
                "metadata": {"name": metadata["name"], "uid": metadata["uid"]},
                "target": {"kind": "Node", "name": NAME},
            }
            path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/binding"
            await self._client.insist("POST", path, binding)  # unless it was deleted meanwhile, or is bound already

    async def _run_pods(self) -> None:
        async for kind, pod in self._client.follow("/api/v1/pods", fieldSelector=f"spec.nodeName={NAME}"):
            if kind == "SYNCED":
                continue
            uid = pod["metadata"]["uid"]
            runner = self._runners.get(uid)
            if kind == "DELETED":
                if runner:
                    runner.gone()
            elif runner:
                runner.update(pod)
            else:
                runner = self._runners[uid] = PodRunner(pod, self._place)
                task = asyncio.create_task(self._run_pod(uid, runner))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _run_pod(self, uid: str, runner: PodRunner) -> None:
        with suppress(asyncio.CancelledError):
            try:
                await runner.run()
            except Exception:
                log.exception("a pod's runner failed")
        del self._runners[uid]
