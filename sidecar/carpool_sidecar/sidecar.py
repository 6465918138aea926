"""The assembled sidecar: how it is built from a configuration, starts, and ends without losing requests."""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING

from carpool.batching.batcher import Batcher
from carpool.batching.counters import LATE
from carpool.batching.requests import Refused
from carpool.policy.plain import PolicyError
from carpool_sidecar.admin.app import LOOPBACK, AdminApp
from carpool_sidecar.admin.health import Health
from carpool_sidecar.app import DataApp
from carpool_sidecar.backends.upstream import UpstreamBackend
from carpool_sidecar.background import Background
from carpool_sidecar.config import own_address
from carpool_sidecar.config.descriptors import ADMIN_CONNECTIONS, Shares, open_files, share
from carpool_sidecar.config.settings import EVERY_MODEL, address_of
from carpool_sidecar.config.watching import watch
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
from carpool_sidecar.ports import Port
from carpool_sidecar.protocols.json_scan import prepare
from carpool_sidecar.shutdown import Shutdown
from carpool_sidecar.tuning.control import Control
from carpool_sidecar.tuning.stalls import StallWatcher
from carpool_sidecar.versions import Versions

if TYPE_CHECKING:
    from pathlib import Path

    from carpool_sidecar.backends.base import Backend
    from carpool_sidecar.backends.onnx import OnnxBackend
    from carpool_sidecar.config.settings import SidecarConfig, Upstream
    from carpool_sidecar.models import Entry

DELAYED = (LATE, Refused.LATE, Refused.QUEUE_FULL, Refused.EXPIRED)
"""Reasons for a missed SLO that other requests on the device may cause."""


