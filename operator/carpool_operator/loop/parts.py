"""What all work of the loop shares: its dependencies, writes that are retried, and tasks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from carpool_operator.cluster.kube import ApiError
from carpool_operator.cluster.writing import NotLeading

if TYPE_CHECKING:
    import logging
    from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
    from concurrent.futures import Executor

    from carpool_operator.cluster.fleet import Fleet
    from carpool_operator.cluster.writing import Backoff, Writer
    from carpool_operator.controller import Controller
    from carpool_operator.delivery.publishing import ConfigMaps, Pusher
    from carpool_operator.delivery.signing import Signer
    from carpool_operator.reporting.events import Recorder
    from carpool_operator.reporting.inspection import Inspector
    from carpool_operator.reporting.metrics import OperatorMetrics
    from carpool_operator.tuning.sources.choice import Sources


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The loop's dependencies."""

    controller: Callable[[], Controller]
    """Creates the controller of a policy."""
    fleet: Fleet
    writer: Writer
    signer: Signer
    maps: ConfigMaps
    sources: Sources
    pusher: Pusher
    recorder: Recorder
    inspector: Inspector
    metrics: OperatorMetrics
    backoff: Backoff
    steps: Executor
    """One thread, so that decisions delay neither the lease nor the probes."""
    clock: Callable[[], float]
    wall: Callable[[], float]
    cpu: Callable[[], float]
    """CPU seconds of this process."""
    log: logging.Logger
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Default annotations of workloads, for the whole cluster."""

    async def write(self, key: Hashable, resource: str, work: Callable[[], Awaitable[object]]) -> bool:
        """Write something unless it failed too recently; returns whether it was written."""
        if not self.backoff.ready(key, self.clock()):
            return False
        try:
            await work()
        except ApiError as error:
            self.backoff.failed(key, self.clock(), error.retry_after)
            # 409: others wrote meanwhile; their version arrives by the watch.
            report = self.log.info if error.status == 409 else self.log.warning
            report("a write failed", extra={"of": key, "status": error.status, "error": str(error)})
            return False
        self.backoff.succeeded(key)
        self.metrics.count("writes", resource)
        return True


class Tasks:
    """At most one task per key. It may outlast its pass. An error ends it alone, and the next pass starts it again."""

    def __init__(self, parts: Parts) -> None:
        self.running: dict[Hashable, asyncio.Task[None]] = {}
        self.ending = False
        """Whether tasks should begin nothing more."""
        self._p = parts

    def start(self, key: Hashable, work: Coroutine[object, object, object]) -> asyncio.Task[None] | None:
        """Start a task, unless the same one is still running."""
        if key in self.running:
            work.close()
            return None
        task = self.running[key] = asyncio.create_task(self._guarded(key, work))
        return task

    async def _guarded(self, key: Hashable, work: Coroutine[object, object, object]) -> None:
        try:
            await work
        except NotLeading:
            pass
        except Exception:
            self._p.metrics.count("step_errors")
            self._p.log.exception("an error; the next pass tries again", extra={"of": key})
        finally:
            del self.running[key]

    async def end(self, within: float) -> None:
        """Start nothing more, and wait for running writes, up to ``within`` seconds."""
        self.ending = True
        if self.running:
            _, late = await asyncio.wait(self.running.values(), timeout=within)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
