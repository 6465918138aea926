"""Padding along the sequence axis and cutting back, in every form of both protocols."""

from __future__ import annotations

import json
import struct
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.policy.spec import SequenceAxis
from carpool_sidecar import protocols
from carpool_sidecar.protocols import headers, v1, v2
from carpool_sidecar.protocols.common import Piece, Portion, WrongRows, longest
from carpool_sidecar.protocols.padding import (
    LARGEST_ROW,
    NOT_PADDABLE,
    TOO_LARGE,
    TOO_LONG,
    WRONG_LENGTH,
    Sequence,
    element,
    text,
)

V1, V2 = protocols.route(b"/v1/models/m:predict"), protocols.route(b"/v2/models/m/infer")
HEADER = b"Inference-Header-Content-Length"
IDS = {"input_ids": 0, "attention_mask": 0}
KINDS = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32, "FP64": np.float64, "UINT8": np.uint8}


def sequence(pad=None, **fields):
    return Sequence(SequenceAxis(pad=IDS if pad is None else pad, **fields))


# --- bodies


def written(name, array, form, datatype="INT64"):
    """A tensor's JSON as text, and its binary data."""
    head = {"name": name, "datatype": datatype, "shape": list(array.shape)}
    if form == "binary":
        data = array.astype(KINDS[datatype]).tobytes()
        return json.dumps({**head, "parameters": {"binary_data_size": len(data)}}), data
    array = array.astype(KINDS[datatype])
    data = array.tolist() if form == "nested" else array.ravel().tolist()
    return json.dumps({**head, "data": data}), b""


def answer_of(*tensors, rest=""):
    """An answer with these tensors, as ``written`` makes them: its headers and body."""
    head = f'{{{rest}"outputs":[{",".join(one for one, _ in tensors)}]}}'.encode()
    tail = b"".join(data for _, data in tensors)
    return [(HEADER, b"%d" % len(head))] if tail else [], head + tail


def request(arrays, form, datatype="INT64", seq=None):
    """Parse a V2 request of these inputs and fit it into its bucket."""
    parts = [written(name, np.asarray(array), form, datatype) for name, array in arrays.items()]
    head = f'{{"inputs":[{",".join(one for one, _ in parts)}]}}'.encode()
    tail = b"".join(data for _, data in parts)
    lines = [(HEADER, b"%d" % len(head))] if form == "binary" else []
    parsed = v2.parse(V2, headers.read(lines), head + tail)
    assert parsed.alone is None
    parsed.fit = v2.fit(parsed, seq or sequence())
    return parsed


def arrays_of(message, field="inputs"):
    """What a server reads in a message: its tensors as arrays."""
    body = b"".join(message.parts)
    length = headers.find(message.headers, v2.HEADER_LENGTH)
    at = len(body) if length is None else int(length)
    found = {}
    for one in json.loads(body[:at])[field]:
        if "data" in one:
            flat = np.array(one["data"], KINDS[one["datatype"]])
        else:
            size = one["parameters"]["binary_data_size"]
            flat, at = np.frombuffer(body[at : at + size], KINDS[one["datatype"]]), at + size
        found[one["name"]] = flat.reshape(one["shape"])
    return found


def whole(*parsed):
    return [Portion(one, 0, one.rows) for one in parsed]


def rows_of(body, seq=None):
    """Parse a V1 request and fit it into its bucket."""
    parsed = v1.parse(
        V1, headers.read([]), body if isinstance(body, bytes) else json.dumps({"instances": body}).encode()
    )
    assert parsed.alone is None
    parsed.fit = v1.fit(parsed, seq or sequence())
    return parsed


def ids(*rows):
    return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}


# --- buckets


def test_a_length_is_in_the_bucket_that_ends_behind_it():
    lengths = sequence(lengths=(64, 16, 32, 16))
    assert [lengths.bucket(length) for length in (1, 16, 17, 64, 65, 1000)] == [16, 16, 32, 64, 128, 1024]
    assert [lengths.fits(length) for length in (64, 65)] == [True, False]


