"""The transport is bit-exact: through an echoing model, numbers come back digit for digit and tensors byte for byte.

Each shape of request goes three ways: ``alone``, as it came; ``merged``, one call with others for sure; ``split``, in
parts no larger than two rows, put together again.
"""

from __future__ import annotations

import json
import random
import struct

import pytest

LENGTH = b"inference-header-content-length"
WAYS = ("alone", "merged", "split")


@pytest.fixture
async def through(world):
    """Send requests one of the three ways; returns their answers, once it is sure that they went that way."""

    async def through(way, *starts, rows):
        batch = {"alone": 1024, "merged": 1024, "split": 2}[way]
        sidecar = await world.sidecar(parameters={"*": {"maxBatch": batch, "maxInFlight": 1}})
        client = world.client(sidecar.data.address)
        if way == "alone":
            answers = [await start(client) for start in starts]
            assert len(world.model.received) == len(starts)
            return answers
        first = await world.occupy(client)
        asked = await world.queue(sidecar, *[lambda start=start: start(client) for start in starts])
        world.model.release()
        await first
        answers = [await one for one in asked]
        calls = len(world.model.received) - 1
        assert calls == 1 if way == "merged" else calls >= sum(rows) / 2
        return answers

    return through


# ------------------------------------------------------------------------------------------------------------------ V1

INTEGERS = [b"0", b"-0", b"7", b"9223372036854775807", b"-9223372036854775808", b"9007199254740993"]
LARGE = [b"18446744073709551615", b"-9223372036854775809", b"1" + b"0" * 400]
FLOATS = [
    *(
        b"-0.0",
        b"0.0",
        b"0.10",
        b"1.10000",
        b"1e5",
        b"1E5",
        b"1E+05",
        b"1e-7",
        b"1e400",
        b"-1E400",
        b"1e-400",
        b"5e-324",
    ),
    *(b"1.7976931348623157e308", b"0.30000000000000004", b"12345678901234567890.125", b"100000000000000000000000.0"),
]
STRINGS = [rb'""', rb'"\u00e9\n\/\\\""', '"é漢🙂"'.encode(), rb'"\ud83d\ude42"', b'"],[{\\"instances\\":"', b'"1.0"']
OBJECTS = [b'{"a": 1.50, "b":"x"}', b'{"a": -0.0, "b":"\\u0000"}', b'{"a": 1E400, "b":""}']
NESTED = [b"[[1.10, 2],[3e0,4]]", b"[[1,2.0],[ 3 , 4 ]]", b"[[-0.0,1],\t[2,\n3]]"]
LITERALS = [b"[true, null]", b"[false,null]", b"[ true,null ]"]


def _random_numbers(seed):
    dice = random.Random(seed)

    def digits(most):
        return "".join(dice.choices("0123456789", k=dice.randint(1, most)))

    def number():
        exponent = dice.choice("eE") + dice.choice(["", "+", "-"]) + digits(4) if dice.random() < 0.5 else ""
        return dice.choice(["", "-"]) + str(int(digits(30))) + "." + digits(30) + exponent

    return [number().encode() for _ in range(200)]


