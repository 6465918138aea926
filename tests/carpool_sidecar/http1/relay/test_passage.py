"""What speaks something else than HTTP/1.1 reaches the upstream as it is, and on the way harms nobody."""

from __future__ import annotations

import asyncio

import pytest
from forwarding_app import ForwardAll
from hypothesis import given
from hypothesis import strategies as st

from carpool_sidecar.http1.client.connector import Connector
from carpool_sidecar.http1.client.pool import Pool
from carpool_sidecar.http1.relay.passage import Passage
from carpool_sidecar.http1.server.heads import PREFACE, speaks_http1
from carpool_sidecar.http1.server.server import Server

HTTP2 = PREFACE + b"\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
GET = b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.mark.parametrize(
    ("beginning", "spoken"),
    [
        (GET, True),
        (b"\r\nPOST ", True),
        (b"\r\n\r\nPOST ", True),
        (b"\r\n" * 4 + GET, True),
        (b"\r\n" * 5, False),
        (b"\r\n\r\n" + HTTP2, False),
        (b"\r\n\r\n\x16\x03\x01", False),
        (b"PRIX /", True),
        (b"FOO / HTTP/1.1", True),
        (HTTP2, False),
        (b"\x16\x03\x01\x02\x00", False),  # TLS
        (b"SSH-2.0-OpenSSH_9.6\r\n", False),
        (b"*1\r\n$4\r\nPING\r\n", False),
        (b"\x00", False),
        (b"x" * 33, False),
        (b"", None),
        (b"\r", None),
        (b"\r\n", None),
        (b"\r\n" * 4, None),
        (b"\r\n" * 3 + b"\r", None),
        (b"PRI * HTTP/2", None),
        (b"PO", None),
    ],
)
def test_the_first_bytes_say_what_is_spoken(beginning, spoken):
    assert speaks_http1(beginning) is spoken


@given(st.one_of(st.binary(max_size=40), st.text("\r\nP ", max_size=12).map(str.encode)), st.integers(0, 40))
def test_more_bytes_never_take_a_verdict_back(data, cut):
    early = speaks_http1(data[:cut])
    assert early is None or speaks_http1(data) is early


class App:
    """Forwards all, and takes note of what was passed through. Derives from nothing: compiled classes refuse that."""

    def __init__(self, pool):
        self.rest = ForwardAll(pool)
        self.pool = pool
        self.statuses = []
        self.lost = 0

    def foreign(self, exchange):
        exchange.context = Passage(exchange, self.pool, 60.0)
        exchange.context.begin()

    def sent(self, exchange):
        self.statuses.append(exchange.status)

    def disconnected(self, exchange):
        self.lost += 1
        self.rest.disconnected(exchange)

    def __getattr__(self, name):
        return getattr(self.rest, name)


@pytest.fixture
async def app(pool):
    return App(pool)


@pytest.fixture
async def server(app):
    server = Server(app, passage=app.foreign)
    await server.listen("127.0.0.1", 0)
    yield server
    server.stop_accepting()
    server.abort()


@pytest.fixture
async def connect(server):
    writers = []

    async def connect():
        reader, writer = await asyncio.open_connection(*server.addresses[0][:2])
        writers.append(writer)
        return reader, writer

    yield connect
    for writer in writers:
        writer.close()


@pytest.fixture
def echoing(upstream):
    upstream.script = lambda peer, received: peer.answer(received)


@pytest.mark.parametrize("said", [HTTP2, b"\x16\x03\x01" + bytes(range(256)), b"*1\r\n$4\r\nPING\r\n"])
async def test_bytes_pass_both_ways(echoing, upstream, app, connect, said):
    reader, writer = await connect()
    writer.write(said)
    assert await reader.readexactly(len(said)) == said
    (peer,) = upstream.peers
    peer.received = b""
    writer.write(b"more")
    assert await reader.readexactly(4) == b"more"
    assert app.statuses == [101]
    writer.write_eof()
    assert await reader.read() == b""


async def test_a_preface_in_pieces_is_one(echoing, upstream, connect):
    reader, writer = await connect()
    for position in range(len(HTTP2)):
        writer.write(HTTP2[position : position + 1])
        await asyncio.sleep(0)
    got = await reader.readexactly(len(HTTP2))
    assert got.startswith(PREFACE)


async def test_a_tunnel_never_takes_a_connection_that_served_a_request(upstream, connect, server):
    upstream.script = lambda peer, _: peer.answer(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    reader, writer = await connect()
    writer.write(GET)
    await reader.readuntil(b"ok")
    upstream.script = lambda peer, received: peer.answer(received)
    reader, writer = await connect()
    writer.write(HTTP2)
    assert await reader.readexactly(4) == HTTP2[:4]
    assert len(upstream.peers) == 2


async def test_behind_a_request_nothing_else_is_passed_through(echoing, upstream, connect):
    upstream.script = lambda peer, _: peer.answer(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    reader, writer = await connect()
    writer.write(GET + HTTP2)
    text = await reader.read()
    assert text.startswith(b"HTTP/1.1 200 ")
    assert b" 505 " in text or b" 400 " in text
    assert len(upstream.peers) == 1


async def test_a_request_behind_empty_lines_is_read(upstream, connect, app):
    asked = []
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    upstream.script = lambda peer, received: (asked.append(received), peer.answer(ok))
    reader, writer = await connect()
    writer.write(b"\r\n\r\n")
    await asyncio.sleep(0)
    writer.write(b"\r\n" + GET)
    await reader.readuntil(b"ok")
    assert asked == [GET]
    assert app.statuses == [200]


async def test_no_upstream_cuts_the_connection(app, connect, upstream):
    app.pool = Pool("127.0.0.1", 1)
    reader, writer = await connect()
    writer.write(HTTP2)
    with pytest.raises(ConnectionResetError):
        await reader.read()
    await app.pool.close()


async def test_tunnels_count_among_the_connections(echoing, app, upstream, connect):
    app.pool = Pool("127.0.0.1", upstream.port, max_connections=1)
    one, writer = await connect()
    writer.write(HTTP2)
    await one.readexactly(4)
    assert app.pool.connections == 1
    other, writer = await connect()
    writer.write(HTTP2)
    with pytest.raises(ConnectionResetError):
        await other.read()
    await app.pool.close()


@pytest.mark.pure
async def test_a_connection_that_is_cut_meanwhile_leaves_nothing(app, connect, server, upstream, monkeypatch):
    app.pool = Pool("127.0.0.1", upstream.port)
    asked, never = asyncio.Event(), asyncio.Event()

    async def hang(_connector, _made):
        asked.set()
        await never.wait()

    monkeypatch.setattr(Connector, "_open", hang)
    _, writer = await connect()
    writer.write(HTTP2)
    await asked.wait()
    server.abort()
    while app.pool._connector.attempts:  # noqa: ASYNC110 - a turn of the loop ends it
        await asyncio.sleep(0)
    assert app.lost == 1
    assert app.pool.connections == 0
    await app.pool.close()
