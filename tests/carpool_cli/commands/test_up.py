from __future__ import annotations

import contextlib
import http.client
import json
import os
import pty
import select
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from carpool_cli.commands.up import _watch, hint


def get(url: str, body: str | None = None) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.request("GET" if body is None else "POST", parts.path, body)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def config_of(admin: str) -> dict[str, object]:
    return json.loads(get(f"{admin}/v1/config")[1])["config"]


def test_it_prints_its_endpoints_and_a_line_that_works(up):
    assert up.lines[0].startswith("serving http://127.0.0.1:")
    assert get(f"{up.admin}/readyz")[0] == 200
    _, url, flag, body = shlex.split(up.lines[-1].split(maxsplit=1)[1])
    assert flag == "-d"
    status, answer = get(url, body)
    assert status == 200
    assert json.loads(answer)["outputs"][0]["data"] == json.loads(body)["inputs"][0]["data"]


def test_a_slo_alone_starts_a_tuner(up):
    assert config_of(up.admin)["policy"]["slo"] == {"latency": {"p99": "50ms"}}
    assert json.loads(get(f"{up.admin}/v1/explain")[1])["tuned"] is True


def test_sigint_drains_and_logs_are_json(launched, echo):
    with launched("--upstream", echo, "--slo-p99", "50ms") as started:
        started.process.send_signal(signal.SIGINT)
        _, log = started.process.communicate(timeout=60)
        assert started.process.returncode == 0
    events = [json.loads(line)["event"] for line in log.splitlines()]
    assert events[0] == "listening"
    assert events[-2:] == ["draining", "drained"]


def test_a_second_signal_ends_it_at_once(launched, echo):
    with launched("--upstream", echo, "--slo-p99", "50ms", "--set", "shutdown.lame=25s") as started:
        started.process.send_signal(signal.SIGINT)
        while '"draining"' not in started.process.stderr.readline():
            pass
        started.process.send_signal(signal.SIGINT)
        started.process.communicate(timeout=20)
        assert started.process.returncode == 4


def read_until(terminal: int, mark: bytes) -> bytes:
    """What comes until ``mark``, or all there is when the other side has gone."""
    seen = b""
    with contextlib.suppress(OSError):  # what Linux says when a terminal's other side is closed
        while mark not in seen and (more := os.read(terminal, 65536)):
            seen += more
    return seen


def test_on_a_terminal_there_is_a_view_and_at_the_end_the_last_of_it(echo):
    ours, theirs = pty.openpty()
    options = ("--upstream", echo, "--slo-p99", "50ms", "--port", "0", "--admin-port", "0")
    with subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "carpool_cli", "up", *options],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
    ) as process:
        os.close(theirs)
        assert b"no request yet; try" in read_until(ours, b"no request yet; try")
        process.send_signal(signal.SIGINT)
        left = read_until(ours, b"never").partition(b"\x1b[?1049l")[2].decode()
        assert process.wait(60) == 0
    os.close(ours)
    assert "goodput" in left
    assert left.rstrip().endswith("drained: all requests were answered")


def test_a_view_that_can_not_be_drawn_leaves_the_server_alone_and_is_reported_once(monkeypatch, capsys):
    left = [True] * 4

    class Running:
        lines = ()

        @property
        def runs(self) -> bool:
            return bool(left)

    def fails(*_: object, **__: object) -> None:
        left.pop()
        raise ValueError("closing tag '[/b]' \x1b")

    monkeypatch.setattr("carpool_cli.commands.up.watch", fails)
    monkeypatch.setattr("carpool_cli.commands.up.time.sleep", lambda _: None)
    _watch(Running(), None, "", None)
    assert not left
    said = capsys.readouterr().err
    assert said == "Error: the live view failed, and the sidecar serves on: ValueError: closing tag '[/b]' \\x1b\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_the_sidecar_does_not_outlive_it(number, launched, echo):
    with launched("--upstream", echo, "--slo-p99", "50ms") as started:
        pid = started.process.pid
        sidecar = os.pidfd_open(int(Path(f"/proc/{pid}/task/{pid}/children").read_text()))
        started.process.send_signal(number)
        assert select.select([sidecar], [], [], 60)[0]
        os.close(sidecar)


