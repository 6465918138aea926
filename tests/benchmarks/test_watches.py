from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CODE = """
import asyncio, sys, watches
from pathlib import Path
watches.RESULTS = Path(sys.argv[1])
asyncio.run(watches.main())
"""


@pytest.mark.real
def test_both_ways_see_every_pod_and_its_change(tmp_path):
    results = tmp_path / "watches.json"
    subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", CODE, str(results)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
        check=True,
    )
    ways = json.loads(results.read_text())["ways"]
    assert set(ways) == {"own watch", "kopf"}
    assert all(way["cpu_seconds"] > 0 for way in ways.values())
