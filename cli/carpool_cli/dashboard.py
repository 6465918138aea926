"""The live view: figures out of what the admin port says, and how they look on a terminal."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from msgspec import Struct
from rich.console import Group
from rich.table import Table
from rich.text import Text

from carpool.policy import format_seconds
from carpool.statistics import ModelStats, combine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from carpool_cli.admin_client import Explanation, Snapshot

WINDOW = 10.0
"""Seconds over which rates and percentiles are taken: a p99 of 100 requests/s then has 10 beyond it."""

HISTORY = 60
"""Looks that the sparklines go back: half a minute."""

SHOWN = 4
"""Decisions shown."""

BARS = " ▁▂▃▄▅▆▇█"


class Figures(Struct, frozen=True, kw_only=True):
    """Over the last ``WINDOW`` seconds. Seconds, requests per second; ``None`` while there is nothing to tell."""

    rate: float
    goodput: float
    p50: float | None
    p99: float | None
    hit_share: float | None
    misses: dict[str, int]
    sizes: dict[int, int]
    """Batches by rows."""
    mean_batch: float
    device_seconds_per_request: float | None
    device_busy_share: float


class Watch:
    """Remembers what was seen. ``add`` each look, then ``render``."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._seen: deque[Snapshot] = deque()
        self._rates: deque[float] = deque(maxlen=HISTORY)
        self._tails: deque[float] = deque(maxlen=HISTORY)

    def add(self, snapshot: Snapshot) -> Figures:
        """Take a look into account; return the figures of the window that ends with it."""
        if self._seen and snapshot.stats.at < self._seen[-1].stats.at:
            self._seen.clear()  # another process answers now, and its clock began anew
        self._seen.append(snapshot)
        while len(self._seen) > 2 and snapshot.stats.at - self._seen[1].stats.at >= WINDOW:
            self._seen.popleft()
        figures = between(self._seen[0], snapshot)
        self._rates.append(figures.rate)
        self._tails.append(figures.p99 or 0.0)
        return figures

    def render(
        self, figures: Figures, explanation: Explanation, now: float, notes: Sequence[str] = ()
    ) -> RenderableType:
        """Draw the last look; ``now`` in seconds since the epoch, ``notes`` stand below."""
        snapshot = self._seen[-1]
        slo = snapshot.slo_seconds
        head = Text.assemble(
            (f"{self._title}  ", "bold"),
            (snapshot.readiness, "green" if snapshot.ready else "yellow"),
            f"  up {_clock(snapshot.uptime_seconds)}, configuration {snapshot.generation}",
        )
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        hits = "" if figures.hit_share is None else f", {figures.hit_share:.2%} in time"
        grid.add_row("rate", f"{figures.rate:.1f}/s  {sparkline(self._rates)}")
        grid.add_row("goodput", f"{figures.goodput:.1f}/s{hits}")
        over = figures.p99 is not None and figures.p99 > slo
        latency = Text(f"p50 {_seconds(figures.p50)}, p99 ")
        latency.append(_seconds(figures.p99), "bold red" if over else "bold green" if figures.p99 else "")
        latency.append(f" of {format_seconds(slo)}  {sparkline(self._tails, top=slo)}")
        grid.add_row("latency", latency)
        grid.add_row("misses", ", ".join(f"{name} {count}" for name, count in figures.misses.items()) or "none")
        grid.add_row("batches", f"{figures.mean_batch:.1f} rows  {histogram(figures.sizes)}")
        device = f"{figures.device_busy_share:.0%} busy"
        if figures.device_seconds_per_request is not None:
            device = f"{format_seconds(figures.device_seconds_per_request)} a request, {device}"
        grid.add_row("device", device)
        queue = snapshot.queue
        grid.add_row("queue", f"{queue.rows} rows waiting, {queue.in_flight} of {queue.slots} batches in flight")
        for name, lane in snapshot.lanes.items():
            if not name and len(snapshot.lanes) > 1:
                continue  # what requests without a model's name go by; nothing to see while models have names
            mode = "pass-through" if lane.pass_through else lane.parameters.describe()
            warning = "  [quarantined: rides alone]" if lane.quarantined else ""
            grid.add_row(name or "model", Text(f"{mode}{'' if explanation.tuned else ' (fixed)'}{warning}", "bold"))
            grid.add_row("", Text(_curve(lane.service_seconds, lane.executors, lane.cap), "dim"))
        if snapshot.alone:
            why = ", ".join(f"{each.reason} {each.requests}" for each in snapshot.alone[-3:])
            grid.add_row("alone", f"may not be merged: {why}")
        if snapshot.stalls.count:
            stalls = snapshot.stalls
            grid.add_row("host", f"paused {stalls.count} times, {format_seconds(stalls.seconds)} in all")
        history = Table.grid(padding=(0, 1))
        history.add_column(style="dim", justify="right", no_wrap=True, min_width=8)
        history.add_column()
        for each in list(reversed(explanation.decisions))[:SHOWN]:
            decision = each.decision
            again = f" ({each.times} times)" if each.times > 1 else ""
            line = Text(str(decision.reason), "cyan" if decision.change else "")
            line.append(f"{again}: {decision.message}", "default")
            history.add_row(_ago(now - each.at), line)
        none = [] if explanation.decisions else [Text("  none yet", "dim")]
        parts: list[RenderableType] = [head, grid, Text("decisions", "dim"), history, *none]
        parts += [Text(note, "dim", no_wrap=True, overflow="ellipsis") for note in notes]
        return Group(*parts)


