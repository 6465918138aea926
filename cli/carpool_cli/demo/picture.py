"""The final figures as a plot: a column for each way to batch, one scale per row."""

from __future__ import annotations

from bisect import bisect_left
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter, PercentFormatter
from PIL import Image

from carpool_cli.demo.day import SLO, SLOWER, Arm, Day
from carpool_cli.demo.load import STALL
from carpool_cli.load.report import percentiles

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from carpool_cli.demo.real_models import Outcome

WINDOW = 2.0
"""Seconds per point of the curves."""

INK, GREY, RED, BLUE = "#222222", "#9a9a9a", "#c8553d", "#3d5a80"
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
COLORS = ("#8d99ae", "#7a5c99", "#e09f3e", "#2a7f62")


def draw(path: Path, day: Day, outcomes: Sequence[Outcome]) -> None:
    """Draw the day, Carpool's parameters, and what batching saves for the real models."""
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(14.5, 9.2), layout="constrained")
        grid = figure.add_gridspec(4, 4, height_ratios=(1, 1, 1, 1.05))
        columns = [[figure.add_subplot(grid[row, column]) for row in range(3)] for column in range(4)]
        for axes, arm, color in zip(columns, day.arms, COLORS, strict=True):
            axes[0].set_title(arm.name, fontsize=12, fontweight="bold", color=color, loc="left")
            _arm(axes, arm, day, color)
        # One scale per row, with room above for the text (more of it if the scale is logarithmic).
        for row, room in enumerate((1.3, 2.0, 1.2)):
            top = max(column[row].get_ylim()[1] for column in columns)
            for column in columns:
                column[row].set_ylim(top=top * room)
        for left, label in zip(columns[0], ("requests/s", "p50 (thin), p99", "device busy"), strict=True):
            left.set_ylabel(label)
        _choices(figure.add_subplot(grid[3, :3]), day)
        _models(figure.add_subplot(grid[3, 3]), outcomes)
        device = day.device.name.removesuffix(f", x{SLOWER}")
        title = (
            f"One load, four ways to batch: stand-in for {device}, times x{SLOWER}, slept; SLO p99 {SLO * 1e3:.0f} ms"
        )
        figure.suptitle(title, fontsize=13, x=0.01, ha="left")
        figure.align_ylabels()
        drawn = BytesIO()
        figure.savefig(drawn, dpi=110)
        plt.close(figure)
    # Few colors are used: a palette reduces the file to a third.
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(128).save(path, optimize=True)


