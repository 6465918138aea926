"""Offers to switch protocols, and what passes once one is taken."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from forwarding_app import ForwardAll

from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.limits import ClientLimits

OFFER = (
    b"GET /chat HTTP/1.1\r\nHost: h\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
SWITCH = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)
OK2 = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
GET = b"GET /next HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.fixture
async def app(pool):
    return ForwardAll(pool)


@pytest.fixture
async def server(app, serve):
    return await serve.start(app)


@pytest.fixture
async def client(server, serve):
    return await serve.connect(server)


@pytest.fixture
def switching(upstream):
    """Let the upstream switch, and keep the head it was sent; behind that it echoes until a test says otherwise."""
    heads = []

    def script(peer, received):
        head, blank, rest = received.partition(b"\r\n\r\n")
        if not blank:
            return
        heads.append(head + blank)
        peer.received = b""
        upstream.script = lambda peer, received: peer.answer(received)
        peer.answer(SWITCH + rest)

    upstream.script = script
    return heads


@pytest.fixture
async def tunnel(switching, client, upstream):
    """A client and the upstream's side of an open tunnel."""
    client.write(OFFER)
    await client.until_received(b"\r\n\r\n")
    (peer,) = upstream.peers
    client.received.clear()
    return client, peer


async def test_an_offer_is_passed_on_and_taken(switching, client):
    client.write(OFFER)
    await client.until_received(b"\r\n\r\n")
    (asked,) = switching
    assert asked == (
        b"GET /chat HTTP/1.1\r\nHost: h\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
        b"connection: Upgrade\r\nupgrade: websocket\r\n\r\n"
    )
    assert client.received == (
        b"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"
        b"connection: Upgrade\r\nupgrade: websocket\r\n\r\n"
    )


async def test_bytes_pass_both_ways_unread(tunnel):
    client, _ = tunnel
    for data in (b"\x81\x05hello", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 2000):
        client.received.clear()
        client.write(data)
        await client.until(lambda data=data: len(client.received) >= len(data))
        assert client.received == data


async def test_what_comes_at_once_behind_either_head_is_passed_on(upstream, client, kit):
    def script(peer, received):
        upstream.script = lambda peer, received: None
        peer.answer(SWITCH + b"welcome")

    upstream.script = script
    client.write(OFFER + b"early")
    await client.until_received(b"welcome")
    (peer,) = upstream.peers
    await kit.until(lambda: peer.received == b"early")


@pytest.mark.parametrize("answer", [OK2, OK2.replace(b"200 OK", b"400 No"), OK2.replace(b"200 OK", b"426 No")])
async def test_what_is_no_switch_is_passed_on_and_the_next_request_is_read_then(upstream, client, kit, answer):
    asked = []

    def script(peer, received):
        if received.endswith(b"\r\n\r\n"):
            asked.append(received)

    upstream.script = script
    client.write(OFFER + GET)
    await kit.until(lambda: asked)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(asked) == 1, "what followed the offer was read as a request before the answer was known"
    upstream.script = lambda peer, received: (asked.append(received), peer.answer(OK2))
    upstream.peers[0].answer(answer)
    await client.until(lambda: client.received.count(b"ok") == 2)
    assert asked[1] == GET
    assert client.received.endswith(OK2)


async def test_a_426_says_to_what_the_client_should_switch(upstream, client):
    no = b"HTTP/1.1 426 No\r\nUpgrade: HTTP/3.0\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\nok"
    upstream.script = lambda peer, received: peer.answer(no)
    client.write(GET)
    await client.until_received(b"ok")
    assert b"connection: Upgrade\r\nupgrade: HTTP/3.0\r\n" in client.received


async def test_bytes_behind_an_offer_are_never_read_as_a_request_once_it_is_taken(switching, client, kit, upstream):
    client.write(OFFER + GET)
    await client.until_received(GET)  # echoed by the protocol that was switched to
    assert len(upstream.peers) == 1
    assert len(switching) == 1


