"""One pod on this node, from its network to its end: in which order its containers start, start again and stop."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import aiohttp

from minicluster import images
from minicluster.client import ApiError, Client, Object
from minicluster.container import Process, StartError
from minicluster.controlplane import ADDRESS, PORT
from minicluster.environment import ConfigError, command, environment, references
from minicluster.network import PodNetwork
from minicluster.probes import Actions, new_session, verdicts
from minicluster.sources import Key, Sources
from minicluster.status import Container, pod_status, stamp
from minicluster.volumes import Volumes

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from pathlib import Path

log = logging.getLogger("node.pod")

# Kubernetes waits 10 s doubled up to 300 s; tests have less time.
BACK_OFF, BACK_OFF_MOST = 1.0, 60.0
# A container that is to stop gets this long at least, however long its hook took.
LEAST_GRACE = 2.0


class Place(NamedTuple):
    """What the pods of a node share."""

    client: Client
    sources: Sources
    folder: Path  # the cluster's
    node: str


class _Unit:
    """A container with what drives it."""

    def __init__(self, spec: Object, *, init: bool) -> None:
        self.record = Container(spec, init=init)
        self.spec = spec
        self.process: Process | None = None
        self.actions: Actions | None = None
        self.began = asyncio.Event()  # it may be counted on: the next one's turn
        self.task: asyncio.Task[None] | None = None


class PodRunner:
    """Runs a pod; ``run`` returns when nothing of it is left here."""

    def __init__(self, pod: Object, place: Place) -> None:
        self.pod = pod
        self._place = place
        self._name, self._namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        self._uid = pod["metadata"]["uid"]
        self._path = f"/api/v1/namespaces/{self._namespace}/pods/{self._name}"
        self._folder = place.folder / "pods" / self._uid
        self._inits = [_Unit(spec, init=True) for spec in pod["spec"].get("initContainers", ())]
        self._mains = [_Unit(spec, init=False) for spec in pod["spec"]["containers"]]
        self._units = [*self._inits, *self._mains]
        self._volumes = Volumes(pod, self._folder / "volumes", place.client, place.sources)
        self._network: PodNetwork | None = None
        self._session: aiohttp.ClientSession | None = None
        self._dirty = asyncio.Event()  # the status has to be written
        self._changed = asyncio.Event()  # a ConfigMap or Secret changed
        self._deleted = asyncio.Event()
        self._gone = asyncio.Event()
        self._stopping = False
        self._over = False
        self._grace = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def update(self, pod: Object) -> None:
        """Take note of the pod as the API server has it now."""
        before, self.pod = self.pod, pod
        if before["metadata"].get("labels") != pod["metadata"].get("labels") or before["metadata"].get(
            "annotations"
        ) != pod["metadata"].get("annotations"):
            self._changed.set()
        if "deletionTimestamp" in pod["metadata"]:
            self._grace = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
            self._deleted.set()
        self._dirty.set()

    def gone(self) -> None:
        """The API server has no such pod any more: end what is left of it at once."""
        self._gone.set()

    @property
    def finished(self) -> bool:
        """Whether nothing of it runs any more."""
        return self._over

    def log(self, container: str, *, previous: bool) -> Path | None:
        """Return the file with a container's output; ``previous``: of the run before its last restart."""
        for unit in self._units:
            if unit.record.name == container:
                return log_file(self._place.folder, self.pod, unit.record, back=int(previous))
        return None

    async def run(self) -> None:
        """Run it until it is deleted, and report to the API server when nothing is left. Not to be cancelled."""
        await _first(self._spawn(self._run()), self._spawn(_wait(self._gone)))
        await self._clean_up()

    async def _run(self) -> None:
        writer = self._spawn(self._write_status())
        self.update(self.pod)
        life = self._spawn(self._live())
        deleted = self._spawn(_wait(self._deleted))
        await _first(life, deleted)
        life.cancel()
        await self._stop_all()
        self._over = True
        self._dirty.set()
        await deleted
        writer.cancel()
        await self._finish()

    async def _live(self) -> None:
        """Bring the pod up and return when its main containers have ended for good."""
        try:
            self._network = await PodNetwork.make()
            self._session = new_session()
            await self._prepare_volumes()
            self._spawn(self._renew_volumes())
            for unit in self._units:
                unit.task = self._spawn(self._supervise(unit))
                if not unit.record.init or unit.record.sidecar:
                    await _first(unit.task, self._spawn(_wait(unit.began)))
                else:
                    await asyncio.wait({unit.task})
                    if unit.record.exit_code != 0:
                        return  # an init container has failed for good, and the pod with it
            await asyncio.wait({unit.task for unit in self._mains if unit.task})
        except Exception:
            log.exception("pod %s/%s", self._namespace, self._name)
            raise

    # Volumes

    async def _prepare_volumes(self) -> None:
        """Return when all that the pod needs is there; say what is missing meanwhile."""
        keys = {Key(one.plural, self._namespace, one.name) for one in references(self.pod)}
        for key in keys:
            self._place.sources.use(key, self._changed)
        while True:
            if all(map(self._place.sources.known, keys)):
                try:
                    await self._volumes.write(self.pod)
                except ConfigError as error:
                    for unit in self._units:
                        unit.record.wait("ContainerCreating", str(error))
                    self._dirty.set()
                    await self._event("FailedMount", str(error))
                else:
                    return
            await self._changed.wait()
            self._changed.clear()

    async def _renew_volumes(self) -> None:
        while True:
            with suppress(TimeoutError):
                renew_in = self._volumes.renew_in()
                async with asyncio.timeout(None if renew_in == float("inf") else renew_in):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self._volumes.write(self.pod)
            except ConfigError as error:
                await self._event("FailedMount", str(error))  # what was there stays

    # Containers

    async def _supervise(self, unit: _Unit) -> None:
        """Keep a container running as its policy says; return when it has ended for good."""
        record, back_off = unit.record, 0.0
        policy = "Always" if record.sidecar else self.pod["spec"].get("restartPolicy", "Always")
        if record.init and not record.sidecar and policy == "Always":
            policy = "OnFailure"
        while True:
            if not await self._start(unit):
                await asyncio.sleep(max(back_off, BACK_OFF))
                back_off = min(max(2 * back_off, BACK_OFF), BACK_OFF_MOST)
                continue
            assert unit.process
            began = time.monotonic()
            care = self._spawn(self._care(unit))
            try:
                code = await unit.process.wait()
            finally:
                unit.process.kill()
                care.cancel()
            record.end(code, time.time())
            unit.process = None
            self._dirty.set()
            if self._stopping or policy == "Never" or (policy == "OnFailure" and code == 0):
                return
            if time.monotonic() - began > BACK_OFF_MOST:
                back_off = 0.0
            if back_off:
                record.wait("CrashLoopBackOff", f"back-off {back_off:g}s restarting failed container={record.name}")
                self._dirty.set()
                await asyncio.sleep(back_off)
            back_off = min(max(2 * back_off, BACK_OFF), BACK_OFF_MOST)
            record.wait("ContainerCreating")
            record.restarts += 1

    async def _start(self, unit: _Unit) -> bool:
        """Start a container's process, or say in its state why there is none."""
        spec, record = unit.spec, unit.record
        image = images.find(self._place.folder, spec["image"])
        if image is None:
            message = f'no image "{spec["image"]}": this node knows {", ".join(sorted(images.KNOWN))}'
            await self._refuse(record, "ErrImagePull", message)
            return False
        assert self._network
        try:
            base = self._base() | ({"PATH": image.path} if image.path else {})
            variables = environment(self._with_ip(), spec, base, self._data)
            argv = command(spec, image.entrypoint, image.words, variables)
        except ConfigError as error:
            await self._refuse(record, "CreateContainerConfigError", str(error))
            return False
        folder = self._folder / spec["name"] / str(record.restarts)
        launch = {
            "argv": argv,
            "root": image.root,
            "environment": variables,
            "directory": spec.get("workingDir", "/"),
            "hostname": self._name[:63],
            "hidden": str(self._place.folder),
            "read_only": spec.get("securityContext", {}).get("readOnlyRootFilesystem", False),
            "mounts": self._volumes.mounts(spec),
        }
        try:
            unit.process = await Process.start(
                launch,
                folder=folder,
                network=self._network.path,
                log=log_file(self._place.folder, self.pod, unit.record),
            )
        except StartError as error:
            await self._refuse(record, "RunContainerError", str(error))
            return False
        assert self._session
        unit.actions = Actions(spec, self._network.ip, unit.process, self._session)
        record.run(time.time())
        self._dirty.set()
        return True

    async def _care(self, unit: _Unit) -> None:
        """Do what a running container wants: its hook, then its probes."""
        record, spec = unit.record, unit.spec
        assert unit.actions
        hook = spec.get("lifecycle", {}).get("postStart")
        if hook and (wrong := await unit.actions.act(hook, 3600.0)):
            await self._event("FailedPostStartHook", wrong)
            self._spawn(self._stop(unit, self._default_grace()))  # not awaited by what it ends
            return
        if (probe := spec.get("startupProbe")) and not await self._probe(unit, "startup", probe):
            return
        record.started = True
        record.ready = "readinessProbe" not in spec
        unit.began.set()
        self._dirty.set()
        probing = [
            self._probe(unit, kind, spec[f"{kind}Probe"])
            for kind in ("readiness", "liveness")
            if f"{kind}Probe" in spec
        ]
        await asyncio.gather(*probing)

    async def _probe(self, unit: _Unit, kind: str, probe: Object) -> bool:
        """Probe and act on it. Startup: return whether it has succeeded; the others: until cancelled."""
        assert unit.actions
        async for wrong in verdicts(probe, unit.actions):
            if wrong:
                await self._event("Unhealthy", f"{kind} probe of {unit.record.name} failed: {wrong}")
            if kind == "readiness":
                if unit.record.ready == bool(wrong):
                    unit.record.ready = not wrong
                    self._dirty.set()
            elif wrong:
                if self._stopping:
                    continue  # it is stopped already
                grace = probe.get("terminationGracePeriodSeconds", self._default_grace())
                # Not awaited by what it ends.
                self._spawn(self._stop(unit, grace))
                return False
            elif kind == "startup":
                return True
        return False

    # The end

    async def _stop_all(self) -> None:
        """Stop what runs: main containers at once, sidecars after them, the last started first."""
        self._stopping = True
        grace = self._grace if self._deleted.is_set() else self._default_grace()
        after = [unit.task for unit in self._mains if unit.task]
        stopping = [self._stop(unit, grace) for unit in self._mains if unit.task]
        for unit in reversed(self._inits):
            if unit.task:
                stopping.append(self._stop(unit, grace, after=tuple(after)))
                after.append(unit.task)
        await asyncio.gather(*stopping)

    async def _stop(self, unit: _Unit, grace: float, after: tuple[asyncio.Task[None], ...] = ()) -> None:
        """Stop one within its grace: its hook, its turn, SIGTERM, and SIGKILL in the end."""
        assert unit.task
        process = unit.process
        if process is None:
            unit.task.cancel()
            await asyncio.wait({unit.task})
            return
        deadline = time.monotonic() + grace
        hook = unit.spec.get("lifecycle", {}).get("preStop")
        if hook and grace > 0 and unit.actions and (wrong := await unit.actions.act(hook, grace)):
            await self._event("FailedPreStopHook", f"{unit.record.name}: {wrong}")
        if after:
            await asyncio.wait(after, timeout=max(0.0, deadline - time.monotonic()))
        process.signal(signal.SIGTERM)
        left = max(deadline - time.monotonic(), LEAST_GRACE)
        ended = asyncio.create_task(process.wait())
        if not (await asyncio.wait({ended}, timeout=left))[0]:
            process.kill()
            await ended
        if self._stopping:
            await asyncio.wait({unit.task})

    async def _finish(self) -> None:
        """Report to the API server how it ended, and that nothing of it is left."""
        for method, path, body in (
            ("PATCH", f"{self._path}/status", {"metadata": {"uid": self._uid}, "status": self._status()}),
            ("DELETE", self._path, {"gracePeriodSeconds": 0, "preconditions": {"uid": self._uid}}),
        ):
            await self._place.client.insist(method, path, body)

    async def _clean_up(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._place.sources.release(self._changed)
        if self._session:
            await self._session.close()
        if self._network:
            await self._network.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # What it says

    async def _write_status(self) -> None:
        """Write the status to the API server whenever it changes."""
        told: Object = {}
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            status = self._status()
            if status != told:
                await self._place.client.insist(
                    "PATCH", f"{self._path}/status", {"metadata": {"uid": self._uid}, "status": status}
                )
                told = status

    def _status(self) -> Object:
        ip = self._network.ip if self._network else ""
        records = [unit.record for unit in self._units]
        return pod_status(self.pod, records, ip, ADDRESS, time.time(), over=self._over)

    async def _refuse(self, record: Container, reason: str, message: str) -> None:
        record.wait(reason, message)
        self._dirty.set()
        await self._event("Failed", f"{record.name}: {message}")

    async def _event(self, reason: str, message: str) -> None:
        """Leave a warning for `kubectl describe`."""
        metadata = self.pod["metadata"]
        about = {
            "kind": "Pod",
            "apiVersion": "v1",
            "name": self._name,
            "namespace": self._namespace,
            "uid": metadata["uid"],
        }
        now = stamp(time.time())
        event = {
            "metadata": {"generateName": f"{self._name}."},
            "involvedObject": about,
            "type": "Warning",
            "reason": reason,
            "message": message[:1024],
            "source": {"component": "kubelet", "host": self._place.node},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        with suppress(ApiError, aiohttp.ClientError, TimeoutError):  # its namespace may be going
            await self._place.client.call("POST", f"/api/v1/namespaces/{self._namespace}/events", event)

    # Small things

    def _default_grace(self) -> float:
        return float(self.pod["spec"].get("terminationGracePeriodSeconds", 30))

    def _with_ip(self) -> Object:
        assert self._network
        ip = self._network.ip
        return {**self.pod, "status": {**self.pod.get("status", {}), "podIP": ip, "hostIP": ADDRESS}}

    def _base(self) -> dict[str, str]:
        return {
            "PATH": images.search_path(),
            "HOME": "/root",
            "HOSTNAME": self._name,
            "LANG": "C.UTF-8",
            "KUBERNETES_SERVICE_HOST": ADDRESS,
            "KUBERNETES_SERVICE_PORT": str(PORT),
            "KUBERNETES_SERVICE_PORT_HTTPS": str(PORT),
        }

    def _data(self, plural: str, name: str) -> Mapping[str, bytes] | None:
        return self._place.sources.data(Key(plural, self._namespace, name))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def log_file(folder: Path, pod: Object, record: Container, back: int = 0) -> Path:
    """Return where a container's output goes; ``back``: of how many restarts ago. It stays when the pod has gone."""
    metadata = pod["metadata"]
    where = folder / "logs" / f"{metadata['namespace']}_{metadata['name']}_{metadata['uid'][:8]}" / record.name
    where.mkdir(parents=True, exist_ok=True)
    return where / f"{record.restarts - back}.log"


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _first(*tasks: asyncio.Task[None]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
