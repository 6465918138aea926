from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from carpool_sidecar.http1 import sockets
from carpool_sidecar.http1.sockets import everywhere, peer_has_reset, reset


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
    reset(next(iter(server._connections))._wire.transport)
    await client.until_lost()
    assert isinstance(client.lost, ConnectionResetError)


async def test_without_a_socket_nothing_is_known(kit):
    transport = kit.MemoryTransport(kit.Site().server.protocol())
    assert not peer_has_reset(transport)
    reset(transport)
    assert transport.aborted


async def test_a_unix_socket_is_never_reported_as_reset(upstream):
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_unix_connection(asyncio.Protocol, upstream.path)
    assert not peer_has_reset(transport)
    transport.abort()


def test_everywhere_is_one_port_of_both_families():
    bound = everywhere(0)
    ports = {one.getsockname()[1] for one in bound}
    families = [one.family for one in bound]
    for one in bound:
        one.close()
    assert len(ports) == 1
    assert families[0] == socket.AF_INET
    assert families[1:] in ([], [socket.AF_INET6])


def test_a_system_without_ipv6_listens_on_ipv4(monkeypatch):
    made = socket.socket

    def without(family, *more):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return made(family, *more)

    monkeypatch.setattr(sockets.socket, "socket", without)
    (only,) = everywhere(0)
    assert only.family == socket.AF_INET
    only.close()


def test_a_port_that_is_taken_leaves_no_socket_behind():
    first = everywhere(0)
    port = first[0].getsockname()[1]
    for one in first:
        one.listen()
    with pytest.raises(OSError, match="in use"):
        everywhere(port)
    for one in first:
        one.close()
