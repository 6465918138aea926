"""The model behind the engines takes the time that the rest of the project says a device takes."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import profiled_model
import pytest
from profiled_model import POISON, Model, ServiceTime

from carpool_cli.profiling import device_profile

PROFILES = sorted((Path(__file__).parents[2] / "benchmarks" / "profiles").glob("*.json"))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_times_are_those_of_the_stand_in(path):
    ours = ServiceTime(json.loads(path.read_text()))
    theirs = device_profile.load(path).service_time()
    for rows in (1, 2, 3, 5, 8, 13, 16, 31, 32):
        assert ours.mean(rows) == pytest.approx(theirs.time(rows))


def test_lines_go_on_beyond_the_sizes_given():
    time = ServiceTime({"rows": [2, 4], "seconds": [0.010, 0.014]})
    assert [time.mean(rows) for rows in (1, 2, 3, 4, 8)] == pytest.approx([0.008, 0.010, 0.012, 0.014, 0.022])
    assert ServiceTime({"rows": [4], "seconds": [0.01]}).mean(9) == 0.01


def test_noise_has_the_profiles_spread():
    rng = random.Random(1)
    time = ServiceTime({"rows": [1, 9], "seconds": [0.010, 0.018], "cv": 0.1})
    seen = [time.draw(1, rng) for _ in range(4000)]
    assert statistics.mean(seen) == pytest.approx(0.010, rel=0.01)
    assert statistics.stdev(seen) == pytest.approx(0.001, rel=0.1)


def test_a_device_that_serves_several_batches_at_once_is_not_played():
    with pytest.raises(ValueError, match="one batch"):
        ServiceTime({"rows": [1], "seconds": [1.0], "executors": 2})


@pytest.fixture
def model(tmp_path, monkeypatch):
    profile = tmp_path / "profile.json"
    profile.write_text('{"rows": [1, 2], "seconds": [0.25, 0.5]}')
    slept = []
    monkeypatch.setattr(profiled_model.time, "sleep", slept.append)
    return Model(profile, tmp_path), slept, tmp_path / "batches"


def test_a_batch_takes_its_time_and_leaves_a_line(model):
    serve, slept, batches = model
    serve([[1.0, 0.5], [2.0, 0.5]])
    serve([[3.0, 0.5]])
    assert slept == [0.5, 0.25]
    assert [line.split()[0] for line in batches.read_text().splitlines()] == ["2", "1"]


def test_a_poisoned_row_fails_its_whole_batch_after_its_time(model):
    serve, slept, batches = model
    with pytest.raises(ValueError, match="failed on this input"):
        serve([[1.0, 0.5], [2.0, POISON]])
    assert slept == [0.5]
    assert batches.read_text().startswith("2 ")
