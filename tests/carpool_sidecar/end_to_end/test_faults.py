"""The faults of others that must not be ours (DESIGN, section 8), each shown on real sockets, client to model."""

from __future__ import annotations

import json

import pytest

from carpool.batching.requests import Estimate
from carpool_sidecar.http1.messages import find

DEBUG = (b"X-Carpool-Debug", b"1")
LONG = {"slo": {"latency": {"p99": "2h"}}, "admission": {"timeout": "2h"}}
SECONDS_9 = Estimate(times=(0.0, 9.0), upper=(0.0, 9.0))


# -------------------------------------------------------------------------------------------------------------- KServe


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
async def test_an_error_is_never_a_200(world, status):  # KServe: errors as 200
    _, client = await world.start()
    world.model.behave = lambda exchange: exchange.respond(status, [(b"X-Why", b"so")], b'{"error":"no"}')
    answer = await client.predict(b"1")
    assert (answer.status, answer.body, answer.header(b"x-why")) == (status, b'{"error":"no"}', b"so")


async def test_headers_and_fields_arrive_and_separate_requests_that_differ_in_them(world):  # KServe drops both
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    rest = []
    for tenant in (b"red", b"blue", b"red"):
        body = b'{"instances":[[1]],"signature_name":"%b"}' % tenant
        rest.append(client.send(b"POST", b"/v1/models/m:predict", body, [(b"X-Tenant", tenant)]))
        await world.queued(sidecar, len(rest))
    world.model.release()
    await first
    for one in rest:
        assert (await one).status == 200
    calls = {find(call.headers, b"x-tenant"): json.loads(call.body) for call in world.model.received[1:]}
    assert calls == {
        b"red": {"instances": [[1], [1]], "signature_name": "red"},
        b"blue": {"instances": [[1]], "signature_name": "blue"},
    }
    assert sidecar.driver.counts.fragments["x-tenant"] >= 2


@pytest.mark.parametrize(
    "requests",
    [
        [(b"/v1/models/m:predict", [(b"x-tenant", b"a")], b""), (b"/v1/models/m:predict", [(b"x-tenant", b"b")], b"")],
        [(b"/v1/models/m:predict", [], b""), (b"/v1/models/m:predict", [(b"authorization", b"b")], b"")],
        [(b"/v1/models/m:predict", [], b',"scale":1'), (b"/v1/models/m:predict", [], b',"scale":1.0')],
        [(b"/v1/models/m:predict", [], b""), (b"/v1/models/m:predict", [], b',"signature_name":"s"')],
        [(b"/v1/models/m/versions/1:predict", [], b""), (b"/v1/models/m/versions/2:predict", [], b"")],
        [(b"/v1/models/m/labels/a:predict", [], b""), (b"/v1/models/m/labels/b:predict", [], b"")],
        [(b"/v1/models/m:predict?a=1", [], b""), (b"/v1/models/m:predict?a=2", [], b"")],
    ],
)
async def test_requests_that_differ_in_one_thing_are_never_batched_together(world, requests):  # dropped; last path
    sidecar, client = await world.start()
    first = await world.occupy(client)
    starts = [
        lambda target=target, headers=headers, body=b'{"instances":[1]%b}' % fields: client.send(
            b"POST", target, body, headers
        )
        for target, headers, fields in requests
    ]
    asked = await world.queue(sidecar, *starts, *starts)
    world.model.release()
    for one in (first, *asked):
        assert (await one).status == 200
    calls = world.model.received[1:]
    assert [(call.target, call.body) for call in calls] == [
        (target, b'{"instances":[1,1]%b}' % fields) for target, _, fields in requests
    ]
    for call, (_, headers, _) in zip(calls, requests, strict=True):
        assert [find(call.headers, name) for name, _ in headers] == [value for _, value in headers]


async def test_requests_of_two_models_are_never_batched_together(world):  # KServe: mixed models go to the last path
    policy = {"models": [{"name": "a", "axis": "First"}, {"name": "b", "axis": "First"}]}
    sidecar, client = await world.start(policy=policy)
    world.model.holding = True
    models = ("a", "b")
    rest = [client.predict(b"1", model=model) for model in models]
    await world.until(lambda: len(world.model.held) == len(models))
    rest += [client.predict(b"%d" % row, model=model) for row in (2, 3) for model in models]
    await world.queued(sidecar, 4)
    world.model.release()
    assert [(await one).json["predictions"] for one in rest] == [[1], [1], [2], [2], [3], [3]]
    assert {(call.target, call.body) for call in world.model.received[2:]} == {
        (b"/v1/models/a:predict", b'{"instances":[2,3]}'),
        (b"/v1/models/b:predict", b'{"instances":[2,3]}'),
    }


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("known", [False, True])
async def test_no_request_waits_for_others_at_an_idle_model(world, known):  # waits in full when idle
    # With the service time unknown, or in pass-through; a wait of an hour would outlast this test's patience.
    parameters = {"maxBatch": 8, "maxWait": "1h", "passThrough": known}
    sidecar, client = await world.start(parameters={"*": parameters}, policy=LONG)
    if known:
        sidecar.batcher.learn("m", SECONDS_9, sidecar.clock())
    answer = await client.predict(b"1", [DEBUG])
    assert answer.header(b"x-carpool-batch-size") == b"1"


