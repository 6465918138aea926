"""Bad input. What is no HTTP is refused; what a server may understand is forwarded alone, as it came. Either way the
requests that wait beside it are batched as if it had never come."""

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


@pytest.fixture
async def among(world):
    """Send one request among others that wait in the queue, to a model that has its own answer to it.

    It reaches the model alone, as it came, and its caller gets the model's answer. Returns the reason and the sentence
    that are kept of it.
    """

    async def among(path, body, headers=(), status=400):
        sidecar, client = await world.start()
        first = await world.occupy(client)
        before = await world.queue(sidecar, lambda: client.predict(b"1"), lambda: client.predict(b"2"))
        asked = await world.queue(sidecar, lambda: client.send(b"POST", path, body, headers))
        after = await world.queue(sidecar, lambda: client.predict(b"3"))
        echo = world.model.behave

        def own_answer(exchange):
            if exchange.body == body:
                exchange.respond(status, [(b"x-model", b"own")], b"the model's own words")
            else:
                echo(exchange)

        world.model.behave = own_answer
        world.model.release()
        assert (await first).status == 200
        answer = await asked[0]
        assert (answer.status, answer.body, answer.header(b"x-model")) == (status, b"the model's own words", b"own")
        assert [(await one).json for one in (*before, *after)] == [{"predictions": [n]} for n in (1, 2, 3)]
        calls = [call for call in world.model.received[1:] if call.body == body]
        assert [(call.target, set(headers) <= set(call.headers)) for call in calls] == [(path, True)]
        assert [call.rows for call in world.model.received[1:] if call.body != body] == [[1, 2, 3]]
        assert sidecar.batcher.idle
        ((model, reason),) = sidecar.driver.counts.alone
        stats = (await world.client(sidecar.admin.address).get(b"/v1/stats")).json
        (entry,) = stats["alone"]
        assert (entry["model"], entry["reason"], entry["requests"]) == (model, reason, 1)
        return reason, entry.get("detail", "")

    return among


# ------------------------------------------------------------------------------------------------------------------ V1


@pytest.mark.parametrize(
    ("body", "reason", "words"),
    [
        (b"", "malformed", "JSON is empty"),
        (b'{"instances": [[1', "malformed", "JSON ends before it is complete"),
        (b'{"instances":[1]}trailing', "malformed", "trailing characters (byte 18)"),
        (b"{'instances':[1]}", "malformed", "object keys must be strings"),
        (b'{"instances":[NaN]}', "malformed", "JSON has no NaN (byte 14)"),
        (b'{"instances":5}', "no-rows", "instances is a number, not an array"),
        (b'{"instances":[]}', "empty", ""),
        (b"[1,2]", "malformed", "body: expected object, got array"),
        (b'{"instances":[1],"instances":[2]}', "malformed", 'member "instances" comes twice'),
        (b"\xef\xbb\xbf{}", "malformed", "byte order mark"),
        ('{"instances":["é"]}'.encode("utf-16"), "malformed", "UTF-16"),
        (b'{"instances":' + b"[" * 65 + b"]" * 65 + b"}", "limits", "limits.maxDepth is 64"),
        (b'{"instances":' + b"[" * 100_000, "limits", "limits.maxArrays is 65536"),
        (b'{"a":' * 60_000, "limits", "limits.maxStrings is 8192"),
    ],
)  # fmt: skip
async def test_what_is_no_v1_is_forwarded(among, body, reason, words):
    got, detail = await among(b"/v1/models/m:predict", body)
    assert got == reason
    assert words in detail


# ------------------------------------------------------------------------------------------------------------------ V2

TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}


def _v2(*tensors, **members):
    return json.dumps({"inputs": tensors, **members}).encode()


