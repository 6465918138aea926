"""The sidecar's end of the pipe to its tuner process: never waits for it, starts it again when it ends."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from carpool_sidecar.wire import LENGTH, Decisions, Message, frame, read_decisions

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Sequence

COMMAND = (sys.executable, "-m", "carpool_sidecar.tuner_process")

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds between the end of one tuner process and the start of the next: doubled from the first to the longest."""

STEADY = 60.0
"""Seconds after which a process counts as one that works: the next pause is the first again."""

MAX_UNREAD = 1 << 20
"""Bytes that the process may leave unread; beyond, observations are dropped, which it sees as a longer interval."""


class TunerLink:
    """Keeps one tuner process running. ``started`` is called with each new one, to tell it what it needs to know."""

    def __init__(
        self,
        decided: Callable[[Decisions], None],
        started: Callable[[], None],
        log: logging.Logger,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.restarts = 0
        self._decided = decided
        self._started = started
        self._log = log
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Run the process, again and again, until cancelled; it ends with this."""
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE
        while True:
            began = loop.time()
            try:
                code = await self._run_once()
            except OSError as error:
                code = error.errno or 1
            if loop.time() - began > STEADY:
                pause = FIRST_PAUSE
            self.restarts += 1
            self._log.error("the tuner process ended; it is started again", extra={"code": code, "pause": pause})
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def send(self, message: Message) -> bool:
        """Pass a message on if the process takes it; returns whether it does."""
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            return False
        if process.stdin.transport.get_write_buffer_size() > MAX_UNREAD:
            return False
        process.stdin.write(frame(message))
        return True

    async def _run_once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        output, source = process.stdout, process.stdin
        assert output is not None  # noqa: S101 - for the type checker: it was asked for
        assert source is not None  # noqa: S101 - likewise
        self._process = process
        try:
            self._started()
            while True:
                length = int.from_bytes(await output.readexactly(LENGTH), "little")
                self._decided(read_decisions(await output.readexactly(length)))
        except asyncio.IncompleteReadError:
            return await process.wait()
        finally:
            self._process = None
            source.close()
            if process.returncode is None:
                process.kill()
                await process.wait()