async def test_when_all_requests_of_a_call_have_left_it_is_aborted(world, wait_until):  # KServe: ignores disconnects
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    first.leave()
    await wait_until(lambda: world.model.left == 1)
    world.model.holding = False
    assert (await client.predict(b"1")).status == 200


async def test_a_caller_whose_connection_broke_is_not_served(world):  # ignores disconnects, in the queue too
    sidecar, client = await world.start()
    first = await world.occupy(client)
    gone, stays = await world.queue(sidecar, lambda: client.predict(b"1"), lambda: client.predict(b"2"))
    gone.leave()
    await world.queued(sidecar, 1)
    world.model.release()
    assert (await first).status == 200
    assert (await stays).json == {"predictions": [2]}
    assert b"1" not in [call.body for call in world.model.received]
    assert [call.rows for call in world.model.received] == [["first"], [2]]


async def test_ints_stay_ints_and_are_never_batched_with_floats(world):  # ints become floats
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"[1]", b"[1.5]", b"[2]"])
    world.model.release()
    await first
    assert [(await one).body for one in rest] == [b'{"predictions":[%b]}' % text for text in (b"[1]", b"[1.5]", b"[2]")]
    assert sorted(call.body for call in world.model.received[1:]) == [
        b'{"instances":[[1.5]]}',
        b'{"instances":[[1],[2]]}',
    ]


async def test_ready_only_with_the_model(world):  # ready before the model
    world.model.documents[b"/v2/health/ready"] = (503, {})
    sidecar = await world.sidecar()
    admin = world.client(sidecar.admin.address)
    assert (await admin.get(b"/readyz")).status == 503
    assert (await admin.get(b"/livez")).status == 200
    assert (await admin.get(b"/startupz")).status == 200
    world.model.documents[b"/v2/health/ready"] = (200, {})
    await world.until(lambda: sidecar.ready)
    assert (await admin.get(b"/readyz")).status == 200


async def test_a_model_that_was_ready_may_say_for_a_while_that_it_is_not(world):
    upstream = {"url": f"http://127.0.0.1:{world.model.port}"}
    patient, strict = [await world.sidecar(upstream={**upstream, "patience": each}) for each in ("1h", "0s")]
    world.model.documents[b"/v2/health/ready"] = (503, {})
    assert patient.ready
    patient.health.observe(await patient.health.look())
    await world.until(lambda: not strict.ready)
    assert patient.ready


# ------------------------------------------------------------------------------------------------------------ MLServer


async def test_who_leaves_the_queue_is_not_served_and_the_others_are(world):  # MLServer: one cancel hangs the rest
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2", b"3"])
    rest[1].leave()
    await world.queued(sidecar, 2)
    world.model.release()
    await first
    assert [(await rest[0]).json, (await rest[2]).json] == [{"predictions": [1]}, {"predictions": [3]}]
    assert world.model.received[-1].rows == [1, 3]


async def test_different_shapes_are_never_batched_together(world):  # MLServer: truncated; TF Serving: one fails all
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"[1,2]", b"[1,2,3]"])
    world.model.release()
    await first
    assert [(await one).json for one in rest] == [{"predictions": [[1, 2]]}, {"predictions": [[1, 2, 3]]}]


async def test_different_datatypes_and_shapes_are_never_batched_together(world):  # shapes truncated; dtypes mixed
    sidecar, client = await world.start()
    first = await world.occupy(client)
    tensors = [
        ("x", "FP32", [1, 1], b"\1\2\3\4"),
        ("x", "INT32", [1, 1], b"\1\2\3\4"),
        ("x", "UINT32", [1, 1], b"\5\6\7\7"),
        ("x", "FP32", [1, 2], bytes(range(8))),
        ("x", "FP32", [1, 1, 2], bytes(range(8))),
        ("y", "FP32", [1, 1], b"\1\2\3\4"),
        ("x", "BYTES", [1, 1], b"\0\0\0\0"),
    ]
    requests = [world.binary([tensor]) for tensor in tensors]
    asked = await world.queue(sidecar, *[lambda request=request: client.infer(*request) for request in requests])
    world.model.release()
    await first
    for one, (name, datatype, shape, data) in zip(asked, tensors, strict=True):
        answer = await one
        at = int(answer.header(b"inference-header-content-length"))
        output = json.loads(answer.body[:at])["outputs"][0]
        assert (output["name"], output["datatype"], output["shape"]) == (name, datatype, shape)
        assert answer.body[at:] == data
    assert len(world.model.received) == 1 + len(tensors)