@pytest.mark.parametrize(
    ("body", "reason", "words"),
    [
        (b"{}", "malformed", "inputs: missing"),
        (_v2(), "empty", ""),
        (_v2(5), "malformed", "inputs: expected object, got int"),
        (_v2({**TENSOR, "data": [1]}), "malformed", "inputs[0].data: 1 values for shape [1, 2], expected 2"),
        (_v2({**TENSOR, "shape": [2, 2], "data": [[1, 2], [3]]}), "nesting", ""),
        (_v2({**TENSOR, "data": [float("nan"), 1]}), "malformed", "JSON has no NaN"),
        (_v2({**TENSOR, "shape": [-1, 2]}), "malformed", "inputs[0].shape: dimension -1"),
        (_v2({**TENSOR, "shape": [2**62, 4]}), "malformed", "more than 2^63-1 elements"),
        (_v2({**TENSOR, "shape": [2**40, 2]}), "malformed", "2 values for shape [1099511627776, 2]"),
        (_v2({**TENSOR, "shape": [1] * 65}), "malformed", "65 dimensions, expected at most 64"),
        (_v2(TENSOR, TENSOR), "malformed", "inputs[1].name: 'x' comes twice"),
        (_v2(TENSOR, parameters={"timeout": -5}), "malformed", "parameters.timeout: expected an integer from 0"),
        (_v2(*[{**TENSOR, "name": f"x{n}"} for n in range(20_000)]), "limits", "limits.maxStrings is 8192"),
        (_v2(*[{**TENSOR, "name": f"x{n}"} for n in range(40_000)]), "limits", "limits.maxText is 2Mi"),
    ],
)
async def test_what_is_no_v2_is_forwarded(among, body, reason, words):
    got, detail = await among(b"/v2/models/m/infer", body)
    assert got == reason
    assert words in detail


# What MLServer 1.7.1, Triton or TF Serving answer with 200, each.
@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (b"/v2/models/m/infer", _v2(TENSOR, id=None), ()),
        (b"/v2/models/m/infer", _v2(TENSOR, parameters=None), ()),
        (b"/v2/models/m/infer", _v2(TENSOR, id=7), ()),
        (b"/v2/models/m/infer", _v2({**TENSOR, "parameters": None}), ()),
        (b"/v2/models/m/infer", _v2({**TENSOR, "datatype": "BYTES", "shape": [1], "data": "hello"}), ()),
        (b"/v2/models/m/infer", _v2({**TENSOR, "shape": [0, 3], "data": []}), ()),
        (b"/v2/models/m/infer", _v2({**TENSOR, "datatype": "STRING", "data": ["a", "b"]}), ()),
        (b"/v2/models/m/infer", _v2({**TENSOR, "data": {"a": 1}}), ()),
        (b"/v2/models/m/infer", _v2({**TENSOR, "data": [{"a": 1}, {"a": 2}]}), ()),
        (b"/v2/models/m/infer", _v2({**TENSOR, "data": [float("nan"), 1]}), ()),
        (b"/v2/models/m/infer", _v2(TENSOR, parameters={"priority": "high"}), ()),
        (b"/v2/models/m/infer", _v2({**TENSOR, "data": [1, 2, 3]}), ()),
        (b"/v2/models/m/infer", _v2(TENSOR, parameters={"deep": json.loads("[" * 100 + "]" * 100)}), ()),
        (b"/v1/models/m:predict", b'{"instances":[[NaN]]}', ()),
        (b"/v1/models/m:predict", b'{"instances":' + b"[" * 100 + b"]" * 100 + b"}", ()),
        (b"/v1/models/m:predict", b'{"instances":[9]}', ((b"content-type", b"application/json; charset=latin-1"),)),
        (
            b"/v1/models/m:predict",
            b'{"instances":[9]}',
            ((b"content-type", b"application/json"), (b"content-type", b"application/json;charset=utf-8")),
        ),
        (b"/v1/models/m:predict", b'\xef\xbb\xbf{"instances":[9]}', ()),
    ],
)
async def test_what_the_server_accepts_is_forwarded_as_it_came(among, path, body, headers):
    await among(path, body, headers, status=200)


