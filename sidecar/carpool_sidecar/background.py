"""Work in the background, until the sidecar closes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Coroutine


class Background:
    """Tasks that run until ``close``. One that fails is logged."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Begin a task."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    async def close(self) -> None:
        """Cancel all, and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("a background task ended", exc_info=error)
