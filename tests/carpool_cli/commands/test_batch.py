from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from carpool_cli.commands.batch import Waits


def lines(path):
    return path.read_text().splitlines()


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f"[{number}, 1.10]\n" for number in range(200)))
    return path


def leftovers(output):
    return sorted(path.name for path in output.parent.iterdir() if path.name.startswith(output.name))


def test_v1_answers_come_in_order_and_digit_for_digit(echo, carpool, rows, tmp_path):
    output = tmp_path / "out.jsonl"
    result = carpool("batch", rows, output, "--upstream", echo, "--concurrency", 3)
    assert result.exit_code == 0, result.output
    assert [line.replace(",", ", ").replace(",  ", ", ") for line in lines(output)] == lines(rows)
    assert "200 rows answered" in result.output
    assert leftovers(output) == ["out.jsonl"]


def test_one_row_is_no_plural(echo, carpool, tmp_path):
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("[1]\nno row\n")
    said = carpool("batch", path, output, "--upstream", echo).output
    assert said.startswith("1 row answered")
    assert "\n1 bad row skipped" in said


@pytest.mark.parametrize("protocol", ["v2", "v2-binary"])
def test_v2_answers_come_in_order(echo, carpool, tmp_path, protocol):
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(f"[{number}, 0.5]\n" for number in range(20)) + "[1]\n[2]\n")
    result = carpool("batch", path, output, "--upstream", echo, "--protocol", protocol, "--batch-size", 8)
    assert result.exit_code == 0, result.output
    assert [json.loads(line) for line in lines(output)] == [json.loads(line) for line in lines(path)]


def test_an_onnx_file_answers_as_it_does_alone(double, carpool, tmp_path):
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(f"[{number}, 1, 2]\n" for number in range(50)))
    result = carpool("batch", path, output, "--onnx", double)
    assert result.exit_code == 0, result.output
    assert [json.loads(line) for line in lines(output)] == [[2.0 * number, 2.0, 4.0] for number in range(50)]


def test_with_another_model_in_the_same_file_it_does_not_go_on(double, carpool, tmp_path):
    path, output, model = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "model.onnx"
    path.write_text('[1, 1, 2]\n"bad"\n[2, 1, 2]\n')
    model.write_bytes(double.read_bytes())
    job = ("batch", path, output, "--onnx", model, "--batch-size", 1)
    assert carpool(*job, "--max-bad", 0).exit_code == 1
    model.write_bytes(double.read_bytes() + b"\0")
    result = carpool(*job)
    assert result.exit_code == 1
    assert "belongs to another job (input, model or protocol changed)" in result.output


def test_npz_in_and_out(double, carpool, tmp_path):
    path, output = tmp_path / "in.npz", tmp_path / "out.npz"
    given = np.arange(30, dtype=np.float32).reshape(10, 3)
    np.savez(path, x=given)
    result = carpool("batch", path, output, "--onnx", double, "--batch-size", 4)
    assert result.exit_code == 0, result.output
    with np.load(output) as found:
        assert (found["y"] == 2 * given).all()


def test_bad_rows_are_skipped_and_named(nasty, carpool, tmp_path):
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("[1]\noops\n\n[666]\n[4]\n[5]\n[666]\n")
    with nasty("--poison", "666") as url:
        result = carpool("batch", path, output, "--upstream", url, "--batch-size", 8)
    assert result.exit_code == 3
    assert lines(output) == ["[1]", "null", "", "null", "[4]", "[5]", "null"]
    errors = [json.loads(line) for line in lines(tmp_path / "out.jsonl.errors.jsonl")]
    assert [error["line"] for error in errors] == [2, 4, 7]
    assert "malformed" in errors[0]["error"]
    assert "status 500" in errors[1]["error"]
    assert "3 bad rows skipped" in result.output


def test_too_many_bad_rows_stop_it_and_what_is_done_is_kept(nasty, carpool, tmp_path):
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("[1]\n[666]\n[666]\n[4]\n")
    with nasty("--poison", "666") as url:
        job = ("batch", path, output, "--upstream", url, "--batch-size", 1)
        result = carpool(*job, "--max-bad", 1)
        assert result.exit_code == 1
        told = f"; {output}.errors.jsonl names all. To leave them out, give the same command a larger --max-bad: "
        told += f"it goes on from here. Or correct them, remove {output}.checkpoint, and start over\n"
        assert result.output.startswith("Error: stopped: 2 rows are bad, the last in line 3 (")
        assert result.output.endswith(told)
        assert "resumes" not in result.output
        # Once more it stops without another row, and says the same
        again = carpool(*job, "--max-bad", 1)
        assert (again.exit_code, lines(tmp_path / "out.jsonl.part")) == (1, ["[1]", "null", "null"])
        assert f"Error: stopped: 2 rows are bad{told}" in again.output
        result = carpool(*job)
    assert result.exit_code == 3
    assert "continuing after row 3" in result.output
    assert lines(output) == ["[1]", "null", "null", "[4]"]