# -------------------------------------------------------------------------------------------------------------- Triton


async def test_tritons_timeout_is_honoured(world):  # Triton: ignored by default
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    body = b'{"parameters":{"timeout":5000},"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[1]}]}'
    assert (await client.infer(body)).status == 504
    world.model.release()
    assert (await first).status == 200


async def test_an_odd_request_at_the_head_does_not_cut_the_batch(world):  # FIFO head cuts the batch
    sidecar, client = await world.start()
    first = await world.occupy(client)
    texts = [b"[1,1]", b"[2]", b"[3,3]", b"[4]", b"[5,5]"]
    asked = await world.queue(sidecar, *[lambda text=text: client.predict(text) for text in texts])
    world.model.release()
    await first
    assert [(await one).body for one in asked] == [b'{"predictions":[%b]}' % text for text in texts]
    assert [call.rows for call in world.model.received[1:]] == [[[1, 1], [3, 3], [5, 5]], [[2], [4]]]


# ------------------------------------------------------------------------------------ TF Serving, TorchServe, Infinity


async def test_a_row_of_an_odd_shape_inside_a_request_fails_nobody_else(world):  # one odd shape fails all
    sidecar, client = await world.start()
    first = await world.occupy(client)
    texts = [b"[1,1]", b"[2,2],[3]", b"[4,4]"]
    asked = await world.queue(sidecar, *[lambda text=text: client.predict(text) for text in texts])
    world.model.release()
    await first
    assert [(await one).body for one in asked] == [b'{"predictions":[%b]}' % text for text in texts]
    assert sorted(call.body for call in world.model.received[1:]) == [
        b'{"instances":[[1,1],[4,4]]}',
        b'{"instances":[[2,2],[3]]}',  # as it came, for the model to judge
    ]


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
    assert [answer.json for answer in answers if answer.status != 200] == [{"error": "666"}]
    assert [answer.json for answer in answers if answer.status == 200] == [{"predictions": [n]} for n in (1, 3, 4, 5)]
    assert (await client.predict(b"6")).status == 200


async def test_a_poisoned_row_is_sent_a_bounded_number_of_times_and_then_no_more(world):  # poison loops
    def poisoned(exchange):
        if b"666" in exchange.body:
            exchange.respond(500, [], b"{}")
        else:
            echo(exchange)

    echo, world.model.behave = world.model.behave, poisoned
    sidecar, client = await world.start()
    first = await world.occupy(client)
    texts = [b"1", b"2", b"3", b"666", b"5", b"6", b"7", b"8"]
    asked = await world.queue(sidecar, *[lambda text=text: client.predict(text) for text in texts])
    world.model.release()
    await first
    assert [(await one).status for one in asked] == [200, 200, 200, 500, 200, 200, 200, 200]
    # 8, then the halves with it of 4, 2 and 1.
    assert [len(call.rows) for call in world.model.received if 666 in call.rows] == [8, 4, 2, 1]
    assert (await client.predict(b"9")).json == {"predictions": [9]}
    assert sidecar.batcher.idle


async def test_one_bad_batch_after_another_leaves_the_server_at_work(world):  # one bad batch stops the server
    echo = world.model.behave
    faults = [
        lambda exchange: exchange.respond(500, [], b"{}"),
        lambda exchange: exchange.respond(200, [], b"no json"),
        lambda exchange: exchange.abort(),
        lambda exchange: exchange.respond(503, [], b""),
        lambda exchange: exchange.respond(204, []),
        lambda exchange: exchange.respond(200, [(b"Content-Encoding", b"gzip")], b"\x1f\x8b"),
    ]
    sidecar, client = await world.start()
    for fault in faults:
        first = await world.occupy(client)
        asked = await world.queue(sidecar, lambda: client.predict(b"1"), lambda: client.predict(b"2"))
        world.model.behave = fault
        world.model.release()
        for one in (first, *asked):
            await one
        world.model.behave = echo
        assert (await client.predict(b"3")).json == {"predictions": [3]}
        assert sidecar.batcher.idle


