"""A batch of a million lines through a sidecar: how fast it goes, and how much memory it takes.

``python benchmarks/jobs.py [--lines 1000000] [--write]``. The model is another process that echoes. CPU seconds and
peak memory are those of the sidecar alone. Exits 1 beyond a limit; ``--write`` keeps the figures in results/jobs.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evidence import Figure, conclude

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent

SHORT = 5_000
"""Lines after which memory is as large as it gets with a short file."""

TARGET = "/v1/models/standin:predict"
PROFILE = {"name": "fast", "source": "synthetic", "executors": 4, "rows": [1, 64], "seconds": [0.0005, 0.001]}


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--write", action="store_true", help="keep the results")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), wanted.lines)
    return conclude(figures, HERE / "limits.json", HERE / "results" / "jobs.json" if wanted.write else None)


def measure(folder: Path, count: int) -> list[Figure]:
    """Run a short and a long batch."""
    (folder / "device.json").write_text(json.dumps(PROFILE))
    model = subprocess.Popen(
        [sys.executable, "-m", "carpool_cli", "standin", "--profile", str(folder / "device.json"), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert model.stdout is not None  # noqa: S101 - for the type checker
    upstream = model.stdout.readline().split(" at http://")[1].strip()
    config = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "upstream": {"url": f"http://{upstream}"},
        "parameters": {"*": {"maxBatch": 64, "maxInFlight": 4}},
        "policy": {"slo": {"latency": {"p99": "1s"}}, "models": [{"name": "standin", "axis": "First"}]},
        "jobs": {"path": str(folder / "jobs.db"), "maxBytes": "16Gi", "maxInFlight": 256},
    }
    (folder / "sidecar.json").write_text(json.dumps(config))
    sidecar = subprocess.Popen(
        [sys.executable, "-m", "carpool_sidecar.main", "--config", str(folder / "sidecar.json")],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert sidecar.stderr is not None  # noqa: S101 - likewise
    try:
        address = json.loads(sidecar.stderr.readline())["data"]
        first = batch(address, sidecar.pid, SHORT)
        last = batch(address, sidecar.pid, count)
    finally:
        for process in (sidecar, model):
            process.send_signal(signal.SIGKILL)
            process.wait()
    grown = last["peak"] - first["peak"]
    good = last["counts"] == {"total": count, "completed": count, "failed": 0}
    said = {"lines": count, "input MiB": last["input"] / 2**20, "output MiB": last["output"] / 2**20}
    times = {"upload s": last["upload"], "answered s": last["seconds"], "CPU s": last["cpu"]}
    return [
        Figure("jobs, lines answered", last["lines"] / count if good else 0.0, 1, said),
        Figure("jobs, growth of memory", grown / 2**20, 1, {"peak MiB": last["peak"] / 2**20, "short lines": SHORT}),
        Figure("jobs, lines per CPU second", count / last["cpu"], 1, times),
    ]


def batch(address: str, pid: int, count: int) -> dict[str, Any]:
    """Upload a file of so many lines, have it answered and read the answers; returns what was measured."""
    cpu, began = cpu_seconds(pid), time.monotonic()
    file = ask(address, "POST", "/v1/files", form(count), {"content-type": "multipart/form-data; boundary=B"})
    uploaded = time.monotonic()
    body = json.dumps({"input_file_id": file["id"], "endpoint": TARGET, "completion_window": "24h"}).encode()
    made = ask(address, "POST", "/v1/batches", body, {})
    while (now := ask(address, "GET", f"/v1/batches/{made['id']}", None, {}))["status"] == "in_progress":
        time.sleep(1.0)
    seconds = time.monotonic() - uploaded
    lines, size = content(address, now["output_file_id"])
    return {
        "upload": uploaded - began,
        "seconds": seconds,
        "cpu": cpu_seconds(pid) - cpu,
        "peak": peak(pid),
        "counts": now["request_counts"],
        "lines": lines,
        "input": file["bytes"],
        "output": size,
    }


def form(count: int) -> Iterator[bytes]:
    """Write the form in pieces: this process holds no more of it either."""
    yield b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    yield b'--B\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    for first in range(0, count, 1000):
        yield b"".join(
            b'{"custom_id":"c%d","method":"POST","url":"%b","body":{"instances":[[%d,0.5]]}}\n'
            % (number, TARGET.encode(), number)
            for number in range(first, min(count, first + 1000))
        )
    yield b"\r\n--B--\r\n"


def ask(address: str, method: str, path: str, body: Any, headers: dict[str, str]) -> Any:  # noqa: ANN401 - JSON
    """Send a request; returns the answer's JSON."""
    connection = http.client.HTTPConnection(address, timeout=600)
    connection.request(method, path, body, headers, encode_chunked=not isinstance(body, bytes | None))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status == 200, (answer.status, text)  # noqa: S101 - nothing can be measured then
    return json.loads(text)


def content(address: str, identity: str) -> tuple[int, int]:
    """Read a file; returns its lines and bytes."""
    connection = http.client.HTTPConnection(address, timeout=600)
    connection.request("GET", f"/v1/files/{identity}/content")
    answer = connection.getresponse()
    lines = size = 0
    while chunk := answer.read(1 << 20):
        lines, size = lines + chunk.count(b"\n"), size + len(chunk)
    connection.close()
    return lines, size


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def peak(pid: int) -> int:
    """Return the largest resident memory of a process so far, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
