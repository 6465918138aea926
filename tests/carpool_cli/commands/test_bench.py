from __future__ import annotations

import json
import os
import signal

import pytest
import requests

from carpool_cli.load.loadgen import LoadGenerator

QUICK = ("--warm-up", "0s", "--rate", "2000", "--slo-p99", "1m")


@pytest.mark.parametrize("protocol", ["v1", "v2", "v2-binary"])
def test_an_echo_is_verified_in_every_protocol(echo, carpool, protocol, tmp_path):
    out = tmp_path / "out.json"
    result = carpool(
        "bench", echo, *QUICK, "--requests", 40, "--protocol", protocol, "--rows", 2, "--verify", "--slo-p99", "1m",
        "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert (report["requests"], report["ok"], report["good"], report["errors"]) == (40, 40, 40, {})
    assert report["latency"]["p50"] <= report["latency"]["p999"] <= report["latency"]["max"]
    assert "goodput" in result.output


def test_made_up_rows_have_the_shape_asked_for(echo, carpool, tmp_path):
    before = requests.get(f"{echo}/stats", timeout=30).json()["rows"]
    result = carpool(
        "bench", echo, *QUICK, "--requests", 3, "--protocol", "v2", "--rows", 5, "--shape", "2,2",
        "--datatype", "BYTES", "--verify",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert requests.get(f"{echo}/stats", timeout=30).json()["rows"] - before == 15


def test_bodies_come_from_files(echo, carpool, tmp_path):
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    one.write_text('{"instances": [[1.50]]}')
    two.write_text('{"instances": [["a"], ["b"]]}')
    result = carpool("bench", echo, *QUICK, "--requests", 4, "--body", one, "--body", two, "--verify")
    assert result.exit_code == 0, result.output


def test_a_binary_body_needs_no_header_length(echo, carpool, tmp_path):
    body = tmp_path / "b.bin"
    described = (
        '{"inputs": [{"name": "}", "datatype": "UINT8", "shape": [1, 2], "parameters": {"binary_data_size": 2}}]}'
    )
    body.write_bytes(described.encode() + b"{}")
    result = carpool("bench", echo, *QUICK, "--requests", 2, "--protocol", "v2-binary", "--body", body, "--verify")
    assert result.exit_code == 0, result.output


def test_a_trace_is_played(echo, carpool, tmp_path):
    trace, out = tmp_path / "t.txt", tmp_path / "out.json"
    trace.write_text("10.0\n10.01\n10.02\n99\n")
    result = carpool(
        "bench", echo, "--trace", trace, "--for", "50ms", "--warm-up", "0s", "--slo-p99", "1m", "--out", out
    )
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["requests"] == 3


def test_rates_are_over_the_time_that_a_trace_lasts(echo, carpool, tmp_path):
    trace = tmp_path / "t.txt"
    trace.write_text("".join(f"{step / 100}\n" for step in range(40)))
    result = carpool("bench", echo, "--trace", trace, "--for", "10s", "--warm-up", "100ms", "--slo-p99", "1m", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert (report["requests"], report["seconds"]) == (30, pytest.approx(0.3))
    assert report["intendedRate"] == pytest.approx(100)


def test_a_trace_that_ends_in_the_warm_up_names_that(echo, carpool, tmp_path):
    trace = tmp_path / "t.txt"
    trace.write_text("0\n1\n")
    result = carpool("bench", echo, "--trace", trace, "--warm-up", "5s")
    assert result.exit_code == 1
    assert result.output == "Error: the trace lasts 2s, and no request of it is due after 5s: lower --warm-up\n"


def test_a_binary_body_that_is_none_is_named(echo, carpool, tmp_path):
    body = tmp_path / "b.json"
    body.write_text("{")
    result = carpool("bench", echo, "--body", body)
    assert result.exit_code == 2
    assert "is no body for --protocol v1" in result.output


def test_credentials_are_sent_with_the_question_for_metadata_too(guarded, carpool):
    asked = ("bench", guarded.url, "--model", "m", "--protocol", "v2", *QUICK, "--requests", 3, "--verify")
    refused = carpool(*asked)
    assert refused.exit_code == 1
    assert refused.output == (
        f"Error: status 401 of {guarded.url}, which wants other credentials: name them with --header\n"
    )
    result = carpool(*asked, "--header", "authorization: Bearer x")
    assert result.exit_code == 0, result.output


def test_a_report_that_can_not_be_written_is_shown_all_the_same(echo, carpool, tmp_path):
    (full := tmp_path / "out.json").symlink_to("/dev/full")
    result = carpool("bench", echo, *QUICK, "--requests", 3, "--out", full)
    assert result.exit_code == 1
    assert "goodput" in result.output
    assert result.output.endswith(f"Error: {full} could not be written: No space left on device\n")


def test_rates_rise_and_fall_for_a_time(echo, carpool, tmp_path):
    out = tmp_path / "out.json"
    result = carpool("bench", echo, "--rate", "100,300", "--cv", 0, "--for", "200ms", "--warm-up", "50ms", "--out", out)
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["requests"] == 40


def test_a_datatype_that_cannot_be_made_up_is_refused_with_those_that_can(echo, carpool):
    result = carpool("bench", echo, *QUICK, "--datatype", "FP99")
    assert result.exit_code == 2
    assert "'FP99' is not one of 'BOOL', " in result.output
    assert "'FP16', 'FP32', 'FP64', 'BYTES'" in result.output


def test_wrong_answers_fail_it(nasty, carpool):
    with nasty("--wrong-rows") as url:
        result = carpool("bench", url, *QUICK, "--requests", 5, "--rows", 2, "--verify")
    assert result.exit_code == 1
    assert "mismatch: 5" in result.output


def test_errors_are_counted_by_status(nasty, carpool):
    with nasty("--outage", "0s-1h") as url:
        result = carpool("bench", url, *QUICK, "--requests", 5)
    assert result.exit_code == 1
    assert f"status 503: 5 from POST {url}/v1/models/standin:predict; the first: {{" in result.output


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_nobody_there_is_one_line(carpool, protocol):
    result = carpool("bench", "127.0.0.1:1", *QUICK, "--requests", 200, "--protocol", protocol)
    assert result.exit_code == 1
    why = "nothing listens at http://127.0.0.1:1 (Connection refused)"
    assert result.output == f"Error: {why}: start the server, or name its host and port\n"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
def test_an_unknown_host_is_one_line_that_names_it(carpool, host):
    result = carpool("bench", f"http://{host}:8080", *QUICK, "--requests", 200)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: the host '{host}' of http://{host}:8080 is not known (")
    assert result.output.endswith("): check its name, or write its IP address\n")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("path", ["v1/models/standin:predict", "v2/models/standin/infer"])
def test_a_path_of_inference_is_used_as_it_is(echo, carpool, path):
    result = carpool("bench", f"{echo}/{path}", *QUICK, "--requests", 5, "--verify")
    assert result.exit_code == 0, result.output


def test_any_other_path_gets_the_body_given(echo, carpool, tmp_path):
    body = tmp_path / "body.json"
    body.write_text("[1]")
    result = carpool("bench", f"{echo}/embed", *QUICK, "--requests", 5, "--body", body)
    assert result.exit_code == 1
    assert f"status 404: 5 from POST {echo}/embed; the first: " in result.output
    assert "POST /embed is not a path of V1 or V2: Carpool forwards it and does not batch it\n" in result.output
    result = carpool("bench", f"{echo}/embed", *QUICK, "--requests", 5)
    assert result.exit_code == 2
    assert "give the body to send with --body FILE" in result.output


def test_with_a_model_the_path_stands_before_its_own(echo, carpool):
    result = carpool("bench", f"{echo}/gateway", "--model", "m", *QUICK, "--requests", 5)
    assert f"status 404: 5 from POST {echo}/gateway/v1/models/m:predict" in result.output


def test_what_was_measured_until_ctrl_c_is_reported(echo, carpool, tmp_path, monkeypatch):
    settle, settled = LoadGenerator.settle, []

    def interrupting(generator, index, status):
        settle(generator, index, status)
        settled.append(index)
        if len(settled) == 20:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(LoadGenerator, "settle", interrupting)
    out = tmp_path / "out.json"
    result = carpool("bench", echo, *QUICK, "--for", "1h", "--rate", "200", "--out", out)
    assert result.exit_code == 130, result.output
    assert result.output.startswith("stopped after ")
    assert "goodput" in result.output
    assert 20 <= json.loads(out.read_text())["requests"] <= 40


def test_ctrl_c_in_the_warm_up_leaves_nothing_to_report(echo, carpool, monkeypatch):
    settle = LoadGenerator.settle

    def interrupting(generator, index, status):
        settle(generator, index, status)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(LoadGenerator, "settle", interrupting)
    result = carpool("bench", echo, "--rate", "200", "--warm-up", "1h", "--requests", 1)
    assert result.exit_code == 130
    assert "stopped before a measured request was answered" in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rate", "fast"], "write requests per second"),
        (["--rate", "0"], "write requests per second"),
        (["--for", "10"], "write e.g. 50ms"),
        (["--rate", "1,2", "--requests", "5"], "single --rate"),
        (["--rate", "1000000", "--for", "1h"], "lower --rate or --for"),
        (["--body", "no-such"], "no-such: No such file"),
        (["--trace", "no-such"], "no such file"),
        (["--trace", "no-such", "--cv", "2"], "--cv does not go with --trace"),
        (["--slo-p99", "0s"], "Invalid value for '--slo-p99': '0s': has to be longer than 0s"),
        (["--shape", "0"], "shape of one row"),
        (["--header", "x"], "'x-api-key: secret'"),
        (["--header", "f\u00f6: x"], "servers refuse the name 'f\u00f6'"),
        (["--header", "a b: x"], "servers refuse the name 'a b'"),
        (["--header", "a: b\x00"], "'x-api-key: secret'"),
        (["--protocol", "v2", "--model", "other"], "check --model"),
        (["--protocol", "v2", "--model", "two words"], "no metadata of model 'two words'"),
        (["--input", "x"], "--input names an input of V2"),
        (["--protocol", "v2", "--input", "x"], "--input goes with --shape"),
        (["--protocol", "v2", "--datatype", "INT64"], "--datatype goes with --shape"),
        (["--body", "b.json", "--datatype", "INT64"], "--datatype is for made-up rows: it does not go with --body"),
        (["--body", "b.json", "--rows", "2"], "--rows is for made-up rows: it does not go with --body"),
    ],
)
def test_wrong_options_are_named(echo, carpool, options, says):
    result = carpool("bench", echo, *options)
    assert result.exit_code in {1, 2}
    assert says in result.output


NAME = "\u6a21 \u578b"
ENCODED = "%E6%A8%A1%20%E5%9E%8B"


@pytest.mark.parametrize("typed", [NAME, ENCODED])
@pytest.mark.parametrize("served", [NAME, ENCODED])
def test_a_model_s_name_is_percent_encoded_in_paths(nasty, carpool, served, typed):
    load = (*QUICK, "--requests", 3, "--verify")
    with nasty("--model", served) as url:
        for protocol in ("v1", "v2", "v2-binary"):
            result = carpool("bench", url, "--model", typed, "--protocol", protocol, *load)
            assert result.exit_code == 0, result.output
        assert carpool("bench", f"{url}/v1/models/{typed}:predict", *load).exit_code == 0
        wrong = carpool("bench", url, "--model", "other", *load)
    assert "status 404: 3 from POST " in wrong.output


def test_answers_that_all_come_too_late_exit_with_1(echo, carpool):
    result = carpool("bench", echo, *QUICK, "--requests", 3, "--slo-p99", "1us")
    assert result.exit_code == 1
    assert "0.00% answered well within 1us" in result.output


def test_rows_of_v1_have_a_datatype(echo, carpool):
    result = carpool("bench", echo, *QUICK, "--requests", 3, "--datatype", "INT64", "--verify")
    assert result.exit_code == 0, result.output


def test_a_wrong_url_is_named(carpool):
    result = carpool("bench", "https://127.0.0.1:1")
    assert result.exit_code == 2
    assert "TLS is not supported; name the server's plain port" in result.output


def test_a_model_that_is_not_ready_is_no_wrong_option(nasty, carpool):
    with nasty("--ready-after", "1h") as url:
        result = carpool("bench", url, "--protocol", "v2-binary")
    assert result.exit_code == 1
    assert "not ready (status 503)" in result.output
    assert "--model" not in result.output
