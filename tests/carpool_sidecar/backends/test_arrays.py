from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from carpool_sidecar.backends.arrays import (
    DTYPES,
    HEADER_LENGTH,
    Asked,
    Invalid,
    Spec,
    TooLong,
    read_v1,
    read_v2,
    write_v1,
    write_v2,
)

X = Spec("x", "FP32", (-1, 2))
N = Spec("n", "INT64", (-1,))
TEXT = Spec("t", "BYTES", (-1,))
OUT = [Spec("y", "FP32", (-1, 2))]


def v1(value):
    return json.dumps(value).encode()


def v2(*tensors, **fields):
    return json.dumps({"inputs": list(tensors), **fields}).encode()


def tensor(name="x", datatype="FP32", shape=(1, 2), **fields):
    return {"name": name, "datatype": datatype, "shape": list(shape), **fields}


def test_v1_rows_are_the_only_input_or_objects_of_all():
    arrays, columns = read_v1(v1({"instances": [[1, 2.5], [3, 4]]}), [X])
    assert (arrays["x"].dtype, arrays["x"].tolist(), columns) == (np.float32, [[1.0, 2.5], [3.0, 4.0]], False)
    arrays, _ = read_v1(v1({"instances": [{"x": [1, 2], "n": 7}, {"x": [3, 4], "n": 8}]}), [X, N])
    assert (arrays["x"].shape, arrays["n"].tolist(), arrays["n"].dtype) == ((2, 2), [7, 8], np.int64)
    arrays, _ = read_v1(v1({"instances": [{"x": [1, 2]}]}), [X])
    assert arrays["x"].tolist() == [[1.0, 2.0]]


def test_v1_columns_are_named_or_the_only_input():
    assert read_v1(v1({"inputs": {"x": [[1, 2]], "n": [3]}}), [X, N])[1]
    arrays, columns = read_v1(v1({"inputs": ["a", "ü"]}), [TEXT])
    assert (arrays["t"].tolist(), columns) == (["a", "ü"], True)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "body"),
        (v1([]), "instances"),
        (v1({"instances": []}), "at least one row"),
        (v1({"instances": [[1, 2, 3]]}), "takes shape"),
        (v1({"instances": [[1], [1, 2]]}), "instances"),
        (v1({"instances": [["a", "b"]]}), "FP32"),
        (v1({"inputs": {"z": [1]}}), "no input 'z'"),
        (v1({"inputs": {"n": [1]}}), "x missing"),
    ],
)
def test_v1_that_does_not_fit_the_model_is_named(body, words):
    with pytest.raises(Invalid, match=words):
        read_v1(body, [X] if b"inputs" not in body else [X, N])


def test_v1_objects_need_every_input_in_every_row():
    for rows in ([{"x": [1, 2], "n": 1}, {"x": [1, 2]}], [{"x": [1, 2], "n": 1}, 5], [[1, 2]]):
        with pytest.raises(Invalid, match="inputs"):
            read_v1(v1({"instances": rows}), [X, N])
    with pytest.raises(Invalid, match=r"instances\[1\]: every row needs the inputs \['n'\] only"):
        read_v1(v1({"instances": [{"n": 1}, {"n": 2, "y": 3}]}), [N])


@pytest.mark.parametrize("values", [["a", ["b", "c"]], [["a"], ["b", "c"]], [["a", ["b"]], ["c", "d"]]])
def test_texts_of_different_depths_and_lengths_are_refused(values):
    for spec in (TEXT, Spec("t", "BYTES", (-1, -1))):
        with pytest.raises(Invalid, match="arrays of different lengths or depths"):
            read_v1(v1({"instances": values}), [spec])
        with pytest.raises(Invalid, match="arrays of different lengths or depths"):
            read_v2(None, v2(tensor("t", "BYTES", [2], data=values)), [spec], OUT)


def test_an_input_without_a_declared_shape_takes_any():
    unknown = Spec("x", "FP32", ())
    assert read_v1(v1({"instances": [[1, 2]]}), [unknown])[0]["x"].shape == (1, 2)
    assert read_v1(v1({"inputs": 3}), [unknown])[0]["x"].shape == ()
    assert read_v2(None, v2(tensor(data=[1, 2])), [unknown], OUT)[0]["x"].shape == (1, 2)
    with pytest.raises(Invalid, match="has no elements"):
        read_v2(None, v2(tensor(shape=[8193, 0], data=[])), [unknown], OUT)


