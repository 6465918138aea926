from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool_sidecar.protocols import answer_comparison
from carpool_sidecar.protocols.answer_comparison import ELEMENTS, TEXT, Tolerance, disagreement
from carpool_sidecar.protocols.common import Message

LENGTH = b"inference-header-content-length"


def v1(rows, name="predictions"):
    return Message([], [json.dumps({name: rows}).encode()])


def v2(*outputs):
    """Outputs as (name, datatype, shape, data): a list for JSON, bytes for binary."""
    described, tail = [], b""
    for name, datatype, shape, data in outputs:
        one = {"name": name, "datatype": datatype, "shape": shape}
        if isinstance(data, bytes):
            one["parameters"] = {"binary_data_size": len(data)}
            tail += data
        else:
            one["data"] = data
        described.append(one)
    text = json.dumps({"outputs": described}).encode()
    return Message([(LENGTH, b"%d" % len(text))] if tail else [], [text, tail])


def differ(alone, batched, *, share=0.01, protocol="v1", scales=None):
    return disagreement(protocol, alone, batched, Tolerance(share, scales))


def rows_differ(one, other, **fields):
    return differ(v1([one]), v1([other]), **fields)


@pytest.mark.parametrize(
    ("alone", "batched"),
    [
        ([0.5, 100.0], [0.6, 100.9]),  # 1 % of the row's largest
        ([1, 2.5], [1.0, 2.5]),
        (3.0, 3.02),
        (3, 3.00001),  # a server in JavaScript prints 3.0 so
        ([[0.0, 50.0], [0.4, 1.0]], [[0.3, 50.0], [0.0, 1.0]]),  # a matrix is one row
        ({"score": 0.5, "label": "cat"}, {"label": "cat", "score": 0.5001}),
        ([True, None, "x"], [True, None, "x"]),
        ([math.nan, math.inf, 1.0], [math.nan, math.inf, 1.001]),
        (0.0, -0.0),
    ],
)
def test_what_rounding_makes_of_a_row_is_the_same(alone, batched):
    assert rows_differ(alone, batched) is None


@pytest.mark.parametrize(
    ("alone", "batched", "shown"),
    [
        ([0.5, 100.0], [0.5, 101.5], ("100", "101.5")),
        (7, 8, ("7", "8")),  # a class, not a measurement
        ([900, 3], [905, 3], ("900", "905")),
        ("cat", "horse", ("a text of 3 characters", "a text of 5 characters")),
        ([True], [False], ("True", "False")),
        ([1.0, 2.0], [1.0], ("2 elements", "1 elements")),
        ([[1.0, 2.0]], [[1.0], [2.0]], ("1 elements", "2 elements")),
        ({"a": 1}, {"b": 1}, ("fields ['a']", "fields ['b']")),
        ({"id": 5000.5, "score": 0.5}, {"id": 5000.5, "score": 0.9}, ("0.5", "0.9")),  # each field by its own measure
        ([1.0, math.nan], [1.0, 2.0], ("nan", "2")),
        ([1.0, math.inf], [1.0, -math.inf], ("inf", "-inf")),
        (None, 0.0, ("None", "0")),
        ([1.0, "x"], [1.0, "y"], ("a text of 1 characters", "a text of 1 characters")),
    ],
)
def test_what_is_another_answer_is_named(alone, batched, shown):
    found = rows_differ(alone, batched)
    assert (found.output.partition(".")[0], found.row, found.alone, found.batched) == ("predictions", 0, *shown)
    assert str(found).startswith(f"output {found.output!r}, row 0: {shown[0]} alone, ")


def test_the_row_is_named_and_a_missing_one_is_seen():
    assert differ(v1([[1.0], [2.0], [3.0]]), v1([[1.0], [2.0], [4.0]])).row == 2
    assert differ(v1([1, 2]), v1([1])).batched == "1 rows"
    assert differ(v1([1.0], "outputs"), v1([2.0], "outputs")).output == "outputs"


def test_a_number_near_zero_is_measured_by_what_its_output_usually_is():
    scales = {}
    assert rows_differ(12.0, 12.0001, scales=scales) is None
    assert scales == {"predictions": 12.0}
    assert rows_differ(0.00001, 0.00002, scales=scales) is None  # rounding of sums as large as 12
    assert rows_differ(0.00001, 0.01, scales=scales) is not None
    assert rows_differ(0.00001, 0.00002) is not None


def test_the_tolerance_can_be_set():
    assert rows_differ([1.0, 2.0], [1.0, 2.05], share=0.05) is None
    assert rows_differ([1.0, 2.0], [1.0, 2.0 + 1e-12], share=0.0) is not None
    assert rows_differ([1.0, 2.0], [1.0, 2.0], share=0.0) is None


PACKED = {"FP16": "e", "FP32": "f", "FP64": "d", "INT32": "i", "UINT8": "B", "INT8": "b", "INT64": "q", "BOOL": "?"}


