from __future__ import annotations

import json

import pytest
from v2_messages import ENDPOINT, LENGTH, binary, blob, parse, tensor

from carpool_sidecar import protocols
from carpool_sidecar.protocols import headers, v2


def forwarded(body, header_length=None):
    parsed = parse(body, header_length)
    assert (parsed.rows, parsed.tokens, parsed.state) == (1, 1, None)
    return parsed.alone, parsed.why


# --- parse


def test_what_the_driver_needs():
    parsed = parse(
        {
            "id": "42",
            "inputs": [tensor(shape=(3, 2)), tensor("y", shape=(3,), datatype="INT32", data=[1, 2, 3])],
            "parameters": {"timeout": 5000, "priority": 2, "binary_data_size": 7},
        }
    )
    assert (parsed.rows, parsed.tokens, parsed.timeout_s, parsed.priority) == (3, 6, 0.005, 2)
    assert parsed.state.id == b'"42"'
    assert parsed.mergeable
    assert not parsed.first_by_protocol


def test_a_timeout_or_priority_of_zero_is_the_default():
    parsed = parse({"inputs": [tensor()], "parameters": {"timeout": 0, "priority": 0}})
    assert (parsed.timeout_s, parsed.priority) == (None, None)


BASE = {"inputs": [tensor()], "outputs": [{"name": "o"}], "parameters": {"p": 1}}
SAME = [
    {**BASE, "id": "other"},
    {**BASE, "parameters": {"p": 1, "timeout": 7, "priority": 1, "binary_data_size": 3}},
    {**BASE, "inputs": [tensor(shape=(4, 2))]},
    {**BASE, "inputs": [tensor(data=[2, 7])]},
]
OTHER = [
    {"inputs": [tensor()]},
    {**BASE, "inputs": [tensor("y")]},
    {**BASE, "inputs": [tensor(datatype="FP64")]},
    {**BASE, "inputs": [tensor(shape=(1, 3))]},
    {**BASE, "inputs": [tensor(shape=(1, 2, 1))]},
    {**BASE, "inputs": [tensor(data=[[1, 2]])]},
    {**BASE, "inputs": [tensor(parameters={"content_type": "np"})]},
    {**BASE, "inputs": [tensor(extra=1)]},
    {**BASE, "inputs": [tensor(), tensor("y")]},
    {**BASE, "inputs": [tensor("y"), tensor()]},
    {**BASE, "outputs": [{"name": "q"}]},
    {**BASE, "outputs": [{"name": "o", "parameters": {"binary_data": True}}]},
    {**BASE, "parameters": {"p": 2}},
    {**BASE, "parameters": {"p": 1, "binary_data_output": True}},
    {**BASE, "model_version": "3"},
]


def test_the_key():
    base = parse(BASE).key
    assert {parse(body).key for body in SAME} == {base}
    others = [parse(body).key for body in OTHER]
    assert base not in others
    assert len(set(others)) == len(OTHER)
    assert parse(BASE, lines=[(b"x-tenant", b"a")]).key != base
    assert parse(*binary({**BASE, "inputs": [blob(8)]}, bytes(8))).key != base
    versioned = protocols.route(b"/v2/models/m/versions/1/infer")
    assert versioned is not None
    assert v2.parse(versioned, headers.read([]), json.dumps(BASE).encode()).key != base


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"inputs": [tensor()], "parameters": {"sequence_id": 7, "sequence_start": True}}, "sequence"),
        ({"inputs": [tensor(), tensor("y", shape=(2, 2))]}, "unequal-rows"),
        ({"inputs": [tensor(shape=(), data=[1])]}, "scalar"),
        ({"inputs": [tensor(), tensor("y", shape=(), data=[1])]}, "scalar"),
        ({"inputs": [tensor(shape=(2, 0), data=[])]}, "empty"),
        ({"inputs": [tensor(shape=(2, 0), data=[[], []])]}, "empty"),
        ({"inputs": [tensor(shape=(1_000_000_000, 0), data=[])]}, "empty"),
        ({"inputs": [tensor(shape=(0, 2), data=[])]}, "empty"),
        ({"inputs": [tensor(), tensor("y", shape=(0, 3), data=[])]}, "empty"),
        ({"inputs": []}, "empty"),
        ({"inputs": [tensor(shape=(1, 2), data=[[1, 2], [3]])]}, "nesting"),
        ({"inputs": [tensor(shape=(2, 1), data=[[1], []])]}, "nesting"),
        ({"inputs": [tensor(shape=(1, 2), data=[[]])]}, "nesting"),
        ({"inputs": [tensor(shape=(2, 2), data=[[1, 2, 3, 4]])]}, "nesting"),
        ({"inputs": [tensor(shape=(2, 2), data=[[[1], [2]], [[3], [4]]])]}, "nesting"),
        ({"inputs": [tensor(datatype="INT32", data=[1.5, 2])]}, "kinds"),
        ({"inputs": [tensor(data=[None, 2])]}, "kinds"),
        ({"inputs": [tensor(data=["NaN", 2])]}, "kinds"),
        ({"inputs": [tensor(datatype="BOOL", data=[0, 1])]}, "kinds"),
        ({"inputs": [tensor(datatype="BYTES", data=["a", 1])]}, "kinds"),
        ({"inputs": [tensor(datatype="FP16", data=[1, 2])]}, "kinds"),
        (
            {"inputs": [tensor(data=[1, 2])], "outputs": [{"name": "o", "parameters": {"classification": 3}}]},
            "classification",
        ),
        (
            {"inputs": [tensor()], "outputs": [{"name": "o", "parameters": {"shared_memory_region": "r"}}]},
            "shared-memory",
        ),
        (
            {
                "inputs": [
                    {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"shared_memory_region": "r"}}
                ]
            },
            "shared-memory",
        ),
    ],
)
def test_what_is_forwarded_as_it_came(body, reason):
    assert parse(body).alone == reason


