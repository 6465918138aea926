from __future__ import annotations

import asyncio

from carpool_sidecar.http1.sockets import peer_has_reset, reset


async def test_a_reset_is_an_error_for_the_peer_and_seen_from_the_socket(upstream, serve, kit):
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    class HalfClosed(asyncio.Protocol):
        def eof_received(self) -> bool:
            ended.set()
            return True

    upstream.script = lambda peer, received: None
    transport, _ = await loop.create_connection(HalfClosed, "127.0.0.1", upstream.port)
    await upstream.connected.wait()
    assert not peer_has_reset(transport)
    upstream.peers[0].transport.close()
    await ended.wait()
    assert not peer_has_reset(transport)  # the peer only ended its side, for all we know
    transport.write(b"probe")
    await kit.until(lambda: peer_has_reset(transport))
    transport.abort()


async def test_the_peer_of_a_reset_connection_gets_an_error(kit, serve):
    server = await serve.start(kit.App())
    client = await serve.connect(server)
    await kit.until(lambda: server.connections)
    reset(next(iter(server._connections))._transport)
    await client.until_lost()
    assert isinstance(client.lost, ConnectionResetError)


async def test_without_a_socket_nothing_is_known(kit):
    transport = kit.MemoryTransport(kit.Site().server.protocol())
    assert not peer_has_reset(transport)
    reset(transport)
    assert transport.aborted


async def test_a_unix_socket_tells_by_itself(upstream):
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_unix_connection(asyncio.Protocol, upstream.path)
    assert not peer_has_reset(transport)
    transport.abort()
