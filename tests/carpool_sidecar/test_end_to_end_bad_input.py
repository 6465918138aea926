"""Bad input: a 4xx that names what is wrong, while those who wait beside it ride together as if it had never come."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from contextlib import asynccontextmanager

import pytest

LENGTH = b"inference-header-content-length"


@pytest.fixture
async def beside(world):
    """Have requests wait in the queue around what a test does; they must be answered, in one call."""

    @asynccontextmanager
    async def beside(**fields):
        sidecar, client = await world.start(**fields)
        first = await world.occupy(client)
        before = await world.queue(sidecar, lambda: client.predict(b"1"), lambda: client.predict(b"2"))
        calls = len(world.model.received)
        yield sidecar, client
        after = await world.queue(sidecar, lambda: client.predict(b"3"))
        assert len(world.model.received) == calls, "bad input reached the model"
        world.model.release()
        assert (await first).status == 200
        assert [(await one).json for one in (*before, *after)] == [{"predictions": [n]} for n in (1, 2, 3)]
        assert world.model.received[-1].rows == [1, 2, 3]
        assert len(world.model.received) == calls + 1
        assert sidecar.batcher.idle

    return beside


# ------------------------------------------------------------------------------------------------------------------ V1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON is empty"),
        (b'{"instances": [[1', "JSON ends before it is complete"),
        (b'{"instances":[1]}trailing', "trailing characters (byte 18)"),
        (b'{"instances":[1,]}', "trailing comma in array (byte 16)"),
        (b"{'instances':[1]}", "object keys must be strings"),
        (b'{"instances":[01]}', "invalid number"),
        (b'{"instances":[NaN]}', "JSON has no NaN (byte 14)"),
        (b'{"instances":[[1, -Infinity]]}', "JSON has no -Infinity"),
        (b'{"instances":5}', "instances: expected an array, got a number"),
        (b'{"instances":[]}', "instances: empty, expected at least one row"),
        (b"[1,2]", "body: expected an object, got an array"),
        (b'{"instances":[1],"instances":[2]}', 'member "instances" comes twice'),
        (b'{"instances":[1],"a":1,"\\u0061":2}', "comes twice"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ('{"instances":["é"]}'.encode("utf-16"), "UTF-16"),
        (b'{"instances":["\xff"]}', "not UTF-8: invalid start byte (byte 15)"),
        (b'{"instances":' + b"[" * 65 + b"]" * 65 + b"}", "nested deeper than 64 levels"),
        (b'{"instances":' + b"[" * 100_000, "nested deeper than 64 levels"),
        (b'{"a":' * 100_000, "nested deeper than 64 levels"),
    ],
)  # fmt: skip
async def test_broken_v1(beside, body, words):
    async with beside() as (_, client):
        answer = await client.send(b"POST", b"/v1/models/m:predict", body)
        assert answer.status == 400
        assert words in answer.json["error"]
        assert answer.json["reason"]


# ------------------------------------------------------------------------------------------------------------------ V2

TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}


def _v2(*tensors, **members):
    return json.dumps({"inputs": tensors, **members}).encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{}", "inputs: missing"),
        (_v2(), "inputs: empty"),
        (_v2(5), "inputs[0]: expected an object, got a number"),
        (_v2({**TENSOR, "data": [1]}), "inputs[0].data: 1 values for shape [1, 2], expected 2"),
        (_v2(TENSOR, {**TENSOR, "name": "y", "data": [1, 2, 3]}), "inputs[1].data: 3 values for shape [1, 2]"),
        (_v2({**TENSOR, "shape": [2, 2], "data": [[1, 2], [3]]}), "3 values for shape [2, 2], expected 4"),
        (_v2({**TENSOR, "data": {"0": 1}}), "data: expected an array, got an object"),
        (_v2({**TENSOR, "data": [float("nan"), 1]}), "JSON has no NaN"),
        (_v2({**TENSOR, "datatype": "FLOAT"}), "inputs[0].datatype: 'FLOAT', expected one of BOOL"),
        (_v2({**TENSOR, "datatype": 32}), "inputs[0].datatype: expected a string"),
        (_v2({**TENSOR, "shape": [-1, 2]}), "inputs[0].shape: dimension -1"),
        (_v2({**TENSOR, "shape": [2**63, 2]}), "dimension 9223372036854775808"),
        (_v2({**TENSOR, "shape": [10**30]}), "dimension of more than 20 digits"),
        (_v2({**TENSOR, "shape": [2**62, 4]}), "more than 2^63-1 elements"),
        (_v2({**TENSOR, "shape": [2**40, 2]}), "2 values for shape [1099511627776, 2]"),
        (_v2({**TENSOR, "shape": [1.5, 2]}), "shape: expected an array of integers"),
        (_v2({**TENSOR, "shape": [1] * 65}), "65 dimensions, expected at most 64"),
        (_v2({**TENSOR, "shape": [0, 2], "data": []}), "[0, 2] has no rows"),
        (_v2(TENSOR, TENSOR), "inputs[1].name: 'x' comes twice"),
        (b'{"inputs":[{"name":"x","name":"y"}]}', 'inputs[0]: member "name" comes twice'),
        (_v2({"name": "x", "datatype": "FP32", "shape": [1]}), "data or parameters.binary_data_size, got neither"),
        (_v2({**TENSOR, "parameters": {"binary_data_size": 8}}), "got both"),
        (_v2(TENSOR, id=7), "id: expected a string, got a number"),
        (_v2(TENSOR, parameters={"timeout": -5}), "parameters.timeout: expected an integer from 0"),
        (_v2(TENSOR, parameters={"priority": "high"}), "parameters.priority: expected an integer"),
        (_v2(TENSOR, parameters=[]), "parameters: expected an object, got an array"),
        (b'{"inputs":[{"name":"x","data":' + b"[" * 70 + b"]" * 70 + b"}]}", "nested deeper than 64 levels"),
    ],
)  # fmt: skip
async def test_broken_v2(beside, body, words):
    async with beside() as (_, client):
        answer = await client.infer(body)
        assert answer.status == 400
        assert words in answer.json["error"]


@pytest.mark.parametrize(
    ("datatype", "shape", "size", "data", "length", "words"),
    [
        ("FP32", [1, 2], 8, b"1234567", None, "inputs[0]: binary data ends 1 bytes beyond the body"),
        ("FP32", [1, 2], 8, b"123456789", None, "9 bytes follow the JSON header, its inputs name 8"),
        ("FP32", [1, 2], 4, b"1234", None, "4 bytes of binary data for FP32 [1, 2], expected 8"),
        ("FP16", [1, 2], 8, b"12345678", None, "8 bytes of binary data for FP16 [1, 2], expected 4"),
        ("FP32", [1, 2], -8, b"12345678", None, "binary_data_size: expected a number of bytes, got -8"),
        ("FP32", [1, 2], 10**30, b"", None, "binary_data_size: expected a number of bytes"),
        ("FP32", [1, 2], 8, b"", b"", "needs the header Inference-Header-Content-Length"),
        ("FP32", [1, 2], 8, b"12345678", b"", "trailing characters"),
        ("FP32", [1, 2], 8, b"12345678", b"100000", "Inference-Header-Content-Length: '100000' for a body of"),
        ("FP32", [1, 2], 8, b"12345678", b"-1", "Inference-Header-Content-Length: '-1'"),
        ("FP32", [1, 2], 8, b"12345678", b"20", "JSON ends before it is complete"),
        ("BYTES", [1], 8, b"\xff\xff\xff\xff1234", None, "take 4294967299 bytes of binary data, got 8"),
        ("BYTES", [2], 9, b"\x03\0\0\0abc\0\0", None, "binary data ends before the length of element 1"),
        ("BYTES", [2], 4, b"\0\0\0\0", None, "4 bytes of binary data for BYTES [2]"),
        ("BYTES", [2**60], 8, b"\0" * 8, None, "8 bytes of binary data for BYTES"),
    ],
)
async def test_wrong_binary_sizes(beside, *, datatype, shape, size, data, length, words):
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = [(LENGTH, b"%d" % len(head) if length is None else length)] if length != b"" else []
    async with beside() as (_, client):
        answer = await client.infer(head + data, headers)
        assert answer.status == 400
        assert words in answer.json["error"]


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ([(b"x-request-timeout-ms", b"soon")], "header x-request-timeout-ms: expected milliseconds, got 'soon'"),
        ([(b"grpc-timeout", b"5 s")], "header grpc-timeout: expected 1 to 8 digits and one of H, M, S, m, u, n"),
        ([(LENGTH, b"5"), (LENGTH, b"6")], "header inference-header-content-length comes twice"),
    ],
)
async def test_headers_that_say_nothing_or_two_things(beside, headers, words):
    async with beside() as (_, client):
        answer = await client.infer(_v2(TENSOR), headers)
        assert (answer.status, words in answer.json["error"]) == (400, True)


# ------------------------------------------------------------------------------------------------------------ the wire


class Raw:
    """A caller that sends whatever it likes."""

    def __init__(self, reader, writer) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, text):
        self.writer.write(text)

    async def answer(self):
        """The one answer before the connection's end: status and JSON."""
        async with asyncio.timeout(30):
            text = await self.reader.read()
        head, _, body = text.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), json.loads(body)


