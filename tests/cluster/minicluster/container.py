"""A container's process: in the pod's network, with a root, hostname and process numbers of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from minicluster.client import Object

_LAUNCHER = Path(__file__).with_name("launcher.py")
# The interpreter itself: a virtual environment's would read its packages first.
_PYTHON = os.path.realpath(sys.executable)


class StartError(Exception):
    """The process could not be started; the message says why."""


class Process:
    """A running container."""

    def __init__(self, wrapper: asyncio.subprocess.Process, pid: int, environment: Mapping[str, str]) -> None:
        self._wrapper = wrapper  # unshare: ends as the container does
        self._pid = pid
        self._environment = environment
        self._killed = False

    @classmethod
    async def start(cls, spec: Object, *, folder: Path, network: str, log: Path) -> Process:
        """Start it as ``launcher`` says, with both its outputs appended to a log, in a network namespace.

        Raises:
            StartError: It did not start.
        """
        (folder / "scratch").mkdir(parents=True, exist_ok=True)
        spec = {**spec, "scratch": str(folder / "scratch")}
        file = folder / "spec.json"
        file.write_text(json.dumps(spec))
        reading, writing = os.pipe()
        with log.open("ab") as output:
            wrapper = await asyncio.create_subprocess_exec(
                *("nsenter", f"--net={network}", "unshare", "--pid", "--mount", "--uts", "--ipc", "--fork"),
                *("--kill-child", _PYTHON, "-I", "-S", str(_LAUNCHER), str(file), str(writing)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(writing,),
            )
        os.close(writing)
        try:
            said = await _line(reading)
        except BaseException:
            wrapper.kill()
            raise
        if said != "ok":
            await wrapper.wait()
            raise StartError(said or "the container's first process ended")
        return cls(wrapper, _child(wrapper.pid), spec["environment"])

    async def wait(self) -> int:
        """Return its exit code once it has ended; 128 and the number for a signal."""
        code = await self._wrapper.wait()
        if self._killed and code == 1:
            return 128 + signal.SIGKILL  # unshare cannot end by SIGKILL as its child did: it fails at trying
        return code if code >= 0 else 128 - code

    def signal(self, number: signal.Signals) -> None:
        """Signal it. As in any container, the first process ignores SIGTERM unless it handles it."""
        if self._wrapper.returncode is None and self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def kill(self) -> None:
        """End it and all its children at once."""
        self._killed = True
        self.signal(signal.SIGKILL)

    async def run(self, argv: Sequence[str]) -> int:
        """Run a command in the container and return its exit code; its outputs are dropped."""
        inside = ("nsenter", f"--target={self._pid}", "--mount", "--net", "--pid", "--uts", "--ipc", "--")
        process = await asyncio.create_subprocess_exec(
            *inside,
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(self._environment),
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _child(pid: int) -> int:
    """Return the process number of a process's only child, 0 when it has ended already."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    except (OSError, ValueError):
        return 0


async def _line(descriptor: int) -> str:
    """Return the line that comes through a pipe, empty when none does, and close it."""
    reader = asyncio.StreamReader()
    with os.fdopen(descriptor, "rb", buffering=0) as pipe:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            return (await reader.readline()).decode().strip()
        finally:
            transport.close()