V1_ROWS = {
    "integers": INTEGERS,
    "floats": FLOATS,
    "random": _random_numbers(3),
    "strings": STRINGS,
    "objects": OBJECTS,
    "nested": NESTED,
    "literals": LITERALS,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", V1_ROWS.values(), ids=V1_ROWS)
async def test_v1_rows_come_back_digit_for_digit(through, rows, way):
    requests = [[row] for row in rows] if way != "split" else [[rows[0]], rows, rows[1:]]
    texts = [b",".join(request) for request in requests]
    starts = [lambda client, text=text: client.predict(text) for text in texts]
    answers = await through(way, *starts, rows=[len(request) for request in requests])
    assert [answer.status for answer in answers] == [200] * len(requests)
    assert [answer.body for answer in answers] == [b'{"predictions":[%b]}' % text for text in texts]


async def test_v1_integers_beyond_64_bits_go_alone_and_come_back_digit_for_digit(through):
    starts = [lambda client, row=row: client.predict(row) for row in LARGE]
    answers = await through("alone", *starts, rows=[1] * len(LARGE))
    assert [answer.body for answer in answers] == [b'{"predictions":[%b]}' % row for row in LARGE]


@pytest.mark.parametrize("way", WAYS)
async def test_v1_fields_beside_the_rows_come_back_as_they_are(through, way):
    head = b'{"signature_name":"s\\u0065rve","scale":1.50E1,"instances":[%b]}'
    texts = [b"1.10", b"2e0", b"-0.0,4.5,6.25"]
    starts = [lambda client, text=text: client.send(b"POST", b"/v1/models/m:predict", head % text) for text in texts]
    answers = await through(way, *starts, rows=[1, 1, 3])
    for answer, text in zip(answers, texts, strict=True):
        assert b"[%b]" % text in answer.body
        assert b'"scale":1.50E1' in answer.body
        assert b's\\u0065rve"' in answer.body


# ----------------------------------------------------------------------------------------------------------- V2, binary

WIDTHS = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip
# Not-a-numbers with a payload, infinities, negative zero, the smallest subnormal: what a conversion would lose.
SPECIAL = {
    "FP16": [0x7E01, 0xFC00, 0x8000, 0x0001],
    "BF16": [0x7F81, 0xFF80, 0x8000, 0x0001],
    "FP32": [0x7FC00001, 0xFF800000, 0x80000000, 0x00000001],
    "FP64": [0x7FF8000000000001, 0xFFF0000000000000, 0x8000000000000000, 0x0000000000000001],
}


def _elements(datatype, count, dice):
    if datatype == "BYTES":
        texts = [dice.randbytes(dice.choice([0, 1, 4, 300])) for _ in range(count)]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    width = WIDTHS[datatype]
    special = b"".join(number.to_bytes(width, "little") for number in SPECIAL.get(datatype, ()))
    data = (special + dice.randbytes(count * width))[: count * width]
    return bytes(byte & 1 for byte in data) if datatype == "BOOL" else data


def _split_answer(answer):
    at = int(answer.header(LENGTH))
    return json.loads(answer.body[:at]), answer.body[at:]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("datatype", [*WIDTHS, "BYTES"])
async def test_v2_binary_tensors_come_back_byte_for_byte(world, through, datatype, way):
    dice, sizes = random.Random(datatype), [1, 3, 2, 5]
    # Two tensors each, so that one's place depends on the other's size.
    tensors = [
        [("x", datatype, [rows, 2], _elements(datatype, 2 * rows, dice)), ("n", "INT8", [rows], dice.randbytes(rows))]
        for rows in sizes
    ]
    requests = [world.binary(each, id=f"caller {number}") for number, each in enumerate(tensors)]
    starts = [lambda client, request=request: client.infer(*request) for request in requests]
    answers = await through(way, *starts, rows=sizes)
    for number, (answer, each) in enumerate(zip(answers, tensors, strict=True)):
        assert answer.status == 200
        head, data = _split_answer(answer)
        assert data == b"".join(data for _, _, _, data in each)
        assert head["id"] == f"caller {number}"
        assert [(one["name"], one["datatype"], one["shape"]) for one in head["outputs"]] == [one[:3] for one in each]
        assert [one["parameters"] for one in head["outputs"]] == [{"binary_data_size": len(one[3])} for one in each]


async def test_a_megabyte_of_binary_comes_back_byte_for_byte(world, through):
    dice = random.Random(5)
    tensors = [("x", "FP32", [rows, 1024], dice.randbytes(rows * 4096)) for rows in (256, 3, 300)]
    requests = [world.binary([each]) for each in tensors]
    starts = [lambda client, request=request: client.infer(*request) for request in requests]
    answers = await through("merged", *starts, rows=[256, 3, 300])
    assert [_split_answer(answer)[1] for answer in answers] == [data for _, _, _, data in tensors]


# ------------------------------------------------------------------------------------------------------------- V2, JSON

JSON_LEAVES = {
    "BOOL": [b"true", b"false"],
    "UINT8": [b"0", b"255"],
    "UINT16": [b"0", b"65535"],
    "UINT32": [b"0", b"4294967295"],
    "UINT64": [b"0", b"18446744073709551615"],
    "INT8": [b"-128", b"127"],
    "INT16": [b"-32768", b"32767"],
    "INT32": [b"-2147483648", b"2147483647"],
    "INT64": [b"-9223372036854775808", b"9223372036854775807", b"9007199254740993"],
    "FP16": [b"-0.0", b"65504", b"6e-8", b"1E400"],
    "BF16": [b"-0.0", b"1e38", b"1.10"],
    "FP32": FLOATS,
    "FP64": [*FLOATS, b"3"],
    "BYTES": STRINGS,
}


def _json_request(datatype, rows, leaves, *, nested):
    comma = b"," if datatype == "BYTES" else b" , "  # between strings, space that means nothing is not kept
    pairs = [leaves[2 * row] + comma + leaves[2 * row + 1] for row in range(rows)]
    data = b",".join([b"[%b]" % pair for pair in pairs] if nested else pairs)
    text = b'{"name":"x","datatype":"%b","shape":[%d,2],"data":[%b]}' % (datatype.encode(), rows, data)
    return b'{"inputs":[%b]}' % text, data


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("datatype", JSON_LEAVES)
async def test_v2_json_tensors_come_back_digit_for_digit(through, datatype, way, nested):
    dice, sizes = random.Random(datatype), [1, 3, 2]
    requests = [
        _json_request(datatype, rows, dice.choices(JSON_LEAVES[datatype], k=2 * rows), nested=nested) for rows in sizes
    ]
    starts = [lambda client, body=body: client.infer(body) for body, _ in requests]
    if datatype in {"FP16", "BF16"}:
        way = "alone"  # the protocol has no JSON for them, so their server decides, request by request
    answers = await through(way, *starts, rows=sizes)
    for answer, rows, (_, data) in zip(answers, sizes, requests, strict=True):
        assert answer.status == 200
        assert b'"shape":[%d,2]' % rows in answer.body
        assert b'"data":[%b]' % data in answer.body


async def test_half_floats_in_json_are_never_merged(world):
    sidecar, client = await world.start()
    first = await world.occupy(client)
    bodies = [_json_request("FP16", 1, [b"1.50", b"2"], nested=False)[0] for _ in range(2)]
    asked = await world.queue(sidecar, *[lambda body=body: client.infer(body) for body in bodies])
    world.model.release()
    for one in (first, *asked):
        assert (await one).status == 200
    assert [call.body for call in world.model.received[1:]] == bodies
    assert sidecar.driver.counts.alone["m", "kinds"] == 2


@pytest.mark.parametrize("way", WAYS)
async def test_v2_json_and_binary_tensors_in_one_request_come_back_exactly(through, way):
    sizes = [1, 2, 3]
    requests = []
    for number, rows in enumerate(sizes):
        binary = bytes(range(8 * number, 8 * number + 4 * rows))
        data = b",".join([b"1.%d0" % number] * rows)
        head = (
            b'{"inputs":[{"name":"j","datatype":"FP64","shape":[%d],"data":[%b]},'
            b'{"name":"b","datatype":"FP32","shape":[%d,1],"parameters":{"binary_data_size":%d}}],'
            b'"parameters":{"binary_data_output":true}}'
        ) % (rows, data, rows, len(binary))
        requests.append((head, binary, data))
    starts = [
        lambda client, head=head, binary=binary: client.infer(head + binary, [(LENGTH, b"%d" % len(head))])
        for head, binary, _ in requests
    ]
    answers = await through(way, *starts, rows=sizes)
    for answer, (_, binary, data) in zip(answers, requests, strict=True):
        head, got = _split_answer(answer)
        assert got == binary
        assert b'"data":[%b]' % data in answer.body
        assert head["outputs"][0]["shape"] == [len(binary) // 4]
