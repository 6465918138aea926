"""The assembled sidecar: how it is built from a configuration, starts, and ends without losing requests."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from msgspec.structs import replace

from carpool.batching.batcher import Batcher
from carpool.batching.counters import LATE
from carpool.batching.requests import Refused
from carpool.policy.plain import PolicyError
from carpool_sidecar.admin.app import LOOPBACK, AdminApp
from carpool_sidecar.admin.changes import Changes
from carpool_sidecar.admin.health import INTERVAL, Health
from carpool_sidecar.admin.signatures import Authority
from carpool_sidecar.app import DataApp
from carpool_sidecar.backends.upstream import UpstreamBackend
from carpool_sidecar.config import own_address
from carpool_sidecar.config.descriptors import ADMIN_CONNECTIONS, open_files, share
from carpool_sidecar.config.settings import EVERY_MODEL, address_of
from carpool_sidecar.config.watching import ConfigFile, watch
from carpool_sidecar.dispatch.driver import Driver
from carpool_sidecar.generation.engine_metrics import EngineMetrics
from carpool_sidecar.generation.engine_streams import Streams
from carpool_sidecar.http1.limits import ServerLimits
from carpool_sidecar.http1.memory import Budget
from carpool_sidecar.http1.server.server import Server
from carpool_sidecar.http1.timing import Turns
from carpool_sidecar.jobs.api.app import JobsApp
from carpool_sidecar.jobs.desk import Desk
from carpool_sidecar.jobs.headroom import Seen
from carpool_sidecar.llm.process import EngineProcess
from carpool_sidecar.models import ModelTable, Resolver
from carpool_sidecar.protocols.headers import Reader
from carpool_sidecar.protocols.json_scan import prepare
from carpool_sidecar.tuning.control import Control
from carpool_sidecar.tuning.stalls import StallWatcher

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from carpool.exchange.change import Change
    from carpool_sidecar.backends.base import Backend
    from carpool_sidecar.backends.onnx import OnnxBackend
    from carpool_sidecar.config.settings import SidecarConfig, Upstream
    from carpool_sidecar.models import Entry

DELAYED = (LATE, Refused.LATE, Refused.QUEUE_FULL, Refused.EXPIRED)
"""Reasons for a missed SLO that other requests on the device may cause."""

OUTLIVED = 2.0
"""Seconds after a drain from which a model that still answers counts as staying: two health checks."""


class Sidecar:
    """One sidecar on the running loop. ``start``, then ``drain`` and ``close``."""

    def __init__(
        self,
        config: SidecarConfig,
        path: Path | None = None,
        api_key: str | None = None,
        *,
        listen: str | None = None,
        admin: str | None = None,
    ) -> None:
        """Build the parts from ``config``; ``path``: its file, to be watched.

        ``listen`` and ``admin`` (host:port) replace the file's. Raises ``PolicyError`` naming a field that can't be
        used here.
        """
        self.config = config
        self._started_with = config
        self.clock = monotonic
        own_address.refuse(config.upstream, listen or config.listen, admin or config.admin)
        self._listen = address_of(listen or config.listen)
        self._admin = address_of(admin or config.admin)
        self.log = logging.getLogger("carpool")
        self.draining = False
        self.started_at = monotonic()
        self.engine = None if config.llm is None else EngineProcess(config.llm, self.log)
        """The engine that serves a language model's file."""
        upstream = config.upstream if self.engine is None else self.engine.upstream
        self.batcher = Batcher(
            config.parameters_of(EVERY_MODEL),
            admission=config.policy.admission,
            retry_transport=upstream is not None and upstream.retry,
            idempotent=config.policy.idempotent,
            undecided=config.undecided,
        )
        self.models = ModelTable(config.policy.models, self._forget)
        # Callers' requests and the upstream's answers share one memory budget, and the same read turns.
        budget = Budget(int(config.bodies.max_buffered))
        turns = Turns(ServerLimits().turn, monotonic)
        shares = share(
            open_files(),
            0 if upstream is None else upstream.max_connections,
            0 if upstream is None else upstream.max_forwarded,
        )
        self._backlog = shares.backlog
        self.backend = _backend(config, upstream, budget, turns, shares.forwarded)
        self.stalls = StallWatcher()
        patience = 0.0 if upstream is None else float(upstream.patience)
        self.health = Health(self.backend, self._found, monotonic, self.log, patience)
        self.driver = Driver(
            self.batcher,
            self.backend,
            self.models,
            config.policy,
            clock=monotonic,
            largest=self._largest,
            stalled=self.stalls.overlaps,
            unreachable=self.health.unreachable,
            log=self.log,
        )
        self._readers = 0
        """How often the rules changed for which headers may differ in a batch."""
        self._read(config)
        self._warn(config)
        self.control = Control(self.driver, config, self.stalls, monotonic, self.log)
        self.file = ConfigFile(path, config, self._configured, self.log) if path is not None else None
        self.authority = None if config.public_key is None else Authority(config.public_key, config.target)
        self.changes = (
            None
            if self.authority is None
            else Changes(
                self.authority,
                self._changed_from_outside,
                lambda: self.generation,
                self.log,
                None if config.changes is None else Path(config.changes),
            )
        )
        self._resolver = Resolver(self.models, self.backend, self._learned, self._changed)
        self.streams = Streams(config.policy, clock=monotonic, log=self.log)
        self.jobs = self._desk(config)
        app = DataApp(
            self.driver,
            self.backend,
            self.models,
            self.streams,
            int(config.bodies.max_request),
            counts_queue=upstream is not None and upstream.count_queue,
        )
        app.jobs = None if self.jobs is None else JobsApp(self.jobs, budget)
        self.forwarded = app.forwarded
        self.data = Server(
            app,
            ServerLimits(max_body_bytes=int(config.bodies.max_request), max_connections=shares.clients),
            clock=monotonic,
            budget=budget,
            turns=turns,
            passage=app.foreign if upstream is not None else None,
        )
        self.admin = Server(
            AdminApp(self, api_key, local=self._admin[0] in LOOPBACK),
            ServerLimits(max_body_bytes=1 << 20, max_buffered_bytes=16 << 20, max_connections=ADMIN_CONNECTIONS),
            clock=monotonic,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._drained: asyncio.Task[None] | None = None
        self.outlived = asyncio.Event()
        """Set when a drain is over and the model still runs: it then needs a sidecar that serves."""
        self._change: Change | None = None
        self._cap()

    async def start(self) -> None:
        """Listen, then check the model in the background: a sidecar listens before its model does.

        Raises ``OSError`` naming the field whose address is not available.
        """
        self.stalls.start()
        if self.changes is not None:
            # Before the first request: a new pod begins with the parameters of the older ones.
            self.changes.look()
        await _listen(self.data, "listen", self._listen, self._backlog)
        await _listen(self.admin, "admin", self._admin, ADMIN_CONNECTIONS)
        if self.jobs is not None:
            await self.jobs.start(self.data)
        if self.engine is not None:
            self._spawn(self.engine.run())
        self._spawn(self.health.run())
        self._spawn(self._resolver.run())
        self._spawn(self.control.run())
        if self.backend.streams:
            self._spawn(EngineMetrics(self.backend, self.streams).run())
        if self.file is not None:
            self._spawn(watch(self.file.look))
        if self.changes is not None and self.config.changes is not None:
            self._spawn(watch(self.changes.look))
        self.log.info(
            "listening",
            extra={"data": self.address, "admin": self.admin_address, "generation": self.generation},
        )

    @property
    def address(self) -> str:
        """``host:port`` of the data port."""
        return "{}:{}".format(*self.data.addresses[0][:2])

    @property
    def admin_address(self) -> str:
        """``host:port`` of the admin port."""
        return "{}:{}".format(*self.admin.addresses[0][:2])

    @property
    def generation(self) -> int:
        """The newest version of the configuration that was accepted."""
        counted = (self._started_with.generation or 1) if self.file is None else self.file.generation
        return counted if self._change is None else max(counted, self._change.generation)

    @property
    def running(self) -> int:
        """The oldest version still partly in force: older than ``generation`` after a roll-back."""
        return self.generation if self._change is None else self.control.in_force.rollback.running

    @property
    def ready(self) -> bool:
        """Whether new requests should come here."""
        return self.health.ready and not self.draining

    async def drain(self) -> None:
        """Report unready, accept requests while load balancers catch up, then finish; later calls wait too."""
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_task(self._drain())
        await asyncio.shield(self._drained)

    async def close(self) -> None:
        """End everything; requests that still wait are cut off."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.jobs is not None:
            await self.jobs.close()
        self.data.stop_accepting()
        self.data.abort()
        self.admin.stop_accepting()
        self.admin.abort()
        self.driver.stop()
        self.streams.gatekeeper.close()
        self.stalls.stop()
        await self.backend.close()
        if self.engine is not None:
            self.engine.close()

    async def _drain(self) -> None:
        # 1. No new callers are sent here, and connections close after their answer.
        self.draining = True
        if self.jobs is not None:
            self.jobs.drain()
        self.data.drain()
        shutdown = self.config.shutdown
        self.log.info(
            "draining", extra={"accepting_seconds": float(shutdown.lame), "limit_seconds": float(shutdown.limit)}
        )
        try:
            async with asyncio.timeout(shutdown.limit):
                await asyncio.sleep(shutdown.lame)
                # 2. Accepted requests get an answer; none is held for others any more.
                self.data.stop_accepting()
                self.driver.do(self.batcher.drain(monotonic()))
                self.data.close_idle()
                await self.data.wait_idle()
        except TimeoutError:
            self.log.warning("the drain took too long", extra={"unanswered": self.data.busy})
        # 3. Any further request is refused.
        self.batcher.close()
        self.log.info("drained")
        self._spawn(self._outlive())

    async def _outlive(self) -> None:
        # The kubelet also calls a preStop hook before it restarts one container whose liveness probe fails. When a pod
        # ends, the model may also answer for a while; then no request is left that could be lost by ending early.
        await asyncio.sleep(OUTLIVED)
        while not self.health.ready:  # noqa: ASYNC110 - which is looked at as often
            await asyncio.sleep(INTERVAL)
        self.outlived.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log.error("a background task ended", exc_info=error)

    def _configured(self, config: SidecarConfig) -> None:
        """Apply another version of the file, which replaces changes from outside."""
        self._started_with = config
        self._change = None
        if self.changes is not None:
            self.changes.superseded()
        self.log.setLevel(config.log.upper())
        self._use(config)

    def _changed_from_outside(self, change: Change) -> None:
        """Apply a change; from now on nothing is tuned here."""
        self._change = change
        self.log.info("parameters from outside", extra={"generation": change.generation})
        policy = change.policy or self._started_with.policy
        self._use(replace(self._started_with, policy=policy, parameters=change.parameters), change.generation)

    def _use(self, config: SidecarConfig, change: int | None = None) -> None:
        self.config = config
        self.driver.terms.follow(config.policy)
        self._read(config)
        self._warn(config)
        self.batcher.admit(config.policy.admission)
        self.batcher.idempotent, self.batcher.undecided = config.policy.idempotent, config.undecided
        self.models.configure(config.policy.models)
        self.driver.verifier.configure(config.policy, list(self.models))
        self.streams.configure(config.policy)
        if self.jobs is not None:
            self.jobs.runner.configure(config)
        self.control.configure(config, change)
        self._cap()

    def _desk(self, config: SidecarConfig) -> Desk | None:
        if config.jobs is None:
            return None
        return Desk(
            config,
            config.jobs,
            look=self._seen,
            ready=lambda: self.health.ready,
            log=self.log,
        )

    def _seen(self) -> Seen:
        """Return the input for jobs: device busy time, and whether interactive requests and streams met the SLO."""
        counters = [state.counters for state in self.batcher.models()]
        missed = sum(one.misses.get(reason, 0) for one in counters for reason in DELAYED)
        streams_met, streams_missed = self.streams.models.judged()
        met = sum(one.hits for one in counters) + streams_met
        return Seen(self.batcher.busy(monotonic()), met, missed + streams_missed)

    def _read(self, config: SidecarConfig) -> None:
        """Read requests by this configuration's rules."""
        prepare(config.limits)
        self.driver.terms.limits = config.limits
        if self.driver.terms.reader.across != {name.encode() for name in config.policy.batch_across}:
            self._readers += 1
            self.driver.terms.reader = Reader(config.policy.batch_across, self._readers)

    def _warn(self, config: SidecarConfig) -> None:
        try:
            config.validate_waits()
        except PolicyError as error:
            self.log.warning("fixed parameters hold requests until they are late", extra={"error": str(error)})

    def _largest(self, model: str) -> int:
        """Return the most rows that a batch of a model may ever have."""
        config = self.config
        if config.parameters:
            return config.parameters_of(model).max_batch
        return config.policy.limits(next((one for one in config.policy.models if one.name == model), None)).max_batch

    def _forget(self, model: str) -> None:
        self.driver.forget(model)

    def _cap(self) -> None:
        for state in self.batcher.models():
            state.limits.max_rows = self.models.cap(state.name)

    def _learned(self, entry: Entry) -> None:
        self.batcher.model(entry.lane).limits.max_rows = self.models.cap(entry.lane)
        merged = [name for name, alone in (("V1", entry.alone_by_protocol), ("V2", entry.alone)) if alone is None]
        self.log.info(
            "batch axis looked up",
            extra={"model": entry.model, "merges": " and ".join(merged) or "nothing", "detail": entry.reason},
        )

    def _changed(self, entry: Entry) -> None:
        self.log.warning("the model has changed: everything learned of it is dropped", extra={"model": entry.model})
        self.driver.verifier.forget(entry)
        self.control.forget(entry.lane)

    def _found(self, again: bool) -> None:
        if again:
            self.log.warning("the model's server answers again: everything learned of it is dropped")
            for entry in self.models:
                self.driver.verifier.forget(entry)
            self.control.forget()
        self.models.ask_again()


async def _listen(server: Server, name: str, address: tuple[str, int], backlog: int) -> None:
    try:
        await server.listen(*address, backlog=backlog)
    except OSError as error:
        # Only the system's own words are kept of the loop's message.
        why = str(error.strerror).rpartition(": ")[2]
        host, port = address
        raise OSError(f"{name}: {host}:{port}: {why}: name another address, in the file or with --{name}") from error


def _backend(config: SidecarConfig, upstream: Upstream | None, budget: Budget, turns: Turns, forwarded: int) -> Backend:
    if upstream is not None:
        return UpstreamBackend(
            upstream,
            max_answer=int(config.bodies.largest_answer),
            clock=monotonic,
            budget=budget,
            turns=turns,
            max_forwarded=forwarded,
        )
    assert config.onnx is not None  # noqa: S101 - for the type checker: validated
    return onnx_backend()(config.onnx, max_answer=int(config.bodies.largest_answer))


def onnx_backend() -> type[OnnxBackend]:
    """Return what serves a model file.

    Raises ``PolicyError`` if its packages are not installed.
    """
    try:
        from carpool_sidecar.backends.onnx import OnnxBackend  # noqa: PLC0415 - 60 MiB that an upstream does without
    except ModuleNotFoundError as error:
        raise PolicyError(
            "onnx", f"serving a model file needs {error.name}: pip install 'carpool-serving[onnx]'"
        ) from None
    return OnnxBackend
