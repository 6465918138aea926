from __future__ import annotations

import asyncio


async def test_bodies_over_the_limit_are_forwarded_and_not_batched(world):
    sidecar, client = await world.start(bodies={"maxRequest": "1Ki"})
    answer = await client.predict(b"1" * 2000)
    assert answer.status == 200
    assert sidecar.driver.counts.answers == {("", "other", 200): 1}
    assert [call.body for call in world.model.received] == [b'{"instances":[%b]}' % (b"1" * 2000)]
    assert sidecar.data.server.buffered_bytes == 0
    assert sidecar.driver.counts.alone == {("m", "limits"): 1}
    assert sidecar.driver.counts.why == {("m", "limits"): "body: larger than bodies.maxRequest (1Ki)"}
    await client.predict(b"1" * 2000, model="unknown")
    assert sidecar.driver.counts.alone["<other>", "limits"] == 1
    assert len(list(sidecar.models)) == 1
    assert (await client.predict(b"1")).status == 200
    assert sidecar.driver.counts.answers["m", "v1", 200] == 1


async def test_a_body_of_unknown_length_is_forwarded_once_it_is_over_the_limit(world):
    sidecar, _ = await world.start(bodies={"maxRequest": "1Ki"})
    host, _, port = sidecar.data.address.rpartition(":")
    for sizes in ((700, 700, 3), (1025,), (9000, 9000)):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/models/m:predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        text = b'{"instances":[' + b"1" * (sum(sizes) - 16) + b"]}"
        position = 0
        for size in sizes:
            writer.write(b"%x\r\n%b\r\n" % (size, text[position : position + size]))
            position += size
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        assert b" 200 " in await reader.readline()
        writer.close()
        assert world.model.received[-1].body == text
    assert sidecar.driver.counts.answers == {("", "other", 200): 3}
    assert sidecar.driver.counts.alone == {("m", "limits"): 3}
    await world.until(lambda: sidecar.data.server.buffered_bytes == 0)


async def test_a_caller_who_leaves_before_its_body_is_complete_leaves_nothing(world):
    sidecar, client = await world.start()
    host, _, port = sidecar.data.address.rpartition(":")
    for path in (b"/v1/models/m:predict", b"/other"):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{" % path)
        await world.until(lambda: sidecar.data.server.busy)
        writer.close()
        await world.until(lambda: not sidecar.data.server.busy)
    assert (await client.predict(b"1")).status == 200
    assert [call.body for call in world.model.received] == [b'{"instances":[1]}']


async def test_a_caller_of_something_else_who_leaves_ends_the_upstreams_call(world):
    sidecar, client = await world.start()
    world.model.holding = True
    asked = client.send(b"POST", b"/slow", b"x")
    await world.until(lambda: world.model.held)
    asked.leave()
    await world.until(lambda: world.model.left == 1)
    world.model.holding = False
    assert (await client.predict(b"1")).status == 200
    assert sidecar.batcher.idle


async def test_only_posts_are_inference(world):
    sidecar, client = await world.start()
    assert (await client.get(b"/v1/models/m:predict")).status == 404
    assert sidecar.batcher.stats(sidecar.clock()).models["m"].arrivals == 0


async def test_what_is_no_http_is_counted(world):
    sidecar, _ = await world.start()
    host, _, port = sidecar.data.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    assert sidecar.driver.counts.answers == {("", "other", 400): 1}


async def test_a_connection_that_is_no_http_1_is_passed_through(world):
    sidecar, client = await world.start()
    host, _, port = sidecar.data.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    # The model's server here speaks HTTP/1.1 alone: what it says to that is what the caller hears.
    writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n")
    answer = await reader.read()
    assert b"this is no HTTP, or a method that is not known" in answer
    writer.close()
    await world.until(lambda: not sidecar.data.server.connections)
    assert sidecar.forwarded.paths["", "(not HTTP/1.1)"].statuses == {101: 1}
    assert (await client.predict(b"1")).status == 200
