"""Client, sidecar and model server over loopback: who rides, what comes back, and what goes wrong."""

from __future__ import annotations

import asyncio
import gc
import json
import struct

import pytest

from carpool.riding import Estimate
from carpool_sidecar.driver import Flight, Rider
from carpool_sidecar.http1.calls import UpstreamError
from carpool_sidecar.http1.messages import find
from carpool_sidecar.models import OTHER

JSON = (b"Content-Type", b"application/json")
LENGTH = b"Inference-Header-Content-Length"
DEBUG = (b"X-Carpool-Debug", b"1")

# --------------------------------------------------------------------------------------------------- riding together


async def test_requests_that_wait_ride_in_one_call_and_keep_every_digit(world):
    sidecar, client = await world.start()
    texts = [b"[1.10, 1e5]", b"[-0.0, 12345678901234567890.125]", b"[0.1, 3.000]"]
    first, rest = await world.queue_behind(sidecar, client, texts)
    world.model.release()
    assert (await first).body == b'{"predictions":[0]}'
    assert [(await one).body for one in rest] == [b'{"predictions":[%b]}' % text for text in texts]
    assert [len(call.rows) for call in world.model.received] == [1, 3]


async def test_ints_stay_ints_and_never_ride_with_floats(world):  # KServe: ints become floats
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"[1]", b"[1.5]", b"[2]"])
    world.model.release()
    await first
    assert [(await one).body for one in rest] == [b'{"predictions":[%b]}' % text for text in (b"[1]", b"[1.5]", b"[2]")]
    assert sorted(call.body for call in world.model.received[1:]) == [
        b'{"instances":[[1.5]]}',
        b'{"instances":[[1],[2]]}',
    ]


async def test_shapes_that_differ_never_ride_together(world):  # MLServer: truncated; TF Serving: one fails all
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"[1,2]", b"[1,2,3]"])
    world.model.release()
    await first
    assert [(await one).json for one in rest] == [{"predictions": [[1, 2]]}, {"predictions": [[1, 2, 3]]}]


async def test_models_that_differ_never_ride_together(world):  # KServe: mixed models go to the last path
    policy = {"models": [{"name": "a", "axis": "First"}, {"name": "b", "axis": "First"}]}
    sidecar, client = await world.start(policy=policy)
    first, _ = await world.queue_behind(sidecar, client, [])
    rest = [client.predict(b"1", model="a"), client.predict(b"2", model="b")]
    await _queued(world, sidecar, 2)
    world.model.release()
    await first
    assert [(await one).json["predictions"] for one in rest] == [[1], [2]]
    assert {(call.target, call.body) for call in world.model.received[1:]} == {
        (b"/v1/models/a:predict", b'{"instances":[1]}'),
        (b"/v1/models/b:predict", b'{"instances":[2]}'),
    }


async def test_headers_and_fields_arrive_and_keep_apart_whom_they_tell_apart(world):  # KServe drops both
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    rest = []
    for tenant in (b"red", b"blue", b"red"):
        body = b'{"instances":[[1]],"signature_name":"%b"}' % tenant
        rest.append(client.send(b"POST", b"/v1/models/m:predict", body, [JSON, (b"X-Tenant", tenant)]))
        await _queued(world, sidecar, len(rest))
    world.model.release()
    await first
    for one in rest:
        assert (await one).status == 200
    calls = {find(call.headers, b"x-tenant"): json.loads(call.body) for call in world.model.received[1:]}
    assert calls == {
        b"red": {"instances": [[1], [1]], "signature_name": "red"},
        b"blue": {"instances": [[1]], "signature_name": "blue"},
    }
    assert sidecar.driver.fragments["x-tenant"] >= 2