def test_a_server_that_loses_rows_in_batches_is_asked_for_single_ones(nasty, carpool, tmp_path, rows):
    output = tmp_path / "out.jsonl"
    with nasty("--wrong-rows") as url:
        result = carpool("batch", rows, output, "--upstream", url, "--batch-size", 16)
    assert result.exit_code == 0
    assert len(lines(output)) == 200
    assert "batches of 1" in result.output


def test_nobody_there_keeps_what_is_done(carpool, rows, tmp_path):
    result = carpool("batch", rows, tmp_path / "out.jsonl", "--upstream", "127.0.0.1:1", "--retries", 0)
    assert result.exit_code == 1
    assert "the same command resumes" in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "status 401 of m at {url}, which wants other credentials: name them with --header: "),
        (("--header", "authorization: Bearer x", "--model", "n"), "status 404 of n at {url}, which does not have this"),
    ],
)
def test_a_server_that_will_not_answer_later_either_stops_the_job_at_once(
    guarded, carpool, rows, tmp_path, monkeypatch, options, says
):
    monkeypatch.setattr("carpool_cli.batch.job.Stopping.wait", lambda *_: pytest.fail("nothing to wait for"))
    job = ("batch", rows, tmp_path / "out.jsonl", "--upstream", guarded.url, "--model", "m", *options)
    result = carpool(*job)
    assert (result.exit_code, guarded.asked) == (1, 1)
    assert f"stopped: {says.format(url=guarded.url)}" in result.output


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_credentials_are_sent_in_a_header_in_every_protocol(guarded, carpool, tmp_path, protocol):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("[1.0, 2.0]\n[3.0, 4.0]\n")
    job = ("batch", source, output, "--upstream", guarded.url, "--model", "m", "--protocol", protocol)
    result = carpool(*job, "--header", "authorization: Bearer x")
    assert result.exit_code == 0, result.output
    assert [len(json.loads(each)) for each in lines(output)] in ([2, 2], [1, 1])


def test_headers_are_for_servers(carpool, rows, double, tmp_path):
    job = ("batch", rows, tmp_path / "out.jsonl", "--onnx", double, "--header", "a: b")
    assert "--header is for --upstream" in carpool(*job).output


def test_the_profile_gives_the_size(echo, tiny, carpool, rows, tmp_path):
    result = carpool("batch", rows, tmp_path / "out.jsonl", "--upstream", echo, "--profile", tiny)
    assert result.exit_code == 0
    assert "batches of 57" in result.output  # the batch latency of `tiny` is nearly flat


DYING = """
import os, signal
from carpool_cli.batch import job
from carpool_cli.batch.journal import Journal
from carpool_cli.main import main

left = {steps}

def dying(real):
    def call(*arguments):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    return call

job.COMMIT_EVERY = 0.0
os.fsync = dying(os.fsync)
Journal.append = dying(Journal.append)
main()
"""


def test_killed_at_any_step_it_loses_and_repeats_nothing(nasty, tmp_path):
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    poisoned = range(5, 300, 97)
    path.write_text("".join(f"[{-1 if number in poisoned else number}]\n" for number in range(300)))
    deaths = 0
    with nasty("--poison", "-1") as url:
        arguments = ["batch", path, output, "--upstream", url, "--batch-size", "8"]
        while True:
            # A batch is five steps (append, four syncs), so each step of one is hit, wherever the last run got to.
            code = DYING.format(steps=21 + 11 * deaths)
            process = subprocess.run([sys.executable, "-c", code, *arguments], check=False, capture_output=True)  # noqa: S603 - our own command
            if process.returncode != -signal.SIGKILL:
                break
            deaths += 1
    assert process.returncode == 3, process.stderr
    assert deaths > 3
    assert lines(output) == ["null" if number in poisoned else f"[{number}]" for number in range(300)]
    numbers = [json.loads(line)["line"] for line in lines(tmp_path / "out.jsonl.errors.jsonl")]
    assert numbers == [number + 1 for number in poisoned]
    assert leftovers(output) == ["out.jsonl", "out.jsonl.errors.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["in.jsonl", "out.jsonl"], "one of the two"),
        (["in.jsonl", "out.npz", "--upstream", "x:1"], "both in .npz"),
        (["no.jsonl", "out.jsonl", "--upstream", "x:1"], "no.jsonl: No such file"),
        (["no.npz", "out.npz", "--upstream", "x:1"], "no.npz: No such file"),
        (["in.npz", "out.npz", "--upstream", "x:1"], "in.npz is no npz file"),
        (["in.jsonl", "in.jsonl", "--upstream", "x:1"], "the same file"),
        (["in.jsonl", "out.jsonl", "--onnx", "no.onnx"], "there is no file no.onnx"),
    ],
)
def test_wrong_options_and_files_are_named(carpool, tmp_path, monkeypatch, rows, arguments, says):
    (tmp_path / "in.npz").write_text("[1]")
    monkeypatch.chdir(tmp_path)
    result = carpool("batch", *arguments)
    assert result.exit_code == 2
    assert says in result.output


