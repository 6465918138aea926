"""The stored results: one file per engine in benchmarks/results/peers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from evidence import Machine
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CLOSE = 0.01
"""Settings whose share of good answers is this close to the best count as equal: noise here is no less."""


class Trial(Struct, frozen=True, kw_only=True):
    """Open-loop Poisson load for a while. Times in seconds, rates per second.

    Good: a right answer by the SLO, counted from when the request was due. ``steady_*`` leave out the seconds that a
    pause of this machine touched, which ``stalled`` names by their start; ``None`` where none are left.
    """

    rate: float
    seconds: float
    requests: int
    good_share: float
    goodput: float
    p50: float | None
    p99: float | None
    steady_good_share: float | None
    steady_p99: float | None
    errors: dict[str, int]
    complaints: dict[str, str]
    device_ms: float
    """Device time for each right answer."""
    rows_a_batch: float
    cpu_ms: float
    """CPU time of all the engine's processes, model server included, for each right answer."""
    cpu_ms_by_process: dict[str, float]
    stalled: list[float]
    longest_stall: float
    others_cores: float
    """Cores that neither engine nor generator had, used by others on this machine."""
    denied: float | None = None
    """Share of the CPU time that the engine wanted in which it stood in line for a core; ``None``: not recorded."""
    generator_limits: list[str]


class Faults(Struct, frozen=True, kw_only=True):
    """Load in which some requests misbehave: given up by their clients, or poisoned. The rest are innocent.

    ``lost``: innocents without an answer, by how; ``wrong``: with another's answer; ``refused``: with an error, by
    status.
    """

    rate: float
    seconds: float
    requests: int
    misbehaved: int
    their_answers: dict[str, int]
    """What those that misbehaved came to; given-up ones that were answered before count as 200."""
    innocents: int
    refused: dict[str, int]
    lost: dict[str, int]
    wrong: int
    rows_computed: int
    rows_a_batch: float
    serves_after: bool
    """Whether the engine still answers when the load has gone."""
    stalls: int


class Setting(Struct, frozen=True, kw_only=True):
    """An engine as it was set, and what it did. ``name``: default or tuned; Carpool has but one."""

    name: str
    settings: dict[str, Any]
    trials: list[Trial]
    cancels: Faults | None
    poison: Faults | None


class Tried(Struct, frozen=True, kw_only=True):
    """A point of the grid, each rate for a few seconds. Rates after one that was mostly missed were not tried: 0."""

    settings: dict[str, Any]
    good_shares: list[float]
    device_ms: list[float]
    stalled: int
    """Seconds touched by a pause of this machine."""
    failed: str = ""


class Peer(Struct, frozen=True, kw_only=True):
    """An engine's results, and where they come from. ``failed``: why there are none."""

    engine: str
    title: str
    default: str
    commit: str
    date: str
    machine: Machine
    command: str
    versions: dict[str, str]
    profile: str
    slo: float
    rates: list[float]
    tried: list[Tried]
    settings: list[Setting]
    failed: str = ""


def save(peer: Peer, folder: Path) -> Path:
    """Write an engine's results; returns the file."""
    path = folder / f"{peer.engine}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(_rounded(msgspec.to_builtins(peer))), indent=1) + b"\n")
    return path


def load(path: Path) -> Peer:
    """Read an engine's results."""
    return msgspec.json.decode(path.read_bytes(), type=Peer)


def shortcomings(peer: Peer, folder: Path) -> list[str]:
    """List in what a new run falls short of the stored one: it failed, or lacks settings or points of the grid."""
    path = folder / f"{peer.engine}.json"
    if not path.exists():
        return []
    before = load(path)
    there = [each.name for each in peer.settings]
    played = [each.settings for each in peer.tried if not each.failed]
    found = [f"it failed ({peer.failed})"] if peer.failed and not before.failed else []
    found += [f"it lacks {each.name}" for each in before.settings if each.name not in there]
    return found + [
        f"it lacks {each.settings}" for each in before.tried if not each.failed and each.settings not in played
    ]


def best(tried: Sequence[Tried]) -> Tried | None:
    """Return the settings to use: of those with the most good answers over all rates, the least device time.

    ``None`` where nothing was tried with success.
    """
    working = [each for each in tried if not each.failed]
    if not working:
        return None
    most = max(sum(each.good_shares) for each in working)
    close = [each for each in working if sum(each.good_shares) >= most - CLOSE * len(each.good_shares)]
    return min(close, key=lambda each: sum(each.device_ms))


def _rounded(value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value
