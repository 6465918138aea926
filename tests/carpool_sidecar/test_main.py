"""The command as a process of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from carpool_sidecar.main import CANNOT_START, CUT_SHORT, OK, WRONG_CONFIG, main

SLO = {"latency": {"p99": "50ms"}}
COMMAND = (sys.executable, "-m", "carpool_sidecar.main")


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "sidecar.json"
        path.write_text(text)
        return path

    return write


@pytest.fixture
async def launch(world):
    running = []

    async def start(source, option="--config"):
        process = await asyncio.create_subprocess_exec(*COMMAND, option, str(source), stderr=asyncio.subprocess.PIPE)
        running.append(process)
        async with asyncio.timeout(60):
            while True:
                line = json.loads(await process.stderr.readline())
                if line["event"] == "listening":
                    break
        await world.until(lambda: world.model.server.connections)
        return process, world.client(line["data"]), world.client(line["admin"])

    yield start
    for process in running:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("check", [["--check"], []])
def test_a_model_file_without_its_extra_is_a_wrong_configuration(config_file, tmp_path, monkeypatch, capsys, check):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for module in ("sessions", "onnx"):
        monkeypatch.delitem(sys.modules, f"carpool_sidecar.backends.{module}", raising=False)
    (tmp_path / "model.onnx").write_bytes(b"")
    file = config_file(json.dumps({"onnx": {"path": str(tmp_path / "model.onnx")}, "policy": {"slo": SLO}}))
    assert main(["--config", str(file), *check]) == WRONG_CONFIG
    assert (
        capsys.readouterr().err
        == f"{file}: onnx: serving a model file needs onnxruntime: in Carpool's folder, pip install '.[onnx]'\n"
    )


@pytest.mark.parametrize("check", [["--check"], []])
def test_a_language_model_without_its_extra_is_a_wrong_configuration(config_file, monkeypatch, capsys, check):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    file = config_file(json.dumps({"llm": {"path": "m.gguf"}, "policy": {"slo": SLO}}))
    assert main(["--config", str(file), *check]) == WRONG_CONFIG
    assert "llm: OpenVINO GenAI is not installed: in Carpool's folder, pip install '.[llm]'" in capsys.readouterr().err


def test_the_version_needs_no_configuration(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"carpool-sidecar {version('carpool-serving')}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--chek"], "unrecognized arguments: --chek"),
        (["a.yaml", "--check"], "unrecognized arguments: a.yaml; a configuration is named by --config a.yaml"),
        ([], "name a configuration: --config FILE or --config-env NAME"),
    ],
)
def test_wrong_options_are_named(capsys, arguments, says):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_help_is_worth_reading(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert re.search(r"SIGTERM.*second", text, re.DOTALL)
    assert "exit codes" in text


def test_a_configuration_can_be_checked_without_running(world_config, config_file, capsys):
    assert main(["--config", str(path := config_file(world_config)), "--check"]) == OK
    assert capsys.readouterr().out == f"{path}: OK\n"
    assert main(["--config", str(config_file('{"policy": 1}')), "--check"]) == WRONG_CONFIG
    assert "policy" in capsys.readouterr().err
    for options in (["--check"], []):
        assert main(["--config", "/nonexistent.yaml", *options]) == WRONG_CONFIG
        says = "/nonexistent.yaml: config: No such file or directory: name a file with --config\n"
        assert capsys.readouterr().err == says


async def test_a_fixed_wait_beyond_the_slo_is_refused_by_the_check_only(world, launch, config_file, capsys):
    path = config_file(world.config(parameters={"*": {"maxBatch": 1000, "maxWait": "1h"}}))
    assert main(["--config", str(path), "--check"]) == WRONG_CONFIG
    assert "parameters[*].maxWait: 1h is not below the SLO" in capsys.readouterr().err
    # An older version started with it: after an upgrade a pod has to start, too.
    process, _, _ = await launch(path)
    assert process.returncode is None


def test_a_file_that_is_no_text_is_a_wrong_configuration(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    assert main(["--config", str(tmp_path / "x"), "--check"]) == WRONG_CONFIG


@pytest.mark.parametrize("option", ["listen", "admin"])
def test_a_port_in_use_is_named_with_its_field_and_the_fix(world_config, config_file, option):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [*COMMAND, "--config", str(config_file(world_config)), f"--{option}", address]
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)  # noqa: S603 - our own command
    assert done.returncode == CANNOT_START
    assert (
        done.stderr.decode() == f"carpool-sidecar: {option}: {address}: address already in use: "
        f"name another address, in the file or with --{option}\n"
    )


@pytest.mark.parametrize("check", [["--check"], []])
def test_a_missing_key_file_is_named_with_its_field(world_config, config_file, tmp_path, capsys, check):
    key = tmp_path / "key"
    path = config_file(json.dumps(json.loads(world_config) | {"apiKeyFile": str(key)}))
    assert main(["--config", str(path), *check]) == WRONG_CONFIG
    assert f"apiKeyFile: '{key}': No such file or directory: name a file" in capsys.readouterr().err
    key.write_bytes(b"\xff")
    assert main(["--config", str(path), *check]) == WRONG_CONFIG
    assert f"apiKeyFile: '{key}': not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("check", [["--check"], []])
@pytest.mark.parametrize(
    ("text", "why"), [("", "empty"), (" \n\n", "empty"), ("one\ntwo\n", "not one line"), ("a\0b", "not one line")]
)
def test_a_key_file_without_one_key_is_refused(world_config, config_file, tmp_path, capsys, check, text, why):
    """An empty key would open the admin port to `Authorization: Bearer ` with nothing after it."""
    (tmp_path / "key").write_text(text)
    path = config_file(json.dumps(json.loads(world_config) | {"apiKeyFile": str(tmp_path / "key")}))
    assert main(["--config", str(path), *check]) == WRONG_CONFIG
    assert f"apiKeyFile: '{tmp_path / 'key'}': {why}" in capsys.readouterr().err


@pytest.mark.parametrize("check", [["--check"], []])
def test_a_missing_model_file_is_named_with_its_field(config_file, tmp_path, capsys, check):
    model = tmp_path / "model.onnx"
    path = config_file(json.dumps({"onnx": {"path": str(model)}, "policy": {"slo": SLO}}))
    assert main(["--config", str(path), *check]) == WRONG_CONFIG
    assert f"onnx.path: there is no file {model}" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "code"), [(["--check"], WRONG_CONFIG), ([], CANNOT_START)])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("text/jobs.db", "text: Not a directory: name a file in a directory that can be written"),
        ("text/new/jobs.db", "text: Not a directory: name a file in a directory that can be written"),
        ("", "Is a directory: name a file in it"),
        ("text", "file is not a database: name another file, or mend or remove this one"),
    ],
)
def test_a_jobs_file_that_a_start_could_not_use_is_refused_by_the_check_in_the_same_words(
    world_config, config_file, tmp_path, capsys, name, why, options, code
):
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "text").write_text("no database, but text")
    path = config_file(json.dumps(json.loads(world_config) | {"jobs": {"path": str(folder / name)}}))
    assert main(["--config", str(path), *options]) == code
    says = capsys.readouterr().err
    assert f"jobs.path: {folder / name}: " in says
    assert says.endswith(f"{why}\n")
    assert [each.name for each in folder.iterdir()] == ["text"]


def test_a_jobs_file_in_a_folder_that_a_start_would_create_is_no_error_and_the_check_creates_nothing(
    world_config, config_file, tmp_path
):
    jobs = tmp_path / "new" / "folder" / "jobs.db"
    path = config_file(json.dumps(json.loads(world_config) | {"jobs": {"path": str(jobs)}}))
    assert main(["--config", str(path), "--check"]) == OK
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("check", [["--check"], []])
@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "No such file or directory"), ("", "has to hold one line"), ("a\nb", "has to hold one line")],
)
def test_a_credential_for_jobs_that_cannot_be_read_is_named(
    world_config, config_file, tmp_path, capsys, check, text, why
):
    key = tmp_path / "key"
    if text is not None:
        key.write_text(text)
    jobs = {"path": str(tmp_path / "jobs.db"), "authorizationFile": str(key)}
    path = config_file(json.dumps(json.loads(world_config) | {"jobs": jobs}))
    assert main(["--config", str(path), *check]) == WRONG_CONFIG
    says = capsys.readouterr().err
    assert f"jobs.authorizationFile: '{key}'" in says
    assert why in says


@pytest.mark.parametrize("check", [["--check"], []])
def test_an_upstream_that_is_the_sidecar_itself_is_refused(config_file, capsys, check):
    policy = "policy: {slo: {latency: {p99: 50ms}}}"
    path = config_file(f"upstream: {{url: 'http://localhost:9090'}}\n{policy}")
    assert main(["--config", str(path), *check]) == WRONG_CONFIG
    assert "upstream.url: 'http://localhost:9090' is this sidecar's own admin port" in capsys.readouterr().err
    path = config_file(f"upstream: {{url: 'http://localhost:9000'}}\n{policy}")
    assert main(["--config", str(path), "--listen", "0.0.0.0:9000", *check]) == WRONG_CONFIG
    assert "own data port (listen: 0.0.0.0:9000)" in capsys.readouterr().err


def test_options_may_leave_a_port_to_the_model(config_file):
    path = config_file("upstream: {url: 'http://localhost:8080'}\npolicy: {slo: {latency: {p99: 50ms}}}")
    assert main(["--config", str(path), "--listen", "0.0.0.0:8081", "--check"]) == OK


def test_a_key_file_that_is_there_passes_the_check(world_config, config_file, tmp_path):
    (tmp_path / "key").write_text("secret")
    path = config_file(json.dumps(json.loads(world_config) | {"apiKeyFile": str(tmp_path / "key")}))
    assert main(["--config", str(path), "--check"]) == OK


def test_a_configuration_may_be_in_an_environment_variable(world_config, monkeypatch, capsys):
    monkeypatch.setenv("CARPOOL_CONFIG", world_config)
    assert main(["--config-env", "CARPOOL_CONFIG", "--check"]) == OK
    monkeypatch.setenv("CARPOOL_CONFIG", '{"policy": 1}')
    assert main(["--config-env", "CARPOOL_CONFIG", "--check"]) == WRONG_CONFIG
    assert capsys.readouterr().err.startswith("$CARPOOL_CONFIG: policy")
    monkeypatch.delenv("CARPOOL_CONFIG")
    assert main(["--config-env", "CARPOOL_CONFIG", "--check"]) == WRONG_CONFIG
    assert "no such environment variable" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--config", "a.yaml", "--config-env", "A"]])
def test_a_configuration_comes_from_one_place(options, capsys):
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == WRONG_CONFIG
    assert "--config-env" in capsys.readouterr().err


@pytest.mark.parametrize("check", [["--check"], []])
def test_a_public_key_without_the_package_that_verifies_is_named_with_the_fix(
    world_config, config_file, monkeypatch, capsys, check
):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    path = config_file(json.dumps(json.loads(world_config) | {"publicKey": "ab" * 32}))
    assert main(["--config", str(path), *check]) == WRONG_CONFIG
    assert (
        "publicKey: needs the package `cryptography`: in Carpool's folder, pip install '.[signing]'"
        in capsys.readouterr().err
    )


async def test_what_is_configured_by_the_environment_serves(world, launch, monkeypatch):
    monkeypatch.setenv("CARPOOL_CONFIG", world.config())
    _, client, admin = await launch("CARPOOL_CONFIG", "--config-env")
    assert (await client.predict(b"1")).json == {"predictions": [1]}
    assert (await admin.get(b"/v1/config")).json["error"] is None


async def test_fields_of_a_newer_injector_are_ignored_and_named(world, monkeypatch, capsys):
    """A sidecar that refused them would hold up its pod for ever, where somebody pinned its image."""
    newer = json.loads(world.config()) | {"later": 1}
    monkeypatch.setenv("CARPOOL_CONFIG", json.dumps(newer))
    assert main(["--config-env", "CARPOOL_CONFIG", "--check"]) == WRONG_CONFIG
    assert "unknown field `later`" in capsys.readouterr().err
    command = (*COMMAND, "--config-env", "CARPOOL_CONFIG")
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    first, second = [json.loads(await process.stderr.readline()) for _ in range(2)]
    process.kill()
    await process.communicate()
    assert (first["level"], first["fields"], second["event"]) == ("error", "later", "listening")


@pytest.fixture
def world_config():
    return json.dumps(
        {
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "upstream": {"url": "http://127.0.0.1:1"},
            "policy": {"slo": {"latency": {"p99": "50ms"}}},
            "parameters": {"*": {}},
        }
    )


@pytest.mark.parametrize("address", ["8080", "foo", "127.0.0.1:80000"])
def test_an_address_that_is_none_is_named_with_the_fix(address, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--config", "sidecar.yaml", "--listen", address])
    assert ended.value.code == WRONG_CONFIG
    assert f"--listen: '{address}' is not host:port: write e.g. 127.0.0.1:8080" in capsys.readouterr().err


async def test_sigterm_drains_and_loses_nothing(world, config_file, launch):
    process, client, admin = await launch(config_file(world.config(parameters={})))
    assert (await client.predict(b"1")).json == {"predictions": [1]}
    assert (await admin.get(b"/livez")).status == 200
    world.model.holding = True
    last = client.predict(b"2")
    await world.until(lambda: world.model.held)
    process.send_signal(signal.SIGTERM)
    line = {"event": ""}
    while line["event"] != "draining":
        line = json.loads(await process.stderr.readline())
    world.model.release()
    assert (await last).json == {"predictions": [2]}
    assert await asyncio.wait_for(process.wait(), 60) == OK


async def test_where_the_model_goes_on_after_a_drain_a_fresh_one_is_to_take_over(world, config_file, launch):
    process, client, admin = await launch(config_file(world.config()))
    assert (await client.predict(b"1")).status == 200
    assert (await admin.get(b"/drain")).status == 200
    assert await asyncio.wait_for(process.wait(), 60) == OK


async def test_a_second_signal_ends_it_at_once(world, config_file, launch):
    process, client, _ = await launch(config_file(world.config(shutdown={"lame": "60s", "limit": "61s"})))
    assert (await client.predict(b"1")).status == 200
    process.send_signal(signal.SIGTERM)
    line = {"event": ""}
    while line["event"] != "draining":
        line = json.loads(await process.stderr.readline())
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 60) == CUT_SHORT


async def test_it_takes_at_most_60_mib_in_front_of_an_upstream(world, config_file, launch):
    process, client, admin = await launch(config_file(world.config(parameters={})))
    for number in range(200):
        assert (await client.predict(b"%d" % number)).status == 200
    assert (await admin.get(b"/metrics")).status == 200  # loads the metrics library
    status = Path(f"/proc/{process.pid}/status").read_text()  # noqa: ASYNC240 - no disk behind it
    assert int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) < 60 * 1024
