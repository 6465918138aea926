from __future__ import annotations

import json
from itertools import count

import numpy as np
import pytest

from carpool_cli.commands import profile
from carpool_cli.profiling.targets import OnnxTarget, ServerTarget, TargetError

QUICK = ("--rounds", 3, "--for", "1ms", "--concurrency", 1)


def test_an_onnx_file_becomes_a_profile_and_a_picture(double, carpool, tmp_path):
    out, plot = tmp_path / "p.json", tmp_path / "p.png"
    result = carpool(
        "profile",
        "--onnx",
        double,
        *QUICK,
        "--max-batch",
        12,
        "--slo-p99",
        "1s",
        "--verify",
        "--out",
        out,
        "--plot",
        plot,
    )
    assert result.exit_code == 0, result.output
    assert "safe to batch: 8 rows answered alone and merged agree exactly" in result.output
    assert "for a p99 of 1s:" in result.output
    profile = json.loads(out.read_text())
    assert profile["rows"] == [1, 2, 4, 8, 12]
    assert len(profile["seconds"]) == 5
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_name_of_a_file_is_no_markup(double, carpool, tmp_path):
    named = tmp_path / "[v2]m[bold].onnx"
    named.write_bytes(double.read_bytes())
    result = carpool("profile", "--onnx", named, *QUICK, "--max-batch", 1)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("[v2]m[bold].onnx")


@pytest.mark.parametrize("protocol", ["v1", "v2", "v2-binary"])
def test_a_server_is_measured_in_every_protocol(echo, carpool, protocol, tmp_path):
    out = tmp_path / "p.json"
    result = carpool(
        "profile", "--upstream", echo, "--protocol", protocol, *QUICK, "--max-batch", 4, "--verify", "--out", out
    )
    assert result.exit_code == 0, result.output
    # A profile that was measured serves as the standin's.
    assert carpool("standin", "--profile", out, "--port", echo.rsplit(":", 1)[1]).exit_code == 1
    assert json.loads(out.read_text())["rows"] == [1, 2, 4]


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_a_server_that_wants_credentials_is_measured_and_the_profile_has_none(
    guarded, carpool, protocol, tmp_path, monkeypatch
):
    out = tmp_path / "p.json"
    options = (
        "--upstream",
        guarded.url,
        "--model",
        "m",
        "--protocol",
        protocol,
        *QUICK,
        "--max-batch",
        2,
        "--out",
        out,
    )
    header = ("--header", "authorization: Bearer x")
    monkeypatch.setattr("sys.argv", ["carpool", "profile", *map(str, options), *header, "--header=cookie: x"])
    result = carpool("profile", *options, *header, "--slo-p99", "200ms")
    assert result.exit_code == 0, result.output
    assert f"next: carpool recommend --profile {out} --slo-p99 200ms --rate 100" in result.output
    measured = json.loads(out.read_text())["measured"]
    assert measured["command"].endswith("--header authorization: ... --header=cookie: ...")
    assert measured["upstream"] == guarded.url


def test_headers_are_for_servers(carpool, double):
    assert "--header is for --upstream" in carpool("profile", "--onnx", double, "--header", "a: b").output


@pytest.mark.parametrize(
    ("call", "rounds", "says"),
    [
        # Two sizes: two cold runs, then two runs a round.
        (8, 2, "rounds 3 to 4 of at most 4, and server concurrency, which is taken to be 1\n"),
        (9, 3, "round 4 of at most 4, and server concurrency"),
        (11, 4, "server concurrency, which is taken to be 1\n"),
    ],
)
def test_what_was_measured_before_ctrl_c_is_kept(double, carpool, tmp_path, monkeypatch, call, rounds, says):
    interrupt(monkeypatch, call)
    out = tmp_path / "p.json"
    result = carpool("profile", "--onnx", double, "--rounds", 4, "--max-batch", 2, "--concurrency", 1, "--out", out)
    assert result.exit_code == 130, result.output
    assert f"stopped; not measured: {says}" in result.output
    made = json.loads(out.read_text())
    assert made["rows"] == [1, 2]
    assert f"minimum of {rounds} interleaved rounds" in made["source"]


def test_ctrl_c_in_the_first_round_leaves_nothing(double, carpool, tmp_path, monkeypatch):
    interrupt(monkeypatch, 4)
    result = carpool("profile", "--onnx", double, "--max-batch", 2, "--out", tmp_path / "p.json")
    assert result.exit_code == 130
    assert result.output == "Error: stopped in the first round: there is nothing to keep\n"
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize("call", [4, 11], ids=["in the rounds", "by several callers"])
def test_a_batch_that_fails_while_it_is_measured_is_one_line(double, carpool, tmp_path, monkeypatch, call):
    interrupt(monkeypatch, call, TargetError("status 500: no memory", input_fault=False))
    result = carpool("profile", "--onnx", double, "--rounds", 4, "--max-batch", 2, "--out", tmp_path / "p.json")
    assert result.exit_code == 1
    assert "failed while it was measured: status 500: no memory; measure again" in result.output
    assert not (tmp_path / "p.json").exists()


def test_a_server_that_fails_while_it_is_measured_is_named_once(echo, carpool, monkeypatch):
    prepare, calls = ServerTarget.prepare, count(1)

    def prepared(target, batch):
        run = prepare(target, batch)

        def failing():
            if next(calls) < 4:
                return run()
            raise TargetError(f"no answer from {echo}: timed out", input_fault=False, no_answer=True)

        return failing

    monkeypatch.setattr(ServerTarget, "prepare", prepared)
    result = carpool("profile", "--upstream", echo, "--protocol", "v1", *QUICK, "--max-batch", 2)
    assert result.exit_code == 1
    assert result.output.startswith("Error: a batch that was answered before failed while it was measured: no answer")
    assert result.output.count(echo) == 1


