"""The answers to the ten questions in CONTRIBUTING.md exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_answer_is_a_file():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.partition("Ten questions")[2].partition("\n## ")[0]
    files = re.findall(r"`([a-z0-9_]+/[^`]+\.py)`", section)
    assert len(files) >= 10
    assert [name for name in files if not (ROOT / name).is_file()] == []
