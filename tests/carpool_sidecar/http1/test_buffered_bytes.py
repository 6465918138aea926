"""What a server holds of request bodies, of all connections together: counted as it comes, bounded, given back once."""

from __future__ import annotations

import asyncio

import pytest
from forwarding_app import ForwardAll
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
HEAD = b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"
CHUNKED = b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
async def site(kit):
    """A server with room for 100 bytes, whose application only answers when a test makes it."""
    site = kit.Site(max_buffered_bytes=100, max_body_bytes=80)
    site.app.answers = False
    return site


def refused(written):
    return (
        b"HTTP/1.1 503 " in written and b"\r\nretry-after: 1\r\n" in written and b'"reason":"buffers-full"' in written
    )


async def test_a_body_is_counted_as_it_comes_and_until_its_answer(site):
    wire = site.connect()
    wire.feed(HEAD % 50)
    assert site.server.buffered_bytes == 0  # what is announced is not held
    for n in (10, 40):
        wire.feed(bytes(n))
    assert site.server.buffered_bytes == 50
    at_once = site.connect()
    at_once.feed(HEAD % 20 + bytes(20))
    assert site.server.buffered_bytes == 70
    site.app.exchanges[1].respond(200, [])
    assert site.server.buffered_bytes == 50
    site.app.exchanges[0].start(200, [], None)
    assert site.server.buffered_bytes == 50
    site.app.exchanges[0].end()
    assert site.server.buffered_bytes == 0
    for one in (wire, at_once):
        one.lose()
    assert site.server.buffered_bytes == 0


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD % 51 + bytes(51)],
        [HEAD % 51],
        [CHUNKED, b"33\r\n", bytes(50), b"x\r\n0\r\n\r\n"],
        [CHUNKED + b"33\r\n" + bytes(51) + b"\r\n0\r\n\r\n"],
    ],
)
async def test_a_request_without_room_is_refused_with_retry_after_and_others_go_on(site, pieces):
    first, second = site.connect(), site.connect()
    first.feed(HEAD % 60 + bytes(50))
    second.feed(*pieces)
    assert refused(second.written)
    # As after any refusal within a body, the client is read on for a moment, so that the answer reaches it.
    assert second.eof
    assert not second.closing
    assert site.server.buffered_bytes == 50
    assert site.app.events == [("sent", site.app.exchanges[1].target, 503)]
    first.feed(bytes(10))
    assert site.app.events[-1] == ("request", b"/p", bytes(60))
    second.lose()
    assert site.server.buffered_bytes == 60
    third = site.connect()
    third.feed(HEAD % 40 + bytes(40) + GET)  # exactly what is left, and none is needed for no body
    assert site.server.buffered_bytes == 100
    for exchange in (site.app.exchanges[0], *site.app.exchanges[2:]):
        exchange.respond(200, [])
    assert site.server.buffered_bytes == 0
    assert third.written.count(b"200 OK") == 2


async def test_a_refused_body_is_let_go_before_its_turn_to_be_answered(site):
    wire = site.connect()
    wire.feed(GET + CHUNKED + b"40\r\n" + bytes(64))
    assert site.server.buffered_bytes == 64
    site.connect().feed(HEAD % 30 + bytes(30))
    wire.feed(b"\r\n40\r\n" + bytes(64))  # over 80 as well, which is said first
    assert site.server.buffered_bytes == 30
    assert wire.written == b""
    site.app.exchanges[0].respond(200, [])
    assert b" 413 " in wire.written
    assert site.server.buffered_bytes == 30


@pytest.mark.parametrize("sent", [HEAD % 60 + bytes(59), HEAD % 60 + bytes(60), CHUNKED + b"40\r\n" + bytes(59)])
async def test_a_client_that_leaves_gives_back_what_it_had(site, sent):
    wire = site.connect()
    wire.feed(GET + sent)
    assert site.server.buffered_bytes > 58
    wire.lose(ConnectionResetError())
    assert site.server.buffered_bytes == 0
    for exchange in site.app.exchanges:
        exchange.respond(200, [])
    assert site.server.buffered_bytes == 0


async def test_slow_and_broken_bodies_are_given_back(site):
    slow, broken = site.connect(), site.connect()
    slow.feed(HEAD % 60 + bytes(50))
    broken.feed(CHUNKED + b"28\r\n" + bytes(40))
    assert site.server.buffered_bytes == 90
    broken.feed(b"no line break")
    assert b" 400 " in broken.written
    assert site.server.buffered_bytes == 50
    site.after(site.limits.body_timeout + 1)
    assert b" 408 " in slow.written
    assert site.server.buffered_bytes == 0


