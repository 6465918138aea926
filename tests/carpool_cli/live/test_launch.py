from __future__ import annotations

from pathlib import Path

import pytest

from carpool_cli.live.launch import Child, LaunchError, event_of, explained, readable

PATH = Path("/tmp/carpool-x/sidecar.json")  # noqa: S108 - a name, nothing is written there


BIND = "carpool-sidecar: listen: {}:{}: {}: name another address, in the file or with --listen"


@pytest.mark.parametrize(
    ("host", "port", "why", "says"),
    [
        ("127.0.0.1", 9090, "address already in use", "port 9090 on 127.0.0.1 is taken by another process: name anoth"),
        ("127.0.0.1", 80, "[errno 13] permission denied", "name one from 1024 on with --port"),
        (
            "8.8.8.8",
            8080,
            "cannot assign requested address",
            "8.8.8.8 is no address of this machine: name one with",
        ),
    ],
)
def test_an_address_that_can_not_be_had_is_explained(host, port, why, says):
    assert says in explained(BIND.format(host, port, why), PATH, {8080: "--port", 9090: "--admin-port"})


def test_the_option_of_the_port_is_named():
    line = BIND.format("127.0.0.1", 9090, "address already in use")
    assert explained(line, PATH, {8080: "--port", 9090: "--admin-port"}).endswith("--admin-port")


def test_an_unknown_host_is_explained():
    line = BIND.format("nowhere", 8080, "Name or service not known")
    assert "the host nowhere is not known here" in explained(line, PATH, {})


def test_the_file_that_nobody_wrote_is_left_out():
    assert explained(f"{PATH}: onnx.path: there is no file m", PATH, {}) == "onnx.path: there is no file m"


def test_a_line_of_the_log_reads_like_one():
    line = '{"time":"2026-11-21T12:37:40.676+00:00","level":"info","event":"listening","data":"127.0.0.1:1"}'
    assert readable(line) == "12:37:40 info     listening  data=127.0.0.1:1"
    assert readable("Traceback") == "Traceback"
    assert readable('{"event":"refused","path":"/\\u001b[31m"}').endswith(r"refused  path=/\x1b[31m")
    assert event_of("[1]") == {}


def test_a_child_that_can_not_start_says_its_last_words():
    child = Child(["--config", "/nowhere.yaml"], log=pytest.fail)
    with pytest.raises(LaunchError, match=r"nowhere\.yaml") as raised:
        child.wait_until_listening()
    assert raised.value.code == 2
    assert not child.runs
