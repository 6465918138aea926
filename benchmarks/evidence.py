"""Measured figures: their source, and their limits."""

from __future__ import annotations

import datetime as dt
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "carpool"
"""What can be made again, but takes its time."""

UNUSED = 30 * 86_400.0
"""Seconds after which what nobody asked for is deleted from there."""


class Limit(Struct, frozen=True):
    """A reviewed bound: ``value`` in ``unit``, which a figure may not pass in the wrong ``direction``; and why.

    ``goal``: what is needed, where that is another value; then ``value`` keeps the figure from getting worse.
    """

    name: str
    value: float
    unit: str
    direction: Literal["at least", "at most"]
    why: str
    goal: float | None = None

    def holds(self, measured: float) -> bool:
        """Say whether a figure keeps it."""
        return self._within(measured, self.value)

    def reaches(self, measured: float) -> bool:
        """Say whether a figure is where it should be."""
        return self._within(measured, self.aim)

    @property
    def aim(self) -> float:
        """What the figure should reach: the goal where there is one, else the limit itself."""
        return self.value if self.goal is None else self.goal

    def gap(self, measured: float) -> float:
        """Return the factor by which a figure falls short of its aim."""
        return self.aim / measured if self.direction == "at least" else measured / self.aim

    def _within(self, measured: float, bound: float) -> bool:
        return measured >= bound if self.direction == "at least" else measured <= bound


class Figure(Struct, frozen=True):
    """One measured cost: the best of its trials, with the figures that it was made of."""

    name: str
    value: float
    trials: int
    parts: dict[str, float] = {}


class Skipped(Exception):  # noqa: N818 - not an error: something is not installed
    """A benchmark that can't be run here; the text says what to install."""


class Machine(Struct, frozen=True):
    """Where figures were taken."""

    cpu: str
    cores: int
    system: str
    python: str


class Results(Struct, frozen=True, omit_defaults=True):
    """A run, as it is kept."""

    commit: str
    date: str
    machine: Machine
    command: str
    figures: list[Figure]
    skipped: dict[str, str]
    compiled: bool | None = None
    """Whether the machine code of the wheel was measured; ``None``: not recorded."""


def limits(path: Path) -> dict[str, Limit]:
    """Read the limits by name."""
    return {limit.name: limit for limit in msgspec.json.decode(path.read_bytes(), type=list[Limit])}


def machine() -> Machine:
    """Describe this machine."""
    with open("/proc/cpuinfo", encoding="utf-8") as info:  # noqa: PTH123 - a device file, no path to keep
        cpu = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), "unknown")
    return Machine(
        cpu, len(os.sched_getaffinity(0)), f"{platform.system()} {platform.release()}", platform.python_version()
    )


def commit() -> str:
    """Return the commit, marked where the code that was measured differs from it."""
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
    sources = ["core", "sidecar", "cli", "operator", "benchmarks/*.py"]
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *sources], check=False).returncode
    return head.stdout.strip() + (" with changes" if changed else "")


def conclude(figures: list[Figure], bounds: Path, kept: Path | None) -> int:
    """Print figures beside their limits, write them to ``kept``; returns the exit code, 1 beyond a limit."""
    known = limits(bounds)
    for figure in figures:
        bound = known[figure.name]
        verdict = "ok" if bound.holds(figure.value) else "BEYOND ITS LIMIT"
        print(f"{figure.name}: {figure.value:.3g} {bound.unit} ({bound.direction} {bound.value:g}: {verdict})")
    if kept is not None:
        results = Results(commit(), today(), machine(), shlex.join(["python", *sys.argv]), figures, {})
        kept.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
        print(f"written to {kept}")
    return int(not all(known[figure.name].holds(figure.value) for figure in figures))


def today() -> str:
    """Return the time, in UTC."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def least(trial: Callable[[], float], trials: int) -> float:
    """Return the least of many trials: what the work costs when nothing else disturbs it."""
    return min(trial() for _ in range(trials))
