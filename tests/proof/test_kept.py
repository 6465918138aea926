from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from proof import experiments, kept, oracle
from tiny_world import SCENARIO, SEED, small  # noqa: F401 - a fixture

from carpool.policy.durations import Duration


@pytest.fixture(scope="module")
def played():
    """What oracle and zero-wait come to, played once."""
    reference = experiments.refer(SCENARIO, SEED)
    return reference, experiments.contend(SCENARIO, reference, "greedy", SEED)


@pytest.fixture
def plays(played, tmp_path, monkeypatch):
    """The contenders that were played, in a folder with nothing kept."""
    asked = []

    def refer(scenario, seed):
        asked.append(("oracle", scenario.slo, seed))
        return played[0]

    def contend(scenario, reference, name, seed):
        asked.append((name, scenario.slo, seed))
        return played[1]

    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")
    monkeypatch.setattr(experiments, "refer", refer)
    monkeypatch.setattr(experiments, "contend", contend)
    return asked


def test_what_was_played_is_played_once(played, plays):
    assert not kept.has("greedy", SCENARIO, SEED)
    for _ in range(2):
        assert kept.refer(SCENARIO, SEED) == played[0]
        assert kept.contend(SCENARIO, played[0], "greedy", SEED) == played[1]
    assert [name for name, *_ in plays] == ["oracle", "greedy"]
    assert kept.has("greedy", SCENARIO, SEED)


def test_carpool_is_what_changes(played, plays):
    for _ in range(2):
        kept.contend(SCENARIO, played[0], "carpool", SEED)
    assert [name for name, *_ in plays] == ["carpool", "carpool"]
    assert not kept.has("carpool", SCENARIO, SEED)


def test_a_row_is_played_again_when_anything_that_decides_it_changes(played, plays, monkeypatch):
    kept.contend(SCENARIO, played[0], "greedy", SEED)
    kept.contend(SCENARIO, played[0], "aimd", SEED)
    kept.contend(SCENARIO, played[0], "greedy", SEED + 1)
    kept.contend(replace(SCENARIO, slo=Duration(0.04)), played[0], "greedy", SEED)
    assert len(plays) == 4
    entry = oracle.known()["tiny"]
    with monkeypatch.context() as other:
        other.setattr(oracle, "known", lambda: {"tiny": replace(entry, capacity=500.0)})
        kept.contend(SCENARIO, played[0], "greedy", SEED)
        other.setattr(oracle, "known", lambda: {"tiny": replace(entry, commit="c0ffee", date="2026-11-29")})
        kept.contend(SCENARIO, played[0], "greedy", SEED)
    assert len(plays) == 5
    monkeypatch.setattr(kept, "_sources", lambda: b"another Batcher")
    kept.contend(SCENARIO, played[0], "greedy", SEED)
    assert len(plays) == 6


def test_half_a_file_is_none(played, plays):
    kept.contend(SCENARIO, played[0], "greedy", SEED)
    (path,) = kept.FOLDER.glob("*")
    path.write_bytes(path.read_bytes()[:100])
    assert kept.contend(SCENARIO, played[0], "greedy", SEED) == played[1]
    assert len(plays) == 2


def test_where_nothing_can_be_written_all_is_played(played, plays, monkeypatch):
    monkeypatch.setattr(kept, "FOLDER", Path("/proc/nowhere"))
    assert kept.contend(SCENARIO, played[0], "greedy", SEED) == played[1]
    assert len(plays) == 1


def test_what_may_only_be_read_is_used(played, plays, monkeypatch):
    kept.contend(SCENARIO, played[0], "greedy", SEED)

    def refused(*arguments, **options):
        raise PermissionError

    monkeypatch.setattr(Path, "touch", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    assert kept.contend(SCENARIO, played[0], "greedy", SEED) == played[1]
    kept.forget(unused=0.0)
    assert len(plays) == 1


def test_what_nobody_asks_for_is_deleted_in_time(played, plays):
    kept.contend(SCENARIO, played[0], "greedy", SEED)
    kept.forget()
    assert kept.has("greedy", SCENARIO, SEED)
    kept.forget(unused=0.0)
    assert not kept.has("greedy", SCENARIO, SEED)


def test_all_code_that_decides_a_row_counts_and_the_tuner_does_not():
    core = {path.stem for path in kept.reached(*kept.MODULES) if path.parents[1].name == "carpool"}
    assert {"batcher", "model_state", "simulator", "latency_model", "requests"} <= core
    assert not {"tuner", "objective", "forecaster", "load", "exploration"} & core
    # And nothing else of the project is imported by it, by whatever way.
    root = kept.HERE.parent
    code = f"import sys\nfor name in {kept.MODULES!r}: __import__(name)\n"
    code += "print(*(each.__file__ for each in sys.modules.values() if getattr(each, '__file__', None)), sep='\\n')"
    ran = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True, check=True
    )
    loaded = {path for line in ran.stdout.splitlines() if root in (path := Path(line)).parents and ".venv" not in line}
    assert loaded <= kept.reached(*kept.MODULES)
    assert len(loaded) > 20
