"""Results as they are kept, chosen from, and counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from evidence import Machine
from peers import results
from peers.results import Faults, Peer, Setting, Trial, Tried, best
from peers.running import Device, label
from peers.trials import GIVEN_UP, tally

from carpool_cli.load.loadgen import FAILURES, MISMATCH

KEPT = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "peers").glob("*.json"))


def tried(name, shares, costs, failed=""):
    return Tried(settings={"name": name}, good_shares=shares, device_ms=costs, stalled=0, failed=failed)


def test_most_good_answers_win():
    low, high = tried("low", [1.0, 0.5], [1.0, 1.0]), tried("high", [1.0, 0.9], [3.0, 3.0])
    assert best([low, high]) is high


def test_among_equals_the_least_device_time_wins():
    dear, cheap = tried("dear", [1.0, 0.995], [3.0, 2.0]), tried("cheap", [0.995, 0.99], [2.0, 1.5])
    assert best([dear, cheap]) is cheap


def test_settings_that_did_not_start_are_no_choice():
    broken = tried("broken", [], [], failed="no such option")
    assert best([broken]) is None
    works = tried("works", [0.1], [3.0])
    assert best([broken, works]) is works


def trial(**changes):
    fields = {
        "rate": 60.0, "seconds": 15.0, "requests": 900, "good_share": 0.5, "goodput": 30.0, "p50": 0.0123456789,
        "p99": 0.1, "steady_good_share": None, "steady_p99": None, "errors": {"timeout": 3}, "complaints": {},
        "device_ms": 2.0, "rows_a_batch": 2.5, "cpu_ms": 0.4, "cpu_ms_by_process": {"mosec": 0.4}, "stalled": [3.0],
        "longest_stall": 0.2, "others_cores": 1.5, "generator_limits": [],
    }  # fmt: skip
    return Trial(**{**fields, **changes})


FAULTS = Faults(
    rate=200.0, seconds=15.0, requests=10, misbehaved=2, their_answers={"499": 2}, innocents=8, refused={"500": 4},
    lost={}, wrong=0, rows_computed=10, rows_a_batch=2.0, serves_after=True, stalls=0,
)  # fmt: skip


def peer(**changes):
    fields = {
        "engine": "mosec", "title": "mosec", "default": "one", "commit": "c0ffee", "date": "2026-11-21",
        "machine": Machine("cpu", 2, "Linux", "3.11"), "command": "python benchmarks/peers mosec",
        "versions": {"mosec": "1"}, "profile": "p", "slo": 0.1, "rates": [60.0], "tried": [],
        "settings": [Setting(name="default", settings={}, trials=[trial()], cancels=FAULTS, poison=FAULTS)],
    }  # fmt: skip
    return Peer(**{**fields, **changes})


def test_what_is_kept_is_read_again(tmp_path):
    path = results.save(peer(), tmp_path / "new")
    assert path.name == "mosec.json"
    assert results.load(path) == peer(
        settings=[Setting(name="default", settings={}, trials=[trial(p50=0.012346)], cancels=FAULTS, poison=FAULTS)]
    )


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_what_is_in_the_tree_can_be_read(path):
    assert results.load(path).engine == path.stem


def test_answers_are_counted_apart_from_those_of_the_misbehaving():
    mismatch, timeout = (-1 - FAILURES.index(name) for name in (MISMATCH, "timeout"))
    theirs, others = tally([200, 500, GIVEN_UP, mismatch, timeout, 200], {1, 2})
    assert theirs == {"500": 1, "499": 1}
    assert others == {"200": 2, MISMATCH: 1, "timeout": 1}


def test_the_device_between_two_looks():
    assert Device(10, 30, 2.0).since(Device(4, 10, 0.5)) == Device(6, 20, 1.5)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["/env/bin/python3", "/x/mosec_server.py", "--port", "1"], "mosec_server.py"),
        (["python", "-m", "carpool_cli", "standin", "--port", "1"], "carpool_cli standin"),
        (["python3.11", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"], "multiprocessing"),
        (["ray::ServeReplica:default:Echo"], "ray::ServeReplica:default:Echo"),
        (["/opt/tritonserver/bin/tritonserver", "--model-store=/x"], "tritonserver"),
        (["python"], "python"),
        ([""], ""),
    ],
)
def test_a_process_has_a_name_for_people(arguments, name):
    assert label(arguments) == name