class Sidecar:
    """One sidecar on the running loop. ``start``, then ``drain`` and ``close``."""

    clock = staticmethod(monotonic)  # seconds, of no particular origin

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
        listen, admin = listen or config.listen, admin or config.admin
        own_address.refuse(config.upstream, listen, admin)
        self.log = logging.getLogger("carpool")
        self.versions = Versions(config, path, self._use, self.log)
        self.started_at = monotonic()
        self.engine = None if config.llm is None else EngineProcess(config.llm, self.log)
        """The engine that serves a language model's file."""
        upstream = config.upstream if self.engine is None else self.engine.upstream
        # 1. Batching
        self.batcher = _batcher(config, upstream)
        self.models = ModelTable(config.policy.models, self._forget)
        # Callers' requests and the upstream's answers share one memory budget, and the same read turns.
        budget = Budget(int(config.bodies.max_buffered))
        turns = Turns(ServerLimits().turn, monotonic)
        shares = _shares(upstream)
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
        self._read(config)
        self._warn(config)
        self.control = Control(self.driver, config, self.stalls, monotonic, self.log)
        # 2. What else is served
        self.streams = Streams(config.policy, clock=monotonic, log=self.log)
        self.jobs = self._desk(config)
        # 3. The ports
        app = self._data_app(upstream, budget)
        self.forwarded = app.forwarded
        data = _data_server(config, app, budget, turns, shares, passes=upstream is not None)
        self.data = Port("listen", data, address_of(listen), shares.backlog)
        self.admin = self._admin_port(address_of(admin), api_key)
        self._background = Background(self.log)
        self.shutdown = Shutdown(data, self.driver, self.jobs, self.health, self.log, self._background.start)
        self._cap()

    async def start(self) -> None:
        """Listen, then check the model in the background: a sidecar listens before its model does.

        Raises ``OSError`` naming the field whose address is not available.
        """
        self.stalls.start()
        versions, spawn = self.versions, self._background.start
        if versions.changes is not None:
            # Before the first request: a new pod begins with the parameters of the older ones.
            versions.changes.look()
        for port in (self.data, self.admin):
            await port.listen()
        if self.jobs is not None:
            await self.jobs.start(self.data.server)
        if self.engine is not None:
            spawn(self.engine.run())
        spawn(self.health.run())
        spawn(Resolver(self.models, self.backend, self._learned, self._changed).run())
        spawn(self.control.run())
        if self.backend.streams:
            spawn(EngineMetrics(self.backend, self.streams).run())
        if versions.file.path is not None:
            spawn(watch(versions.file.look))
        if versions.changes is not None and versions.changes.directory is not None:
            spawn(watch(versions.changes.look))
        self.log.info(
            "listening",
            extra={"data": self.data.address, "admin": self.admin.address, "generation": versions.generation},
        )

    @property
    def running(self) -> int:
        """The oldest version still partly in force: older than the newest after a roll-back."""
        return self.versions.generation if self.versions.change is None else self.control.in_force.rollback.running

    @property
    def ready(self) -> bool:
        """Whether new requests should come here."""
        return self.health.ready and not self.data.server.draining

    @property
    def readiness(self) -> str:
        """Why new requests should come here, or not."""
        return "draining" if self.data.server.draining else self.health.reason

    async def drain(self) -> None:
        """Report unready, accept requests while load balancers catch up, then finish; later calls wait too."""
        await self.shutdown.drain(self.versions.config.shutdown)

    async def close(self) -> None:
        """End everything; requests that still wait are cut off."""
        await self._background.close()
        if self.jobs is not None:
            await self.jobs.close()
        for port in (self.data, self.admin):
            port.close()
        self.driver.stop()
        self.streams.gatekeeper.close()
        self.stalls.stop()
        await self.backend.close()
        if self.engine is not None:
            self.engine.close()

    def _desk(self, config: SidecarConfig) -> Desk | None:
        if config.jobs is None:
            return None
        return Desk(config, config.jobs, look=self._seen, ready=lambda: self.health.ready, log=self.log)

    def _data_app(self, upstream: Upstream | None, budget: Budget) -> DataApp:
        app = DataApp(
            self.driver,
            self.backend,
            self.models,
            self.streams,
            int(self.versions.config.bodies.max_request),
            counts_queue=upstream is not None and upstream.count_queue,
        )
        app.jobs = None if self.jobs is None else JobsApp(self.jobs, budget)
        return app

    def _admin_port(self, address: tuple[str, int], api_key: str | None) -> Port:
        server = Server(
            AdminApp(self, api_key, local=address[0] in LOOPBACK),
            ServerLimits(max_body_bytes=1 << 20, max_buffered_bytes=16 << 20, max_connections=ADMIN_CONNECTIONS),
            clock=monotonic,
        )
        return Port("admin", server, address, ADMIN_CONNECTIONS)

    def _use(self, config: SidecarConfig, change: int | None) -> None:
        """Apply a version of the configuration; ``change``: its generation if it is a change from outside."""
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
        self.driver.terms.follow(config.policy, config.limits)

    def _warn(self, config: SidecarConfig) -> None:
        try:
            config.validate_waits()
        except PolicyError as error:
            self.log.warning("fixed parameters hold requests until they are late", extra={"error": str(error)})

    def _largest(self, model: str) -> int:
        """Return the most rows that a batch of a model may ever have."""
        config = self.versions.config
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


def _batcher(config: SidecarConfig, upstream: Upstream | None) -> Batcher:
    return Batcher(
        config.parameters_of(EVERY_MODEL),
        admission=config.policy.admission,
        retry_transport=upstream is not None and upstream.retry,
        idempotent=config.policy.idempotent,
        undecided=config.undecided,
    )


def _shares(upstream: Upstream | None) -> Shares:
    if upstream is None:
        return share(open_files(), 0, 0)
    return share(open_files(), upstream.max_connections, upstream.max_forwarded)


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


def _data_server(
    config: SidecarConfig, app: DataApp, budget: Budget, turns: Turns, shares: Shares, *, passes: bool
) -> Server:
    """Return the data port's server; ``passes``: it passes other protocols than HTTP/1.1 to the upstream."""
    return Server(
        app,
        ServerLimits(max_body_bytes=int(config.bodies.max_request), max_connections=shares.clients),
        clock=monotonic,
        budget=budget,
        turns=turns,
        passage=app.foreign if passes else None,
    )


def onnx_backend() -> type[OnnxBackend]:
    """Return what serves a model file.

    Raises ``PolicyError`` if its packages are not installed.
    """
    try:
        from carpool_sidecar.backends.onnx import OnnxBackend  # noqa: PLC0415 - 60 MiB that an upstream does without
    except ModuleNotFoundError as error:
        raise PolicyError(
            "onnx", f"serving a model file needs {error.name}: in Carpool's folder, pip install '.[onnx]'"
        ) from None
    return OnnxBackend