def test_binary_texts_count_like_json():
    data = b"\1\0\0\0x" * 10
    described = v2(tensor("t", "BYTES", [10], parameters={"binary_data_size": len(data)}))
    length = b"%d" % len(described)
    most = len(described) + len(data)
    arrays, _ = read_v2(length, described + data, [TEXT], OUT, max_text=most)
    assert arrays["t"].tolist() == ["x"] * 10
    with pytest.raises(TooLong, match=rf"{most} bytes of JSON and BYTES; onnx.maxText is {most - 1}: raise it"):
        read_v2(length, described + data, [TEXT], OUT, max_text=most - 1)
    floats = v2(tensor(shape=[1, 2], parameters={"binary_data_size": 8}))
    read_v2(b"%d" % len(floats), floats + bytes(8), [X], OUT, max_text=len(floats))


def test_scalar_outputs_are_no_rows():
    outputs = {"y": np.float32([1])[0], "z": np.float32([2])[0]}
    with pytest.raises(Invalid, match=r"no rows in common \(y \[\], z \[\]\): send `inputs` instead"):
        write_v1(outputs, columns=False)
    assert write_v1(outputs, columns=True)[1] == b'{"outputs":{"y":1.0,"z":2.0}}'


@pytest.mark.parametrize(
    ("shape", "fits"), [([8192, 0], True), ([3, 0], True), ([0, 8192], True), ([8193, 0], False), ([0, 8193], False)]
)
def test_no_shape_claims_rows_without_data(shape, fits):
    images = Spec("x", "FP32", (-1, 3, 224, 224))
    assert len(read_v2(None, v2(tensor(shape=[0, 3, 224, 224], data=[])), [images], OUT)[0]["x"]) == 0
    wide = Spec("x", "FP32", (-1, -1))
    for body in (v2(tensor(shape=shape, data=[])), v2(tensor(shape=shape, parameters={"binary_data_size": 0}))):
        if fits:
            assert read_v2(None, body, [wide], OUT)[0]["x"].shape == tuple(shape)
        else:
            with pytest.raises(Invalid, match="has no elements: send 8192 such rows at most"):
                read_v2(b"%d" % len(body), body, [wide], OUT)


@pytest.mark.parametrize("value", [1.5, 2**70, "x", None])
def test_no_number_is_cut_or_wrapped_to_fit_an_integer(value):
    with pytest.raises(Invalid):
        read_v1(v1({"instances": [value]}), [N])


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("UINT64", [2**64 - 1, 1]),  # to numpy by itself, floats
        ("INT64", [-(2**63), 2**53 + 1]),
        ("FP32", [10**30, 2.5]),  # likewise objects
        ("FP64", [1e308, 10**200]),
        ("BYTES", ["ends in\0", ""]),  # numpy's own strings lose the NUL
    ],
)
def test_what_fits_the_datatype_arrives_whole(datatype, values):
    spec = Spec("x", datatype, (-1,))
    for arrays in (
        read_v1(v1({"instances": values}), [spec])[0],
        read_v2(None, v2(tensor(datatype=datatype, shape=[2], data=values)), [spec], OUT)[0],
    ):
        assert arrays["x"].dtype == np.dtype(DTYPES[datatype])
        np.testing.assert_array_equal(arrays["x"], np.array(values, dtype=DTYPES[datatype]))


@pytest.mark.parametrize(
    ("datatype", "value"), [("FP16", 65520), ("FP32", 1e39), ("FP64", 10**309), ("UINT64", 2**64), ("BOOL", 2**64)]
)
def test_what_does_not_fit_the_datatype_is_refused_not_made_infinite(datatype, value):
    with pytest.raises(Invalid, match=f"out of bounds|too large|is {datatype}"):
        read_v1(v1({"instances": [value]}), [Spec("x", datatype, (-1,))])


@pytest.mark.parametrize(
    ("datatype", "values"),
    [("FP32", [True, False]), ("FP16", [True]), ("INT64", [True, False]), ("UINT8", [[False, True]])],
)
def test_booleans_are_no_numbers(datatype, values):
    shape = np.asarray(values).shape
    spec = Spec("x", datatype, (-1,) * len(shape))
    with pytest.raises(Invalid, match=f"'x' is {datatype}, got bool"):
        read_v1(v1({"instances": values}), [spec])
    with pytest.raises(Invalid, match=f"'x' is {datatype}, got bool"):
        read_v2(None, v2(tensor(datatype=datatype, shape=shape, data=values)), [spec], OUT)


