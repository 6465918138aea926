from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from carpool_sidecar.http1 import bodies


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("http1_fuzz", Path(__file__).with_name("fuzz.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_damaged_streams_are_refused_or_served_as_they_stand(fuzz):
    assert set(await fuzz.rounds(iterations=2_000, seed=1)) == {"refused", "served", "unfinished"}


async def test_a_reader_that_overlooks_junk_behind_a_chunk_size_is_found_out(fuzz, monkeypatch, capsys):
    monkeypatch.setattr(bodies, "_CHUNK_SIZE", re.compile(rb"([0-9A-Fa-f]{1,15}).*"))
    with pytest.raises(AssertionError):
        await fuzz.rounds(iterations=20_000, seed=1)
    assert "replay: one_round" in capsys.readouterr().err
