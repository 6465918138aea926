"""Processes under measurement on fixed ports, with a log that stays."""

from __future__ import annotations

import signal
import subprocess
import time
import urllib.request
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PATIENCE = 120
"""Seconds that a process has to become ready."""


class Process:
    """One process of ours; ended on leaving."""

    def __init__(self, command: Sequence[str], ready: str, log: Path) -> None:
        self.command, self.ready, self.log = command, ready, log

    def __enter__(self) -> Self:
        """Start it and wait until it is ready."""
        self.begun = time.monotonic()
        self.process = subprocess.Popen(self.command, stdout=self.log.open("ab"), stderr=subprocess.STDOUT)
        while not answers(self.ready):
            if self.process.poll() is not None or time.monotonic() - self.begun > PATIENCE:
                self.process.kill()
                raise SystemExit(f"{self.command} did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def answers(url: str) -> bool:
    """Say whether a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - ours
            return answer.status == 200
    except OSError:
        return False
