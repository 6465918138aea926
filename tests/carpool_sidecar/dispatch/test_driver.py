"""Client, sidecar and model server over loopback: what is batched, what comes back, and what goes wrong."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from carpool.batching.requests import Estimate
from carpool_sidecar.backends.base import Document
from carpool_sidecar.http1.client.errors import UpstreamError

JSON = (b"Content-Type", b"application/json")
LENGTH = b"Inference-Header-Content-Length"
DEBUG = (b"X-Carpool-Debug", b"1")

# --------------------------------------------------------------------------------------------------- batched together


async def test_waiting_requests_are_batched_in_one_call_and_keep_every_digit(world):
    sidecar, client = await world.start()
    texts = [b"[1.10, 1e5]", b"[-0.0, 12345678901234567890.125]", b"[0.1, 3.000]"]
    first, rest = await world.queue_behind(sidecar, client, texts)
    world.model.release()
    assert (await first).body == b'{"predictions":[0]}'
    assert [(await one).body for one in rest] == [b'{"predictions":[%b]}' % text for text in texts]
    assert [len(call.rows) for call in world.model.received] == [1, 3]


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


SLOW = {"slo": {"latency": {"p99": "60s"}}}


TENSOR = '{"name":"x","datatype":"FP32","shape":[1,1],"data":[1]}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"inputs":[%s],"parameters":{"sequence_id":5}}', "sequence"),
        ('{"inputs":[%s],"outputs":[{"name":"x","parameters":{"classification":2}}]}', "classification"),
        ('{"inputs":[%s],"outputs":[{"name":"x","parameters":{"shared_memory_region":"r"}}]}', "shared-memory"),
        ('{"inputs":[%s,{"name":"y","datatype":"INT8","shape":[2],"data":[1,2]}]}', "unequal-rows"),
        ('{"inputs":[%s,{"name":"y","datatype":"INT8","shape":[],"data":[1]}]}', "scalar"),
        ('{"inputs":[%s,{"name":"y","datatype":"BOOL","shape":[1],"data":[1]}]}', "kinds"),
        ('{"inputs":[%s,{"name":"y","datatype":"INT8","shape":[1,2],"data":[1,[2]]}]}', "nesting"),
    ],
)
async def test_requests_without_rows_to_share_are_sent_alone_as_they_came(world, text, reason):
    sidecar, client = await world.start()
    body = (text % TENSOR).encode()
    first = await world.occupy(client)
    asked = await world.queue(sidecar, *[lambda: client.infer(body)] * 2)
    world.model.release()
    for one in (first, *asked):
        assert (await one).status == 200
    assert [call.body for call in world.model.received[1:]] == [body, body]
    assert sidecar.driver.counts.alone == {("m", reason): 2}


async def test_encoded_bodies_are_sent_alone_as_they_came(world):
    sidecar, client = await world.start()
    body = gzip.compress(b'{"instances":[1]}')
    first = await world.occupy(client)
    headers = [(b"Content-Encoding", b"gzip")]
    asked = await world.queue(sidecar, *[lambda: client.send(b"POST", b"/v1/models/m:predict", body, headers)] * 2)
    world.model.release()
    for one in (first, *asked):
        assert (await one).status == 200
    assert [call.body for call in world.model.received[1:]] == [body, body]
    assert sidecar.driver.counts.alone == {("m", "encoded"): 2}


async def test_v2_requests_are_sent_alone_until_the_batch_axis_is_known(world):
    world.model.documents[b"/v2/models/m"] = (503, {})
    sidecar, client = await world.start(policy={"models": []})
    first, _ = await world.queue_behind(sidecar, client, [])
    rest = []
    for _ in range(2):
        rest.append(client.infer(*world.binary([("x", "FP32", [1, 1], b"\0\0\0\0")])))
        await world.queued(sidecar, len(rest))
    world.model.release()
    await first
    for one in rest:
        assert (await one).status == 200
    assert len(world.model.received) == 3
    assert sidecar.driver.counts.alone["m", "axis-unknown"] == 2


async def test_answers_of_a_pipelining_client_come_in_its_order(world):
    sidecar, _ = await world.start(parameters={"*": {"maxBatch": 1, "maxInFlight": 4}})
    world.model.holding = True
    host, _, port = sidecar.data.address.rpartition(":")
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
    await world.queued(sidecar, 7)
    low = client.infer(body % (3, 83))
    await world.queued(sidecar, 8)
    assert (await client.infer(body % (3, 84))).status == 429
    world.model.release()
    assert [(await one).status for one in (first, *rest, urgent, low)] == [200] * 9
    order = [call.body for call in world.model.received]
    assert b"81" in order[1]
    assert b"83" in order[-1]


@pytest.mark.usefixtures("untuned")
async def test_who_would_be_late_is_503_at_once(world):
    sidecar, client = await world.start()
    first, _ = await world.queue_behind(sidecar, client, [])
    sidecar.batcher.learn("m", Estimate(times=(0.0, 9.0), upper=(0.0, 9.0)), sidecar.clock())
    refused = await client.predict(b"3", [(b"x-request-timeout-ms", b"4000")])
    assert (refused.status, refused.json["reason"]) == (503, "predicted-late")
    assert int(refused.header(b"retry-after")) >= 1
    assert "add replicas" in refused.json["error"]
    world.model.release()
    assert (await first).status == 200


@pytest.mark.usefixtures("untuned")
async def test_a_request_refused_while_failing_ones_are_kept_apart_names_them_as_the_cause(world):
    echo = world.model.behave
    sidecar, client = await world.start()
    world.model.behave = lambda exchange: exchange.respond(500, [], b"{}")
    assert (await client.predict(b"0")).status == 500
    world.model.behave = echo
    first, _ = await world.queue_behind(sidecar, client, [])
    sidecar.batcher.learn("m", Estimate(times=(0.0, 9.0), upper=(0.0, 9.0)), sidecar.clock())
    refused = await client.predict(b"3", [(b"x-request-timeout-ms", b"4000")])
    assert (refused.status, refused.json["reason"]) == (503, "predicted-late")
    assert "requests that fail are sent alone" in refused.json["error"]
    assert "replicas" not in refused.json["error"]
    sidecar.batcher.model("m").isolation.quarantined = True  # all are sent alone then, whether requests fail or not
    refused = await client.predict(b"4", [(b"x-request-timeout-ms", b"4000")])
    assert "add replicas" in refused.json["error"]
    world.model.release()
    assert (await first).status == 200


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


@pytest.mark.parametrize("least", ["x-request-timeout-ms", "grpc-timeout", "x-envoy-expected-rq-timeout-ms", "triton"])
async def test_of_several_deadlines_the_least_holds(world, least):
    sidecar, client = await world.start(policy={"admission": {"timeout": "1h"}})
    first = await world.occupy(client)
    long = {"x-request-timeout-ms": "60000", "grpc-timeout": "1M", "x-envoy-expected-rq-timeout-ms": "60000"}
    short = {"x-request-timeout-ms": "5", "grpc-timeout": "5m", "x-envoy-expected-rq-timeout-ms": "5"}
    headers = [(name.encode(), (short if name == least else long)[name].encode()) for name in long]
    timeout = 5000 if least == "triton" else 60_000_000
    body = f'{{"inputs":[{TENSOR}],"parameters":{{"timeout":{timeout}}}}}'.encode()
    answer = await client.infer(body, headers)
    assert (answer.status, answer.json["reason"]) == (504, "expired")
    world.model.release()
    assert (await first).status == 200
    assert sidecar.batcher.idle


async def test_the_policys_timeout_holds_for_everybody(world):
    world.model.holding = True
    _, client = await world.start(policy={"admission": {"timeout": "20ms"}})
    answer = await client.predict(b"1")
    assert (answer.status, answer.json["reason"]) == (504, "expired")


async def test_an_upstream_that_is_down_is_503(world):
    sidecar, client = await world.start()
    told = []
    sidecar.driver._flights._unreachable = lambda: told.append(1)
    await world.model.die()
    first = await client.predict(b"1")
    assert (first.status, first.json["reason"]) in {(503, "upstream-refused"), (502, "upstream-reset")}
    second = await client.predict(b"1")
    assert (second.status, second.json["reason"]) == (503, "upstream-refused")
    assert second.header(b"retry-after") == b"1"
    assert len(told) == [first.status, second.status].count(503)


async def test_what_prevents_a_connection_but_refuses_none_is_no_restart(world, tmp_path):
    file = tmp_path / "file"
    file.touch()
    sidecar, client = await world.start(upstream={"url": f"unix:{file}/within"})
    told = []
    sidecar.driver._flights._unreachable = lambda: told.append(1)
    answer = await client.predict(b"1")
    assert (answer.status, answer.json["reason"], told) == (503, "upstream-connect", [])
    assert "Not a directory" in answer.json["error"]


async def test_a_connection_that_breaks_is_no_restart(world):
    sidecar, client = await world.start()
    lane = sidecar.batcher.model("m")
    lane.isolation.quarantined = True
    found = []
    sidecar.health._found = found.append
    world.model.behave = lambda exchange: exchange.abort()
    assert (await client.predict(b"1")).status == 502
    sidecar.health.observe(Document(200))
    assert (found, lane.isolation.quarantined) == ([], True)


# ------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("status", [413, 500])  # said so, or out of memory
async def test_a_batch_that_is_too_large_is_halved_and_the_next_ones_are_smaller(world, status):
    def at_most_two(exchange):
        if len(json.loads(exchange.body)["instances"]) > 2:
            exchange.respond(status, [], b'{"error":"too large"}')
        else:
            world.echo(exchange)

    world.echo = world.model.behave
    world.model.behave = at_most_two
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2", b"3", b"4"])
    world.model.release()
    await first
    assert [(await one).json for one in rest] == [{"predictions": [n]} for n in (1, 2, 3, 4)]
    assert sidecar.batcher.model("m").cap == 2


async def test_an_answer_with_too_few_rows_costs_nobody_an_answer_and_ends_batching(world):
    def one_short(exchange):
        rows = json.loads(exchange.body)["instances"]
        exchange.respond(200, [], json.dumps({"predictions": rows[: max(1, len(rows) - 1)]}).encode())

    world.model.behave = one_short
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    world.model.release()
    await first
    assert [(await one).json for one in rest] == [{"predictions": [1]}, {"predictions": [2]}]
    assert sidecar.batcher.model("m").isolation.quarantined
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    world.model.release()
    assert [(await one).json for one in rest] == [{"predictions": [1]}, {"predictions": [2]}]
    assert sidecar.driver.counts.alone == {("m", "quarantined"): 3}


async def test_after_one_of_a_caller_failed_its_others_share_batches(world):
    # All requests behind a gateway come from one address.
    echo = world.model.behave
    sidecar, client = await world.start()
    world.model.behave = lambda exchange: exchange.respond(500, [], b"{}")
    assert (await client.predict(b"0")).status == 500
    world.model.behave = echo
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    world.model.release()
    for one in (first, *rest):
        assert (await one).status == 200
    assert [len(call.rows) for call in world.model.received] == [1, 1, 2]
    assert sidecar.driver.counts.alone == {}
    assert "m" in sidecar.driver.counts.apart_at


async def test_a_request_larger_than_a_batch_is_cut_and_not_counted_as_kept_apart(world):
    echo = world.model.behave
    sidecar, client = await world.start(parameters={"*": {"maxBatch": 2}})
    world.model.behave = lambda exchange: exchange.respond(500, [], b"{}")
    assert (await client.predict(b"0")).status == 500
    world.model.behave = echo
    assert (await client.predict(b"1,2,3")).json == {"predictions": [1, 2, 3]}
    assert [len(call.rows) for call in world.model.received] == [1, 2, 1]
    assert sidecar.driver.counts.alone == {}


async def test_a_request_in_parts_whose_answers_are_no_json_is_sent_whole_and_costs_nobody_their_batches(world):
    sidecar, client = await world.start(parameters={"*": {"maxBatch": 2}})
    echo, world.model.behave = world.model.behave, lambda exchange: exchange.respond(200, [], b'{"predictions":[NaN]}')
    assert (await client.predict(b"1,2,3")).body == b'{"predictions":[NaN]}'  # whole it passes as it is
    world.model.behave = echo
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    sent = len(world.model.received)
    world.model.release()
    assert [(await one).status for one in (first, *rest)] == [200] * 3
    assert [len(call.rows) for call in world.model.received[sent:]] == [2]


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_request_in_parts_whose_answers_do_not_fit_together_is_sent_whole(world, idempotent):
    def detect(exchange):
        """As many boxes a row as the batch has rows, as of a detector that pads to the most of its batch."""
        rows = json.loads(exchange.body)["inputs"][0]["shape"][0]
        output = {"name": "y", "datatype": "INT8", "shape": [rows, rows], "data": [7] * rows**2}
        exchange.respond(200, [], json.dumps({"outputs": [output]}).encode())

    echo, world.model.behave = world.model.behave, detect
    sidecar, client = await world.start(
        parameters={"*": {"maxBatch": 2}}, policy={"models": [{"name": "m", "axis": "First"}], "idempotent": idempotent}
    )
    asked = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[3,1],"data":[1,2,3]}]}'
    for _ in range(2):
        answer = await client.infer(asked)
        if idempotent:
            assert answer.json["outputs"][0]["shape"] == [3, 3]
        else:
            assert (answer.status, answer.json["reason"]) == (502, "parts")
    # Others still share batches.
    small = asked.replace(b"[3,1]", b"[1,1]").replace(b"1,2,3", b"1")
    world.model.behave = echo
    first = await world.occupy(client)
    rest = await world.queue(sidecar, *[lambda: client.infer(small)] * 2)
    world.model.behave = lambda exchange: (detect if b"inputs" in exchange.body else echo)(exchange)
    sent = len(world.model.received)
    world.model.release()
    assert (await first).status == 200
    assert [(await one).json["outputs"][0]["shape"] for one in rest] == [[1, 2], [1, 2]]
    assert len(world.model.received) == sent + 1


async def test_answers_that_are_too_large_together_come_in_smaller_batches(world):
    sidecar, client = await world.start(bodies={"maxAnswer": "1Ki"})
    echo = world.model.behave
    rows = [b"1", b"2", b"3", b"4"]

    def large(exchange):
        if len(json.loads(exchange.body)["instances"]) <= 2:
            echo(exchange)
        else:
            exchange.respond(200, [], b'{"predictions":[1,2,3,4]}' + b" " * 1024)

    for sizes in ([4, 2, 2], [2, 2]):
        world.model.behave = echo
        first, rest = await world.queue_behind(sidecar, client, rows)
        world.model.behave = large
        sent = len(world.model.received)
        world.model.release()
        assert [(await one).status for one in (first, *rest)] == [200] * 5
        assert [len(call.rows) for call in world.model.received[sent:]] == sizes


async def test_a_batch_keeps_the_status_of_its_answer(world):
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    world.model.behave = lambda exchange: exchange.respond(201, [], b'{"predictions":[1,2]}')
    world.model.release()
    assert [(await one).status for one in (first, *rest)] == [201] * 3


async def test_a_model_that_dies_mid_answer_is_502_for_the_requests_it_had_and_no_others(world):
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


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_call_that_dies_on_a_used_connection_is_sent_again_only_where_twice_does_no_harm(world, idempotent):
    _, client = await world.start(policy={"idempotent": idempotent})
    assert (await client.predict(b"1")).status == 200
    echo, fates = world.model.behave, ["die"]

    def once(exchange):
        if fates:
            fates.pop()
            exchange.abort()
        else:
            echo(exchange)

    world.model.behave = once
    assert (await client.predict(b"2")).status == (200 if idempotent else 502)
    assert len(world.model.received) == (3 if idempotent else 2)


# -------------------------------------------------------------------------------------------------------- leaving


async def test_who_leaves_a_batch_under_way_costs_the_others_nothing(world, wait_until):
    sidecar, client = await world.start()
    first, rest = await world.queue_behind(sidecar, client, [b"1", b"2"])
    held, world.model.held = world.model.held, []
    world.model.behave(held[0])
    await first
    await wait_until(lambda: world.model.held)
    rest[0].leave()
    counters = sidecar.batcher.model("m").counters
    await wait_until(lambda: counters.misses.get("cancelled"))
    world.model.release()
    assert (await rest[1]).json == {"predictions": [2]}
    assert world.model.left == 0


# ------------------------------------------------------------------------------------------------------- the rest


async def test_everything_else_passes_through_untouched(world):
    _, client = await world.start()
    assert (await client.get(b"/v2/models/m")).json["name"] == "m"
    assert (await client.get(b"/anything?x=1")).status == 404
    answer = await client.send(b"POST", b"/v2/repository/index", b'{"instances":1}')
    assert (answer.status, answer.body) == (200, b'{"instances":1}')


async def test_counters_show_what_happened(world, wait_until):
    sidecar, client = await world.start()
    assert (await client.predict(b"1")).status == 200
    world.model.behave = lambda exchange: exchange.respond(400, [], b"{}")
    assert (await client.predict(b"[")).status == 400
    world.model.behave = lambda exchange: exchange.respond(500, [], b"{}")
    assert (await client.predict(b"2")).status == 500
    counted = sidecar.batcher.stats(sidecar.clock()).models["m"]
    assert (counted.arrivals, counted.served, counted.hits, counted.misses) == (3, 1, 1, {"failed": 1, "rejected": 1})
    assert sidecar.driver.counts.answers == {("m", "v1", 200): 1, ("m", "v1", 400): 1, ("m", "v1", 500): 1}


async def test_a_request_alone_is_logged_with_the_axis_only_where_that_is_why(world, caplog):
    _, client = await world.start()
    assert (await client.predict(b"1", headers=[(b"content-encoding", b"gzip")])).status == 200
    (line,) = (record for record in caplog.records if record.message == "a request is not batched")
    assert (line.reason, hasattr(line, "detail")) == ("encoded", False)


@pytest.mark.parametrize(
    ("status", "reason"), [(400, "rejected"), (422, "rejected"), (429, "failed"), (408, "failed"), (500, "failed")]
)
async def test_answers_that_blame_the_caller_are_counted_apart(world, status, reason):
    sidecar, client = await world.start()
    world.model.behave = lambda exchange: exchange.respond(status, [], b"{}")
    assert (await client.predict(b"1")).status == status
    assert sidecar.batcher.model("m").counters.misses == {reason: 1}


@pytest.mark.pure
async def test_a_failure_of_the_sidecars_own_costs_the_culprit_alone(world, monkeypatch):
    sidecar, client = await world.start()
    send = sidecar.backend.send

    def broken(target, headers, body, receiver, *, idempotent, merged):
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


async def test_rows_of_batches_count_callers_of_every_priority(world):
    sidecar, client = await world.start()
    for priority in (b"normal", b"batch"):
        assert (await client.predict(b"1, 2", [(b"x-carpool-priority", priority)])).status == 200
    assert sidecar.driver.counts.batch_rows == {"m": 4}


async def test_a_model_that_answers_no_request_with_success_is_reported_with_the_codes(world):
    sidecar, client = await world.start()
    admin = world.client(sidecar.admin.address)
    echo, world.model.behave = world.model.behave, lambda exchange: exchange.respond(401, [], b"{}")
    for _ in range(3):
        await client.predict(b"1")
    (model,) = (await admin.get(b"/v1/stats")).json["models"]
    assert model["trouble"] == "no request was answered with success: 3 with 401"
    world.model.behave = echo
    await client.predict(b"1")
    (model,) = (await admin.get(b"/v1/stats")).json["models"]
    assert model["trouble"] == ""
