"""Bodies that each engine takes, and whose answers are right."""

from __future__ import annotations

import json
from pathlib import Path

import profiled_model
import pytest
from peers.engines import ENGINES, POISON, SERVERS, Place, row_of
from peers.environments import REQUIREMENTS

SAMPLE = {
    "carpool": lambda row: {"predictions": [row]},
    "mosec": lambda row: {"row": row},
    "litserve": lambda row: {"row": row},
    "bentoml": lambda row: [row],
    "mlserver": lambda row: {"outputs": [{"name": "row", "shape": [1, 8], "datatype": "FP32", "data": row}]},
    "ray": lambda row: {"row": row},
    "triton": lambda row: {"outputs": [{"name": "same", "shape": [1, 8], "datatype": "FP32", "data": row}]},
}
OTHERS = [name for name in ENGINES if name != "carpool"]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_an_answer_is_right_if_it_has_the_row_that_was_sent(engine):
    row = row_of(7)
    write = SAMPLE[engine.name]
    assert engine.echoes(row, json.dumps(write(row)).encode())
    assert not engine.echoes(row, json.dumps(write(row_of(8))).encode())
    assert not engine.echoes(row, json.dumps(write(row[:-1])).encode())


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"{}", b'{"error": "no"}', b"[[1], [2]]", b"Internal Server Error"]
)
def test_what_is_no_answer_is_wrong(engine, body):
    assert not engine.echoes(row_of(7), body)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_a_request_holds_its_row(engine):
    assert json.dumps(row_of(7)).replace(" ", "") in engine.encode(row_of(7)).decode()


def test_rows_differ_and_only_poisoned_ones_hold_the_poison():
    assert row_of(1) != row_of(2)
    assert POISON in row_of(1, poisoned=True)
    assert POISON not in row_of(1)
    assert profiled_model.POISON == POISON


@pytest.mark.parametrize("name", ENGINES)
def test_engines_listen_on_loopback_alone(name, tmp_path):
    place = Place(Path("/env/bin"), tmp_path, Path("/profile.json"), 1001, (1002, 1003))
    commands = ENGINES[name].prepare(place, {"slo_p99": "100ms"})
    written = " ".join(word for command in commands for word in command)
    written += "".join(path.read_text() for path in tmp_path.glob("*.json"))
    assert "1001" in written
    script = SERVERS / f"{name}_server.py"
    if script.exists():
        written += script.read_text()
    assert "0.0.0.0" not in written
    assert "127.0.0.1" in written


@pytest.mark.parametrize("name", OTHERS)
def test_versions_are_pinned_by_name_alone(name):
    for line in (REQUIREMENTS / f"{name}.txt").read_text().splitlines():
        package, equal, version = line.partition("==")
        assert package
        assert equal
        assert version
        assert "/" not in line


@pytest.mark.parametrize("name", OTHERS)
def test_the_grid_is_small_and_has_no_point_twice(name):
    points = [json.dumps(point, sort_keys=True) for point in ENGINES[name].grid]
    assert 1 < len(points) <= 8
    assert len(set(points)) == len(points)