@pytest.mark.parametrize(
    "offer",
    [
        OFFER.replace(b"websocket", b"h2c"),
        OFFER.replace(b"Connection: keep-alive, Upgrade", b"Connection: keep-alive"),
        OFFER.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"keep-alive, Upgrade", b"Upgrade, keep-alive"),
        OFFER.replace(b"GET", b"POST").replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\nhi"),
    ],
)
async def test_what_is_not_offered_is_an_ordinary_request(upstream, client, offer):
    asked = []
    upstream.script = lambda peer, received: (asked.append(received), peer.answer(OK2))
    client.write(offer)
    await client.until_received(b"ok")
    assert b"pgrade:" not in asked[0]
    client.write(GET)
    await client.until(lambda: client.received.count(b"ok") == 2)


async def test_of_several_protocols_http_2_is_taken_out(switching, client):
    client.write(OFFER.replace(b"websocket", b"h2c, websocket,HTTP/2.0, foo/1"))
    await client.until_received(b"\r\n\r\n")
    assert b"\r\nupgrade: websocket, foo/1\r\n" in switching[0]


async def test_an_offer_behind_another_request_is_an_ordinary_request(upstream, client, kit):
    asked = []
    upstream.script = lambda peer, received: asked.append(received)
    client.write(GET + OFFER)
    await kit.until(lambda: len(asked) == 2)
    assert not any(b"pgrade: w" in one for one in asked)
    for peer in upstream.peers:
        peer.answer(OK2)
    await client.until(lambda: client.received.count(b"ok") == 2)


async def test_an_upstream_that_switches_unasked_breaks_the_protocol(switching, client):
    client.write(GET)
    await client.until_received(b"}")
    assert client.received.startswith(b"HTTP/1.1 502 ")
    assert b"upstream-protocol" in client.received


# Ends


async def test_each_side_may_end_before_the_other(tunnel, upstream, kit, pool, server):
    client, peer = tunnel
    ended = []
    peer.eof_received = lambda: ended.append("client") or True
    client.eof_received = lambda: ended.append("upstream") or True
    client.write(b"last words")
    client.transport.write_eof()
    await kit.until(lambda: ended == ["client"])
    await client.until_received(b"last words")
    peer.transport.write(b"and mine")
    await client.until_received(b"and mine")
    peer.transport.write_eof()
    await kit.until(lambda: ended == ["client", "upstream"])
    await kit.until(lambda: not pool.connections and not server.connections)


async def test_the_upstream_ends_first(tunnel, kit, pool, server):
    client, peer = tunnel
    peer.upstream.script = lambda peer, received: None
    client.eof_received = lambda: True
    peer.transport.write(bytes(1_000_000))
    peer.transport.write_eof()
    await client.until(lambda: len(client.received) == 1_000_000)
    client.write(b"still here")
    await kit.until(lambda: peer.received == b"still here")
    client.transport.close()
    await kit.until(lambda: not pool.connections and not server.connections)


@pytest.mark.parametrize("who", ["client", "upstream"])
async def test_a_side_that_is_gone_resets_the_other(tunnel, kit, pool, server, who):
    client, peer = tunnel
    if who == "client":
        sock = client.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.transport.abort()
        await peer.lost.wait()
    else:
        peer.reset()
        await client.until_lost()
        assert isinstance(client.lost, ConnectionResetError)
    await kit.until(lambda: not pool.connections and not server.connections)


async def test_a_client_that_leaves_before_the_switch_cancels_the_call(upstream, client, pool, kit):
    upstream.script = lambda peer, received: None
    client.write(OFFER)
    await upstream.connected.wait()
    client.transport.abort()
    await upstream.peers[0].lost.wait()
    assert pool.connections == 0


async def test_a_switch_that_comes_when_the_client_is_gone(upstream, client, pool, kit):
    upstream.script = lambda peer, received: (client.transport.abort(), peer.answer(SWITCH))
    client.write(OFFER)
    await upstream.connected.wait()
    await upstream.peers[0].lost.wait()
    await kit.until(lambda: not pool.connections)