def test_a_sidecar_that_is_killed_is_reported(launched, echo):
    with launched("--upstream", echo, "--slo-p99", "50ms") as started:
        pid = started.process.pid
        os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text()), signal.SIGKILL)
        _, log = started.process.communicate(timeout=60)
        assert started.process.returncode == 128 + signal.SIGKILL
    assert log.endswith("Error: the sidecar was ended by SIGKILL; start it again\n")


def test_an_upstream_that_is_not_there_is_waited_for(launched):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with launched("--upstream", f"http://127.0.0.1:{port}", "--slo-p99", "50ms") as started:
            assert f"waiting for http://127.0.0.1:{port}: " in started.process.stdout.readline()
            assert started.lines[-1].split()[-1] == f"{started.admin}/readyz"
            assert get(f"{started.admin}/readyz")[0] == 503


def test_options_reach_the_sidecar(launched, echo):
    options = ("--axis", "standin=First", "--max-batch", 8, "--max-wait", "5ms", "--set", "policy.admission.timeout=2s")
    with launched("--upstream", echo, "--slo-p99", "40ms", *options) as started:
        policy = config_of(started.admin)["policy"]
    assert policy["bounds"]["maxBatch"] == {"max": 8}
    assert policy["bounds"]["maxWait"] == {"max": "5ms"}
    assert policy["models"] == [{"name": "standin", "axis": "First"}]
    assert policy["admission"]["timeout"] == "2s"


def test_targets_of_token_streams_reach_the_sidecar(launched, echo):
    with launched("--upstream", echo, "--slo-ttft-p99", "2s", "--slo-tpot-p99", "50ms") as started:
        assert config_of(started.admin)["policy"]["slo"] == {"ttft": {"p99": "2s"}, "tpot": {"p99": "50ms"}}


def test_fixed_parameters_are_not_tuned(launched, echo):
    options = ("--fixed", "--max-batch", 4, "--max-wait", "2ms")
    with launched("--upstream", echo, "--slo-p99", "50ms", *options) as started:
        document = json.loads(get(f"{started.admin}/v1/config")[1])
    assert document["tuned"] is False
    assert document["config"]["parameters"]["*"] == {
        "maxBatch": 4,
        "maxWait": "2ms",
        "maxInFlight": 1,
        "passThrough": False,
    }


def test_a_file_is_served_and_options_stand_over_it(launched, echo, tmp_path):
    config = tmp_path / "sidecar.yaml"
    config.write_text(
        f"upstream: {{url: '{echo}'}}\npolicy: {{slo: {{latency: {{p99: 80ms}}}}}}\nshutdown: {{lame: 0s}}\n"
    )
    with launched("--config", config) as started:
        assert config_of(started.admin)["policy"]["slo"] == {"latency": {"p99": "80ms"}}
    with launched("--config", config, "--slo-p99", "30ms") as started:
        found = config_of(started.admin)
    assert found["policy"]["slo"] == {"latency": {"p99": "30ms"}}
    assert found["upstream"]["url"] == echo


