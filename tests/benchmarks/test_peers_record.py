from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from evidence import Machine
from peers.results import Peer, Setting, Tried, load

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def setting(name):
    return Setting(name=name, settings={}, trials=[], cancels=None, poison=None)


def peer(*names, failed="", points=(), date="then"):
    return Peer(
        engine="mosec", title="mosec", default="one", commit="c0ffee", date=date,
        machine=Machine("cpu", 2, "Linux", "3.11"), command="python benchmarks/peers mosec", versions={}, profile="p",
        slo=0.1, rates=[60.0], settings=[setting(name) for name in names], failed=failed,
        tried=[Tried(settings={"wait": 1}, good_shares=[], device_ms=[], stalled=0, failed=why) for why in points],
    )  # fmt: skip


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """The command, one run after the other: its exit code and what is kept then."""
    spec = importlib.util.spec_from_file_location("peers_main", BENCHMARKS / "peers" / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)

    def run(found, *arguments):
        monkeypatch.setattr(module.Campaign, "run", lambda _: found)
        code = module.main(["mosec", "--results", str(tmp_path), *arguments])
        return code, load(tmp_path / "mosec.json")

    return run


def test_a_whole_run_replaces_another(measure):
    first, second = (peer("default", "tuned", points=[""], date=date) for date in ("then", "now"))
    assert measure(first) == (0, first)
    assert measure(second) == (0, second)


@pytest.mark.parametrize(
    "later",
    [
        peer(failed="NotInstalled: no network"),
        peer("default", failed="NotStarted: port taken", points=[""]),
        peer("default", "tuned", failed="NotStarted: port taken", points=[""]),
        peer("default", points=["did not start"]),
        peer("default", "tuned", points=["did not start"]),
    ],
    ids=["offline", "half-way", "at the end", "nothing tried", "a point of the grid failed"],
)
def test_a_run_that_lacks_something_replaces_nothing(measure, later, capsys):
    whole = peer("default", "tuned", points=[""])
    measure(whole)
    assert measure(later) == (1, whole)
    assert "not written" in capsys.readouterr().out


def test_a_first_run_that_fails_says_why_in_its_results(measure):
    failed = peer(failed="NotInstalled: no network")
    assert measure(failed) == (1, failed)
    whole = peer("default")
    assert measure(whole) == (0, whole)


@pytest.mark.parametrize("arguments", [["--seconds", "8"], ["--rates", "60"], ["--seed", "1"]])
def test_other_settings_need_a_folder_of_their_own(measure, arguments, capsys, tmp_path):
    with pytest.raises(SystemExit):
        measure(peer("default"), *arguments)
    assert f"{arguments[0]}: {tmp_path} has the default settings only" in capsys.readouterr().err
    assert not (tmp_path / "mosec.json").exists()
