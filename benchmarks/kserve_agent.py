"""KServe's agent, which batches V1 requests in front of a model: built once from its Go module, to compare with."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import processes
from evidence import CACHE, Skipped

VERSION = "v0.15.2"
_PACKAGE = "github.com/kserve/kserve/cmd/agent"


def program() -> Path:
    """Return the agent's program; build it if there is none (minutes, with a Go module proxy).

    Raises ``Skipped`` where it can't be built.
    """
    built = CACHE / f"kserve-agent-{VERSION}"
    if built.exists():
        return built
    go = shutil.which("go")
    if go is None:
        raise Skipped("KServe's agent is built with Go, which is not installed (Debian: apt-get install golang-go)")
    print(f"building KServe's agent {VERSION} (minutes, once) ...", file=sys.stderr, flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        made = Path(folder) / "agent"
        for command in (
            ("mod", "init", "agent"),
            ("get", f"{_PACKAGE}@{VERSION}"),
            ("build", "-o", str(made), _PACKAGE),
        ):
            done = subprocess.run([go, *command], cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Skipped(f"KServe's agent can't be built: go {' '.join(command)}: {done.stderr.strip()[-500:]}")
        made.rename(built)
    return built


def start(built: Path, upstream: int, *, max_batch: int, max_wait_ms: int) -> processes.Process:
    """Start the agent in front of a port."""
    port = processes.free_port()
    probe = f'{{"tcpSocket": {{"port": {upstream}}}}}'
    command = [
        str(built),
        "--enable-batcher",
        f"--max-batchsize={max_batch}",
        f"--max-latency={max_wait_ms}",
        f"--port={port}",
        f"--component-port={upstream}",
    ]
    # It logs each request by default; what is compared is batching.
    return processes.Process(command, port, env={"SERVING_READINESS_PROBE": probe, "SERVING_LOGGING_LEVEL": "error"})
