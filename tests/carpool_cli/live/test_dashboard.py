from __future__ import annotations

import io
import json
import shlex
import subprocess

import pytest
from msgspec.structs import replace
from rich.console import Console

from carpool.batching.counters import DURATION_BOUNDS, ModelStats, Stats
from carpool.exchange.decision import Reason
from carpool.exchange.report import Alone, Forwarded, Lane, ModelEntry, Queue, Report, RolledBack, Stalls
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool_cli.live.admin_client import Decided, Explained, Explanation
from carpool_cli.live.dashboard import Watch, ago, clock, curve, histogram, shown_decisions, sparkline

LANE = Lane(
    parameters=Parameters(max_batch=16, max_wait=Duration(0.005), max_in_flight=2),
    pass_through=False,
    queued_requests=0,
    cap=16,
    quarantined=False,
    service_seconds=tuple(0.005 + 0.0005 * rows for rows in range(65)),
    executors=2,
)


def report(at: float, requests: int = 0, slow: int = 0, **changes: object) -> Report:
    """A sidecar that answered requests in about 10 ms, and slow ones in about 70 ms."""
    durations = [0] * (len(DURATION_BOUNDS) + 1)
    durations[18], durations[29] = requests, slow
    model = ModelStats(
        arrivals=requests + slow,
        dispatched=requests + slow,
        served=requests + slow,
        hits=requests,
        misses={"late": slow},
        durations=durations,
        cells=[(0, 4, 1, 0, requests // 4, 0.0, 0.0)],
    )
    seen = Report(
        stats=Stats(at=at, device_busy=at / 4, models={"m": model}),
        uptime_seconds=at,
        ready=True,
        readiness="ready",
        generation=3,
        slo_seconds=0.05,
        queue=Queue(rows=7, in_flight=1, slots=2),
        lanes={"": LANE, "m": LANE},
    )
    return replace(seen, **changes)


def decided(at: float, reason: Reason, *, change: bool = False, model: str = "m", times: int = 1) -> Explained:
    decision = Decided(Parameters(), change, reason, f"because at {at:g}")
    return Explained(model, at, decision, times)


NONE = Explanation(tuned=True, decisions=[])


def drawn(sight: object, width: int = 100, height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, legacy_windows=False)
    options = console.options.update(width=width, height=height)
    lines = console.render_lines(sight, options, pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def line(lines: list[str], label: str) -> str:
    return next(each for each in lines if each.startswith(label))


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        ([1, 16], "1: 5.5ms, 4: 7ms, 16: 13ms; server"),
        ([1], "1: 5.5ms, 4?: 7ms, 16?: 13ms (? not measured); server"),
        ([], "1?: 5.5ms, 4?: 7ms, 16?: 13ms (? not measured); server"),
    ],
)
def test_latencies_of_sizes_beyond_the_measured_ones_are_marked(measured, shown):
    assert curve(LANE, measured) == f"batch latency {shown} concurrency 2"


def test_a_frame_shows_rates_latencies_and_parameters():
    watch = Watch("carpool")
    watch.look(report(100.0), NONE, 0.0)
    lines = drawn(watch.look(report(104.0, requests=396, slow=4), NONE, 0.0))
    assert lines[0] == "carpool  ready  up 0:01:44, configuration 3"
    assert line(lines, "rate").startswith("rate     100.0/s")
    assert line(lines, "goodput") == "goodput  99.0/s, 99.00% in time"
    assert "of 50ms" in line(lines, "latency")
    assert line(lines, "misses") == "misses   late 4"
    assert line(lines, "batches") == "batches  4.0 rows   4-7 █"
    assert line(lines, "device") == "device   2.5ms a request, 25% busy"
    assert line(lines, "queue") == "queue    7 rows waiting, 1 of 2 batches in flight"
    assert line(lines, "m ") == "m        batch 16, wait 5ms, 2 in flight"
    assert "batch latency 1?: 5.5ms, 4: 7ms, 16?: 13ms (? not measured); server concurrency 2" in "\n".join(lines)
    assert not any(each.startswith("model ") for each in lines)


def test_figures_are_of_the_last_seconds_only():
    watch = Watch("carpool")
    for second in range(60):
        sight = watch.look(report(float(second), requests=100 * min(second, 30)), NONE, 0.0)
    assert sight.figures.seconds == 10.0
    assert sight.figures.rate == 0.0


def test_a_sidecar_that_began_anew_is_not_compared_with_the_old_one():
    watch = Watch("carpool")
    watch.look(report(100.0, requests=500), NONE, 0.0)
    assert watch.look(report(1.0, requests=3), NONE, 0.0).figures.rate == 0.0


def test_states_that_are_out_of_the_ordinary_are_shown():
    odd = report(
        1.0,
        lanes={"m": replace(LANE, pass_through=True, quarantined=True, service_seconds=None)},
        alone=[Alone("m", "no batch axis", 12), Alone("m", "encoded", 5)],
        stalls=Stalls(3, 0.25),
        models=[
            ModelEntry(
                name="m", version="", lane="m", merges=False, max_batch=None, axis="a", verified=how, evidence=why
            )
            for how, why in (("refuted", "row 0: 1 alone, 2 in a batch"), ("verified", "all is well"))
        ],
        ready=False,
        readiness="the model does not accept connections",
    )
    watch = Watch("carpool")
    watch.look(report(0.5, alone=[Alone("m", "no batch axis", 2), Alone("m", "encoded", 5)]), NONE, 0.0)
    text = "\n".join(drawn(watch.look(odd, Explanation(tuned=False, decisions=[]), 0.0)))
    for part in (
        "the model does not accept connections",
        "pass-through (fixed)  quarantined",
        "batch latency not known yet",
        "alone    no batch axis 10\n",
        "m  batches refuted: row 0: 1 alone, 2 in a batch",
        "paused 3 times, 250ms in all",
        "nothing is tuned",
    ):
        assert part in text
    assert "all is well" not in text


def test_what_is_passed_on_has_its_rate_latency_and_share_in_time():
    def passing(requests, hits):
        durations = [0] * (len(DURATION_BOUNDS) + 1)
        durations[18] = requests
        return [Forwarded(method="POST", path="/embed", requests=requests, hits=hits, durations=durations)]

    watch = Watch("carpool")
    watch.look(report(1.0, forwarded=passing(100, 100)), NONE, 0.0)
    lines = drawn(watch.look(report(3.0, forwarded=passing(140, 130)), NONE, 0.0))
    shown = "forwarded  POST /embed: 20/s, p50 10.4ms, p99 11.3ms, 75.00% good within the SLO"
    assert line(lines, "forwarded") == shown
    again = drawn(watch.look(report(30.0, forwarded=passing(140, 130)), NONE, 0.0))
    assert not [
        each for each in drawn(watch.look(report(60.0, forwarded=passing(140, 130)), NONE, 0.0)) if "embed" in each
    ]
    assert again


def test_the_hint_goes_with_the_first_request():
    watch = Watch("carpool")
    assert "curl this" in drawn(watch.look(report(1.0), NONE, 0.0, (), "curl this"))
    assert "curl this" not in drawn(watch.look(report(2.0, requests=1), NONE, 0.0, (), "curl this"))


HISTORY = [
    decided(1.0, Reason.EXPLORES, change=True),
    decided(2.0, Reason.TOO_FEW_SAMPLES),
    decided(3.0, Reason.SAVES_DEVICE_TIME, change=True),
    decided(4.0, Reason.CONVERGED, model="n"),
    decided(5.0, Reason.CONVERGED, times=9),
]


def test_the_hint_can_be_pasted_from_a_narrow_screen():
    body = '{"inputs":[{"name":"input","shape":[1,8],"datatype":"FP32","data":[0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5]}]}'
    hint = f"curl http://127.0.0.1:8080/v2/models/m/infer -d {shlex.quote(body)}"
    lines = drawn(Watch("carpool").look(report(1.0), NONE, 0.0, hint=hint), width=60)
    first = next(index for index, text in enumerate(lines) if text.startswith("curl"))
    pasted = "\n".join(lines[first : lines.index("decisions")])
    shell = f"curl() {{ printf '%s\\0' \"$@\"; }}\n{pasted}"
    told = subprocess.check_output(["/bin/bash", "-c", shell], text=True)  # noqa: S603 - our own line
    url, option, sent, _ = told.split("\0")
    assert [url, option, json.loads(sent)] == [*shlex.split(hint)[1:3], json.loads(body)]


def test_a_model_that_is_slower_than_the_slo_is_reported():
    slow = report(1.0, lanes={"m": replace(LANE, service_seconds=(0.0, 0.2))})
    lines = drawn(Watch("carpool").look(slow, NONE, 0.0), 160)
    assert line(lines, "slo").startswith("slo      m  takes 200ms for one row: no setting meets the SLO of 50ms")


def test_changes_and_the_current_decision_of_each_model_are_shown():
    assert [each.at for each in shown_decisions(HISTORY)] == [5.0, 4.0, 3.0, 1.0]
    lines = drawn(Watch("carpool").look(report(1.0), Explanation(tuned=True, decisions=HISTORY), 10.0))
    after = lines[lines.index("decisions") + 1 :]
    assert after[0].split() == ["5s", "ago", "m", "Converged", "(9", "times):", "because", "at", "5"]
    assert after[1].split() == ["6s", "ago", "n", "Converged:", "because", "at", "4"]
    assert after[2].split() == ["7s", "ago", "m", "SavesDeviceTime:", "because", "at", "3"]


def test_decisions_are_shown_newest_first_where_an_older_one_was_repeated_since():
    again = [decided(9.0, Reason.CONVERGED, times=8), decided(4.0, Reason.EXPLORES, change=True, model="n")]
    again.append(decided(6.0, Reason.CONVERGED, model="n"))
    assert [each.at for each in shown_decisions(again)] == [9.0, 6.0, 4.0]


def test_decisions_of_the_only_model_do_not_name_it():
    lines = drawn(Watch("carpool").look(report(1.0), Explanation(tuned=True, decisions=HISTORY[:1]), 10.0))
    assert lines[-1].split() == ["9s", "ago", "Explores:", "because", "at", "1"]


@pytest.mark.parametrize("height", [8, 12, 14, 24])
def test_a_low_terminal_gives_up_old_decisions_and_keeps_the_notes(height):
    notes = ["12:00:00 warning  something"]
    sight = Watch("carpool").look(report(1.0), Explanation(tuned=True, decisions=HISTORY), 10.0, notes)
    lines = drawn(sight, 80, height)
    assert len(lines) == height
    assert lines[0].startswith("carpool")
    if height >= 14:
        assert "5s ago" in "\n".join(lines)
        assert notes[0] in lines


@pytest.mark.parametrize("name", ["a[/b]", "[bold]", "[/bold]", "[link=x]y", ":car:"])
def test_names_of_models_and_paths_are_no_markup(name):
    durations = [0] * (len(DURATION_BOUNDS) + 1)
    durations[18] = 9
    watch = Watch("carpool")
    watch.look(report(1.0), NONE, 0.0)
    passed = [Forwarded(method="POST", path=f"/{name}", requests=9, hits=9, durations=durations)]
    alone = [Alone("m", name, 2)]
    lines = drawn(watch.look(report(3.0, forwarded=passed, lanes={name: LANE}, alone=alone), NONE, 0.0))
    assert line(lines, "forwarded").startswith(f"forwarded  POST /{name}: 4.5/s")
    assert line(lines, name).startswith(f"{name}  ")
    assert line(lines, "alone").endswith(f"  {name} 2")


def test_names_of_models_and_paths_do_not_control_the_terminal():
    name = "\x1b[31mm\x9b\u202e"
    durations = [0] * (len(DURATION_BOUNDS) + 1)
    durations[18] = 9
    gone = RolledBack(
        model=name, generation=4, rejected=Parameters(), back_to=Parameters(), back_to_generation=3, reason="r", at=0.0
    )
    entry = ModelEntry(
        name=name, version="", lane=name, merges=False, max_batch=None, axis=name, verified="refuted", evidence=name
    )
    odd = report(
        3.0,
        forwarded=[Forwarded(method="POST", path=f"/{name}", requests=9, hits=9, durations=durations)],
        lanes={name: replace(LANE, service_seconds=(0.0, 0.2))},
        alone=[Alone("m", name, 2)],
        models=[entry],
        rolled_back=[gone],
        change_error=name,
    )
    decisions = [decided(1.0, Reason.CONVERGED, model=each) for each in (name, "n")]
    watch = Watch("carpool")
    watch.look(report(1.0), NONE, 0.0)
    lines = drawn(watch.look(odd, Explanation(tuned=True, decisions=decisions), 4.0), width=160)
    assert all(each.isprintable() for each in lines)
    for label in ("slo", "batches", "taken back", "change", "forwarded", "alone", r"\x1b[31mm\x9b\u202e"):
        assert r"\x1b[31mm\x9b\u202e" in line(lines, label)


def test_bars():
    assert sparkline([0.0, 0.01, 4.0, 8.0]) == " ▁▄█"
    assert sparkline([4.0], top=8.0) == "▄"
    assert sparkline([0.0]) == " "
    assert histogram({1: 1, 2: 4, 3: 4, 4: 1}) == "1 ▁  2-3 █  4-7 ▁"
    assert histogram({}) == ""


def test_times_read_like_times():
    assert (clock(3723), ago(12.7), ago(-0.2), ago(7322)) == ("1:02:03", "12s ago", "0s ago", "2:02:02 ago")


def test_what_was_taken_back_and_what_is_refused_stand_out():
    gone = RolledBack(
        model="m",
        generation=4,
        rejected=Parameters(max_batch=64),
        back_to=LANE.parameters,
        back_to_generation=3,
        reason="12 of 200 requests were late",
        at=0.0,
    )
    seen = report(100.0, rolled_back=[gone], change_error="change.sig is not there")
    lines = drawn(Watch("carpool").look(seen, NONE, 0.0), width=120)
    assert line(lines, "taken back").endswith("m: batch 64, wait 0s, 1 in flight: 12 of 200 requests were late")
    assert line(lines, "change").endswith("change.sig is not there")


@pytest.mark.parametrize(("encoding", "name"), [("ascii", "caf?"), ("latin-1", "caf\xe9"), ("utf-8", "caf\xe9")])
def test_a_frame_can_be_written_where_letters_or_bars_are_missing(encoding, name):
    watch = Watch("caf\xe9")
    watch.look(report(100.0), NONE, 0.0)
    sight = watch.look(report(104.0, requests=396, slow=4), NONE, 0.0)
    written = io.BytesIO()
    file = io.TextIOWrapper(written, encoding)
    Console(file=file, width=100).print(sight)
    file.flush()
    lines = written.getvalue().decode(encoding).splitlines()
    assert lines[0].startswith(f"{name}  ready")
    assert line(lines, "rate").rstrip().endswith(" \N{FULL BLOCK}" if encoding == "utf-8" else " @")
