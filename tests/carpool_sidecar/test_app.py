from __future__ import annotations

import asyncio


async def test_bodies_over_the_limit_are_refused_before_they_are_read(world):
    sidecar, client = await world.start(bodies={"maxRequest": "1Ki"})
    answer = await client.predict(b"1" * 2000)
    assert answer.status == 413
    assert sidecar.driver.requests == {("m", "v1", 413): 1}
    assert world.model.received == []


async def test_a_caller_who_leaves_before_its_body_is_complete_leaves_nothing(world):
    sidecar, client = await world.start()
    host, _, port = sidecar.address.rpartition(":")
    for path in (b"/v1/models/m:predict", b"/other"):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{" % path)
        await world.until(lambda: sidecar.data.busy)
        writer.close()
        await world.until(lambda: not sidecar.data.busy)
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
    host, _, port = sidecar.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    assert sidecar.driver.requests == {("", "other", 400): 1}
