"""The stored result of a proof run: rows of data, one line each; the report is written from these alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
from evidence import Machine
from msgspec import Struct

from proof.measures import Tally

if TYPE_CHECKING:
    from pathlib import Path

CARPOOL, ORACLE, LAZY = "carpool", "oracle", "greedy"
"""Contenders with a part of their own. Zero-wait at the largest batch is a rival and what savings are measured from."""

TOLD_TIMES, TOLD_ALL = TOLD = ("told t(b)", "told t(b) and the load")
"""Carpool with true values, where it misses a goal. These are no contenders: they show the cause of a shortfall."""

Kind = Literal["start", "load up", "load down", "device"]
"""What sets a phase apart from the one before."""


class About(Struct, frozen=True):
    """A scenario, for readers of the report."""

    name: str
    why: str
    profile: str
    slo: float
    arrivals: str
    replicas: int
    capacity: float
    """Highest load, in requests/s over all replicas, at which the best setting misses at most 1 %."""
    loads: tuple[float, ...]
    """Of the load ramp, as shares of ``capacity``; the last one is the overload."""


class Named(Struct, frozen=True):
    """A contender, and where its rule is from."""

    name: str
    title: str
    cite: str


class Stair(Struct, frozen=True):
    """One contender under rising loads: what became of each step, in the order of the scenario's ``loads``."""

    scenario: str
    contender: str
    steps: tuple[Tally, ...]


class Phase(Struct, frozen=True):
    """A stretch of constant load on a constant device. Seconds, requests/s."""

    kind: Kind
    start: float
    seconds: float
    load: float
    device: float
    rate: float


class Recovery(Struct, frozen=True, array_like=True):
    """How a contender adapted to a phase. Without ``seconds`` it did not, and ``requests`` are all of the phase."""

    seconds: float | None
    requests: int
    flips: int


class Timeline(Struct, frozen=True):
    """One contender over a scenario's phases, beginning with no knowledge of them."""

    scenario: str
    contender: str
    misses: float
    """Share of all its requests."""
    best: float
    """The oracle's, on the same arrivals."""
    phases: tuple[Recovery, ...]
    course: tuple[float, ...]
    """Share of requests missed, for every ``COURSE`` seconds."""


COURSE = 5
"""Seconds between the points of a timeline's course."""


class Hour(Struct, frozen=True):
    """Carpool at a constant load for an hour. The settings between A, B, A may be many."""

    scenario: str
    load: float
    rate: float
    misses: float
    changes: int
    flips: int


class Rest(Struct, frozen=True):
    """Carpool left alone with a load at which it falls short of saving as much as it should: what more time brings."""

    scenario: str
    load: float
    minutes: tuple[float | None, ...]
    """Shares of the oracle's saving, minute by minute from knowing nothing; ``None`` where that is too little."""


class Forecast(Struct, frozen=True):
    """The p99 that the tuner forecasts for a setting, beside what comes of it. Seconds."""

    scenario: str
    load: float
    utilization: float
    setting: str
    simulated: float
    told: float
    """Forecast with the true batch latencies."""
    learned: float | None
    """Forecast by a tuner that learned the batch latencies by itself; ``None`` where it had made none yet."""
    realized: float | None
    """The simulated p99 of that tuner's own setting."""
    doubt: float = 0.0
    """Half of the 95 % interval of ``simulated``, relative to it."""


class Rollback(Struct, frozen=True):
    """A bad setting pushed at a sidecar that had a good one."""

    scenario: str
    rate: float
    good: str
    bad: str
    misses: float
    """Share that misses under the bad one, if it stays."""
    requests: int | None
    """Requests, from the first one that missed, until it was taken back; ``None``: it was not."""


class Proof(Struct, frozen=True):
    """A run, as it is kept."""

    commit: str
    date: str
    machine: Machine
    command: str
    seed: int
    suite: str
    """Hash over scenarios and profiles."""
    seconds: float
    """How long it took."""
    cpu_seconds: float
    left_out: dict[str, str]
    """Scenarios that could not be played, and why."""
    contenders: list[Named]
    scenarios: list[About]
    phases: dict[str, list[Phase]]
    """By scenario."""
    stairs: list[Stair]
    timelines: list[Timeline]
    hours: list[Hour]
    forecasts: list[Forecast]
    rollbacks: list[Rollback]
    kept: int = 0
    """Of all that oracle and rules were to play, what was known from before (``proof.kept``)."""
    compiled: bool = False
    """Whether Carpool's core ran as machine code (``compiled``): the same figures, sooner."""
    told: list[Stair] = []
    """Of each scenario in which a goal of the load ramp is missed, by ``TOLD``."""
    rests: list[Rest] = []
    """Of each scenario in which too little is saved."""


def encode(proof: Proof) -> bytes:
    """Return JSON that can be read and compared: one line for each row."""
    lines = []
    for name in Proof.__struct_fields__:
        value = getattr(proof, name)
        if isinstance(value, list):
            text = "[\n  " + ",\n  ".join(map(_text, value)) + "\n ]" if value else "[]"
        else:
            text = _text(value)
        lines.append(f' "{name}": {text}')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def write(path: Path, proof: Proof) -> None:
    """Keep a run: the whole of it, or what was there before."""
    path.parent.mkdir(exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_bytes(encode(proof))
    beside.replace(path)


def read(path: Path) -> Proof:
    """Read a run that was kept."""
    return msgspec.json.decode(path.read_bytes(), type=Proof)


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