def test_an_output_that_exists_is_not_touched(echo, carpool, rows, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    result = carpool("batch", rows, output, "--upstream", echo)
    assert (result.exit_code, output.read_text()) == (1, "mine")
    assert "exists already" in result.output


def test_shards_together_are_one_run_and_a_killed_one_resumes(echo, nasty, carpool, tmp_path, monkeypatch):
    path, output, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    path.write_text("".join(f"[{number}]\n" for number in range(97)) + "oops\n\n[97]\n[666]\n[98]")
    with nasty("--poison", "666") as url:
        options = ("--upstream", url, "--batch-size", 4)
        assert carpool("batch", path, whole, *options).exit_code == 3
        # 1. One shard is stopped half way, as by a kill: its journal says where it goes on
        first = carpool("batch", path, output, "--upstream", "http://127.0.0.1:1", "--shards", 4, "--shard", 1)
        assert first.exit_code == 1
        stopped = carpool("batch", path, output, *options, "--shards", 4, "--shard", 3, "--max-bad", 0)
        assert stopped.exit_code == 1
        assert "out-00003-of-00004.jsonl.checkpoint" in {entry.name for entry in tmp_path.iterdir()}
        early = carpool("batch", path, output, "--onnx", path, "--shards", 4, "--join")
        assert "not finished" in early.output
        # 2. All run, one of them by the index that Kubernetes gives
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
        results = [carpool("batch", path, output, *options, "--shards", 4)]
        results += [carpool("batch", path, output, *options, "--shards", 4, "--shard", index) for index in (1, 2, 3)]
        assert [result.exit_code for result in results] == [0, 0, 0, 3], results[-1].output
        assert "continuing after row" in results[3].output
    joined = carpool("batch", path, output, "--upstream", echo, "--shards", 4, "--join")
    assert joined.exit_code == 3, joined.output
    assert joined.output.endswith(f"2 bad rows skipped, named in {output}.errors.jsonl\n")
    assert output.read_text() == whole.read_text()
    errors = [json.loads(line) for line in lines(tmp_path / "out.jsonl.errors.jsonl")]
    assert [error["line"] for error in errors] == [98, 101]


def test_npz_shards_together_are_one_run(double, carpool, tmp_path):
    path, output = tmp_path / "in.npz", tmp_path / "out.npz"
    given = np.arange(15, dtype=np.float32).reshape(5, 3)
    np.savez(path, x=given)
    for index in range(7):  # two of them have no rows
        result = carpool("batch", path, output, "--onnx", double, "--shards", 7, "--shard", index)
        assert result.exit_code == 0, result.output
    assert carpool("batch", path, output, "--onnx", double, "--shards", 7, "--join").exit_code == 0
    with np.load(output) as found:
        assert (found["y"] == 2 * given).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--shard", 1), "--shard 1 needs --shards N"),
        (("--shards", 3), "--shard I"),
        (("--shards", 3, "--shard", 3), "0 to 2"),
        (("--join",), "needs --shards"),
    ],
)
def test_wrong_shards_are_named(carpool, rows, tmp_path, options, says):
    result = carpool("batch", rows, tmp_path / "out.jsonl", "--upstream", "http://127.0.0.1:1", *options)
    assert result.exit_code == 2
    assert says in result.output


def test_without_shards_the_index_of_a_job_has_another_meaning(echo, carpool, rows, tmp_path, monkeypatch):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert carpool("batch", rows, tmp_path / "out.jsonl", "--upstream", echo, "--batch-size", 4).exit_code in {0, 3}


def test_of_all_that_wait_to_be_sent_again_one_line_is_said_in_five_seconds(capsys):
    now = [0.0]
    waits = Waits(lambda: now[0])
    for at, why in ((0.0, "a"), (4.9, "b"), (5.0, "c"), (5.1, "d")):
        now[0] = at
        waits(why)
    assert capsys.readouterr().err == "a\nc\n"
