from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("openvino_genai", reason="the extra llm is not installed")


@pytest.mark.real
def test_it_overloads_an_engine_twice_and_draws_it(tmp_path):
    command = [sys.executable, "-m", "carpool_cli.demo.generative", "--seconds", "2", "--size", "tiny"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=300, check=False)  # noqa: S603 - ours
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no gate" in done.stdout
    assert "good answers/s" in done.stdout
    assert (tmp_path / "generative.png").read_bytes().startswith(b"\x89PNG")