async def test_what_is_about_one_caller_stays_with_it(world):  # BentoML: the last caller's context serves all
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    rest = [
        client.predict(b"1", [(b"x-request-id", b"a"), (b"traceparent", b"t1")]),
        client.predict(b"2", [(b"x-request-id", b"b")]),
    ]
    await _queued(world, sidecar, 2)
    world.model.headers = [(b"Set-Cookie", b"who=a"), (b"ETag", b'"1"'), (b"X-Model-Version", b"7")]
    world.model.release()
    await first
    for one in rest:
        answer = await one
        assert answer.header(b"set-cookie") is None
        assert answer.header(b"etag") is None
        assert answer.header(b"x-model-version") == b"7"
    merged = world.model.received[-1]
    assert find(merged.headers, b"x-request-id") is None
    assert find(merged.headers, b"traceparent") is None


async def test_a_request_alone_passes_with_its_own_bytes_and_headers(world):
    _, client = await world.start()
    body = b' {"instances" : [ [1.50,2] ] , "x":{"y":[]}}\n'
    answer = await client.send(b"POST", b"/v1/models/m:predict?a=b", body, [(b"X-Request-ID", b"Me"), (b"Via", b"v")])
    call = world.model.received[0]
    assert (call.target, call.body) == (b"/v1/models/m:predict?a=b", body)
    assert (b"X-Request-ID", b"Me") in call.headers
    assert (b"Via", b"v") in call.headers
    assert answer.body == body


async def test_a_request_larger_than_a_batch_comes_back_whole_and_in_order(world):
    _, client = await world.start(parameters={"*": {"maxBatch": 3}})
    rows = [[i, f"{i}"] for i in range(10)]
    answer = await client.predict(json.dumps(rows)[1:-1].encode())
    assert answer.json == {"predictions": rows}
    assert [len(call.rows) for call in world.model.received] == [3, 3, 3, 1]


async def test_a_batch_grows_until_its_slot_is_free(world):  # Ray: frozen before the slot frees
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1"])
    late = client.predict(b"2")
    await _queued(world, sidecar, 2)
    world.model.release()
    await first
    assert ((await rest[0]).json, (await late).json) == ({"predictions": [1]}, {"predictions": [2]})
    assert world.model.received[-1].rows == [1, 2]


async def test_nothing_waits_for_company_at_an_idle_model(world):  # KServe: waits in full when idle
    _, client = await world.start(parameters={"*": {"maxBatch": 8, "maxWait": "5s"}}, policy=SLOW)
    answer = await client.predict(b"1", [DEBUG])
    assert float(answer.header(b"x-carpool-queue-ms")) < 5000
    assert answer.header(b"x-carpool-batch-size") == b"1"


SLOW = {"slo": {"latency": {"p99": "60s"}}}


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [b"\x01", b"\x00"]),
        ("UINT8", [b"\xff", b"\x00"]),
        ("UINT16", [b"\xff\xfe", b"\x00\x01"]),
        ("UINT32", [b"\xff\xfe\xfd\xfc", b"\x00\x01\x02\x03"]),
        ("UINT64", [bytes(range(8)), bytes(range(8, 16))]),
        ("INT8", [b"\x80", b"\x7f"]),
        ("INT16", [b"\x00\x80", b"\xff\x7f"]),
        ("INT32", [b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f"]),
        ("INT64", [bytes(range(8)), b"\xff" * 8]),
        ("FP16", [b"\x01\x7e", b"\x01\x00"]),  # NaN with payload; the smallest subnormal
        ("BF16", [b"\x81\x7f", b"\x00\x80"]),
        ("FP32", [b"\x01\x00\xc0\x7f", b"\x00\x00\x00\x80"]),
        ("FP64", [b"\x01\x00\x00\x00\x00\x00\xf8\x7f", b"\x00" * 7 + b"\x80"]),
        ("BYTES", [struct.pack("<I", 3) + b"\x00\xffz", struct.pack("<I", 0)]),
    ],
)
async def test_binary_tensors_come_back_byte_for_byte_in_a_batch(world, datatype, values):
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    rest = []
    for number, value in enumerate([*values, values[0] + values[1]]):
        rows = 2 if number == 2 else 1
        body, headers = _binary(datatype, rows, value, name=f"id-{number}")
        rest.append((client.infer(body, headers), rows, value, f"id-{number}"))
        await _queued(world, sidecar, sum(rows for _, rows, _, _ in rest))
    world.model.release()
    await first
    for one, rows, value, name in rest:
        answer = await one
        assert answer.status == 200
        at = int(answer.header(b"inference-header-content-length"))
        head = json.loads(answer.body[:at])
        assert answer.body[at:] == value
        assert head["id"] == name
        assert head["outputs"][0]["shape"] == [rows, 1]
    assert len(world.model.received) == 2


