"""Probes a sidecar's liveness ten times a second: `python -m neighbours.probe PORT PID SECONDS`.

A process of its own with blocking sockets. Wall time shows what machine and neighbours did to the sidecar, so the
judged figure is CPU time: how much the sidecar's process spent between a question and its answer. While one long piece
of work runs on the event loop, an answer costs all of it. The sidecar may go on working while this process waits for a
core with the answer in its hands, so that wait is subtracted. Prints `[longest seconds between two answers, most CPU
seconds for one]`.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

INTERVAL = 0.1
PATIENCE = 20.0

_SCHEDULED = Path("/proc/self/schedstat")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used; the id of its clock is made as clock_getcpuclockid(3) does."""
    return time.clock_gettime((~pid << 3) | 2)


def waited() -> float:
    """Return the seconds that this process was ready to run and had no core; 0 where the kernel does not count them."""
    return int(_SCHEDULED.read_text("ascii").split()[1]) * 1e-9 if _SCHEDULED.exists() else 0.0


def probe(port: int, pid: int, seconds: float) -> tuple[float, float]:
    """Ask until the time is over; return the longest gap between answers and the dearest answer."""
    began = answered = time.monotonic()
    gap = dearest = 0.0
    connection: socket.socket | None = None
    while (now := time.monotonic()) < began + seconds:
        try:
            cpu, delay = cpu_seconds(pid), waited()
            alive = False
            try:
                if connection is None:
                    connection = socket.create_connection(("127.0.0.1", port), PATIENCE)
                connection.sendall(b"GET /livez HTTP/1.1\r\nHost: sidecar\r\n\r\n")
                alive = connection.recv(4096).startswith(b"HTTP/1.1 200")
            finally:
                dearest = max(dearest, cpu_seconds(pid) - cpu - (waited() - delay))
        except OSError:  # no answer in time, or the process is gone
            alive = False
        if alive:
            gap, answered = max(gap, time.monotonic() - answered), time.monotonic()
        elif connection is not None:
            connection.close()
            connection = None
        time.sleep(max(now + INTERVAL - time.monotonic(), 0.0))
    if connection is not None:
        connection.close()
    return max(gap, time.monotonic() - answered), dearest


if __name__ == "__main__":
    print(json.dumps(probe(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
