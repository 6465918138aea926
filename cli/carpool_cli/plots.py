"""Pictures for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from carpool_cli.measuring import Timing


def service_time(path: Path, title: str, timings: Sequence[Timing], inflection: int, slo: float | None) -> None:
    """Draw t(b) and the time a row, with the size where the latter stops falling and, on t(b), half the SLO."""
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
