"""The live view: the admin port's data, drawn to the size of the terminal."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from carpool.exchange.report import Lane, Report
from carpool.policy.durations import format_seconds
from carpool_cli.live.admin_client import Explained, Explanation
from carpool_cli.live.figures import Figures, Passed, duration, figures_of, passed_on
from carpool_cli.live.first_call import wrapped
from carpool_cli.live.jobs import jobs_line
from carpool_cli.live.streams import Streamed, engine_line, only_streams, streamed
from carpool_cli.live.unbatched import message_of, not_batched, not_merged, too_slow
from carpool_cli.printable import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

WINDOW = 10.0
"""Seconds over which rates and percentiles are taken: a p99 of 100 requests/s then has 10 beyond it."""

HISTORY = 60
"""Polls in the sparklines: half a minute."""

PATHS = 4
"""Most paths of passed-on requests that are shown."""

BESIDE = 50
"""Columns that figures need beside a sparkline."""

BARS = " ▁▂▃▄▅▆▇█"

PLAIN = str.maketrans(BARS + "…", " .:-=+*#@~")
"""What stands for bars and the end of a cut line where the terminal or file can't have them."""


class Sight(Struct, frozen=True, kw_only=True):
    """All data of one frame. It draws itself; if the terminal is too low, older decisions are left out first."""

    title: str
    hint: str
    """What to do, shown until the first request comes."""
    report: Report
    explanation: Explanation
    figures: Figures
    rates: Sequence[float]
    tails: Sequence[float]
    """p99 at each poll, seconds."""
    alone: dict[str, int]
    """Requests of the last ``WINDOW`` that could not be batched, by reason."""
    forwarded: Sequence[Passed]
    """The same for requests that were passed on and not batched, by path."""
    streams: Sequence[Streamed]
    """The same for token streams, by model."""
    now: float
    """Seconds since the epoch."""
    notes: Sequence[str]
    """Lines at the bottom."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw."""
        inside = options.update(height=None)
        lines = console.render_lines(self._state(options.max_width), inside, pad=False)
        notes = [Text(note, "dim", no_wrap=True, overflow="ellipsis") for note in self.notes]
        room = math.inf if options.height is None else options.height - len(lines) - len(notes) - 1
        if self.explanation.decisions or not only_streams(self.report):
            decisions = console.render_lines(self._decisions(), inside, pad=False)
            if len(decisions) > room:
                decisions = decisions[: max(int(room), 0)]
            lines += console.render_lines(Text("decisions", "dim"), inside, pad=False) + decisions
        for note in notes:
            lines += console.render_lines(note, inside, pad=False)
        for line in lines:
            yield from (_encodable(each, options.encoding) for each in line)
            yield Segment.line()

    def _state(self, width: int) -> Table:
        """Return the present state, a line per figure."""
        report = self.report
        page = Table.grid()
        page.add_row(
            Text.assemble(
                (f"{self.title}  ", "bold"),
                (report.readiness, "green" if report.ready else "yellow"),
                f"  up {clock(report.uptime_seconds)}, configuration {report.generation}",
            )
        )
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        rows: list[tuple[str, str | Text]] = [("slo", _text(line, "bold red")) for line in too_slow(report)]
        rows += [("batches", _text(line, "bold red")) for line in not_merged(report)]
        if not only_streams(report):
            rows += self._batches(max(min(width - BESIDE, HISTORY), 8))
        rows += [
            ("taken back", _text(f"{gone.model or 'model'}: {gone.rejected.describe()}: {gone.reason}", "bold red"))
            for gone in report.rolled_back
        ]
        if report.change_error is not None:
            rows.append(("change", _text(report.change_error, "bold red")))
        if engine := engine_line(report.token_streams):
            rows += [("streams", engine), *(("", str(each)) for each in self.streams[:PATHS])]
        if kept := jobs_line(report.jobs):
            rows.append(("jobs", kept))
        rows += [("forwarded", str(each)) for each in self.forwarded[:PATHS]]
        if self.alone:
            rows.append(("alone", ", ".join(f"{reason} {count}" for reason, count in self.alone.items())))
        if report.stalls.count:
            stalls = report.stalls
            rows.append(("host", f"paused {stalls.count} times, {duration(stalls.seconds)} in all"))
        for row in rows:
            grid.add_row(*(_text(cell) if isinstance(cell, str) else cell for cell in row))
        page.add_row(grid)
        asked = any(model.arrivals for model in report.stats.models.values()) or report.token_streams.models
        if self.hint and not asked:
            page.add_row(Text(f"no request yet; try\n{wrapped(self.hint, width)}", "cyan", overflow="fold"))
        return page

    def _batches(self, wide: int) -> list[tuple[str, str | Text]]:
        """Return the state of batched requests; sparklines are ``wide`` columns long."""
        report, figures, slo = self.report, self.figures, self.report.slo_seconds
        over = figures.p99 is not None and figures.p99 > slo
        latency = Text(f"p50 {duration(figures.p50)}, p99 ")
        latency.append(duration(figures.p99), "bold red" if over else "bold green" if figures.p99 else "")
        latency.append(f" of {format_seconds(slo)}")
        good = Text(f"{figures.goodput:.1f}/s")
        if figures.miss_share is not None:
            good.append(f", {1 - figures.miss_share:.2%} in time")
        rows: list[tuple[str, str | Text]] = [
            ("rate", beside(Text(f"{figures.rate:.1f}/s"), sparkline(list(self.rates)[-wide:]))),
            ("goodput", good),
            ("latency", beside(latency, sparkline(list(self.tails)[-wide:], top=slo))),
            ("misses", ", ".join(f"{name} {count}" for name, count in figures.misses.items()) or "none"),
        ]
        if figures.mean_batch is not None:
            rows.append(("batches", f"{figures.mean_batch:.1f} rows   {histogram(figures.sizes)}"))
        busy = f"{figures.device_busy_share:.0%} busy"
        decided = self.explanation.decisions
        if target := decided[-1].decision.target_utilization if decided else 0.0:
            busy += f" (target {target:.0%})"
        if figures.device_seconds_per_request is not None:
            busy = f"{duration(figures.device_seconds_per_request)} a request, {busy}"
        queue = report.queue
        rows += [
            ("device", busy),
            ("queue", f"{queue.rows} rows waiting, {queue.in_flight} of {queue.slots} batches in flight"),
        ]
        for name, lane in report.lanes.items():
            if name or len(report.lanes) == 1:  # requests without a model's name matter if no model has any
                measured = figures_of([report.stats.models[name]], 0.0).sizes if name in report.stats.models else {}
                rows += [(name or "model", self._parameters(lane)), ("", Text(curve(lane, measured), "dim"))]
        return rows

    def _parameters(self, lane: Lane) -> Text:
        text = Text("pass-through" if lane.pass_through else lane.parameters.describe(), "bold")
        if not self.explanation.tuned:
            text.append(" (fixed)")
        if lane.quarantined:
            text.append("  quarantined: its requests are not batched", "bold red")
        return text

    def _decisions(self) -> Table:
        """Return the last decision, and the changes before it, newest first."""
        table = Table.grid(padding=(0, 1))
        table.add_column(style="dim", justify="right", no_wrap=True, min_width=8)
        table.add_column()
        several = len({each.model for each in self.explanation.decisions}) > 1
        for each in shown_decisions(self.explanation.decisions):
            decision = each.decision
            line = _text(f"{each.model or 'model'} " if several else "")
            line.append(str(decision.reason), "cyan" if decision.change else "")
            again = f" ({each.times} times)" if each.times > 1 else ""
            line.append(printable(f"{again}: {message_of(each, not_batched(self.report))}"), "default")
            table.add_row(ago(self.now - each.at), line)
        if not self.explanation.decisions:
            table.add_row("", Text("none yet" if self.explanation.tuned else "none: nothing is tuned", "dim"))
        return table