def interrupt(monkeypatch, number, by=KeyboardInterrupt):
    """Have the `number`th batch (from 1) ended by Ctrl-C, or another exception."""
    prepare, calls = OnnxTarget.prepare, count(1)

    def throughputs(run, *_, **__):  # its callers are threads, and Ctrl-C comes in the one that waits for them
        run()

    def prepared(target, batch):
        run = prepare(target, batch)

        def once():
            if next(calls) == number:
                raise by
            return run()

        return once

    monkeypatch.setattr(OnnxTarget, "prepare", prepared)
    monkeypatch.setattr(profile, "throughputs", throughputs)


def test_server_concurrency_is_printed(echo, carpool):
    result = carpool("profile", "--upstream", echo, "--rounds", 3, "--max-batch", 1, "--concurrency", 2)
    assert "server concurrency:" in result.output


def test_rows_that_depend_on_others_in_the_batch_are_detected(mixing, carpool):
    result = carpool("profile", "--onnx", mixing, *QUICK, "--max-batch", 2, "--verify")
    assert result.exit_code == 1
    assert "NOT SAFE to batch" in result.output


@pytest.mark.parametrize("verify", [[], ["--verify"]])
def test_an_unknown_model_is_named_once(echo, carpool, verify):
    result = carpool("profile", "--upstream", echo, "--protocol", "v1", "--model", "other", *QUICK, *verify)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: status 404 of other at {echo}, which does not have this model")
    assert result.output.count(echo) == 1


def test_a_server_that_does_not_answer_is_named_once(carpool):
    result = carpool("profile", "--upstream", "127.0.0.1:1", "--protocol", "v1", *QUICK)
    assert result.exit_code == 1
    assert result.output.startswith("Error: no answer from http://127.0.0.1:1: ")


def test_lost_rows_are_found_out(nasty, carpool):
    with nasty("--wrong-rows") as url:
        result = carpool("profile", "--upstream", url, *QUICK, "--max-batch", 2, "--verify")
    assert result.exit_code == 1
    assert "its first axis is not the rows" in result.output


def test_a_fixed_batch_axis_is_refused_with_the_fix(fixed, carpool):
    result = carpool("profile", "--onnx", fixed)
    assert result.exit_code == 1
    assert "dynamic_axes={'x': {0: 'batch'}}" in result.output


@pytest.fixture
def bending(standing_in, tmp_path):
    """A server whose cost per row falls by a third from 4 rows to 8, and on."""
    path = tmp_path / "bending.json"
    seconds = [0.02 + 0.0005 * rows for rows in (1, 32)]
    path.write_text(json.dumps({"name": "bending", "source": "synthetic", "rows": [1, 32], "seconds": seconds}))
    with standing_in(path) as url:
        yield url


def test_where_the_largest_size_is_the_cheapest_larger_ones_may_gain_more(bending, carpool):
    result = carpool("profile", "--upstream", bending, *QUICK, "--max-batch", 8, "--slo-p99", "1s")
    assert "it still falls at 8: larger ones may gain more, raise --max-batch" in result.output
    assert "for a p99 of 1s: max_batch 8: a row still gets cheaper at 8" in result.output


def test_a_size_that_fails_ends_the_search(nasty, carpool):
    with nasty("--max-batch", "4") as url:
        result = carpool("profile", "--upstream", url, *QUICK, "--max-batch", 16)
    assert result.exit_code == 0, result.output
    assert "raise --max-batch" not in result.output
    assert "a batch of 8 failed: status 400" in result.output


@pytest.mark.parametrize("name", ["foo", "batch"])
def test_a_dimension_that_the_model_does_not_have_is_refused(double, carpool, name):
    result = carpool("profile", "--onnx", double, *QUICK, "--dim", f"{name}=3")
    assert result.exit_code == 1
    assert result.output == f"Error: {double} has no open dimension '{name}': name one of n\n"
    assert carpool("profile", "--onnx", double, *QUICK, "--max-batch", 1, "--dim", "n=3").exit_code == 0


def test_given_rows_are_used(double, carpool, tmp_path):
    np.savez(tmp_path / "in.npz", x=np.ones((3, 5), np.float32))
    assert carpool("profile", "--onnx", double, *QUICK, "--inputs", tmp_path / "in.npz").exit_code == 0
    np.savez(tmp_path / "other.npz", z=np.ones((3, 5), np.float32))
    result = carpool("profile", "--onnx", double, "--inputs", tmp_path / "other.npz")
    assert "takes 'x'" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "one of the two"),
        (["--onnx", "no.onnx"], "there is no file no.onnx"),
        (["--upstream", "127.0.0.1:1"], "is the server up?"),
        (["--upstream", "127.0.0.1:1", "--protocol", "v1"], "no answer from"),
        (["--onnx", "m.onnx", "--inputs", "no.npz"], "no npz file"),
        (["--onnx", "m.onnx", "--dim", "sequence"], "sequence=128"),
        (["--onnx", "m.onnx", "--slo-p99", "50"], "write e.g. 50ms"),
        (["--upstream", "127.0.0.1:1", "--dim", "n=3"], "with --shape"),
    ],
)
def test_wrong_options_are_named(carpool, arguments, says):
    result = carpool("profile", *arguments)
    assert result.exit_code in {1, 2}
    assert says in result.output
