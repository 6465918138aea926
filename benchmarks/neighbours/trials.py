"""One trial: a model server, with or without a sidecar in front, healthy callers, and one neighbour."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from processes import Process, free_port

from neighbours.callers import Callers
from neighbours.catalogue import RATE
from neighbours.line import Line
from neighbours.model import head

if TYPE_CHECKING:
    from collections import Counter

    from neighbours.catalogue import Neighbour

WARM_UP = 3.0
"""Seconds of healthy load before a neighbour comes: the sidecar learns how long batches take, and merges from then."""

MAX_BATCH, MAX_WAIT, MAX_IN_FLIGHT = 32, 0.1, 1
"""The sidecar's parameters. It holds requests for long, so that each shares its batch with many others."""

SIDECAR_FILES = 1024
"""Soft limit of open files that the sidecar starts with: what a login shell has."""

ENDS_WITHIN = 30.0
"""Seconds that a neighbour has to end when its time is over: all that it waits for is bounded."""

GUARD_MIB = 3072.0
"""A sidecar with more memory than this is ended: the machine has other work."""

_FOLDER = Path(__file__).parents[1]


class Seen(NamedTuple):
    """What a trial came to. Times in seconds; the last four only where a sidecar was there."""

    outcomes: Counter[str]
    """Healthy requests by what ``model.judge`` says of their answers."""
    latencies: list[float]
    """Of right answers, ascending."""
    theirs: dict[str, int]
    """What the neighbour met with."""
    rows_per_call: float
    """Rows in a call of the model, of all callers."""
    livez_gap: float = 0.0
    """Longest time between two answers to ``/livez``."""
    livez_cpu: float = 0.0
    """Most CPU time that the sidecar spent between a question and its answer."""
    peak_mib: float = 0.0
    """The most memory that was resident at any time."""
    ended: bool = False
    """Whether the sidecar had to be ended for its memory."""

    def quantile(self, share: float) -> float:
        """Return the latency that so large a share of right answers do not exceed; 0 without any."""
        return self.latencies[max(round(share * len(self.latencies)) - 1, 0)] if self.latencies else 0.0


async def alone(neighbour: Neighbour, seconds: float) -> Seen:
    """Play a neighbour against the model server itself."""
    with _python("server", port := free_port()) as server:
        callers = Callers(port, RATE, seconds)
        load = asyncio.create_task(callers.run())
        theirs = await _beside(neighbour, port, seconds, load)
        return Seen(callers.outcomes, sorted(callers.latencies), theirs, await _rows_per_call(server, (0, 0)))


async def behind_sidecar(neighbour: Neighbour, seconds: float, *, warm_up: float = WARM_UP) -> Seen:
    """Play a neighbour against a sidecar."""
    with (
        tempfile.TemporaryDirectory(prefix="carpool-neighbours-") as folder,
        _python("server", free_port()) as server,
        _sidecar(Path(folder), server.port, admin := free_port()) as sidecar,
    ):
        callers = Callers(sidecar.port, RATE, seconds, warm_up=warm_up)
        load = asyncio.create_task(callers.run())
        await asyncio.sleep(warm_up)
        before = await _counts(server)
        memory = Memory(sidecar.pid)
        guard = asyncio.create_task(memory.watch())
        probe = await _program("probe", str(admin), str(sidecar.pid), str(seconds))
        theirs = await _beside(neighbour, sidecar.port, seconds, load)
        printed, _ = await probe.communicate()
        gap, cpu = json.loads(printed)
        guard.cancel()
        memory.look()
        rows = await _rows_per_call(server, before)
        return Seen(callers.outcomes, sorted(callers.latencies), theirs, rows, gap, cpu, memory.peak_mib, memory.ended)


class Memory:
    """The most memory that a process ever had; ends it beyond ``GUARD_MIB``."""

    def __init__(self, pid: int) -> None:
        self.peak_mib = 0.0
        self.ended = False
        self._status = Path(f"/proc/{pid}/status")
        self._pid = pid

    async def watch(self) -> None:
        """Look twenty times a second."""
        while not self.ended:
            self.look()
            if self.peak_mib > GUARD_MIB:
                self.ended = True
                os.kill(self._pid, signal.SIGKILL)
            await asyncio.sleep(0.05)

    def look(self) -> None:
        """Read the peak that the kernel keeps."""
        found = re.search(r"VmHWM:\s+(\d+) kB", self._status.read_text("utf-8"))
        if found is not None:  # a process that has ended has none
            self.peak_mib = int(found[1]) / 1024


async def _beside(neighbour: Neighbour, port: int, seconds: float, load: asyncio.Task[None]) -> dict[str, int]:
    """Have a neighbour act for so long, and wait for the healthy load; return what the neighbour met with.

    Raises ``RuntimeError`` where the neighbour itself broke: a trial without it would show nothing.
    """
    process = await _program("catalogue", neighbour.name, str(port), str(seconds))
    try:
        await load
        printed, _ = await asyncio.wait_for(process.communicate(), ENDS_WITHIN)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"the neighbour {neighbour.name} ended with {process.returncode}")
    return dict(json.loads(printed))


async def _program(module: str, *arguments: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", f"neighbours.{module}", *arguments]
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=_environment())


def _python(module: str, port: int) -> Process:
    return Process([sys.executable, "-m", f"neighbours.{module}", str(port)], port, env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])}


def _sidecar(folder: Path, upstream: int, admin: int) -> Process:
    """Start a sidecar with the defaults, but for its parameters and an SLO that sheds nothing."""
    port = free_port()
    parameters = {"maxBatch": MAX_BATCH, "maxWait": f"{MAX_WAIT * 1e3:g}ms", "maxInFlight": MAX_IN_FLIGHT}
    config = {
        "listen": f"127.0.0.1:{port}",
        "admin": f"127.0.0.1:{admin}",
        "upstream": {"url": f"http://127.0.0.1:{upstream}"},
        "shutdown": {"lame": "0s", "limit": "1s"},
        "log": "Error",
        "parameters": {"*": parameters},
        "policy": {"slo": {"latency": {"p99": "5s"}}},
    }
    path = folder / "sidecar.json"
    path.write_bytes(msgspec.json.encode(config))
    command = [sys.executable, "-m", "carpool_sidecar.main", "--config", str(path)]
    return Process(["sh", "-c", f'ulimit -Sn {SIDECAR_FILES}; exec "$@"', "sh", *command], port)


async def _counts(server: Process) -> tuple[int, int]:
    """Return how many calls of the model the server has computed, and of how many rows."""
    line = Line(server.port)
    _, answer = await line.ask(head(b"GET", b"/counts"))
    line.close()
    calls, rows = json.loads(answer.partition(b"\r\n\r\n")[2])
    return calls, rows


async def _rows_per_call(server: Process, before: tuple[int, int]) -> float:
    calls, rows = await _counts(server)
    return (rows - before[1]) / max(calls - before[0], 1)