# Backpressure and time


@pytest.mark.parametrize("reader", ["client", "upstream"])
async def test_a_side_that_does_not_read_slows_the_other_and_not_itself(tunnel, kit, reader):
    client, peer = tunnel
    peer.upstream.script = lambda peer, received: None
    one, two = (client, peer) if reader == "client" else (peer, client)
    one.transport.pause_reading()
    sent = stuck_for = 0
    two.pause_writing = two.resume_writing = lambda: None
    while stuck_for < 100:  # passes of the loop
        await asyncio.sleep(0)
        stuck_for += 1
        if not two.transport.get_write_buffer_size():
            two.transport.write(bytes(1_000_000))
            sent += 1_000_000
            stuck_for = 0
            assert sent < 100_000_000
    one.transport.write(b"I may still speak")
    await kit.until(lambda: bytes(two.received).endswith(b"I may still speak"))
    one.transport.resume_reading()
    await kit.until(lambda: len(one.received) == sent)


async def test_silence_does_not_end_a_tunnel_but_a_side_that_is_stuck_does(upstream, serve, switching, kit):
    pool = Pool("127.0.0.1", upstream.port, idle_timeout=0.02, limits=ClientLimits(tick=0.01))
    server = await serve.start(ForwardAll(pool, timeout=0.02), idle_timeout=0.02, write_timeout=0.02, head_timeout=0.02)
    client = await serve.connect(server)
    client.write(OFFER)
    await client.until_received(b"\r\n\r\n")
    for _ in range(20):
        server._connections.expire(server.clock())
        pool._expire(pool.clock() + 1e9)
        await asyncio.sleep(0)
    (connection,) = server._connections
    connection.expire(server.clock() + 1e9)
    client.write(b"still there")
    await client.until_received(b"still there")
    (peer,) = upstream.peers
    client.transport.pause_reading()
    while not peer.lost.is_set():
        if peer.writable:
            peer.transport.write(bytes(1_000_000))
        await asyncio.sleep(0)
    await kit.until(lambda: not pool.connections and not server.connections)
    await pool.close()


async def test_a_tunnel_is_busy_until_it_is_cut(tunnel, server, pool, kit):
    client, peer = tunnel
    server.drain()
    server.stop_accepting()
    server.close_idle()
    waiting = asyncio.ensure_future(server.wait_idle())
    client.write(b"not idle")
    await client.until_received(b"not idle")
    assert server.busy == 1
    assert not waiting.done()
    server.abort()
    await waiting
    await client.until_lost()
    await peer.lost.wait()
    assert pool.connections == 0


async def test_tunnels_take_connections_of_the_pool(switching, upstream, serve, kit):
    pool = Pool("127.0.0.1", upstream.port, max_connections=1, max_waiting=0, setting="upstream.maxForwarded")
    server = await serve.start(ForwardAll(pool))
    client, other = await serve.connect(server), await serve.connect(server)
    client.write(OFFER)
    await client.until_received(b"\r\n\r\n")
    other.write(GET)
    await other.until_received(b"}")
    assert other.received.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in other.received
    assert b'"reason":"upstream-busy"' in other.received
    assert b"raise upstream.maxForwarded" in other.received
    client.transport.close()
    await kit.until(lambda: not pool.connections)
    upstream.script = lambda peer, received: peer.answer(OK2)
    other.received.clear()
    other.write(GET)
    await other.until_received(b"ok")
    await pool.close()


@pytest.mark.pure
async def test_the_application_hears_of_a_switch_once(switching, upstream, app, client, kit, server):
    heard = []
    app.sent = lambda exchange: heard.append(("sent", exchange.status))
    app.disconnected = lambda exchange: heard.append("disconnected")
    client.write(OFFER)
    await client.until_received(b"\r\n\r\n")
    client.transport.close()
    await kit.until(lambda: not server.connections)
    assert heard == [("sent", 101)]
    assert server.buffered_bytes == 0