def test_an_output_may_be_called_classification():
    assert parse({"inputs": [tensor()], "outputs": [{"name": "classification"}]}).mergeable


def test_bodies_that_are_not_read_are_forwarded():
    assert parse(b"\x1f\x8b", lines=[(b"content-encoding", b"gzip")]).alone == "encoded"
    assert parse(b"\x00\x01\x02", 0).alone == "raw"
    surrogate = b'{"inputs":[{"name":"x","shape":[1],"datatype":"BYTES","data":["\\ud800"]}]}'
    assert parse(surrogate).alone == "surrogates"


def test_the_rows_of_one_that_is_forwarded_are_counted():
    assert parse({"inputs": [tensor(shape=(3, 2)), tensor("y", shape=(2, 2))]}).rows == 3


SHARED = {"name": "x", "shape": [2**63 - 1], "datatype": "FP32", "parameters": {"shared_memory_region": "r"}}


@pytest.mark.parametrize(
    "claim", [tensor(shape=(2**63 - 1, 0), data=[]), tensor(shape=(2**63 - 1, 0), data=[[]]), SHARED]
)
def test_rows_that_did_not_come_are_not_counted(claim):
    # Three such requests would overflow the tuner's counters, and one would allow any number of repeats in a bisection.
    parsed = parse({"inputs": [claim]})
    assert (parsed.rows, parsed.tokens) == (1, 1)
    parsed = parse({"inputs": [tensor("y", shape=(3, 2)), claim]})
    assert (parsed.rows, parsed.tokens) == (3, 6)


