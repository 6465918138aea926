from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "images"), str(ROOT / "tests/packaging")]
sys.path.append(str(ROOT / "tests/carpool_sidecar/capture"))
