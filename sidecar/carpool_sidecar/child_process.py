"""A child process of the sidecar, connected by two pipes: restarted when it ends or hangs, never waited for.

Messages in both directions have their length before them: decisions of the tuner, tokens of the engine.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from carpool_sidecar.frames import LENGTH

if TYPE_CHECKING:
    import logging
    from collections.abc import Sequence

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""First and longest pause, in seconds, between the end of a process and the start of the next; doubled in between."""

STEADY = 60.0
"""Seconds after which a process counts as working: the next pause is then the first again."""

PARTING = 1.0
"""Seconds for a process that has closed its output to end by itself."""


class Pauses:
    """The pauses between the end of a process and the start of the next."""

    def __init__(self) -> None:
        self._next = FIRST_PAUSE

    def after(self, seconds: float) -> float:
        """Return the pause after a process that ran for so long."""
        pause = FIRST_PAUSE if seconds > STEADY else self._next
        self._next = min(2 * pause, LONGEST_PAUSE)
        return pause


class ChildProcess:
    """Keeps one process running. A subclass says what for, and takes its messages in ``_take``."""

    name = "the process"
    """Its name in the log."""

    longest_message: int
    """Most bytes of a message; a longer length means that the data are not messages."""

    def __init__(self, command: Sequence[str], log: logging.Logger) -> None:
        self.restarts = 0
        self._command = command
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The id of the running process."""
        return None if self._process is None else self._process.pid

    @property
    def _silence(self) -> float | None:
        """Seconds without a message after which it counts as hung; ``None``: it may be silent."""
        return None

    def _began(self) -> None:
        """Handle the start of a new process."""

    def _take(self, body: bytes) -> None:
        """Take a message; raises ``msgspec.DecodeError`` if it is none."""
        raise NotImplementedError

    def _ended(self) -> None:
        """Handle the end of the process: it sends no more messages."""

    def _write(self, message: bytes) -> bool:
        """Send a framed message; returns whether there is a process that takes it."""
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            return False
        process.stdin.write(message)
        return True

    async def run(self) -> None:
        """Run the process, restarting it, until cancelled, or until ``_take`` raises; then end it."""
        loop = asyncio.get_running_loop()
        pauses = Pauses()
        while True:
            began = loop.time()
            try:
                why = await self._run_once()
            except OSError as error:
                why = f"it can't be started: {error}"
            self._ended()
            pause = pauses.after(loop.time() - began)
            self.restarts += 1
            self._log.error("%s is started again", self.name, extra={"detail": why, "pause": pause})
            await asyncio.sleep(pause)

    async def _run_once(self) -> str:
        """Run one process until it ends or hangs; returns why."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the sidecar, which needs it until it has drained
        )
        output, source = process.stdout, process.stdin
        assert output is not None  # noqa: S101 - for the type checker: it was asked for
        assert source is not None  # noqa: S101 - likewise
        self._process = process
        try:
            self._began()
            while True:
                async with asyncio.timeout(self._silence):
                    length = int.from_bytes(await output.readexactly(LENGTH), "little")
                    if length > self.longest_message:
                        return f"what it says is no message: {length} bytes"
                    body = await output.readexactly(length)
                self._take(body)
        except asyncio.IncompleteReadError:
            try:
                async with asyncio.timeout(PARTING):
                    return f"it ended with code {await process.wait()}"
            except TimeoutError:
                return "it closed its output"
        except TimeoutError:
            return f"it was silent for {self._silence:g} s"
        except msgspec.DecodeError as error:
            return f"what it says is no message: {error}"
        finally:
            self._process = None
            source.close()
            if process.returncode is None:
                process.kill()
                await process.wait()
