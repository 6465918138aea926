"""kopf's handlers: they watch policies and workloads, and report them to the fleet. They decide and write nothing.

No timers, daemons, finalizers, change handlers or peering, so kopf never writes to the cluster. It runs in a thread
with its own event loop, because on exit it cancels every task of its loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

import kopf

from carpool_operator.cluster.kinds import KINDS

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from carpool_operator.cluster.fleet import Fleet, Sync
    from carpool_operator.cluster.kube import Kube

PAGE = 100
"""Objects per page of kopf's own lists, which it holds as dictionaries."""

LONGEST = 60.0
"""Longest pause between two starts, in seconds."""


def registry(kube: Kube, fleet: Fleet, loop: asyncio.AbstractEventLoop, kinds: Iterable[str]) -> kopf.OperatorRegistry:
    """Return the handlers that report objects of ``kinds`` to ``fleet`` in the fleet's own loop."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    def login(**_: object) -> kopf.ConnectionInfo:
        return credentials(kube)

    def follow(kind: str) -> None:
        group, _, version = KINDS[kind].api.rpartition("/")

        @kopf.on.event(group, version, KINDS[kind].plural, registry=handlers, id=kind)
        async def report(event: kopf.RawEvent, **_: object) -> None:
            """Report the event to the fleet. No decision is made here."""
            if not loop.is_closed():
                loop.call_soon_threadsafe(fleet.handle_event, kind, event["type"] == "DELETED", event["object"])

    for kind in kinds:
        follow(kind)
    return handlers


def credentials(kube: Kube) -> kopf.ConnectionInfo:
    """Return our client's address and credentials in kopf's format."""
    configuration = kube.configuration
    token = configuration.get_api_key_with_prefix("BearerToken") or configuration.get_api_key_with_prefix(
        "authorization"
    )
    scheme, _, secret = token.partition(" ") if token else ("", "", "")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        ca_data=configuration.ca_cert_data,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme.title() or None,
        token=secret or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings: discovery only at the start, no events of its own, pages, few objects at a time."""
    chosen = kopf.OperatorSettings()
    chosen.scanning.disabled = True
    chosen.posting.enabled = False
    chosen.watching.chunk_size = PAGE
    chosen.watching.server_timeout = 290
    chosen.networking.request_timeout = 30
    chosen.networking.enforce_retry_after = True
    chosen.queueing.worker_limit = 20
    # An idle worker keeps the last object in memory, and the others of a list wait for its place, each as a dict: with
    # 0.1 s, 1,900 of 2,000 objects were held when a list had arrived; with 1 ms, 60.
    chosen.queueing.idle_timeout = 0.001
    chosen.process.ultimate_exiting_timeout = None
    return chosen


class Kopf:
    """Keeps kopf running: it is restarted when it stops, for example because its CRD is deleted."""

    def __init__(self, kube: Kube, fleet: Fleet, sync: Sync, *, random: random.Random) -> None:
        self._kube = kube
        self._fleet = fleet
        self._sync = sync
        self._random = random
        self._log = logging.getLogger("carpool.kopf")

    async def run(self) -> None:
        """Run kopf until cancelled."""
        failures = 0
        while True:
            # It stops when a resource is removed, and ignores one that is missing when it starts. A successful list
            # since then shows that all of them exist.
            await self._sync.ok.wait()
            started = asyncio.get_running_loop().time()
            await self._session()
            self._sync.doubt()
            failures = 0 if asyncio.get_running_loop().time() - started > LONGEST else min(failures + 1, 10)
            await asyncio.sleep(min(LONGEST, 2.0**failures) * self._random.uniform(0.5, 1.0))

    async def _session(self) -> None:
        """Run kopf in a thread until it ends; cancelling this stops it."""
        loop, theirs = asyncio.get_running_loop(), asyncio.new_event_loop()
        # A flag of that loop: kopf would wait for a thread's flag in another thread, which ends only with the flag.
        ended, stop = asyncio.Event(), asyncio.Event()
        self._sync.kinds_changed.clear()
        # kopf ignores a kind that is missing when it starts, and ends if it may not read a namespace. It is restarted
        # when that changes.
        kinds, namespaces = self._fleet.coverage.followed()
        handlers = registry(self._kube, self._fleet, loop, kinds)

        def session() -> None:
            try:
                with asyncio.Runner(loop_factory=lambda: theirs) as runner:
                    runner.run(
                        kopf.operator(
                            registry=handlers,
                            settings=settings(),
                            standalone=True,
                            clusterwide=None in namespaces,
                            namespaces=[each for each in namespaces if each is not None],
                            stop_flag=stop,
                        )
                    )
            except Exception as error:  # noqa: BLE001 - whatever ended it, it is started again
                self._log.warning(
                    "kopf gave up; starting it again", extra={"error": f"{type(error).__name__}: {error}"}
                )
            finally:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=session, name="kopf", daemon=True).start()
        waiting = [asyncio.create_task(each.wait()) for each in (ended, self._sync.kinds_changed)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not theirs.is_closed():
                theirs.call_soon_threadsafe(stop.set)
            for each in waiting:
                each.cancel()
        await ended.wait()
