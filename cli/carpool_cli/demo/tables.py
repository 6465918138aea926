"""The figures at the end, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from carpool.policy import format_seconds
from carpool_cli.demo.day import FIXED, SLO, SLOWER
from carpool_cli.demo.load import STALL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_cli.bench_report import Percentiles, Report
    from carpool_cli.demo.day import Day
    from carpool_cli.demo.real_models import Outcome


def of_models(outcomes: Sequence[Outcome]) -> Table:
    """Two lines a model: one by one, and tuned."""
    table = Table(title="Real models on this CPU, one core", title_justify="left", title_style="bold")
    table.add_column("model")
    table.add_column("batching", no_wrap=True)
    for name in ("requests/s", "rows/batch", "device ms/request", "device busy", "p99", "in time", "stalls"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        for stretch in (outcome.before, outcome.after):
            table.add_row(
                outcome.model.name if stretch is outcome.before else "",
                stretch.how,
                f"{stretch.report.achieved_rate:.0f}",
                f"{stretch.span.mean_batch:.1f}",
                f"{stretch.span.device_time * 1e3:.2f}",
                f"{stretch.span.busy:.0%}",
                _p99(stretch.report.latency),
                f"{stretch.report.good_share:.1%}",
                _stalls(stretch.report),
            )
        table.add_section()
    return table


def of_day(day: Day) -> Table:
    """Each part of the day, and all of it, by arm."""
    table = Table(
        title=f"The day on {day.device.name}, SLO p99 {format_seconds(SLO)}",
        title_justify="left",
        title_style="bold",
    )
    for name in ("", "batching"):
        table.add_column(name, no_wrap=True)
    for name in (
        "asked/s",
        "in time/s",
        "misses",
        "w/o stalls",
        "p99",
        "w/o stalls",
        "rows/batch",
        "device ms/request",
    ):
        table.add_column(name, justify="right")
    table.add_column("stalls", justify="right")
    for number in range(len(day.hours) + 1):
        table.add_section()
        for arm in day.arms:
            hour = [*arm.hours, arm.whole][number]
            report = hour.report
            table.add_row(
                hour.name if arm is day.arms[0] else "",
                arm.name,
                f"{report.intended_rate:.0f}",
                f"{report.goodput:.0f}",
                _misses(report.good_share),
                _misses(report.steady_good_share),
                _p99(report.latency),
                _p99(report.steady),
                f"{hour.mean_batch:.1f}",
                f"{hour.device_time * 1e3:.1f}",
                _stalls(report),
                style="bold" if number == len(day.hours) else "",
            )
    return table


def notes(day: Day) -> tuple[str, ...]:
    """Return how the tables are to be read."""
    fixed = ", ".join(f"{name} {value}" for name, value in FIXED.items())
    device = day.device.name.partition(",")[0]
    return (
        "In time: answered 2xx within the SLO, from the moment the request was due. Everything else is a miss.",
        (
            "Device ms/request: of a real model, wall time with a batch in flight, by the sidecar's count; of the "
            "stand-in, its own count of batches of each size, times what its profile says they take."
        ),
        f"The fixed setting is a sidecar too ({fixed}); no batching is the server by itself, one request at a time.",
        (
            f"Stalls: pauses of this host of {STALL * 1e3:.0f} ms or more, as the load generator saw them; w/o stalls "
            "leaves out each second that one touched. Before and after of a real model are half a minute apart: on a "
            "shared machine neighbours move them as well."
        ),
        (
            f"The device is {device} as published with every time x{SLOWER}; rates and SLO are chosen for it. Its "
            "noise is the profile's."
        ),
    )


def _misses(good: float | None) -> str:
    return "none" if good is None else f"[{'green' if good >= 0.99 else 'red'}]{1 - good:.1%}[/]"


def _p99(found: Percentiles | None) -> str:
    return "none" if found is None else format_seconds(float(f"{found.p99:.3g}"))


def _stalls(report: Report) -> str:
    if not report.stalls:
        return "0"
    return f"{len(report.stalls)}, to {max(stall.seconds for stall in report.stalls) * 1e3:.0f} ms"
