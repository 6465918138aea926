from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from carpool.batching.counters import ModelStats, Stats
from carpool.policy.durations import Quantity
from carpool.policy.parameters import Parameters
from carpool_cli.demo import day, filetypes, tower
from carpool_cli.demo.load import report_on
from carpool_cli.demo.observed import Look, between
from carpool_cli.demo.processes import DemoError, Processes, Running
from carpool_cli.load.loadgen import Recording
from carpool_sidecar.admin.metrics import METRICS
from carpool_sidecar.config.settings import parse
from carpool_sidecar.main import main as sidecar
from carpool_sidecar.tuning.stalls import Stall

ROOT = Path(__file__).parents[3]


def demo(folder, *options):
    files = folder / "files"
    files.mkdir(parents=True, exist_ok=True)
    (files / "say.py").write_text("import sys\n\n\ndef main():\n    print(sys.argv)\n" * 5)
    (files / "page.html").write_text("<!DOCTYPE html><html><body><p>Requests share a portion.</p></body></html>\n" * 5)
    (files / "a[").mkdir(exist_ok=True)  # a[/b].md: rich's markup has such tags
    (files / "a[" / "b].md").write_text("# Notes\n\n- one\n- two\n\nSome *text* with a [link](https://a.b).\n" * 8)
    profile = ROOT / "benchmarks/profiles/resnet50-v100.json"
    return [
        *(sys.executable, "-m", "carpool_cli.demo", "--quick", "--out", str(folder), "--files", str(files)),
        *("--profile", str(profile), *options),
    ]