def test_v1_answers_by_row_or_by_column():
    two = {"y": np.array([[1.5], [2.0]], np.float32), "z": np.array([True, False])}
    one = {"y": two["y"]}
    assert json.loads(write_v1(one, columns=False)[1]) == {"predictions": [[1.5], [2.0]]}
    assert json.loads(write_v1(one, columns=True)[1]) == {"outputs": [[1.5], [2.0]]}
    assert json.loads(write_v1(two, columns=False)[1]) == {
        "predictions": [{"y": [1.5], "z": True}, {"y": [2.0], "z": False}]
    }
    assert json.loads(write_v1(two, columns=True)[1]) == {"outputs": {"y": [[1.5], [2.0]], "z": [True, False]}}


def test_rows_are_not_made_of_outputs_that_have_none_in_common():
    outputs = {"y": np.zeros((3, 2)), "state": np.zeros((2, 3))}
    with pytest.raises(Invalid, match=r"no rows in common \(y \[3, 2\], state \[2, 3\]\): send `inputs`"):
        write_v1(outputs, columns=False)
    with pytest.raises(Invalid, match="no rows in common"):
        write_v1({"y": np.zeros((3, 2)), "loss": np.array(1.0)}, columns=False)
    assert json.loads(write_v1({"loss": np.array(1.0)}, columns=False)[1]) == {"predictions": 1.0}


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name != "BYTES"])
def test_v2_binary_goes_through_byte_for_byte(datatype):
    dtype = np.dtype(DTYPES[datatype])
    data = bytes([0, 1] * dtype.itemsize) if datatype == "BOOL" else bytes(range(2 * dtype.itemsize))
    spec = Spec("x", datatype, (-1,))
    head = v2(
        tensor(datatype=datatype, shape=[len(data) // dtype.itemsize], parameters={"binary_data_size": len(data)})
    )
    arrays, _ = read_v2(b"%d" % len(head), head + data, [spec], [spec])
    headers, body = write_v2("m", arrays, [spec], Asked([("x", True)], "7"))
    assert body.endswith(data)
    answer = json.loads(body[: -len(data)])
    assert (answer["id"], answer["outputs"][0]["parameters"]) == ("7", {"binary_data_size": len(data)})
    assert dict(headers)[b"inference-header-content-length"] == b"%d" % (len(body) - len(data))


def test_v2_strings_in_binary_and_json():
    data = b"\x01\0\0\0a" + b"\0\0\0\0" + b"\x02\0\0\0\xc3\xbc"
    head = v2(tensor("t", "BYTES", [3], parameters={"binary_data_size": len(data)}))
    arrays, _ = read_v2(b"%d" % len(head), head + data, [TEXT], [TEXT])
    assert arrays["t"].tolist() == ["a", "", "ü"]
    assert write_v2("m", arrays, [TEXT], Asked([("t", True)], None))[1].endswith(data)
    _, body = write_v2("m", arrays, [TEXT], Asked([("t", False)], None))
    assert json.loads(body)["outputs"][0]["data"] == ["a", "", "ü"]
    broken = head + data[:-2] + b"\xff\xff"
    with pytest.raises(Invalid, match="UTF-8"):
        read_v2(b"%d" % len(head), broken, [TEXT], [TEXT])


def test_v2_outputs_are_those_asked_for_in_the_form_asked_for():
    body = v2(tensor(data=[1, 2]), parameters={"binary_data_output": True})
    assert read_v2(None, body, [X], OUT)[1].outputs == [("y", True)]
    body = v2(tensor(data=[[1, 2]]), outputs=[{"name": "y", "parameters": {"binary_data": True}}], id="a")
    assert read_v2(None, body, [X], OUT)[1] == Asked([("y", True)], "a")
    assert read_v2(None, v2(tensor(data=[1, 2])), [X], OUT)[1] == Asked([("y", False)], None)


def test_half_floats_leave_in_binary_as_json_has_no_form_for_them():
    spec = Spec("y", "FP16", (-1,))
    _, body = write_v2("m", {"y": np.array([1.5], np.float16)}, [spec], Asked([("y", False)], None))
    assert body.endswith(np.array([1.5], "<f2").tobytes())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (v2(tensor("z", data=[1, 2])), "no input 'z'"),
        (v2(tensor(datatype="FP64", data=[1, 2])), "FP32, not FP64"),
        (v2(tensor(shape=[2, 1], data=[1, 2])), "takes shape"),
        (v2(tensor(shape=[2], data=[1, 2])), "takes shape"),
        (v2(tensor(data=["a", "b"])), "FP32"),
        (v2(tensor(data=[1, 2]), outputs=[{"name": "w"}]), "no output w"),
        (b"[", "body"),
    ],
)
def test_v2_that_does_not_fit_the_model_is_named(body, words):
    with pytest.raises(Invalid, match=words):
        read_v2(None, body, [X], OUT)