MISSING = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "body: JSON is empty"),
        (b"[]", "body: expected object, got array"),
        (b'{"inputs":[', "body: JSON ends before it is complete"),
        (b'{"inputs":[{"data":[NaN]}]}', "body: JSON has no NaN"),
        (b'{"inputs":[],"inputs":[]}', 'body: member "inputs" comes twice'),
        (b'{"inputs":[{"name":"x","name":"y"}]}', 'inputs[0]: member "name" comes twice'),
        ({}, "inputs: missing"),
        ({"inputs": {}}, "inputs: expected array, got object"),
        ({"inputs": [7]}, "inputs: expected object, got int - at $[0]"),
        *(
            ({"inputs": [{key: value for key, value in MISSING.items() if key != name}]}, f"inputs[0].{name}: missing")
            for name in ("name", "shape", "datatype")
        ),
        ({"inputs": [{key: value for key, value in MISSING.items() if key != "data"}]}, "got neither"),
        ({"inputs": [tensor(parameters={"binary_data_size": 8})]}, "got both"),
        ({"inputs": [blob(8)]}, "inputs[0].parameters.binary_data_size: needs the header"),
        ({"inputs": [tensor(), tensor()]}, "inputs[1].name: 'x' comes twice"),
        ({"inputs": [{**tensor(), "name": 7}]}, "inputs[0].name: expected a string, got a number"),
        ({"inputs": [tensor(datatype="FLOAT", data=[1, 2])]}, "inputs[0].datatype: 'FLOAT', expected one of BOOL"),
        (
            {"inputs": [tensor(), {**tensor("y"), "data": [1] * 5, "shape": [2, 3]}]},
            "inputs[1].data: 5 values for shape [2, 3], expected 6",
        ),
        ({"inputs": [{**tensor(), "data": []}]}, "inputs[0].data: 0 values"),
        ({"inputs": [{**tensor(), "data": {"a": 1}}]}, "inputs[0].data: expected an array, got an object"),
        ({"inputs": [{**tensor(), "data": "ab"}]}, "inputs[0].data: expected an array, got a string"),
        ({"inputs": [{**tensor(), "data": [{"a": 1}, 2]}]}, "inputs[0].data: expected elements of FP32, got an object"),
        ({"inputs": [{**tensor(), "shape": [-1, 2]}]}, "inputs[0].shape: dimension -1"),
        ({"inputs": [{**tensor(), "shape": [1.0, 2]}]}, "inputs[0].shape: expected an array of integers, got [1.0, 2]"),
        ({"inputs": [{**tensor(), "shape": [True]}]}, "inputs[0].shape: expected an array of integers"),
        ({"inputs": [{**tensor(), "shape": ["1"]}]}, "inputs[0].shape: expected an array of integers"),
        ({"inputs": [{**tensor(), "shape": 2}]}, "inputs[0].shape: expected an array of integers"),
        ({"inputs": [{**tensor(), "shape": [2**63]}]}, "inputs[0].shape: dimension 9223372036854775808"),
        ({"inputs": [{**tensor(), "shape": [10**30]}]}, "inputs[0].shape: dimension of more than 20 digits"),
        ({"inputs": [{**tensor(), "shape": [2**40, 2**40]}]}, "inputs[0].shape: more than 2^63-1 elements"),
        ({"inputs": [{**tensor(), "shape": [2**40]}]}, "inputs[0].data: 2 values for shape [1099511627776]"),
        ({"inputs": [{**tensor(), "shape": [1] * 65}]}, "inputs[0].shape: 65 dimensions"),
        ({"inputs": [tensor()], "id": 7}, "id: expected a string, got a number"),
        ({"inputs": [tensor()], "id": None}, "id: expected a string, got null"),
        ({"inputs": [tensor()], "parameters": None}, "parameters: expected object, got null"),
        ({"inputs": [tensor()], "parameters": []}, "parameters: expected object, got array"),
        ({"inputs": [tensor()], "parameters": {"timeout": "5"}}, "parameters.timeout: expected an integer"),
        ({"inputs": [tensor()], "parameters": {"timeout": -5}}, "parameters.timeout: expected an integer"),
        ({"inputs": [tensor()], "parameters": {"priority": 1.5}}, "parameters.priority: expected an integer"),
        ({"inputs": [{**tensor(), "parameters": 3}]}, "inputs[0].parameters: expected object, got int"),
    ],
)
def test_what_cannot_be_read_is_forwarded_and_the_reason_kept(body, message):
    reason, why = forwarded(body)
    assert reason == "malformed"
    assert message in why


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"inputs":' + b"[" * 100 + b"]" * 100 + b"}", "body: over 64; limits.maxDepth is 64"),
        (b'{"inputs":[]}' + b" " * 2**21, "body: 2097165; limits.maxText is 2Mi"),
        ({"inputs": [tensor(f"x{index}") for index in range(257)]}, "inputs: over 256; limits.maxTensors is 256"),
        ({"inputs": [tensor()], "parameters": {str(n): 0 for n in range(2049)}}, "parameters: 2049; limits.maxKeys is"),
        (
            {"inputs": [tensor(f"x{n}", parameters={str(m): 0 for m in range(100)}) for n in range(21)]},
            "inputs[20].parameters: over 2048; limits.maxKeys is 2048",
        ),
        (
            {"inputs": [tensor(datatype="BYTES", shape=(9000,), data=[""] * 9000)]},
            "body: 9007; limits.maxStrings is 8192",
        ),
    ],
)
def test_what_is_more_than_the_limits_is_forwarded(body, message):
    reason, why = forwarded(body)
    assert reason == "limits"
    assert message in why