@pytest.mark.parametrize("form", ["binary", "flat", "nested"])
def test_requests_of_one_bucket_have_one_key_and_those_of_others_another(form):
    one, two, longer = (request(ids(range(length)), form) for length in (3, 16, 17))
    assert one.key != two.key
    assert one.fit.key == two.fit.key != longer.fit.key
    assert [each.fit.bucket for each in (one, two, longer)] == [16, 16, 32]
    assert [each.fit.length for each in (one, two, longer)] == [3, 16, 17]


def test_other_values_or_outputs_make_another_key():
    keys = {
        request(ids([1, 2]), "flat", seq=each).fit.key
        for each in (sequence(), sequence(pad={**IDS, "input_ids": 1}), sequence(outputs=("y",)), sequence())
    }
    assert len(keys) == 3


def test_inputs_that_are_not_padded_stay_in_the_key():
    pair = [request({**ids(range(length)), "other": [[1.5] * width]}, "flat", "FP32") for length, width in
            ((3, 2), (5, 2), (5, 3))]  # fmt: skip
    assert pair[0].fit.key == pair[1].fit.key != pair[2].fit.key


@pytest.mark.parametrize(
    ("arrays", "fields", "why"),
    [
        (ids(range(8193)), {}, TOO_LONG),
        (ids(range(65)), {"lengths": (64,)}, TOO_LONG),
        ({"x": [[1, 2]]}, {}, NOT_PADDABLE),  # no input to be padded
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1, 1]]}, {}, NOT_PADDABLE),
        ({"input_ids": [1], "attention_mask": [[1, 1, 1]]}, {}, NOT_PADDABLE),
        (ids([1, 2]), {"axis": 2}, NOT_PADDABLE),
        (ids([1, 2]), {"pad": {**IDS, "input_ids": 0.5}}, NOT_PADDABLE),
        (ids([1, 2]), {"pad": {**IDS, "input_ids": 2.0**70}}, NOT_PADDABLE),
        ({"x": np.zeros((1, 2, LARGEST_ROW // 128 + 1))}, {"pad": {"x": 0}}, TOO_LARGE),  # 16 positions of 8 bytes each
    ],
)
def test_what_is_not_padded_stays_with_its_own_length(arrays, fields, why):
    parsed = request(arrays, "binary", seq=sequence(**fields))
    assert (parsed.fit.key, parsed.fit.why) == (None, why)
    assert longest(whole(parsed, parsed)) == 0


def test_texts_are_not_padded():
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "b"]}
    parsed = v2.parse(V2, headers.read([]), json.dumps({"inputs": [tensor]}).encode())
    assert v2.fit(parsed, sequence(pad={"x": 0})).why == NOT_PADDABLE
    assert rows_of([{"x": ["a", "b"]}], sequence(pad={"x": 0})).fit.why == NOT_PADDABLE


def test_what_padding_may_add_is_known():
    assert request(ids(range(8)), "binary").fit.growth == 2 * 8 * 8  # as much again, of two inputs of 8-byte numbers
    assert request(ids(range(16)), "binary").fit.growth == 0


@pytest.mark.parametrize("form", ["binary", "flat", "nested", "v1"])
@pytest.mark.parametrize("value", [0.0, -100.123456789])
def test_padding_adds_at_most_what_is_charged_for_it(form, value):
    """Whatever an element that came takes, and one of padding: ``5`` and ``-100.123456789``."""
    seq = sequence(pad={"x": value}, lengths=(64,), axis=1 if form == "v1" else 2)
    pair = []
    for length in (1, 64):
        if form == "v1":
            pair.append(rows_of([{"x": [[5.5, 5.5]] * length}] * 3, seq))
        else:
            pair.append(request({"x": np.full((3, 2, length, 2), 5)}, form, "FP32", seq))
    merged = sum(map(len, v1.merge(whole(*pair)).parts if form == "v1" else v2.merge(whole(*pair)).parts))
    short, long = pair
    assert long.fit.growth == 0
    # The text around two requests is more than that around one.
    assert short.fit.growth - 200 < merged - short.size - long.size <= short.fit.growth


