from __future__ import annotations

import shutil

import click
import pytest

from carpool_cli.batch.journal import Journal


def write(journal, *, rows, done):
    """Append rows in turn; ``done(step)`` is called between all steps."""
    for row in rows:
        done()
        journal.append(b"%d\n" % row, b"" if row % 3 else b"bad %d\n" % row)
        done()
        journal.commit(position=row, number=row, answered=row, skipped=row // 3)
    done()
    journal.finish(None)
    done()


def test_from_every_moment_a_rerun_ends_the_same(tmp_path):
    first = tmp_path / "0"
    first.mkdir()
    moments = []

    def snapshot():
        moments.append(tmp_path / f"{len(moments) + 1}")
        journal._part.closed or journal._part.flush()
        shutil.copytree(first, moments[-1])

    with Journal(first / "out", "job") as journal:
        write(journal, rows=range(1, 8), done=snapshot)
    for moment in moments[:-1]:
        with Journal(moment / "out", "job") as journal:
            assert not journal.progress.complete
            write(journal, rows=range(journal.progress.position + 1, 8), done=lambda: None)
    for moment in [first, *moments]:
        assert (moment / "out").read_bytes() == b"".join(b"%d\n" % row for row in range(1, 8))
        assert (moment / "out.errors.jsonl").read_bytes() == b"bad 3\nbad 6\n"
        assert not (moment / "out.checkpoint").exists()


def test_where_nothing_was_done_nothing_is_left(tmp_path):
    with Journal(tmp_path / "out", "job") as journal:
        journal.append(b"1\n", b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("renamed", [True, False])
def test_killed_between_the_last_steps_it_completes(tmp_path, renamed, monkeypatch):
    output = tmp_path / "out"
    with Journal(output, "job") as journal:
        journal.append(b"1\n", b"")
        journal.commit(position=1, number=1, answered=1, skipped=0)
        monkeypatch.setattr(Journal, "complete", lambda self, assemble: None)  # as if killed here
        journal.finish(None)
    monkeypatch.undo()
    if renamed:
        journal.part.replace(output)
    with Journal(output, "job") as journal:
        assert journal.progress.complete
        journal.complete(None)
    assert output.read_bytes() == b"1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_jobs_progress_is_refused(tmp_path):
    with Journal(tmp_path / "out", "one") as journal:
        journal.commit(position=1, number=1, answered=0, skipped=0)
    with pytest.raises(click.ClickException, match="another job"), Journal(tmp_path / "out", "two"):
        pass


@pytest.mark.parametrize("name", ["out.part", "out.errors.jsonl"])
@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"a")])
def test_a_file_that_is_gone_or_shorter_is_never_filled_up(tmp_path, name, damage):
    with Journal(tmp_path / "out", "job") as journal:
        journal.append(b"answer", b"error")
        journal.commit(position=1, number=1, answered=1, skipped=0)
    damage(tmp_path / name)
    for _ in range(2):
        with pytest.raises(click.ClickException, match=rf"{name} is gone or shorter"), Journal(tmp_path / "out", "job"):
            pass
    (tmp_path / "out.checkpoint").unlink()
    with Journal(tmp_path / "out", "job") as journal:
        assert not journal.resumed
        journal.append(b"anew", b"")
        journal.commit(position=1, number=1, answered=1, skipped=0)
        journal.finish(None)
    assert (tmp_path / "out").read_bytes() == b"anew"


def test_two_runs_at_once_are_refused(tmp_path):
    with (
        Journal(tmp_path / "out", "job"),
        pytest.raises(click.ClickException, match="another run"),
        Journal(tmp_path / "out", "job"),
    ):
        pass


def test_a_broken_checkpoint_says_so(tmp_path):
    (tmp_path / "out.checkpoint").write_text("{")
    with pytest.raises(click.ClickException, match="is no checkpoint"), Journal(tmp_path / "out", "job"):
        pass