def test_elements_of_binary_bytes_are_limited_over_all_tensors():
    inputs = [blob(4 * 4096, name, (4096,), "BYTES") for name in ("x", "y", "z")]
    assert parse(*binary({"inputs": inputs[:2]}, bytes(8 * 4096))).mergeable
    reason, why = forwarded(*binary({"inputs": inputs}, bytes(12 * 4096)))
    assert (reason, why) == ("limits", "inputs[2]: over 8192; limits.maxStrings is 8192")


def test_binary_tensors_may_be_as_large_as_the_body_may_be():
    parsed = parse(*binary({"inputs": [blob(2**22, shape=(1, 2**20))]}, bytes(2**22)))
    assert parsed.mergeable
    assert parsed.expansion < 2000


def test_what_is_held_beside_the_body_is_counted():
    assert parse({"inputs": [tensor()]}).expansion < 1000
    rows = 4096
    parsed = parse(*binary({"inputs": [blob(4 * rows, shape=(rows,), datatype="BYTES")]}, bytes(4 * rows)))
    assert parsed.expansion > 32 * rows
    text = json.dumps({"inputs": [tensor(shape=(1, 50000), data=[1] * 50000)]}).encode()
    assert parse(text).expansion < 1000
    assert parse(bytearray(text)).expansion > len(text)


ONE = {"inputs": [blob(8)]}


@pytest.mark.parametrize(
    ("body", "length", "message"),
    [
        (*binary(ONE, bytes(7)), "inputs[0].parameters.binary_data_size: the data ends 1 bytes beyond the body"),
        (*binary(ONE, bytes(9)), "binary data: 9 bytes follow the JSON header, its inputs name 8"),
        (*binary({"inputs": [blob(7)]}, bytes(7)), "inputs[0]: 7 bytes of binary data for FP32 [1, 2], expected 8"),
        (*binary({"inputs": [blob(-1)]}), "inputs[0].parameters.binary_data_size: expected a number of bytes, got -1"),
        (*binary({"inputs": [blob("8")]}), "inputs[0].parameters.binary_data_size: expected a number of bytes"),
        (*binary({"inputs": [blob(10**40)]}), "inputs[0].parameters.binary_data_size: expected a number of bytes"),
        (*binary({"inputs": [blob(8, shape=(2**61,))]}, bytes(8)), "8 bytes of binary data for FP32"),
        (
            *binary({"inputs": [blob(5, shape=(1,), datatype="BYTES")]}, b"\2\0\0\0a"),
            "1 BYTES elements take 6 bytes of binary data, got 5",
        ),
        (
            *binary({"inputs": [blob(6, shape=(1,), datatype="BYTES")]}, b"\1\0\0\0ab"),
            "1 BYTES elements take 5 bytes of binary data, got 6",
        ),
        (
            *binary({"inputs": [blob(3, shape=(1,), datatype="BYTES")]}, b"\1\0\0"),
            "3 bytes of binary data for BYTES [1]",
        ),
        (
            *binary({"inputs": [blob(8, shape=(2,), datatype="BYTES")]}, b"\4\0\0\0abcd"),
            "ends before the length of element 1",
        ),
        (
            *binary({"inputs": [blob(8, shape=(2,), datatype="BYTES")]}, b"\xff\xff\xff\xffabcd"),
            "ends before the length of element 1",
        ),
        (
            *binary({"inputs": [blob(4, shape=(2**62,), datatype="BYTES")]}, bytes(4)),
            "4 bytes of binary data for BYTES",
        ),
        (b"{}", 3, "Inference-Header-Content-Length: '3' for a body of 2 bytes"),
        (b'{"inputs":[]}', 5, "JSON ends before it is complete"),
    ],
)
def test_binary_bodies_that_cannot_be_read_are_forwarded(body, length, message):
    reason, why = forwarded(body, length)
    assert reason == "malformed"
    assert message in why


@pytest.mark.parametrize("length", [b"-1", b"x", b"1e2", b"9999999999999", b"+5", b" 5"])
def test_a_bad_header_length_is_forwarded(length):
    parsed = v2.parse(ENDPOINT, headers.read([(LENGTH, length)]), b"{}     ")
    assert parsed.alone == "malformed"
    assert "Inference-Header-Content-Length" in parsed.why
