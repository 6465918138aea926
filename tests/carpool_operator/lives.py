"""The loop against an API server and a pod, through several lives of an operator."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from random import Random

import aiohttp
import msgspec
from fake_pod import WALL
from things import DEPLOYMENT, POD, POLICY, deployment, pod, policy

from carpool.exchange.change import Change
from carpool.policy.parameters import Parameters
from carpool_operator.api.model import Document, Event, Outcome
from carpool_operator.cluster.fleet import Fleet, Lister, Sync
from carpool_operator.cluster.kube import ApiError
from carpool_operator.cluster.writing import Backoff, Writer
from carpool_operator.delivery.publishing import ConfigMaps, Pusher
from carpool_operator.delivery.signing import Signer, new_key
from carpool_operator.loop.parts import Parts
from carpool_operator.loop.passes import Loop
from carpool_operator.reporting.events import Recorder
from carpool_operator.reporting.inspection import Inspector
from carpool_operator.reporting.metrics import OperatorMetrics
from carpool_operator.tuning.sources.choice import Sources
from carpool_operator.tuning.sources.sidecar import Sidecars

KEY = new_key()


class Steps:
    """Decides as little as can be: one document per target, repeated for pods that are behind; keeps its views."""

    def __init__(self):
        self.views = []
        self.changes = {}
        self.events = [Event(False, "Applied", "32 rows")]
        self.fault = None

    def restore(self, target, change):
        self.changes[target] = change

    def change(self, target):
        return self.changes.get(target)

    def step(self, view):
        if self.fault is not None:
            raise self.fault
        self.views.append(view)
        documents = []
        mine = [target for target, owner in view.owners.items() if owner.uid == view.policy.uid]
        for target in mine:
            if target not in self.changes:
                self.changes[target] = Change(
                    target=str(target), generation=int(view.wall * 1000), expires=view.wall + 1e6,
                    parameters={"*": Parameters()},
                )  # fmt: skip
                documents.append(Document(target, self.changes[target], None))
                continue
            behind = [
                each.uid
                for each in view.pods[target]
                if (seen := view.readings.get(each.uid)) is not None
                and seen.report is not None
                and seen.report.generation < self.changes[target].generation
            ]
            if behind:
                documents.append(Document(target, self.changes[target], tuple(behind)))
        told = [
            view.readings[each.uid].report for target in mine for each in view.pods[target] if each.uid in view.readings
        ]
        acknowledged = sum(each is not None and each.generation > 0 for each in told)
        targets = [{"kind": each.kind, "name": each.name, "acknowledged": acknowledged} for each in mine]
        status = {"observedGeneration": view.policy.generation, "targets": targets}
        events, self.events = self.events, []
        return Outcome(documents, status, events)


class World:
    """An API server, a pod, and an operator that can be killed and started again."""

    def __init__(self, api, sidecar):
        self.api = api
        self.sidecar = sidecar
        self.steps = []
        self.now = 1000.0
        self.cpu = 0.0
        self.lives = 0
        self.time = lambda: self.now
        self.leads = True
        self.writes_left = None
        self.metrics = OperatorMetrics()
        self.threads = ThreadPoolExecutor(1)
        self._kube = api.kube()

    def clock(self):
        return self.time()

    async def start(self):
        """Begin a life of the operator, with nothing remembered."""
        self.lives += 1
        self.session = aiohttp.ClientSession()
        writer = Writer(self._kube, lambda: self.leads)
        signer = Signer(KEY)
        self.fleet = Fleet(lambda: self.now)
        log = logging.getLogger("test")
        self.lister = Lister(self._kube, self.fleet, [None], found=lambda *_: None, log=log)
        self.sync = Sync(self.lister, interval=1.0, clock=lambda: self.now, log=log, random=Random(1))
        maps = ConfigMaps(writer, signer)
        await maps.read([None])
        at_once = asyncio.Semaphore(8)
        self.loop = Loop(
            Parts(
                controller=self._controller, fleet=self.fleet, writer=writer, signer=signer, maps=maps,
                sources=Sources(
                    writer, signer, Sidecars(self.session, at_once, lambda: self.now), self.session,
                    Backoff(Random(1)), clock=lambda: self.now, wall=lambda: WALL,
                ),
                pusher=Pusher(self.session, at_once), recorder=Recorder(writer, "operator-1"),
                inspector=Inspector(writer), metrics=self.metrics, backoff=Backoff(Random(1)), steps=self.threads,
                clock=self.clock, wall=lambda: WALL, cpu=lambda: self.cpu, log=logging.getLogger("test"),
            )
        )  # fmt: skip

    def _controller(self):
        self.steps.append(Steps())
        return self.steps[-1]

    async def end(self):
        await self.session.close()

    async def close(self):
        await self.end()
        self._kube.close()
        self.threads.shutdown()

    async def look(self):
        """See the cluster as it is. Lists that fail are made again, as ``Sync`` does."""
        while True:
            try:
                await self.sync.once()
            except ApiError:
                continue
            for kept, (version, one) in list(self.fleet.pods._items.items()):
                found = msgspec.structs.replace(one, admin_port=self.sidecar.port)
                self.fleet.pods._items[kept] = (version, found)
            return

    async def passes(self, count=1):
        for _ in range(count):
            await self.look()
            await self.loop.once()
            self.now += 2.0

    async def written(self):
        """Wait for what passes began and do not wait for: they end once all policies were looked at."""
        while self.loop.tasks.running:
            await asyncio.wait(set(self.loop.tasks.running.values()))

    def end_state(self):
        """What is there in the end, without what differs between any two lives; Events are for people, and may get
        lost."""

        def bare(body):
            meta = body["metadata"]
            kept = {name: meta.get(name) for name in ("name", "labels", "annotations")}
            kept["owners"] = [each["name"] for each in meta.get("ownerReferences") or []]
            return {**body, "metadata": kept}

        kinds = ("batchingpolicies", "configmaps")
        return {kind: [bare(each) for each in self.api.all(kind)] for kind in kinds}


def populate(api):
    api.put(*POLICY, policy())
    api.put(*DEPLOYMENT, deployment())
    api.put(*DEPLOYMENT, deployment("other", annotations={"carpool.dev/slo-p99": "80ms"}))
    api.put(*POD, pod())


def status(api, name="p"):
    return api.get(*POLICY, name).get("status", {})