async def test_json_tensors_keep_their_digits_in_a_batch(world):
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    rest = []
    for data in (b"1.10,2e-3", b"-0.0,4"):
        body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[%b]}]}' % data
        rest.append((client.infer(body), data))
        await _queued(world, sidecar, len(rest))
    world.model.release()
    await first
    for one, data in rest:
        assert b'"data":[%b]' % data in (await one).body
    assert len(world.model.received) == 2


async def test_v2_rides_alone_until_the_batch_axis_is_known(world):
    world.model.documents[b"/v2/models/m"] = (503, {})
    sidecar, client = await world.start(policy={"models": []})
    first, _ = await world.queue_behind(sidecar, client, [])
    rest = []
    for _ in range(2):
        rest.append(client.infer(*_binary("FP32", 1, b"\0\0\0\0")))
        await _queued(world, sidecar, len(rest))
    world.model.release()
    await first
    for one in rest:
        assert (await one).status == 200
    assert len(world.model.received) == 3
    assert sidecar.driver.alone["m", "axis-unknown"] == 2


async def test_answers_of_a_pipelining_client_come_in_its_order(world):
    sidecar, _ = await world.start(parameters={"*": {"maxBatch": 1, "maxInFlight": 4}})
    world.model.holding = True
    host, _, port = sidecar.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for number in (1, 2):
        body = b'{"instances":[%d]}' % number
        writer.write(
            b"POST /v1/models/m:predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
    await world.until(lambda: len(world.model.held) == 2)
    world.model.held.reverse()
    world.model.release()
    found = b""
    while found.count(b"predictions") < 2:
        found += await reader.read(4096)
    writer.close()
    assert found.index(b"[1]") < found.index(b"[2]")


# ------------------------------------------------------------------------------------------------------- refusals


async def test_a_full_queue_is_429_with_a_reason_and_when_to_come_back(world):
    sidecar, client = await world.start(policy={"admission": {"maxQueuedRows": 2}})
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    refused = await client.predict(b"3")
    assert (refused.status, refused.json["reason"]) == (429, "queue-full")
    assert int(refused.header(b"retry-after")) >= 1
    world.model.release()
    assert [(await one).status for one in (first, *rest)] == [200, 200, 200]


async def test_rows_count_against_the_queue_not_requests(world):  # TEI: array inputs slip past the limit
    sidecar, client = await world.start(policy={"admission": {"maxQueuedRows": 4}})
    first, rest = await world.queue_behind(sidecar, client, [b"1,2"])
    assert (await client.predict(b"1,2,3")).status == 429
    rest.append(client.predict(b"3,4"))
    await _queued(world, sidecar, 4)
    world.model.release()
    assert [(await one).status for one in (first, *rest)] == [200, 200, 200]


async def test_bytes_count_against_the_queue(world):
    sidecar, client = await world.start(policy={"admission": {"maxQueuedBytes": 200}})
    first, rest = await world.queue_behind(sidecar, client, [b"1" * 100])
    assert (await client.predict(b"2" * 100)).status == 429
    world.model.release()
    assert [(await one).status for one in (first, *rest)] == [200, 200]


async def test_the_least_urgent_are_refused_first_and_served_last(world):
    sidecar, client = await world.start(policy={"admission": {"maxQueuedRows": 10}}, parameters={"*": {"maxBatch": 1}})
    first, rest = await world.queue_behind(sidecar, client, [b"1"] * 6)
    body = b'{"parameters":{"priority":%d},"inputs":[{"name":"x","datatype":"INT64","shape":[1,1],"data":[%d]}]}'
    urgent, low = client.infer(body % (1, 81)), None
    await _queued(world, sidecar, 7)
    low = client.infer(body % (3, 83))
    await _queued(world, sidecar, 8)
    assert (await client.infer(body % (3, 84))).status == 429
    world.model.release()
    assert [(await one).status for one in (first, *rest, urgent, low)] == [200] * 9
    order = [call.body for call in world.model.received]
    assert b"81" in order[1]
    assert b"83" in order[-1]


async def test_who_would_be_late_is_503_at_once(world):
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    sidecar.batcher.learn("m", Estimate(times=(0.0, 9.0), upper=(0.0, 9.0)), sidecar.clock())
    refused = await client.predict(b"3", [(b"x-request-timeout-ms", b"4000")])
    assert (refused.status, refused.json["reason"]) == (503, "predicted-late")
    assert int(refused.header(b"retry-after")) >= 1
    world.model.release()
    assert (await first).status == 200


async def test_nobody_is_refused_by_an_idle_model(world):  # BentoML: sheds while idle
    sidecar, client = await world.start()
    await client.predict(b"1")
    sidecar.batcher.learn("m", Estimate(times=(0.0, 9.0), upper=(0.0, 9.0)), sidecar.clock())
    assert (await client.predict(b"2", [(b"x-request-timeout-ms", b"4000")])).status == 200


@pytest.mark.parametrize(
    "headers",
    [[(b"x-request-timeout-ms", b"5")], [(b"grpc-timeout", b"5m")], [(b"x-envoy-expected-rq-timeout-ms", b"5")]],
)
async def test_an_expired_request_is_504_and_not_served(world, headers):
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    refused = await client.predict(b"7", headers)
    assert (refused.status, refused.json["reason"]) == (504, "expired")
    world.model.release()
    assert (await first).status == 200
    assert (await client.predict(b"8")).status == 200
    assert [call.rows for call in world.model.received] == [[0], [8]]


async def test_tritons_timeout_is_honoured(world):  # Triton: ignored by default
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    body = b'{"parameters":{"timeout":5000},"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[1]}]}'
    assert (await client.infer(body)).status == 504
    world.model.release()
    assert (await first).status == 200


async def test_the_policys_timeout_holds_for_everybody(world):
    world.model.holding = True
    _, client = await world.start(policy={"admission": {"timeout": "20ms"}})
    answer = await client.predict(b"1")
    assert (answer.status, answer.json["reason"]) == (504, "expired")


async def test_an_upstream_that_is_down_is_503(world):
    sidecar, client = await world.start()
    told = []
    sidecar.driver._unreachable = lambda: told.append(1)
    await world.model.die()
    answer = await client.predict(b"1")
    assert (answer.status, answer.json["reason"]) in {(503, "upstream-refused"), (502, "upstream-reset")}
    answer = await client.predict(b"1")
    assert (answer.status, answer.json["reason"]) == (503, "upstream-refused")
    assert answer.header(b"retry-after") == b"1"
    assert len(told) == 2


# ------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
async def test_an_error_is_never_a_200(world, status):  # KServe: errors as 200
    _, client = await world.start()
    world.model.behave = lambda exchange: exchange.respond(status, [(b"X-Why", b"so")], b'{"error":"no"}')
    answer = await client.predict(b"1")
    assert (answer.status, answer.body, answer.header(b"x-why")) == (status, b'{"error":"no"}', b"so")


@pytest.mark.parametrize("status", [400, 422, 500])
async def test_a_poisoned_row_costs_nobody_else_an_answer(world, status):  # TF Serving, TorchServe, Infinity
    def poisoned(exchange):
        if b"666" in exchange.body:
            exchange.respond(status, [], b'{"error":"666"}')
        else:
            world.echo(exchange)

    world.echo = world.model.behave
    world.model.behave = poisoned
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"666", b"3", b"4", b"5"])
    world.model.release()
    await first
    answers = [await one for one in rest]
    assert [answer.status for answer in answers] == [200, status, 200, 200, 200]
    assert answers[1].json == {"error": "666"}
    assert [answer.json for answer in answers if answer.status == 200] == [{"predictions": [n]} for n in (1, 3, 4, 5)]
    assert (await client.predict(b"6")).status == 200


