from itertools import pairwise
from pathlib import Path
from random import Random

import click
import pytest

from carpool.generation.profiles import EngineProfile, Linear
from carpool.generation.requests import Slo
from carpool_cli.answers import BadFile
from carpool_cli.streams import loads
from carpool_cli.streams.loads import Lengths, Stretch

STEP = Linear(base=0.01, sequence=0.0, kv_token=1e-7, prompt_token=5e-5)
PROFILE = EngineProfile(name="test", source="made up", kv_tokens=400_000, step=STEP)
LENGTHS = Lengths([(1000, 101)], "always the same")
SLO = Slo(2.0, 0.05)


def test_capacity_is_where_the_step_fills_what_prompts_leave_of_the_target():
    found = loads.capacity(PROFILE, LENGTHS, SLO)
    step = STEP.seconds(0, found.kv_tokens, 0)
    assert step / (1 - found.rate * 1000 * 5e-5) == pytest.approx(0.05, rel=0.01)
    assert found.sequences == pytest.approx(found.rate * 100 * 0.05, rel=0.01)


def test_a_small_cache_or_few_sequences_are_a_limit_before():
    small = EngineProfile(name="test", source="made up", kv_tokens=20_000, step=STEP)
    found = loads.capacity(small, LENGTHS, SLO)
    assert found.kv_tokens == pytest.approx(20_000, rel=0.02)
    few = EngineProfile(name="test", source="made up", kv_tokens=400_000, max_running=4, step=STEP)
    assert loads.capacity(few, LENGTHS, SLO).sequences == pytest.approx(4, rel=0.02)


def test_there_is_no_capacity_where_one_request_alone_is_too_slow():
    assert loads.capacity(PROFILE, LENGTHS, Slo(2.0, 0.005)) == (0.0, 0.0, 0.0)


def test_so_many_sequences_serve_the_rate_at_which_so_many_run():
    found = loads.capacity(PROFILE, LENGTHS, SLO)
    assert loads.rate_at(PROFILE, LENGTHS, found.sequences) == pytest.approx(found.rate, rel=0.02)
    assert loads.rate_at(PROFILE, LENGTHS, found.sequences / 2) < 0.9 * found.rate


def test_times_are_stretched_to_the_rate_of_each_part():
    times = [0.5 + i for i in range(100)]
    found = loads.stretched(times, [Stretch(10, 2.0), Stretch(5, 4.0)])
    assert len(found) == 40
    assert sum(time < 10 for time in found) == 20
    assert found[:2] == [0.25, 0.75]
    assert found[-1] == pytest.approx(15 - 0.125)


def test_bursts_have_a_higher_spread_at_the_same_rate():
    def spread(shape):
        times = loads.poisson(Random(1), 4000, shape)
        gaps = [after - before for before, after in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return mean, (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean

    assert spread(1.0) == pytest.approx((1.0, 1.0), rel=0.06)
    assert spread(0.25) == pytest.approx((1.0, 2.0), rel=0.1)


def test_a_guess_is_the_line_itself_and_is_off_as_asked():
    assert loads.guess(PROFILE).coefficients[0] == pytest.approx(0.01)
    assert loads.guess(PROFILE).prompt_token == pytest.approx(5e-5)
    assert loads.guess(PROFILE, 2.0).decode_seconds(10, 10_000) == pytest.approx(2 * STEP.seconds(10, 10_000, 0))


def test_a_trace_gives_lengths_and_times(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,374,44\n2023-11-16 18:15:48.5,0,109\n"
    )
    lengths, times = loads.recorded(path)
    assert lengths.draw(1, 3) == [(1, 109), (374, 44), (1, 109)]
    assert times == [0.0, 2.5]


@pytest.mark.parametrize("text", ["", "TIMESTAMP,ContextTokens,GeneratedTokens\nnonsense\n"])
def test_a_trace_that_is_none_is_refused_by_name(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(click.ClickException, match=r"trace\.csv"):
        loads.recorded(path)


def test_a_profile_that_is_wrong_is_refused_by_its_field(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text('{"name": "x", "source": "y", "kvTokens": 0, "step": {"form": "linear"}}')
    with pytest.raises(BadFile, match="kvTokens"):
        loads.read_profile(path)


def test_the_profile_of_a_device_is_named_as_that():
    path = Path(__file__).parents[3] / "benchmarks" / "profiles" / "bert-large-128-a100.json"
    with pytest.raises(BadFile, match="that is a device's profile, with the latency of batches"):
        loads.read_profile(path)


@pytest.mark.parametrize("text", [None, b"{", b"[" * 100_000, b"\xff", b"[1]"])
def test_a_profile_that_is_none_is_refused_by_name(tmp_path, text):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(BadFile, match=r"profile\.json: "):
        loads.read_profile(path)


def test_answers_of_one_token_are_limited_by_prompts_alone():
    found = loads.capacity(PROFILE, Lengths([(100, 1)], "alike"), Slo(2.0, 0.001))
    # A step of prompts alone has no fixed part worth a rate: nearly all of its time is theirs.
    assert found.rate == pytest.approx(1 / (100 * PROFILE.step.prompt_token), rel=0.03)
    assert (found.sequences, found.kv_tokens) == (0.0, 0.0)


def test_lengths_are_cut_below_what_was_asked_for_only():
    assert loads.lognormal(32_000, 100_000, Random(1), 0.0).pairs[0] == (32_000, 100_000)
    assert max(prompt for prompt, _ in loads.lognormal(12_000, 10, Random(1)).pairs) == 16_000