def running(folder):
    """Processes whose command line names the folder, zombies aside."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                line = (entry / "cmdline").read_bytes()
                if str(folder).encode() in line:
                    found.append(line)
        except OSError:
            continue  # it ended meanwhile
    return found


def test_outside_the_repository_it_says_at_once_that_the_profile_is_missing(tmp_path):
    command = [sys.executable, "-m", "carpool_cli.demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)  # noqa: S603 - ours
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "Error: there is no benchmarks/profiles/resnet50-v100.json here: start it in the repository's folder, "
        "or name --profile\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.real
def test_it_runs_to_its_end_and_leaves_nothing_behind(tmp_path):
    done = subprocess.run(demo(tmp_path), capture_output=True, text=True, timeout=300, check=False)  # noqa: S603 - ours
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"say\.py +python", done.stdout)
    assert re.search(r"a\[/b\]\.md +markdown", done.stdout)
    assert "agree with direct onnxruntime calls" in done.stdout
    assert "no batching" in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert running(tmp_path) == []


@pytest.mark.real
def test_ctrl_c_ends_everything(tmp_path):
    process = subprocess.Popen(demo(tmp_path), stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own command
    for line in process.stdout:
        if "computed alone" in line:
            break
    assert len(running(tmp_path)) >= 2  # itself, the sidecar
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "nothing is left running" in said
    assert running(tmp_path) == []


@pytest.mark.real
def test_ctrl_c_does_not_wait_for_a_computation(tmp_path):
    process = subprocess.Popen(demo(tmp_path), stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own command
    for line in process.stdout:
        if "classifies files" in line:
            break
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "onnxruntime by itself" not in said, "it had computed to the end"
    assert said.endswith("stopped; nothing is left running\n")


@pytest.mark.parametrize("module", ["carpool_cli.demo.__main__", "carpool_cli.demo.generative"])
def test_a_folder_that_can_not_be_made_is_named(module, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(import_module(module).command, ["--out", str(tmp_path / "file" / "below")])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert "Not a directory" in done.output
    assert "file/below" in done.output


@pytest.mark.real
def test_what_goes_wrong_is_named_and_is_the_exit_code(tmp_path):
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    command = demo(tmp_path, "--files", str(nothing))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603 - our own
    assert done.returncode == 1
    assert "no file below" in done.stdout


@pytest.mark.real
async def test_a_process_that_ends_is_named_with_the_end_of_its_log(tmp_path):
    named = r"(?s)wrong ended with code 2.*upstream.*name exactly one"
    with Processes(tmp_path) as processes, pytest.raises(DemoError, match=named):
        await processes.sidecar("wrong", {"policy": {"slo": {"latency": {"p99": "50ms"}}}})


BURNS = "import sys, time\nwhile time.process_time() < 0.5: pass\nprint('burnt', flush=True)\nsys.stdin.read(1)"
WAITS = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURNS!r}])\nprint('ended', flush=True)\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such a /proc")
def test_the_cpu_time_of_a_process_and_of_its_children(tmp_path):
    command = [sys.executable, "-c", f"{WAITS}sys.stdin.read(1)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: S603 - our own
        running_one = Running("parent", "", "", tmp_path, process)
        assert process.stdout.readline() == b"burnt\n"
        assert running_one.cpu_seconds()[1] > 0.4  # the system counts ticks of 10 ms
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.readline() == b"ended\n"
        own, children = running_one.cpu_seconds()
        assert own < 0.4 < children
    assert running_one.cpu_seconds() == (0.0, 0.0)


@pytest.mark.real
async def test_a_process_that_does_not_heed_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("carpool_cli.demo.processes.ENDING", 0.0)
    with Processes(tmp_path) as processes:
        device = await processes.standin("device", ROOT / "benchmarks/profiles/synthetic-5-0.5.json")
        assert device.address.startswith("127.0.0.1:")
    assert running(tmp_path) == []


def test_the_models_own_api_agrees_and_hidden_folders_are_left_out(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hook.py").write_text("import os\n" * 40)
    (tmp_path / "notes.md").write_text(
        "# Notes\n\n- one\n- two\n\nSome *text* with a [link](https://example.org).\n" * 8
    )
    (tmp_path / "empty").write_bytes(b"")
    model = filetypes.model(tmp_path, 1.0)
    assert model.words == [("notes.md", "markdown")]
    assert model.expected[0].shape == (214,)


def test_the_tower_is_the_same_every_time_and_its_batch_axis_is_dynamic(tmp_path):
    one, other = (tower.model(tmp_path, 16, 1.0) for _ in range(2))
    assert np.array_equal(one.expected, other.expected)
    assert len(one.requests) == tower.BODIES
    assert one.path.stat().st_size < 16 * 16 * 4 * tower.LAYERS + 4096


def test_a_report_on_a_part_has_its_requests_and_its_stalls_only():
    recording = Recording(
        due=[0.0, 1.0, 2.0, 3.0],
        sent=[0.0, 1.0, 2.0, 3.0],
        done=[0.1, 1.5, 2.1, 3.1],
        status=[500, 200, 503, 200],
        complaints=["at first", "busy"],
        complained=[1, 0, 2, 0],
        stalls=[Stall(0.2, 0.4), Stall(1.2, 1.22), Stall(1.3, 1.5)],
        cpu_seconds=0.1,
        seconds=4.0,
        most_outstanding=1,
    )
    report = report_on(recording, 1.0, 2.0, 0.25)
    assert (report.requests, report.ok, report.good) == (2, 1, 0)
    assert [round(stall.seconds, 3) for stall in report.stalls] == [0.2]
    assert report.complaints == {"503": {"busy": 1}}


def test_the_rush_is_more_than_one_by_one_and_eight_at_a_time_can_serve():
    profile = day.device_profile.load(ROOT / "benchmarks/profiles/resnet50-v100.json")
    curve = day.slower(profile).service_time()
    rush = max(rate for _, rate in day.HOURS)
    assert 1 / curve.time(1) < 8 / curve.time(8) < rush < 0.8 * 64 / curve.time(64)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_configurations_are_right(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").touch()  # --check does not load it
    documents = list(yaml.safe_load_all(path.read_text()))
    if documents[0].get("kind") == "ConfigMap":
        config = parse(documents[0]["data"]["sidecar.yaml"])
        assert config.upstream
        (sidecar_container,) = documents[1]["spec"]["template"]["spec"]["initContainers"]
        assert has_room(sidecar_container, config)
        assert sidecar_container["restartPolicy"] == "Always"
    else:
        assert sidecar(["--check", "--config", str(path)]) == 0


def has_room(container, config):
    """Whether a container's memory holds all bodies, and what docs/operations.md adds for the processes."""
    memory = Quantity.parse(container["resources"]["limits"]["memory"])
    return config.bodies.max_buffered + 70 * 2**20 <= memory


