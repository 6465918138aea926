"""The final figures as tables, with a summary in a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from carpool.policy.durations import format_seconds
from carpool_cli.demo.day import FIXED, SLO, SLOWER, Arm, Day, Hour
from carpool_cli.demo.load import STALL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool_cli.demo.real_models import Outcome
    from carpool_cli.load.report import Percentiles, Report

NEXT_TO_NOTHING = 1.1
"""Saving by batching below which it counts as negligible: a tenth less per row does not pay for a wait."""


def of_models(outcomes: Sequence[Outcome]) -> Table:
    """Two lines per model: single requests, and tuned."""
    table = _table("Real models on this CPU, one core")
    for name in (
        "requests/s",
        "rows/\nbatch",
        "CPU ms/\nrequest",
        "device ms/\nrequest",
        "device\nbusy",
        "p99",
        "in time",
        "stalls",
    ):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        for label, stretch in ((outcome.model.name, outcome.before), ("", outcome.after)):
            table.add_row(
                label,
                stretch.how,
                f"{stretch.report.achieved_rate:.0f}",
                f"{stretch.span.mean_batch:.1f}",
                f"{stretch.span.cpu * 1e3:.2f}",
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
    table = _table(f"The day on {escape(day.device.name)}, SLO p99 {format_seconds(SLO)}")
    for name in ("in\ntime/s", "misses", "w/o\nstalls", "p50", "p99", "w/o\nstalls", "rows/\nbatch", "device\nbusy"):
        table.add_column(name, justify="right")
    for number in range(len(day.hours) + 1):
        for arm, label in zip(day.arms, _labels([*day.arms[0].hours, day.arms[0].whole][number]), strict=True):
            hour = [*arm.hours, arm.whole][number]
            report = hour.report
            table.add_row(
                label,
                arm.name,
                f"{report.goodput:.0f}",
                _misses(report.good_share),
                _misses(report.steady_good_share),
                _p50(report.latency),
                _p99(report.latency),
                _p99(report.steady),
                f"{hour.mean_batch:.1f}",
                f"{hour.busy:.0%}",
                style="bold" if number == len(day.hours) else "",
            )
        table.add_section()
    return table


def notes(day: Day) -> tuple[str, ...]:
    """Return notes on how to read the tables."""
    fixed = ", ".join(f"{name} {value}" for name, value in FIXED.items())
    device = day.device.name.partition(",")[0]
    return (
        "In time: answered 2xx within the SLO, from the moment the request was due. Everything else is a miss.",
        (
            "CPU ms/request: of the sidecar's process, and under Carpool of its tuner's, too. Device ms/request and "
            "busy: of a real model, wall time with a batch in flight, by the sidecar's count: more while other work "
            "holds this machine's cores; of the stand-in, its own count of batches of each size, times what its "
            "profile says they take."
        ),
        (
            f"Zero wait and the fixed setting ({fixed}) are sidecars too: they refuse requests that would be late, as "
            "Carpool does. No batching is the server by itself, one request at a time."
        ),
        (
            f"Stalls: pauses of this host of {STALL * 1e3:.0f} ms or more, as the load generator saw them; w/o stalls "
            "leaves out each second that one touched."
        ),
        (
            f"The device is {device} as published with every time x{SLOWER}; rates and SLO are chosen for it. Its "
            "noise is the profile's."
        ),
    )


def verdicts(day: Day, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the conclusions, a line each."""
    lines = []
    for outcome in outcomes:
        before, after = outcome.before.span, outcome.after.span
        worth = f"worth {outcome.worth:.1f}x at best"
        if outcome.worth < NEXT_TO_NOTHING:
            worth = f"worth next to nothing ({outcome.worth:.2f}x at best)"
        chose = "chose" if outcome.after.chosen else "kept what it begins with,"
        lines.append(
            f"[bold]{outcome.model.name}[/]: batching is {worth} on this CPU. Carpool {chose} "
            f"[bold]{outcome.after.how}[/]: {after.mean_batch:.1f} rows per batch, {after.cost * 1e3:.2f} ms of "
            f"{'CPU' if after.cpu else 'device time'} a request; one by one {before.cost * 1e3:.2f}, "
            f"so {before.cost / after.cost:.2f}x in this run"
        )
    return [*_of_day(day), *lines]


