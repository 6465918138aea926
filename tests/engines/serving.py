"""Runs an engine as a process on a free port of loopback, until it is healthy."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


def free_port() -> int:
    """Return a port of loopback that nobody has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def serving(
    command: list[str], log: Path, *, patience: float = 180.0, env: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Start ``command`` (``{port}`` stands for the port) and wait, in seconds, until ``/health`` answers 200.

    Raises:
        RuntimeError: it ended, or did not become healthy; the end of its log is in the message.
    """
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [part.replace("{port}", str(port)) for part in command], stdout=output, stderr=output, env=env
        )
    try:
        deadline = time.monotonic() + patience
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the engine did not start:\n" + log.read_text(errors="replace")[-3000:])
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:  # not there yet, or 503
        return False
