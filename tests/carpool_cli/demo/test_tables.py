from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.text import Text

from carpool.learning.latency_model import ServiceTime
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_cli.demo import tables
from carpool_cli.demo.day import SLOWER, Arm, Day, Hour
from carpool_cli.demo.observed import Choice, Span
from carpool_cli.demo.real_models import Outcome, RealModel, Stretch, mostly
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


WAITS, ZERO = Parameters(max_batch=32, max_wait=Duration(0.012)), Parameters(max_batch=32)
PASSES = replace(WAITS, pass_through=True)


def hour(name, rate, busy):
    """A part of the day with as many rows, whatever share of the time they took."""
    return Hour(name, rate, REPORT, busy / 100, 12.3, busy)


def day(choices=(), zero_wait=0.6, ours=0.5):
    """One arm of each kind, with a share of the time for which the device computed."""
    arms = [
        Arm(name, None, (), chosen, [hour(*each, busy) for each in HOURS], hour("all day", 60.0, busy))
        for name, busy, chosen in zip(NAMES, (0.9, zero_wait, 0.7, ours), ((), (), (), choices), strict=True)
    ]
    device = device_profile.load(PROFILE)
    return Day(replace(device, name=f"{device.name}, x{SLOWER}"), SECONDS, HOURS, arms, [])


def outcome(how="batch 64, wait 123ms, 12 in flight (mostly)", *, chosen=True):
    model = RealModel("tower", "", Path(), "", [], [], [], [], [], 100.0)
    span = Span(1000, 0.0123, 0.0123, 0.61, 12.3)
    direct = ServiceTime.measured({1: 0.01, 8: 0.02})
    return Outcome(model, direct, Stretch("one by one", False, span, REPORT), Stretch(how, chosen, span, REPORT))


def verdicts(lived, outcomes=()):
    """The lines on the quietest and the busiest part of the day, and those on the models."""
    lines = [Text.from_markup(line).plain for line in tables.verdicts(lived, outcomes)]
    return lines[len(lived.arms) :]


def polled(night, morning):
    """Carpool's parameters, half a second after each poll, by the part of the day."""
    return [Choice(at + 0.5, night if at < SECONDS / 2 else morning) for at in range(int(SECONDS))]


def test_a_wait_bought_room_only_where_it_was_in_force_and_rows_took_less():
    quiet, busy = verdicts(day(polled(ZERO, WAITS), zero_wait=0.6, ours=0.5))
    assert quiet == "at night the device is 50% busy, and Carpool adds no wait: p50 21.3ms, 21.3ms without Carpool"
    assert busy == (
        "at morning the device is 50% busy with Carpool, 60% with zero wait: that room is what a wait of up to 12ms "
        "buys. 98.7% and 98.7% are in time"
    )
    for without in (ZERO, PASSES):
        _, busy = verdicts(day(polled(WAITS, without), zero_wait=0.6, ours=0.5))
        assert "50% busy with Carpool, 60% with zero wait; Carpool adds a wait of up to 12ms. " in busy, "at its start"
    _, busy = verdicts(day(polled(ZERO, PASSES), zero_wait=0.6, ours=0.5))
    assert "60% with zero wait; Carpool adds no wait. " in busy
    _, busy = verdicts(day(polled(ZERO, WAITS), zero_wait=0.6, ours=0.62))
    assert "62% busy with Carpool, 60% with zero wait; Carpool adds a wait of up to 12ms. " in busy
    _, busy = verdicts(day(polled(ZERO, WAITS), zero_wait=0.601, ours=0.599))
    assert "60% busy with Carpool, 60% with zero wait; Carpool adds a wait of up to 12ms. " in busy


def test_a_wait_at_the_quietest_part_is_said():
    quiet, _ = verdicts(day(polled(WAITS, ZERO)))
    assert "50% busy, and Carpool adds a wait of up to 12ms: p50 " in quiet


@pytest.mark.parametrize(
    ("settings", "how", "chosen"),
    [
        ("aaaaaa", "a", False),
        ("aaaaab", "a (mostly)", False),
        ("abbbbb", "b", True),
        ("aaabbb", "b", True),
        ("abaaaa", "a", True),
    ],
)
def test_what_is_chosen_is_what_a_change_led_to(settings, how, chosen):
    assert mostly(settings, 3) == (how, chosen)


def test_what_no_change_led_to_was_not_chosen():
    _, _, chose, kept = verdicts(day(polled(ZERO, WAITS)), [outcome("batch 8"), outcome("batch 32", chosen=False)])
    assert "Carpool chose batch 8: 12.3 rows per batch, 12.30 ms of CPU a request" in chose
    assert "Carpool kept what it begins with, batch 32: 12.3 rows per batch" in kept


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