def _of_day(day: Day) -> list[str]:
    """Describe the objective's result: latency at the quietest part of the day, free device time at the busiest."""
    direct, zero_wait, _, ours = day.arms
    quiet = min(range(len(day.hours)), key=lambda number: day.hours[number][1])
    rush = max(range(len(day.hours)), key=lambda number: day.hours[number][1])
    at_night = [arm.hours[quiet].report.latency for arm in (direct, ours)]
    lines = [f"[bold]the day, {arm.name}[/]: {_of_arm(arm)}" for arm in day.arms]
    if all(at_night):
        asked, answered = (_p50(found) for found in at_night)
        lines.append(
            f"[bold]at {day.hours[quiet][0]}[/] the device is {ours.hours[quiet].busy:.0%} busy, and Carpool adds "
            f"{_in_words(_waits(day, quiet))}: p50 {answered}, {asked} without Carpool"
        )
    mine, other, waits = ours.hours[rush], zero_wait.hours[rush], _waits(day, rush)
    held = sum(wait > 0 for wait in waits) > len(waits) / 2
    # Less work per row, not rows that were refused.
    buys = held and mine.device_time < other.device_time and round(mine.busy, 2) < round(other.busy, 2)
    wait = _in_words(waits)
    lines.append(
        f"[bold]at {day.hours[rush][0]}[/] the device is {mine.busy:.0%} busy with Carpool, {other.busy:.0%} with zero "
        f"wait{f': that room is what {wait} buys' if buys else f'; Carpool adds {wait}'}. "
        f"{mine.report.good_share:.1%} and {other.report.good_share:.1%} are in time"
    )
    if day.saved is not None:
        lines.append(f"[bold]carpool savings[/]: {day.saved.in_words()}")
    return lines


def _waits(day: Day, hour: int) -> list[float]:
    """Return Carpool's wait in a part of the day, in seconds: at its start, and whenever it was polled."""
    share, choices = day.seconds / len(day.hours), day.arms[-1].choices
    before = [each for each in choices if each.at <= hour * share]
    within = [each for each in choices if hour * share < each.at <= (hour + 1) * share]
    return [0.0 if each.parameters.pass_through else each.parameters.max_wait for each in [*before[-1:], *within]]


def _in_words(waits: Sequence[float]) -> str:
    return f"a wait of up to {format_seconds(max(waits))}" if any(waits) else "no wait"


def _of_arm(arm: Arm) -> str:
    whole = arm.whole
    return f"{whole.report.good_share:.1%} in time, device {whole.busy:.0%} busy"


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("", "batching"):
        table.add_column(name, no_wrap=True)
    return table


def _labels(hour: Hour) -> tuple[str, str, str, str]:
    """Label a part of the day beside its four rows: its name, its load, this host's pauses."""
    return hour.name, f"{hour.report.intended_rate:.0f}/s asked", _stalls(hour.report), ""


def _misses(good: float | None) -> str:
    return "none" if good is None else f"[{'green' if good >= 0.99 else 'red'}]{1 - good:.1%}[/]"


def _p50(found: Percentiles | None) -> str:
    return "none" if found is None else format_seconds(float(f"{found.p50:.3g}"))


def _p99(found: Percentiles | None) -> str:
    return "none" if found is None else format_seconds(float(f"{found.p99:.3g}"))


def _stalls(report: Report) -> str:
    if not report.stalls:
        return "no stalls"
    longest = f"{max(stall.seconds for stall in report.stalls) * 1e3:.0f} ms"
    return f"1 stall, {longest}" if len(report.stalls) == 1 else f"{len(report.stalls)} stalls, to {longest}"
