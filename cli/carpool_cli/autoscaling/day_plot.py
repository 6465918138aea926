"""The plot of a day with autoscalers: load, replicas, utilization and misses over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from carpool_cli.autoscaling.days import STEP, Steps

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STYLES = (("#b8321a", "-"), ("#c98500", "--"), ("#1f5fa8", "-"), ("#222222", ":"))
"""Colour and line of each autoscaler: distinguishable without colour, too."""

SMOOTH = 20
"""Points over which utilization and misses are averaged: they jump with every replica."""


def draw(path: Path, title: str, days: Sequence[tuple[str, Steps]]) -> None:
    """Draw four panels, one curve for each day; the load is the same for all."""
    hours = [index * STEP / 3600 for index in range(len(days[0][1].rates))]
    with plt.rc_context({"font.size": 9, "text.parse_math": False}):
        figure, panels = plt.subplots(4, 1, figsize=(9, 8), sharex=True, layout="constrained")
        load, replicas, busy, missed = panels
        load.fill_between(hours, days[0][1].rates, color="#d9d9d9", linewidth=0)
        load.set_ylabel("requests/s")
        for (name, steps), (color, line) in zip(days, STYLES, strict=False):
            look = {"color": color, "linestyle": line, "linewidth": 1.3}
            replicas.step(hours, steps.replicas, where="post", label=name, **look)
            busy.plot(hours, _smooth([100 * each for each in steps.busy]), **look)
            missed.plot(hours, _smooth([100 * each for each in steps.missed]), **look)
        replicas.set_ylabel("replicas, starting included")
        replicas.yaxis.get_major_locator().set_params(integer=True)
        # Below the panels: replicas that come and go all day leave no room among the curves.
        figure.legend(
            *replicas.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8
        )
        busy.set_ylabel("device busy, %")
        missed.set_ylabel("late or refused, %")
        missed.set_xlabel("hours")
        for panel in panels:
            panel.set_ylim(bottom=0)
            panel.margins(x=0)
            panel.grid(alpha=0.25)
        replicas.set_ylim(0, 1.1 * max(max(steps.replicas) for _, steps in days))
        missed.set_ylim(0, max(1.2, *missed.get_ylim()))
        missed.axhline(1.0, color="0.5", linewidth=0.8)
        missed.text(0, 1.0, " the SLO allows 1 %", va="bottom", color="0.35", fontsize=8)
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _smooth(values: Sequence[float]) -> list[float]:
    width = min(SMOOTH, max(len(values) // 40, 1))
    return [sum(values[max(at - width + 1, 0) : at + 1]) / min(at + 1, width) for at in range(len(values))]