async def test_a_batch_that_is_too_large_is_halved_and_the_next_ones_are_smaller(world):
    def at_most_two(exchange):
        if len(json.loads(exchange.body)["instances"]) > 2:
            exchange.respond(413, [], b'{"error":"too large"}')
        else:
            world.echo(exchange)

    world.echo = world.model.behave
    world.model.behave = at_most_two
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2", b"3", b"4"])
    world.model.release()
    await first
    assert [(await one).json for one in rest] == [{"predictions": [n]} for n in (1, 2, 3, 4)]
    assert sidecar.batcher.lane("m").cap == 2


async def test_an_answer_with_too_few_rows_is_502_and_ends_batching(world):
    def one_short(exchange):
        rows = json.loads(exchange.body)["instances"]
        exchange.respond(200, [], json.dumps({"predictions": rows[: max(1, len(rows) - 1)]}).encode())

    world.model.behave = one_short
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    world.model.release()
    await first
    assert [((await one).status, (await one).json["reason"]) for one in rest] == [(502, "wrong-rows")] * 2
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    world.model.release()
    assert [(await one).json for one in rest] == [{"predictions": [1]}, {"predictions": [2]}]


async def test_an_answer_that_is_no_json_is_502_for_its_batch_alone(world):
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    world.model.behave = lambda exchange: exchange.respond(200, [], b"<html>")
    world.model.release()
    assert (await first).body == b"<html>"  # alone it passes as it is
    assert [(await one).status for one in rest] == [502, 502]


