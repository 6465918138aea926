from __future__ import annotations

import sys

import compiled
import msgspec
import pytest
import run
from evidence import Figure, Limit, Results, Skipped


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """The command with two benchmarks, and nginx is there for the second or not."""
    there = {"nginx": True}

    def second(_):
        if not there["nginx"]:
            raise Skipped("nginx is not installed (Debian: apt-get install nginx-core)")
        return [Figure("second", 2.0, 1)]

    limits = [Limit(name, 9.0, "us", "at most", "why") for name in ("first", "second")]
    (tmp_path / "limits.json").write_bytes(msgspec.json.encode(limits))
    monkeypatch.setattr(run, "BENCHMARKS", {"first": lambda _: [Figure("first", 1.0, 1)], "second": second})
    monkeypatch.setattr(run, "LIMITS", tmp_path / "limits.json")
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results" / "bench.json")
    monkeypatch.setattr(compiled, "is_used", lambda: True)

    def main(*arguments, nginx=True):
        there["nginx"] = nginx
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
        return run.main()

    return main


def test_a_whole_run_is_kept_with_how_it_was_measured(bench):
    assert bench() == 0
    kept = msgspec.json.decode(run.RESULTS.read_bytes(), type=Results)
    assert [figure.name for figure in kept.figures] == ["first", "second"]
    assert kept.compiled


def test_what_can_not_be_measured_now_does_not_replace_what_was(bench, capsys):
    bench()
    before = run.RESULTS.read_bytes()
    assert bench(nginx=False) == 1
    assert run.RESULTS.read_bytes() == before
    said = capsys.readouterr().out
    assert "has figures that this run lacks: second" in said
    assert "apt-get install nginx-core" in said
    assert bench("first", "--results", str(run.RESULTS)) == 1
    assert run.RESULTS.read_bytes() == before


def test_a_first_record_says_what_it_lacks(bench):
    assert bench(nginx=False) == 0
    assert "second" in msgspec.json.decode(run.RESULTS.read_bytes(), type=Results).skipped


def test_the_checkout_is_measured_for_nobody_s_record(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "is_used", lambda: False)
    assert bench("--interpreted") == 0
    assert not run.RESULTS.exists()
    assert bench("--interpreted", "--results", str(tmp_path / "own.json")) == 0
    assert msgspec.json.decode((tmp_path / "own.json").read_bytes(), type=Results).compiled is False


def test_without_a_compiler_nothing_is_measured(bench, monkeypatch):
    def wheel():
        raise compiled.NotCompiledError("apt-get install gcc python3-dev")

    monkeypatch.setattr(compiled, "is_used", lambda: False)
    monkeypatch.setattr(compiled, "wheel", wheel)
    with pytest.raises(SystemExit, match=r"(?s)apt-get install gcc.*--interpreted"):
        bench()
    assert not run.RESULTS.exists()