def between(earlier: Snapshot, later: Snapshot) -> Figures:
    """Return the figures of what was counted between two looks; rates are 0 where no time lies between them."""
    seconds = later.stats.at - earlier.stats.at
    delta = later.stats.since(earlier.stats)
    return figures_of(combine(list(delta.models.values())), delta.device_busy, seconds)


def figures_of(total: ModelStats, device_busy: float, seconds: float) -> Figures:
    """Return the figures of counters that were counted in so many seconds."""
    sizes: dict[int, int] = {}
    for _, rows, _, _, batches, _, _ in total.cells:
        sizes[rows] = sizes.get(rows, 0) + batches
    batches = sum(sizes.values())
    ended = total.hits + total.missed
    return Figures(
        rate=total.arrivals / seconds if seconds else 0.0,
        goodput=total.hits / seconds if seconds else 0.0,
        p50=total.quantile(0.5),
        p99=total.quantile(0.99),
        hit_share=total.hits / ended if ended else None,
        misses={reason: count for reason, count in sorted(total.misses.items()) if count},
        sizes=dict(sorted(sizes.items())),
        mean_batch=sum(rows * count for rows, count in sizes.items()) / batches if batches else 0.0,
        device_seconds_per_request=device_busy / total.served if total.served else None,
        device_busy_share=device_busy / seconds if seconds else 0.0,
    )


def histogram(sizes: dict[int, int]) -> str:
    """Return shares of batches in octaves of rows, as bars: ``1▁ 2▂ 4▇``."""
    octaves: dict[int, int] = {}
    for rows, count in sizes.items():
        low = 1 << (rows.bit_length() - 1)
        octaves[low] = octaves.get(low, 0) + count
    most = max(octaves.values(), default=1)
    return "  ".join(f"{low}+{_bar(count / most)}" for low, count in sorted(octaves.items()))


def sparkline(values: Sequence[float] | deque[float], top: float = 0.0) -> str:
    """Return bars for values, full at the largest of them and ``top``."""
    highest = max([top, *values])
    return "".join(_bar(value / highest) if highest else BARS[0] for value in values)


def _bar(share: float) -> str:
    """Return one of nine heights; what is not nothing shows."""
    return BARS[min(int(share * 8 + 0.999), 8)]


def _curve(times: tuple[float, ...] | None, executors: int | None, cap: int) -> str:
    if times is None:
        return "t(b) not known yet"
    sizes = [rows for rows in (1, 4, 16, 64, 256, 1024) if rows < min(len(times), cap + 1)]
    known = ", ".join(f"{rows}: {format_seconds(times[rows])}" for rows in sizes)
    return f"t(b) {known}; {executors} executor{'s' if executors != 1 else ''}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}"


def _ago(seconds: float) -> str:
    return f"{_clock(max(seconds, 0.0))} ago" if seconds >= 3600 else f"{max(int(seconds), 0)}s ago"