async def test_a_row_whose_answer_is_no_json_costs_nobody_else_an_answer(world):  # one odd row fails all
    def with_nan(exchange):
        exchange.respond(200, [], exchange.body.replace(b"instances", b"predictions").replace(b"666", b"NaN"))

    sidecar, client = await world.start()
    first = await world.occupy(client)
    texts = [b"1", b"666", b"3", b"4"]
    asked = await world.queue(sidecar, *[lambda text=text: client.predict(text) for text in texts])
    world.model.behave = with_nan
    world.model.release()
    await first
    # Alone, what its model says of it passes as it is: Python's servers write NaN.
    expected = [b'{"predictions":[%b]}' % text for text in (b"1", b"NaN", b"3", b"4")]
    assert [(await one).body for one in asked] == expected
    lane = sidecar.batcher.model("m")
    assert (lane.isolation.quarantined, lane.cap) == (False, 8)  # it was no fault of the batch's size


async def test_a_model_whose_answers_are_often_no_json_is_sent_smaller_batches(world):
    def with_nan(exchange):
        exchange.respond(200, [], exchange.body.replace(b"instances", b"predictions").replace(b"666", b"NaN"))

    sidecar, client = await world.start()
    world.model.behave = with_nan
    statuses = []
    for _ in range(40):
        first = await world.occupy(client)
        asked = await world.queue(sidecar, *[lambda: client.predict(b"666")] * 8)
        world.model.release()
        await first
        statuses += [(await one).status for one in asked]
    assert set(statuses) == {200}
    # Each is answered, and the repeats end by themselves: the last calls had one row each, but for a trial or so.
    assert sum(len(call.rows) for call in world.model.received[-60:]) < 1.5 * 60


async def test_a_model_whose_merged_answers_are_no_json_is_not_merged_any_more(world):
    def only_alone(exchange):
        if len(json.loads(exchange.body)["instances"]) > 1:
            exchange.respond(200, [], b"<html>")
        else:
            echo(exchange)

    echo, world.model.behave = world.model.behave, only_alone
    sidecar, client = await world.start()
    first = await world.occupy(client)
    asked = await world.queue(sidecar, *[lambda: client.predict(b"1")] * 8)
    world.model.release()
    assert [(await one).status for one in (first, *asked)] == [200] * 9
    assert sidecar.batcher.model("m").cap == 1


# --------------------------------------------------------------------------------------------------- Ray, BentoML, TEI


async def test_a_batch_grows_until_its_slot_is_free(world):  # Ray: frozen before the slot frees
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1"])
    late = client.predict(b"2")
    await world.queued(sidecar, 2)
    world.model.release()
    await first
    assert ((await rest[0]).json, (await late).json) == ({"predictions": [1]}, {"predictions": [2]})
    assert world.model.received[-1].rows == [1, 2]


async def test_what_is_about_one_caller_stays_with_it(world):  # BentoML: the last caller's context serves all
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    rest = [
        client.predict(b"1", [(b"x-request-id", b"a"), (b"traceparent", b"t1")]),
        client.predict(b"2", [(b"x-request-id", b"b")]),
    ]
    await world.queued(sidecar, 2)
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


async def test_what_is_about_one_caller_stays_out_of_a_shared_error_too(world):
    sidecar, client = await world.start()
    first = await world.occupy(client)
    asked = await world.queue(sidecar, lambda: client.predict(b"1"), lambda: client.predict(b"2"))
    world.model.behave = lambda exchange: exchange.respond(
        401, [(b"Set-Cookie", b"who=a"), (b"WWW-Authenticate", b"Bearer")], b"{}"
    )
    world.model.release()
    assert (await first).header(b"set-cookie") == b"who=a"  # its own
    for one in asked:
        answer = await one
        assert (answer.status, answer.header(b"set-cookie")) == (401, None)
        assert answer.header(b"www-authenticate") == b"Bearer"


@pytest.mark.usefixtures("untuned")
async def test_nobody_is_refused_by_an_idle_model(world):  # BentoML: sheds while idle
    sidecar, client = await world.start()
    await client.predict(b"1")
    sidecar.batcher.learn("m", Estimate(times=(0.0, 9.0), upper=(0.0, 9.0)), sidecar.clock())
    assert (await client.predict(b"2", [(b"x-request-timeout-ms", b"4000")])).status == 200


async def test_rows_count_against_the_queue_not_requests(world):  # TEI: array inputs slip past the limit
    sidecar, client = await world.start(policy={"admission": {"maxQueuedRows": 4}})
    first, rest = await world.queue_behind(sidecar, client, [b"1,2"])
    assert (await client.predict(b"1,2,3")).status == 429
    rest.append(client.predict(b"3,4"))
    await world.queued(sidecar, 4)
    world.model.release()
    assert [(await one).status for one in (first, *rest)] == [200, 200, 200]
