from __future__ import annotations

import re
from pathlib import Path

from msgspec.structs import replace

from carpool.learning.latency_model import ServiceTime
from carpool_cli.demo import tables
from carpool_cli.demo.day import SLOWER, Arm, Day, Hour
from carpool_cli.demo.observed import Span
from carpool_cli.demo.real_models import Outcome, RealModel, Stretch
from carpool_cli.demo.screen import Screen
from carpool_cli.load.report import Percentiles, Report, StallSpan
from carpool_cli.profiling import device_profile

PROFILE = Path(__file__).parents[3] / "benchmarks/profiles/resnet50-v100.json"
NAMES = ("no batching", "zero wait: 64, 0 ms", "fixed: 8, 2 ms", "Carpool, p99 only")
HOURS = (("night", 15.0), ("morning", 110.0))
SECONDS = 40.0

TIMES = Percentiles(count=900, p50=0.0213, p90=0.1, p99=0.2345, p999=0.3, max=0.4)
REPORT = Report(
    seconds=20.0, requests=1000, intended_rate=110.0, achieved_rate=110.0, ok=1000, good=990, goodput=49.5,
    good_share=0.987, errors={}, complaints={}, latency=TIMES, steady=TIMES, steady_good_share=0.991, windows=[],
    stalls=[StallSpan(1.0, 0.123)] * 12, lateness_p99=0.0, cpu_share=0.1, most_outstanding=9, generator_limits=[],
)  # fmt: skip


def hour(name, rate, busy):
    return Hour(name, rate, REPORT, 0.01, 12.3, busy)


def day(choices=(), zero_wait=0.6, ours=0.5):
    """One arm of each kind, with a share of the time for which the device computed."""
    arms = [
        Arm(name, None, (), chosen, [hour(*each, busy) for each in HOURS], hour("all day", 60.0, busy))
        for name, busy, chosen in zip(NAMES, (0.9, zero_wait, 0.7, ours), ((), (), (), choices), strict=True)
    ]
    device = device_profile.load(PROFILE)
    return Day(replace(device, name=f"{device.name}, x{SLOWER}"), SECONDS, HOURS, arms, [])


def outcome(how="batch 64, wait 123ms, 12 in flight (mostly)"):
    model = RealModel("tower", "", Path(), "", [], [], [], [], [], 100.0)
    span = Span(1000, 0.0123, 0.0123, 0.61, 12.3)
    direct = ServiceTime.measured({1: 0.01, 8: 0.02})
    return Outcome(model, direct, Stretch("one by one", span, REPORT), Stretch(how, span, REPORT))


def test_a_narrow_terminal_cuts_no_figure(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    screen = Screen()
    assert (screen.console.is_terminal, screen.console.width) == (True, 80)
    screen.table(tables.of_day(day()))
    screen.table(tables.of_models([outcome()]))
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    for row in (
        "110/s asked",
        "12 stalls, to 123 ms",
        "Carpool, p99 only",
        "batch 64, wait 123ms, 12 in flight (mostly)",
    ):
        assert row in shown
    figures = ("50", "1.3%", "0.9%", "21.3ms", "234ms", "234ms", "12.3", "50%")
    assert re.search(r" +".join(("Carpool, p99 only", *figures)), shown)
