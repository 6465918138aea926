"""Plots for users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.colors import LogNorm, to_rgba
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from carpool_cli.live.figures import number
from carpool_cli.planning.parameter_map import Plane, milliseconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from carpool.policy.parameters import Parameters
    from carpool_cli.profiling.measuring import Timing


def service_time(path: Path, title: str, timings: Sequence[Timing], inflection: int, slo: float | None) -> None:
    """Draw batch latency and the time per row, with the size where the latter stops falling, and half the SLO."""
    rows = [timing.rows for timing in timings]
    figure, (batch, row) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    batch.plot(rows, [timing.best * 1e3 for timing in timings], "o-", color="C0", label="minimum", markersize=4)
    batch.plot(rows, [timing.middle * 1e3 for timing in timings], "--", color="C0", alpha=0.5, label="median")
    if slo is not None:
        batch.axhline(slo * 500, color="C3", linewidth=1, label="half the SLO")
    batch.set_ylabel("ms a batch")
    row.plot(rows, [timing.best * 1e3 / timing.rows for timing in timings], "o-", color="C1", markersize=4)
    row.axvline(inflection, color="0.5", linewidth=1, linestyle=":")
    row.text(inflection, 0.95, f" {inflection}", transform=row.get_xaxis_transform(), va="top", color="0.35")
    row.set_ylabel("ms a row")
    for axes in (batch, row):
        axes.set_xscale("log", base=2)
        axes.set_xticks(rows, [str(number) for number in rows])
        axes.set_xlabel("rows in the batch")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    batch.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


INK, GREY, RED = "#222222", "#d9d9d9", "#b8321a"
BARE: dict[str, Any] = {"clip_on": False, "linestyle": "none", "color": "none", "markeredgecolor": RED}
MARKERS: dict[str, dict[str, Any]] = {
    "now": {"marker": "o", "markersize": 33, "markeredgewidth": 2.2},
    "as given": {"marker": "D", "markersize": 27, "markeredgewidth": 2.2},
    "recommended": {"marker": "s", "markersize": 22, "markeredgewidth": 2.2},
}
"""Around a cell, so that its figure is readable: distinguishable by their shapes, also where they coincide."""
HALO: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 5.0}


def what_if(path: Path, title: str, planes: Sequence[Plane], marked: Mapping[str, Parameters], slo: float) -> None:
    """Draw the SLO's percentile and device time over (max_batch, max_wait), a row of two panels for each map.

    Only configurations that meet the SLO have colours, on scales that are distinguishable without hue (cividis).
    Infeasible ones are grey and hatched. ``slo`` in seconds.
    """
    wide, high = 1.6 + 0.56 * len(planes[0].waits), 1.5 + 0.36 * len(planes[0].sizes)
    # Models' names must not be parsed as formulas.
    with plt.rc_context({"font.size": 9, "hatch.color": "#9a9a9a", "hatch.linewidth": 0.6, "text.parse_math": False}):
        figure, panels = plt.subplots(
            len(planes), 2, figsize=(2 * wide, len(planes) * high + 0.9), layout="constrained", squeeze=False
        )
        for column, (figure_of, words, top) in enumerate(
            (
                ("latency", planes[0].percentile, slo),
                ("device_time", "device time per request", None),
            )
        ):
            # One scale for all maps.
            cells = [each for drawn in planes for line in drawn.points for each in line]
            holding = [getattr(each, figure_of) for each in cells if each.holds]
            least = min(holding, default=1.0)
            scale = LogNorm(least, max(top or max(holding, default=least), 1.001 * least))
            for axes, drawn in zip(panels[:, column], planes, strict=True):
                _panel(axes, drawn, figure_of, scale)
                axes.set_title(f"{words}, ms; {drawn.max_in_flight} in flight; bright is better", loc="left")
                places = [(MARKERS[name], drawn.place(parameters)) for name, parameters in marked.items()]
                for over in (HALO, {}):
                    for marker, place in places:
                        if place is not None:
                            axes.plot(place[1], place[0], **(BARE | marker | over))
        handles: list[Artist] = [
            Line2D([], [], **BARE, **MARKERS[name] | {"markersize": 9}, label=f"{name}: {parameters.describe()}")
            for name, parameters in marked.items()
        ]
        handles += [
            Patch(facecolor=GREY, hatch="////", edgecolor="#9a9a9a", label="infeasible: forecast to miss the SLO"),
            Patch(facecolor="white", hatch="...", edgecolor="#9a9a9a", label="feasible now, not at 1.25x the load"),
        ]
        if any(drawn.extrapolated(size) for drawn in planes for size in drawn.sizes):
            low, high = planes[0].measured
            handles.append(
                Line2D(
                    [],
                    [],
                    color=RED,
                    linestyle=(0, (4, 2)),
                    label=f"beyond: batch latency extrapolated (measured {low} to {high} rows)",
                )
            )
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _panel(axes: Axes, drawn: Plane, figure_of: str, scale: LogNorm) -> None:
    """Draw one figure of a map."""
    colors = plt.get_cmap("cividis")
    for row, line in enumerate(drawn.points):
        for column, each in enumerate(line):
            seconds = getattr(each, figure_of)
            color = colors(1 - scale(seconds)) if each.holds else to_rgba(GREY)
            hatch = "////" if not each.holds else "..." if not each.holds_ahead else None
            axes.add_patch(
                Rectangle(
                    (column - 0.5, row - 0.5), 1, 1, facecolor=color, hatch=hatch, edgecolor="#9a9a9a", linewidth=0
                )
            )
            # Relative luminance with WCAG's weights, without its gamma: enough to choose black or white.
            light: float = 0.2126 * color[0] + 0.7152 * color[1] + 0.0722 * color[2]
            axes.text(
                column, row, milliseconds(seconds), ha="center", va="center", fontsize=8,
                color=INK if light > 0.45 else "white",
                # Outside the hatching.
                bbox={"facecolor": color, "edgecolor": "none", "pad": 0.8} if hatch else None,
            )  # fmt: skip
    axes.set_xlim(-0.5, len(drawn.waits) - 0.5)
    axes.set_ylim(-0.5, len(drawn.sizes) - 0.5)
    axes.set_xticks(range(len(drawn.waits)), [number(wait * 1e3) for wait in drawn.waits])
    axes.set_yticks(range(len(drawn.sizes)), [str(size) for size in drawn.sizes])
    axes.set_xlabel("max_wait, ms")
    axes.set_ylabel("max_batch, rows")
    axes.tick_params(length=0)
    for edge in ("top", "right", "left", "bottom"):
        axes.spines[edge].set_visible(False)
    known = [row for row, size in enumerate(drawn.sizes) if not drawn.extrapolated(size)]
    for edge_row, beyond in ((min(known, default=0) - 0.5, 0), (max(known, default=0) + 0.5, len(drawn.sizes) - 1)):
        if drawn.extrapolated(drawn.sizes[beyond]):
            axes.axhline(edge_row, color=RED, linewidth=1.6, linestyle=(0, (4, 2)))
