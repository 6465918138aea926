"""The server's end of the pipes to the process that computes: starts it, again when it ends, and never waits for it."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import msgspec

from carpool_sidecar.llm.messages import LENGTH, Broken, frame, read_reply

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from carpool_sidecar.config.settings import Llm
    from carpool_sidecar.llm.messages import Message, Reply

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds between the end of one process and the start of the next: doubled from the first to the longest."""

STEADY = 60.0
"""Seconds after which a process counts as one that works: the next pause is the first again."""

MAX_REPLY = 1 << 28
"""Bytes of a reply at most; what claims to be more is something else."""


class CannotLoadError(Exception):
    """The model can't be loaded: another start would end alike."""


class WorkerLink:
    """Keeps one computing process running.

    ``heard`` gets each reply; ``lost`` is called when a process has ended: it answers nothing more of what it had.
    """

    def __init__(
        self,
        config: Llm,
        heard: Callable[[Reply], None],
        lost: Callable[[], None],
        log: logging.Logger,
        command: tuple[str, ...] = (sys.executable, "-m", "carpool_sidecar.llm.worker"),
    ) -> None:
        self._command = (*command, msgspec.json.encode(config).decode())
        self._heard = heard
        self._lost = lost
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return None if self._process is None else self._process.pid

    def send(self, message: Message) -> None:
        """Pass a message on; without a process it is dropped, since ``lost`` was called for what it was about."""
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(frame(message))

    async def run(self) -> None:
        """Run the process, again and again, until cancelled; it ends with this.

        Raises ``CannotLoadError``.
        """
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE
        while True:
            began = loop.time()
            try:
                why = await self._run_once()
            except OSError as error:
                why = f"it can't be started: {error}"
            self._lost()
            if loop.time() - began > STEADY:
                pause = FIRST_PAUSE
            self._log.error("the engine's process is started again", extra={"detail": why, "pause": pause})
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _run_once(self) -> str:
        """Run one process until it ends; returns why."""
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_REPLY
        )
        output, source = process.stdout, process.stdin
        assert output is not None  # noqa: S101 - for the type checker: it was asked for
        assert source is not None  # noqa: S101 - likewise
        self._process = process
        try:
            while True:
                length = int.from_bytes(await output.readexactly(LENGTH), "little")
                if length > MAX_REPLY:
                    return f"what it says is no reply: {length} bytes"
                reply = read_reply(await output.readexactly(length))
                if isinstance(reply, Broken):
                    raise CannotLoadError(reply.why)
                self._heard(reply)
        except asyncio.IncompleteReadError:
            return f"it ended with code {await process.wait()}"
        except msgspec.DecodeError as error:
            return f"what it says is no reply: {error}"
        finally:
            self._process = None
            source.close()
            if process.returncode is None:
                process.kill()
                await process.wait()
