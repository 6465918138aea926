"""The plot of what batching saves: device seconds and replicas by each way, with zero wait for comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from carpool_cli.planning.money import written
from carpool_cli.planning.savings import ZERO_WAIT, Way

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PLAIN, ZERO = "#9bb8d3", "#1f5fa8"


def draw(path: Path, found: Sequence[tuple[str, Sequence[Way]]]) -> None:
    """Draw a row of two panels for each name and its ways; replicas are labelled with money if there is a price."""
    most = max(len(ways) for _, ways in found)
    with plt.rc_context({"font.size": 9, "text.parse_math": False}):
        figure, rows = plt.subplots(
            len(found), 2, figsize=(9, (0.9 + 0.35 * most) * len(found) + 0.4), squeeze=False, layout="constrained"
        )
        for (name, ways), (device, replicas) in zip(found, rows, strict=True):
            names = [way.name for way in ways]
            colors = [ZERO if each == ZERO_WAIT else PLAIN for each in names]
            bars = device.barh(names, [way.device_seconds for way in ways], color=colors)
            device.bar_label(bars, [f" {way.device_seconds:,.0f}" for way in ways])
            # The name has its own line, above both panels: it may be longer than one of them.
            device.set_title(f"{name}\ndevice seconds per hour", fontsize=9, loc="left")
            bars = replicas.barh(names, [way.replicas for way in ways], color=colors)
            replicas.bar_label(bars, [_cost(way) for way in ways])
            replicas.set_title("replicas", fontsize=9, loc="left")
            replicas.set_yticks([])
            for panel in (device, replicas):
                panel.invert_yaxis()
                panel.margins(x=0.3)
                panel.locator_params(axis="x", nbins=5)
                panel.xaxis.set_major_formatter("{x:,.10g}")
                panel.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _cost(way: Way) -> str:
    return f" {way.replicas:.1f}" if way.money is None else f" {way.replicas:.1f} ({written(way.money)} a month)"