async def test_a_model_that_dies_mid_answer_is_502_for_its_riders_and_nobody_else(world):
    def half(exchange):
        exchange.start(200, [], 1000)
        exchange.write(b'{"predictions":[')
        exchange.abort()

    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    echo, world.model.behave = world.model.behave, half
    world.model.release()
    answers = [await first, *[await one for one in rest]]
    assert [(answer.status, answer.json["reason"]) for answer in answers] == [(502, "upstream-reset")] * 3
    world.model.behave = echo
    assert (await client.predict(b"3")).status == 200


async def test_a_batch_that_was_never_answered_is_sent_again_where_the_policy_allows(world):
    fates = ["die"]

    def once(exchange):
        if fates:
            fates.pop()
            exchange.abort()
        else:
            world.echo(exchange)

    world.echo, world.model.behave = world.model.behave, once
    upstream = {"url": f"http://127.0.0.1:{world.model.port}", "retry": True}
    _, client = await world.start(upstream=upstream)
    assert (await client.predict(b"3")).json == {"predictions": [3]}
    assert len(world.model.received) == 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"instances": [[1',
        b'{"instances": []}',
        b'{"instances": 5}',
        b'{"instances": [NaN]}',
        b"\xef\xbb\xbf{}",
        b"",
        b"[" * 100_000,
        b'{"instances":[1],"instances":[2]}',
    ],
)
async def test_bad_input_is_a_4xx_that_costs_nobody_anything(world, body):
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    answer = await client.send(b"POST", b"/v1/models/m:predict", body)
    assert 400 <= answer.status < 500
    assert answer.json["error"]
    world.model.release()
    assert [(await one).status for one in (first, *rest)] == [200, 200, 200]
    assert world.model.received[-1].rows == [1, 2]


# -------------------------------------------------------------------------------------------------------- leaving


async def test_who_leaves_the_queue_is_not_served_and_the_others_are(world):  # MLServer: one cancel hangs the rest
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2", b"3"])
    rest[1].leave()
    await _queued(world, sidecar, 2)
    world.model.release()
    await first
    assert [(await rest[0]).json, (await rest[2]).json] == [{"predictions": [1]}, {"predictions": [3]}]
    assert world.model.received[-1].rows == [1, 3]


async def test_who_leaves_a_batch_under_way_costs_the_others_nothing(world, wait_until):
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    held, world.model.held = world.model.held, []
    world.model.behave(held[0])
    await first
    await wait_until(lambda: world.model.held)
    rest[0].leave()
    counters = sidecar.batcher.lane("m").counters
    await wait_until(lambda: counters.misses.get("cancelled"))
    world.model.release()
    assert (await rest[1]).json == {"predictions": [2]}
    assert world.model.left == 0


