from __future__ import annotations

import sys

import compiled
import pytest
from proof import __main__ as command
from proof import kept, report, verdict
from tiny import proof


class Run:
    """Stands for hours of work: what came of it is known."""

    came_of_it = proof()
    interrupted = False
    compiled = 0

    def __init__(self, scenarios, contenders, seed, jobs, *, brief):
        self.asked = scenarios, contenders, seed, jobs

    def compile(self):
        type(self).compiled += 1

    def play(self):
        if self.interrupted:
            raise KeyboardInterrupt

    def proof(self, measured, line, seconds, left_out):
        return self.came_of_it


@pytest.fixture
def main(tmp_path, monkeypatch):
    """The command, with results, page and limits in a folder of the test."""
    monkeypatch.setattr(command, "Run", Run)
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")
    for name, path in (("RESULTS", tmp_path), ("IMAGES", tmp_path), ("PAGE", tmp_path / "proof.md")):
        monkeypatch.setattr(report, name, path)
    reached, missed = tmp_path / "limits.json", tmp_path / "limits_quick.json"
    limit = '[{"name": "saving, worst", "value": %s, "unit": "x", "direction": "at least", "why": "why"}]'
    reached.write_text(limit % 0.7)
    missed.write_text(limit % 0.8)
    monkeypatch.setattr(verdict, "LIMITS", reached)
    monkeypatch.setattr(verdict, "QUICK_LIMITS", missed)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["proof", *arguments])
        return command.main()

    return run


def test_limits_that_are_kept_are_no_failure(main, tmp_path):
    assert main() == 0
    assert not (tmp_path / "proof.json").exists()


def test_a_limit_that_is_missed_is_one(main, capsys):
    assert main("--quick") == 1
    assert "*** BEYOND ITS LIMIT saving, worst: 0.75, at least 0.8 x. why ***" in capsys.readouterr().out


def test_a_part_is_not_judged(main, tmp_path):
    (tmp_path / "limits.json").write_text((tmp_path / "limits_quick.json").read_text())
    assert main() == 1
    assert main("--scenario", "synthetic-1-executor") == 0


def test_results_are_kept_with_the_page(main, tmp_path):
    assert main("--write") == 0
    assert (tmp_path / "proof.json").exists()
    assert "| saving" not in (tmp_path / "proof.md").read_text()
    assert main("--check-report") == 0


def test_anew_forgets_what_is_known(main, tmp_path):
    (tmp_path / "kept").mkdir()
    known = tmp_path / "kept" / "some.msgpack"
    known.write_bytes(b"")
    assert main() == 0
    assert known.exists()
    assert main("--anew") == 0
    assert not known.exists()


@pytest.mark.parametrize(
    ("arguments", "times"),
    [([], 1), (["--quick"], 0), (["--interpreted"], 0), (["--scenario", "synthetic-1-executor"], 0)],
)
def test_machine_code_is_made_where_it_pays(main, monkeypatch, arguments, times):
    monkeypatch.setattr(Run, "compiled", 0)
    main(*arguments)
    assert Run.compiled == times


def test_who_has_no_machine_code_plays_all_the_same(monkeypatch, capsys):
    def refused():
        raise compiled.NotCompiledError("no compiler")

    monkeypatch.setattr(compiled, "folder", refused)
    command.Run([], (), 1, 1, brief=False).compile()
    assert "at half the speed: no compiler" in capsys.readouterr().err


def test_another_seed_has_a_file_of_its_own(main, tmp_path):
    assert main("--write", "--seed", "7") == 0
    assert (tmp_path / "proof-seed-7.json").exists()
    assert not (tmp_path / "proof.json").exists()


def test_who_interrupts_finds_nothing_half_written(main, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Run, "interrupted", True)
    before = sorted(tmp_path.iterdir())
    assert main("--write") == 130
    assert sorted(tmp_path.iterdir()) == before
    assert "nothing was written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "nope"], "no scenario 'nope': there are "),
        (["--contender", "nope"], "invalid choice: 'nope'"),
        (["--write", "--quick"], "--write keeps all of it"),
        (["--quick", "--scenario", "tiles-32"], "--quick has scenarios and contenders of its own"),
        (["--report", "--seed", "7"], "play nothing: give one of them, alone"),
        (["--report", "--anew"], "play nothing: give one of them, alone"),
        (["--report", "--interpreted"], "play nothing: give one of them, alone"),
        (["--report", "--check-report"], "play nothing: give one of them, alone"),
        (["--jobs", "0"], "0 is below 1"),
        (["--seed", "-1"], "-1 is below 0"),
        (["--seed", "x"], "invalid int value: 'x'"),
    ],
)
def test_mistakes_are_named(main, capsys, arguments, words):
    with pytest.raises(SystemExit):
        main(*arguments)
    assert words in capsys.readouterr().err