def _arm(axes: Sequence[Axes], arm: Arm, day: Day, color: str) -> None:
    rate, latency, device = axes
    recording = arm.driven.recording
    starts = [step * WINDOW for step in range(int(day.seconds / WINDOW))]
    middles = [start + WINDOW / 2 for start in starts]
    asked, good, p50, p99 = [], [], [], []
    for start in starts:
        window = range(bisect_left(recording.due, start), bisect_left(recording.due, start + WINDOW))
        took = [recording.done[i] - recording.due[i] for i in window if recording.status[i] == 200]
        found = percentiles(took)
        asked.append(len(window) / WINDOW)
        good.append(sum(seconds <= SLO for seconds in took) / WINDOW)
        p50.append(found.p50 * 1e3 if found else float("nan"))
        p99.append(found.p99 * 1e3 if found else float("nan"))
    # 1. The load, and the requests answered in time.
    rate.fill_between(middles, asked, color=RED, alpha=0.25, linewidth=0, label="asked, and missed")
    rate.fill_between(middles, good, color="white", linewidth=0)
    rate.fill_between(middles, good, color=color, alpha=0.55, linewidth=0, label="answered in time")
    rate.plot(middles, asked, color=INK, linewidth=0.8)
    rate.set_ylim(bottom=0)
    if arm is day.arms[0]:
        rate.legend(frameon=False, fontsize=8, loc="upper left", borderaxespad=0)
    rate.text(0.99, 0.95, f"{arm.whole.report.good_share:.1%} in time", transform=rate.transAxes, ha="right", va="top",
              fontsize=10, fontweight="bold", color=color)  # fmt: skip
    # 2. Latency.
    latency.set_yscale("log")
    latency.axhline(SLO * 1e3, color=RED, linewidth=1, linestyle="--")
    latency.text(day.seconds, SLO * 1e3 * 1.1, "SLO", color=RED, ha="right", va="bottom", fontsize=8)
    latency.plot(middles, p99, color=color, linewidth=1.6)
    latency.plot(middles, p50, color=color, linewidth=0.9)
    stalls = [stall.start for stall in recording.stalls if stall.end - stall.start >= STALL]
    latency.vlines(stalls, 0, 1, transform=latency.get_xaxis_transform(), color=GREY, alpha=0.5, linewidth=2,
                   label="this host stalled")  # fmt: skip
    if arm is day.arms[0] and stalls:
        latency.legend(frameon=False, fontsize=8, loc="lower right", borderaxespad=0)
    latency.set_ylim(bottom=10)
    latency.yaxis.set_major_formatter(lambda value, _: f"{value / 1e3:g} s" if value >= 1e3 else f"{value:g} ms")
    latency.yaxis.set_minor_formatter(NullFormatter())
    # 3. Cost.
    marks = [
        0,
        *(next((i for i, c in enumerate(arm.counts) if c.at >= start), len(arm.counts) - 1) for start in starts[1:]),
    ]
    points = [
        (arm.counts[b].at, (arm.counts[b].seconds - arm.counts[a].seconds) / (arm.counts[b].at - arm.counts[a].at))
        for a, b in pairwise(marks)
        if arm.counts[b].at > arm.counts[a].at
    ]
    device.plot([x for x, _ in points], [y for _, y in points], color=color, linewidth=1.6)
    device.fill_between([x for x, _ in points], [y for _, y in points], color=color, alpha=0.15, linewidth=0)
    device.text(0.99, 0.95, f"{arm.whole.busy:.0%} busy", transform=device.transAxes, ha="right",
                va="top", fontweight="bold", color=color)  # fmt: skip
    device.set_ylim(bottom=0)
    device.yaxis.set_major_formatter(PercentFormatter(1.0))
    for one in axes:
        _hours(one, day)


def _choices(axes: Axes, day: Day) -> None:
    arm = day.arms[-1]
    times = [choice.at for choice in arm.choices]
    batch = [1 if choice.parameters.pass_through else choice.parameters.max_batch for choice in arm.choices]
    wait = [choice.parameters.max_wait * 1e3 for choice in arm.choices]
    axes.step(times, wait, where="post", color=COLORS[3], linewidth=1.8, label="max_wait, ms")
    axes.step(times, batch, where="post", color=BLUE, linewidth=1.8, label="max_batch, rows (1: pass-through)")
    axes.set_title("What Carpool chose", fontsize=11, fontweight="bold", loc="left", color=INK)
    axes.set_ylim(bottom=0, top=max(*wait, *batch, 1) * 1.25)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    _hours(axes, day)


def _models(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """Draw the cost of a row in a batch, relative to a single one, and the result under Carpool's load."""
    for outcome, color in zip(outcomes, (BLUE, COLORS[2]), strict=True):
        curve = outcome.direct
        relative = [curve.per_row(rows) / curve.per_row(1) for rows in curve.sizes]
        axes.plot(curve.sizes, relative, color=color, linewidth=1.6, marker="o", markersize=3, label=outcome.model.name)
        before, after = outcome.before.span, outcome.after.span
        axes.plot(after.mean_batch, after.cost / before.cost, color=color, marker="*", markersize=14,
                  markeredgecolor="white", linestyle="")  # fmt: skip
    axes.plot([], [], color=GREY, marker="*", markersize=10, linestyle="", label="under Carpool's choice")
    axes.set_xscale("log", base=2)
    axes.set_xticks(outcomes[0].direct.sizes, [str(rows) for rows in outcomes[0].direct.sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows in a batch", fontsize=8)
    axes.set_ylabel("cost of a row (alone: 1)")
    axes.set_title("Real models, this CPU", fontsize=11, fontweight="bold", loc="left", color=INK)
    axes.legend(frameon=False, fontsize=8)


def _hours(axes: Axes, day: Day) -> None:
    share = day.seconds / len(day.hours)
    axes.set_xlim(0, day.seconds)
    axes.set_xticks([i * share for i in range(len(day.hours))], minor=False)
    axes.grid(axis="x", color=GREY, alpha=0.3, linewidth=0.6)
    axes.set_xticklabels([f" {name}" for name, _ in day.hours], ha="left", fontsize=8)
