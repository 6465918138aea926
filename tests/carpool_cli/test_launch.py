from __future__ import annotations

from pathlib import Path

import pytest

from carpool_cli.launch import Child, LaunchError, event_of, explained, readable

PATH = Path("/tmp/carpool-x/sidecar.json")  # noqa: S108 - a name, nothing is written there


def test_a_port_in_use_is_explained():
    line = (
        "carpool-sidecar: [Errno 98] error while attempting to bind on address ('127.0.0.1', 8080): "
        "address already in use"
    )
    said = "port 8080 on 127.0.0.1 is taken by another process: name another with --port"
    assert explained(line, PATH, {8080: "--port", 9090: "--admin-port"}) == said


def test_the_file_that_nobody_wrote_is_left_out():
    assert explained(f"{PATH}: onnx.path: there is no file m", PATH, {}) == "onnx.path: there is no file m"


def test_a_line_of_the_log_reads_like_one():
    line = '{"time":"2026-11-21T12:37:40.676+00:00","level":"info","event":"listening","data":"127.0.0.1:1"}'
    assert readable(line) == "12:37:40 info     listening  data=127.0.0.1:1"
    assert readable("Traceback") == "Traceback"
    assert event_of("[1]") == {}


def test_a_child_that_can_not_start_says_its_last_words():
    child = Child(["--config", "/nowhere.yaml"], log=pytest.fail)
    with pytest.raises(LaunchError, match=r"nowhere\.yaml") as raised:
        child.wait_until_listening()
    assert raised.value.code == 3
    assert not child.runs
