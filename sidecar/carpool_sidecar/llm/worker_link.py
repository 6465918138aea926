"""The server's end of the pipes to the computing process: starts it, restarts it, and never waits for it."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from carpool_sidecar.child_process import ChildProcess
from carpool_sidecar.llm.messages import Broken, Ping, Pong, Ready, frame, read_reply

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from carpool_sidecar.config.settings import Llm
    from carpool_sidecar.llm.messages import Message, Reply

SLOWEST = 1.0
"""Seconds for a token of a step: slower counts as hung. At 200 GFLOP/s, 70 billion weights take 0.7 s."""

LEAST = 60.0
"""Seconds that a step may take in any case."""


class CannotLoadError(Exception):
    """The model can't be loaded and never was: another start would end alike."""


class WorkerLink(ChildProcess):
    """Keeps one computing process running; ``run`` raises ``CannotLoadError``.

    ``heard`` is called with each reply; ``lost`` when a process has ended: its requests get no more replies.
    """

    name = "the engine's process"
    longest_message = 1 << 28

    def __init__(
        self,
        config: Llm,
        heard: Callable[[Reply], None],
        lost: Callable[[], None],
        log: logging.Logger,
        command: tuple[str, ...] = (sys.executable, "-m", "carpool_sidecar.llm.worker"),
    ) -> None:
        super().__init__((*command, config.argument()), log)
        self._heard = heard
        self._lost = lost
        self._loaded = self._served = False
        # By default 256 s, before requests fail with the timeout.
        self._longest_step = max(LEAST, min(config.timeout, config.max_batched_tokens * SLOWEST))

    async def run(self) -> None:
        """Run the process, and ask it regularly whether it is there: without requests it says nothing by itself."""
        pings = asyncio.create_task(self._ping())
        try:
            await super().run()
        finally:
            pings.cancel()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(self._longest_step / 4)
            if self._loaded:
                self.send(Ping())

    @property
    def _silence(self) -> float | None:
        return self._longest_step if self._loaded else None  # loading takes as long as it takes

    def _take(self, body: bytes) -> None:
        reply = read_reply(body)
        if isinstance(reply, Broken):
            if not self._served:
                raise CannotLoadError(reply.why)
            # It did load before: there may be no memory for a while, or the file is being replaced.
            self._log.error("the model can't be loaded again now", extra={"detail": reply.why})
            return
        if isinstance(reply, Ready):
            self._loaded = self._served = True
        if not isinstance(reply, Pong):
            self._heard(reply)

    def _ended(self) -> None:
        self._loaded = False
        self._lost()

    def send(self, message: Message) -> None:
        """Send a message; without a process it is dropped, since ``lost`` was called for its request."""
        self._write(frame(message))