@pytest.fixture
async def raw():
    writers = []

    async def connect(sidecar):
        host, _, port = sidecar.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        return Raw(reader, writer)

    yield connect
    for writer in writers:
        writer.transport.abort()


POST = b"POST /v1/models/m:predict HTTP/1.1\r\nHost: test\r\n"
BODY = b'{"instances":[9]}'


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        (POST + b"Content-Length: 17\r\nContent-Length: 5\r\n\r\n" + BODY, 400, "Content-Length"),
        (POST + b"Content-Length: 17, 17\r\n\r\n" + BODY, 400, "Content-Length"),
        (POST + b"Content-Length: -1\r\n\r\n" + BODY, 400, "Content-Length"),
        (POST + b"Content-Length: 99999999999999999999\r\n\r\n", 400, "Content-Length"),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "Transfer-Encoding"),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501, "chunked"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY, 400, "chunk"),
        (b"POST /v1/models/m:predict HTTP/1.1\r\nContent-Length: 17\r\n\r\n" + BODY, 400, "Host"),
        (POST + b"X-A: a\nX-B: b\r\nContent-Length: 17\r\n\r\n" + BODY, 400, "head"),
        (POST + b"Expect: a-miracle\r\nContent-Length: 17\r\n\r\n", 417, "100-continue"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 501, "no HTTP"),
    ],
)
async def test_requests_that_can_be_read_in_two_ways_or_in_none(beside, raw, request_, status, words):
    async with beside() as (sidecar, _):
        caller = await raw(sidecar)
        caller.send(request_)
        got, text = await caller.answer()
        assert (got, words in text["error"]) == (status, True), text


