"""An engine's processes: started on free ports of 127.0.0.1, counted from outside, ended by their ids."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from peers.engines import SERVERS, Place, row_of

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from peers.engines import Engine, Settings

PATIENCE = 120.0
"""Seconds until the first right answer: Ray takes 20 on an idle machine."""

TICK = os.sysconf("SC_CLK_TCK")


class Device(NamedTuple):
    """What the device has done so far. ``busy``: seconds with a batch in it."""

    batches: int
    rows: int
    busy: float

    def since(self, earlier: Device) -> Device:
        """Return what was done after an earlier look."""
        return Device(self.batches - earlier.batches, self.rows - earlier.rows, self.busy - earlier.busy)


class NotStarted(Exception):  # noqa: N818 - an engine's failure, not ours
    """An engine that never gave a right answer; the text ends with its last words."""


class Running:
    """An engine that serves. Every process that carries its folder in its environment is its own."""

    def __init__(self, engine: Engine, settings: Settings, binaries: Path, profile: Path) -> None:
        self.engine = engine
        self._folder = tempfile.TemporaryDirectory(prefix="carpool-peer-")
        folder = Path(self._folder.name)
        self.port, *others = _free_ports(3)
        self._stats_port = others[0]
        self._place = Place(binaries, folder, profile.resolve(), self.port, (others[0], others[1]))
        self._mark = f"{folder}\0".encode()
        self._log = folder / "log"
        told = {"profile": str(self._place.profile), "folder": str(folder), "settings": settings}
        env = {
            **os.environ,
            **dict(engine.env),
            "CARPOOL_PEER": msgspec.json.encode(told).decode(),
            "CARPOOL_PEER_FOLDER": str(folder),
            # Ours stays: it may name the tree that Carpool is measured in.
            "PYTHONPATH": os.pathsep.join([str(SERVERS), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PATH": f"{binaries}:{os.environ['PATH']}",
        }
        self._started: list[subprocess.Popen[bytes]] = []
        with self._log.open("wb") as log:
            for command in engine.prepare(self._place, settings):
                self._started.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=folder,
                        start_new_session=True,
                    )
                )  # fmt: skip
        try:
            self._await()
        except BaseException:
            self.stop()
            raise

    def serves(self) -> bool:
        """Say whether a row comes back."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", self.engine.target, self.engine.encode(row_of(0)), headers)
            answer = connection.getresponse()
            return answer.status == 200 and self.engine.echoes(row_of(0), answer.read())
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def processes(self) -> list[int]:
        """Return the ids of all its processes."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if b"CARPOOL_PEER_FOLDER=" + self._mark in (entry / "environ").read_bytes() + b"\0":
                        found.append(int(entry.name))
        return found

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time used so far, user and system, by kind of process; with those they waited for."""
        used: dict[str, float] = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                # The name, in brackets, may hold anything; utime is the 12th field after it.
                fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
                name = label(arguments)
                used[name] = used.get(name, 0.0) + sum(map(int, fields[11:15])) / TICK
        return used

    def waited_seconds(self) -> float:
        """Return how long its threads have stood in line for a core so far: the kernel's own count."""
        waited = 0
        for pid in self.processes():
            for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):
                    waited += int(task.read_text("utf-8").split()[1])
        return waited / 1e9

    def device(self) -> Device:
        """Return what the device has done so far."""
        if self.engine.name == "carpool":
            connection = http.client.HTTPConnection("127.0.0.1", self._stats_port, timeout=5)
            connection.request("GET", "/stats")
            stats = msgspec.json.decode(connection.getresponse().read())
            connection.close()
            return Device(sum(stats["batches"].values()), stats["rows"], stats["busySeconds"])
        lines = (self._place.folder / "batches").read_text("utf-8").split()
        return Device(len(lines) // 2, sum(map(int, lines[::2])), sum(map(float, lines[1::2])))

    def settle(self, limit: float = 20.0) -> None:
        """Wait until nothing is left of a load, for so many seconds at most."""
        deadline = time.monotonic() + limit
        before = -1
        while (batches := self.device().batches) != before and time.monotonic() < deadline:
            before = batches
            time.sleep(0.5)

    def stop(self) -> None:
        """End all its processes."""
        for each in reversed(self._started):
            each.terminate()
        deadline = time.monotonic() + 10
        while self.processes() and time.monotonic() < deadline:
            for each in self._started:
                each.poll()
            time.sleep(0.1)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for each in self._started:
            each.wait()
        self._folder.cleanup()

    def _await(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.serves():
            if any(each.poll() is not None for each in self._started) or time.monotonic() > deadline:
                raise NotStarted(self._log.read_text("utf-8", "replace").strip()[-1500:])
            time.sleep(0.2)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def label(arguments: list[str]) -> str:
    """Say in a word or two what a process is, from its command line."""
    program = Path(arguments[0].partition(" ")[0]).name
    if not program.startswith("python"):
        return program
    if any("multiprocessing" in each for each in arguments[1:]):
        return "multiprocessing"
    given = [each for each in arguments[1:] if each and not each.startswith("-")]
    words = [Path(given[0]).name] if given else [program]
    if given[1:] and given[1].isalpha():
        words.append(given[1])
    return " ".join(words)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