def test_a_short_row_may_not_grow_beyond_what_is_padded_in_time():
    assert request({"x": [[5]]}, "flat", "FP32", sequence(pad={"x": -100.123456789})).fit.why == ""
    long = sequence(pad={"x": -100.123456789}, lengths=(8192 * 2,))
    assert request({"x": [[5]]}, "flat", "FP32", long).fit.why == TOO_LARGE
    assert rows_of([{"x": [5.5]}], long).fit.why == TOO_LARGE


def test_rows_of_many_fields_are_not_padded_as_each_would_be_taken_apart():
    rows = [{"x": [1, 2], **{f"f{index}": 1 for index in range(size - 1)}} for size in (64, 65)]
    assert [rows_of([row], sequence(pad={"x": 0})).fit.why for row in rows] == ["", TOO_LARGE]


def test_of_rows_only_what_is_padded_counts_as_growth():
    image = {"x": [1], "image": [0.5] * 8000}
    parsed = rows_of([image, image], sequence(pad={"x": 0}))
    assert (parsed.fit.why, parsed.fit.growth) == ("", 2 * 15 * len(",0"))


@pytest.mark.parametrize(
    ("datatype", "value", "binary", "json_text"),
    [
        ("INT64", 5.0, struct.pack("<q", 5), b"5"),
        ("UINT8", 255.0, b"\xff", b"255"),
        ("UINT8", 256.0, None, None),
        ("UINT8", -1.0, None, None),
        ("INT32", 0.5, None, None),
        ("FP32", 0.0, bytes(4), b"0.0"),
        ("FP32", 1e39, None, None),
        ("FP16", 1.5, struct.pack("<e", 1.5), b"1.5"),
        ("BF16", 1.0, b"\x80\x3f", b"1.0"),
        ("BF16", 1e39, None, None),
        ("BOOL", 1.0, b"\x01", b"true"),
        ("BOOL", 2.0, None, None),
        ("INT64", float("inf"), None, None),
        ("FP32", float("nan"), struct.pack("<f", float("nan")), None),
        ("BYTES", 0.0, None, None),
    ],
)
def test_a_value_is_written_as_its_datatype_has_it_or_not_at_all(datatype, value, binary, json_text):
    assert (element(datatype, value), text(datatype, value)) == (binary, json_text)


# --- V2


def test_rows_are_padded_to_the_longest_of_the_batch_byte_for_byte():
    one, two = request(ids([7, 8], [9, 9]), "binary"), request(ids([1, 2, 3, 4]), "binary")
    body = b"".join(v2.merge(whole(one, two)).parts)
    numbers = [7, 8, 0, 0, 9, 9, 0, 0, 1, 2, 3, 4, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1]
    assert body.endswith(struct.pack("<24q", *numbers))
    assert json.loads(body[: -24 * 8])["inputs"][0]["shape"] == [3, 4]


def test_json_is_spliced_every_digit_kept():
    text = b'{"inputs":[{"name":"x","datatype":"FP64","shape":[1,%d],"data":[%b]}]}'
    bodies = [text % (2, b"[1.10, 1E+2 ]"), text % (3, b"[0.1000,2,3]"), text % (2, b"[ -0.0,5 ]")]
    parts = []
    for body in bodies:
        parsed = v2.parse(V2, headers.read([]), body)
        parsed.fit = v2.fit(parsed, sequence(pad={"x": 0}))
        parts.append(parsed)
    assert b'"shape":[3,3],"data":[[1.10, 1E+2 ,0.0],[0.1000,2,3],[ -0.0,5 ,0.0]]' in b"".join(
        v2.merge(whole(*parts)).parts
    )


def test_a_batch_of_one_length_is_sent_as_without_padding():
    pair = [request(ids([1, 2]), "flat"), request(ids([3, 4]), "flat")]
    padded = v2.merge(whole(*pair))
    for each in pair:
        each.fit = None
    alone = v2.merge(whole(*pair))
    assert (alone.headers, alone.parts) == (padded.headers, padded.parts)