@pytest.mark.parametrize("framing", [b"Content-Length: 2000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n7d0\r\n"])
async def test_an_oversize_body_is_413_and_not_read_to_its_end(beside, raw, framing):
    async with beside(bodies={"maxRequest": "1Ki"}) as (sidecar, _):
        caller = await raw(sidecar)
        caller.send(POST + framing + b"1" * 1500)
        status, text = await caller.answer()
        assert (status, text["reason"]) == (413, "body-too-large")
        assert "over 1024 bytes; raise bodies.maxRequest" in text["error"]


async def test_callers_that_stop_half_way_hold_no_more_than_is_allowed(world, beside, raw):
    """Each stops one byte short; who finds no room is told so, and those who wait in the queue don't notice."""
    async with beside(bodies={"maxRequest": "1Mi", "maxBuffered": "4Mi", "maxAnswer": "1Mi"}) as (sidecar, client):
        held_before = sidecar.data.buffered_bytes
        size = 1 << 20
        slow = []
        for n in range(1, 4):
            slow.append(await raw(sidecar))
            slow[-1].send(POST + b"Content-Length: %d\r\n\r\n" % size + bytes(size - 1))
            await world.until(lambda n=n: sidecar.data.buffered_bytes == held_before + n * (size - 1))
        for framing in (b"Content-Length: %d\r\n\r\n" % size, b"Transfer-Encoding: chunked\r\n\r\n100000\r\n"):
            caller = await raw(sidecar)
            caller.send(POST + framing + bytes(size - 1))
            status, text = await caller.answer()
            assert (status, text["reason"]) == (503, "buffers-full")
            assert "over 4194304 bytes would be buffered; raise bodies.maxBuffered" in text["error"]
        assert held_before < sidecar.data.buffered_bytes <= 4 << 20
        assert (await client.get(b"/v2/health/ready")).status == 200  # what needs no room is served
        for caller in slow:
            caller.writer.transport.abort()
        await world.until(lambda: sidecar.data.buffered_bytes == held_before)
        full = await client.send(b"POST", b"/v1/models/m:predict", b" " * size)
        assert full.status == 400  # there is room again: it was read to its end, and is no JSON
    assert sidecar.data.buffered_bytes == 0


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (POST + b"Content-Length: 17\r\n\r\n" + BODY[:9], "truncated-body"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n11\r\n" + BODY, "truncated-body"),
        (POST + b"Content-Le", "truncated-head"),
    ],
)
async def test_a_caller_that_ends_its_side_inside_its_request_is_told(beside, raw, sent, reason):
    async with beside() as (sidecar, _):
        caller = await raw(sidecar)
        caller.send(sent)
        caller.writer.write_eof()
        status, text = await caller.answer()
        assert (status, text["reason"]) == (400, reason)


