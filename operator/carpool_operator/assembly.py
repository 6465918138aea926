"""Assembles the operator: watches, leader election, and the leader's work."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
from msgspec import Struct, field

from carpool_operator.cluster.election import Candidate, Election
from carpool_operator.cluster.fleet import Fleet, Lister, Sync, watch_of
from carpool_operator.cluster.handlers import Kopf
from carpool_operator.cluster.kinds import KINDS, PODS, WATCHED
from carpool_operator.cluster.kube import ApiError
from carpool_operator.cluster.sharding import Shard
from carpool_operator.cluster.writing import Backoff, NotLeading, Writer
from carpool_operator.controller import Controller
from carpool_operator.delivery.publishing import ConfigMaps, Pusher
from carpool_operator.delivery.signing import BadKey, Signer, obtain, refresh
from carpool_operator.loop.parts import Parts
from carpool_operator.loop.passes import Loop
from carpool_operator.reporting.events import Recorder
from carpool_operator.reporting.health import Health
from carpool_operator.reporting.inspection import Inspector
from carpool_operator.reporting.metrics import OperatorMetrics
from carpool_operator.tuning.sources.choice import Sources
from carpool_operator.tuning.sources.prometheus import open_session
from carpool_operator.tuning.sources.sidecar import Sidecars

if TYPE_CHECKING:
    from carpool_operator.cluster.kube import Kube
    from carpool_operator.cluster.watching import Watch

CONNECTIONS = 64
"""Simultaneous connections to pods."""

STUCK = 120.0
"""Seconds without progress after which a part counts as stuck: passes give up after 30 s, requests after 10 s."""

UNHEARD = 3
"""Lists in a row with changes that no event reported, after which a watch counts as broken."""

FINISH = 10.0
"""Seconds for running writes to end on shutdown."""


class Settings(Struct, frozen=True, kw_only=True):
    """The command line's settings; times in seconds."""

    namespaces: tuple[str | None, ...]
    """Namespaces to watch; only ``None``: all."""
    namespace: str
    lease: str
    """The lease of an undivided cluster; the names of shards' leases begin with it."""
    identity: str
    interval: float
    resync: float
    metrics_host: str | None
    metrics_port: int
    shard: Shard = Shard()
    """This operator's share of the namespaces."""
    defaults: dict[str, str] = field(default_factory=dict)
    """Default annotations for workloads in all namespaces that ask for a sidecar."""


