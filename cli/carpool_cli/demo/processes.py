"""The processes of a demonstration: each starts with its log in a file, and all end with the demonstration."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec
import yaml

from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.messages import Headers, encode_request_head

if TYPE_CHECKING:
    from types import TracebackType

    from carpool_sidecar.http1.client.errors import UpstreamError

STARTING = 60.0
"""Seconds a process may take until it serves: this machine may be busy, and must read a model of 100 MB."""

ENDING = 15.0
"""Seconds a process may take to end before it is killed."""


class DemoError(Exception):
    """Why the demonstration can't go on, for its user."""


class Client:
    """Requests JSON documents from one server."""

    def __init__(self, address: str) -> None:
        """Connect to ``address``, host:port, at the first request."""
        host, _, port = address.rpartition(":")
        self._pool = Pool(host, int(port), max_connections=2)

    async def get(self, path: str) -> Any:  # noqa: ANN401 - whatever the document says
        """Return the decoded answer of a path.

        Raises ``DemoError`` for any status but 200.
        """
        answer = _Answer(path)
        head = encode_request_head(b"GET", path.encode(), [(b"host", self._pool.authority)])
        self._pool.send(head, b"", answer, timeout=10.0, retry_stale=True)
        return msgspec.json.decode(await answer.body)

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.close()


class _Answer:
    """A call's outcome as a future."""

    def __init__(self, path: str) -> None:
        self.body: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._path = path

    def answered(self, status: int, headers: Headers, body: bytes | memoryview) -> None:  # noqa: ARG002 - a receiver's signature
        if self.body.done():
            return  # the caller does not wait any more
        if status == 200:
            self.body.set_result(bytes(body))
        else:
            self.body.set_exception(
                DemoError(f"{self._path} answered {status}: {bytes(body[:200]).decode('utf-8', 'replace')}")
            )

    def failed(self, error: UpstreamError) -> None:
        if not self.body.done():
            self.body.set_exception(DemoError(f"{self._path}: {error}"))


class Running(NamedTuple):
    """A serving process: its address, and its admin port's (the data port's, if it has none)."""

    name: str
    address: str
    admin: str
    config: Path
    """The file it was started with."""
    process: subprocess.Popen[bytes]

    def cpu_seconds(self) -> tuple[float, float]:
        """Return its CPU time, and that of its children, such as a sidecar's tuner, to 10 ms; 0 without /proc."""
        own, children = _ticks(self.process.pid)
        return own / os.sysconf("SC_CLK_TCK"), children / os.sysconf("SC_CLK_TCK")


class Processes:
    """Starts processes and ends them on exit: by SIGTERM, and by force if one ignores that."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, process, _ in self._started:
            process.terminate()
        deadline = time.monotonic() + ENDING
        for _, process, _ in self._started:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def check(self) -> None:
        """Raise ``DemoError`` with the end of its log if a process is gone."""
        for name, process, log in self._started:
            if process.poll() is not None:
                said = _text(log).strip().splitlines()[-8:]
                raise DemoError("\n  ".join([f"{name} ended with code {process.returncode}; the end of {log}:", *said]))

    async def sidecar(self, name: str, config: dict[str, Any]) -> Running:
        """Start a sidecar on free ports, and wait until it is ready."""
        path = self.folder / f"{name}.yaml"
        _write(path, config)
        log, process = self._start(name, "carpool_sidecar.main", "--config", str(path))
        line = await self._said(log, r'^\{.*"event":"listening".*\}$')
        where = msgspec.json.decode(line[0])
        await self._said_ready(where["admin"])
        return Running(name, where["data"], where["admin"], path, process)

    async def configure(self, sidecar: Running, config: dict[str, Any]) -> None:
        """Write another configuration for a running sidecar, and wait until it is applied."""
        client = Client(sidecar.admin)
        deadline = time.monotonic() + STARTING
        try:
            before = (await client.get("/v1/config"))["generation"]
            _write(sidecar.config, config)
            while (await client.get("/v1/config"))["generation"] == before:
                self.check()
                if time.monotonic() > deadline:
                    raise DemoError(f"{sidecar.name} has not taken {sidecar.config} after {STARTING:.0f} s")
                await asyncio.sleep(0.05)
        finally:
            await client.close()

    async def standin(self, name: str, profile: Path) -> Running:
        """Start a stand-in for a device on a free port."""
        log, process = self._start(name, "carpool_cli", "standin", "--profile", str(profile), "--port", "0")
        address = (await self._said(log, r"^standin for .* at http://(\S+)$"))[1]
        return Running(name, address, address, profile, process)

    def _start(self, name: str, module: str, *arguments: str) -> tuple[Path, subprocess.Popen[bytes]]:
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - our own commands
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # the terminal's Ctrl-C is for this process, which ends the others
            )
        self._started.append((name, process, log))
        return log, process

    async def _said(self, log: Path, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + STARTING
        # Some lines of a local file: reading them takes no longer than switching to a thread.
        while (found := re.search(pattern, _text(log), re.MULTILINE)) is None:
            self.check()
            if time.monotonic() > deadline:
                raise DemoError(f"nothing serves after {STARTING:.0f} s; see {log}")
            await asyncio.sleep(0.05)
        return found

    async def _said_ready(self, admin: str) -> None:
        client = Client(admin)
        deadline = time.monotonic() + STARTING
        try:
            while not (await client.get("/v1/stats"))["ready"]:
                self.check()
                if time.monotonic() > deadline:
                    raise DemoError(f"the sidecar at {admin} is not ready after {STARTING:.0f} s")
                await asyncio.sleep(0.05)
        finally:
            await client.close()


def _ticks(pid: int) -> tuple[int, int]:
    """Return the CPU time of a process, and that of its children; 0 if the system does not report it."""
    about = Path(f"/proc/{pid}")
    try:
        fields = (about / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return 0, 0
    children: list[int] = []
    for task in about.glob("task/*/children"):
        with suppress(OSError):  # a thread that ended meanwhile
            children += map(int, task.read_text("ascii").split())
    # The 14th to 17th field: utime and stime, and those of children that ended. The second, the name, may contain
    # anything, and ends with the ")".
    own, ended = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
    return own, ended + sum(sum(_ticks(child)) for child in children)


def _write(path: Path, config: dict[str, Any]) -> None:
    beside = path.with_suffix(".new")
    own = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "shutdown": {"lame": "0s", "limit": "3s"}}
    beside.write_text(yaml.safe_dump({**own, **config}, sort_keys=False))
    beside.replace(path)  # never half a file


def _text(log: Path) -> str:
    return log.read_text("utf-8", "replace")
