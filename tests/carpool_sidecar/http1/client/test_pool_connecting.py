"""How the pool connects: addresses, Unix sockets, and attempts that fail."""

from __future__ import annotations

import asyncio
import socket

import pytest
from server_messages import GET, OK, post

from carpool_sidecar.http1.client.pool import Pool


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::"])
async def test_a_server_on_this_machine_is_found_by_either_family(kit, address):
    """``asyncio`` and uvicorn listen on IPv6 alone where their address is ``::``."""

    class Answers(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            self.transport.write(OK)

    async with await asyncio.get_running_loop().create_server(Answers, address, 0) as server:
        pool = Pool("localhost", server.sockets[0].getsockname()[1])
        receiver = kit.Receiver()
        pool.send(GET, b"", receiver)
        await receiver.over.wait()
        assert receiver.events == [("answered", 200, b"hello")]
        link = await pool.tunnel(patience=1.0)
        link.close()
        await pool.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_refused(kit, host):
    pool = Pool(host, 1)
    receivers = [kit.Receiver() for _ in range(3)]
    for receiver in receivers:
        pool.send(GET, b"", receiver)
    for receiver in receivers:
        await receiver.over.wait()
        assert receiver.events == [("failed", "refused", False)]
    await pool.close()


async def test_only_where_nothing_listens_a_connection_is_refused(kit, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path, kind in ((tmp_path / "no-file", "refused"), (file, "refused"), (file / "within-a-file", "connect")):
        pool = Pool(path=str(path))
        receiver = kit.Receiver()
        pool.send(GET, b"", receiver)
        await receiver.over.wait()
        assert receiver.events == [("failed", kind, False)]
        await pool.close()


async def test_a_unix_socket_with_a_full_queue_is_waited_for(kit, tmp_path):
    path = str(tmp_path / "socket")
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as first:
        listening.bind(path)
        listening.listen(0)
        listening.setblocking(False)
        first.connect(path)  # the queue is full
        pool = Pool(path=path)
        receiver = kit.Receiver()
        pool.send(GET, b"", receiver)
        for _ in range(5):
            await asyncio.sleep(0)
        assert receiver.events == []
        (await loop.sock_accept(listening))[0].close()
        accepted, _ = await loop.sock_accept(listening)
        await loop.sock_sendall(accepted, OK)
        await receiver.over.wait()
        assert receiver.events == [("answered", 200, b"hello")]
        await pool.close()
        accepted.close()


async def test_a_unix_socket_with_a_full_queue_times_out(kit, tmp_path):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as first:
        listening.bind(path)
        listening.listen(0)
        first.connect(path)
        pool = Pool(path=path, connect_timeout=0.03)
        receiver = kit.Receiver()
        pool.send(GET, b"", receiver)
        await receiver.over.wait()
        assert receiver.events == [("failed", "timeout", False)]
        await pool.close()


async def test_an_attempt_that_fails_does_not_fail_a_call_that_came_after_it_began(kit, tmp_path):
    path = str(tmp_path / "socket")
    loop = asyncio.get_running_loop()
    clock = kit.Clock()
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as first:
        listening.bind(path)
        listening.listen(0)
        listening.setblocking(False)
        first.connect(path)  # the queue is full
        pool = Pool(path=path, connect_timeout=0.01, clock=clock)
        early, late = kit.Receiver(), kit.Receiver()
        leaver = pool.send(GET, b"", early)
        (attempt,) = pool._connector.attempts
        for _ in range(5):
            await asyncio.sleep(0)
        leaver.cancel()  # as if it had got a connection that another call left
        pool._connector._timeout = 60.0
        clock.now += 1.0
        pool.send(GET, b"", late)
        await attempt
        assert late.events == []
        (await loop.sock_accept(listening))[0].close()
        accepted, _ = await loop.sock_accept(listening)
        await loop.sock_sendall(accepted, OK)
        await late.over.wait()
        assert late.events == [("answered", 200, b"hello")]
        await pool.close()
        accepted.close()


async def test_a_unix_socket(upstream, kit):
    pool = Pool(path=upstream.path)
    receiver = kit.Receiver()
    pool.send(post(5), b"hello", receiver)
    await receiver.over.wait()
    assert receiver.events == [("answered", 200, b"hello")]
    assert pool.authority == b"localhost"
    await pool.close()