def packed(datatype, *values):
    if datatype == "BF16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value)) + value for value in values)
    return struct.pack(f"<{len(values)}{PACKED[datatype]}", *values)


@pytest.mark.parametrize(
    ("datatype", "alone", "near", "far"),
    [
        ("FP16", (1.0, 100.0), (1.0, 100.5), (1.0, 102.0)),
        ("BF16", (1.0, 128.0), (1.5, 128.0), (4.0, 128.0)),
        ("FP32", (1.0, 100.0), (1.9, 100.0), (2.1, 100.0)),
        ("FP64", (math.nan, -100.0), (math.nan, -100.9), (0.0, -100.0)),
        ("UINT8", (0, 200), (2, 200), (3, 200)),  # a picture
        ("INT8", (0, -100), (1, -100), (2, -100)),
        ("INT32", (0, 200), (0, 200), (1, 200)),
        ("INT64", (5, 2**60), (5, 2**60), (5, 2**60 + 1)),
        ("BOOL", (True, False), (True, False), (True, True)),
        ("BYTES", (b"a", b"bc"), (b"a", b"bc"), (b"ab", b"c")),
    ],
)
def test_binary_outputs_are_compared_by_their_datatype(datatype, alone, near, far):
    first = packed(datatype, *alone, *alone)
    same = v2(("y", datatype, [2, 2], packed(datatype, *alone, *near)))
    other = v2(("y", datatype, [2, 2], packed(datatype, *alone, *far)))
    assert differ(v2(("y", datatype, [2, 2], first)), same, protocol="v2") is None
    found = differ(v2(("y", datatype, [2, 2], first)), other, protocol="v2")
    assert found.output == "y"
    assert datatype == "BYTES" or found.row == 1


@pytest.mark.parametrize("nested", [False, True])
def test_json_outputs_are_compared_row_by_row(nested):
    def shaped(a, b, c, d):
        return [[a, b], [c, d]] if nested else [a, b, c, d]

    def answer(datatype, *values):
        return v2(("y", datatype, [2, 2], shaped(*values)), ("z", "BYTES", [2], ["s", "t"]))

    alone = answer("FP32", 100.0, 1.0, 1.0, 0.5)
    assert differ(alone, answer("FP32", 100.5, 1.0, 1.0, 0.5), protocol="v2") is None
    found = differ(alone, answer("FP32", 100.0, 1.0, 1.5, 0.5), protocol="v2")  # 0.5 is much, for this row
    assert (found.row, found.alone, found.batched) == (1, "1", "1.5")
    assert differ(answer("INT64", 1, 2, 3, 400), answer("INT64", 1, 2, 3, 401), protocol="v2").row == 1
    assert differ(answer("UINT8", 1, 2, 3, 200), answer("UINT8", 1, 2, 3, 201), protocol="v2") is None
    assert differ(alone, answer("FP64", 100.0, 1.0, 1.0, 0.5), protocol="v2").alone == "FP32"


def test_other_outputs_shapes_or_forms_are_other_answers():
    y = ("y", "FP32", [1, 2], packed("FP32", 1.0, 2.0))
    assert "['y', 'z']" in str(differ(v2(y), v2(y, ("z", "FP32", [1], [1.0])), protocol="v2"))
    assert differ(v2(y), v2(("y", "FP32", [1, 1, 2], y[3])), protocol="v2").batched == "[1, 1, 2]"
    assert differ(v2(y), v2(("y", "FP32", [1, 2], [1.0, 2.0])), protocol="v2").batched == "JSON data"


def test_nan_that_servers_write_into_json_is_read():
    alone = Message([], [b'{"predictions":[[NaN,1.0]]}'])
    assert differ(alone, Message([], [b'{"predictions":[[NaN,1.001]]}'])) is None
    assert differ(alone, Message([], [b'{"predictions":[[2.0,1.0]]}'])).alone == "nan"
    tensor = '{"outputs":[{"name":"y","datatype":"FP32","shape":[1,2],"data":[%s,1.0]}]}'
    nan, two = (Message([], [(tensor % text).encode()]) for text in ("NaN", "2.0"))
    assert differ(nan, nan, protocol="v2") is None
    assert differ(nan, two, protocol="v2").batched == "2"


def test_integers_larger_than_any_float_are_compared():
    assert rows_differ([10**400, 0.5], [10**400, 0.5]) is None
    assert rows_differ([10**400, 0.5], [10**400 + 1, 0.5]) is not None


