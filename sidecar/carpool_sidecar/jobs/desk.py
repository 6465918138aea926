"""The parts of the jobs feature, assembled, started and ended with the sidecar."""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

from carpool.exchange import report
from carpool.policy.plain import PolicyError
from carpool_sidecar.http1.messages import find
from carpool_sidecar.jobs.backlog import Backlog
from carpool_sidecar.jobs.records import Refused, State
from carpool_sidecar.jobs.runner import Runner
from carpool_sidecar.jobs.storage.batches import Batches
from carpool_sidecar.jobs.storage.database import Database
from carpool_sidecar.jobs.storage.files import Files
from carpool_sidecar.jobs.storage.jobs import JobStore
from carpool_sidecar.jobs.storage.writer import Writer

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from carpool_sidecar.config.settings import Jobs, SidecarConfig
    from carpool_sidecar.http1.server.exchange import Exchange
    from carpool_sidecar.http1.server.server import Server
    from carpool_sidecar.jobs.headroom import Seen


class Desk:
    """Accepts jobs. Raises ``OSError`` or ``PolicyError`` if the file or the credential can't be read."""

    def __init__(
        self,
        config: SidecarConfig,
        settings: Jobs,
        *,
        look: Callable[[], Seen],
        ready: Callable[[], bool],
        log: logging.Logger,
    ) -> None:
        self.settings = settings
        self.credential = credential(settings)
        self._database = Database(settings.path)
        self.store = JobStore(self._database, settings)
        self.files = Files(self._database, self.store, settings)
        self.batches = Batches(self._database, self.store, self.files, settings)
        self._log = log
        found = self._recover(config.policy.idempotent)
        if found:
            log.warning(
                "jobs were running when the last process ended",
                extra={"jobs": found, "sent_again": config.policy.idempotent},
            )
        self.writer = Writer(self._database.connection, self.store.count)
        self.runner = Runner(
            config,
            settings,
            self.writer,
            Backlog(self.store, self.batches, int(settings.max_bytes)),
            look=look,
            ready=ready,
            credential=self.credential,
            log=log,
        )
        self._running: asyncio.Task[None] | None = None

    async def start(self, server: Server) -> None:
        """Begin to run queued jobs."""
        await self.runner.listen(server)
        self._running = asyncio.get_running_loop().create_task(self.runner.run())
        self._running.add_done_callback(self._ended)

    def drain(self) -> None:
        """Accept and start no more jobs; those under way go on."""
        self.runner.stop()

    async def close(self) -> None:
        """Abort the jobs under way and close the file."""
        await self.runner.close()
        if self._running is not None:
            await asyncio.wait({self._running})
        await self.writer.close()
        self._database.close()

    def report(self) -> report.Jobs:
        """Return the report's part about jobs."""
        totals, runner = self.store.totals, self.runner
        return report.Jobs(
            states={state: totals[state] for state in State if totals[state]},
            lines=totals["lines"],
            bytes=totals["bytes"],
            max_bytes=int(self.settings.max_bytes),
            in_flight=len(runner.flights),
            limit=runner.headroom.limit,
        )

    def check_open(self) -> None:
        """Refuse new jobs while this process ends."""
        if self.runner.stopping:
            raise Refused(503, "draining", "this replica is shutting down: try again")

    def owner(self, exchange: Exchange) -> bytes | None:
        """Return the owner of submitted jobs and files: a hash of the Authorization header, if there is one."""
        return self.store.owner(find(exchange.headers, b"authorization"))

    def owner_of(self, exchange: Exchange) -> bytes:
        """Return the owner for lists, which need an Authorization header."""
        owner = self.owner(exchange)
        if owner is None:
            text = "lists are by caller: send the Authorization header that these were submitted with"
            raise Refused(401, "jobs-owner", text)
        return owner

    def _recover(self, idempotent: bool) -> int:
        run, now = self._database.connection.execute, time()
        run("BEGIN IMMEDIATE")
        found = self.store.recover(now, idempotent=idempotent) + self.batches.recover(now, idempotent=idempotent)
        run("COMMIT")
        self.store.count()
        return found

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("jobs are not run any more", exc_info=error)


def credential(settings: Jobs) -> bytes | None:
    """Return the value of the header that jobs are sent with; raises ``PolicyError`` if its file can't be used."""
    path = settings.authorization_file
    if path is None:
        return None
    try:
        value = Path(path).read_bytes().strip()
    except OSError as error:
        raise PolicyError("jobs.authorizationFile", f"{path!r}: {error.strerror}: name a readable file") from None
    if not value or b"\n" in value or b"\r" in value or b"\0" in value:
        raise PolicyError("jobs.authorizationFile", f"{path!r} has to hold one line: the header's value, as Bearer ...")
    return value
