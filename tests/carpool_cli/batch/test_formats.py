from __future__ import annotations

import numpy as np
import pytest

from carpool_cli.batch.formats import JsonLines, Npz, run_arrays
from carpool_cli.load.servers import InputSpec
from carpool_cli.profiling.targets import TargetError

TWO = [InputSpec("a", "FP32", (2,)), InputSpec("b", "INT64", ())]


class Doubling:
    def __init__(self):
        self.batches = []

    def prepare(self, batch):
        self.batches.append(len(batch["x"]))
        return lambda: {"y": batch["x"] * 2}


def test_lines_carry_their_number_and_where_to_read_on(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1.10\n\n[2]\r\nno\n3")
    source = JsonLines(path, 0, 0, None)
    items, bad = source.read(10)
    source.close()
    assert [(item.number, item.row) for item in items] == [(1, b"1.10"), (3, b"[2]"), (5, b"3")]
    assert [row.number for row in bad] == [4]
    again = JsonLines(path, items[0].position, 1, None)
    assert [item.number for item in again.read(1)[0]] == [3]
    again.close()


def test_several_inputs_are_an_object(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": [1, 2], "b": 3}\n[1]\n{"a": [1, 2]}\n{"a": ["x"], "b": 1}\n')
    source = JsonLines(path, 0, 0, TWO)
    (item,), bad = source.read(9)
    source.close()
    assert (item.row["a"].tolist(), item.row["b"].tolist()) == ([1.0, 2.0], 3)
    assert [row.error.split(":")[0] for row in bad[:2]] == ["expected an object with a, b", "no 'b' in it"]
    assert bad[2].number == 4


@pytest.mark.parametrize(
    ("datatype", "value", "got"),
    [
        ("FP32", "[1, null, 3]", "null"),
        ("INT64", "[true, 1.5, 2]", "bool and float"),
        ("INT64", '["4", 5, 6]', "text"),
        ("BOOL", "[1, 0, 1]", "int"),
        ("BYTES", '["a", 1, "b"]', "int"),
    ],
)
def test_a_value_of_another_kind_is_no_row(tmp_path, datatype, value, got):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{value}\n")
    source = JsonLines(path, 0, 0, [InputSpec("x", datatype, (3,))])
    items, (bad,) = source.read(1)
    source.close()
    assert (items, bad.error) == ([], f"the row: 'x' is {datatype}, got {got}")


def test_answers_of_one_output_are_values_and_of_several_objects(tmp_path):
    (tmp_path / "a").write_text("")
    source = JsonLines(tmp_path / "a", 0, 0, TWO)
    assert source.encode([{"y": np.array([1.5])}]) == b"[1.5]\n"
    assert source.encode([{"y": np.array(1), "z": np.array("t", object)}]) == b'{"y":1,"z":"t"}\n'
    source.close()


def test_rows_of_different_shapes_go_apart_in_their_order():
    target = Doubling()
    rows = [{"x": np.zeros(2)}, {"x": np.ones(2)}, {"x": np.ones(3)}, {"x": np.ones(2)}]
    assert [answer["y"].tolist() for answer in run_arrays(target, rows)] == [[0, 0], [2, 2], [2, 2, 2], [2, 2]]
    assert target.batches == [2, 1, 1]


def test_an_answer_that_lacks_rows_is_an_error():
    class Losing:
        def prepare(self, batch):
            return lambda: {"y": batch["x"][1:]}

    with pytest.raises(TargetError, match="for 2 rows"):
        run_arrays(Losing(), [{"x": np.zeros(2)}] * 2)


def test_npz_pieces_become_one_file(tmp_path):
    source = Npz({"x": np.arange(5)}, 0)
    part, whole = tmp_path / "part", tmp_path / "whole.npz"
    with part.open("wb") as stream:
        while items := source.read(2)[0]:
            stream.write(source.encode([{"y": item.row["x"], "t": np.array("é", object)} for item in items]))
        stream.write(source.encode([]))
    Npz.assemble(part, whole)
    with np.load(whole) as found:
        assert found["y"].tolist() == [0, 1, 2, 3, 4]
        assert found["t"].tolist() == ["é"] * 5