@pytest.mark.parametrize(
    ("datatype", "shape", "size", "data", "length", "words"),
    [
        ("FP32", [1, 2], 8, b"1234567", None, "the data ends 1 bytes beyond the body"),
        ("FP32", [1, 2], 8, b"123456789", None, "9 bytes follow the JSON header, its inputs name 8"),
        ("FP32", [1, 2], 4, b"1234", None, "4 bytes of binary data for FP32 [1, 2], expected 8"),
        ("FP32", [1, 2], -8, b"12345678", None, "binary_data_size: expected a number of bytes, got -8"),
        ("FP32", [1, 2], 8, b"", b"", "needs the header Inference-Header-Content-Length"),
        ("FP32", [1, 2], 8, b"12345678", b"", "trailing characters"),
        ("FP32", [1, 2], 8, b"12345678", b"100000", "Inference-Header-Content-Length: '100000' for a body of"),
        ("FP32", [1, 2], 8, b"12345678", b"-1", "Inference-Header-Content-Length: '-1'"),
        ("FP32", [1, 2], 8, b"12345678", b"20", "JSON ends before it is complete"),
        ("BYTES", [1], 8, b"\xff\xff\xff\xff1234", None, "take 4294967299 bytes of binary data, got 8"),
        ("BYTES", [2], 9, b"\x03\0\0\0abc\0\0", None, "binary data ends before the length of element 1"),
        ("BYTES", [2**60], 8, b"\0" * 8, None, "8 bytes of binary data for BYTES"),
    ],
)
async def test_wrong_binary_sizes_are_forwarded(among, *, datatype, shape, size, data, length, words):
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = [(LENGTH, b"%d" % len(head) if length is None else length)] if length != b"" else []
    reason, detail = await among(b"/v2/models/m/infer", head + data, headers)
    assert reason == "malformed"
    assert words in detail


async def test_a_length_that_comes_twice_is_forwarded(among):
    reason, detail = await among(b"/v2/models/m/infer", _v2(TENSOR), [(LENGTH, b"5"), (LENGTH, b"6")])
    assert (reason, detail) == (
        "malformed",
        "header inference-header-content-length comes twice, with different values",
    )


@pytest.mark.parametrize("line", [(b"x-request-timeout-ms", b"soon"), (b"grpc-timeout", b"5 s")])
async def test_a_deadline_that_cannot_be_read_says_nothing(world, line):
    sidecar, client = await world.start()
    first, (one, two) = await world.queue_behind(sidecar, client, [b"1", b"2"], [line])
    world.model.release()
    assert [(await asked).json for asked in (first, one, two)] == [{"predictions": [n]} for n in (0, 1, 2)]
    assert world.model.received[-1].rows == [1, 2]


async def test_a_body_that_leaves_no_room_for_its_parts_is_forwarded(world):
    """8,000 rows are 16 kB, and half a megabyte once they are separated."""
    sidecar, client = await world.start(bodies={"maxRequest": "128Ki", "maxAnswer": "128Ki", "maxBuffered": "128Ki"})
    text = b",".join([b"1"] * 8000)
    answer = await client.predict(text)
    assert answer.json == {"predictions": [1] * 8000}
    assert sidecar.driver.counts.alone == {("m", "limits"): 1}
    assert "bodies.maxBuffered leaves no room" in sidecar.driver.counts.why["m", "limits"]
    assert sidecar.data.server.buffered_bytes == 0


async def test_what_is_held_beside_the_body_counts_until_the_answer(world):
    sidecar, client = await world.start(parameters={"*": {"maxBatch": 8000, "maxInFlight": 1}})
    first, _ = await world.queue_behind(sidecar, client, [])
    held = sidecar.data.server.buffered_bytes
    asked = client.predict(b",".join([b"1"] * 8000))
    await world.queued(sidecar, 8000)
    assert sidecar.data.server.buffered_bytes - held > 60 * 8000
    world.model.release()
    assert (await first).status == (await asked).status == 200
    await world.until(lambda: sidecar.data.server.buffered_bytes == 0)


async def test_a_batch_whose_answer_is_too_large_is_halved_and_the_next_ones_are_smaller(world):
    """Each row's answer has 1,000 bytes, and 2,500 are shared out: two rows at a time."""
    sidecar, client = await world.start(limits={"maxAnswerText": "2500"})

    def long(exchange):
        rows = json.loads(exchange.body)["instances"]
        body = json.dumps({"predictions": [f"{row}" * 1000 for row in rows]}).encode()
        exchange.respond(200, [(b"content-type", b"application/json")], body)

    world.model.behave = long
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2", b"3", b"4"])
    world.model.release()
    assert (await first).status == 200
    assert [(await one).json for one in rest] == [{"predictions": [f"{n}" * 1000]} for n in (1, 2, 3, 4)]
    assert [len(call.rows) for call in world.model.received] == [1, 4, 2, 2]
    assert sidecar.batcher.model("m").cap == 2