@pytest.mark.parametrize("sent", [POST + b"Content-Length: 17\r\n\r\n" + BODY[:9], POST + b"Content-Le"])
async def test_a_caller_that_breaks_off_inside_its_request_is_forgotten(world, beside, raw, sent):
    async with beside() as (sidecar, _):
        open_before = sidecar.data.connections
        caller = await raw(sidecar)
        caller.send(sent)
        await world.until(lambda: sidecar.data.connections == open_before + 1)
        caller.writer.close()
        await world.until(lambda: sidecar.data.connections == open_before)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [(POST + b"Content-Le", "head-timeout"), (POST + b"Content-Length: 17\r\n\r\n" + BODY[:9], "body-timeout")],
)
async def test_a_slow_caller_is_408_and_nobody_waits_for_it(beside, raw, sent, reason):
    async with beside() as (sidecar, _):
        hasty = {"head_timeout": 0.01, "body_timeout": 0.01, "min_body_rate": 1e9}
        sidecar.data.limits = dataclasses.replace(sidecar.data.limits, **hasty)
        caller = await raw(sidecar)
        caller.send(sent)
        status, text = await caller.answer()
        assert (status, text["reason"]) == (408, reason)


async def test_a_caller_that_does_not_read_its_answer_is_cut_off_and_nobody_waits_for_it(world, raw):
    sidecar, client = await world.start()
    sidecar.data.limits = dataclasses.replace(sidecar.data.limits, write_timeout=0.01)
    caller = await raw(sidecar)
    caller.reader._transport.pause_reading()
    body = b'{"instances":["%b"]}' % (b"x" * (32 << 20))
    caller.send(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await world.until(lambda: world.model.received)
    assert (await client.predict(b"1")).json == {"predictions": [1]}
    await world.until(lambda: sidecar.data.connections == 1)
    assert (await client.predict(b"2")).json == {"predictions": [2]}


async def test_a_half_closed_caller_gets_its_answer(world, raw):
    sidecar, client = await world.start()
    first = await world.occupy(client)
    caller = await raw(sidecar)
    caller.send(POST + b"Content-Length: 17\r\n\r\n" + BODY)
    caller.writer.write_eof()
    await world.queued(sidecar, 1)
    beside = await world.queue(sidecar, lambda: client.predict(b"1"))
    world.model.release()
    assert (await first).status == 200
    async with asyncio.timeout(30):
        text = await caller.reader.read()
    assert text.endswith(b'{"predictions":[9]}')
    assert (await beside[0]).json == {"predictions": [1]}
    assert world.model.received[-1].rows == [9, 1]


async def test_a_half_closed_caller_that_is_gone_is_not_served(world, raw):
    sidecar, client = await world.start()
    first = await world.occupy(client)
    caller = await raw(sidecar)
    caller.send(POST + b"Content-Length: 17\r\n\r\n" + BODY)
    await world.queued(sidecar, 1)
    caller.writer.close()  # what arrives here looks like a half-close
    await world.queued(sidecar, 0)
    world.model.release()
    assert (await first).status == 200
    assert [call.rows for call in world.model.received] == [["first"]]
    assert sidecar.batcher.lane("m").counters.misses == {"cancelled": 1}


# --------------------------------------------------------------------------------------------------- bad model servers


async def test_a_model_that_dies_mid_answer_costs_only_its_riders(world):
    sidecar, client = await world.start()
    first = await world.occupy(client)
    riders = await world.queue(sidecar, lambda: client.predict(b"1"), lambda: client.predict(b"2"))
    other = await world.queue(sidecar, lambda: client.predict(b"1.5"))  # in the next batch

    def half(exchange):
        if b"1.5" in exchange.body:
            echo(exchange)
        else:
            exchange.start(200, [], 1000)
            exchange.write(b'{"predictions":[')
            exchange.abort()

    echo, world.model.behave = world.model.behave, half
    world.model.release()
    answers = [await one for one in (first, *riders)]
    assert [(answer.status, answer.json["reason"]) for answer in answers] == [(502, "upstream-reset")] * 3
    assert (await other[0]).json == {"predictions": [1.5]}


@pytest.mark.parametrize(
    "answer",
    [
        b'{"outputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}',
        b'{"outputs":[{"name":"x","datatype":"FP32","shape":[3],"data":[1,2,3]}]}',
        b'{"outputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]}]}',
        b'{"outputs":[{"name":"x","datatype":"INT8","shape":[2],"data":[1,2]},{"name":"y","datatype":"INT8","shape":[1],"data":[1]}]}',
    ],
)
async def test_v2_answers_with_the_wrong_rows_are_502_and_end_batching(world, answer):
    sidecar, client = await world.start()
    body = _v2({"name": "x", "datatype": "FP32", "shape": [1], "data": [7]})
    first = await world.occupy(client)
    asked = await world.queue(sidecar, *[lambda: client.infer(body)] * 2)
    echo, world.model.behave = world.model.behave, lambda exchange: exchange.respond(200, [], answer)
    world.model.release()
    await first
    for one in asked:
        told = await one
        assert (told.status, told.json["reason"]) == (502, "wrong-rows")
        assert "for 2 rows" in told.json["error"]
    world.model.behave = echo
    first = await world.occupy(client)
    asked = await world.queue(sidecar, *[lambda: client.infer(body)] * 2)
    world.model.release()
    for one in (first, *asked):
        assert (await one).status == 200
    assert [call.body for call in world.model.received[-2:]] == [body, body]


async def test_a_model_with_a_fixed_batch_axis_is_never_sent_a_batch_and_the_fix_is_named(world):
    fixed = {"name": "x", "datatype": "FP32", "shape": [1, 2]}
    world.model.documents[b"/v2/models/m"] = (200, {"name": "m", "inputs": [fixed], "outputs": [fixed]})
    sidecar, client = await world.start(policy={"models": [{"name": "m"}]})
    entry = next(iter(sidecar.models))
    await world.until(lambda: entry.axis is not None)
    first = await world.occupy(client)
    body = _v2(TENSOR)
    asked = await world.queue(sidecar, *[lambda: client.infer(body)] * 2)
    world.model.release()
    for one in (first, *asked):
        assert (await one).status == 200
    assert [call.body for call in world.model.received[1:]] == [body, body]
    stats = (await world.client(sidecar.admin_address).get(b"/v1/stats")).json
    assert stats["alone"] == [{"model": "m", "reason": "axis-none", "requests": 2}]
    assert "export the model with a dynamic first dimension" in stats["models"][0]["axis"]