async def test_when_all_riders_have_left_the_call_is_given_up(world, wait_until):  # KServe: ignores disconnects
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    first.leave()
    await wait_until(lambda: world.model.left == 1)
    world.model.holding = False
    assert (await client.predict(b"1")).status == 200


# ------------------------------------------------------------------------------------------------------- the rest


async def test_everything_else_passes_through_untouched(world):
    _, client = await world.start()
    assert (await client.get(b"/v2/models/m")).json["name"] == "m"
    assert (await client.get(b"/anything?x=1")).status == 404
    answer = await client.send(b"POST", b"/v2/repository/index", b'{"instances":1}')
    assert (answer.status, answer.body) == (200, b'{"instances":1}')


async def test_counters_tell_what_happened(world, wait_until):
    sidecar, client = await world.start()
    assert (await client.predict(b"1")).status == 200
    assert (await client.predict(b"[")).status == 400
    world.model.behave = lambda exchange: exchange.respond(500, [], b"{}")
    assert (await client.predict(b"2")).status == 500
    counted = sidecar.batcher.stats(sidecar.clock()).models["m"]
    assert (counted.arrivals, counted.served, counted.hits, counted.misses) == (2, 2, 1, {"failed": 1})
    assert sidecar.driver.requests == {("m", "v1", 200): 1, ("m", "v1", 400): 1, ("m", "v1", 500): 1}


async def test_names_that_callers_make_up_leave_nothing_behind(world):
    sidecar, client = await world.start()
    world.model.behave = lambda exchange: exchange.respond(404, [], b'{"error":"no such model"}')
    for number in range(300):
        assert (await client.predict(b"1", model=f"made-up-{number}")).status == 404
    assert [entry.model for entry in sidecar.models] == ["m"]
    assert [lane.name for lane in sidecar.batcher.lanes()] == ["m"]
    assert sidecar.driver.requests == {(OTHER, "v1", 404): 300}
    assert not sidecar.driver.batch_sizes
    assert not sidecar.driver.duration_seconds


async def test_what_was_answered_is_freed_without_the_garbage_collector(world):
    sidecar, client = await world.start(policy={"admission": {"timeout": "30s"}})
    gc.collect()
    gc.disable()
    try:
        first, rest = await world.queue_behind(sidecar, client, [b"1", b"2", b"3"])
        rest[1].leave()
        await _queued(world, sidecar, 2)
        expired = client.predict(b"4", [(b"x-request-timeout-ms", b"5")])
        assert (await expired).status == 504
        world.model.release()
        for one in (first, rest[0], rest[2]):
            assert (await one).status == 200
        assert (await client.predict(b"[")).status == 400
        left = [thing for thing in gc.get_objects() if isinstance(thing, Rider | Flight)]
        assert left == []
    finally:
        gc.enable()


async def test_a_failure_of_the_sidecars_own_costs_the_culprit_alone(world, monkeypatch):
    sidecar, client = await world.start()
    send = sidecar.backend.send

    def broken(target, headers, body, receiver):
        if b"13" in b"".join([body] if isinstance(body, bytes) else body):
            raise ZeroDivisionError
        return send(target, headers, body, receiver)

    monkeypatch.setattr(sidecar.backend, "send", broken)
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"13", b"3"])
    world.model.release()
    await first
    assert [(await one).status for one in rest] == [200, 500, 200]


async def test_the_connection_of_a_caller_cut_off_says_so(world):
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    await sidecar.close()
    world.sidecars.clear()
    with pytest.raises(UpstreamError):
        await first


async def _queued(world, sidecar, rows):
    await world.until(lambda: sidecar.batcher.queued_rows == rows)


def _binary(datatype, rows, value, name="i"):
    head = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": datatype, "shape": [rows, 1], "parameters": {"binary_data_size": len(value)}}
            ],
            "id": name,
        },
        separators=(",", ":"),
    ).encode()
    return head + value, [(LENGTH, b"%d" % len(head))]
