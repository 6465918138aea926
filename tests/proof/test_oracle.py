from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future

import msgspec
import pytest
from evidence import machine
from msgspec.structs import replace
from proof import oracle
from proof import scenario as suite
from proof.oracle import Bench, Entry, Level, OutdatedError, Point, find_capacity, find_level
from proof.scenario import HERE
from proof.world import Stretch, play

from carpool.simulation.simulator import Noise

SCENARIOS = {each.name: each for each in suite.load_all()}
POISSON = SCENARIOS["synthetic-1-executor"]


def parameters_at(outcome, when):
    return [setting.parameters for at, _, setting in outcome.changes if at <= when][-1]


@pytest.mark.parametrize(
    "scenario",
    [
        POISSON,
        replace(POISSON, cv=0.3),
        replace(POISSON, cv=0.4, noise=Noise.LOGNORMAL, executors=4),
        replace(POISSON, arrivals=suite.Gamma(cv=4), executors=2),
        SCENARIOS["resnet50-t4-flat-on-off"],
        SCENARIOS["bert-large-a100-diurnal"],
        SCENARIOS["llama-decode"],
        SCENARIOS["tiles-32"],
        SCENARIOS["ocr-1-core"],
    ],
    ids=lambda each: f"{each.name} {each.executors} {each.cv}",
)
def test_the_recursion_is_the_simulator_where_it_is_taken_for_it(scenario):
    bench = Bench(scenario)
    assert bench.exact
    rate = 0.6 * scenario.executors * 32 / bench.service.time(32)
    longest = scenario.limits.max_wait
    for size, wait, flights in ((1, 0.0, 1), (4, longest, 1), (32, longest / 4, 1), (64, 0.0, scenario.executors)):
        point = Point(max_batch=size, max_wait=wait, max_in_flight=flights)
        if rate * bench.service.time(size) > 0.98 * size * flights:
            continue  # no grid keeps what can't keep up
        quick, whole = bench.measure(point, rate, 2000), bench.simulate(point, rate, 2000)
        assert quick.misses == pytest.approx(whole.misses, abs=1e-9)
        assert quick.device_time == pytest.approx(whole.device_time, rel=1e-9)


def test_shedding_is_forecast_closely_enough_to_screen_by():
    bench = Bench(POISSON)
    point = Point(max_batch=64, max_wait=0.0, max_in_flight=1, shed=True)
    for rate in (1500.0, 1700.0, 2000.0):
        quick, whole = bench.measure(point, rate, 6000), bench.simulate(point, rate, 6000)
        assert quick.misses == pytest.approx(whole.misses, abs=0.01)


@pytest.mark.parametrize(
    "name", ["three-replicas", "bert-base-t4-lengths", "llama-decode-memory", "resnet50-t4-stalls"]
)
def test_what_the_recursion_does_not_know_is_simulated(name):
    bench = Bench(SCENARIOS[name])
    assert not bench.exact
    point = Point(max_batch=8, max_wait=0.01, max_in_flight=1)
    assert bench.measure(point, 200.0, 500) == bench.simulate(point, 200.0, 500)
    assert len(bench.points()) < len(Bench(POISSON).points())


def test_what_is_best_is_best_once_the_device_is_warm():
    cold = SCENARIOS["resnet50-t4-cold"]
    assert not oracle.is_exact(cold)
    assert Bench(cold).exact
    assert Bench(cold).simulate(Point(max_batch=64, max_wait=0.0, max_in_flight=1), 300.0, 500).misses == 0


def few(bench):
    return [
        Point(max_batch=size, max_wait=wait, max_in_flight=1)
        for size in (4, 16, 64)
        for wait in (0.0, 0.01, 0.02, 0.025)
    ]


@pytest.mark.parametrize("load", [0.2, 0.5])
def test_the_best_point_is_what_brute_force_finds_by_the_simulator(monkeypatch, load):
    monkeypatch.setattr(Bench, "points", few)
    monkeypatch.setattr(
        oracle, "FAST", oracle.Effort(screened=2000, survivors=12, confirmed=2000, assured=2000, promises=20)
    )
    held = 1500.0
    bench = Bench(POISSON)
    found = []
    for point in few(bench):
        now, ahead = bench.simulate(point, load * held, 2000), bench.simulate(point, 1.25 * load * held, 2000)
        if now.misses <= 0.005 and ahead.misses <= 0.005:
            found.append((now.device_time, point))
    brute = [point for _, point in sorted(found, key=lambda each: each[0])]
    level = find_level(POISSON, load, 1.0, held)
    assert (level.points[0].max_batch, level.points[0].max_wait) == (brute[0].max_batch, brute[0].max_wait)
    assert level.points[0].device_time == pytest.approx(min(found)[0], rel=1e-4)


def test_near_the_capacity_the_fewest_misses_count_and_shedding_is_tried(monkeypatch):
    monkeypatch.setattr(Bench, "points", few)
    monkeypatch.setattr(
        oracle, "FAST", oracle.Effort(screened=2000, survivors=4, confirmed=4000, assured=4000, promises=20)
    )
    level = find_level(POISSON, 1.3, 1.0, 1500.0)
    assert level.points[0].shed
    assert level.points[0].max_batch == 64
    assert [point.misses for point in level.points] == sorted(point.misses for point in level.points)


def test_the_capacity_is_where_one_in_a_hundred_misses(monkeypatch):
    monkeypatch.setattr(Bench, "points", few)
    monkeypatch.setattr(
        oracle, "FAST", oracle.Effort(screened=1000, survivors=4, confirmed=4000, assured=4000, promises=20)
    )
    monkeypatch.setattr(oracle, "PLAYED", 8000)
    held = find_capacity(POISSON)
    bench = Bench(POISSON)

    def least(rate):
        points = [*few(bench), *bench.shedding()]
        return min(bench.simulate(p, rate, 8000, 8000 / 6 / rate).misses for p in points if p.max_batch == 64)

    assert least(held) <= 0.01
    assert least(1.03 * held) > 0.01


