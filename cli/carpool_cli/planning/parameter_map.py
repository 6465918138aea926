"""The map of (max_batch, max_wait): the forecast of each point, and its table for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from rich.table import Table
from rich.text import Text

from carpool.policy.durations import Duration, whole_microseconds
from carpool.policy.parameters import Limits, Parameters
from carpool.tuning.candidates import SIZES, WAITS
from carpool_cli.live.figures import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from carpool.forecasting.forecaster import Forecaster
    from carpool.learning.latency_model import ServiceTime

MOST_SIZES = 14
"""Sizes of a map; marked points have theirs in addition."""


class Point(Struct, frozen=True, kw_only=True, rename="camel"):
    """One configuration's forecast, without rejections."""

    max_batch: int
    max_wait: float
    latency: float
    """Forecast of the SLO's highest percentile, seconds."""
    device_time: float
    """Seconds per request."""
    miss_share: float
    holds: bool
    """Whether it meets the SLO by the tuner's rule: half of the misses that it allows. Otherwise it is infeasible."""
    holds_ahead: bool
    """The same at 1.25 times the load."""


class Plane(Struct, frozen=True, kw_only=True, rename="camel"):
    """Forecasts for all sizes and waits with one number of batches in flight."""

    max_in_flight: int
    percentile: str
    sizes: list[int]
    waits: list[float]
    """Seconds."""
    points: list[list[Point]]
    """A list by wait for each size."""
    measured: tuple[int, int]
    """Rows from which and up to which batch latency was measured: everything else is extrapolated."""

    def extrapolated(self, size: int) -> bool:
        """Whether some batches of up to ``rows`` rows have sizes without measured latency."""
        return not self.measured[0] <= size <= self.measured[1]

    def place(self, parameters: Parameters) -> tuple[int, int] | None:
        """Return the row and the column of a configuration, ``None`` if this map does not have it.

        Pass-through has the place of batches of one.
        """
        if parameters.max_in_flight != self.max_in_flight:
            return None
        size, wait = (1, 0.0)
        if not parameters.pass_through:
            size, wait = parameters.max_batch, whole_microseconds(parameters.max_wait)
        if size not in self.sizes or wait not in self.waits:
            return None
        return self.sizes.index(size), self.waits.index(wait)


def grid(limits: Limits, marked: Iterable[Parameters]) -> tuple[list[int], list[float]]:
    """Return sizes and waits that cover the limits, and those of the ``marked`` configurations."""
    merging = [each for each in marked if not each.pass_through]
    sizes = {
        limits.min_batch,
        limits.max_batch,
        *(each for each in SIZES if limits.min_batch <= each <= limits.max_batch),
    }
    own = {each.max_batch for each in merging} | {limits.min_batch, limits.max_batch}
    listed = sorted(sizes | own)
    while len(listed) > max(MOST_SIZES, len(own)):
        # Most sizes are small: every second unmarked one of these is dropped first.
        listed.remove(next(each for each in listed[1::2] + listed[2::2] if each not in own))
    waits = {float(wait) for wait in limits.waits(WAITS)}
    return listed, sorted(waits | {whole_microseconds(each.max_wait) for each in merging})


def plane(
    forecaster: Forecaster,
    max_in_flight: int,
    sizes: Sequence[int],
    waits: Sequence[float],
    percentile: str,
    step: Callable[[], object] = lambda: None,
) -> Plane:
    """Forecast every point; ``step`` is called after each."""
    service: ServiceTime = forecaster.situation.service

    def point(size: int, wait: float) -> Point:
        found = forecaster.assess(Parameters(max_batch=size, max_wait=Duration(wait), max_in_flight=max_in_flight))
        present = found.present
        step()
        return Point(
            max_batch=size,
            max_wait=wait,
            latency=getattr(present, percentile),
            device_time=present.device_time,
            miss_share=present.miss_fraction,
            holds=found.holds_now,
            holds_ahead=found.holds_ahead,
        )

    return Plane(
        max_in_flight=max_in_flight,
        percentile=percentile,
        sizes=[*sizes],
        waits=[*waits],
        points=[[point(size, wait) for wait in waits] for size in sizes],
        measured=(service.sizes[0], service.sizes[-1]),
    )


MARKS = {"now": ("(", ")"), "as given": ("<", ">"), "recommended": ("[", "]")}
"""Markers around a configuration's figures in a terminal; if two coincide, the last one is shown."""

LEGEND = "(now) <as given> [recommended]  ! infeasible  ~ feasible now, not at 1.25x the load  ? size not measured"


def drawn(shown: Plane, marked: dict[str, Parameters]) -> Iterable[Text | Table]:
    """Format a map for a terminal: one table of the percentile, one of device time; a row for each size."""
    marks = {place: name for name, each in marked.items() if (place := shown.place(each)) is not None}
    flights = f"{shown.max_in_flight} in flight"
    for title, figure in (
        (f"{shown.percentile}, ms; {flights}", "latency"),
        (f"device time per request, ms; {flights}", "device_time"),
    ):
        yield Text(title, "bold")
        table = Table(box=None, padding=(0, 1), pad_edge=False)
        table.add_column("rows", justify="right", no_wrap=True)
        for wait in shown.waits:
            table.add_column(f"{number(wait * 1e3)}ms", justify="right", no_wrap=True)
        for row, size in enumerate(shown.sizes):
            cells = [
                _cell(getattr(point, figure), point, marks.get((row, column)))
                for column, point in enumerate(shown.points[row])
            ]
            table.add_row(f"{size}{'?' if shown.extrapolated(size) else ' '}", *cells)
        yield table


def _cell(seconds: float, point: Point, mark: str | None) -> Text:
    before, after = MARKS[mark] if mark else ("", " ")
    sign = "!" if not point.holds else "~" if not point.holds_ahead else " "
    style = "bold reverse" if mark else "dim" if not point.holds else ""
    return Text(f"{before}{milliseconds(seconds)}{after}{sign}", style)


def milliseconds(seconds: float) -> str:
    """Format with as many digits as fit a cell: ``0.0421``, ``23.1``; from a second on: ``9.6s``, ``42s``."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g}"
    return f"{seconds:.2g}s" if seconds < 99.5 else f"{seconds:.0f}s"
