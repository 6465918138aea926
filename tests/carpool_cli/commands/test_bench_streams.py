from __future__ import annotations

import json

import pytest
from fake_engine import fake_engine

OPTIONS = ("--slo-ttft-p99", "30s", "--slo-tpot-p99", "30s", "--for", "1s", "--warm-up", "0s", "--timeout", "30s")
LENGTHS = ("--prompt-tokens", 20, "--output-tokens", 5)
LOAD = (*LENGTHS, "--rate", 20)


@pytest.fixture
def engine():
    with fake_engine() as engine:
        yield engine


def test_streams_are_sent_and_reported(carpool, engine, tmp_path):
    out = tmp_path / "report.json"
    result = carpool("bench", "--generative", f":{engine.port}", *OPTIONS, *LOAD, "--out", out, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report == json.loads(out.read_text())
    assert report["requests"] == report["complete"] == report["good"] == len(engine.seen) > 5
    assert report["outputTokens"] == 9 * report["requests"]
    assert (report["model"], report["errors"]) == ("good", {})
    path, body, _ = engine.seen[0]
    assert path == "/v1/chat/completions"
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] > 0
    assert len(body["messages"][0]["content"].split()) > 0
    assert "ignore_eos" not in body
    assert len({each["messages"][0]["content"] for _, each, _ in engine.seen}) == len(engine.seen)


def test_completions_take_a_prompt_and_lengths_of_a_trace(carpool, engine, tmp_path):
    trace = tmp_path / "requests.csv"
    trace.write_text("".join(f"{i / 10},{i + 1},{i + 2}\n" for i in range(40)))
    url = f"http://127.0.0.1:{engine.port}/v1/completions"
    result = carpool("bench", "--generative", url, *OPTIONS, "--trace", trace, "--model", "text", "--ignore-eos")
    assert result.exit_code == 0, result.output
    assert "TTFT: p50" in result.output
    lengths = {(len(body["prompt"].split()), body["max_tokens"]) for _, body, _ in engine.seen}
    assert lengths == {(i + 1, i + 2) for i in range(10)}
    assert all(body["ignore_eos"] for _, body, _ in engine.seen)


def test_rates_are_over_the_time_that_a_trace_lasts(carpool, engine, tmp_path):
    trace = tmp_path / "requests.csv"
    trace.write_text("".join(f"{i / 100},1,2\n" for i in range(40)))
    asked = ("bench", "--generative", f":{engine.port}", *OPTIONS, "--trace", trace, "--for", "1m", "--json")
    result = carpool(*asked, "--warm-up", "100ms")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert (report["requests"], report["seconds"]) == (30, pytest.approx(0.3))
    assert report["intendedRate"] == pytest.approx(100)
    ended = carpool(*asked, "--warm-up", "5s")
    assert ended.exit_code == 1
    assert ended.output == "Error: the trace lasts 400ms, and no request of it is due after 5s: lower --warm-up\n"


def test_credentials_are_sent_with_the_question_for_models_too(carpool, engine):
    engine.key = "Bearer x"
    asked = ("bench", "--generative", f":{engine.port}", *OPTIONS, *LOAD)
    refused = carpool(*asked)
    assert refused.exit_code == 1
    assert refused.output == (
        f"Error: status 401 of http://127.0.0.1:{engine.port}, which wants other credentials: name them with --header\n"
    )
    result = carpool(*asked, "--header", "authorization: Bearer x")
    assert result.exit_code == 0, result.output


def test_a_report_that_can_not_be_written_is_shown_all_the_same(carpool, engine, tmp_path):
    (full := tmp_path / "out.json").symlink_to("/dev/full")
    result = carpool("bench", "--generative", f":{engine.port}", *OPTIONS, *LOAD, "--out", full)
    assert result.exit_code == 1
    assert "goodput" in result.output
    assert result.output.endswith(f"Error: {full} could not be written: No space left on device\n")


def test_refusals_are_counted_and_quoted(carpool, engine):
    result = carpool("bench", "--generative", f":{engine.port}", *OPTIONS, *LOAD, "--model", "full")
    assert result.exit_code == 1
    assert "status 429" in result.output
    assert "too many" in result.output
    assert "goodput 0.00/s" in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (LENGTHS, "--rate"),
        (("--rate", 5), "--prompt-tokens"),
        ((*LOAD, "--header", "x"), "x-api-key"),
        ((*LENGTHS, "--rate", 1e-6), "no request"),
        ((*LOAD, "--timeout", "0s"), "'--timeout': '0s': has to be longer than 0s"),
        ((*LOAD, "--slo-tpot-p99", "0s"), "'--slo-tpot-p99': '0s': has to be longer than 0s"),
        (("--trace", "no-such"), "no-such: no such file"),
        ((*LOAD, "--rows", 3), "--rows"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(carpool, engine, options, said):
    result = carpool("bench", "--generative", f":{engine.port}", *OPTIONS, *options)
    assert result.exit_code != 0
    assert said in result.output
    assert not engine.seen


def test_a_server_that_is_not_there_is_one_error(carpool):
    result = carpool("bench", "--generative", ":1", *OPTIONS, *LOAD)
    assert result.exit_code == 1
    assert "nothing listens at" in result.output