HERE = ("--upstream", "http://127.0.0.1:9", "--slo-p99", "50ms")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--slo-p99", "50ms"), "--model FILE, or --upstream"),
        (("--slo-p99", "50ms", "--model", "m.bin"), "name a .onnx or .gguf file"),
        (("--upstream", "http://127.0.0.1:9"), "--slo-p99 50ms"),
        (("--upstream", "http://127.0.0.1:9", "--slo-p99", "50"), "write e.g. 50ms"),
        (("--upstream", "http://127.0.0.1:9", "--slo-tpot-p99", "50ms"), "--slo-ttft-p99 2s --slo-tpot-p99 50ms"),
        ((*HERE, "--slo-tpot-p99", "50ms"), "(--slo-ttft-p99)"),
        (("--upstream", "127.0.0.1:9", "--slo-p99", "50ms"), "write http://host:port or unix:/path"),
        ((*HERE, "--onnx", "m.onnx"), "one of the two"),
        ((*HERE, "--model", "m"), "a server behind --upstream names its models itself"),
        ((*HERE, "--port", "7", "--admin-port", "7"), "7 is that of listen, too: name another port"),
        ((*HERE, "--max-wait", "60ms"), "(--max-wait)"),
        ((*HERE, "--axis", "First"), "MODEL=First"),
        (("--model", "m.onnx", "--slo-p99", "50ms", "--axis", "typo=First"), "the model that is served here is m"),
        ((*HERE, "--port", "9"), "is this sidecar's own data port (listen: 127.0.0.1:9)"),
        ((*HERE, "--admin-port", "9"), "is this sidecar's own admin port (admin: 127.0.0.1:9)"),
        ((*HERE, "--set", "policy.tuning.mod=Hold"), "unknown field `mod`"),
        ((*HERE, "--set", "policy"), "path and value"),
        ((*HERE, "--set", "x=&a [*a]"), "'x=&a [*a]': the value contains itself, or is nested too deeply"),
        ((*HERE, "--set", f"x={'[' * 100_000}"), "is nested too deeply"),
        (("--upstream", "http://127.0.0.1:9", "--slo-p99", "0s"), "'--slo-p99': '0s': has to be longer than 0s"),
        ((*HERE, "--set", "listen.port=1"), "set it whole"),
        (("--config", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_what_is_wrong_is_named_with_the_fix(options, says, carpool):
    result = carpool("up", *options)
    assert result.exit_code == 2
    assert says in result.output
    assert result.output.count("\n") == 1


def test_a_port_in_use_names_the_option(carpool, echo):
    port = urlsplit(echo).port
    data = carpool("up", *HERE, "--port", port, "--admin-port", 0)
    admin = carpool("up", *HERE, "--port", 0, "--admin-port", port)
    assert (data.exit_code, admin.exit_code) == (3, 3)
    assert f"port {port} on 127.0.0.1 is taken by another process: name another with --port" in data.output
    assert admin.output.strip().endswith("--admin-port")


def test_a_model_that_can_not_be_served_says_why(carpool, tmp_path):
    broken = tmp_path / "m.onnx"
    broken.write_bytes(b"no model")
    language = tmp_path / "m.gguf"
    language.write_bytes(b"no model")
    for path, says in (
        (broken, "can't be loaded"),
        (tmp_path / "none.onnx", "there is no file"),
        (language, "is no GGUF file that can be read"),
        (tmp_path / "none.gguf", "there is no file"),
    ):
        result = carpool("up", "--model", path, "--slo-p99", "50ms", "--port", 0, "--admin-port", 0)
        assert result.exit_code == 2
        assert says in result.output
        assert result.output.count("\n") == 1


def test_a_file_that_options_change_is_not_watched(launched, echo, tmp_path):
    config = tmp_path / "sidecar.yaml"
    config.write_text(f"upstream: {{url: '{echo}'}}\npolicy: {{slo: {{latency: {{p99: 80ms}}}}}}\n")
    with launched("--config", config, "--max-batch", 4) as started:
        assert any("not watched" in line for line in started.lines)
    with launched("--config", config, "--host", "::1") as started:
        assert not any("not watched" in line for line in started.lines)
        assert started.data.startswith("http://[::1]:")


def test_what_recommend_prints_is_served_with_an_upstream(launched, echo, tmp_path):
    config = tmp_path / "sidecar.yaml"
    config.write_text("policy: {slo: {latency: {p99: 80ms}}, baseline: {maxBatch: 12}}\n")
    with launched("--config", config, "--upstream", echo) as started:
        assert config_of(started.admin)["policy"]["baseline"]["maxBatch"] == 12


def test_a_wrong_file_is_named(carpool, tmp_path):
    config = tmp_path / "sidecar.yaml"
    for text, says in (
        ("policy: {slo: {latency: {p99: 50ms}}}\nlisten: nowhere", "listen: 'nowhere' is not host:port"),
        ("policy: {slo: {latency: {p99: 50ms}}, bounds: {maxWait: {max: 1m}}}", "policy.bounds.maxWait.max"),
        ("policy: {", "line 1"),
    ):
        config.write_text(text)
        result = carpool("up", "--config", config, "--upstream", "http://127.0.0.1:9")
        assert result.exit_code == 2
        assert result.output.startswith(f"Error: {config}: ")
        assert says in result.output
        assert result.output.count("\n") == 1


def test_a_hint_names_the_option_where_there_is_one():
    assert hint("upstream.url: wrong") == "upstream.url: wrong (--upstream)"
    assert hint("bodies: wrong") == "bodies: wrong"