def test_the_example_for_scale_to_zero_is_right():
    documents = list(yaml.safe_load_all((ROOT / "examples/jobs/scale-to-zero.yaml").read_text()))
    by_kind = {document["kind"]: document for document in documents}
    config = parse(by_kind["ConfigMap"]["data"]["sidecar.yaml"])
    pod = by_kind["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert config.jobs.path.startswith(container["volumeMounts"][1]["mountPath"])
    assert has_room(container, config)
    assert pod["terminationGracePeriodSeconds"] > config.shutdown.limit
    query = by_kind["ScaledObject"]["spec"]["triggers"][0]["metadata"]["query"]
    known = {f"carpool_{metric.name}" for metric in METRICS}
    assert set(re.findall("carpool_[a-z_]+", query)) <= known


def test_the_example_of_an_indexed_job_runs_every_shard(tmp_path, monkeypatch, double, carpool):
    (job,) = yaml.safe_load_all((ROOT / "examples/jobs/shards.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    claim = f"{tmp_path}/"
    words = [word.replace("/data/", claim) for word in [*container["command"], *container["args"]]]
    assert words.pop(0) == "carpool"
    assert words[-1] == str(job["spec"]["completions"])
    shutil.copy(double, tmp_path / "model.onnx")
    (tmp_path / "rows.jsonl").write_text("".join(f"[{number}, 1, 2]\n" for number in range(50)))
    for index in range(job["spec"]["completions"]):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        done = carpool(*words)
        assert done.exit_code == 0, done.output
    assert carpool(*words, "--join").exit_code == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert answers == [[2.0 * number, 2.0, 4.0] for number in range(50)]


@pytest.mark.real
async def test_the_examples_curl_lines_work(tmp_path):
    with Processes(tmp_path) as processes:
        device = await processes.standin("device", ROOT / "benchmarks/profiles/synthetic-5-0.5.json")
        front = await processes.sidecar(
            "front",
            {"upstream": {"url": f"http://{device.address}"}, "policy": {"slo": {"latency": {"p99": "1s"}}}},
        )
        where = {**os.environ, "DATA": front.address, "ADMIN": front.admin}
        done = subprocess.run(  # noqa: ASYNC221, S603 - nothing else runs on this loop; our own script
            ["bash", str(ROOT / "examples/curl.sh")],  # noqa: S607 - from the PATH, as a person would
            env=where,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert '{"predictions":[[1.5, 2.5],[3.5, 4.5]]}' in done.stdout
    assert "x-carpool-batch-size: 1" in done.stdout
    assert '"id":"42"' in done.stdout.replace(" ", "")
    assert 'carpool_max_batch{model="standin"} 32.0' in done.stdout


def test_the_tuner_costs_only_where_it_tunes():
    counts = [Stats(at=at, models={"m": ModelStats(served=served)}) for at, served in ((0.0, 0), (1.0, 10))]
    first, last = (
        Look(at, stats, Parameters(), None, at, 3 * at) for at, stats in zip((0.0, 1.0), counts, strict=True)
    )
    assert between(first, last, "m").cpu == pytest.approx(0.4)
    assert between(first, last, "m", tuned=False).cpu == pytest.approx(0.1)
