"""`kserve`'s inference client, unchanged, in front of a sidecar: in an environment of its own, for its weight."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PYTHON = Path(os.environ.get("CARPOOL_KSERVE", Path.home() / ".cache" / "carpool" / "kserve")) / "bin" / "python"


def test_the_client_gets_its_answers(served):
    script = Path(__file__).parent / "kserve_client.py"
    command = [PYTHON, script, f"http://{served.data}", "standin"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)  # noqa: S603 - our own
    assert ran.returncode == 0, ran.stderr
