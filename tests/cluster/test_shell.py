"""`make cluster`: everything is there for the command, and gone after it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from minicluster.cluster import network_restored


@contextmanager
def opened(cluster, tmp_path, *words):
    """Open another cluster beside the session's, from outside of it, its state below ``tmp_path``."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-m", "minicluster", *words]
    with (
        network_restored(),
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as made,  # noqa: S603 - our own
    ):
        try:
            yield made
        finally:
            made.kill()


def test_a_command_runs_inside_and_its_code_comes_out(cluster, tmp_path):
    command = "kubectl get nodes -o name && cluster-load --help >&2 && exit 7"
    with opened(cluster, tmp_path, "--no-chart", "sh", "-c", command) as made:
        said, errors = made.communicate(timeout=240)

    assert said == "node/node-1\n", errors
    assert made.returncode == 7
    assert not list(tmp_path.iterdir())


def test_load_in_the_background_ends_with_the_cluster(cluster, tmp_path):
    with opened(cluster, tmp_path, "--no-chart", "sh", "-c", "cluster-load m 5 >&2 & sleep 3") as made:
        _, errors = made.communicate(timeout=240)  # returns once nobody holds its output: the load, too

    assert made.returncode == 0, errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_the_command_and_the_cluster(cluster, tmp_path, number):
    with opened(cluster, tmp_path, "--no-chart", "sh", "-c", "echo here; exec sleep 1000") as made:
        assert made.stdout.readline() == "here\n"
        made.send_signal(number)
        _, errors = made.communicate(timeout=120)

    assert made.returncode == 128 + number, errors
    assert not list(tmp_path.iterdir())


def test_without_a_command_it_says_what_can_be_done_and_opens_a_shell(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/true")
    with opened(cluster, tmp_path, "--no-chart") as made:
        _, errors = made.communicate(timeout=240)

    assert made.returncode == 0, errors
    assert "carpool.dev/slo-p99" in errors
