"""The sidecar's end of the pipe to its tuner process: never waits for it, starts it again when it ends or hangs."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import msgspec

from carpool_sidecar.tuning.messages import (
    LENGTH,
    Answered,
    Decided,
    Measured,
    Message,
    Observations,
    frame,
    read_reply,
)

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Sequence

COMMAND = (sys.executable, "-m", "carpool_sidecar.tuning.tuner_process")

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds between the end of one tuner process and the start of the next: doubled from the first to the longest."""

STEADY = 60.0
"""Seconds after which a process counts as one that works: the next pause is the first again."""

SILENCE = 60.0
"""Seconds without a word after which a process hangs. It is asked twice a second, and may take one of CPU a model."""

PARTING = 1.0
"""Seconds for a process that has closed its output to end by itself."""

MAX_REPLY = 1 << 24
"""Bytes of a model's decision at most; what claims to be more is something else than a decision."""


class TunerLink:
    """Keeps one tuner process running. ``started`` is called with each new one, to tell it what it needs to know."""

    def __init__(
        self,
        heard: Callable[[Decided | Measured], None],
        started: Callable[[], None],
        log: logging.Logger,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.restarts = 0
        self._heard = heard
        self._started = started
        self._log = log
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._answered = True
        """Whether the process has decided on all that it was told."""

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
                why = await self._run_once()
            except OSError as error:
                why = f"it can't be started: {error}"
            if loop.time() - began > STEADY:
                pause = FIRST_PAUSE
            self.restarts += 1
            self._log.error("the tuner process is started again", extra={"detail": why, "pause": pause})
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def send(self, message: Message) -> bool:
        """Pass a message on if the process takes it; returns whether it does.

        Observations wait for the decisions on those before them, so that none is about what was long ago; the process
        sees that as a longer interval. A setup always goes to a process that runs.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            return False
        if isinstance(message, Observations) and not self._answered:
            return False
        process.stdin.write(frame(message))
        if isinstance(message, Observations):
            self._answered = False
        return True

    async def _run_once(self) -> str:
        """Run one process until it is of no use any more; returns why."""
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        output, source = process.stdout, process.stdin
        assert output is not None  # noqa: S101 - for the type checker: it was asked for
        assert source is not None  # noqa: S101 - likewise
        self._process, self._answered = process, True
        try:
            self._started()
            while True:
                async with asyncio.timeout(SILENCE):
                    length = int.from_bytes(await output.readexactly(LENGTH), "little")
                    if length > MAX_REPLY:
                        return f"what it says is no decision: {length} bytes"
                    body = await output.readexactly(length)
                reply = read_reply(body)
                if isinstance(reply, Answered):
                    self._answered = True
                else:
                    self._heard(reply)
        except asyncio.IncompleteReadError:
            try:
                async with asyncio.timeout(PARTING):
                    return f"it ended with code {await process.wait()}"
            except TimeoutError:
                return "it closed its output"
        except TimeoutError:
            return f"it was silent for {SILENCE:g} s"
        except msgspec.DecodeError as error:
            return f"what it says is no decision: {error}"
        finally:
            self._process = None
            source.close()
            if process.returncode is None:
                process.kill()
                await process.wait()
