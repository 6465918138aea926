"""Test folders are no packages: make the messages of V2, which two files share, importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
