"""What callers and their connections take of the sidecar, seen from outside: nobody waits for somebody else's."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

OFFER = b"GET /chat HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
PREDICT = b"POST /v1/models/m:predict HTTP/1.1\r\nHost: h\r\nContent-Length: 17\r\n"
BODY = b'{"instances":[9]}'


@pytest.fixture
async def raw():
    """Connect clients of raw bytes."""
    writers = []

    async def connect(sidecar):
        host, _, port = sidecar.data.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        return reader, writer

    yield connect
    for writer in writers:
        writer.transport.abort()


@pytest.fixture
async def chat():
    """A server that switches protocols, and from then on answers in capitals."""
    ended = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if b"upgrade: websocket" in head:
            writer.write(SWITCH)
            while data := await reader.read(65536):
                writer.write(data.upper())
            ended.append(head)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", ended=ended)
    server.close()


async def forwarded(sidecar, client, count, world):
    """Have so many requests under way that are only forwarded, held by the model."""
    world.model.holding = True
    asked = [client.send(b"POST", b"/explain", b"%d" % n) for n in range(count)]
    await world.until(lambda: len(world.model.held) >= count)
    return asked


async def test_300_forwarded_requests_that_hang_block_no_predictions_and_no_probes(world):
    sidecar, client = await world.start()
    hung = await forwarded(sidecar, client, 300, world)
    world.model.holding = False
    for n in range(20):
        assert (await client.predict(b"%d" % n)).json == {"predictions": [n]}
    assert (await client.get(b"/v2/health/ready")).status == 200
    assert (await client.get(b"/v2/models/m")).status == 200
    world.model.behave = lambda exchange: exchange.respond(200, [])
    world.model.release()
    assert {(await one).status for one in hung} == {200}


async def test_300_slow_uploads_take_no_connection(world, raw):
    sidecar, client = await world.start()
    await client.predict(b"0")
    connections = world.model.server.connections
    for _ in range(300):
        _, writer = await raw(sidecar)
        writer.write(b"POST /upload HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 50)
    await world.until(lambda: sidecar.data.server.buffered_bytes == 300 * 50)
    for n in range(20):
        assert (await client.predict(b"%d" % n)).json == {"predictions": [n]}
    assert world.model.server.connections <= connections + 1


async def test_what_is_forwarded_is_bounded_and_the_refusal_names_the_setting(world):
    upstream = {"url": f"http://127.0.0.1:{world.model.port}", "maxForwarded": 3}
    sidecar, client = await world.start(upstream=upstream)
    hung = await forwarded(sidecar, client, 3, world)
    waiting = [client.send(b"POST", b"/explain", b"x") for _ in range(3)]
    await world.until(lambda: sidecar.backend._forwarding.waiting == 3)
    refused = await client.send(b"POST", b"/explain", b"x")
    assert (refused.status, refused.json["reason"]) == (503, "upstream-busy")
    assert refused.header(b"retry-after") == b"1"
    assert "upstream.maxForwarded" in refused.json["error"]
    world.model.behave = lambda exchange: exchange.respond(200, [])
    world.model.release()
    assert {(await one).status for one in (*hung, *waiting)} == {200}


async def test_connections_that_say_nothing_make_room_for_those_that_do(world, raw):
    sidecar, client = await world.start()
    connections = sidecar.data.server._connections
    connections._limits = dataclasses.replace(connections._limits, max_connections=50)
    for n in range(200):
        _, writer = await raw(sidecar)
        writer.write(b"POST /v1/models/m:predict HTTP/1.1\r\nHos")
        if n % 10 == 0:
            assert (await client.predict(b"%d" % n)).json == {"predictions": [n]}
    await world.until(lambda: sidecar.data.server.connections <= 50)
    assert sidecar.driver.counts.answers == {("m", "v1", 200): 20}


async def test_an_answer_that_has_no_room_fails_alone(world):
    sidecar, client = await world.start(bodies={"maxRequest": "1Mi", "maxAnswer": "1Mi", "maxBuffered": "1Mi"})
    free = sidecar.data.server.budget.limit
    sidecar.data.server.budget.limit = 600_000
    echo = world.model.behave

    def behave(exchange):
        if b"large" in exchange.body:
            exchange.respond(200, [], b'{"predictions":["%b"]}' % (b"x" * 900_000))
        else:
            echo(exchange)

    world.model.behave = behave
    failed = await client.predict(b'"large"')
    assert (failed.status, failed.json["reason"]) == (503, "buffers-full")
    assert "raise bodies.maxBuffered" in failed.json["error"]
    assert (await client.predict(b"1")).json == {"predictions": [1]}
    sidecar.data.server.budget.limit = free
    assert len((await client.predict(b'"large"')).body) > 900_000
    await world.until(lambda: sidecar.data.server.buffered_bytes == 0)


async def pressed(world, **fields):
    """Have 8 requests with room for 2 of them; returns their statuses."""
    sidecar, client = await world.start(
        bodies={"maxRequest": "1Mi", "maxAnswer": "1Mi", "maxBuffered": "1Mi"}, **fields
    )
    sidecar.data.server.budget.limit = 1_000_000
    world.model.behave = lambda exchange: exchange.respond(200, [], b'{"predictions":[1]}')
    first = await world.occupy(client)
    asked = [client.predict(b'"%b"' % (b"x" * 450_000)) for _ in range(8)]
    await world.until(lambda: len(world.model.held) - 1 + sum(each.future.done() for each in asked) >= 6)
    world.model.release()
    await first
    statuses = [(await each).status for each in asked]
    await world.until(lambda: sidecar.data.server.buffered_bytes == 0)
    return statuses


@pytest.mark.parametrize("models", [[], [{"name": "m", "axis": "None"}]], ids=["pass-through", "no axis"])
async def test_what_is_not_batched_needs_no_room(world, models):
    """It goes on as it comes, as without a sidecar, while nobody has set how many calls the server gets at once."""
    assert await pressed(world, policy={"models": models}, parameters={}) == [200] * 8


@pytest.mark.parametrize("axis", ["First", "None"])
async def test_who_waits_for_one_of_so_many_calls_is_refused_without_room(world, axis):
    fields = {"parameters": {"*": {"maxBatch": 8, "maxInFlight": 1}}}
    statuses = await pressed(world, policy={"models": [{"name": "m", "axis": axis}]}, **fields)
    assert sorted(statuses) == [200] * 2 + [503] * 6


async def test_large_bodies_there_and_back_are_the_same_and_given_back(world):
    sidecar, client = await world.start()
    text = b'"%b"' % (bytes(range(97, 123)) * 250_000)  # 6.5 MB: beyond what the heap is for
    assert (await client.predict(text)).body == b'{"predictions":[%b]}' % text
    await world.until(lambda: sidecar.data.server.buffered_bytes == 0)


async def test_a_web_socket_passes_through(world, chat, raw):
    sidecar, _ = await world.start(upstream={"url": chat.url})
    reader, writer = await raw(sidecar)
    writer.write(OFFER)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    for _ in range(3):
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"HELLO"
    assert sidecar.driver.counts.answers[("", "other", 101)] == 1
    assert sidecar.data.server.busy == 1
    writer.write_eof()
    assert await reader.read() == b""
    await world.until(lambda: chat.ended and not sidecar.data.server.busy)


async def test_a_drain_ends_a_web_socket_at_its_limit(world, chat, raw):
    sidecar, _ = await world.start(upstream={"url": chat.url}, shutdown={"lame": "0s", "limit": "100ms"})
    reader, writer = await raw(sidecar)
    writer.write(OFFER)
    await reader.readuntil(b"\r\n\r\n")
    await sidecar.drain()
    writer.write(b"still here")
    assert await reader.readexactly(10) == b"STILL HERE"
    await sidecar.close()
    async with asyncio.timeout(30):
        assert await reader.read() == b""


async def test_an_offer_on_a_request_for_inference_is_no_tunnel(world, raw):
    sidecar, _ = await world.start()
    reader, writer = await raw(sidecar)
    offer = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    writer.write(PREDICT + offer + BODY + PREDICT + b"\r\n" + BODY)
    for _ in range(2):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        assert await reader.readexactly(len(b'{"predictions":[9]}')) == b'{"predictions":[9]}'
    assert [call.rows for call in world.model.received] == [[9], [9]]
    assert sidecar.driver.counts.answers == {("m", "v1", 200): 2}


async def test_an_absolute_target_is_known_as_inference(world, raw):
    sidecar, _ = await world.start()
    reader, writer = await raw(sidecar)
    writer.write(PREDICT.replace(b" /v1", b" http://model.example:80/v1") + b"\r\n" + BODY)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    assert sidecar.driver.counts.answers == {("m", "v1", 200): 1}
    (received,) = world.model.received
    assert received.target == b"/v1/models/m:predict"
    assert (b"Host", b"model.example:80") in received.headers


async def test_a_trace_that_ends_here_never_reaches_the_model(world, raw):
    sidecar, _ = await world.start()
    reader, writer = await raw(sidecar)
    writer.write(b"TRACE / HTTP/1.1\r\nHost: h\r\nMax-Forwards: 0\r\nCookie: secret\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    assert b"message/http" in answer
    assert b"secret" not in answer
    assert world.model.received == []


async def test_a_flood_on_one_connection_leaves_probes_their_turn(world, raw):
    sidecar, client = await world.start()
    admin = world.client(sidecar.admin.address)
    floods = [await raw(sidecar) for _ in range(20)]
    answered_at_once = b"TRACE / HTTP/1.1\r\nHost: h\r\nMax-Forwards: 0\r\n\r\n"
    for _, writer in floods:
        writer.write(answered_at_once * 4000)
    await world.until(lambda: sidecar.driver.counts.answers)
    for path in (b"/livez", b"/metrics", b"/livez"):
        assert (await admin.get(path)).status == 200
    counted = sum(sidecar.driver.counts.answers.values())
    assert counted < 80_000, "all of the flood went first"
    assert (await client.predict(b"1")).json == {"predictions": [1]}