@pytest.mark.parametrize("data", [(9).to_bytes(4, "little") + b"abc", b"\x01\0\0\0a" + b"\xff" * 4, b"\x01\0\0"])
def test_v2_strings_that_are_cut_off_are_refused(data):
    count = 1 if len(data) < 8 or data[0] == 9 else 2
    head = v2(tensor("t", "BYTES", [count], parameters={"binary_data_size": len(data)}))
    with pytest.raises(Invalid, match=r"bytes are left|are no BYTES"):
        read_v2(b"%d" % len(head), head + data, [TEXT], [TEXT])


def test_v2_shapes_have_no_negative_sizes():
    for fields in ({"data": [1, 2, 3, 4]}, {"parameters": {"binary_data_size": 16}}):
        head = v2(tensor(shape=[-1, 2], **fields))
        with pytest.raises(Invalid, match=r"inputs\[0\].shape: \[-1, 2\] has a negative size"):
            read_v2(b"%d" % len(head), head + bytes(16 if "parameters" in fields else 0), [X], OUT)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"outputs": 5}, r"Expected `array`, got `int` - at `\$\.outputs`"),
        ({"outputs": [{}]}, "required field `name`"),
        ({"outputs": [{"name": "y", "parameters": {"classification": 3}}]}, r"outputs\[0\].*classification"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "an output comes twice: name each once"),
        ({"parameters": 5}, "Expected `object`"),
    ],
)
def test_v2_that_asks_for_what_is_not_served_is_named(fields, words):
    with pytest.raises(Invalid, match=words):
        read_v2(None, v2(tensor(data=[1, 2]), **fields), [X], OUT)


@pytest.mark.parametrize("shape", [(0, 7), (1, 0, 4)])
@pytest.mark.parametrize("datatype", ["FP32", "FP16", "INT64"])
def test_an_empty_output_may_be_asked_for_in_binary(datatype, shape):
    output = np.zeros(shape, DTYPES[datatype])
    headers, body = write_v2("m", {"y": output}, [Spec("y", datatype, shape)], Asked([("y", True)], None))
    head = json.loads(body[: int(dict(headers)[HEADER_LENGTH])])
    assert head["outputs"][0] == {
        "name": "y", "datatype": datatype, "shape": list(shape), "parameters": {"binary_data_size": 0}
    }  # fmt: skip


def test_texts_for_numbers_take_no_more_memory_than_they_have():
    """numpy would make each of them as long as the longest: 400 MB of these 110 kB."""
    body = v1({"instances": ["a" * 100_000, *["b"] * 1000]})
    tracemalloc.start()
    with pytest.raises(Invalid, match="'x' is FP32, got text"):
        read_v1(body, [Spec("x", "FP32", (-1,))])
    assert tracemalloc.get_traced_memory()[1] < 10 * len(body)
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("values", "got"),
    [([1, None], "null"), ([[1, 2], ["3", 4]], "text"), ([{}, True], "bool and object"), ([1, [2, "x"]], "text")],
)
def test_values_of_another_kind_are_named(values, got):
    with pytest.raises(Invalid, match=f"'x' is FP32, got {got}"):
        read_v1(v1({"instances": values}), [Spec("x", "FP32", (-1,))])


def test_v2_without_data_in_the_request_is_named():
    shared = tensor(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 8})
    with pytest.raises(Invalid, match=r"inputs\[0\]: shared memory"):
        read_v2(None, v2(shared), [X], OUT)
    with pytest.raises(Invalid, match="a body without JSON"):
        read_v2(b"0", b"12345678", [X], OUT)


def test_v2_misses_an_input():
    with pytest.raises(Invalid, match="n missing"):
        read_v2(None, v2(tensor(data=[1, 2])), [X, N], OUT)
