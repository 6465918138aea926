from __future__ import annotations

import importlib.util
from pathlib import Path


def test_damaged_bodies_are_forwarded_or_shared_out():
    spec = importlib.util.spec_from_file_location("protocols_fuzz", Path(__file__).with_name("fuzz.py"))
    assert spec is not None
    assert spec.loader is not None
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    outcomes = fuzz.main(iterations=3_000, seed=1)
    assert set(outcomes) >= {"unread", "alone", "shared"}
