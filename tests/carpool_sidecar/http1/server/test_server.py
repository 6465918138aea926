from __future__ import annotations

import asyncio

import pytest

from carpool_sidecar.http1.server.server import Server

GET = b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n"
OK5 = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
OK0 = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@pytest.fixture
def app(kit):
    return kit.App()


async def test_requests_over_a_socket(serve, app):
    server = await serve.start(app)
    client = await serve.connect(server)
    for n in (1, 2):
        client.write(POST)
        client.write(b"hello")
        await client.until(lambda n=n: len(client.received) >= n * len(OK5))
    assert client.received == OK5 * 2
    assert server.connections == 1
    assert server.busy == 0


async def test_a_unix_socket(serve, app, tmp_path):
    server = Server(app)
    await server.listen_unix(str(tmp_path / "socket"))
    assert server.addresses == [str(tmp_path / "socket")]
    client = await serve.connect(server)
    client.write(GET % 1)
    await client.until_received(OK0)
    client.transport.write_eof()
    await client.until_lost()
    server.stop_accepting()


async def test_a_large_body_there_and_back(serve, app):
    server = await serve.start(app)
    client = await serve.connect(server)
    body = bytes(range(256)) * 40_000
    client.write(POST.replace(b"5", b"%d" % len(body), 1) + body)
    await client.until(lambda: len(client.received) > len(body))
    assert client.received.endswith(b"\r\n\r\n" + body)


async def test_a_refusal_reaches_a_client_that_is_still_sending(serve, app):
    server = await serve.start(app, max_body_bytes=10)
    client = await serve.connect(server)
    client.write(POST.replace(b"5", b"50000000", 1))
    for _ in range(50):
        client.write(bytes(100_000))
    await client.until(lambda: client.ended)
    assert client.received.startswith(b"HTTP/1.1 413 ")
    assert b"bodies.maxRequest" in client.received


async def test_a_half_closed_client_gets_its_answer(serve, app):
    app.answers = False
    server = await serve.start(app)
    client = await serve.connect(server)
    client.write(POST + b"hello")
    client.transport.write_eof()
    await client.until_received(b"100 Continue\r\n\r\n")
    app.exchanges[0].respond(200, [], b"hello")
    await client.until_lost()
    assert client.received.endswith(b"connection: close\r\n\r\nhello")
    assert app.events[-1] == ("sent", b"/p", 200)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_leaves_is_noticed_while_it_waits(serve, app, reset, kit):
    app.answers = False
    left = asyncio.Event()
    app.disconnected = lambda exchange: left.set()
    server = await serve.start(app)
    client = await serve.connect(server)
    client.write(POST + b"hello")
    await kit.until(lambda: app.exchanges)
    if reset:
        client.transport.abort()
    else:
        client.transport.close()  # for the server the same as a half-closed client, until it is probed
    await left.wait()
    assert server.connections == 0


async def test_an_aborted_answer_is_an_error_even_where_the_close_ends_the_body(serve, app, kit):
    app.answers = False
    server = await serve.start(app)
    client = await serve.connect(server)
    client.write(b"GET / HTTP/1.0\r\n\r\n")
    await kit.until(lambda: app.exchanges)
    exchange = app.exchanges[0]
    exchange.start(200, [], None)
    exchange.write(b"half")
    await client.until_received(b"half")
    exchange.abort()
    await client.until_lost()
    assert isinstance(client.lost, ConnectionResetError)


async def test_backpressure_of_a_streamed_answer(serve, app, kit):
    app.answers = False
    server = await serve.start(app)
    client = await serve.connect(server)
    client.transport.pause_reading()
    client.write(GET % 1)
    await kit.until(lambda: app.exchanges)
    flow = kit.Sink()
    exchange = app.exchanges[0]
    exchange.start(200, [], None, flow)
    written = 0
    while exchange.writable:
        exchange.write(bytes(100_000))
        written += 100_000
        await asyncio.sleep(0)
    assert flow.events[-1] == "pause"
    client.transport.resume_reading()
    await kit.until(lambda: exchange.writable)
    assert flow.events[-1] == "resume"
    exchange.end()
    await client.until_received(b"0\r\n\r\n")
    assert len(client.received) > written