@st.composite
def batches(draw):
    """Requests of one bucket whose lengths differ, with a form, an axis and the parts that are sent."""
    axis = draw(st.sampled_from([1, 1, 1, 2]))
    outer, inner = draw(st.sampled_from([(2,), (1,)])) if axis == 2 else (), draw(st.sampled_from([(), (), (3,)]))
    form = draw(st.sampled_from(["binary", "flat", "nested"]))
    datatype = draw(st.sampled_from(["INT64", "INT32", "FP32", "FP64", "UINT8"]))
    value = draw(st.sampled_from([0, 7]))
    seq = sequence(pad={"x": value, "mask": 0}, axis=axis, lengths=(9,), outputs=("y",))
    requests = []
    for number in range(draw(st.integers(2, 4))):
        rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 9))
        shape = (rows, *outer, length, *inner)
        x = (np.arange(prod(shape)).reshape(shape) + 10 * number) % 200
        arrays = {"x": x, "mask": np.ones(shape), "n": np.full((rows, 2), number)}
        requests.append((request(arrays, form, datatype, seq), x, number))
    portions = [
        Portion(parsed, start, stop)
        for parsed, _, _ in requests
        for start in [draw(st.integers(0, parsed.rows - 1))]
        for stop in [draw(st.integers(start + 1, parsed.rows))]
    ]
    return requests, portions, axis, value, form, datatype


@given(batches(), st.sampled_from(["binary", "flat", "nested"]))
def test_a_server_sees_numpy_s_padding_and_callers_see_none_of_it(batch, answer_form):
    requests, portions, axis, value, _, datatype = batch
    assert len({parsed.fit.key for parsed, _, _ in requests}) == 1
    # What the server gets is what numpy makes of it.
    seen = arrays_of(v2.merge(portions))
    top = max(x.shape[axis] for _, x, _ in requests)
    expected = []
    spans = [(portion.start, portion.stop) for portion in portions]
    for (_, x, _), (start, stop) in zip(requests, spans, strict=True):
        edges = [(0, top - size) if dim == axis else (0, 0) for dim, size in enumerate(x.shape)]
        expected.append(np.pad(x[start:stop], edges, constant_values=value))
    assert (seen["x"] == np.concatenate(expected)).all()
    own = [x[start:stop].size for (_, x, _), (start, stop) in zip(requests, spans, strict=True)]
    assert seen["mask"].sum() == sum(own)
    # It answers with that, and with something that has no length: each caller gets the own rows back.
    outputs = [written("y", seen["x"], answer_form, datatype), written("n", seen["n"], answer_form, datatype)]
    pieces = v2.split(portions, *answer_of(*outputs))
    for (parsed, x, number), (start, stop), piece in zip(requests, spans, pieces, strict=True):
        got = arrays_of(v2.assemble(parsed, [piece]), "outputs")
        assert (got["y"].shape, got["n"].tolist()) == (x[start:stop].shape, [[number] * 2] * (stop - start))
        assert (got["y"] == x[start:stop]).all()
    # Some rows of a piece, as checks take them
    first = Piece(pieces[0].answer, pieces[0].start, 1)
    (parsed, x, _), start = requests[0], portions[0].start
    assert (arrays_of(v2.assemble(parsed, [first]), "outputs")["y"] == x[start : start + 1]).all()


