"""The server's end of the pipes to the computing process: starts it, restarts it, and never waits for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from carpool_sidecar.child_process import ChildProcess
from carpool_sidecar.llm.messages import Broken, frame, read_reply

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from carpool_sidecar.config.settings import Llm
    from carpool_sidecar.llm.messages import Message, Reply


class CannotLoadError(Exception):
    """The model can't be loaded: another start would end alike."""


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

    def _take(self, body: bytes) -> None:
        reply = read_reply(body)
        if isinstance(reply, Broken):
            raise CannotLoadError(reply.why)
        self._heard(reply)

    def _ended(self) -> None:
        self._lost()

    def send(self, message: Message) -> None:
        """Send a message; without a process it is dropped, since ``lost`` was called for its request."""
        self._write(frame(message))