def test_of_large_rows_of_numbers_a_part_is_compared():
    many = [float(number) for number in range(5 * ELEMENTS)]
    off = [-1.0e6, *many[1:]]
    assert rows_differ(many, [*many[:-1], many[-1] + 1]) is None
    assert rows_differ(many, off) is not None
    flat = ("y", "FP32", [1, len(many)])
    assert differ(v2((*flat, many)), v2((*flat, off)), protocol="v2") is not None
    binary = (v2((*flat, packed("FP32", *values))) for values in (many, off))
    assert differ(*binary, protocol="v2") is not None


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("nested", [False, True])
def test_of_large_rows_the_end_is_compared_too(rows, nested):
    many = [[0.5] * 64] * (5 * ELEMENTS // 64)
    odd = [*many[:-1], [*many[-1][:-1], 9.5]]
    shown = f"row {rows - 1}: 0.5 alone, 9.5 in a batch"
    assert shown in str(differ(v1([many] * rows), v1([*[many] * (rows - 1), odd])))
    pair = []
    for last in (many, odd):
        data = [*[many] * (rows - 1), last]
        shape = [rows, len(many), 64]
        pair.append(v2(("y", "FP32", shape, data if nested else [one for row in data for at in row for one in at])))
    assert shown in str(differ(*pair, protocol="v2"))
    assert differ(pair[0], pair[0], protocol="v2") is None


def test_of_large_rows_that_end_with_texts_the_beginning_is_compared():
    row = [*[0.5] * (5 * ELEMENTS), "a, b"]
    assert rows_differ(row, [0.5001, *row[1:]]) is None
    assert rows_differ(row, [9.5, *row[1:]]) is not None


@pytest.mark.parametrize("positions", [1001, 2000])
def test_of_large_rows_the_sizes_are_compared_whatever_is_read_of_them(positions):
    short, long = ([[0.5] * 64] * size for size in (1000, positions))
    found = rows_differ(short, long)
    assert found.alone == "64000 elements"
    assert found.batched == f"{64 * positions} elements"
    assert rows_differ(long, short) is not None


def test_large_rows_of_texts_are_equal_or_not():
    texts = ["x" * 10] * (2 * ELEMENTS)
    assert rows_differ(texts, list(texts)) is None
    found = rows_differ(texts, [*texts[:-1], "y" * 10])
    assert found.batched.endswith("other bytes")


@pytest.mark.parametrize("form", ["v1", "v2", "binary"])
@pytest.mark.parametrize("size", [ELEMENTS, 16 * ELEMENTS])
def test_of_large_answers_no_more_elements_are_read_and_compared(monkeypatch, form, size):
    """Of rows with 16 times the elements as many are compared: what grows is reading past them."""
    decoded, compared = [], []
    read, numbers = answer_comparison._decoded, answer_comparison._numbers
    monkeypatch.setattr(answer_comparison, "_decoded", lambda text: decoded.append(len(text)) or read(text))
    monkeypatch.setattr(
        answer_comparison, "_numbers", lambda name, one, *rest: compared.append(len(one)) or numbers(name, one, *rest)
    )
    alone, batched = [0.001 * number for number in range(size)], [0.001 * number + 1e-9 for number in range(size)]
    match form:
        case "v1":
            pair, protocol = (v1([alone]), v1([batched])), "v1"
        case "v2":
            pair = tuple(v2(("y", "FP32", [1, size], data)) for data in (alone, batched))
            protocol = "v2"
        case _:
            pair = tuple(v2(("y", "FP64", [1, size], packed("FP64", *data))) for data in (alone, batched))
            protocol = "v2"
    assert differ(*pair, protocol=protocol) is None
    assert ELEMENTS / 2 < sum(compared) <= 1.1 * ELEMENTS  # of JSON by its bytes: these numbers are shorter
    assert sum(decoded) <= 2 * 1.01 * TEXT * ELEMENTS


NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)
ROW = st.lists(NUMBERS, min_size=1, max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | NUMBERS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=12,
)


@given(JSON)
def test_every_row_agrees_with_itself(row):
    assert rows_differ(row, json.loads(json.dumps(row))) is None


@given(ROW, st.data())
def test_numbers_agree_within_the_tolerance_and_not_beyond(row, data):
    largest = max(map(abs, row))
    index = data.draw(st.integers(0, len(row) - 1))
    moved = list(row)
    moved[index] += 0.5 * 0.01 * largest
    assert rows_differ(row, moved) is None
    moved[index] = row[index] + 0.011 * largest + 1e-30
    assert (rows_differ([*row, 0.5], [*moved, 0.5]) is None) == (
        abs(moved[index] - row[index]) <= 0.01 * max(largest, 0.5)
    )


@given(st.lists(ROW, min_size=2, max_size=5), st.data())
def test_rows_that_changed_places_are_found_where_they_differ(rows, data):
    one, other = data.draw(st.tuples(*[st.integers(0, len(rows) - 1)] * 2))
    swapped = list(rows)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    found = differ(v1(rows), v1(swapped))
    if rows_differ(rows[one], rows[other]) is not None and rows_differ(rows[other], rows[one]) is not None:
        assert found is not None
    if one == other:
        assert found is None
