"""`openai`'s client, unchanged, in front of a sidecar with a gate: in an environment of its own, for its weight."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PYTHON = Path(os.environ.get("CARPOOL_OPENAI", Path.home() / ".cache" / "carpool" / "openai")) / "bin" / "python"


def test_the_client_streams_is_refused_and_leaves(gated):
    run("openai_client.py", gated)


def test_the_client_uploads_a_file_and_has_it_answered(keeping_jobs):
    run("openai_batches.py", keeping_jobs)


def run(name, served):
    command = [PYTHON, Path(__file__).parent / name, f"http://{served.data}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)  # noqa: S603 - our own
    assert ran.returncode == 0, ran.stderr
