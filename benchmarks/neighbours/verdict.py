"""The recorded effect of a neighbour on healthy callers, and which figures exceed a limit. Pure."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from evidence import limits
from msgspec import Struct

from neighbours.virtual import Played

if TYPE_CHECKING:
    from collections.abc import Iterator

    from evidence import Limit

    from neighbours.catalogue import Neighbour
    from neighbours.trials import Seen

LIMITS = Path(__file__).parent / "limits.json"

TRIALS = 3
"""At most so many where CPU time alone is beyond its limit: other work on the machine can only add to it."""

SHOWN = 3
"""Kinds of failures named in a violation, the most frequent first."""


class Healthy(Struct, frozen=True):
    """What became of healthy requests. Latencies in milliseconds, of right answers."""

    sent: int
    ok: int
    wrong: int
    foreign: int
    failed: int
    """All others: no answer, or an error."""
    kinds: dict[str, int]
    """Failed requests by how they failed."""
    p50_ms: float
    p99_ms: float


class Row(Struct, frozen=True):
    """One neighbour."""

    name: str
    what: str
    sidecar: Healthy
    server: Healthy | None
    """Against the model server alone; ``None``: not measured."""
    neighbour: dict[str, int]
    """What the neighbour met with behind the sidecar: answers by status, connections opened and cut."""
    rows_per_call: float
    livez_gap_ms: float
    livez_cpu_ms: float
    """The most for one answer; the least of ``trials``, since whatever else a machine does can only add to it."""
    peak_mib: float
    ended: bool
    """Whether the sidecar was ended because its memory grew without end."""
    trials: int
    virtual: Played | None
    """In virtual time; ``None``: the simulator can't play it."""

    @property
    def failed_more(self) -> int:
        """Healthy requests that failed behind the sidecar, beyond those that failed at the server alone."""
        return max(self.sidecar.failed - (self.server.failed if self.server else 0), 0)


class Neighbours(Struct, frozen=True):
    """A run, as it is kept."""

    commit: str
    date: str
    machine: dict[str, str | int]
    command: str
    rate: float
    """Healthy requests a second."""
    seconds: float
    """How long each neighbour acted."""
    rows: list[Row]
    violations: list[str]


def healthy(seen: Seen) -> Healthy:
    """Sum up a trial."""
    kinds = {kind: number for kind, number in seen.outcomes.most_common() if kind not in {"ok", "wrong", "foreign"}}
    return Healthy(
        sent=seen.outcomes.total(),
        ok=seen.outcomes["ok"],
        wrong=seen.outcomes["wrong"],
        foreign=seen.outcomes["foreign"],
        failed=sum(kinds.values()),
        kinds=kinds,
        p50_ms=round(seen.quantile(0.5) * 1e3, 1),
        p99_ms=round(seen.quantile(0.99) * 1e3, 1),
    )


def row(neighbour: Neighbour, trials: list[Seen], server: Seen | None, virtual: Played | None) -> Row:
    """Make a row of one trial or several: the worst of each figure, but the least of what noise can add to."""
    worst = max(trials, key=lambda seen: seen.outcomes.total() - seen.outcomes["ok"])
    calmest = min(trials, key=lambda seen: seen.livez_cpu)
    return Row(
        name=neighbour.name,
        what=neighbour.what,
        sidecar=healthy(worst),
        server=None if server is None else healthy(server),
        neighbour=worst.theirs,
        rows_per_call=round(worst.rows_per_call, 1),
        livez_gap_ms=round(calmest.livez_gap * 1e3),
        livez_cpu_ms=round(calmest.livez_cpu * 1e3, 1),
        peak_mib=round(max(seen.peak_mib for seen in trials)),
        ended=any(seen.ended for seen in trials),
        trials=len(trials),
        virtual=virtual,
    )


def violations(one: Row) -> list[str]:
    """Return a line for each limit that a row does not meet: what it is, by how much, and what healthy callers saw."""
    return [
        f"{one.name}: {_figure(measured)} {limit.unit}, limit {limit.direction} {limit.value:g}{detail}"
        for limit, measured, detail in _broken(one)
    ]


def only_noise(one: Row) -> bool:
    """Whether a row fails by CPU time alone, which other work on the machine can add to."""
    return {limit.name for limit, _, _ in _broken(one)} == {"livez"}


@cache
def bounds() -> dict[str, Limit]:
    """Return the limits by name."""
    return limits(LIMITS)


def _broken(one: Row) -> list[tuple[Limit, float, str]]:
    return [
        (bounds()[name], measured, detail)
        for name, measured, detail in _measured(one)
        if not bounds()[name].holds(measured)
    ]


def _measured(one: Row) -> Iterator[tuple[str, float, str]]:
    """Yield each limit's name, the figure, and what explains it."""
    kinds = ", ".join(f"{number} x {kind}" for kind, number in list(one.sidecar.kinds.items())[:SHOWN])
    of = f" (of {one.sidecar.sent}: {kinds})" if kinds else ""
    yield "failed", one.failed_more, of
    yield "wrong", one.sidecar.wrong, ""
    yield "foreign", one.sidecar.foreign, ""
    yield "livez", one.livez_cpu_ms, f" (longest gap between answers {one.livez_gap_ms:,.0f} ms)"
    yield "memory", one.peak_mib, " (the sidecar was ended there)" if one.ended else ""
    if one.name == "none":
        yield "merged", one.rows_per_call, ""
    if one.virtual is not None:
        yield "virtual failures", one.virtual.failed, ""
        yield "virtual p99", one.virtual.ratio, f" ({one.virtual.p99_ms:g} ms)"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