async def test_where_one_answer_is_too_large_for_two_requests_are_sent_one_by_one(world):
    sidecar, client = await world.start(limits={"maxAnswerText": "10"})
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    world.model.release()
    assert (await first).status == 200
    assert [(await one).json for one in rest] == [{"predictions": [n]} for n in (1, 2)]
    assert sidecar.batcher.model("m").cap == 1


async def test_what_may_not_be_sent_again_is_not_halved_for_a_large_answer(world):
    policy = {"idempotent": False, "models": [{"name": "m", "axis": "First"}]}
    sidecar, client = await world.start(limits={"maxAnswerText": "20"}, policy=policy)
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    world.model.release()
    await first
    for one in rest:
        assert ((await one).status, (await one).json["reason"]) == (502, "limits")
    assert [len(call.rows) for call in world.model.received] == [1, 2]
    assert (await client.predict(b"3")).status == 200


async def test_a_poisoned_batch_that_may_not_be_sent_again_shares_its_status(world):
    sidecar, client = await world.start(policy={"idempotent": False, "models": [{"name": "m", "axis": "First"}]})
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"666"])
    world.model.behave = lambda exchange: exchange.respond(422, [], b'{"error":"666 is bad"}')
    world.model.release()
    await first
    for one in rest:
        answer = await one
        assert (answer.status, answer.header(b"x-carpool-fault")) == (422, b"unresolved")
        assert b"666" not in answer.body
    assert [len(call.rows) for call in world.model.received] == [1, 2]


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
        host, _, port = sidecar.data.address.rpartition(":")
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
        (b"EHLO a-proxy\r\n\r\n", 501, "no HTTP"),
    ],
)
async def test_requests_that_can_be_read_in_two_ways_or_in_none(beside, raw, request_, status, words):
    async with beside() as (sidecar, _):
        caller = await raw(sidecar)
        caller.send(request_)
        got, text = await caller.answer()
        assert (got, words in text["error"]) == (status, True), text


async def test_callers_that_stop_half_way_hold_no_more_than_is_allowed(world, beside, raw):
    """Each stops one byte short. A request without room gets an error that says so; queued requests don't notice."""
    async with beside(bodies={"maxRequest": "1Mi", "maxBuffered": "4Mi", "maxAnswer": "1Mi"}) as (sidecar, client):
        held_before = sidecar.data.server.buffered_bytes
        size = 1 << 20
        slow = []
        for n in range(1, 4):
            slow.append(await raw(sidecar))
            slow[-1].send(POST + b"Content-Length: %d\r\n\r\n" % size + bytes(size - 1))
            await world.until(lambda n=n: sidecar.data.server.buffered_bytes == held_before + n * (size - 1))
        for framing in (b"Content-Length: %d\r\n\r\n" % size, b"Transfer-Encoding: chunked\r\n\r\n100000\r\n"):
            caller = await raw(sidecar)
            caller.send(POST + framing + bytes(size - 1))
            status, text = await caller.answer()
            assert (status, text["reason"]) == (503, "buffers-full")
            assert "over 4194304 bytes would be buffered; raise bodies.maxBuffered" in text["error"]
        assert held_before < sidecar.data.server.buffered_bytes <= 4 << 20
        assert (await client.get(b"/v2/health/ready")).status == 200  # what needs no room is served
        for caller in slow:
            caller.writer.transport.abort()
        await world.until(lambda: sidecar.data.server.buffered_bytes == held_before)
        full = await world.queue(sidecar, lambda: client.send(b"POST", b"/v1/models/m:predict", b" " * size))
        full[0].leave()  # there is room again: it was read to its end
        await world.until(lambda: sidecar.data.server.buffered_bytes == held_before)
    assert sidecar.data.server.buffered_bytes == 0


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (POST + b"Content-Length: 17\r\n\r\n" + BODY[:9], "truncated-body"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n11\r\n" + BODY, "truncated-body"),
        (POST + b"Content-Le", "truncated-head"),
    ],
)
async def test_a_caller_that_ends_its_side_inside_its_request_gets_400(beside, raw, sent, reason):
    async with beside() as (sidecar, _):
        caller = await raw(sidecar)
        caller.send(sent)
        caller.writer.write_eof()
        status, text = await caller.answer()
        assert (status, text["reason"]) == (400, reason)


