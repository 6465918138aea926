from __future__ import annotations

import sys
from types import SimpleNamespace

import msgspec
import pytest
from generation import __main__ as command
from generation.figures import Played, Row
from generation.world import World, scenarios
from msgspec.structs import replace
from proof import kept

BEFORE = b"the record of a whole run"


class Here:
    """A pool that works in this process."""

    map = staticmethod(map)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def played_row(world):
    one = Played(9.0, 9.0, 0.0, 0.1, 1.0, 0.02, 0.05, 0, None)
    return Row(
        world.scenario.name, world.seed, 8.0, 10.0, dict.fromkeys(("carpool", "best cap", "no gate"), one), 64, 1
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The command with two scenarios, a record of before, and what was played of each."""
    one, other, *_ = (each for each in scenarios() if not each.family)
    world = SimpleNamespace(scenarios=[one, other], fails_at=None, played=[])

    def row(built):
        if len(world.played) == world.fails_at:
            raise KeyboardInterrupt
        world.played.append((built.scenario.name, built.seed))
        return played_row(built)

    monkeypatch.setattr(command, "RESULTS", tmp_path / "generation.json")
    monkeypatch.setattr(command, "FOLDER", tmp_path / "stored")
    monkeypatch.setattr(command, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(command, "scenarios", lambda: world.scenarios)
    monkeypatch.setattr(command, "build", lambda each, seed: World(each, None, SimpleNamespace(rate=1.0), seed))
    monkeypatch.setattr(command, "row", row)
    monkeypatch.setattr(command, "_everywhere", lambda: b"code and data")
    monkeypatch.setattr(command.report, "main", lambda *_, **__: 0)
    command.RESULTS.write_bytes(BEFORE)

    def main(*arguments):
        world.played.clear()
        monkeypatch.setattr(sys, "argv", ["generation", *arguments])
        return command.main()

    world.main = main
    return world


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "typo"], "choose from"),
        (["--scenario", "typo", "--write"], "choose from"),
        (["--quick", "--write"], "whole runs only"),
        (["--seed", "7", "--write"], "whole runs only"),
        (["--quick", "--gate"], "whole runs only"),
    ],
)
def test_an_unknown_scenario_or_a_part_to_be_kept_is_an_error(run, capsys, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        run.main(*arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err
    assert command.RESULTS.read_bytes() == BEFORE


def test_a_scenario_is_not_written_with_others_left_out(run):
    with pytest.raises(SystemExit):
        run.main("--write", "--scenario", run.scenarios[0].name)


def test_an_interrupted_run_leaves_the_record_and_goes_on_where_it_was(run):
    run.fails_at = 3
    with pytest.raises(KeyboardInterrupt):
        run.main("--write")
    assert command.RESULTS.read_bytes() == BEFORE
    first, run.fails_at = [*run.played], None
    run.main("--write")
    assert len(first) == 3
    assert len(run.played) == 1
    names = {each.name for each in run.scenarios}
    assert {*first, *run.played} == {(name, seed) for name in names for seed in command.SEEDS}
    record = msgspec.json.decode(command.RESULTS.read_bytes(), type=command.Record)
    assert len(record.rows) == 4
    run.main("--write", "--anew")
    assert len(run.played) == 4


def test_a_row_is_played_again_when_its_scenario_or_the_code_has_changed(run, monkeypatch):
    run.main()
    run.scenarios[0] = replace(run.scenarios[0], noise=0.3)
    run.main()
    assert run.played == [(run.scenarios[0].name, seed) for seed in command.SEEDS]
    monkeypatch.setattr(command, "_everywhere", lambda: b"other code")
    run.main()
    assert len(run.played) == 4


def test_the_code_of_gate_rules_and_engine_counts():
    names = {path.name for path in kept.reached("generation.figures", "generation.world")}
    assert {"figures.py", "world.py", "rivals.py", "bound.py", "gate.py", "engine.py", "loads.py"} <= names
