from __future__ import annotations

from pathlib import Path
from random import Random

import click
import pytest

from carpool.learning.arrivals import Modulated, Poisson
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import ShedAt, TuningMode
from carpool_cli.answers import BadFile
from carpool_cli.planning import assumptions
from carpool_cli.profiling.device_profile import DeviceProfile

PROFILE = DeviceProfile(name="p", source="synthetic", rows=(1, 64), seconds=(0.0055, 0.037), executors=2, cv=0.1)


def test_a_policy_made_for_a_p99_has_the_given_bounds_and_a_baseline_inside_them():
    policy = assumptions.slo_policy(0.02, largest_batch=8, longest_wait=0.005, most_in_flight=2, shed_at=ShedAt.SLO)
    limits = policy.limits()
    assert (limits.max_batch, limits.max_wait, limits.max_in_flight) == (8, 0.005, 2)
    assert policy.baseline.max_batch == 8
    assert policy.admission.shed_at is ShedAt.SLO
    assert assumptions.budget(policy) == pytest.approx(0.005)


def test_a_wait_beyond_the_slo_names_the_option():
    with pytest.raises(click.UsageError, match=r"^--max-wait: 30ms is not below the SLO of 20ms: lower it"):
        assumptions.slo_policy(0.02, longest_wait=0.03)


def test_the_device_has_the_latencies_of_the_profile_and_a_certain_server_concurrency():
    device = assumptions.device(PROFILE)
    assert device.times(1, 0) == 0.0055
    assert device.times(128, 0) == pytest.approx(0.0050 + 0.0005 * 128)
    assert (device.executors, device.cv) == (2, 0.1)
    known = assumptions.known(PROFILE)
    assert known.largest_in_flight > known.executors == 2


def test_arrivals_replay_from_their_seed_and_end_in_time():
    one, other, third = (assumptions.arrivals(100.0, 2.0, None, 10.0, seed) for seed in (1, 1, 2))
    assert one.times == other.times != third.times
    assert max(one.times) < 10
    assert "gamma, cv 2" in one.described


@pytest.mark.parametrize(
    ("rate", "seconds", "says"),
    [(1e7, 10.0, "lower --rate"), (0.0001, 1.0, "raise --rate"), (None, 1.0, "name a load")],
)
def test_a_load_that_can_not_be_played_says_what_to_change(rate, seconds, says):
    with pytest.raises(click.ClickException, match=says):
        assumptions.arrivals(rate, 1.0, None, seconds, 0)


def test_traces_are_read_at_their_own_pace_or_rescaled(tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text("10\n11\n13\n\n14\n")
    assert assumptions.read_trace(path, None) == ([0, 1, 3, 4], "trace.txt at its own pace, 0.75/s")
    times, described = assumptions.read_trace(path, 75.0)
    assert times == pytest.approx([0, 0.01, 0.03, 0.04])
    assert "its clock times 0.01" in described


def test_the_azure_trace_is_looked_for_in_the_folder_named(tmp_path, monkeypatch):
    (tmp_path / assumptions.AZURE).write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,3,4\n2023-11-16 18:15:48.5,3,4\n"
    )
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv(assumptions.TRACES, str(tmp_path))
    assert assumptions.read_trace(Path("azure"), None)[0] == [0, 2]
    monkeypatch.setenv(assumptions.TRACES, str(tmp_path / "nowhere"))
    with pytest.raises(click.ClickException, match="AzurePublicDataset"):
        assumptions.read_trace(Path("azure"), None)


@pytest.mark.parametrize("text", ["1\ntwo\n", "1\n", "", "1\n1\n", "a,b\nc,d\n"])
def test_a_bad_trace_names_the_file(text, tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text(text)
    with pytest.raises(click.ClickException, match=r"trace\.txt"):
        assumptions.read_trace(path, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1\nnan\n2\n", "nan is no time; a trace has one arrival a line, in seconds"),
        ("1\n-inf\n", "-inf is no time"),
        ("0\n1e308\n", "the arrivals are over a million days apart, more than 400: are these seconds?"),
        ("-1e308\n1e308\n", "the arrivals are over a million days apart, more than 400: are these seconds?"),
    ],
)
def test_numbers_that_are_no_times_are_named(tmp_path, text, says):
    path = tmp_path / "trace.txt"
    path.write_text(text)
    with pytest.raises(BadFile) as caught:
        assumptions.read_trace(path, None)
    assert says in caught.value.message


def test_a_trace_of_years_is_asked_whether_it_is_in_seconds(tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text("0\n1700000000\n")
    with pytest.raises(
        BadFile, match=r"trace\.txt: the arrivals are 19,676 days apart, more than 400: are these seconds"
    ):
        assumptions.read_trace(path, None)


def test_the_first_request_of_a_trace_alone_is_no_load(tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text("5\n105\n")
    with pytest.raises(click.ClickException, match="only the first request of the trace comes in 60s: raise --rate"):
        assumptions.arrivals(None, 1.0, path, 60.0, 0)


def test_what_clumps_is_seen_to_clump():
    even = [step / 10 for step in range(1, 1000)]
    assert assumptions.burstiness(even).rate == pytest.approx(10, rel=0.02)
    assert isinstance(assumptions.process_of(5.0, 1.0), Poisson)


def test_bursts_that_last_are_seen_to_last():
    busy, rng, times = [(start, start + 0.3) for start in range(60)], Random(1), []
    for begin, end in busy:
        times += sorted(rng.uniform(begin, end) for _ in range(200))
    found = assumptions.burstiness(times)
    assert isinstance(found, Modulated)
    assert 0.05 < found.lasting < 1.0


def test_a_table_is_as_wide_as_its_cells():
    assert assumptions.lines([("", "a"), ("long", "1"), ("x", "22")]).splitlines() == [
        "       a",
        "long   1",
        "x     22",
    ]


def test_a_held_policy_stays_where_it_is_put_wherever_its_bounds_are():
    parameters = Parameters(max_batch=500, max_wait=Duration(0.06), max_in_flight=99)
    policy = assumptions.held(assumptions.slo_policy(0.05), parameters)
    assert policy.limits().clamp(Parameters()) == parameters
    assert policy.tuning.mode is TuningMode.HOLD
