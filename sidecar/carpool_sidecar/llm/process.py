"""The engine's server as seen by the sidecar: a child process that is also its upstream."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.policy.plain import PolicyError
from carpool_sidecar.child_process import Pauses
from carpool_sidecar.config.settings import Upstream
from carpool_sidecar.llm.model_file import describe

if TYPE_CHECKING:
    import logging

    from carpool_sidecar.config.settings import Llm

CONNECTIONS = 4096
"""Requests with the engine at once, at most."""

FOLDER, SOCKET = "carpool-engine-", "engine.sock"
"""Beginning of the name of its folder, and its socket in it."""

LONGEST_ADDRESS = 107
"""Bytes of a Unix socket's path, which the system limits."""

PARTING = 5.0
"""Seconds that it may take to end."""


def check(config: Llm) -> None:
    """Check what can be checked before the engine is started.

    Raises ``PolicyError`` naming the field.
    """
    if importlib.util.find_spec("openvino_genai") is None:
        raise PolicyError("llm", "OpenVINO GenAI is not installed: in Carpool's folder, pip install '.[llm]'")
    path = Path(tempfile.gettempdir(), f"{FOLDER}12345678", SOCKET)
    if len(os.fsencode(path)) > LONGEST_ADDRESS:
        raise PolicyError(
            "llm", f"a socket can't have so long a path as {path}: set TMPDIR to a folder with a shorter one"
        )
    describe(Path(config.path))


class EngineProcess:
    """Keeps the engine's server running, on a socket that only this user can reach."""

    def __init__(self, config: Llm, log: logging.Logger) -> None:
        """Prepare it. Raises ``PolicyError`` if ``check`` does."""
        check(config)
        self._config = config
        self._log = log
        # It is also removed if there is no sidecar in the end, because another part of it can't be made.
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True)
        self._address = f"unix:{self._folder.name}/{SOCKET}"
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the model can't be loaded: there is nothing to serve."""

    @property
    def upstream(self) -> Upstream:
        """The model server that it is."""
        return Upstream(self._address, timeout=self._config.timeout, ready="/health", max_forwarded=CONNECTIONS)

    async def run(self) -> None:
        """Run it until cancelled, or until the model turns out not to load."""
        loop = asyncio.get_running_loop()
        pauses = Pauses()
        while True:
            began, why = loop.time(), "it ended"
            try:
                if await self._run_once():
                    return
            except OSError as error:
                why = f"it can't be started: {error}"
            pause = pauses.after(loop.time() - began)
            self._log.error("the engine's server is started again", extra={"detail": why, "pause": pause})
            await asyncio.sleep(pause)

    def close(self) -> None:
        """Remove the socket; ``run`` has ended before."""
        self._folder.cleanup()

    async def _run_once(self) -> bool:
        """Run it to its end; returns whether the model can't be loaded."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._address.removeprefix("unix:"))  # noqa: PTH108 - of the one before, at once
        command = (sys.executable, "-m", "carpool_sidecar.llm.main", self._config.argument())
        process = await asyncio.create_subprocess_exec(
            *command,
            self._address,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the sidecar, which needs it until it has drained
        )
        try:
            assert process.stdout is not None  # noqa: S101 - for the type checker: it was asked for
            said = await process.stdout.read()
            await process.wait()
        finally:
            await _end(process)
        if process.returncode != 2:
            return False
        self.broken.set_result(said.decode("utf-8", "replace").strip())
        return True


async def _end(process: asyncio.subprocess.Process) -> None:
    """Have it end: by the end of its input, else by force."""
    if process.returncode is not None:
        return
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(PARTING):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