class Operator:
    """One process. Create it inside its event loop."""

    def __init__(self, settings: Settings, kube: Kube) -> None:
        self._settings = settings
        self._kube = kube
        self._log = logging.getLogger("carpool")
        self._random = random.Random()  # noqa: S311 - spreads retries
        self._clock = time.monotonic
        self.metrics = OperatorMetrics()
        self.fleet = Fleet(self._clock, settings.shard.has)
        self.sync = Sync(
            Lister(
                kube,
                self.fleet,
                settings.namespaces,
                found=lambda kind, changes: self.metrics.count("late_changes", kind, by=changes),
                log=self._log,
            ),
            interval=settings.resync,
            clock=self._clock,
            log=self._log,
            random=self._random,
        )
        lease = settings.shard.lease(settings.lease)
        self.election = Election(
            kube,
            Candidate(settings.identity, lease, settings.namespace),
            name=lease,
            namespace=settings.namespace,
            clock=self._clock,
            log=self._log,
            random=self._random,
            overlaps=partial(settings.shard.overlaps, settings.lease),
        )
        self.health = Health(self.metrics, live=self.stuck, ready=self.unready)
        self._loop: Loop | None = None
        self._watches: list[Watch[Any]] = []
        """Watches of pods and autoscalers, one per namespace each."""
        kube.failed = lambda method, status: self.metrics.count("api_errors", method, status)
        self.metrics.before_scrape.append(self._gauges)
        self.metrics.read_policies(lambda: self.fleet.policies if self.election.leads() else ())

    def stuck(self) -> str:
        """Return what is stuck, for liveness. An unreachable server is no reason to restart."""
        now = self._clock()
        if now > self.sync.ended + self._settings.resync + STUCK:
            return "listing is stuck"
        for watch in self._watches:
            if now > watch.heard + 2 * STUCK:
                return f"the watch of {watch.listing.path} is stuck"
        if self._loop is not None and self.election.leads() and now > self._loop.progress + STUCK:
            return "the reconcile loop is stuck"
        deaf = [
            kind if namespace is None else f"{kind} in {namespace}"
            for (kind, namespace), lists in self.fleet.coverage.unheard.items()
            if lists >= UNHEARD
        ]
        return f"no events come of {', '.join(deaf)}, though there are changes" if deaf else ""

    def unready(self) -> str:
        """Return what it waits for, for readiness."""
        return "" if self.fleet.coverage.synced else "not everything has been listed yet"

    async def run(self, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set; then shut down in order.

        Raises the permanent error of a part, and ``OSError`` if the port is not available.
        """
        settings = self._settings
        await self.health.start(settings.metrics_host, settings.metrics_port)
        self._log.info("started", extra={"identity": settings.identity, "port": self.health.port})
        loop = asyncio.get_running_loop()
        self._watches = [
            watch_of(self._kube, self.fleet, kind, each, loop, log=self._log, random=self._random)
            for kind in WATCHED
            for each in settings.namespaces
        ]
        for watch in self._watches:
            watch.start()
        kopf = Kopf(self._kube, self.fleet, self.sync, random=self._random)
        parts = [
            asyncio.create_task(each, name=name)
            for name, each in (
                ("sync", self.sync.run()),
                ("kopf", kopf.run()),
                ("election", self.election.run()),
                ("leading", self._lead()),
            )
        ]
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopped, *parts], return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            # A lease that is still renewed protects the running writes; it is released only after them.
            await _ended(parts[-1])
            await _ended(*parts[:-1], stopped)
            await self.election.release()
            for watch in self._watches:
                watch.stop()
            await self.health.stop()
            self._kube.close()

    async def _lead(self) -> None:
        """Do the leader's work, whenever this operator leads."""
        while True:
            await self.election.led.wait()
            await self.sync.ok.wait()
            term = asyncio.create_task(self._term())
            lost = asyncio.create_task(self.election.lost.wait())
            try:
                await asyncio.wait([term, lost], return_when=asyncio.FIRST_COMPLETED)
            finally:
                lost.cancel()
                await _ended(term)
            if term.done() and not term.cancelled():
                term.result()

    async def _term(self) -> None:
        """Lead until cancelled."""
        writer = Writer(self._kube, self.election.leads)
        try:
            signer, maps = await self._begin(writer)
        except NotLeading:
            return
        backoff = Backoff(self._random)
        at_once = asyncio.Semaphore(CONNECTIONS)
        steps = ThreadPoolExecutor(1, thread_name_prefix="steps")
        # The semaphore bounds connections. No cookies: none are needed between operator and pods.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4 * self._settings.interval)
        async with (
            aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as pods,
            open_session() as prometheus,
        ):
            sources = Sources(
                writer,
                signer,
                Sidecars(pods, at_once, self._clock),
                prometheus,
                Backoff(self._random),
                clock=self._clock,
                wall=time.time,
            )
            loop = self._loop = Loop(
                Parts(
                    controller=Controller,
                    fleet=self.fleet,
                    writer=writer,
                    signer=signer,
                    maps=maps,
                    sources=sources,
                    pusher=Pusher(pods, at_once),
                    recorder=Recorder(writer, self._settings.identity),
                    inspector=Inspector(writer),
                    metrics=self.metrics,
                    backoff=backoff,
                    steps=steps,
                    clock=self._clock,
                    wall=time.time,
                    cpu=time.process_time,
                    log=self._log,
                    defaults=self._settings.defaults,
                )
            )
            refresh = asyncio.create_task(self._refresh(writer, signer, maps))
            try:
                await loop.run(self._settings.interval)
            finally:
                await _ended(refresh)
                await loop.tasks.end(FINISH)
                self._loop = None
                steps.shutdown(wait=False, cancel_futures=True)

    async def _begin(self, writer: Writer) -> tuple[Signer, ConfigMaps]:
        """Read the key and the published configurations, however long that takes.

        Raises ``NotLeading``.
        """
        failures = 0
        while True:
            wait = min(30.0, 2.0**failures)
            failures += 1
            try:
                signer = await obtain(writer, self._settings.namespace)
                maps = ConfigMaps(writer, signer, self._settings.shard.has)
                await maps.read(self._settings.namespaces)
            except ApiError as error:
                wait = max(wait, error.retry_after)
                self._log.warning("can't begin to lead", extra={"status": error.status, "error": str(error)})
            except BadKey as error:
                # Users have to fix it; nothing is signed with another key meanwhile.
                self._log.error("can't begin to lead", extra={"error": str(error)})
            else:
                return signer, maps
            await asyncio.sleep(wait * self._random.uniform(0.5, 1.0))

    async def _refresh(self, writer: Writer, signer: Signer, maps: ConfigMaps) -> None:
        """Read the keys and the ConfigMaps again and again, because others may change them."""
        while True:
            await asyncio.sleep(self._settings.resync)
            try:
                if await refresh(writer, self._settings.namespace, signer):
                    self._log.info("signing with other keys", extra={"public": signer.public})
            except (ApiError, BadKey, NotLeading) as error:
                self._log.warning("the keys in use stay", extra={"error": str(error)})
            try:
                await maps.read(self._settings.namespaces)
            except ApiError as error:
                self._log.warning("can't list ConfigMaps", extra={"status": error.status, "error": str(error)})

    def _gauges(self) -> None:
        now = self._clock()
        self.metrics.set("leader", self.election.leads())
        self.metrics.set("shards", self._settings.shard.count)
        last = dict(self.fleet.coverage.last_event)
        # A dead watch must not be hidden by those of other namespaces.
        pods = KINDS[PODS].plural
        heard = (watch.heard for watch in self._watches if watch.listing.path.endswith(f"/{pods}"))
        last[PODS] = min(heard, default=last[PODS])
        for kind, at in last.items():
            self.metrics.set("last_event_age_seconds", now - at, kind)
        for kind, size in self.fleet.sizes().items():
            self.metrics.set("objects", size, kind)


async def _ended(*tasks: asyncio.Task[None] | asyncio.Task[bool]) -> None:
    """Cancel tasks, and wait until all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run(settings: Settings, kube: Kube) -> None:
    """Run until SIGTERM or SIGINT.

    Raises what ``Operator.run`` does.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await Operator(settings, kube).run(stop)
