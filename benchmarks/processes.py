"""Processes under measurement: started on free ports of 127.0.0.1, their CPU and memory read from outside."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from evidence import Skipped

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Any, Self

PATIENCE = 30.0
"""Seconds that a process has to accept connections."""


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rss_mib(pid: int) -> float:
    """Return a process's resident memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text("utf-8"))
    assert found is not None  # noqa: S101 - for the type checker: a running process has one
    return int(found[1]) / 1024


class Process:
    """A server in a process of its own. ``cpu_seconds`` are those of ``pid`` alone.

    ``listening_cpu_seconds``: CPU time it had used when it first accepted a connection, to within 1 ms of polling.
    """

    def __init__(self, command: Sequence[str], port: int, *, env: dict[str, str] | None = None) -> None:
        self.port = port
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=self._errors, env={**os.environ, **(env or {})}
        )
        self.pid = self._process.pid
        deadline = time.monotonic() + PATIENCE
        while not self._accepts():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                self._errors.seek(0)
                raise RuntimeError(f"{command[0]} did not start:\n{self._errors.read().decode()}")
            time.sleep(0.001)
        self.listening_cpu_seconds = self.cpu_seconds()

    def cpu_seconds(self) -> float:
        """Return the CPU time (user and system, all threads) used so far, in nanosecond steps."""
        # The kernel's clock id of a process's CPU time, as clock_getcpuclockid(3) makes it.
        return time.clock_gettime((~self.pid << 3) | 2)

    def children(self) -> list[int]:
        """Return the ids of its children."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text("utf-8").split()]

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._errors.close()

    def _accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def sidecar(
    folder: Path,
    upstream: int,
    *,
    parameters: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    upstream_options: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    admin: int = 0,
) -> Process:
    """Start a sidecar in front of a port; with ``parameters`` nothing is tuned. ``admin``: its port, 0 for any."""
    port = free_port()
    config = {
        "listen": f"127.0.0.1:{port}",
        "admin": f"127.0.0.1:{admin}",
        "upstream": {"url": f"http://127.0.0.1:{upstream}", **(upstream_options or {})},
        "shutdown": {"lame": "0s", "limit": "1s"},
        "log": "Error",
        "parameters": {"*": parameters} if parameters else {},
        "policy": policy or {"slo": {"latency": {"p99": "1s"}}, "models": [{"name": "m", "axis": "First"}]},
    }
    path = folder / f"sidecar-{port}.json"
    path.write_bytes(msgspec.json.encode(config))
    return Process([sys.executable, "-m", "carpool_sidecar.main", "--config", str(path)], port, env=env)


def aiohttp_proxy(upstream: int) -> Process:
    """Start the proxy that people write first."""
    port = free_port()
    script = Path(__file__).parent / "aiohttp_proxy.py"
    return Process([sys.executable, str(script), str(port), str(upstream)], port)


def nginx(folder: Path, upstream: int) -> Process:
    """Start nginx with one worker, which is what is measured; access log off, connections kept open both ways."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        raise Skipped("nginx is not installed (Debian: apt-get install nginx-core)")
    port = free_port()
    path = folder / "nginx.conf"
    path.write_text(
        f"""
        daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr crit;
        events {{ worker_connections 4096; }}
        http {{
          access_log off; keepalive_requests 100000000;
          client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
          uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
          upstream model {{ server 127.0.0.1:{upstream}; keepalive 256; keepalive_requests 100000000; }}
          server {{
            listen 127.0.0.1:{port};
            location / {{ proxy_pass http://model; proxy_http_version 1.1; proxy_set_header Connection ""; }}
          }}
        }}
        """
    )
    process = Process([program, "-p", str(folder), "-c", str(path)], port)
    # The master listens before its worker is there, and takes no request itself.
    for _ in range(500):
        if workers := process.children():
            (process.pid,) = workers
            return process
        time.sleep(0.01)
    process.stop()
    raise RuntimeError("nginx listens, and started no worker within 5 s")