def test_a_device_twice_as_slow_has_points_of_its_own():
    bench = Bench(POISSON, 2.0)
    point = Point(max_batch=32, max_wait=0.01, max_in_flight=1)
    quick, whole = bench.measure(point, 400.0, 2000), bench.simulate(point, 400.0, 2000)
    assert quick.misses == pytest.approx(whole.misses, abs=1e-9)
    assert quick.device_time > Bench(POISSON).measure(point, 400.0, 2000).device_time


SMALL, LARGE, SLOW = (Point(max_batch=size, max_wait=0.0, max_in_flight=1) for size in (2, 32, 16))
ENTRY = Entry(
    "synthetic-1-executor",
    "",
    1000.0,
    (Level(0.1, 1.0, (SMALL,)), Level(0.8, 1.0, (LARGE, SMALL)), Level(0.1, 2.0, (SLOW,))),
)


def test_the_nearest_level_is_found():
    assert ENTRY.level(120.0).points == (SMALL,)
    assert ENTRY.level(5000.0).points == (LARGE, SMALL)
    assert ENTRY.level(800.0, 1.9).points == (SLOW,)


def test_the_oracle_has_each_stretchs_point_in_force_from_its_begin(monkeypatch):
    monkeypatch.setattr(oracle, "known", lambda: {POISSON.name: ENTRY})
    course = (Stretch(3.1, 100.0), Stretch(3.0, 800.0), Stretch(3.0, 100.0, 2.0))
    first, second, *_ = oracle.makers(POISSON, course)
    outcome = play(POISSON, first, course, 1).outcome
    assert [parameters_at(outcome, at).max_batch for at in (0.0, 2.9, 3.3, 5.9, 6.4)] == [2, 2, 32, 32, 16]
    believed = outcome.changes[-1][2].estimate
    assert believed.times[16] == pytest.approx(2 * 0.013)
    other = play(POISSON, second, course, 1).outcome
    assert parameters_at(other, 4.0).max_batch == 2
    assert other.times == outcome.times


def test_an_outdated_file_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(oracle, "RESULTS", tmp_path / "none.json")
    oracle.known.cache_clear()
    with pytest.raises(OutdatedError, match="make oracle SCENARIO="):
        oracle.known()
    oracle.known.cache_clear()


class AtOnce:
    """A pool whose work is done when it is submitted."""

    def __init__(self, jobs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, work, *arguments, **options):
        future = Future()
        future.set_result(work(*arguments, **options))
        return future


@pytest.fixture
def command(monkeypatch, tmp_path):
    """The command with two scenarios, the first of them known; a search finds a capacity of 2.0 and no levels."""
    scenarios = [replace(POISSON, name=name) for name in ("old", "new")]
    monkeypatch.setattr(oracle, "load_all", lambda: scenarios)
    monkeypatch.setattr(oracle, "own_hash", lambda scenario: "hash")
    monkeypatch.setattr(oracle, "suite_hash", lambda: "suite")
    monkeypatch.setattr(oracle, "find_capacity", lambda scenario: 2.0)
    monkeypatch.setattr(oracle, "wanted", lambda scenario: [])
    monkeypatch.setattr(oracle, "commit", lambda: "now")
    monkeypatch.setattr(oracle, "ProcessPoolExecutor", AtOnce)
    monkeypatch.setattr(oracle, "RESULTS", tmp_path / "oracle.json")
    # As it was written before entries had stamps.
    entry = {"scenario": "old", "hash": "hash", "capacity": 1.0, "levels": []}
    fields = {"suite": "suite", "commit": "then", "date": "2026", "command": "x", "cpu_seconds": 9.0}
    oracle.RESULTS.write_text(json.dumps({**fields, "machine": msgspec.to_builtins(machine()), "entries": [entry]}))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["oracle", *arguments])
        oracle.main()
        kept = msgspec.json.decode(oracle.RESULTS.read_bytes(), type=oracle.Results)
        return kept, {entry.scenario: (entry.capacity, entry.commit) for entry in kept.entries}

    return run


def test_what_is_known_keeps_its_commit_and_what_is_searched_gets_one(command):
    kept, entries = command()
    assert entries == {"old": (1.0, ""), "new": (2.0, "now")}
    assert kept.commit == "now"


def test_a_run_that_searches_nothing_changes_nothing(command):
    command()
    before = oracle.RESULTS.read_bytes()
    command()
    assert oracle.RESULTS.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--anew"], {"old": (2.0, "now"), "new": (2.0, "now")}),
        (["--only", "old"], {"old": (2.0, "now")}),
    ],
)
def test_what_is_asked_for_is_searched_again(command, arguments, expected):
    assert command(*arguments)[1] == expected


def test_an_unknown_name_is_an_error_with_those_that_are_known(command, capsys):
    with pytest.raises(SystemExit):
        command("--only", "odl")
    assert "'odl' (choose from " in (said := capsys.readouterr().err)
    assert "old" in said


def test_make_oracle_searches_everything_or_one_scenario():
    def command_of(*arguments):
        return subprocess.run(  # noqa: S603 - our own command
            ["make", "--just-print", "--assume-old=.venv/.installed", "oracle", *arguments],  # noqa: S607 - the one on PATH
            cwd=HERE.parent, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    assert "proof.oracle --anew\n" in command_of()
    assert "proof.oracle --only tiles-32\n" in command_of("SCENARIO=tiles-32")
