"""The only thread that uses the database: the event loop hands it work and goes on.

All waiting work goes into one transaction, so one wait for the disk serves all of it. Callers get their result only
after the transaction has reached the disk.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

T = TypeVar("T")

TOGETHER = 256
"""Pieces of work in one transaction at most."""

Job = tuple["Callable[[], Any]", "asyncio.Future[Any]"]


class Writer:
    """Runs work, in order, in the thread."""

    def __init__(self, connection: sqlite3.Connection, committed: Callable[[], None]) -> None:
        """Start the thread; ``committed`` is called in it after each transaction, outside of any."""
        self._connection = connection
        self._committed = committed
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="carpool-jobs", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``work`` in a transaction; the future has its result once that is on disk, or its exception."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put((work, future))
        return future

    async def close(self) -> None:
        """Finish the work queued so far, then end the thread."""
        self._queue.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _run(self) -> None:
        while self._run_some():
            pass

    def _run_some(self) -> bool:
        """Run the waiting work; return whether more may come. While the thread waits it keeps no result alive."""
        if (first := self._queue.get()) is None:
            return False
        jobs = [first]
        while len(jobs) < TOGETHER and not self._queue.empty():
            following = self._queue.get()
            if following is None:
                self._together(jobs)
                return False
            jobs.append(following)
        self._together(jobs)
        return True

    def _together(self, jobs: list[Job]) -> None:
        run = self._connection.execute
        results: list[tuple[bool, Any]] = []
        try:
            run("BEGIN IMMEDIATE")
            for work, _ in jobs:
                run("SAVEPOINT one")
                try:
                    results.append((True, work()))
                except Exception as error:  # noqa: BLE001 - the caller gets it
                    run("ROLLBACK TO one")
                    results.append((False, error))
                run("RELEASE one")
            run("COMMIT")
            self._committed()
        except Exception as error:  # noqa: BLE001 - the disk is full or gone: nothing was written
            with suppress(Exception):
                run("ROLLBACK")
            results = [(False, error)] * len(jobs)
        with suppress(RuntimeError):  # the loop is closed: no one waits
            self._loop.call_soon_threadsafe(_deliver, jobs, results)


def _deliver(jobs: list[Job], results: list[tuple[bool, Any]]) -> None:
    for (_, future), (good, result) in zip(jobs, results, strict=True):
        if future.done():
            continue  # the caller has left
        if good:
            future.set_result(result)
        else:
            future.set_exception(result)