def _text(line: str, style: str = "") -> Text:
    """Return a line as it is. Clients choose the names of models and paths: rich would read a str as markup."""
    return Text(printable(line), style)


def _encodable(segment: Segment, encoding: str) -> Segment:
    """Return text as it can be written in an encoding: outside UTF-8, a model's name may have letters it lacks."""
    if encoding.startswith("utf"):
        return segment
    text = segment.text.translate(PLAIN).encode(encoding, "replace").decode(encoding)
    return Segment(text, segment.style, segment.control)


class Watch:
    """Keeps previous polls; ``look`` makes a frame of the latest."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._seen: deque[Report] = deque()
        self._rates: deque[float] = deque(maxlen=HISTORY)
        self._tails: deque[float] = deque(maxlen=HISTORY)

    def look(
        self,
        report: Report,
        explanation: Explanation,
        now: float,
        notes: Sequence[str] = (),
        hint: str = "",
    ) -> Sight:
        """Add a poll and return the frame; its figures are over the last ``WINDOW`` seconds."""
        if self._seen and report.stats.at < self._seen[-1].stats.at:
            self._seen.clear()  # another process answers now, and its clock started anew
        self._seen.append(report)
        while len(self._seen) > 2 and report.stats.at - self._seen[1].stats.at >= WINDOW:
            self._seen.popleft()
        first = self._seen[0].stats
        counted = report.stats.since(first)
        figures = figures_of(list(counted.models.values()), report.stats.at - first.at, counted.device_busy)
        self._rates.append(figures.rate)
        self._tails.append(figures.p99 or 0.0)
        return Sight(
            title=self._title,
            hint=hint,
            report=report,
            explanation=explanation,
            figures=figures,
            rates=tuple(self._rates),
            tails=tuple(self._tails),
            alone=_rode_alone(self._seen[0], report),
            forwarded=passed_on(self._seen[0], report, report.stats.at - first.at) if len(self._seen) > 1 else (),
            streams=streamed(self._seen[0], report, report.stats.at - first.at) if len(self._seen) > 1 else (),
            now=now,
            notes=notes,
        )


def _rode_alone(earlier: Report, later: Report) -> dict[str, int]:
    before = {(each.model, each.reason): each.requests for each in earlier.alone}
    found: dict[str, int] = {}
    for each in later.alone:
        count = each.requests - before.get((each.model, each.reason), 0)
        if count > 0:
            found[each.reason] = found.get(each.reason, 0) + count
    return found


def shown_decisions(decisions: Sequence[Explained]) -> Iterable[Explained]:
    """Return the newest decision of each model, and all changes; newest first."""
    seen: set[str] = set()
    # A repeated decision has the place of its first occurrence: others may have been made since.
    for each in sorted(decisions, key=lambda each: each.at, reverse=True):
        if each.decision.change or each.model not in seen:
            yield each
        seen.add(each.model)


def beside(text: Text, bars: str) -> Text:
    """Add bars beside a figure, all of them in the same column."""
    text.append(" " * max(36 - len(text), 2))
    return text.append(bars, "dim")


def histogram(sizes: dict[int, int]) -> str:
    """Return shares of batches in octaves of rows, as bars: ``1 ▁  2-3 ▂  4-7 █``."""
    octaves: dict[int, int] = {}
    for rows, count in sizes.items():
        low = 1 << (rows.bit_length() - 1)
        octaves[low] = octaves.get(low, 0) + count
    most = max(octaves.values(), default=1)
    return "  ".join(
        f"{low}{f'-{2 * low - 1}' if low > 1 else ''} {_bar(count / most)}" for low, count in sorted(octaves.items())
    )


def sparkline(values: Sequence[float], top: float = 0.0) -> str:
    """Return bars for values; a full bar is the largest of them and ``top``."""
    highest = max([top, *values])
    return "".join(_bar(value / highest) if highest else BARS[0] for value in values)


def _bar(share: float) -> str:
    """Return one of nine heights; any value above 0 is visible."""
    return BARS[min(math.ceil(share * 8), 8)]


def curve(lane: Lane, measured: Collection[int]) -> str:
    """Return the estimated batch latency by rows, up to the largest allowed batch.

    A ``?`` marks sizes beyond the ``measured`` ones, as in the map of `simulate --from-running`.
    """
    if lane.service_seconds is None or not lane.executors:
        return "batch latency not known yet"
    low, high = min(measured, default=0), max(measured, default=0)
    sizes = {
        rows: "" if low <= rows <= high else "?"
        for rows in (1, 4, 16, 64, 256, 1024)
        if rows < min(len(lane.service_seconds), lane.cap + 1)
    }
    known = ", ".join(f"{rows}{mark}: {duration(lane.service_seconds[rows])}" for rows, mark in sizes.items())
    legend = " (? not measured)" if "?" in sizes.values() else ""
    return f"batch latency {known}{legend}; server concurrency {lane.executors}"


def clock(seconds: float) -> str:
    """Return ``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def ago(seconds: float) -> str:
    """Return how long ago something was, at least 0: the times come from two clocks."""
    return f"{clock(seconds)} ago" if seconds >= 3600 else f"{max(int(seconds), 0)}s ago"
