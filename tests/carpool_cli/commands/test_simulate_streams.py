from __future__ import annotations

import json

import pytest

ENGINE = ("--step", "11.5,0.038,0.00008,0.06", "--kv-tokens", 400_000)
SLO = ("--slo-ttft-p99", "2s", "--slo-tpot-p99", "50ms")
LENGTHS = ("--prompt-tokens", 600, "--output-tokens", 150)


@pytest.fixture
def streams(carpool):
    def run(*options):
        result = carpool("simulate", "--generative", *ENGINE, *SLO, *options, "--for", "40s", "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.output)

    return run


def test_in_overload_the_gate_keeps_answers_that_are_lost_without_one(streams):
    document = streams(*LENGTHS, "--rate", 25, "--cap", 40)
    found = {each["name"]: each for each in document["results"]}
    assert list(found) == ["gate", "no gate", "cap 40"]
    assert document["capacity"] < 20
    assert found["gate"]["goodput"] > 4 * found["no gate"]["goodput"]
    assert found["gate"]["refusedShare"] > 0.2
    assert found["no gate"]["refusedShare"] == 0
    assert found["gate"]["ttftP99"] < 2.1 < found["no gate"]["ttftP99"]


def test_the_same_arguments_give_the_same_figures(streams):
    first = streams(*LENGTHS, "--rate", 5, "--cap", 8)
    assert first == streams(*LENGTHS, "--rate", 5, "--cap", 8)
    assert first["results"] != streams(*LENGTHS, "--rate", 5, "--cap", 8, "--seed", 1)["results"]


def test_a_trace_brings_times_and_lengths_and_a_rate_rescales_it(streams, tmp_path):
    trace = tmp_path / "requests.csv"
    trace.write_text("".join(f"{i / 2},1000,{100 + i % 10}\n" for i in range(400)))
    assert streams("--trace", trace, "--cap", 8)["requests"] == 80
    assert streams("--trace", trace, "--cap", 8, "--rate", 5)["requests"] == pytest.approx(200, abs=2)


def test_a_profile_is_read_and_its_knobs_are_changed(carpool, tmp_path):
    path = tmp_path / "engine.json"
    step = {"form": "linear", "base": 0.01, "sequence": 0.0, "kvToken": 1e-7, "promptToken": 5e-5}
    path.write_text(json.dumps({"name": "mine", "source": "made up", "kvTokens": 400_000, "step": step}))
    options = ("--profile", path, *SLO, *LENGTHS, "--rate", 20, "--for", "20s")
    shown = carpool("simulate", "--generative", *options).output
    assert "mine; Poisson at 20/s" in shown
    assert "cap 256" in shown
    # A cap above what the engine runs is no other rule, and what it runs is its capacity.
    few = carpool("simulate", "--generative", *options, "--max-num-seqs", 16).output
    assert "cap 16" in few
    assert "cap 32" not in few
    assert few.split("capacity ")[1].split("/s")[0] != shown.split("capacity ")[1].split("/s")[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*SLO, *LENGTHS, "--rate", 5), "--profile or --step"),
        (("--step", "1,2", *SLO, *LENGTHS, "--rate", 5), "four numbers of ms"),
        (("--step", "1,0,0,nan", "--kv-tokens", 5, *SLO, *LENGTHS, "--rate", 5), "four numbers of ms"),
        (("--step", "11,0,0,0.1", *SLO, *LENGTHS, "--rate", 5), "--kv-tokens"),
        ((*ENGINE, *LENGTHS, "--rate", 5), "--slo-ttft-p99"),
        ((*ENGINE, *SLO, "--rate", 5), "--prompt-tokens"),
        ((*ENGINE, *SLO, *LENGTHS), "--rate"),
        ((*ENGINE, *SLO, *LENGTHS, "--trace", "t.csv"), "--prompt-tokens does not go with --trace"),
        ((*ENGINE, *SLO, "--trace", "nowhere.csv"), "nowhere.csv"),
        ((*ENGINE, *SLO, *LENGTHS, "--rate", 5, "--max-num-batched-tokens", 64), "at least --max-num-seqs 256"),
        ((*ENGINE, *SLO, "--prompt-tokens", 500_000, "--output-tokens", 1, "--rate", 1, "--kv-tokens", 9), "fit"),
        ((*ENGINE, "--slo-ttft-p99", "0s", "--slo-tpot-p99", "1ms", *LENGTHS, "--rate", 1), "longer than 0s"),
        ((*ENGINE, *SLO, *LENGTHS, "--rate", 0.001), "no request comes"),
        ((*ENGINE, *SLO, *LENGTHS, "--rate", 1e6), "lower --rate"),
        ((*ENGINE, *SLO, *LENGTHS, "--rate", 5, "--tune"), "--tune"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(carpool, options, said):
    result = carpool("simulate", "--generative", *options)
    assert result.exit_code != 0
    assert said in result.output


def test_a_line_of_a_trace_that_does_not_read_is_named(carpool, tmp_path):
    trace = tmp_path / "requests.csv"
    trace.write_text("0.5,100,10\n1.0,100\n")
    result = carpool("simulate", "--generative", *ENGINE, *SLO, "--trace", trace)
    assert result.exit_code == 2
    assert "line 2" in result.output
    assert "seconds,prompt tokens,output tokens" in result.output


def test_help_of_the_plain_command_names_it(carpool):
    assert "--generative" in carpool("simulate", "--help").output
    assert "--slo-ttft-p99" in carpool("simulate", "--generative", "--help").output
