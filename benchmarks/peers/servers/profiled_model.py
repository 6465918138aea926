"""The model behind every engine: it sleeps as long as a device's profile says, and echoes its rows.

Run by the engines' own interpreters, so the standard library is all there is. What it is to do comes by the environment
variable `CARPOOL_PEER`: {"profile": path, "folder": path, "settings": {...}}.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import time
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

POISON = -666.0
"""The model fails on a batch that has a row with this number: as a whole, as models do."""

VARIABLE = "CARPOOL_PEER"


class ServiceTime:
    """Batch latency of a profile, seconds: straight lines between the given sizes, the outer ones extended."""

    def __init__(self, profile: dict[str, Any]) -> None:
        if profile.get("executors", 1) != 1:
            raise ValueError("only devices that serve one batch at a time are played here")
        self._rows: list[int] = profile["rows"]
        self._seconds: list[float] = profile["seconds"]
        self._cv: float = profile.get("cv", 0.0)

    def mean(self, rows: int) -> float:
        """Return the mean time of a batch."""
        if len(self._rows) == 1:
            return self._seconds[0]
        after = min(max(bisect_right(self._rows, rows), 1), len(self._rows) - 1)
        left, right = self._rows[after - 1], self._rows[after]
        slope = (self._seconds[after] - self._seconds[after - 1]) / (right - left)
        return self._seconds[after - 1] + (rows - left) * slope

    def draw(self, rows: int, rng: random.Random) -> float:
        """Return the time of one batch: gamma around the mean."""
        mean = self.mean(rows)
        if not self._cv:
            return mean
        shape = self._cv**-2
        return rng.gammavariate(shape, mean / shape)


class Model:
    """One device for all of an engine's processes and threads: who has the lock computes, the others wait.

    Every batch leaves a line in `folder`/batches: its rows and its seconds.
    """

    def __init__(self, profile: Path, folder: Path) -> None:
        self._time = ServiceTime(json.loads(profile.read_text("utf-8")))
        self._rng = random.Random(0)
        self._device = folder / "device"
        self._batches = os.open(folder / "batches", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def __call__(self, rows: Sequence[Sequence[float]]) -> None:
        """Serve a batch; raises `ValueError` for a poisoned one, once its time has passed."""
        with self._device.open("w") as device:  # a lock of its own for each call, so that threads wait too
            fcntl.flock(device, fcntl.LOCK_EX)
            begun = time.monotonic()
            time.sleep(self._time.draw(len(rows), self._rng))
            os.write(self._batches, f"{len(rows)} {time.monotonic() - begun:.6f}\n".encode())
        if any(POISON in row for row in rows):
            raise ValueError("the model failed on this input")


def given() -> tuple[Model, dict[str, Any]]:
    """Return the model and the engine's settings, as the environment says."""
    told = json.loads(os.environ[VARIABLE])
    return Model(Path(told["profile"]), Path(told["folder"])), told["settings"]