async def test_an_answer_before_the_end_of_the_body_gives_back_what_had_come(site):
    wire = site.connect()
    wire.feed(HEAD % 60 + bytes(50))
    site.app.exchanges[0].respond(403, [])
    assert site.server.buffered_bytes == 0
    wire.feed(bytes(10) + HEAD % 30 + bytes(30))  # the rest is skipped
    assert site.server.buffered_bytes == 30
    assert site.app.exchanges[1].body == bytes(30)


async def test_an_answer_that_waits_for_its_turn_gives_back_what_is_not_kept(site):
    wire = site.connect()
    wire.feed(GET + HEAD % 60 + bytes(50))
    site.app.exchanges[1].respond(403, [])
    wire.feed(bytes(10))
    assert site.server.buffered_bytes == 0
    site.app.exchanges[0].respond(200, [])
    assert site.server.buffered_bytes == 0
    assert wire.written.index(b"200 OK") < wire.written.index(b"403 Forbidden")


async def test_an_aborted_answer_gives_back(site):
    wire = site.connect()
    wire.feed(HEAD % 60 + bytes(60))
    site.app.exchanges[0].abort()
    wire.lose()
    assert site.server.buffered_bytes == 0


async def test_a_streamed_body_does_not_count(site, kit):
    sink = kit.Sink()
    site.app.on_head = lambda exchange: exchange.stream(sink)
    for sent in (HEAD % 500 + bytes(200), HEAD % 500 + bytes(500), CHUNKED + b"1f4\r\n" + bytes(500)):
        wire = site.connect()
        wire.feed(sent)
        assert site.server.buffered_bytes == 0
        wire.lose()
    assert sum(map(len, (event for event in sink.events if isinstance(event, bytes)))) == 1200


async def test_a_large_forwarded_body_needs_no_room_of_its_own(upstream, pool, serve):
    server = await serve.start(ForwardAll(pool), max_buffered_bytes=70_000)
    client = await serve.connect(server)
    seen = []
    script = upstream.script
    upstream.script = lambda peer, received: (seen.append(server.buffered_bytes), script(peer, received))
    body = bytes(range(256)) * 4_000
    client.write(HEAD % len(body) + body)
    await client.until(lambda: len(client.received) > len(body))
    client.write(HEAD % 60_000 + bytes(60_000))  # small enough to be read whole first
    await client.until(lambda: len(client.received) > len(body) + 60_000)
    assert set(seen) == {0, 60_000}
    assert server.buffered_bytes == 0


async def test_many_slow_uploads_never_hold_more_than_the_budget(serve, kit):
    app = kit.App()
    budget, size = 1_000_000, 200_000
    server = await serve.start(app, max_buffered_bytes=budget)
    clients = [await serve.connect(server) for _ in range(20)]
    for client in clients:
        client.write(CHUNKED + b"%x\r\n" % size)  # nothing is known in advance of how much will come
    most = 0
    for _ in range(20):
        for client in clients:
            if not client.ended:
                client.write(bytes(size // 20 - 1))
        for _ in range(10):
            await asyncio.sleep(0)
            most = max(most, server.buffered_bytes)
    await kit.until(lambda: sum(client.ended for client in clients) >= 15)
    assert 0.9 * budget < most <= budget
    assert all(refused(client.received) for client in clients if client.ended)
    for client in clients:
        client.transport.abort()
    await kit.until(lambda: not server.connections)
    assert server.buffered_bytes == 0


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["head", "chunks", "whole", "more", "answer", "leave", "late"])),
    max_size=60,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(steps=STEPS, size=st.integers(1, 60))
def test_whatever_happens_the_count_stays_in_bounds_and_ends_at_nothing(kit, steps, size):
    async def serve():
        site = kit.Site(max_buffered_bytes=100, max_body_bytes=80)
        site.app.answers = False
        wires = [site.connect() for _ in range(4)]
        for n, step in steps:
            wire = wires[n]
            match step:
                case "head":
                    wire.feed(HEAD % size)
                case "chunks":
                    wire.feed(CHUNKED + b"%x\r\n" % size + bytes(size) + b"\r\n")
                case "whole":
                    wire.feed(HEAD % size + bytes(size))
                case "more":
                    wire.feed(bytes(size // 2 + 1))
                case "answer":
                    for exchange in site.app.exchanges[n::4]:
                        exchange.respond(200, [])
                case "leave":
                    wire.lose()
                    wires[n] = site.connect()
                case "late":
                    site.after(site.limits.body_timeout / 2)
            queued = [exchange for one in wires for exchange in one.protocol._outgoing.queue]
            bodies = sum(exchange.buffered for exchange in queued)
            waiting = sum(one.protocol._wire._waiting for one in wires)  # counted without being asked for
            assert site.server.buffered_bytes == bodies + waiting
            assert 0 <= bodies <= 100
        for wire in wires:
            wire.lose()
        assert site.server.buffered_bytes == 0

    asyncio.run(serve())
