from __future__ import annotations

import json
import sys
from collections import Counter

import pytest
from neighbours import __main__ as command
from neighbours.catalogue import NEIGHBOURS
from neighbours.trials import Seen

GOOD = Seen(Counter(ok=100), [0.001 * index for index in range(1, 101)], {"200": 7}, 9.0, 0.1, 0.002, 40.0)


@pytest.fixture
def main(tmp_path, monkeypatch):
    """The command, with trials whose outcome is known and results in a folder of the test."""
    played = []

    async def alone(neighbour, seconds):
        return GOOD

    async def behind_sidecar(neighbour, seconds):
        played.append((neighbour.name, seconds))
        return run.seen(neighbour) if callable(run.seen) else run.seen

    monkeypatch.setattr(command.trials, "alone", alone)
    monkeypatch.setattr(command.trials, "behind_sidecar", behind_sidecar)
    monkeypatch.setattr(command.virtual, "play", lambda name: None)
    monkeypatch.setattr(command, "RESULTS", tmp_path / "neighbours.json")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["neighbours", *arguments])
        return command.main()

    run.seen, run.played, run.results = GOOD, played, tmp_path / "neighbours.json"
    return run


def test_a_whole_run_plays_everybody_and_is_kept(main, capsys):
    assert main() == 0
    assert main.played == [(neighbour.name, 10.0) for neighbour in NEIGHBOURS]
    kept = json.loads(main.results.read_bytes())
    assert [row["name"] for row in kept["rows"]] == [neighbour.name for neighbour in NEIGHBOURS]
    assert kept["violations"] == []
    shown = capsys.readouterr()
    assert all(neighbour.name in shown.out for neighbour in NEIGHBOURS)
    assert "none: nobody" in shown.err


def test_a_part_is_kept_only_where_asked_to(main, tmp_path):
    assert main("--only", "flood", "--only", "streams", "--seconds", "2") == 0
    assert main.played == [("streams", 2.0), ("flood", 2.0)]
    assert not main.results.exists()
    assert main("--only", "flood", "--results", str(tmp_path / "part.json")) == 0
    assert (tmp_path / "part.json").exists()


def test_a_violation_is_the_exit_code_and_printed(main, capsys):
    main.seen = GOOD._replace(outcomes=Counter(ok=99, wrong=1))
    assert main("--only", "flood") == 1
    assert "*** BEYOND ITS LIMIT flood: 1 wrong answers" in capsys.readouterr().out
    assert len(main.played) == 1


def test_cpu_time_alone_is_tried_again(main):
    delays = iter([0.2, 0.3, 0.001])
    main.seen = lambda _: GOOD._replace(livez_cpu=next(delays))
    assert main("--only", "flood") == 0
    main.seen = GOOD._replace(livez_cpu=0.2)
    main.played.clear()
    assert main("--only", "flood") == 1
    assert len(main.played) == 3


def test_the_list_and_an_unknown_name(main, capsys):
    assert main("--list") == 0
    assert "slow-loris" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main("--only", "nobody")
    assert "no neighbour 'nobody'" in capsys.readouterr().err
    assert not main.played


def test_an_interrupted_run_writes_nothing(main):
    def interrupted(_):
        raise KeyboardInterrupt

    main.seen = interrupted
    assert main() == 130
    assert not main.results.exists()