@pytest.mark.parametrize("sent", [POST + b"Content-Length: 17\r\n\r\n" + BODY[:9], POST + b"Content-Le"])
async def test_a_caller_that_breaks_off_inside_its_request_is_forgotten(world, beside, raw, sent):
    async with beside() as (sidecar, _):
        open_before = sidecar.data.server.connections
        caller = await raw(sidecar)
        caller.send(sent)
        await world.until(lambda: sidecar.data.server.connections == open_before + 1)
        caller.writer.close()
        await world.until(lambda: sidecar.data.server.connections == open_before)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [(POST + b"Content-Le", "head-timeout"), (POST + b"Content-Length: 17\r\n\r\n" + BODY[:9], "body-timeout")],
)
async def test_a_slow_caller_is_408_and_nobody_waits_for_it(beside, raw, sent, reason):
    async with beside() as (sidecar, _):
        hasty = {"head_timeout": 0.01, "body_timeout": 0.01, "min_body_rate": 1e9}
        sidecar.data.server.limits = dataclasses.replace(sidecar.data.server.limits, **hasty)
        caller = await raw(sidecar)
        caller.send(sent)
        status, text = await caller.answer()
        assert (status, text["reason"]) == (408, reason)


async def test_a_caller_that_does_not_read_its_answer_is_cut_off_and_nobody_waits_for_it(world, raw):
    sidecar, client = await world.start()
    sidecar.data.server.limits = dataclasses.replace(sidecar.data.server.limits, write_timeout=0.01)
    caller = await raw(sidecar)
    caller.reader._transport.pause_reading()
    body = b'{"instances":["%b"]}' % (b"x" * (32 << 20))
    caller.send(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await world.until(lambda: world.model.received)
    assert (await client.predict(b"1")).json == {"predictions": [1]}
    await world.until(lambda: sidecar.data.server.connections == 1)
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
    assert sidecar.batcher.model("m").counters.misses == {"cancelled": 1}


# --------------------------------------------------------------------------------------------------- bad model servers


async def test_a_model_that_dies_mid_answer_costs_only_its_waiters(world):
    sidecar, client = await world.start()
    first = await world.occupy(client)
    waiters = await world.queue(sidecar, lambda: client.predict(b"1"), lambda: client.predict(b"2"))
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
    answers = [await one for one in (first, *waiters)]
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
async def test_v2_answers_with_the_wrong_rows_end_batching_and_each_is_asked_alone(world, answer):
    sidecar, client = await world.start()
    body = _v2({"name": "x", "datatype": "FP32", "shape": [1], "data": [7]})
    first = await world.occupy(client)
    asked = await world.queue(sidecar, *[lambda: client.infer(body)] * 2)
    echo, world.model.behave = world.model.behave, lambda exchange: exchange.respond(200, [], answer)
    world.model.release()
    await first
    for one in asked:
        assert ((await one).status, (await one).body) == (200, answer), "the model's own answer to it alone"
    assert [call.body for call in world.model.received[-2:]] == [body, body]
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
    await world.until(lambda: entry.known.axis is not None)
    first = await world.occupy(client)
    body = _v2(TENSOR)
    asked = await world.queue(sidecar, *[lambda: client.infer(body)] * 2)
    world.model.release()
    for one in (first, *asked):
        assert (await one).status == 200
    assert [call.body for call in world.model.received[1:]] == [body, body]
    stats = (await world.client(sidecar.admin.address).get(b"/v1/stats")).json
    assert stats["alone"] == [{"model": "m", "reason": "axis-none", "requests": 2}]
    assert "export the model with a dynamic first dimension" in stats["models"][0]["axis"]
