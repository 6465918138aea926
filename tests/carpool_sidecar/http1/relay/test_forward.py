from __future__ import annotations

import asyncio
import json

import pytest
from forwarding_app import ForwardAll

from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.limits import ClientLimits
from carpool_sidecar.http1.memory import Budget
from carpool_sidecar.http1.relay.forward import Forwarding

GET = b"GET /a?b=c HTTP/1.1\r\nHost: model\r\n\r\n"


@pytest.fixture
async def client(upstream, pool, serve):
    return await serve.connect(await serve.start(ForwardAll(pool)))


def keep(upstream, answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", end: bytes = b"\r\n\r\n"):
    """Let the upstream answer a request that ends like this; return the list of what it was sent."""
    requests = []

    def script(peer, received):
        if received.endswith(end):
            requests.append(received)
            peer.answer(answer)

    upstream.script = script
    return requests


async def test_what_is_forwarded_is_what_was_sent(upstream, client):
    requests = keep(
        upstream,
        b"HTTP/1.1 299 Fine\r\nContent-Type: x\r\nSet-Cookie: 1\r\nset-cookie: 2\r\nKeep-Alive: 5\r\n"
        b"Connection: x-hop\r\nX-Hop: 1\r\nContent-Length: 2\r\n\r\nok",
        b"hello",
    )
    client.write(
        b"POST /a%2Fb?c=%20 HTTP/1.1\r\nhOST: model:80\r\nX-A: 1\r\nx-a:2\r\nConnection: keep-alive, X-Hop\r\n"
        b"X-Hop: 1\r\nExpect: 100-continue\r\nTE: trailers\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\nhello"
    )
    await client.until_received(b"ok")
    assert requests == [
        b"POST /a%2Fb?c=%20 HTTP/1.1\r\nhOST: model:80\r\nX-A: 1\r\nx-a: 2\r\ncontent-length: 5\r\n\r\nhello"
    ]
    assert client.received == (
        b"HTTP/1.1 299 \r\nContent-Type: x\r\nSet-Cookie: 1\r\nset-cookie: 2\r\ncontent-length: 2\r\n\r\nok"
    )


@pytest.mark.parametrize("length", [b"", b"Content-Length: 0\r\n"])
async def test_the_framing_of_an_empty_body_stays(upstream, client, length):
    requests = keep(upstream)
    client.write(b"POST / HTTP/1.1\r\nHost: h\r\n" + length + b"\r\n")
    await client.until_received(b"\r\n\r\n")
    assert requests == [b"POST / HTTP/1.1\r\nHost: h\r\n" + length.lower() + b"\r\n"]


async def test_http_1_0_gets_a_host_and_a_close(upstream, pool, client):
    requests = keep(upstream, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")
    client.write(b"GET / HTTP/1.0\r\n\r\n")
    await client.until_lost()
    assert requests == [b"GET / HTTP/1.1\r\nhost: " + pool.authority + b"\r\n\r\n"]
    assert client.received.endswith(b"ok")


async def test_head_keeps_the_length(upstream, client):
    keep(upstream, b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n")
    client.write(GET.replace(b"GET", b"HEAD") * 2)
    await client.until(lambda: client.received.count(b"\r\n\r\n") == 2)
    assert client.received == b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n" * 2


async def test_large_bodies_stream_both_ways(upstream, client):
    body = bytes(range(256)) * 20_000
    client.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await client.until(lambda: len(client.received) > len(body))
    assert client.received == b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def test_a_chunked_request_is_forwarded_in_chunks_as_it_comes(upstream, client, kit):
    requests = keep(upstream, end=b"0\r\n\r\n")
    client.write(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2;x\r\nhe\r\n")
    await upstream.connected.wait()
    await kit.until(lambda: upstream.peers[0].received.endswith(b"2\r\nhe\r\n"))
    client.write(b"3\r\nllo\r\n0\r\nX-Trailer: 1\r\n\r\n")
    await client.until_received(b"\r\n\r\n")
    assert requests[0].endswith(b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n")


async def test_an_answer_is_forwarded_as_it_comes(upstream, client):
    keep(upstream, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n")
    client.write(GET)
    await client.until_received(b"2\r\nhe\r\n")
    upstream.peers[0].answer(b"3\r\nllo\r\n0\r\n\r\n")
    await client.until_received(b"3\r\nllo\r\n0\r\n\r\n")
    assert b"transfer-encoding: chunked" in client.received


async def test_an_answer_that_ends_with_the_connection(upstream, client):
    keep(upstream, b"HTTP/1.1 200 OK\r\n\r\nhello")
    client.write(GET)
    await client.until_received(b"hello\r\n")
    upstream.peers[0].transport.close()
    await client.until_received(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (b"", 502, "upstream-reset"),
        (b"HTTP/1.1 2", 502, "upstream-reset"),
        (b"garbage\r\n\r\n", 502, "upstream-protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 502, "upstream-protocol"),
    ],
)
async def test_an_upstream_that_fails_before_its_answer(upstream, client, answer, status, reason):
    def script(peer, received):
        peer.answer(answer)
        peer.transport.close()

    upstream.script = script
    client.write(GET.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\n\r\nx"))
    await client.until_received(b"}")
    head, _, body = client.received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["reason"] == reason


async def test_no_upstream(serve):
    pool = Pool("127.0.0.1", 1)
    client = await serve.connect(await serve.start(ForwardAll(pool)))
    client.write(GET)
    await client.until_received(b"}")
    assert client.received.startswith(b"HTTP/1.1 503 ")
    assert b'"reason":"upstream-refused"' in client.received
    await pool.close()


async def test_a_silent_upstream(upstream, serve):
    upstream.script = lambda peer, received: None
    pool = Pool("127.0.0.1", upstream.port, limits=ClientLimits(tick=0.01))
    client = await serve.connect(await serve.start(ForwardAll(pool, timeout=0.02)))
    client.write(GET)
    await client.until_received(b"}")
    assert client.received.startswith(b"HTTP/1.1 504 ")
    await pool.close()


@pytest.mark.parametrize(
    "part",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n",
    ],
)
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_an_upstream_that_dies_in_its_answer_costs_the_client_its_connection(upstream, client, part, version):
    keep(upstream, part)
    client.write(GET.replace(b"1.1", version))
    await client.until(lambda: b"he" in client.received.partition(b"\r\n\r\n")[2])
    upstream.peers[0].transport.close()
    await client.until_lost()
    assert isinstance(client.lost, ConnectionResetError)
    assert not client.received.endswith(b"0\r\n\r\n")


async def test_a_stale_connection_is_retried_only_for_idempotent_methods(upstream, client):
    keep(upstream)
    for method, status in ((b"GET", b"200"), (b"POST", b"502")):
        client.received.clear()
        client.write(GET)
        await client.until_received(b"\r\n\r\n")
        peers = len(upstream.peers)
        stale, script = upstream.peers[-1], upstream.script
        upstream.script = lambda peer, received: peer.reset() if peer is stale else script(peer, received)  # noqa: B023 - called in this turn of the loop
        client.received.clear()
        client.write(GET.replace(b"GET", method))
        await client.until(lambda: b"\r\n\r\n" in client.received)
        assert client.received[9:12] == status
        assert len(upstream.peers) == peers + (method == b"GET")
        await client.until(lambda: client.received.endswith((b"}", b"\r\n\r\n")))


async def test_a_client_that_leaves_in_its_request_cancels_the_call(upstream, pool, client):
    upstream.script = lambda peer, received: None
    client.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n" + bytes(70_000))
    await upstream.connected.wait()
    client.transport.abort()
    await upstream.peers[0].lost.wait()
    assert pool.connections == 0


async def test_a_client_that_leaves_in_its_answer_cancels_the_call(upstream, pool, client):
    keep(upstream, b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhe")
    client.write(GET)
    await client.until_received(b"he")
    client.transport.abort()
    await client.until_lost()
    (peer,) = upstream.peers
    while not peer.lost.is_set():  # the next writes meet the reset
        peer.transport.write(b"l")
        await asyncio.sleep(0)
    assert pool.connections == 0


async def test_an_early_answer_to_a_large_request(upstream, client):
    def script(peer, received):
        upstream.script = lambda peer, received: None
        peer.answer(b"HTTP/1.1 401 No\r\nContent-Length: 2\r\n\r\nno")

    upstream.script = script
    client.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000000\r\n\r\n")
    client.write(bytes(1_000_000))
    await client.until(lambda: client.ended)
    assert client.received.startswith(b"HTTP/1.1 401 Unauthorized\r\n")
    assert client.received.endswith(b"no")


async def test_a_slow_client_slows_the_upstream(upstream, pool, client, kit):
    keep(upstream, b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
    client.transport.pause_reading()
    client.write(GET)
    await kit.until(lambda: pool._connections.open)
    (link,) = pool._connections.open
    await kit.until(lambda: link._answer.head is not None)
    (peer,) = upstream.peers
    sent = 0
    while link.transport.is_reading():
        if peer.writable:
            sent += 1_000_000
            assert sent < 100_000_000
            peer.transport.write(bytes(1_000_000))
        await asyncio.sleep(0)
    client.transport.resume_reading()
    peer.transport.write(bytes(100_000_000 - sent))
    await client.until(lambda: len(client.received) > 100_000_000)


async def test_a_slow_upstream_slows_the_client(upstream, pool, client, kit):
    upstream.script = lambda peer, received: peer.transport.pause_reading() if peer.transport.is_reading() else None
    client.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000000\r\n\r\n")
    client.write(bytes(50_000_000))
    await upstream.connected.wait()
    await kit.until(lambda: pool._connections.open and not next(iter(pool._connections.open)).writable)
    assert client.transport.get_write_buffer_size() > 10_000_000


# What an upload takes of the upstream


async def test_a_slow_upload_takes_no_connection_before_there_is_something_to_send(upstream, pool, serve, client, kit):
    slow = [await serve.connect(await serve.start(ForwardAll(pool))) for _ in range(20)]
    for one in slow:
        one.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n" + bytes(1000))
        one.write(b"x")
    chunked = await serve.connect(await serve.start(ForwardAll(pool)))
    chunked.write(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
    client.write(GET)
    await client.until(lambda: b"200 OK" in client.received)
    assert pool.connections == 1, "only that of the client who asked"
    slow[0].write(bytes(70_000))
    await kit.until(lambda: pool.connections == 2 or pool.idle == 0)
    slow[0].write(bytes(100_000 - 71_001))
    await slow[0].until(lambda: len(slow[0].received) > 100_000)
    assert pool.connections <= 2


async def test_what_came_of_a_slow_upload_is_counted_and_given_back(upstream, pool, serve, kit):
    server = await serve.start(ForwardAll(pool), max_buffered_bytes=3000)
    slow, other = await serve.connect(server), await serve.connect(server)
    slow.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n" + bytes(2000))
    await kit.until(lambda: server.buffered_bytes == 2000)
    assert pool.connections == 0
    # Without room for the next one, nothing of it is waited for.
    other.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n" + bytes(2000))
    await kit.until(lambda: pool.connections == 1)
    assert server.buffered_bytes == 2000
    for each in (slow, other):
        each.write(bytes(98_000))
    for each in (slow, other):
        await each.until(lambda each=each: len(each.received) > 100_000)
    assert server.buffered_bytes == 0


async def test_a_small_request_without_room_is_passed_on_as_it_comes(upstream, pool, serve, kit):
    server = await serve.start(ForwardAll(pool), max_buffered_bytes=1000)
    client = await serve.connect(server)
    client.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5000\r\n\r\n" + bytes(5000))
    await client.until(lambda: len(client.received) > 5000)
    client.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5001\r\n\r\n" + bytes(3000))
    await kit.until(lambda: pool.idle == 0)
    client.write(bytes(2001))
    await client.until(lambda: len(client.received) > 10_000)
    assert server.buffered_bytes == 0


async def test_an_upload_that_leaves_before_its_call_is_forgotten(upstream, pool, serve, client, kit):
    server = await serve.start(ForwardAll(pool))
    slow = await serve.connect(server)
    slow.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n" + bytes(2000))
    await kit.until(lambda: server.buffered_bytes == 2000)
    slow.transport.abort()
    await kit.until(lambda: not server.connections)
    assert server.buffered_bytes == 0
    assert upstream.peers == []


async def test_an_empty_chunked_upload(upstream, client):
    requests = keep(upstream, end=b"0\r\n\r\n")
    client.write(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    await client.until_received(b"\r\n\r\n")
    assert requests[0].endswith(b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n")


async def test_an_answer_without_room_gets_503_buffers_full(upstream, serve):
    pool = Pool("127.0.0.1", upstream.port, budget=Budget(1000))
    keep(upstream, b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n")

    class Short(ForwardAll):
        def head(self, exchange):
            exchange.context = Forwarding(exchange, pool, short=True)
            exchange.context.begin()

    client = await serve.connect(await serve.start(Short(pool)))
    client.write(GET)
    await client.until_received(b"}")
    assert client.received.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in client.received
    assert json.loads(client.received.partition(b"\r\n\r\n")[2])["reason"] == "buffers-full"
    await pool.close()