@pytest.mark.pure
async def test_a_client_that_never_reads_is_cut(serve, app):
    server = await serve.start(app, write_timeout=0.02)
    client = await serve.connect(server)
    client.transport.pause_reading()
    lost = asyncio.Event()
    app.head = lambda exchange: exchange.respond(200, [], bytes(50_000_000))
    closed, server.closed = server.closed, lambda connection: (closed(connection), lost.set())
    client.write(GET % 1)
    await lost.wait()
    assert server.connections == 0


async def test_slow_heads_and_idle_connections_end_by_the_clock(serve, app):
    server = await serve.start(app, head_timeout=0.02, idle_timeout=0.02)
    slow, idle = await serve.connect(server), await serve.connect(server)
    slow.write(b"GET / HT")
    await slow.until(lambda: slow.ended)
    assert slow.received.startswith(b"HTTP/1.1 408 ")
    await idle.until_lost()
    assert idle.received == b""


async def test_too_many_connections_that_all_wait_for_answers(serve, app, kit):
    app.answers = False
    server = await serve.start(app, max_connections=1)
    first = await serve.connect(server)
    first.write(GET % 1)
    await kit.until(lambda: app.exchanges)
    second = await serve.connect(server)
    await second.until(lambda: second.ended)
    assert second.received.startswith(b"HTTP/1.1 503 ")
    app.exchanges[0].respond(200, [])
    await first.until_received(OK0)
    assert ("refused", 503, "too-many-connections") in app.events


async def test_a_newcomer_takes_the_place_of_a_client_that_asks_nothing(serve, app):
    server = await serve.start(app, max_connections=1)
    idle, newcomer = await serve.connect(server), await serve.connect(server)
    newcomer.write(GET % 1)
    await newcomer.until_received(OK0)
    await idle.until_lost()
    assert server.connections == 1
    assert app.events == [("request", b"/1", b""), ("sent", b"/1", 200)]


async def test_a_graceful_end_loses_nothing(serve, app, kit):
    app.answers = False
    server = await serve.start(app)
    address = server.addresses[0]
    busy, idle, later = [await serve.connect(server) for _ in range(3)]
    busy.write(GET % 1 + GET % 2)
    await kit.until(lambda: len(app.exchanges) == 2)

    server.drain()
    app.answers = True
    later.write(GET % 3)
    await later.until_lost()
    assert b"connection: close" in later.received

    server.stop_accepting()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.get_running_loop().create_connection(asyncio.Protocol, *address)
    server.close_idle()
    await idle.until_lost()
    assert server.busy == 1

    ended = asyncio.ensure_future(server.wait_idle())
    await asyncio.sleep(0)
    assert not ended.done()
    app.exchanges[1].respond(200, [], b"two")
    app.exchanges[0].respond(200, [], b"one")
    await ended
    await busy.until_lost()
    head, _, rest = busy.received.partition(b"one")
    assert b"connection: close" not in head  # only the last answer announces the end
    assert b"connection: close" in rest
    assert rest.endswith(b"two")


async def test_waiting_for_idle_ends_when_the_last_client_leaves(serve, app, kit):
    app.answers = False
    server = await serve.start(app)
    await server.wait_idle()
    client = await serve.connect(server)
    client.write(GET % 1)
    await kit.until(lambda: app.exchanges)
    ended = asyncio.ensure_future(server.wait_idle())
    await asyncio.sleep(0)
    client.transport.abort()
    await ended
    assert app.events[-1] == ("disconnected", b"/1")


async def test_an_end_waits_until_the_last_byte_of_an_answer_is_sent(serve, app, kit):
    server = await serve.start(app, tick=0.01)
    client = await serve.connect(server)
    client.transport.pause_reading()
    size = 20_000_000  # more than the system holds for a client that does not read
    app.on_head = lambda exchange: exchange.respond(200, [], bytes(size))
    client.write(GET % 1)
    await kit.until(lambda: app.events)
    server.drain()
    server.stop_accepting()
    server.close_idle()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await server.wait_idle()
    client.transport.resume_reading()
    await server.wait_idle()
    server.abort()
    await client.until_lost()
    assert len(client.received) > size
