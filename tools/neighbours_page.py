"""The table of neighbours, from the file that `make neighbours` wrote: for the reference and for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADS = (
    "neighbour",
    "failed",
    "wrong",
    "foreign",
    "p50 ms",
    "p99 ms",
    "alone: failed",
    "alone: p99 ms",
    "rows a call",
    "livez CPU ms",
    "livez gap ms",
    "peak MiB",
    "p99 in virtual time",
)


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table, as text."""
    healthy, server, virtual = row["sidecar"], row["server"], row["virtual"]
    return [
        row["name"],
        *(str(healthy[name]) for name in ("failed", "wrong", "foreign")),
        *(f"{healthy[name]:,.0f}" for name in ("p50_ms", "p99_ms")),
        *((str(server["failed"]), f"{server['p99_ms']:,.0f}") if server else ("", "")),
        f"{row['rows_per_call']:.1f}",
        f"{row['livez_cpu_ms']:,.1f}",
        f"{row['livez_gap_ms']:,.0f}",
        f"{row['peak_mib']:,.0f}" + _some(row["ended"], "ended"),
        "" if virtual is None else f"{virtual['ratio']:.2f}x" + _some(virtual["failed"], "failed"),
    ]


def section(results: dict[str, Any] | None) -> Iterator[str]:
    """Yield the section's lines. ``None``: there are no measurements."""
    yield from ("## Neighbours", "")
    if results is None:
        yield "`make neighbours` has not been run for the record yet."
        return
    machine = results["machine"]
    yield f"Commit {results['commit']}, {results['date']}, {machine['cores']} cores of {machine['cpu']};"
    yield f"`{results['command']}`. Each neighbour acts for {results['seconds']:g} s beside {results['rate']:g} healthy"
    yield "requests a second, whose failures, latencies and answers these are."
    yield ""
    broken = results["violations"]
    yield f"Beyond a limit: {len(broken)}." if broken else "Nothing is beyond a limit."
    yield from ([""] + [f"- {line}" for line in broken] if broken else [])
    yield from ("", f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|")
    for row in results["rows"]:
        yield f"| {' | '.join(cells(row))} |"
    yield from ("", "| neighbour | what it does |", "|---|---|")
    for row in results["rows"]:
        yield f"| {row['name']} | {row['what']} |"


def _some(count: int, what: str) -> str:
    """Return an addition to a figure: a count, or a flag, of something that should be zero."""
    if not count:
        return ""
    return f", {what}" if count is True else f", {count} {what}"