def test_parts_of_one_request_from_batches_of_different_lengths_are_put_together():
    seq = sequence(outputs=("y",))
    large = request(ids([1, 2], [3, 4]), "flat", seq=seq)
    others = [request(ids(range(length)), "flat", seq=seq) for length in (3, 5)]
    pieces = []
    for row, other in enumerate(others):
        portions = [Portion(large, row, row + 1), *whole(other)]
        seen = arrays_of(v2.merge(portions))["input_ids"]
        pieces.append(v2.split(portions, *answer_of(written("y", seen, "flat")))[0])
    assert arrays_of(v2.assemble(large, pieces), "outputs")["y"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("form", ["binary", "flat", "nested"])
def test_texts_by_position_are_cut_back(form):
    pair = [request(ids(range(length)), "flat", seq=sequence(outputs=("y",))) for length in (1, 3)]
    labels = [["a,", "bcd", ""], ["[e", '"', "f"]]
    head = {"name": "y", "datatype": "BYTES", "shape": [2, 3]}
    tail, lines = b"", []
    if form == "binary":
        tail = b"".join(struct.pack("<I", len(each)) + each.encode() for row in labels for each in row)
        head["parameters"] = {"binary_data_size": len(tail)}
    else:
        head["data"] = labels if form == "nested" else [*labels[0], *labels[1]]
    text = json.dumps({"outputs": [head]}).encode()
    if tail:
        lines = [(HEADER, b"%d" % len(text))]
    one, two = v2.split(whole(*pair), lines, text + tail)
    for parsed, piece, row in ((pair[0], one, ["a,"]), (pair[1], two, labels[1])):
        message = v2.assemble(parsed, [piece])
        body = b"".join(message.parts)
        if form == "binary":
            assert body.endswith(b"".join(struct.pack("<I", len(each)) + each.encode() for each in row))
            assert body.count(b"a,") + body.count(b"[e") == 1
        else:
            got = json.loads(body)["outputs"][0]
            assert (got["shape"], np.array(got["data"]).ravel().tolist()) == ([1, len(row)], row)


def test_an_output_that_has_not_the_length_says_so_and_names_the_field():
    pair = [request(ids(range(length)), "flat", seq=sequence(outputs=("y",))) for length in (1, 3)]
    with pytest.raises(WrongRows, match=r"output 'y' has shape \[2, 2\], but sequence.outputs says") as error:
        v2.split(whole(*pair), *answer_of(written("y", np.zeros((2, 2)), "flat")))
    assert error.value.reason == WRONG_LENGTH


def test_callers_who_share_a_padded_batch_get_ids_of_their_own():
    pair = [request(ids(range(length)), "flat") for length in (1, 3)]
    pieces = v2.split(whole(*pair), *answer_of(written("y", np.zeros((2, 1)), "flat"), rest='"id":"server",'))
    got = [
        json.loads(b"".join(v2.assemble(parsed, [piece]).parts))["id"]
        for parsed, piece in zip(pair, pieces, strict=True)
    ]
    assert got == ["server-0", "server-1"]


# --- V1


def test_fields_of_rows_are_padded_and_all_else_is_left_as_it_came():
    one = rows_of(b'{"instances":[{"input_ids": [1.0, 2.50] , "n":[7,8], "attention_mask":[1,1]}]}')
    two = rows_of(b'{"instances":[{"input_ids":[3.125,4e0,5],"n":[1,2],"attention_mask":[1,1,1]}]}')
    assert one.fit.key == two.fit.key
    assert b"".join(v1.merge(whole(one, two)).parts) == (
        b'{"instances":[{"input_ids": [1.0, 2.50,0.0] , "n":[7,8], "attention_mask":[1,1,0]},'
        b'{"input_ids":[3.125,4e0,5],"n":[1,2],"attention_mask":[1,1,1]}]}'
    )


def test_a_row_that_is_the_array_itself_is_the_only_input():
    one, two = (rows_of([list(range(1, size))], sequence(pad={"x": 9})) for size in (3, 5))
    assert b"".join(v1.merge(whole(one, two)).parts) == b'{"instances":[[1, 2,9,9],[1, 2, 3, 4]]}'
    assert rows_of([[1, 2]]).fit.why == NOT_PADDABLE  # two inputs are named, and which is it?


def test_positions_may_have_several_numbers():
    seq = sequence(pad={"x": 0})
    one, two = (rows_of([{"x": [[1.5, 2.5]] * size}], seq) for size in (1, 2))
    assert b"".join(v1.merge(whole(one, two)).parts) == (
        b'{"instances":[{"x": [[1.5, 2.5],[0.0,0.0]]},{"x": [[1.5, 2.5], [1.5, 2.5]]}]}'
    )
    assert rows_of([{"x": [[1.5], [1.5, 2.5]]}], seq).fit.why == NOT_PADDABLE
    assert rows_of([{"x": [[1.5]]}], sequence(pad={"x": 0}, axis=2)).fit.why == NOT_PADDABLE


@pytest.mark.parametrize(
    "rows",
    [
        [{"input_ids": [1, 2], "attention_mask": [1]}],
        [{"input_ids": 1, "attention_mask": 1}],
        [{"input_ids": [], "attention_mask": []}],
        [{"input_ids": [True], "attention_mask": [True]}],
        [{"other": [1]}],
        ["text"],
        [1],
    ],
)
def test_rows_that_cannot_be_padded_keep_their_key(rows):
    parsed = rows_of(rows)
    assert (parsed.fit.key, parsed.fit.why, parsed.fit.bucket) == (None, NOT_PADDABLE, 0)


def test_kinds_other_fields_and_the_rest_of_the_body_stay_in_the_key():
    row = {"input_ids": [1, 2], "attention_mask": [1, 1]}
    same = rows_of([{"input_ids": [1], "attention_mask": [1]}])
    others = [
        rows_of([{**row, "input_ids": [1, 2.5]}]),
        rows_of([{**row, "n": 1}]),
        rows_of([{"attention_mask": [1, 1], "input_ids": [1, 2]}]),
        rows_of(json.dumps({"instances": [row], "signature_name": "s"}).encode()),
    ]
    assert rows_of([row]).fit.key == same.fit.key
    assert len({each.fit.key for each in (same, *others)}) == 5


def test_a_whole_number_is_not_padded_with_a_fraction():
    assert rows_of([{"x": [1, 2]}], sequence(pad={"x": 0.5})).fit.why == NOT_PADDABLE
    assert rows_of([{"x": [1, 2.5]}], sequence(pad={"x": 0.5})).fit.units == {"x": b"0.5"}
    assert rows_of([{"x": [1, 2]}], sequence(pad={"x": 2.0**63})).fit.why == NOT_PADDABLE  # numpy would read floats


def test_rows_with_other_inputs_to_pad_are_verified_by_themselves():
    both, one = rows_of([{"input_ids": [1], "attention_mask": [1]}]), rows_of([{"input_ids": [1]}])
    assert (one.form, one.fit.why) == (both.form, "")
    assert one.fit.form != both.fit.form
    # Longer ones are verified with the others.
    assert rows_of([{"input_ids": [1] * 9000, "attention_mask": [1] * 9000}]).fit.form == both.fit.form


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=2, max_size=4), st.booleans(), st.booleans())
def test_predictions_are_cut_back(sizes, named, with_inner):
    seq = sequence(lengths=(9,), outputs=("y",))
    requests, at = [], 0
    for rows, length in sizes:
        values = [list(range(at + row * 100, at + row * 100 + length)) for row in range(rows)]
        at += 1000
        requests.append((rows_of([{"input_ids": row, "attention_mask": [1] * length} for row in values], seq), values))
    portions = whole(*(parsed for parsed, _ in requests))
    seen = json.loads(b"".join(v1.merge(portions).parts))["instances"]
    assert len({len(row["input_ids"]) for row in seen}) == 1

    def answer(row):
        y = [[number] for number in row["input_ids"]] if with_inner else row["input_ids"]
        return {"y": y, "n": row["attention_mask"].count(1)} if named else y

    body = json.dumps({"predictions": [answer(row) for row in seen]}).encode()
    for (parsed, values), piece in zip(requests, v1.split(portions, [], body), strict=True):
        got = json.loads(b"".join(v1.assemble(parsed, [piece]).parts))["predictions"]
        alone = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in values]
        assert got == [answer(row) for row in alone]


def test_a_prediction_that_has_not_the_length_says_so():
    pair = [
        rows_of([{"input_ids": [1] * size, "attention_mask": [1] * size}], sequence(outputs=("y",))) for size in (1, 3)
    ]
    with pytest.raises(WrongRows, match=r"prediction 'y' has 2 elements, but sequence.outputs says") as error:
        v1.split(whole(*pair), [], b'{"predictions":[{"y":[1,2]},{"y":[1,2]}]}')
    assert error.value.reason == WRONG_LENGTH


def test_a_prediction_that_cannot_be_taken_apart_is_refused_and_not_left_with_padding():
    pair = [rows_of([{"x": list(range(length))}], sequence(pad={"x": 0}, outputs=("y",))) for length in (1, 3)]
    body = b'{"predictions":[{"y":[1,2,3],"z":1,"z":2},{"y":[1,2,3],"z":1}]}'
    with pytest.raises(WrongRows, match=r"a prediction can't be cut back: .*comes twice"):
        v1.split(whole(*pair), [], body)
